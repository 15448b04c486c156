#!/usr/bin/env bash
# Under every limit of the address space a run ends by itself: it trains, or a message says what there was no room for. Both ranks may come
# to the limit at the same time, each by another thread that it cannot start.
source "$(dirname "$0")/lib.sh" "$@"
[ "$sanitized" = no ] || skip "sanitizers need the whole address space"
make_data
unset OPENBLAS_NUM_THREADS # as a user has it

n_ended=0 n_trained=0
for kib in 60000 110000 170000 240000 310000 330000 345000 355000 365000 380000 400000 430000 470000 510000 560000 4000000; do
    code=0
    (ulimit -v "$kib" && timeout -s KILL 200 "$tagc" train "${tiny[@]}" --ranks 2 --steps 2 --timeout 300) >out 2>err || code=$?
    [ "$code" = 0 ] && n_trained=$((n_trained + 1)) && continue
    # 127, 130: libraries that could not be loaded
    [ "$code" = 1 ] || [ "$kib" -lt 100000 ] || fail "exit code $code under ulimit -v $kib"
    [ "$code" -lt 137 ] || fail "a run under ulimit -v $kib had to be killed"
    [[ $code != 1 || $(grep -c '^tagc: ' err) =~ ^[12]$ ]] || fail "$(grep -c '^tagc: ' err) messages under ulimit -v $kib"
    n_ended=$((n_ended + 1))
done
[ "$n_trained" -ge 1 ] && [ "$n_ended" -ge 3 ] || fail "$n_trained limits let it train, $n_ended did not"
