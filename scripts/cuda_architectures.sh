#!/usr/bin/env bash
# cuda_architectures.sh [architecture]...: compiles the kernels for these (sm_75), or for every one from sm_75 to sm_121 that nvcc
# knows, and prints for each what its kernels take at most: registers of a thread, shared memory of a block, bytes of registers spilled to memory.
# Needs nvcc and no GPU; a quarter of a minute for each on one core. Exits with 1 where nvcc warns of anything, where a block takes more
# than the 48 KiB of shared memory that every GPU gives it, or where a thread spills; with 77 where there is no nvcc.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
nvcc=${TAGC_NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || { echo "cuda_architectures.sh: no nvcc: in TAGC_NVCC, PATH or /usr/local/cuda/bin" >&2; exit 77; }
[ $# -gt 0 ] || while read -r name; do
    number=${name#sm_}
    [[ $number =~ ^[0-9]+$ ]] && [ "$number" -ge 75 ] && [ "$number" -le 121 ] && set -- "$@" "$name"
done < <("$nvcc" --list-gpu-code | sort -V)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

"$nvcc" --version | sed -n 's/^Cuda compilation tools, //p'
printf '%-8s %8s %12s %14s %9s\n' "" kernels registers "shared, bytes" spilled
failed=0
for name in "$@"; do
    log=$logs/$name
    for source in lib/gpu/cuda/*.cu; do
        "$nvcc" -std=c++17 -O3 -fmad=false -Werror=all-warnings -Xcompiler=-Wall,-Wextra -Iinclude -Ilib "-arch=$name" \
            -Xptxas -v -cubin -o "$logs/cubin" "$source" >>"$log" 2>&1 || { cat "$log"; exit 1; }
    done
    awk -v name="$name" '
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
            printf "%-8s %8d %12d %14d %9d\n", name, n, registers, shared, spilled
            exit warned || !n || shared > 48 * 1024 || spilled
        }' "$log" || failed=1
done
[ $failed = 0 ] || { echo "cuda_architectures.sh: nvcc warned, a block takes more than 49152 bytes, or a thread spills" >&2; exit 1; }
