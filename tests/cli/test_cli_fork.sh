#!/usr/bin/env bash
# A new run from another one's checkpoint: its weights, moments and step, everything else anew.
source "$(dirname "$0")/lib.sh" "$@"
make_data

# One sequence and no more: every step sees the same batch, so the place in the data cannot matter, and a fork with the
# same options must give the bytes that going on gives.
mkdir -p same/text
head -c 34 text/a.txt >same/text/a.txt
run 0 data --quiet --out same/data same/text
same=(--data same/data/train.bin --model tiny --quiet --ranks 2 --batch-size 1 --warmup 2 --lr 3e-3 --eval-every never)
n_tokens=$("$tagc" info same/data/train.bin | grep -o '[0-9][0-9]* tokens' | head -n 1 | cut -d' ' -f1)
same+=(--seq-len $((n_tokens - 1)) --exchange dense --compress none)
run 0 train "${same[@]}" --steps 8 --save-every 4 --keep 9 --out a
run 0 train "${same[@]}" --steps 8 --fork a/step-00000004 --out b
diff <(column a loss | tail -n 4) <(column b loss) >differ || fail "a fork is not what going on is: $(cat differ)"
# But for the state of the exchange, which counts the steps of its own run.
for rank in 0 1; do
    file=step-00000008/rank-$rank.bin
    n_model=$(grep -o '"n_model": [0-9]*' a/step-00000008/manifest.json | sed -n "$((rank + 1))s/.* //p")
    [ "$n_model" -gt 0 ] || fail "no size of the state in the manifest"
    cmp -n "$(($(stat -c %s "a/$file") - n_model))" "a/$file" "b/$file" || fail "rank $rank of a fork"
done

# Another number of ranks, sharding, exchange and policy: the weights are the same (the validation loss before the first
# step says so), the order of the data is that of a new run, and steps go on counting.
run 0 train "${tiny[@]}" --batch-size 4 --steps 6 --ranks 1 --exchange packed --sparsity 0.9 --out base
last=$(val_column base | tail -n 1)
fork() { # <name> <options>...
    local name=$1
    shift
    run 0 train "${tiny[@]}" --steps 10 --fork base --out "$name" "$@"
    val_column "$name" | head -n 1 | paste - <(echo "$last") |
        awk '{ d = $1 / $2 - 1; exit !(d * d < 1e-10) }' || fail "$name does not begin where base ended"
    [ "$(column "$name" step | tr '\n' ' ')" = "7 8 9 10 " ] || fail "steps of $name"
}
fork grad --batch-size 1 --ranks 4 --sharding grad --compress none --exchange dense
fork all --batch-size 2 --ranks 2 --compress all --exchange sketch --sparsity 0.9 --wrap matrix
fork seed1 --batch-size 4 --ranks 1 --compress none --exchange dense --seed 1
fork seed2 --batch-size 4 --ranks 1 --compress none --exchange dense --seed 2
[ "$(column seed1 loss | head -n 1)" != "$(column seed2 loss | head -n 1)" ] || fail "seeds do not change the data"
# The same tokens as a new run with this seed sees, in the same order.
fork here --batch-size 4 --ranks 1 --compress none --exchange dense --seed 1
same_losses here seed1

# The schedule: from step 0 on, or from the fork on; the latter also after a resume.
[ "$(column seed1 lr | head -n 1)" != 0.003 ] || fail "a schedule from the start is at its top at the fork"
fork anew --batch-size 4 --ranks 1 --schedule-from fork --warmup 0
column anew lr | head -n 1 | awk '{ exit !($1 > 0.0025) }' || fail "a schedule from the fork is not at its top there"
column anew lr | tail -n 1 | awk '{ exit !($1 == 3e-4) }' || fail "a schedule from the fork does not reach its end"
run 0 train "${tiny[@]}" --batch-size 4 --ranks 1 --steps 10 --save-every 2 --keep 9 --fork base --schedule-from fork \
    --warmup 0 --out stopped
rm -r stopped/step-00000010
run 0 train --quiet --resume --out stopped
same_losses anew stopped

# What cannot be.
run 1 train "${tiny[@]}" --steps 10 --fork base --n-layer 3 --out no
says "the checkpoint's model has"
run 1 train "${tiny[@]}" --steps 10 --fork nowhere --out no
says "nowhere"
run 2 train "${tiny[@]}" --steps 10 --fork base --resume --out no
says "--fork and --resume"
run 1 train "${tiny[@]}" --steps 5 --fork base --out no
says "--steps is 5" "step 6"
run 1 train "${tiny[@]}" --steps 10 --fork base --out base
says "base holds a run already"
cp -r base broken
printf x | dd of=broken/step-00000006/rank-0.bin bs=1 seek=2000 conv=notrunc 2>/dev/null
run 1 train "${tiny[@]}" --steps 10 --fork broken --out no
says "broken/step-00000006/rank-0.bin"
[ ! -e no/step-00000010 ] || fail "a refused fork left a checkpoint"
