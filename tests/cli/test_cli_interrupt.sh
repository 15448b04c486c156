#!/usr/bin/env bash
# Ctrl-C: one line, exit code 130, a checkpoint to go on from, and the run goes on as if nothing had been.
source "$(dirname "$0")/lib.sh" "$@"
make_data

reaches() { # <steps> <run>, which goes on in the background
    for _ in $(seq 1500); do
        [ "$(grep -c '"type":"step"' "$2/metrics.jsonl" 2>/dev/null)" -ge "$1" ] 2>/dev/null && return
        sleep 0.02
    done
    fail "$2 has not reached step $1 within half a minute"
}

options=("${tiny[@]}" --batch-size 2 --ranks 2 --save-every 100000)
# A process in the background ignores SIGINT from a shell without job control, unless it asks for it: ours does.
"$tagc" train "${options[@]}" --steps 100000 --out broken >out 2>err &
pid=$!
reaches 5 broken
kill -INT $pid
code=0
wait $pid || code=$?
[ $code = 130 ] || fail "exit code $code instead of 130"
says "interrupted after step" "saved in broken"
ls broken | grep -q '^step-' || fail "no checkpoint"

# The same where the terminal is gone, unless nohup has asked to go on without it.
"$tagc" train "${options[@]}" --steps 100000 --out hung >out 2>err &
pid=$!
reaches 3 hung
kill -HUP $pid
code=0
wait $pid || code=$?
[ $code = 130 ] || fail "exit code $code instead of 130 after SIGHUP"
says "interrupted after step" "saved in hung"
(trap '' HUP && exec "$tagc" train "${options[@]}" --steps 100000 --out nohup) >out 2>err &
pid=$!
reaches 3 nohup
kill -HUP $pid
reaches $(($(grep -c '"type":"step"' nohup/metrics.jsonl) + 3)) nohup
kill -INT $pid
wait $pid

# A signal before the first step is kept until after it. Here the run waits for the shape of its weights.
run 0 export --from broken --out weights
mv weights/config.json shape.json
mkfifo weights/config.json
"$tagc" train --data data --quiet --init-from weights --batch-size 1 --steps 100000 --out early >out 2>err &
pid=$!
sleep 0.5
kill -TERM $pid
sleep 0.2
timeout 20 cp shape.json weights/config.json || fail "it does not wait for the shape any more"
code=0
wait $pid || code=$?
[ $code = 130 ] || fail "exit code $code instead of 130 after SIGTERM before the first step"
says "interrupted after step 1 " "saved in early"

# A reader of its progress that goes away does not end it.
("$tagc" train "${options[@]}" --no-quiet --steps 40 --out piped 2>/dev/null; true) | head -n 1 >/dev/null
[ "$(column piped loss | wc -l)" = 40 ] || fail "a run ended with the reader of its progress: $(column piped loss | wc -l) steps"

# Where it stopped is where it goes on: as a run of as many steps that was never stopped. The rate stays, whatever --steps says.
steady=("${options[@]}" --lr 1e-3 --min-lr 1e-3 --warmup 0 --eval-every never)
for how in "--sharding full" "--sharding grad --exchange direct --sparsity 0.9 --gather delta4"; do
    rm -rf cut whole
    "$tagc" train "${steady[@]}" $how --steps 100000 --out cut >out 2>err &
    pid=$!
    reaches 4 cut
    kill -TERM $pid
    code=0
    wait $pid || code=$?
    [ $code = 130 ] || fail "exit code $code instead of 130"
    n=$(column cut loss | wc -l)
    run 0 train --quiet --out cut --resume --steps $((n + 5))
    run 0 train "${steady[@]}" $how --steps $((n + 5)) --out whole
    [ "$(column cut loss | wc -l)" = $((n + 5)) ] || fail "$(column cut loss | wc -l) steps, stopped after $n"
    same_losses whole cut
done

# The first one waits for the end of the step, which takes minutes here; a second one ends the run at once, and nothing is
# saved. Threads that still run are then no leak to report.
TSAN_OPTIONS="${TSAN_OPTIONS:-}:report_thread_leaks=0" "$tagc" train "${options[@]}" --accumulate 65536 --steps 2 --out twice >out 2>err &
pid=$!
for _ in $(seq 1500); do
    grep -q '"type":"eval"' twice/metrics.jsonl 2>/dev/null && break
    sleep 0.02
done
kill -INT $pid || fail "the run has ended before its first step"
sleep 0.5
kill -INT $pid 2>/dev/null || fail "the first signal does not wait for the end of the step"
for _ in $(seq 300); do
    sleep 0.1
    kill -INT $pid 2>/dev/null || break # signals that come while one is pending count once
done
kill -KILL $pid 2>/dev/null && fail "still there half a minute after the second signal"
code=0
wait $pid || code=$?
[ $code = 130 ] || fail "exit code $code instead of 130 after two signals"
grep -q "interrupted after step" err && fail "the second signal waits for the end of the step"
ls twice | grep -q '^step-' && fail "a step that was not done is saved"
true
