#!/usr/bin/env bash
# Fuzzes with libFuzzer: builds the named fuzzers (those of whole exchanges if none is named) with clang under address and undefined,
# starts each from its seeds in git, and keeps what it finds in build-fuzz/. Prints inputs per second and what was found.
#   scripts/fuzz.sh [SECONDS [NAME...]]          SECONDS: of each, default 300
#   SANITIZE=memory scripts/fuzz.sh ...          memory sanitizer: of what links libc and libtagc alone
#   SMALL=1 scripts/fuzz.sh ...                  and writes a small set with the same coverage to fuzz/seeds/NAME
# An input that fails is build-fuzz/found/NAME-crash-...; copy it into fuzz/seeds/NAME once it is mended.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-300}
[ $# -eq 0 ] || shift
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(exchange_reducers exchange_gatherers paper_reducers unit_exchange cli_words cli_saved_options)
sanitize=${SANITIZE:-address,undefined}
clang=${CLANG:-$(command -v clang || command -v clang-14)} || { echo "fuzz: no clang" >&2; exit 2; }
build=build-fuzz/${sanitize//,/-}
options=()
if [ "$sanitize" = memory ]; then # libuv, MPI, BLAS and jansson are not instrumented, nor are intrinsics seen through
    options=(-DTAGC_NATIVE=OFF -DTAGC_MPI=OFF -DTAGC_TRAINER=OFF -DTAGC_GPU=OFF)
    export TAGC_CPU=scalar
fi
cmake -S . -B "$build" -G Ninja -DCMAKE_C_COMPILER="$clang" -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="-O1 -g1" \
    -DTAGC_SANITIZE="$sanitize" "${options[@]}" >/dev/null
mkdir -p build-fuzz/found
failed=0
for name in "${names[@]}"; do
    ninja -C "$build" "fuzz_$name" >/dev/null
    corpus=build-fuzz/corpus/$name log=build-fuzz/$name.log
    mkdir -p "$corpus" "fuzz/seeds/$name"
    status=0
    "$build/fuzz/fuzz_$name" -max_total_time="$seconds" -timeout=100 -rss_limit_mb=2048 -malloc_limit_mb=512 -max_len=4096 -len_control=10 \
        -print_final_stats=1 -artifact_prefix="build-fuzz/found/$name-" "$corpus" "fuzz/seeds/$name" >"$log" 2>&1 || status=$?
    echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs," \
        "$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log") a second, $(ls "$corpus" | wc -l) kept," \
        "$([ $status -eq 0 ] && echo "nothing found" || echo "FAILED: see $log")"
    [ $status -eq 0 ] || failed=1
    if [ -n "${SMALL:-}" ] && [ $status -eq 0 ]; then
        small=$(mktemp -d)
        "$build/fuzz/fuzz_$name" -merge=1 -max_len=4096 "$small" "fuzz/seeds/$name" "$corpus" >>"$log" 2>&1
        cp -n "$small"/* "fuzz/seeds/$name/"
        rm -r "$small"
    fi
done
exit $failed
