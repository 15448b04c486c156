#!/usr/bin/env bash
# test_gpu_script.sh <folder> [nvcc]: scripts/gpu.sh on machines that stand-ins imitate: without nvcc, without a GPU, without torch, and with all of it,
# where parts work, fail and hang, and where what it needs is missing. Only at the end is libtagc compiled, as gpu.sh does. No GPU is used.
# With "nvcc" instead: gpu.sh compiles and links all that it runs, with this machine's nvcc, which takes a minute of a processor or two.
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
# A compiler makes a program that does what OF_<its name> says, and writes what gpu.sh asks it to. WITHOUT: what it does not find.
compiler='all=" $* "
while [ $# -gt 0 ]; do [ "$1" != -o ] || to=$2; shift; done
case $all in
*dryrun*) echo "#\$ TOP=$TOOLKIT/bin/.." >&2; exit ;;
*" - "*) source=$(cat); [ -z "${WITHOUT:-}" ] || case $source in *"<$WITHOUT>"*) exit 1 ;; esac ;;
*" -c "*) case $all in *" ${BROKEN:-no} "*) echo "x.c:1: error: it is \"broken\"" >&2; exit 1 ;; esac; : >"$to"; exit ;;
esac
[ -n "${to:-}" ] || { echo "release 13.0,"; exit; }
printf "#!/bin/sh\necho ran \"\$*\"\nfor last; do :; done\ncase \$last in *.json) echo {} >\$last ;; esac\nexit \${OF_%s:-0}\n" "$(basename "$to" | tr -c "a-z_\n" _)" >"$to"
chmod +x "$to"'
stand_in nvcc <<<"$compiler"
stand_in cc <<<"$compiler"
stand_in ar <<<'exit 0'
stand_in nvidia-smi <<<'[ -n "${HAS_GPU:-}" ] || exit 9
[ $# = 0 ] || echo "Stand-in 9000, 580.1"'
stand_in python <<'END'
if [ "$1" = -W ]; then
    echo "UserWarning: Failed to initialize NumPy" >&2
    [ -n "${HAS_TORCH:-}" ] || { echo "torch is \"missing\"" >&2; exit 1; }
    exit
fi
[ -z "${LD_LIBRARY_PATH:-}" ] || { echo "libcusparse: undefined symbol" >&2; exit 1; }
echo "${CUDA_MODULE_LOADING:--} ${CUDA_DEVICE_MAX_CONNECTIONS:--} ${PYTORCH_NO_CUDA_MEMORY_CACHING:--} $TAGC_LIBRARY ${*:2}" >>"$TRAINED"
for last; do :; done
case $last in *.json) echo '{}' >"$last" ;; esac
[ "${PYTORCH_NO_CUDA_MEMORY_CACHING:-}" != 1 ] || [ "${CUDA_DEVICE_MAX_CONNECTIONS:-}" = 1 ] || { echo "at 5 s: ddp-tagc on cuda"; exit "${OF_no_cache:-0}"; }
END
run() { # <expected exit> <variables and arguments of env>
    local code=0
    rm -f trained
    (cd "$root" && env PATH="$work/bin:$PATH" CC=cc TAGC_PYTHON=python TAGC_GPU_BUILD="$work/build" TOOLKIT="$work/toolkit" \
        TRAINED="$work/trained" "${@:2}") >said 2>&1 || code=$?
    [ $code = "$1" ] || fail "exit $code, must be $1: ${*:2}"
}
said() {
    grep -qF -- "$1" said || fail "not said: $1"
}
if [ "${2:-}" = nvcc ]; then
    rm bin/{nvcc,cc,ar}
    run 77 CC="$(command -v ccache || true) cc" CFLAGS=-O0 TAGC_GPU_SECONDS=3000 scripts/gpu.sh
    said 'compiled for sm_90; no GPU to run it on'
    for name in test_cuda_codec bench_device bench_flags bench_cuda libtagc.so libtagc-cuda.so; do [ -x build/$name ] || fail "$name was not built"; done
    echo passed
    exit
fi
mkdir -p build toolkit/{bin,lib64}
touch toolkit/lib64/libcudart.so

run 2 scripts/gpu.sh --architecture
said 'option "--architecture" is not known'
run 2 scripts/gpu.sh one two
said '2 folders, allowed is one'
run 0 scripts/gpu.sh --help
said 'says whether the path works'

run 77 scripts/gpu.sh # compiles, and finds no GPU
said 'compiled for sm_90; no GPU to run it on'
for name in test_cuda_codec bench_device bench_flags bench_cuda libtagc-cuda.so; do [ -x build/$name ] || fail "$name was not compiled"; done
[ ! -e trained ] || fail "trained without a GPU"

run 0 HAS_GPU=1 scripts/gpu.sh "$work/out"
said 'What was tried works here. Not tried: torch; memcheck; racecheck; initcheck.'
grep -q 'torch .* skipped: python: torch is missing' out/page.txt || fail "the page does not say why torch was not tried"
said "ran --required --library $work/toolkit/bin/../lib64/libcudart.so --json"
python3 -m json.tool out/gpu.json >/dev/null || fail "gpu.json is no JSON"
for part in flags--connections-32 tests reducers bench; do
    grep -q ran "out/parts/$part.txt" || fail "there is no output of $part by itself"
done

run 0 HAS_GPU=1 HAS_TORCH=1 scripts/gpu.sh "$work/out"
said 'What was tried works here. Not tried: memcheck; racecheck; initcheck.'
said 'skipped: no compute-sanitizer'
diff - <(sed "s| $work/build/libtagc.so||" trained) <<END || fail "not in these conditions"
EAGER - - --only losses --loss-steps 8
LAZY - - --only losses --loss-steps 8
- 1 - --only losses --loss-steps 8
- - - --only losses --loss-steps 8
- - 1 --only losses --loss-steps 8
LAZY 1 1 --only losses --loss-steps 8
- - - --json $work/out/torch.json
END
[ "$(wc -l <out/page.txt)" -le 40 ] || fail "more than a page"
python3 -m json.tool out/gpu.json >/dev/null || fail "gpu.json is no JSON"

# 124 is what timeout ends with: the part hangs.
cp bin/ar toolkit/bin/compute-sanitizer
run 1 HAS_GPU=1 HAS_TORCH=1 OF_no_cache=124 OF_bench_cuda=3 scripts/gpu.sh "$work/out"
said 'The path does NOT work here: 2 parts failed: training, no cache of memory; bench.'
grep -q 'training, no cache of memory.*stopped after 6[0-9] s, at 5 s: ddp-tagc on cuda' out/page.txt || fail "the hang is not on the page"
grep -q 'bench .*failed with 3: ran' out/page.txt || fail "the failure is not on the page"
grep -q 'racecheck .*passed' out/page.txt || fail "nvcc's own compute-sanitizer was not found"
python3 - <<'END' || fail "gpu.json does not say so"
import json
parts = json.load(open("out/gpu.json"))["parts"]
assert parts["bench"]["result"].startswith("failed with 3") and parts["tests"]["result"] == "passed", parts
assert parts["training, no cache of memory"]["result"].startswith("stopped after 6"), parts
END

# What is missing is named, and what needs none of it runs.
run 0 HAS_GPU=1 HAS_TORCH=1 WITHOUT=uv.h scripts/gpu.sh "$work/out"
said 'Not tried: training, no cache of memory; training, all of it.'
grep -q 'training, all of it .*skipped: it may hang.*gloo; libuv 1.42' out/page.txt || fail "the page does not say what gloo may do"
[ "$(wc -l <trained)" = 5 ] && [ ! -e build/objects/lib/transport/native/open.c.o ] || fail "without libuv"
run 0 HAS_GPU=1 TAGC_GPU_SECONDS=2 scripts/gpu.sh "$work/out"
said 'Not tried: flags, connections 1; flags, connections 8; flags, connections 32; tests; reducers; torch; bench; memcheck; racecheck; initcheck.'
run 1 HAS_GPU=1 HAS_TORCH=1 BROKEN=bench/bench_cuda.cu scripts/gpu.sh "$work/out"
said 'The path does NOT work here: 1 parts failed: bench.'
grep -q 'bench .*failed: bench_cuda.o does not compile: x.c:1: error: it is broken' out/page.txt || fail "the page does not say what failed"
run 1 BROKEN=bench/bench_cuda.cu scripts/gpu.sh

# As a compiler does it: no name is missing. Without optimisation, which takes time.
rm bin/cc bin/ar
run 77 CC="$(command -v ccache || true) cc" CFLAGS=-O0 scripts/gpu.sh
build/bench_device --library no-such-library | grep -q 'skipped\|no ' || fail "bench_device does not run"
python3 -c 'import ctypes; ctypes.CDLL("build/libtagc.so").tagc_native_open' || fail "libtagc.so does not load"

# Without nvcc: none in PATH, and CUDA's own place hidden.
rm bin/nvcc
if [ ! -x /usr/local/cuda/bin/nvcc ] && ! command -v nvcc >/dev/null; then
    run 77 scripts/gpu.sh
    said 'no nvcc'
fi
echo passed
