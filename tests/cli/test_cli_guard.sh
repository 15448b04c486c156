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

# A new run on several ranks has the guard of its preset.
run 0 train "${common[@]}" --model tiny --steps 2 --quiet --out plain
[ "$(column plain kept_factor | sort -u)" = 1.0 ] || fail "no guard by default: $(column plain kept_factor)"
grep -q "\"guard\": *\"*20" plain/metrics.jsonl || fail "the default guard is not recorded"

run 0 train "${common[@]}" --model tiny --steps 2 --guard off --quiet --out off
[ -z "$(column off kept_factor)" ] || fail "--guard off is ignored"

# Stopped and gone on with: the guard knows what it knew, and a warm-up of sparsity is where it was; forks begin anew.
recipe=(--model tiny --warmup 2 --lr 3e-3 --min-lr 3e-4 --exchange direct --sparsity 0.95 --quiet)
for way in "--guard 0.5" "--sparsity-warmup 9" "--guard 0.5 --sparsity-warmup 9 --sharding hybrid --ranks 4 --ranks-per-host 2"; do
    rm -rf whole half
    # shellcheck disable=SC2086
    run 0 train "${common[@]}" "${recipe[@]}" $way --steps 20 --out whole
    # shellcheck disable=SC2086
    run 0 train "${common[@]}" "${recipe[@]}" $way --steps 20 --save-every 6 --keep 9 --out half
    for step in 6 12; do
        rm -rf again && mkdir again && cp half/metrics.jsonl again && cp -r "$(printf half/step-%08d $step)" again
        run 0 train --out again --resume
        same_losses whole again
        diff <(column whole kept_factor; column whole n_kept) <(column again kept_factor; column again n_kept) >differ ||
            fail "$way, from step $step: $(head -n 4 differ | tr '\n' ' ')"
    done
done
[ "$(column whole kept_factor | sort -u | wc -l)" -gt 2 ] || fail "a guard that does nothing: no test of anything"
run 0 train "${common[@]}" "${recipe[@]}" --guard 0.5 --sparsity-warmup 9 --fork whole --steps 22 --out anew
column anew kept_factor | sort -u | grep -qx 1.0 || fail "a fork inherits the guard: $(column anew kept_factor)"
[ "$(column anew n_kept | head -n 1)" -gt "$((2 * $(column half n_kept | tail -n 1) / 8))" ] || fail "no warm-up in a fork"

# What has no effect is told.
run 0 train "${common[@]}" "${recipe[@]}" --steps 1 --no-quiet --exchange dense --guard 2 --sparsity-warmup 5
for option in guard sparsity-warmup; do
    grep -q "^note: --$option is for compressed gradients.* and has no effect here" out || fail "no note about --$option: $(cat out)"
done

# The residual's norm means the same where hosts hold one: what a fork of the same state leaves behind at once.
norm() { # <options>: after a step without an update
    run 0 train --data data --ranks 8 --batch-size 8 --eval-every never "${recipe[@]}" --lr 0 --min-lr 0 --guard 1e9 --steps 1 "$@" --out "norm"
    column norm residual_norm && rm -r norm
}
awk -v a="$(norm)" -v b="$(norm --two-level --ranks-per-host 4)" -v c="$(norm --sharding hybrid --ranks-per-host 4)" \
    'BEGIN { exit !(a > 0 && b > 0.8 * a && b < 1.1 * a && c > 0.8 * a && c < 1.1 * a) }' || fail "norms of residuals differ by hosts"
