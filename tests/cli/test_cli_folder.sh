#!/usr/bin/env bash
# One folder holds one run, whatever happens: a second run, a run that goes back, a stop in the middle of a save, a closed
# terminal.
source "$(dirname "$0")/lib.sh" "$@"
make_data

run 0 train "${tiny[@]}" --steps 6 --batch-size 1 --save-every 2 --keep 9 --out run
# A new run, or another one's continuation, does not mix with what is there.
run 1 train "${tiny[@]}" --steps 6 --batch-size 1 --out run
says "run holds a run already" "--resume"
run 0 train "${tiny[@]}" --steps 4 --batch-size 1 --out other
cp run/metrics.jsonl before
run 1 train --quiet --out run --resume other --steps 9
says "run holds another run already"
# Going back would leave newer steps of what the run was before.
run 1 train --quiet --out run --resume run/step-00000002 --steps 9
says "run holds step 6, past step 2"
cmp before run/metrics.jsonl || fail "a refused run changed the metrics"
# A run that goes on saves steps that this one has not read: that it goes on is what counts.
exec 9<run/metrics.jsonl
flock -x 9
run 1 train --quiet --out run --resume run/step-00000002 --steps 9
says "another run is writing there"
exec 9<&-
run 0 train --quiet --out back --resume run/step-00000002 --steps 4
[ "$(ls -d back/step-*)" = back/step-00000004 ] || fail "going on elsewhere"
rm -r run/step-00000006 run/step-00000004
run 0 train --quiet --out run --resume --steps 5
[ "$(column run loss | wc -l)" = 5 ] || fail "metrics of a run that went back"
# Damaged lines are left out, wherever they are, and nothing else is; a torn last one is what a killed run leaves.
run 0 train "${tiny[@]}" --steps 9 --batch-size 1 --save-every 6 --keep 9 --out lines
cp lines/metrics.jsonl whole.jsonl
rm -r lines/step-00000009
sed -i '3s/,/;/2' lines/metrics.jsonl
sed -i '5s/$/\x00\xff/' lines/metrics.jsonl # what stands behind a zero byte counts
printf '{"type":"step","st' >>lines/metrics.jsonl
cp lines/metrics.jsonl damaged.jsonl
run 0 train --quiet --out lines --resume
grep -q "note: metrics.jsonl in lines had damaged lines, which are left out; as it was: lines/metrics.jsonl.damaged" err ||
    fail "no note of damaged lines"
cmp damaged.jsonl lines/metrics.jsonl.damaged || fail "not set aside as it was"
diff <(grep -o '"type":"\(step\|eval\)","step":[0-9]*' whole.jsonl | sed '2d;4d') \
    <(grep -o '"type":"\(step\|eval\)","step":[0-9]*' lines/metrics.jsonl) >differ || fail "other records stay: $(cat differ)"
head -n 4 lines/metrics.jsonl | grep -vxFf whole.jsonl && fail "a record was changed"
rm -r lines/step-00000009
printf '{"type":"step","st' >>lines/metrics.jsonl
run 0 train --quiet --out lines --resume
[ ! -s err ] && [ ! -e lines/metrics.jsonl.damaged.2 ] || fail "a torn last line is told as damage: $(cat err)"
# A run that ended before its first checkpoint begins again, if one asks for it; metrics.jsonl is the new start's.
cp -r other unsaved
rm -r unsaved/step-*
run 1 train "${tiny[@]}" --steps 4 --batch-size 1 --out unsaved
says "saved no checkpoint" "--resume"
run 0 train "${tiny[@]}" --no-quiet --steps 4 --batch-size 1 --out unsaved --resume
grep -q "note: unsaved holds no checkpoint yet: the run begins again at step 0" out || fail "does not say where it begins"
same_losses other unsaved
[ "$(grep -c '"type":"run"' unsaved/metrics.jsonl)" = 1 ] || fail "the metrics have two runs"
# The metrics of the start before stay, beside the new ones, however often it begins again.
grep -q "note: metrics.jsonl of the start before is now unsaved/metrics.jsonl.before" out || fail "does not say where they are"
cmp other/metrics.jsonl unsaved/metrics.jsonl.before || fail "not set aside as they were"
rm -r unsaved/step-*
cp unsaved/metrics.jsonl second.jsonl
run 0 train "${tiny[@]}" --steps 4 --batch-size 1 --out unsaved --resume
cmp other/metrics.jsonl unsaved/metrics.jsonl.before || fail "the first metrics are gone"
cmp second.jsonl unsaved/metrics.jsonl.before.2 || fail "the second metrics are gone"
# Its options are those of a first start, also where one option sets another.
run 0 train "${tiny[@]}" --steps 2 --batch-size 1 --levels hosts=2,ranks=2 --out grouped
rm -r grouped/step-*
run 0 train "${tiny[@]}" --steps 2 --batch-size 1 --levels hosts=2,ranks=2 --out grouped --resume --no-quiet
grep -q "no effect here" out && fail "an option without effect: $(cat out)"
options() { grep -o '"options":{[^}]*}' "$1" | sed 's/"\(resume\|quiet\)":"[^"]*"//g'; }
options grouped/metrics.jsonl | grep -q '"two-level":"yes"' || fail "the options: $(options grouped/metrics.jsonl)"
diff <(options grouped/metrics.jsonl.before) <(options grouped/metrics.jsonl) >differ || fail "other options: $(cat differ)"
# A fork does not begin again with random weights.
run 0 train "${tiny[@]}" --steps 5 --batch-size 1 --fork other --out forked
rm -r forked/step-*
cp forked/metrics.jsonl fork.jsonl
for how in "--fork other" --resume; do
    run 1 train "${tiny[@]}" --steps 5 --batch-size 1 $how --out forked
    says "forked holds the metrics of a fork that saved no checkpoint: move metrics.jsonl away and give --fork again"
done
cmp fork.jsonl forked/metrics.jsonl || fail "a refused start changed the metrics"
mv forked/metrics.jsonl moved.jsonl
run 0 train "${tiny[@]}" --steps 5 --batch-size 1 --fork other --out forked
run 1 train "${tiny[@]}" --steps 4 --batch-size 1 --out nothing --resume
says "cannot read folder nothing"

# Places that cannot be written are found before the first step.
run 1 train "${tiny[@]}" --steps 1000000 --out data/train.bin
run 1 train "${tiny[@]}" --steps 1000000 --trace nowhere/trace.json
says "nowhere/trace.json"
run 1 train "${tiny[@]}" --steps 1000000 --trace .
run 1 train "${tiny[@]}" --steps 5 --trace trace.json --trace-steps 6-7
says '--trace-steps is "6-7"' "steps 1 to 5"

saved() { # waits until a run in folder $1 has a checkpoint
    for _ in $(seq 1200); do
        ls "$1" 2>/dev/null | grep -q '^step-' && return
        sleep 0.05
    done
    fail "no checkpoint in $1 within a minute"
}

# Two at a time. Checkpoints go all the time, and the second run is told before it reads one.
"$tagc" train "${tiny[@]}" --batch-size 1 --steps 1000000 --save-every 1 --keep 1 --out twice >/dev/null 2>&1 &
first=$!
saved twice
run 1 train --quiet --out twice --resume
says "another run is writing there"
kill -INT "$first"
wait "$first" && fail "an interrupted run ends well"

# Killed at any moment, the newest checkpoint is whole and the run goes on. The last time it is sure to have one.
kills=8
[ $sanitized = yes ] && kills=3
more=()
RANDOM=63 # the same pauses in each run
for i in $(seq $kills); do
    "$tagc" train "${tiny[@]}" --batch-size 1 --steps 1000000 --save-every 1 --ranks 2 --out killed "${more[@]}" \
        >killed.out 2>killed.err &
    victim=$!
    [ $i = $kills ] && saved killed
    sleep "0.$((RANDOM % 6 + 2))$((RANDOM % 10))"
    kill -KILL "$victim" || fail "it ended by itself: $(cat killed.err)"
    wait "$victim" 2>/dev/null
    if ls -d killed/step-* >/dev/null 2>&1; then
        run 0 eval --from killed --data data --batches 1
        more=(--resume)
    else
        rm -rf killed
    fi
done
last=$(ls -d killed/step-* | tail -n 1)
mkdir "killed/.step-99999999.partial"
run 0 train --quiet --out killed --resume --ranks 2 --steps "$((10#${last##*-} + 2))"
[ ! -e killed/.step-99999999.partial ] || fail "an unfinished folder stays"
diff <(column killed step) <(seq "$((10#${last##*-} + 2))") >/dev/null || fail "steps are missing or twice"

# An old checkpoint that does not go, as where NFS keeps a file that is being read, does not end the run.
run 0 train "${tiny[@]}" --batch-size 1 --steps 2 --save-every 1 --keep 1 --out stuck
mkdir stuck/step-00000002/in-use
run 0 train --out stuck --resume --steps 5 --no-quiet
grep -q "note: .*cannot remove stuck/step-00000002" out || fail "does not say what stays: $(cat out)"
[ "$(echo stuck/step-*/manifest.json)" = stuck/step-00000005/manifest.json ] || fail "more is kept: $(ls stuck)"
run 0 eval --from stuck --data data --batches 1

# Closed streams: what would be printed must not land in a file.
code=0
"$tagc" train "${tiny[@]}" --no-quiet --batch-size 1 --steps 2 --out closed <&- >&- 2>&- || code=$?
[ $code = 0 ] || fail "exit code $code with closed streams"
! grep -qv '^{' closed/metrics.jsonl || fail "progress in the metrics"
