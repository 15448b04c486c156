#!/usr/bin/env bash
# examples/supervise.sh: ranks are killed in the middle of a run, which goes on with more or fewer of them from the newest checkpoint.
source "$(dirname "$0")/lib.sh" "$@"
has_mpirun || skip "no mpirun, or tagc built without MPI"
make_data
supervise=$(realpath "$here/../../examples/supervise.sh")
export ASAN_OPTIONS=detect_leaks=0 TAGC=$tagc

# Asked before each start: 3 ranks, then 2, then 1. Whenever a checkpoint has come since, one rank of the job dies by SIGKILL.
cat >ranks.sh <<'EOF'
#!/bin/sh
echo start >>starts
case $(grep -c . starts) in 1) echo 3 ;; 2) echo 2 ;; *) echo 1 ;; esac
EOF
chmod +x ranks.sh
steady=(--data data --model tiny --warmup 0 --lr 1e-3 --min-lr 1e-3 --eval-every never --batch-size 2 --save-every 5 --timeout 60)
steady+=(--sharding grad --exchange direct --sparsity 0.9 --gather delta4)

"$supervise" ./ranks.sh run --oversubscribe -- "${steady[@]}" --steps 1000000 >out 2>err &
pid=$!
end_all() { job=$(pgrep -P $pid -x mpirun); kill -KILL $pid $(pgrep -P "$job") $job 2>/dev/null; }
trap end_all EXIT
newest() { find run -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1; }
ranks_of() { pgrep -P "$(pgrep -P $pid -x mpirun)" -x tagc; }
waits_for() { # <number of starts>: and a checkpoint that the last of them wrote
    for _ in $(seq 2400); do
        [ "$(grep -c . starts 2>/dev/null)" = "$1" ] && [ -n "$(newest)" ] && [ "$(newest)" != "$before" ] && return
        kill -0 $pid 2>/dev/null || fail "the supervisor has ended"
        sleep 0.05
    done
    fail "no new checkpoint after start $1: $(ls run)"
}
before=
for n in 1 2; do
    waits_for $n
    [ "$(ranks_of | wc -l)" = $((4 - n)) ] || fail "start $n has $(ranks_of | wc -l) ranks"
    victim=$(ranks_of | tail -n 1)
    kill -KILL "$victim"
    for _ in $(seq 2400); do [ "$(grep -c . starts)" -gt $n ] && break; sleep 0.05; done
    before=$(newest)
done
waits_for 3
grep -q "3 ranks ended with exit code 137; again from run/step-" err || fail "the first end is not told"
grep -q "note: saved by 3 ranks, going on with 2" out || fail "no note about the number of ranks"

# A signal to both, as from a terminal, is no failure to begin again after.
interrupt() {
    job=$(pgrep -P $pid -x mpirun)
    kill -TERM $pid
    kill -TERM "$job"
    code=0
    wait $pid || code=$?
    trap - EXIT
}
interrupt
[ $code != 0 ] && [ "$(grep -c . starts)" = 3 ] || fail "exit code $code, $(grep -c . starts) starts"

# What is left is one run: each step once, and the losses of a run that nothing happened to.
last=$(newest)
last=$((10#${last##*-}))
run 0 train --quiet --out run --resume --ranks 1 --steps $((last + 2))
[ "$(column run step | sort -n | uniq | wc -l)" = $((last + 2)) ] && [ "$(column run step | wc -l)" = $((last + 2)) ] ||
    fail "$(column run step | wc -l) steps in metrics.jsonl, must be $((last + 2))"
echo "$last steps"

# A death before the first checkpoint: the run begins again at step 0.
rm starts
"$supervise" ./ranks.sh early --oversubscribe -- "${steady[@]}" --save-every end --steps 1000000 >out 2>err &
pid=$!
trap end_all EXIT
steps_of() { # <ranks>: waits for the third step of a start with so many
    for _ in $(seq 2400); do
        grep -qs "\"world_size\":$1" early/metrics.jsonl && column early step | grep -qx 3 && return
        kill -0 $pid 2>/dev/null || fail "the supervisor has ended"
        sleep 0.05
    done
    fail "$1 ranks make no steps"
}
steps_of 3
kill -KILL "$(ranks_of | tail -n 1)"
steps_of 2
interrupt
grep -q "again from step 0" err && grep -q "early holds no checkpoint yet: the run begins again at step 0" out ||
    fail "does not say that it begins again"
last=$(find early -maxdepth 1 -name 'step-*')
diff <(column early step) <(seq $((10#${last##*-}))) >/dev/null || fail "steps are missing or twice"

# Nothing that starting again could mend: three times, and not for ever.
code=0
timeout 100 "$supervise" 1 none --oversubscribe -- "${steady[@]}" --data nowhere --steps 5 >out 2>err || code=$?
[ $code != 0 ] && [ $code != 124 ] || fail "exit code $code where there are no data"
grep -q "three starts in a row brought no new checkpoint in none" err || fail "does not say why it ends"
[ "$(grep -c '^supervise: ' err)" = 3 ] || fail "not three starts"
code=0
"$supervise" 2 none --data nowhere >out 2>err || code=$?
[ $code = 2 ] && grep -q '"--" is missing' err || fail "exit code $code without --"
code=0
"$supervise" "echo no" none -- "${steady[@]}" >out 2>err || code=$?
[ $code = 2 ] && grep -q 'the number of ranks is "no"' err || fail "exit code $code for no number of ranks"
