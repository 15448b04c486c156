#!/usr/bin/env bash
# test_gpu_dry.sh <build folder> <folder>: all stages of scripts/gpu.sh with this build's programs in small sizes: on the fake runtime, with the
# kernels that the processor executes; and where there is no runtime at all, in which case every page says why nothing was tried.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$(cd "$1" && pwd)
rm -rf "$2"
mkdir -p "$2"
cd "$2"
work=$PWD
fail() {
    echo "FAILED: $1" >&2
    cat "$work"/out*/*.txt "$work"/said* >&2
    exit 1
}
place() { # <folder>: what "gpu.sh build" would have made
    mkdir "$1"
    for name in bench_flags bench_device bench_overlap; do ln -s "$build/bench/$name" "$1/"; done
    ln -s "$build/libtagc.so" "$build/tests" "$1/"
    ln -s "$build/tests/gpu/cuda/libtagc-cuda-harness.so" "$1/libtagc-cuda.so"
    ln -s "$build/tests/gpu/cuda/test_cuda_codec" "$1/"
    echo "the fake runtime" >"$1/made"
}
code=0
TAGC_PYTHON=$("$root/scripts/python.sh" find) || { echo "without torch the stages of Python are skipped"; TAGC_PYTHON=python3; }
export TAGC_PYTHON

place fake
ln -s "$build/tests/gpu/libcudart.so.13" "$build/tests/gpu/libtagc-load.so" fake/
"$root/scripts/gpu.sh" run --fake fake out >said 2>&1 || code=$?
[ $code = 0 ] || fail "exit $code, must be 0"
[ "$(wc -l <out/summary.txt)" = 8 ] || fail "a line for each stage"
! grep -q FAILED out/summary.txt || fail "a stage failed"
grep -q '^7 .*skipped: ' out/summary.txt || [ -n "$(command -v compute-sanitizer)" ] || fail "compute-sanitizer is none"
grep -q 'by version: found' out/1-facts.txt || fail "facts"
grep -q 'kernel: 3 of 3 stand still while one waits' out/2-flags.txt && grep -q 'kernel: 0 of 3' out/2-flags.txt || fail "flags"
grep -q 'the first launch of a kernel from a second thread: returns' out/2-flags.txt || fail "first launches"
grep -q 'calls wait: yes' out/3-kernels.txt && grep -q 'calls wait: no' out/3-kernels.txt || fail "launches that wait"
if "$TAGC_PYTHON" -c 'import torch' 2>/dev/null; then
    for kind in fsdp2 hsdp ddp; do
        for connections in "8 connections" "1 connection"; do
            grep -q "^$connections: $kind  *same bits" out/4-bits.txt || fail "bits of $kind, $connections"
        done
        grep -q "^launches that wait: $kind  *the host's codec" out/4-bits.txt || fail "launches that wait, $kind"
    done
    [ "$(grep -c '"arm"' out/losses.jsonl)" = 9 ] || fail "losses"
    [ -n "$(command -v nsys)" ] || zcat out/trace.json.gz | grep -c traceEvents >trace || fail "a trace"
fi
grep -q 'encode, bodies to the host, flag' out/5-speed.txt && grep -q 'same bits' out/5-speed.txt || fail "speed"
grep -q 'of the shorter one is hidden' out/6-overlap.txt || fail "overlap"

code=0
place none
echo "no library" >none/libcudart.so.13
"$root/scripts/gpu.sh" run --fake none out-none >said-none 2>&1 || code=$?
[ $code = 77 ] || fail "without a runtime: exit $code, must be 77"
[ "$(grep -c 'skipped: .*there is no CUDA runtime' out-none/summary.txt)" = 8 ] || fail "each stage says why nothing was tried"
echo passed
