#!/usr/bin/env bash
# Trains under mpirun although ranks die. MPI ends the whole job then; this begins it again from the newest checkpoint, or at step 0,
# with as many ranks as there are now. It ends when the run does, when it is interrupted, or when three starts in a row bring no new checkpoint.
#
#   supervise.sh N_RANKS OUT [mpirun's options] -- options of tagc train
#   supervise.sh 4 runs/first -- --data data/text --steps 10000 --save-every 100
#   supervise.sh ./ranks.sh runs/first --hostfile hosts -- --data data/text --steps 10000 --save-every 100
#
# N_RANKS: a number, or a command that prints one; it is asked before each start, and may write the host file as well.
# $TAGC: the command, tagc by default.
set -uo pipefail
[ $# -ge 3 ] || { sed -n '5,7s/^# *//p' "$0" >&2; exit 2; }
n_ranks=$1 out=$2
shift 2
launcher=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do launcher+=("$1"); shift; done
[ $# -gt 0 ] || { echo "supervise: \"--\" is missing before the options of tagc train" >&2; exit 2; }
shift

newest() { find "$out" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1; }
is_interrupted=no n_idle=0
trap 'is_interrupted=yes' INT TERM
while :; do
    n=$n_ranks
    [[ $n =~ ^[0-9]+$ ]] || n=$($n_ranks)
    [[ $n =~ ^[1-9][0-9]*$ ]] || { echo "supervise: the number of ranks is \"$n\", must be 1 or more" >&2; exit 2; }
    before=$(newest) resume=()
    [ -z "$before" ] && [ ! -e "$out/metrics.jsonl" ] || resume=(--resume) # without a checkpoint it begins again at step 0
    code=0
    mpirun "${launcher[@]}" -n "$n" "${TAGC:-tagc}" train --out "$out" "${resume[@]}" "$@" || code=$?
    [ $code != 0 ] && [ $is_interrupted = no ] || exit $code
    now=$(newest)
    [ "$now" = "$before" ] && n_idle=$((n_idle + 1)) || n_idle=0
    [ $n_idle -lt 3 ] || { echo "supervise: three starts in a row brought no new checkpoint in $out" >&2; exit $code; }
    echo "supervise: $n ranks ended with exit code $code; again from ${now:-step 0}" >&2
    sleep 1
done
