#!/usr/bin/env bash
# The guard: a run that blows up without it does not with it; what it does is told once and stands in the metrics.
source "$(dirname "$0")/lib.sh" "$@"
make_data

common=(--data data --ranks 2 --batch-size 2 --eval-every never)
run 0 train "${common[@]}" --model tiny --steps 300 --warmup 5 --lr 0.01 --min-lr 0.005 --exchange dense --compress none \
    --quiet --out base
# A thousandth of the gradient, and a first moment of a hundred steps behind it: old news, repeated.
wild=(--fork base --steps 500 --warmup 0 --lr 0.01 --min-lr 0.01 --compress all --exchange packed --sparsity 0.999
    --compressed-beta1 0.99)
run 0 train "${common[@]}" "${wild[@]}" --quiet --out without
run 0 train "${common[@]}" "${wild[@]}" --guard 3 --no-quiet --out with
cp out guarded
at_end() { column "$1" loss | tail -n 20 | awk '{ sum += $1 } END { print sum / NR }'; }
before=$(column base loss | tail -n 1)
awk -v b="$before" -v x="$(at_end without)" 'BEGIN { exit !(x > 5 && x > 5 * b) }' ||
    fail "without the guard the loss is $(at_end without) after $before: no test of anything"
awk -v x="$(at_end with)" 'BEGIN { exit !(x < 4) }' || fail "with the guard the loss is $(at_end with)"

# Every change is told once, and the metrics have the factor of every step.
column with kept_factor | awk '{ n += NR > 1 ? $1 != last : $1 != 1; last = $1 } END { print n }' >changes
[ "$(grep -c 'guard: ' guarded)" = "$(cat changes)" ] || fail "$(cat changes) changes, but told: $(grep -c 'guard: ' guarded)"
[ "$(cat changes)" -ge 4 ] || fail "only $(cat changes) changes"
grep -q 'guard: the residual has outgrown the gradient; sends 2 times' guarded || fail "no reason"
[ "$(column with kept_factor | wc -l)" = 200 ] || fail "steps without a factor"
[ -z "$(column without kept_factor)" ] || fail "a factor without a guard"
# What it asks for is what is sent.
paste <(column with kept_factor) <(column with n_kept) |
    awk 'NR > 1 && last == 8 { n++; if ($2 < 7 * first || $2 > 8.5 * first) bad = 1 } NR == 1 { first = $2 } { last = $1 }
        END { exit !(n > 0 && !bad) }' || fail "what is kept does not follow the factor"

# A calm run is left alone.
run 0 train "${common[@]}" --fork base --steps 340 --warmup 0 --lr 0.003 --min-lr 0.003 --compress all --exchange packed \
    --sparsity 0.9 --guard 10 --quiet --out calm
[ "$(column calm kept_factor | sort -u)" = 1.0 ] || fail "a calm run is guarded: $(column calm kept_factor | sort -u)"
