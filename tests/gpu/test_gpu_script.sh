#!/usr/bin/env bash
# test_gpu_script.sh <folder> [nvcc]: scripts/gpu.sh where stand-ins imitate compilers, and the programs that it runs: what works, fails, hangs, cannot
# be ended, or is missing. Only at the end is libtagc compiled, as gpu.sh does. No GPU is used.
# With "nvcc" instead: gpu.sh compiles and links all that it runs, with this machine's nvcc, which takes a minute of a processor or two.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
rm -rf "$1"
mkdir -p "$1/bin"
cd "$1"
work=$PWD
built=(libtagc.so libtagc-cuda.so libtagc-load.so bench_flags bench_device bench_overlap bench_cuda test_cuda_codec)

fail() {
    echo "FAILED: $1" >&2
    cat "$work/said" >&2
    exit 1
}
stand_in() { # <file>: the program, from stdin
    { echo '#!/usr/bin/env bash'; cat; } >"$1"
    chmod +x "$1"
}
run() { # <expected exit> <variables and arguments of env>
    local code=0
    (cd "$root" && env PATH="$work/bin:$PATH" TAGC_PYTHON="$work/bin/python" TOOLKIT="$work/toolkit" "${@:2}") >said 2>&1 || code=$?
    [ $code = "$1" ] || fail "exit $code, must be $1: ${*:2}"
}
said() {
    grep -qF -- "$1" said || fail "not said: $1"
}
verdict() { # <stage> <words>
    grep -q "^$1 [a-z]*: $2" out/summary.txt || { cat out/summary.txt >>said; fail "stage $1 is not \"$2\""; }
}

if [ "${2:-}" = nvcc ]; then
    rmdir bin
    run 0 CC="$(command -v ccache || true) cc" CFLAGS=-O0 scripts/gpu.sh build "$work/built"
    for name in "${built[@]}"; do [ -x "built/$name" ] || fail "$name was not built"; done
    ls built/libcudart.so.* >/dev/null || fail "the runtime does not travel"
    mv built elsewhere # as where it travels to
    for name in test_cuda_codec bench_cuda libtagc-cuda.so libtagc-load.so; do
        ! ldd "elsewhere/$name" | grep 'not found' || fail "$name does not travel"
        ! grep -q libcudart "elsewhere/$name" || fail "$name has a runtime, which needs a driver as new as itself"
    done
    [ "$(du -sm elsewhere | cut -f 1)" -lt 48 ] || fail "it is too large to travel with the tree"
    echo passed
    exit
fi

# ---- build ----

# WITHOUT: what a compiler does not find. BROKEN: what it does not compile.
compiler='all=" $* "
while [ $# -gt 0 ]; do [ "$1" != -o ] || to=$2; shift; done
case $all in
*dryrun*) echo "#\$ TOP=$TOOLKIT/bin/.." >&2; exit ;;
*" - "*) source=$(cat); [ -z "${WITHOUT:-}" ] || case $source in *"<$WITHOUT>"*) exit 1 ;; esac ;;
esac
case $all in *" ${BROKEN:-no} "*) echo "x.c:1: error: it is \"broken\"" >&2; exit 1 ;; esac
[ -n "${to:-}" ] || { echo "release 13.0,"; exit; }
printf "#!/bin/sh\nexit 0\n" >"$to"
chmod +x "$to"'
stand_in bin/nvcc <<<"$compiler"
stand_in bin/cc <<<"$compiler"
stand_in bin/ar <<<'exit 0'
stand_in bin/ldd <<<'exit 0'
mkdir -p toolkit/{bin,lib64}
touch toolkit/lib64/libcudart.so.13

run 2 scripts/gpu.sh
said 'must be build, run'
run 2 scripts/gpu.sh build one two
said '2 folders, allowed is one'
run 0 scripts/gpu.sh --help
said 'compute-sanitizer: memcheck'
# All deadlines together leave a machine's 15 minutes time to start, and each half fits into a call.
seconds() { # <stage>...
    local stage sum=0
    for stage; do sum=$((sum + $(sed -n "s/^declare -A limits=.*\[$stage\]=\([0-9]*\).*/\1/p" "$root/scripts/gpu.sh"))); done
    echo $sum
}
[ "$(seconds 1 2 3 4)" = 290 ] && [ "$(seconds 5 6 7 8)" = 500 ] || fail "the deadlines are not those of --help"
run 0 CC=cc scripts/gpu.sh build "$work/made"
for name in "${built[@]}" made libcudart.so.13; do [ -e "made/$name" ] || fail "$name was not made"; done
run 1 CC=cc BROKEN=bench/bench_overlap.c scripts/gpu.sh build "$work/made"
said 'bench_overlap does not compile: x.c:1: error: it is "broken"'
[ -e made/bench_device ] && [ ! -e made/bench_overlap ] || fail "what does not compile leaves the others"
run 0 CC=cc WITHOUT=uv.h scripts/gpu.sh build "$work/made"
said 'libuv 1.42 or newer is missing'
run 77 CC=false scripts/gpu.sh build "$work/made"
said 'no C compiler that works'
mkdir others && touch others/file
run 2 CC=cc scripts/gpu.sh build "$work/others"
[ -e others/file ] || fail "another's folder was removed"

# ---- an older ptxas ----

mkdir -p toolkit/nvvm/bin
cp bin/nvcc toolkit/bin/
touch toolkit/bin/nvcc.profile
stand_in ptxas <<<'echo "release ${OLDER:-12.8}, V"'
stand_in toolkit/nvvm/bin/cicc <<<'printf ".version 9.0\n.target sm_75\n" >"$1"
exit ${OF_cicc:-0}'
run 0 lib/gpu/cuda/tools.sh nvcc "$work/ptxas" "$work/tools"
said "$work/tools/bin/nvcc"
tools/nvvm/bin/cicc x.ptx && grep -qx '.version 8.7' x.ptx && grep -qx '.target sm_75' x.ptx || fail "PTX is not labelled"
! OF_cicc=3 tools/nvvm/bin/cicc x.ptx || fail "a compiler that fails"
[ tools/bin/ptxas -ef ptxas ] && [ -x tools/bin/nvcc ] && [ ! -L tools/bin/nvcc ] || fail "the tools"
run 0 OLDER=13.0 lib/gpu/cuda/tools.sh nvcc "$work/ptxas" "$work/tools"
said "$work/bin/nvcc"
run 1 OLDER=11.4 lib/gpu/cuda/tools.sh nvcc "$work/ptxas" "$work/tools"
said 'is of CUDA 11.4, must be of 12.4'
run 1 lib/gpu/cuda/tools.sh nvcc "$work/none" "$work/tools"
said 'none is no program'
run 0 CC=cc TAGC_PTXAS="$work/ptxas" scripts/gpu.sh build "$work/made"
[ -e made/libtagc-cuda.so ] && [ ! -e made/tools ] || fail "built with an older ptxas"

# ---- run ----

# A program that does what OF_<its name> says: the first word is its exit, or "hang", or "deaf", which cannot be ended by asking.
program='name=$(basename "$0" | tr -c "a-z_\n" _)
case $name,$* in python,*card/*) name=$(basename "$1" .py) ;; esac
of=OF_$name
case $*,${REFUSES:-none} in
*--runtimes,*) echo "${RUNTIMES:-}"; exit ;;
*"${REFUSES:-none}"*,*) echo "$name: skipped: the driver is too old"; exit 77 ;;
esac
echo "$name ran $* with ${CUDA_DEVICE_MAX_CONNECTIONS:--} ${CUDA_LAUNCH_BLOCKING:--}"
case ${!of:-0} in
hang) echo "at 5 s: fsdp2"; exec sleep 600 ;;
deaf) trap "" TERM; echo "at 7 s: ddp"; while :; do sleep 1; done ;;
77) echo "$name: skipped: there is none" ;;
esac
exit ${!of:-0}'
for name in python nvidia-smi; do stand_in bin/$name <<<"$program"; done
rm -f bin/ldd
for name in bench_flags bench_device bench_overlap bench_cuda test_cuda_codec; do stand_in made/$name <<<"$program"; done
stand_in bin/compute-sanitizer <<<"$program"
touch made/{libtagc.so,libtagc-cuda.so,libtagc-load.so,libcudart.so.13}
echo "a commit, sm_90" >made/made

run 2 scripts/gpu.sh run made
run 2 scripts/gpu.sh run "$work/made" "$work/out" 9
said 'stage "9" is not known'
run 2 scripts/gpu.sh run "$work/none" "$work/out"
said 'gpu.sh build'

run 0 scripts/gpu.sh run "$work/made" "$work/out" 1 2 3 4
[ "$(ls out)" = "$(printf '%s\n' 1-facts.txt 2-flags.txt 3-kernels.txt 4-bits.txt summary.txt)" ] || fail "pages: $(ls out)"
for stage in 1 2 3 4; do verdict $stage passed; done
said "bench_flags ran --library $work/made/libcudart.so.13 --load $work/made/libtagc-load.so with 32 -"
said "bench_flags ran --part waits --library $work/made/libcudart.so.13 with - 1"
head -n 2 out/4-bits.txt | grep -q 'a commit, sm_90' || fail "the page does not say what was built"
run 0 scripts/gpu.sh run "$work/made" "$work/out" 5 6 7 8 # into the same folder
[ "$(wc -l <out/summary.txt)" = 8 ] || fail "a line for each stage"
verdict 7 passed

# Where the driver is too old for the runtime that travels, torch's is taken.
rm -rf out
touch toolkit/lib64/libcudart.so.12
run 0 REFUSES="$work/made/libcudart.so.13" RUNTIMES="$work/toolkit/lib64/libcudart.so.12" scripts/gpu.sh run "$work/made" "$work/out" 2 5
verdict 5 passed
said "bench_flags ran --library $work/toolkit/lib64/libcudart.so.12 --load $work/made/libtagc-load.so with 32 -"
said "bits ran tests/gpu/card/bits.py --trace $work/out/trace.json.gz"

# What fails, hangs or is deaf leaves the others.
rm -rf out
run 1 TAGC_GPU_PART_SECONDS=8 OF_bits=hang OF_bench_overlap=deaf OF_bench_cuda=3 OF_facts=77 scripts/gpu.sh run "$work/made" "$work/out"
verdict 1 'passed, but for: torch skipped: there is none'
verdict 2 passed
verdict 4 'FAILED: bits stopped after [0-9]* s, at 5 s: fsdp2'
verdict 5 'FAILED: kernels, 7 B failed with 3: bench_cuda ran'
verdict 6 'FAILED: overlap stopped after [0-9]* s, at 7 s: ddp'
verdict 7 passed
verdict 8 passed
grep -q 'reducers of both kinds: passed' out/5-speed.txt || fail "a part after one that failed"

# No time is left: what is late is not tried, and says so.
rm -rf out
run 77 TAGC_GPU_SECONDS=1 scripts/gpu.sh run "$work/made" "$work/out" 2 7
verdict 7 'skipped: memcheck skipped: no time was left'

# No device, as the first program says; and a folder in which something was not built.
rm -rf out
run 77 OF_bench_flags=77 scripts/gpu.sh run "$work/made" "$work/out"
[ "$(grep -c 'skipped: there is none' out/summary.txt)" = 8 ] || fail "each stage says why"
rm made/{bench_overlap,libtagc-cuda.so} bin/compute-sanitizer
run 0 scripts/gpu.sh run "$work/made" "$work/out" 4 6 7 8
verdict 4 "skipped: bits skipped: $work/made has no libtagc-cuda.so"
verdict 6 'skipped'
verdict 8 passed

# As a compiler does it: no name is missing. Without optimisation, which takes time.
rm bin/cc bin/ar
run 0 CC="$(command -v ccache || true) cc" CFLAGS=-O0 scripts/gpu.sh build "$work/made"
code=0
made/bench_flags >said 2>&1 || code=$?
[ $code = 77 ] || grep -q runtime said || fail "bench_flags does not run"
python3 -c 'import ctypes; ctypes.CDLL("made/libtagc.so").tagc_native_open' || fail "libtagc.so does not load"

# Without nvcc: none in PATH, and CUDA's own place hidden.
rm bin/nvcc
if [ ! -x /usr/local/cuda/bin/nvcc ] && ! command -v nvcc >/dev/null; then
    run 77 scripts/gpu.sh build "$work/made"
    said 'no nvcc'
fi
echo passed
