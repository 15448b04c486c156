#!/usr/bin/env bash
# test_gpu_script.sh <folder>: scripts/gpu.sh on machines that stand-ins imitate: without nvcc, without a GPU, without torch, and with all of it,
# where parts work, fail and hang. Nothing is compiled, and no GPU is used.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
rm -rf "$1"
mkdir -p "$1/bin"
cd "$1"
work=$PWD

fail() {
    echo "FAILED: $1" >&2
    cat "$work/said" >&2
    exit 1
}
stand_in() { # <name>: the program, from stdin
    { echo '#!/usr/bin/env bash'; cat; } >"bin/$1"
    chmod +x "bin/$1"
}
# A compiler makes a program that does what OF_<its name> says, and writes what gpu.sh asks it to.
compiler='while [ $# -gt 0 ]; do [ "$1" != -o ] || to=$2; shift; done
[ -n "${to:-}" ] || { echo "release 13.0,"; exit; }
printf "#!/bin/sh\nfor last; do :; done\ncase \$last in *.json) echo {} >\$last ;; esac\nexit \${OF_%s:-0}\n" "$(basename "$to" | tr -c "a-z_\n" _)" >"$to"
chmod +x "$to"'
stand_in nvcc <<<"$compiler"
stand_in cc <<<"$compiler"
stand_in cmake <<<'exit 0'
stand_in nvidia-smi <<<'[ -n "${HAS_GPU:-}" ] || exit 9
[ $# = 0 ] || echo "Stand-in 9000, 580.1"'
stand_in python <<'END'
[ "$1" != -c ] || { [ -n "${HAS_TORCH:-}" ] || echo "torch is \"missing\""; exit; }
echo "${CUDA_MODULE_LOADING:--} ${CUDA_DEVICE_MAX_CONNECTIONS:--} ${PYTORCH_NO_CUDA_MEMORY_CACHING:--} $TAGC_LIBRARY ${*:2}" >>"$TRAINED"
for last; do :; done
case $last in *.json) echo '{}' >"$last" ;; esac
[ "${PYTORCH_NO_CUDA_MEMORY_CACHING:-}" != 1 ] || [ "${CUDA_DEVICE_MAX_CONNECTIONS:-}" = 1 ] || exit "${OF_no_cache:-0}"
END
run() { # <expected exit> <variables and arguments of env>
    local code=0
    rm -f trained
    (cd "$root" && env PATH="$work/bin:$PATH" CC=cc TAGC_PYTHON=python TAGC_GPU_BUILD="$work/build" TRAINED="$work/trained" "${@:2}") >said 2>&1 || code=$?
    [ $code = "$1" ] || fail "exit $code, must be $1: ${*:2}"
}
said() {
    grep -qF -- "$1" said || fail "not said: $1"
}
mkdir -p build

run 2 scripts/gpu.sh --architecture
said 'option "--architecture" is not known'
run 2 scripts/gpu.sh one two
said '2 folders, allowed is one'
run 0 scripts/gpu.sh --help
said 'says whether the path works'

run 77 scripts/gpu.sh # compiles, and finds no GPU
said 'compiled for sm_90; no GPU to run it on'
for name in test_cuda_codec bench_device bench_cuda libtagc-cuda.so; do [ -x build/$name ] || fail "$name was not compiled"; done
[ ! -e trained ] || fail "trained without a GPU"

run 0 HAS_GPU=1 scripts/gpu.sh "$work/out"
said 'The kernels work here. PyTorch was not tried: torch is "missing".'
python3 -m json.tool out/gpu.json >/dev/null || fail "gpu.json is no JSON"

run 0 HAS_GPU=1 HAS_TORCH=1 scripts/gpu.sh "$work/out"
said 'The path works here.'
said 'skipped: no compute-sanitizer'
diff - <(sed "s| $work/build/libtagc.so||" trained) <<END || fail "not in these conditions"
EAGER - - --only losses --loss-steps 8
LAZY - - --only losses --loss-steps 8
- 1 - --only losses --loss-steps 8
- - 1 --only losses --loss-steps 8
LAZY 1 1 --only losses --loss-steps 8
- - - --json $work/out/torch.json
END
[ "$(wc -l <out/page.txt)" -le 40 ] || fail "more than a page"
python3 -m json.tool out/gpu.json >/dev/null || fail "gpu.json is no JSON"

# 124 is what timeout ends with: the part hangs.
run 1 HAS_GPU=1 HAS_TORCH=1 OF_no_cache=124 OF_bench_cuda=3 scripts/gpu.sh "$work/out"
said 'The path does NOT work here: 2 parts failed: training, no cache of memory; bench.'
grep -q 'training, no cache of memory.*stopped after 75 s' out/page.txt || fail "the hang is not on the page"
grep -q 'bench .*failed with 3' out/page.txt || fail "the failure is not on the page"
python3 - <<'END' || fail "gpu.json does not say so"
import json
parts = json.load(open("out/gpu.json"))["parts"]
assert parts["bench"]["result"] == "failed with 3" and parts["tests"]["result"] == "passed", parts
assert parts["training, no cache of memory"]["result"] == "stopped after 75 s", parts
END

# Without nvcc: none in PATH, and CUDA's own place hidden.
rm bin/nvcc
if [ ! -x /usr/local/cuda/bin/nvcc ] && ! command -v nvcc >/dev/null; then
    run 77 scripts/gpu.sh
    said 'no nvcc'
fi
echo passed
