#!/usr/bin/env bash
# What no machine has the memory for is refused before anything is allocated, with the figures: without swap the system would
# kill the run, and others with it.
source "$(dirname "$0")/lib.sh" "$@"
[ "$sanitized" = no ] || skip "sanitizers need the whole address space"
make_data
ulimit -v 40000000 # should one of them start all the same

refuses() { # <figure, a pattern> <text> <arguments>...
    local figure=$1 text=$2
    shift 2
    run 1 "$@"
    says "$text" "free: take"
    grep -qE "needs about $figure" err || fail "the figure is not $figure"
}
train=(train --data data --steps 1 --quiet)
refuses '[0-9.]+ GB per rank, [0-9.]+ TB for the 1024 ranks of host ' "this run" "${train[@]}" --eval-every never --ranks 1024 --model gpt2-xl
refuses '[0-9.]+ TB, and host ' "this run" "${train[@]}" --model gpt2-xl --batch-size 65536
refuses '[0-9.]+ TB, and host ' "this run" "${train[@]}" --model gpt2 --n-embd 16384 --n-head 64 --n-layer 1000
refuses '[0-9.]+ TB per rank, [0-9.]+ TB for the 2 ranks of host ' "arm fsdp" bench --only arms --arms fsdp,bf16 --model gpt2-xl --batch-size 65536
refuses '[0-9.]+ GB per rank, [0-9.]+ TB for the 1024 ranks of host ' "arm fsdp" bench --only arms --arms fsdp,bf16 --model gpt2-xl --ranks 1024

# A batch that is as long as the address space, not only as the memory.
run 1 "${train[@]}" --model tiny --block-size 1048576 --seq-len 512 --batch-size 65536 --n-layer 1000
says "this run" "free: take"
run 1 "${train[@]}" --model tiny --block-size 1048576 --seq-len 1048576 --batch-size 65536
says "need at least 1048577"

# A checkpoint is checked as it was trained, with the ranks of now. A batch of eval is no larger than its text.
run 0 "${train[@]}" --model tiny --batch-size 2 --ranks 2 --out small
run 1 train --quiet --out small --resume --steps 2 --batch-size 65536 --seq-len 32 --ranks 1024 --eval-every never
says "this run needs about" "for the 1024 ranks of host"
run 0 eval --from small --data data --batch-size 65536

if has_mpirun; then
    mpi 2 "${train[@]}" --model gpt2-xl --batch-size 65536 >out 2>err && fail "a run over MPI was not refused"
    grep -qE "^tagc: this run needs about [0-9.]+ TB per rank, [0-9.]+ TB for the 2 ranks of host " err || fail "no figure over MPI"
fi
