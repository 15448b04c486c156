#!/usr/bin/env bash
# No room for a checkpoint or a line of metrics: a message, exit code 1, what was saved before still good.
source "$(dirname "$0")/lib.sh" "$@"
make_data

options=("${tiny[@]}" --batch-size 2 --ranks 2 --sparsity 0.9)
run 0 train "${options[@]}" --steps 3 --out small
good=$(wc -c <small/step-00000003/rank-0.bin)

# A limit on the size of files stands in for a full disk: the engine cannot write a whole rank file.
cp -r small limited
(
    trap '' XFSZ
    ulimit -f $((good / 2 / 1024))
    exec timeout 120 "$tagc" train --quiet --out limited --resume --ranks 2 --steps 5 >out 2>err
)
code=$?
[ $code = 1 ] || fail "exit code $code instead of 1"
says "limited"
[ "$(ls -d limited/step-*)" = limited/step-00000003 ] || fail "left behind: $(ls -a limited | tr '\n' ' ')"
ls -a limited | grep -q partial && fail "a partial checkpoint was left"
cmp small/step-00000003/rank-0.bin limited/step-00000003/rank-0.bin || fail "the checkpoint before was touched"
run 0 train --quiet --out limited --resume --ranks 2 --steps 5

# The same on a file system that is really full, where one can be made.
if [ "$(id -u)" = 0 ] && mkdir -p disk && mount -t tmpfs -o size=$((good * 3 / 1024 + 40))k tmpfs disk 2>/dev/null; then
    trap 'umount "$scratch/disk" 2>/dev/null' EXIT
    code=0
    timeout 120 "$tagc" train "${options[@]}" --steps 12 --save-every 2 --keep 9 --out disk/run >out 2>err || code=$?
    [ $code = 1 ] || fail "exit code $code instead of 1 on a full disk"
    says "No space left"
    last=$(ls -d disk/run/step-* | tail -n 1)
    run 0 eval --from "$last" --data data --batches 1
    umount disk
    trap - EXIT
else
    echo "note: no tmpfs here; the size limit alone was tried"
fi

# Metrics that cannot be written.
if [ -e /dev/full ]; then
    mkdir full
    ln -s /dev/full full/metrics.jsonl
    cp -r small/step-00000003 full/
    run 1 train --quiet --out full --resume --ranks 2 --steps 5
    says "metrics.jsonl"
fi

# What cannot be printed is a failure, too.
if [ -e /dev/full ]; then
    for words in help version "train --help" "info tiny" "plan --model llama-3-8b" "plan --model llama-3-8b --json -" "compare small" \
        "compare small --csv -" "export --from small --out hf" "data --out again text" "bench --model tiny --only floor" "train ${tiny[*]} --steps 1 --no-quiet"; do
        code=0
        "$tagc" $words >/dev/full 2>err || code=$?
        [ $code = 1 ] || fail "tagc $words: exit code $code instead of 1 where nothing could be printed"
        grep -q 'could not write\|cannot write\|could not be written\|cannot be printed' err || fail "tagc $words: $(cat err)"
    done
fi
