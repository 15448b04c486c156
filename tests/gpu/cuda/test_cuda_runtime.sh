#!/usr/bin/env bash
# test_cuda_runtime.sh <libtagc-cuda.so> <release of CUDA>: scripts/cuda_runtime.py passes the library for that release, and refuses it for an
# older one, with newer PTX, with binaries of a newer format, with a runtime, and without code. Wheels must be of 12.8 (scripts/wheels.sh).
set -euo pipefail
check=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/scripts/cuda_runtime.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "FAILED: $1" >&2
    cat "$work/said" >&2
    exit 1
}
export TAGC_CUDA_NEWEST=$2
"$check" "$1" >"$work/said" 2>&1 || fail "of $2"
cat "$work/said"
grep -q 'PTX .* for sm_' "$work/said" && grep -q 'binary for sm_' "$work/said" || fail "what is in it"
refuses() { # <words> <what is changed: an expression of Python over `data`>
    python3 -c 'import sys
data = open(sys.argv[1], "rb").read()
changed = eval(sys.argv[3])
assert changed != data
open(sys.argv[2], "wb").write(changed)' "$library" "$work/library.so" "$2"
    ! "$check" "$work/library.so" >"$work/said" 2>&1 || fail "$1 passed"
    grep -q "$1" "$work/said" || fail "does not say: $1"
}
library=$1
TAGC_CUDA_NEWEST=11.0 refuses 'must be of CUDA 11.0 or older' 'data + b"x"'
refuses 'and has PTX 9.9 for sm_' 're.sub(rb"(?m)^\.version \d\.\d$", b".version 9.9", data) if (re := __import__("re")) else data'
refuses 'format 9' 'data.replace(b"\x7fELF\x02\x01\x01\x41\x08", b"\x7fELF\x02\x01\x01\x41\x09").replace(b"\x7fELF\x02\x01\x01\x33\x07", b"\x7fELF\x02\x01\x01\x33\x09")'
refuses 'has or needs a CUDA runtime' 'data.replace(b"libcuda.so.1", b"libcudart.so")'
refuses 'no code for a device' 'data.replace(b".nv_fatbin", b".xx_fatbin")'
echo passed
