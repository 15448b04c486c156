#!/usr/bin/env bash
# Lint, then all tests three times: as released (the codec and the exchanges at each level of the processor), under
# address+undefined sanitizers, and the threaded ones under the thread sanitizer; then those of libtagc without lib/paper and
# lib/gpu. LONG=1: also the long tests, the engine's threads, and aarch64. Prints a heading per stage and ends with the ten tests that took
# longest, with what each stage's ctest said, and with the seconds of each: of the clock, and of processors, which depend little on what else
# runs on the machine (tests/README.md has their budget).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Much is compiled twice: libtagc without its fences, for one. CMake reads the first two; for the others see ccache's manual.
if command -v ccache >/dev/null; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
    export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=time_macros
fi

summary=() next= used=0 before=0 repeated=
times_file=$(mktemp) tests=$(mktemp)
count() { # sets used to the processor seconds since the last count; what compiles beside a stage counts for the stage that waits for it
    times >"$times_file"
    local now
    now=$(tail -n 1 "$times_file" | tr 'ms' '  ' | awk '{ printf "%d", 60 * $1 + $2 + 60 * $3 + $4 }')
    used=$((now - before)) before=$now
}
# On a machine where other things run, too, a test of several processes can wait too long. One or two tests that failed as released
# run once more, alone. The summary names those that pass then. A sanitizer's tests get no second try: what it finds is there.
passes_alone() { # <make target>
    local failed=build/Testing/Temporary/LastTestsFailed.log
    [ "$1" = test ] && [ -s "$failed" ] && [ "$(wc -l <"$failed")" -le 2 ] || return 1
    repeated=$(cut -d : -f 2 "$failed" | paste -sd ' ')
    echo "== once more, alone: $repeated"
    (cd build && ctest --output-on-failure --rerun-failed)
}
stage() { # <heading> <make target> [<target of what the next stage compiles>]
    echo
    echo "== $1"
    local log start=$SECONDS
    log=$(mktemp)
    [ -z "$next" ] || wait "$next" || true # what failed to compile fails once more, visibly
    next=
    if [ -n "${3:-}" ]; then # many tests wait: the processors have time to compile
        nice -n 19 make --no-print-directory "$3" >/dev/null 2>&1 &
        next=$!
    fi
    if ! scripts/costs.py --run make --no-print-directory "$2" 2>&1 | tee "$log" && ! passes_alone "$2"; then
        rm -f "$log"
        echo "check: FAILED in: $1" >&2
        exit 1
    fi
    count
    summary+=("$1: $(grep 'tests passed' "$log" | tail -n 1 || true) ($((SECONDS - start)) s, $used s of processors)")
    [ -z "$repeated" ] || summary+=("FAILED ONCE, and passed alone: $repeated")
    repeated=
    sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([a-z0-9_]+) .* ([0-9.]+) sec$/\2 s  \1/p' "$log" |
        awk -v stage="$1" '{ print $0 ", " stage }' >>"$tests"
    rm -f "$log"
}
trap '[ -z "$next" ] || kill "$next" 2>/dev/null || true; rm -f "$times_file" "$tests"' EXIT

export WERROR=ON # make reads it
stage "format and lint" lint
start=$SECONDS
make --no-print-directory test-build
count
summary+=("release build: $((SECONDS - start)) s, $used s of processors")
[ -n "${LONG:-}" ] || export SHORT=1 # make test and make tsan read it
stage "tests as released" test asan-build
summary+=("codec and exchange ran at the levels: $(build/tests/test_core_cpu --levels)")
stage "address and undefined behaviour sanitizers" asan tsan-build
stage "thread sanitizer" tsan fences-build
stage "without lib/paper and lib/gpu" fences ${LONG:+aarch64-build}
if [ -n "${LONG:-}" ]; then
    wait "$next" || true
    next= code=0 start=$SECONDS
    scripts/aarch64.sh 2>&1 | tee build/aarch64.log || code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || [ "$code" = 77 ] || { echo "check: FAILED in: aarch64 under qemu" >&2; exit 1; }
    summary+=("aarch64 under qemu: $(grep -E 'tests passed|skipped:' build/aarch64.log | tr '\n' ' ')($((SECONDS - start)) s)")
fi
count
summary+=("all: $((SECONDS / 60)) min $((SECONDS % 60)) s, $before s of processors")
echo
echo "the ten tests that took longest:"
sort -rn "$tests" | sed -n '1,10s/^/  /p'
printf '%s\n' "${summary[@]}"
scripts/python.sh say
