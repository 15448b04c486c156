#!/usr/bin/env bash
# Builds libtagc for aarch64 with Debian's cross compiler and runs the tests of core, codec and exchange that compute under
# qemu-user, at the levels neon and scalar, in their small sizes (those of the sanitizers). Exits with 77, and says why, where
# compiler, qemu or packages cannot be had: apt-get install gcc-aarch64-linux-gnu g++-aarch64-linux-gnu
# libc6-dev-arm64-cross qemu-user
#   aarch64.sh [build]    build: without the tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$PWD/build-aarch64
sysroot=$build/sysroot
jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}

skip() {
    echo "aarch64: skipped: $*"
    exit 77
}

# cmocka for arm64, unpacked into the build folder. apt gets lists of its own there: the system's packages and
# its architectures stay as they are.
fetch_packages() {
    local apt=$build/apt log=$build/apt.log
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$sysroot"
    local options=(-q -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o Dir::State::status=/dev/null
                   -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Acquire::Languages=none
                   -o APT::Sandbox::User=root -o Acquire::Retries=3 -o Acquire::http::Timeout=20)
    (cd "$apt" && apt-get "${options[@]}" update && apt-get "${options[@]}" download libcmocka0 libcmocka-dev) \
        >"$log" 2>&1 || return 1
    for package in "$apt"/*.deb; do dpkg -x "$package" "$sysroot"; done
    rm -rf "$apt"
    touch "$sysroot/complete"
}

for program in aarch64-linux-gnu-gcc qemu-aarch64 apt-get dpkg; do
    command -v "$program" >/dev/null || skip "no $program"
done
[ -e /usr/aarch64-linux-gnu/include/stdio.h ] || skip "no libc6-dev-arm64-cross"
mkdir -p "$build"
[ -e "$sysroot/complete" ] || fetch_packages || skip "cmocka for arm64 cannot be downloaded, see $build/apt.log"

cmake -S . -B "$build" $(command -v ninja >/dev/null && echo -G Ninja) -DTAGC_SYSROOT="$sysroot" \
    -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake" -DCMAKE_BUILD_TYPE=Release -DTAGC_MPI=OFF -DTAGC_TRAINER=OFF \
    -DTAGC_WERROR=ON -DCMAKE_C_FLAGS=-DTAGC_SANITIZED=1 >"$build/cmake.log" 2>&1 ||
    { cat "$build/cmake.log"; exit 1; }

# The tests that compute and end soon under qemu, where they take some fifteen times as long: test_exchange_reducer_direct
# alone would need over a minute. gcc 12 for aarch64 fails on test_exchange_stress with an internal error.
tests=(core_cpu core_memory core_pool core_xxh3 codec_bitmap codec_changes codec_code codec_delta codec_gaps codec_select codec_values paper_nibble paper_pack paper_sketch
       exchange_changes exchange_cpu exchange_direct_arrays exchange_gatherer_delta paper_reducer_sketch exchange_wire)
cmake --build "$build" -j"$jobs" --target tagc_shared "${tests[@]/#/test_}"
[ "${1:-}" != build ] || exit 0
# Kernels have nothing of aarch64 in them, but the harness that executes them has: how it switches fibres.
if command -v aarch64-linux-gnu-g++ >/dev/null; then
    aarch64-linux-gnu-g++ -std=c++17 -O2 -static -Wall -Wextra -Werror -Itests/gpu/cuda tests/gpu/cuda/harness.cpp \
        tests/gpu/cuda/test_cuda_harness.cpp -o "$build/test_cuda_harness"
    qemu-aarch64 "$build/test_cuda_harness" >"$build/harness.log" || { cat "$build/harness.log"; exit 1; }
    echo "aarch64: the harness of the CUDA kernels passed"
else
    echo "aarch64: no aarch64-linux-gnu-g++: the harness of the CUDA kernels is left out"
fi
cd "$build"
ctest --output-on-failure --no-tests=error -j$((2 * jobs)) -R "^test_($(IFS='|' && echo "${tests[*]}"))\$"
echo "aarch64: once more, at the level scalar"
TAGC_CPU=scalar ctest --output-on-failure --no-tests=error -j$((2 * jobs)) -R '^test_(codec_(bitmap|delta|gaps)|exchange_direct_arrays)$'
