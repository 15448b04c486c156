#!/usr/bin/env bash
# Every configuration of the paper trains: ratio x index x layers; the published lossy index is seen to lose.
source "$(dirname "$0")/lib.sh" "$@"
make_data

# Wide enough for sketches that are not all rounding: matrices of 16 k and more.
model=(--n-layer 1 --n-embd 64)
steps=4
for ratio in 2:0.8 4:0.9 10:0.9875; do
    for index in or sum4; do
        for layers in non-attention-linear all; do
            name=$index-${ratio%%:*}-$layers
            run 0 train "${tiny[@]}" "${model[@]}" --steps $steps --batch-size 2 --ranks 2 --exchange sketch \
                --ratio "${ratio%%:*}" --sparsity "${ratio##*:}" --index $index --compress $layers --out "$name"
            [ "$(column "$name" loss | wc -l)" = $steps ] || fail "$name did not do its steps"
            [ "$(column "$name" n_lost | sort -u)" = 0 ] || fail "$name lost elements"
        done
    done
    # or and sum4 say the same, so the training is the same.
    same_losses "or-${ratio%%:*}-all" "sum4-${ratio%%:*}-all"
done
run 0 train "${tiny[@]}" "${model[@]}" --steps $steps --batch-size 2 --ranks 2 --exchange sketch --ratio 2 \
    --sparsity 0.8 --index sum1 --unpeeled estimate --compress all --out sum1
awk '{ lost += $1 } END { exit !(lost > 0) }' <(column sum1 n_lost) || fail "the summed 1-bit index lost nothing"

for conf in "$here"/../../lab/configs/tagc-*.conf "$here"/../../lab/configs/fsdp.conf "$here"/../../lab/configs/packed.conf; do
    run 0 train "${tiny[@]}" --config "$conf" --steps 2 --ranks 2 --batch-size 2 --out "$(basename "$conf")"
done
# 4-bit counts overflow above 15 ranks, so they are refused there.
run 1 train "${tiny[@]}" --steps 1 --ranks 16 --batch-size 1 --exchange sketch --index sum4
says "15"
