#!/usr/bin/env bash
# Local steps by the command: metrics, an exchange at the end, resuming in the middle of a round, what is refused.
source "$(dirname "$0")/lib.sh" "$@"
make_data
local=(--ranks 2 --sharding none --batch-size 2 --local-steps 4)

run 0 train "${tiny[@]}" --no-quiet "${local[@]}" --outer-lr 0.7 --outer-momentum 0.9 --steps 11 --save-every 6 --keep 9 --out a
grep -q "2 sites exchange how far their parameters moved every 4 steps" out || fail "no word of sites: $(cat out)"
[ "$(grep -o '"round":[0-9]*' a/metrics.jsonl | tr '\n' ' ')" = '"round":1 "round":2 "round":3 ' ] || fail "rounds: $(cat a/metrics.jsonl)"
for step in 2 3 5 6 7 9 10; do
    grep "\"step\":$step,.*\"type\":\"step\"\|\"type\":\"step\",\"step\":$step," a/metrics.jsonl >line || fail "step $step"
    grep -q '"n_bytes_sent":{"index":0,"values":0,"leftover":0,"result":0,"gather":0,"control":0}' line || fail "step $step sends: $(cat line)"
done
cmp <(tail -c +65 a/step-00000006/rank-0.bin) <(tail -c +65 a/site-1/step-00000006/rank-0.bin) >differ && fail "sites are alike in the middle of a round"
# Six steps, then the rest: both sites end with the bytes of the run that went through.
mkdir -p b/site-1
cp -r a/step-00000006 b/
cp -r a/site-1/step-00000006 b/site-1/
cp a/metrics.jsonl b/
run 0 train --resume --quiet --out b
for site in . site-1; do
    cmp "a/$site/step-00000011/rank-0.bin" "b/$site/step-00000011/rank-0.bin" || fail "$site after resuming"
done

# Two fragments, of which one is under way in the checkpoint.
run 0 train "${tiny[@]}" --no-quiet "${local[@]}" --local-fragments 2 --local-delay 1 --steps 11 --save-every 6 --keep 9 --out c
grep -q "every 4 steps, in 2 fragments, applied 1 step later" out || fail "no word of fragments: $(cat out)"
[ "$(grep -o '"round":[0-9]*' c/metrics.jsonl | tr '\n' ' ')" = '"round":1 "round":2 "round":3 "round":4 "round":7 ' ] || fail "rounds: $(cat c/metrics.jsonl)"
grep -q '"under_way": 4' c/step-00000006/manifest.json || fail "nothing under way: $(grep -A9 fragments c/step-00000006/manifest.json)"
mkdir -p d/site-1
cp -r c/step-00000006 d/
cp -r c/site-1/step-00000006 d/site-1/
cp c/metrics.jsonl d/
run 0 train --resume --quiet --out d
for site in . site-1; do
    cmp "c/$site/step-00000011/rank-0.bin" "d/$site/step-00000011/rank-0.bin" || fail "$site with fragments, after resuming"
done
run 1 train --resume --quiet --out d --steps 12 --local-delay 2
says "--local-delay is \"2\", but the checkpoint was made with \"1\""

run 1 train --resume --quiet --out b --steps 12 --ranks 3
says "was saved by 2 sites of 1 ranks, here are 3 of 1"
run 1 train --resume --quiet --out b --steps 12 --local-steps 5
says "--local-steps is \"5\", but the checkpoint was made with \"4\""
run 0 train "${tiny[@]}" --fork a --ranks 3 --sharding none --batch-size 2 --local-steps 5 --steps 13
run 0 eval --from a --data data --batches 2 --batch-size 2

run 2 train "${tiny[@]}" --sharding full --local-steps 4
says "--local-steps is 4 with --sharding full, allowed: none (each rank is a site) or hybrid"
run 2 train "${tiny[@]}" "${local[@]}" --exchange packed
says "--local-steps is 4 with --exchange packed, allowed: dense or direct"
run 2 train "${tiny[@]}" "${local[@]}" --local-fragments 5
says "--local-fragments is 5, allowed: 1 to --local-steps, which is 4"
run 2 train "${tiny[@]}" "${local[@]}" --local-delay 4
says "--local-delay is 4, allowed: 0 to 3, less than --local-steps"
run 2 train "${tiny[@]}" "${local[@]}" --guard 2
says "--guard is 2 with --local-steps"
run 2 train "${tiny[@]}" "${local[@]}" --outer-momentum 1
says "--outer-momentum" "0.999999"

# A benchmark says what they gain.
run 0 bench --model tiny --ranks 2 --batch-size 1 --rounds 1 --steps-per-round 1 --warmup-steps 1 --only arms --arms ddp,local-30-delay --json bench.json
grep -q "Local steps: local-30-delay is" out || fail "bench: $(cat out)"

# A plan tells both ways, and which is faster.
run 0 plan --model tiny --arms zero2-bf16,local-30,local-30-delay --compute-s 0.1 --codec-ns 5 --link-rate 100kbit,100gbit --latency 1ms
grep -q "local steps are [0-9.]* times as fast" out || fail "plan: $(cat out)"
grep -q "exchange at every step; local steps would be" out || fail "plan: $(cat out)"
