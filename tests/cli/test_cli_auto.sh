#!/usr/bin/env bash
# --exchange auto from the command line: begins dense, settles and says so, goes on from wherever it was saved, on threads
# and over MPI, with every sharding; counts nothing of its own measurements; what has no effect is told.
# What it chooses is tested with links and times made up, in test_auto_turns.c and plan/test_choose.c.
source "$(dirname "$0")/lib.sh" "$@"
make_data
export ASAN_OPTIONS=detect_leaks=0

settles() { # <times> in out
    [ "$(grep -c '^auto: .* stays: ' out)" = "$1" ] || fail "does not say once how it settles: $(grep '^auto:' out)"
}
first() { column "$1" loss | head -n 5; }
bits() { grep '"type":"step"' "$1/metrics.jsonl" | grep -o '"bits_sent_per_param":{[^}]*}' | grep -o "\"$2\":[^,}]*" | cut -d: -f2; }
recipe=(--exchange auto --sparsity 0.9 --batch-size 2 --no-quiet)

shardings="full grad none" resumed_at="2 5 6 8 11"
# The choice is the same code with every sharding and from every step.
[ $sanitized = no ] || shardings=full resumed_at="5 11"
for sharding in $shardings; do
    run 0 train "${tiny[@]}" "${recipe[@]}" --sharding $sharding --ranks 2 --steps 40 --out auto-$sharding
    settles 1
    grep -q "^auto: link [0-9.e+]* Gbit/s, .* a dense step takes " out || fail "no reason: $(grep '^auto:' out)"
    grep -q "^gradients: where it pays, direct int2, sparsity 90 %, .*; mild int4" out || fail "headline: $(grep gradients: out)"
    run 0 train "${tiny[@]}" --exchange dense --compressed-beta1 0 --batch-size 2 --sharding $sharding --ranks 2 --steps 40 --out dense-$sharding
    # The first five steps are dense, and what measuring sent is not among their bytes.
    diff <(first auto-$sharding) <(first dense-$sharding) >differ || fail "$sharding: not dense at first: $(head -n 2 differ)"
    for leg in gather values; do
        diff <(bits auto-$sharding $leg | head -n 1) <(bits dense-$sharding $leg | head -n 1) >differ ||
            fail "$sharding: $leg of the first step: $(tr '\n' ' ' <differ)"
    done
done

# From a checkpoint of every step of the search; a fork as well, and another number of ranks.
run 0 train "${tiny[@]}" "${recipe[@]}" --ranks 2 --steps 14 --save-every 1 --keep 20 --out steps
# A search takes up to 30 steps, three turns of ten, if times are close.
for step in $resumed_at; do
    rm -rf from
    run 0 train --resume "$(printf steps/step-%08d $step)" --steps 44 --out from --no-quiet
    settles 1
    [ "$(column from loss | wc -l)" = $((44 - step)) ] || fail "resumed at $step, $(column from loss | wc -l) steps"
done
run 0 train "${tiny[@]}" "${recipe[@]}" --ranks 3 --fork steps --steps 46 --out forked
settles 1
run 0 train --resume steps/step-00000006 --ranks 1 --steps 12 --out alone --no-quiet
grep -q "^auto: dense stays: of one rank nothing travels" out || fail "one rank: $(grep '^auto:' out)"
run 0 eval --from steps --data data --batches 2 --ranks 1 --batch-size 2
run 0 info steps

# One rank has no other to send to: it selects nothing, and its second moment is that of a dense run, also once there were enough
# updates for a longer one.
run 0 train "${tiny[@]}" "${recipe[@]}" --ranks 1 --steps 12 --beta2 0.5 --out one
run 0 train "${tiny[@]}" --exchange dense --compressed-beta1 0 --batch-size 2 --ranks 1 --steps 12 --beta2 0.5 --out one-dense
same_losses one one-dense
run 0 train "${tiny[@]}" "${recipe[@]}" --sharding hybrid --ranks 4 --ranks-per-host 2 --steps 40
settles 1
run 0 train "${tiny[@]}" "${recipe[@]}" --two-level --ranks 4 --ranks-per-host 2 --steps 40
settles 1
# Settings none of which is like another: every code that can be asked about is measured.
run 0 train "${tiny[@]}" "${recipe[@]}" --sparsity 0 --values int4 --mild int8 --mild-sparsity 0.8 --ranks 2 --steps 40
settles 1
run 0 train "${tiny[@]}" "${recipe[@]}" --compress none --mild int4 --ranks 2 --steps 40
settles 1
grep -q "^gradients: where it pays, mild int4" out || fail "headline: $(grep gradients: out)"
# With what else changes how much is sent.
run 0 train "${tiny[@]}" "${recipe[@]}" --ranks 2 --steps 40 --guard 0.5 --sparsity-warmup 8 --compressed-beta1 0
settles 1

# What has no effect is told, and what makes no sense refused.
run 0 train "${tiny[@]}" "${recipe[@]}" --ranks 2 --steps 2 --mild dense --index sum4 --ratio 10
grep -q "^gradients: where it pays, direct .*; the rest dense" out && ! grep -q "mild int" out || fail "--mild dense: $(cat out)"
for option in index ratio; do grep -q "^note: --$option .* no effect" out || fail "no note about --$option: $(cat out)"; done
run 2 train "${tiny[@]}" --exchange automatic
says "--exchange is \"automatic\"" "auto"
run 2 train "${tiny[@]}" --exchange packed --sharding hybrid --ranks-per-host 2
says "allowed: dense, direct or auto"
run 1 train --resume steps --exchange direct --steps 50 --out refused
says "--exchange is \"direct\", but the checkpoint was made with \"auto\""

has_mpirun || exit 0
mpi 2 train "${tiny[@]}" "${recipe[@]}" --steps 40 --out mpi >out 2>err || fail "mpirun -n 2 tagc train --exchange auto"
settles 1
diff <(first mpi) <(first auto-full) >differ || fail "over MPI: $(head -n 2 differ)"
