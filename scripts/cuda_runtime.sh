#!/usr/bin/env bash
# cuda_runtime.sh <libtagc-cuda.so>: prints which CUDA runtime the library contains. Exits with 1 where it is newer than 12.8, the first that
# knows all devices from sm_75 to sm_120: a newer one needs a newer driver than the torch that people have (13.0 needs driver 580), and
# where the driver is older nothing is left but the processor's codec. TAGC_CUDA_NEWEST: another version, such as 13.0. Needs no GPU.
set -euo pipefail
newest=${TAGC_CUDA_NEWEST:-12.8}
has=$(python3 -c 'import ctypes, sys
version = ctypes.CDLL(sys.argv[1]).tagc_cuda_runtime()
print(f"{version // 1000}.{version % 1000 // 10}")' "$1")
echo "$1 contains CUDA runtime $has"
[ "$(printf '%s\n' "$has" "$newest" | sort -V | tail -n 1)" = "$newest" ] || {
    echo "cuda_runtime.sh: must be $newest or older: build with that nvcc (CUDA_HOME), or set TAGC_CUDA_NEWEST=$has" >&2
    exit 1
}
