#!/usr/bin/env bash
# Files that are cut short, changed or not what they should be: a message that names them, exit code 1, no hang.
source "$(dirname "$0")/lib.sh" "$@"
make_data

options=("${tiny[@]}" --steps 2 --batch-size 2 --ranks 2)
run 0 train "${options[@]}" --out run
run 0 export --from run --out hf

flip() { # <file> <offset>: another byte there
    printf "\\x$(printf %02x $((255 - $(od -An -tu1 -j "$2" -N1 "$1"))))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}
cut_to() { # <file> <bytes>
    head -c "$2" "$1" >cut.tmp && mv cut.tmp "$1"
}

# Token files.
size=$(wc -c <data/train.bin)
for change in "cut_to bad/train.bin $((size / 2))" "cut_to bad/train.bin 10" "cut_to bad/train.bin 0" \
    "flip bad/train.bin $((size / 2))" "flip bad/train.bin 9"; do
    rm -rf bad
    cp -r data bad
    $change
    run 1 train "${options[@]}" --data bad
    says "bad/train.bin"
    [ "$change" = "cut_to bad/train.bin 0" ] || { run 1 info bad/train.bin && says "bad/train.bin"; }
done
run 1 train "${options[@]}" --data absent
says "absent"
run 1 train "${options[@]}" --vocab-size 64
says "vocab"

# Checkpoints: every file of one, cut and changed.
for file in rank-0.bin rank-1.bin manifest.json; do
    size=$(wc -c <run/step-00000002/$file)
    for change in "cut_to bad/step-00000002/$file $((size / 2))" "cut_to bad/step-00000002/$file 0" \
        "flip bad/step-00000002/$file $((size / 3))" "rm bad/step-00000002/$file"; do
        rm -rf bad
        cp -r run bad
        $change
        run 1 train --quiet --out bad --resume --ranks 2 --steps 4
        says "bad"
        [ "$(column bad loss | wc -l)" = 2 ] || fail "metrics were touched: $change"
        run 1 eval --from bad --data data --batches 1
    done
done

# Where the newest one is damaged, an older one is named, and the run goes on from it once the damaged one is gone.
run 0 train "${options[@]}" --save-every 1 --out steps
for file in rank-1.bin manifest.json; do
    rm -rf bad
    cp -r steps bad
    flip bad/step-00000002/$file $(($(wc -c <bad/step-00000002/$file) / 3))
    run 1 train --quiet --out bad --resume --ranks 2
    says "step 1 is there, too: remove step 2 to go on from it"
done
rm -r bad/step-00000002
run 0 train --quiet --out bad --resume --ranks 2

# Weights.
size=$(wc -c <hf/model.safetensors)
for change in "cut_to bad/model.safetensors $((size - 1))" "cut_to bad/model.safetensors 100" \
    "cut_to bad/model.safetensors 3" "flip bad/model.safetensors 4" "flip bad/config.json 0"; do
    rm -rf bad
    cp -r hf bad
    $change
    run 1 eval --from bad --data data --batches 1
    says "bad"
    run 1 generate --from bad --n-tokens 2
done
run 1 train "${options[@]}" --init-from hf/model.safetensors --n-embd 64
says "hf/model.safetensors"
run 1 info text/a.txt
says "text/a.txt"
