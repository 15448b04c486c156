#!/usr/bin/env bash
# gpu.sh [folder for results]: on a machine with nvcc and a GPU, runs the tests of the kernels on the device, again under
# compute-sanitizer (memcheck and racecheck) where that is there, and measures them. Leaves bench_cuda.txt and bench_cuda.json.
# Exits with 77, and says why, where nvcc or a GPU is missing; without a GPU it compiles all of it first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-build-gpu/results}
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || { echo "gpu.sh: no nvcc: in PATH or /usr/local/cuda/bin" >&2; exit 77; }
arch=native has_gpu=1
nvidia-smi >/dev/null 2>&1 || { arch=sm_90 has_gpu=0; }

cmake -S . -B build-gpu -DCMAKE_BUILD_TYPE=Release -DTAGC_CUDA=OFF -DTAGC_MPI=OFF -DTAGC_TRAINER=OFF -DBUILD_TESTING=OFF >/dev/null
cmake --build build-gpu -j"$(nproc)" --target room_codec
libraries=(build-gpu/libroom_codec.a build-gpu/libroom_core.a)
flags=(-std=c++17 -O3 -lineinfo -fmad=false "-arch=$arch" -Iinclude -Isrc)
kernels=(src/cuda/batch.cu src/cuda/delta.cu)
"$nvcc" "${flags[@]}" -DTAGC_CUDA_THREADS=256 -DTAGC_CUDA_LINES=512 -o build-gpu/test_cuda_codec tests/cuda/test_cuda_codec.cpp \
    "${kernels[@]}" "${libraries[@]}"
"$nvcc" "${flags[@]}" -o build-gpu/bench_cuda bench/bench_cuda.cu "${kernels[@]}" "${libraries[@]}"
[ $has_gpu = 1 ] || { echo "gpu.sh: compiled for $arch; no GPU to run it on" >&2; exit 77; }

mkdir -p "$out"
echo "== tests on the device"
build-gpu/test_cuda_codec
sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
if [ -x "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        echo "== compute-sanitizer $tool"
        "$sanitizer" --tool $tool --error-exitcode 1 build-gpu/test_cuda_codec 10
    done
else
    echo "skipped: no compute-sanitizer"
fi
echo "== bench"
build-gpu/bench_cuda "$out/bench_cuda.json" | tee "$out/bench_cuda.txt"
