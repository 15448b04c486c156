#!/usr/bin/env bash
# Ten steps at once, ten that save in the middle, and ten with a stop in between: the same losses, the same bits of parameters sent, and
# the same bytes in the last checkpoint.
source "$(dirname "$0")/lib.sh" "$@"
make_data

# Of parameters: how long the first messages of gradients are follows from the exchanges before, which no checkpoint holds.
bits() { grep '"type":"step"' "$1/metrics.jsonl" | grep -o '"bits_sent_per_param":{[^}]*}' | grep -o '"gather":[^,}]*'; }
check() { # <name> <options>...
    local name=$1
    shift
    run 0 train "${tiny[@]}" --steps 10 --batch-size 2 --ranks 2 --save-every 10 --out "$name-0" "$@"
    run 0 train "${tiny[@]}" --steps 10 --batch-size 2 --ranks 2 --save-every 5 --keep 9 --out "$name-a" "$@"
    cp -r "$name-a" "$name-b"
    rm -r "$name-b/step-00000010"
    # Nothing but --out and --resume: options and number of ranks are the checkpoint's.
    run 0 train --quiet --out "$name-b" --resume
    for other in "$name-0" "$name-b"; do
        same_losses "$name-a" "$other"
        diff <(bits "$name-a") <(bits "$other") >differ || fail "$name-a and $other send other bits: $(head -n 4 differ)"
        for rank in 0 1; do
            cmp "$name-a/step-00000010/rank-$rank.bin" "$other/step-00000010/rank-$rank.bin" ||
                fail "$name-a and $other: the checkpoints of rank $rank differ"
        done
    done
}
check dense --compress none --exchange dense
check packed --exchange packed --sparsity 0.95 --accumulate 2
check sketch --exchange sketch --sparsity 0.9 --ratio 4 --compress all --sharding grad
check delta4 --sharding grad --gather delta4 --gather-check-every 2 --sparsity 0.95
check delta8 --sharding grad --gather delta8 --compress none --exchange dense --accumulate 2
check direct --sharding grad --exchange direct --sparsity 0.9 --values int4 --gather delta4
check int8 --gather int8 --sparsity 0.95
check ddp --sharding none --sparsity 0.9 --gather bf16

# Another number of ranks goes on, and says so.
cp -r packed-a other
rm -r other/step-00000010
run 0 train --no-quiet --out other --resume --ranks 3
grep -q "note: saved by 2 ranks, going on with 3" out || fail "no note about the number of ranks"
[ "$(column other loss | wc -l)" = 10 ] || fail "not ten steps"
grep -q "note: the run stays as one rank began it" out && fail "a note about a run of one rank"
# What is recorded of a start are its own ranks, and the arm that the run began with.
run 0 train "${tiny[@]}" --steps 1 --ranks 2 --preset direct --out arm
run 0 train --quiet --out arm --resume --steps 2
grep '"type":"run"' arm/metrics.jsonl | grep -c '"preset":"direct".*"ranks":"2"' | grep -qx 2 || fail "the second start: $(grep '"run"' arm/metrics.jsonl)"
# One rank has nobody to compress for. Where more of them go on, that it stays so is told.
run 0 train "${tiny[@]}" --steps 1 --out alone
run 0 train --no-quiet --out alone --resume --ranks 2 --steps 2
grep -q "note: the run stays as one rank began it, and compresses nothing; --fork alone/step-00000001 begins" out ||
    fail "does not say that nothing is compressed: $(cat out)"

# Another level of the processor adds products up in another order: the run goes on, and says so. The same level says nothing.
cp -r packed-a cpu
rm -r cpu/step-00000010
run 0 train --no-quiet --out cpu --resume --steps 6
grep -q "bit for bit" out && fail "a note about processors that are the same: $(cat out)"
TAGC_CPU=scalar run 0 train --no-quiet --out cpu --resume --steps 7
grep -q "note: saved with .*, going on with scalar; OpenBLAS .*: not bit for bit" out || fail "no note about processors: $(cat out)"

# What a checkpoint cannot go on with is refused, the rest is noted.
run 1 train --quiet --out packed-b --resume --ranks 2 --n-layer 3
says "--n-layer is \"3\"" "preset"
run 1 train --quiet --out packed-b --resume --ranks 2 --exchange dense
says "--exchange is \"dense\"" "packed"
run 0 train --out packed-b --resume --ranks 2 --steps 12 --no-quiet
grep -q "note: --steps 12, where the checkpoint had 10" out || fail "no note about --steps"
run 0 train --out packed-b --resume --ranks 2 --no-quiet
grep -q "nothing left to do" out || fail "a finished run does not say that it is finished"
# A run with no step to make holds what it began with, and goes on from there as if it had not stopped.
run 0 train "${tiny[@]}" --steps 4 --batch-size 2 --ranks 2 --out whole
run 0 train "${tiny[@]}" --steps 0 --batch-size 2 --ranks 2 --out begun --no-quiet
grep -q "checkpoint in begun" out && [ -d begun/step-00000000 ] || fail "no checkpoint of step 0: $(ls begun)"
run 0 train --quiet --out begun --resume --steps 4
same_losses whole begun
for how in --resume --fork; do
    run 0 train --out "end$how" $how whole --data data --eval-every never --steps 4 --ranks 2 --no-quiet
    grep -q "checkpoint in end$how" out || fail "does not say where the checkpoint is"
    [ -e "end$how/step-00000004/manifest.json" ] || fail "$how of a run that is done keeps no checkpoint"
    [ $how = --fork ] || cmp whole/step-00000004/rank-1.bin end--resume/step-00000004/rank-1.bin || fail "another checkpoint"
    run 0 train --quiet --out "end$how" --resume --steps 5
done
run 1 train --quiet --out nowhere --resume --ranks 2
says "nowhere"
run 1 train --quiet --resume --ranks 2
says "--resume needs --out"

# Tokens that were made anew under the run are told apart from those it has trained on, also where they are as many.
cp -r data moved
run 0 train "${tiny[@]}" --data moved --steps 2 --batch-size 2 --ranks 2 --out text
run 0 train --quiet --out text --resume --steps 3
mkdir other-text
tr a-m n-z <text/a.txt >other-text/a.txt
run 0 data --quiet --force --out moved other-text
run 1 train --quiet --out text --resume --steps 4
says "moved/train.bin is not the text that the run has trained on" "give --data"
run 0 train --out text --resume --steps 4 --data moved --no-quiet
grep -q "note: moved/train.bin is another text" out || fail "no note about another text: $(cat out)"
run 0 train --quiet --out text --resume --steps 5
