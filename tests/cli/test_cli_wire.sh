#!/usr/bin/env bash
# Bytes as the transport counts them: 10x with a 1-bit index is 5.2 bits per compressed parameter, dense is 32, each
# times (W-1)/W.
source "$(dirname "$0")/lib.sh" "$@"
make_data

# One wide layer: its matrices are what the wire carries. Only they are compressed.
model=(--data data --model tiny --n-layer 1 --n-embd 256 --n-head 4 --block-size 16 --batch-size 1 --quiet --steps 3
       --eval-every never --compress names --compress-names "h.*.mlp.c_*.weight,h.*.attn.c_proj.weight")

# bits <run> <legs>...: bits per compressed parameter and rank of the legs, before (W-1)/W, mean over steps; other
# parameters' dense bytes are taken off the values.
bits() {
    local run=$1 world=$2
    grep '"type":"run"' "$run/metrics.jsonl" | grep -o '"n_params":[0-9]*' | cut -d: -f2 >n_params
    grep '"type":"run"' "$run/metrics.jsonl" | grep -o '"n_compressed":[0-9]*' | cut -d: -f2 >n_compressed
    grep '"type":"step"' "$run/metrics.jsonl" | sed 's/.*"n_bytes_sent":{//; s/}.*//; s/[^0-9:,]//g' |
        awk -F'[:,]' -v n="$(cat n_params)" -v c="$(cat n_compressed)" -v w="$world" '
            { index_bytes += $2; values += $4; leftover += $6 }
            END { dense = (n - c) * 4 * (w - 1) / w * NR
                  printf "%.4f\n", 8 * (index_bytes + values + leftover - dense) / c / NR / ((w - 1) / w) }'
}
near() { # <what> <bits> <expected> <share>
    awk -v b="$2" -v e="$3" -v s="$4" 'BEGIN { d = b / e - 1; exit !(d < s && d > -s) }' ||
        fail "$1: $2 bits per parameter, expected $3"
    echo "$1: $2 bits per compressed parameter and rank (expected $3)"
}
run 0 train "${model[@]}" --ranks 2 --exchange dense --out dense
near "dense, W = 2" "$(bits dense 2)" 32 0.005
# Both halves of the index travel: to the owner and back.
run 0 train "${model[@]}" --ranks 2 --exchange sketch --ratio 10 --sparsity 0.9875 --index or --out sketch
near "sketch 10x, or, W = 2" "$(bits sketch 2)" 5.2 0.02
run 0 train "${model[@]}" --ranks 4 --exchange sketch --ratio 10 --sparsity 0.9875 --index or --out sketch4
near "sketch 10x, or, W = 4" "$(bits sketch4 4)" 5.2 0.02
run 0 train "${model[@]}" --ranks 2 --exchange packed --sparsity 0.9875 --out packed
union=$(column packed union_density | awk '{ s += $1 } END { print 2 + 32 * s / NR }')
near "packed, W = 2" "$(bits packed 2)" "$union" 0.02
