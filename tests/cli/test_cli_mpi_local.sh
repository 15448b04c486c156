#!/usr/bin/env bash
# Local steps under mpirun: sites of one and of two ranks do what threads do, bit for bit, also with a fragment under way in the
# checkpoint that they resume from.
source "$(dirname "$0")/lib.sh" "$@"
has_mpirun || skip "no mpirun, or tagc built without MPI"
make_data
# MPI keeps memory until the process ends; our own leaks show in the tests without it.
export ASAN_OPTIONS=detect_leaks=0

# same_checkpoints <run> <run> <ranks of a site> <site's folder>...
same_checkpoints() {
    local a=$1 b=$2 n=$3 rank site
    shift 3
    for site in "$@"; do
        for ((rank = 0; rank < n; rank++)); do
            cmp "$a/$site/step-00000009/rank-$rank.bin" "$b/$site/step-00000009/rank-$rank.bin" || fail "$a and $b differ in $site"
        done
    done
}

# check <name> <ranks of a site> <folders of the sites> <options>...: all of a run, and its second half after resuming.
check() {
    local name=$1 n=$2 sites=$3 site
    shift 3
    local options=("${tiny[@]}" --batch-size 1 --local-steps 4 --steps 9 --save-every 6 --keep 9 "$@")
    run 0 train "${options[@]}" --ranks 4 --out "$name-threads"
    mpi 4 train "${options[@]}" --out "$name-mpi" >out 2>err || fail "mpirun -n 4 tagc train: $name"
    same_losses "$name-threads" "$name-mpi"
    same_checkpoints "$name-threads" "$name-mpi" "$n" $sites
    for site in $sites; do
        mkdir -p "$name-resumed/$site"
        cp -r "$name-mpi/$site/step-00000006" "$name-resumed/$site/"
    done
    cp "$name-mpi/metrics.jsonl" "$name-resumed/"
    mpi 4 train --resume --quiet --out "$name-resumed" >out 2>err || fail "mpirun -n 4 tagc train --resume: $name"
    same_losses "$name-threads" "$name-resumed"
    same_checkpoints "$name-threads" "$name-resumed" "$n" $sites
}

check hybrid 2 ". site-1" --sharding hybrid --ranks-per-host 2 --local-fragments 2 --local-delay 1 --outer-lr 0.7 --outer-momentum 0.9
grep -q '"under_way": 4' hybrid-mpi/step-00000006/manifest.json || fail "nothing was under way"
check sites 1 ". site-1 site-2 site-3" --sharding none
