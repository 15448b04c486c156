#!/usr/bin/env bash
# cuda_architectures.sh [architecture]...: compiles the kernels for these (sm_75), or for every one from sm_75 to sm_121 that nvcc
# knows, and prints for each what its kernels take at most: registers of a thread, shared memory of a block, bytes of a thread's frame and of
# registers spilled to memory.
# A device gets the PTX of its generation (sm_86 that of compute_80), which is made once. TAGC_CUDA_KEPT: a folder in which nvcc has
# kept PTX; generations that are not there get that of compute_75, as such a device does when it loads the library.
# Needs nvcc and no GPU; some seconds for each on one core. Exits with 1 where a compiler warns of anything, where a block takes more
# than the 48 KiB of shared memory that every GPU gives it, where a thread spills, or where its frame takes more than 512 bytes; with 77
# where there is no nvcc. A context has 1,024 bytes for frames: for more, the driver makes room at a launch, and waits until the device is idle.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
nvcc=${TAGC_NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || { echo "cuda_architectures.sh: no nvcc: in TAGC_NVCC, PATH or /usr/local/cuda/bin" >&2; exit 77; }
known=$("$nvcc" --list-gpu-code)
[ $# -gt 0 ] || while read -r name; do
    number=${name#sm_}
    [[ $number =~ ^[0-9]+$ ]] && [ "$number" -ge 75 ] && [ "$number" -le 121 ] && set -- "$@" "$name"
done < <(sort -V <<<"$known")
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

quietly() { # <log> <command>...
    "${@:2}" >>"$1" 2>&1 || { cat "$1"; exit 1; }
}
ptx() { # <source> <architecture>: sets `made`
    local number=${2#sm_} level name
    name=$(basename "$1" .cu)
    level=$((number / 10 * 10))
    [ "$number" -ge 80 ] || level=75
    for made in ${TAGC_CUDA_KEPT:+"$TAGC_CUDA_KEPT/$name.compute_$level.ptx" "$TAGC_CUDA_KEPT/$name.compute_75.ptx"} \
                "$logs/$name.compute_$level.ptx"; do
        [ ! -e "$made" ] || return 0
    done
    quietly "$log" "$nvcc" -std=c++17 -O3 -fmad=false -Werror=all-warnings -Xcompiler=-Wall,-Wextra -Iinclude -Ilib \
        "-arch=compute_$level" -ptx -o "$made" "$1"
}

"$nvcc" --version | sed -n 's/^Cuda compilation tools, //p'
printf '%-8s %8s %12s %14s %6s %9s\n' "" kernels registers "shared, bytes" frame spilled
failed=0
for name in "$@"; do
    grep -qx "$name" <<<"$known" ||
        { echo "cuda_architectures.sh: nvcc does not know \"$name\", but $(sort -V <<<"$known" | paste -sd' ')" >&2; exit 2; }
    log=$logs/$name.log
    for source in lib/gpu/cuda/*.cu; do
        ptx "$source" "$name"
        quietly "$log" "$nvcc" -O3 -fmad=false "-arch=$name" -Xptxas -v -cubin -o "$logs/cubin" "$made"
    done
    awk -v name="$name" '
        / bytes stack frame/ { if ($1 + 0 > frame) frame = $1 + 0 }
        / spill stores/ { for (i = 2; i < NF; i++) if ($(i + 1) == "spill") spilled += $(i - 1) }
        / Used [0-9]+ registers/ {
            n++
            for (i = 2; i <= NF; i++) {
                if ($i == "registers," && $(i - 1) + 0 > registers) registers = $(i - 1) + 0
                if ($i ~ /^smem/ && $(i - 2) + 0 > shared) shared = $(i - 2) + 0
            }
        }
        /warning/ { print; warned = 1 }
        END {
            printf "%-8s %8d %12d %14d %6d %9d\n", name, n, registers, shared, frame, spilled
            exit warned || !n || shared > 48 * 1024 || frame > 512 || spilled
        }' "$log" || failed=1
done
[ $failed = 0 ] || { echo "cuda_architectures.sh: nvcc warned, a block takes more than 49152 bytes, a thread spills, or its frame more than 512" >&2; exit 1; }
