#!/usr/bin/env bash
# A long run of the command, looked at from outside: does memory grow, do descriptors, do replicas stay the same, does it learn?
#   lab/studies/soak.sh MINUTES [tagc [options of tagc train]]
# Four ranks under mpirun, direct gradients, 4-bit deltas of the parameters whose replicas are compared by checksum every 100 gathers
# (a difference ends the run). Every 10 seconds the memory (VmRSS) and open descriptors of each rank are written down. It fails when the run
# ends, when the largest rank's memory in the last tenth is more than 4 MB above that of the second tenth, when a rank has more
# descriptors at the end than after the first tenth, or when the loss is not finite or has not fallen.
set -uo pipefail
[ $# -ge 1 ] || { sed -n '3s/^# *//p' "$0" >&2; exit 2; }
minutes=$1 tagc=$(realpath "${2:-build/tagc}")
shift $(($# > 1 ? 2 : 1))
folder=$(mktemp -d)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
job=
end() {
    [ -z "$job" ] || kill -TERM "$job" 2>/dev/null
    wait 2>/dev/null
    rm -rf "$folder"
}
trap end EXIT
root=$(realpath "$(dirname "$0")/../..")
"$tagc" data --quiet --out "$folder/data" "$root/lib" "$root/engine" "$root/docs" || exit 1
mpirun --oversubscribe -n 4 "$tagc" train --data "$folder/data" --model tiny --steps 1000000000 --warmup 100 --lr 1e-3 --min-lr 1e-3 \
    --sharding grad --exchange direct --gather delta4 --eval-every 100 --save-every 100 --timeout 600 --quiet --out "$folder/run" "$@" \
    >"$folder/log" 2>&1 </dev/null &
job=$!
begin=$SECONDS
while [ $((SECONDS - begin)) -lt $((minutes * 60)) ]; do
    sleep 10
    kill -0 $job 2>/dev/null || { echo "FAILED: the run has ended" >&2; tail -n 20 "$folder/log" >&2; exit 1; }
    for pid in $(pgrep -P $job -x tagc); do
        echo "$((SECONDS - begin)) $pid $(sed -n 's/^VmRSS:[^0-9]*\([0-9]*\).*/\1/p' /proc/"$pid"/status) $(find /proc/"$pid"/fd -type l | wc -l)"
    done >>"$folder/samples"
done
[ "$(awk '{print $2}' "$folder/samples" | sort -u | wc -l)" = 4 ] || { echo "FAILED: not four ranks" >&2; exit 1; }
values() { # <type of line> <field>
    grep "\"type\":\"$1\"" "$folder/run/metrics.jsonl" | grep -o "\"$2\":[^,}]*" | cut -d: -f2
}
values eval val_loss >"$folder/losses"
echo "steps: $(values step step | tail -n 1), evaluation losses: $(head -n 1 "$folder/losses") to $(tail -n 1 "$folder/losses")"
awk -v total=$((minutes * 60)) '
    { if ($1 > 0.1 * total && $1 <= 0.2 * total && $3 > early) early = $3; if ($1 > 0.9 * total && $3 > late) late = $3
      if ($1 > 0.1 * total && !($2 in first)) first[$2] = $4; last[$2] = $4 }
    END { printf "memory of the largest rank: %.1f MB in the second tenth, %.1f MB in the last\n", early / 1024, late / 1024
          for (pid in last) { printf "rank with pid %d: %d descriptors, then %d\n", pid, first[pid], last[pid]; if (last[pid] > first[pid]) bad = 1 }
          if (early == 0 || late > early + 4096) { print "FAILED: memory has grown"; exit 1 }
          if (bad) { print "FAILED: descriptors have grown"; exit 1 } }' "$folder/samples" || exit 1
awk 'NR == 1 { first = $1 } { last = $1; if ($1 + 0 != $1 || $1 != $1) bad = 1 } END { if (NR < 2 || bad || last >= first) { print "FAILED: the loss has not fallen"; exit 1 } }' \
    "$folder/losses"
