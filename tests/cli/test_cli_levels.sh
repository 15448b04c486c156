#!/usr/bin/env bash
# The schedule of a run: units come to their last level, begin anew where compression fails them, and decide alike after a
# checkpoint. What happens is told once and stands in the metrics.
source "$(dirname "$0")/lib.sh" "$@"
make_data

common=(--data data --batch-size 2 --eval-every never)
levels() { grep '"type":"step"' "$1/metrics.jsonl" | grep -o '"levels":{[^}]*}'; }
# at <level>: units there, one number per line of what levels prints.
at() { grep -o "\"$1\":[0-9]*" | cut -d: -f2; }

# Random weights send every value in 8 bits for 60 steps; then, and in a trained model at once, in 4 bits.
run 0 train "${common[@]}" --ranks 2 --model tiny --steps 62 --no-quiet --out young
grep -qx "at first: every value in 8 bits, then in 4 bits until gradients are mostly noise" out || fail "young: $(cat out)"
grep -q -- "--compressed-beta1 0.5 " out || fail "the first moment becomes short: $(cat out)"
grep -q -- "--compressed-beta2" out && fail "what the schedule chooses is no option: $(cat out)"
n=$(levels young | head -n 1 | at fresh)
[ "$n" -ge 6 ] || fail "units that follow the schedule: $n"
[ "$(levels young | at fresh | uniq -c | xargs)" = "60 $n 2 0" ] || fail "fresh: $(levels young | at fresh | uniq -c)"
[ "$(levels young | at every | uniq -c | xargs)" = "60 0 2 $n" ] || fail "every: $(levels young | at every | uniq -c)"

run 0 train "${common[@]}" --ranks 2 --model tiny --steps 300 --warmup 5 --lr 0.01 --min-lr 0.005 --exchange dense --compress none \
    --quiet --out base
[ -z "$(levels base)" ] || fail "a dense run has levels"
recipe=(--lr 0.002 --min-lr 0.002 --compress all --exchange direct)
run 0 train "${common[@]}" --ranks 2 --fork base --steps 480 "${recipe[@]}" --no-quiet --out grown
grep -qx "at first: every value in 4 bits until gradients are mostly noise" out || fail "fork: $(cat out)"
[ "$(grep -c 'gradients are mostly noise: they go on by --sparsity' out)" = 1 ] || fail "not told once: $(cat out)"
[ "$(levels grown | at every | head -n 1)" -gt 0 ] && [ "$(levels grown | at largest | sort -n | tail -n 1)" -gt 0 ] ||
    fail "levels: $(levels grown | uniq -c)"
[ "$(levels grown | tail -n 1)" = "\"levels\":{\"fresh\":0,\"every\":0,\"largest\":0,\"last\":$(levels grown | at every | head -n 1)}" ] ||
    fail "not at the end: $(levels grown | uniq -c)"
paste <(levels grown | at last) <(column grown n_sent) | awk '$1 == 0 && n == 0 { n = $2 } { last = $2 }
    END { exit !(last < 0.1 * n) }' || fail "what is kept does not follow the levels"
# A fork begins anew; a resumed run does not.
run 0 train "${common[@]}" --ranks 2 --fork grown --steps 481 "${recipe[@]}" --quiet --out anew
[ "$(levels anew | at last)" = 0 ] || fail "a fork inherits levels: $(levels anew)"

# A rate that drives the loss up: every value again, told once with its reason.
cp -r grown wild
run 0 train --out wild --resume --steps 560 --lr 0.3 --min-lr 0.3 --no-quiet
grep -q "^at first" out && fail "a resumed run is no beginning"
[ "$(grep -c 'the loss has risen .* % above its lowest: .* travels for a while' out)" -ge 1 ] || fail "no alarm: $(cat out)"
levels wild | tail -n 80 | at every | awk '{ n += $1 > last; last = $1 } END { exit !(n > 0) }' || fail "no unit began anew"

# Options that turn it off.
for way in "--gentle no" "--sparsity 0.9"; do
    # shellcheck disable=SC2086
    run 0 train "${common[@]}" --ranks 2 --model tiny --steps 2 $way --quiet --out off
    [ -z "$(levels off)" ] || fail "$way: $(levels off)"
    rm -r off
done

# Stopped and gone on with, in a window and between two: the schedule knows what it knew.
ways=("--ranks 4 --sharding hybrid --ranks-per-host 2 --exchange direct" "--ranks 3 --compressed-beta1 0")
steps=(351 429)
[ $sanitized = no ] || { ways=("${ways[1]}") steps=(351); } # the others run the same code
for way in "${ways[@]}"; do
    rm -rf whole half
    # shellcheck disable=SC2086
    run 0 train "${common[@]}" --fork base --steps 430 --lr 0.002 --min-lr 0.002 $way --quiet --out whole
    # shellcheck disable=SC2086
    run 0 train "${common[@]}" --fork base --steps 430 --lr 0.002 --min-lr 0.002 $way --quiet --save-every 39 --keep 9 --out half
    for step in "${steps[@]}"; do
        rm -rf again && mkdir again && cp half/metrics.jsonl again && cp -r "$(printf half/step-%08d $step)" again
        run 0 train --out again --resume
        same_losses whole again
        diff <(levels whole; column whole n_sent) <(levels again; column again n_sent) >differ ||
            fail "$way, from step $step: $(head -n 4 differ | tr '\n' ' ')"
    done
    [ "$(levels whole | uniq | wc -l)" -ge 3 ] || fail "$way: a schedule that does nothing: $(levels whole | uniq -c)"
done

# Another number of ranks goes on from the same levels, with new windows.
run 0 train --out again --resume --ranks 2 --steps 440
[ "$(levels again | sed -n 131p)" = "$(levels whole | sed -n 130p)" ] || fail "levels after 3 ranks: $(levels again | tail -n 3)"

# What has no effect is told, and what is gone is not known.
run 0 train "${common[@]}" --model tiny --steps 1 --no-quiet --exchange dense --gentle yes
grep -q "^note: --gentle is for --exchange direct and has no effect here" out || fail "no note about --gentle: $(cat out)"
for option in guard sparsity-warmup; do
    run 2 train "${common[@]}" --model tiny --steps 1 --$option 5
    says "--$option"
done
