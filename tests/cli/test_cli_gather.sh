#!/usr/bin/env bash
# How parameters travel: every wire trains alike, over threads and over MPI; bits of each step; what is refused.
source "$(dirname "$0")/lib.sh" "$@"
make_data
export ASAN_OPTIONS=detect_leaks=0 # Open MPI leaks

train() { # <name> <options>...
    local name=$1
    shift
    run 0 train "${tiny[@]}" --steps 12 --batch-size 2 --ranks 2 --out "$name" --compress none --exchange dense \
        --sharding grad "$@"
}
gathered() { # <run>: bits per parameter and step that gathers took, from step 2 on
    grep '"type":"step"' "$1/metrics.jsonl" | grep -o '"bits_sent_per_param":{[^}]*}' | grep -o '"gather":[^,}]*' |
        cut -d: -f2 | tail -n +2 | sort -u
}
# bits <run> <least> <most>: the same in every step after the first
bits() {
    [ "$(gathered "$1" | wc -l)" = 1 ] || fail "$1 has gathers of different sizes: $(gathered "$1" | tr '\n' ' ')"
    awk -v least="$2" -v most="$3" '$1 < least || $1 > most { exit 1 }' <(gathered "$1") ||
        fail "$1 gathers $(gathered "$1") bits per parameter, expected $2 to $3"
}

train bf16 --gather bf16
bits bf16 8 8.2 # (W - 1) / W of 16
for wire in int8:4:4.3 delta8:4:4.3 delta4:2:2.3 delta2:1:1.3; do
    IFS=: read -r name least most <<<"$wire"
    train "$name" --gather "$name"
    bits "$name" "$least" "$most"
    near_losses bf16 "$name" 2e-2
done
near_losses bf16 delta8 5e-4
near_losses bf16 delta4 5e-3

train checked --gather delta4 --gather-check-every 1
same_losses delta4 checked

# What was trained with deltas is a checkpoint like any other.
run 0 eval --from delta4 --data data --batches 2
run 0 generate --from delta4 --prompt "the" --n-tokens 5

if has_mpirun; then
    mpi 2 train "${tiny[@]}" --steps 12 --batch-size 2 --out over-mpi --compress none --exchange dense --sharding grad \
        --gather delta4 >out 2>err || fail "delta4 over MPI"
    same_losses delta4 over-mpi
fi

for sharding in full none hybrid; do
    run 2 train "${tiny[@]}" --steps 2 --batch-size 2 --ranks 2 --out no \
        --sharding "$sharding" --gather delta4 --compress none
    says "--gather delta4" "--sharding grad"
done
