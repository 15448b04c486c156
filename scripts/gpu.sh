#!/usr/bin/env bash
# gpu.sh [folder for results]: on a machine with nvcc and a GPU, in less than ten minutes, the most important first: what flags cost, and what
# stands still while a stream waits for one (bench_flags, with 1, 8 and 32 connections); the tests of the kernels on the device; where a Python has torch with CUDA, training under FSDP2 and DDP with each codec, against the
# same on the processor, on a driver at its worst (lazy and eager loading of kernels, one connection, launches that wait, no cache of memory, all of it): what hangs
# is stopped, and named with what it began last; units with kernels against reducers of the processor, bits and times (bench_device); time and
# peak of memory of a step of PyTorch; the bench of the kernels; the tests again under compute-sanitizer (memcheck, racecheck and initcheck).
# With two GPUs PyTorch's processes have one each, over NCCL, and rank 0 the second one; with one GPU they share it over gloo.
# The last page of output, page.txt, says whether the path works; gpu.json and gpu.txt have everything, parts/ the output of each part. All are written as parts end.
# Needs nvcc, a GPU, a C compiler, and neither CMake nor a network. It names what is missing and leaves out what needs that: without
# libuv (libuv1-dev) training without a cache of memory, without torch all training. Bring them along in folders that CPATH, LIBRARY_PATH and LD_LIBRARY_PATH name.
# TAGC_PYTHON: the Python (python3). TAGC_GPU_BUILD: where to build (build-gpu). TAGC_GPU_SECONDS: what it may take (580). CC, CFLAGS.
# A part that fails or hangs is named, the others go on, and the script exits with 1. A part for which no time is left is not tried.
# Exits with 77, and says why, where nvcc, a C compiler or a GPU is missing; without a GPU it compiles all of it first.
# gpu.sh --architectures: compiles the kernels for all devices from sm_75 to sm_121 instead; no GPU needed (cuda_architectures.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "${1:-}" != --architectures ] || exec scripts/cuda_architectures.sh "${@:2}"
case ${1:-} in
-h | --help) exec sed -n '2,/^set /s/^# //p' scripts/gpu.sh ;;
-*) echo "gpu.sh: option \"$1\" is not known, allowed: --architectures, --help, or a folder for results" >&2; exit 2 ;;
esac
[ $# -le 1 ] || { echo "gpu.sh: $# folders, allowed is one for results" >&2; exit 2; }
build=${TAGC_GPU_BUILD:-build-gpu}
out=${1:-$build/results}
limit_s=${TAGC_GPU_SECONDS:-580}
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || { echo "gpu.sh: no nvcc: in PATH or /usr/local/cuda/bin" >&2; exit 77; }
arch=native has_gpu=1
nvidia-smi >/dev/null 2>&1 || { arch=sm_90 has_gpu=0; }
mkdir -p "$build"
build=$(cd "$build" && pwd) objects=$build/objects
rm -rf "$objects" "$build"/{probe,test_cuda_codec,bench_device,bench_flags,bench_cuda,libtagc.a,libtagc.so,libtagc-cuda.so}

# ---- what is here ----

declare -A why_no=() # <program, or torch>: what becomes of parts that need it
read -ra cc <<<"${CC:-cc}"
works() { # <flag>...: whether the program in stdin compiles and runs
    "${cc[@]}" -x c - -o "$build/probe" "$@" >/dev/null 2>&1 && "$build/probe" >/dev/null 2>&1
}
works <<<'int main(void) { return 0; }' || { echo "gpu.sh: no C compiler that works: CC is \"${cc[*]}\"" >&2; exit 77; }
no_uv='' uv=(-luv)
works -luv <<<'#include <uv.h>
#if UV_VERSION_HEX < 0x012a00
#error too old
#endif
int main(void) { return uv_version() == 0; }' || {
    no_uv='libuv 1.42 or newer is missing: install libuv1-dev (Debian, Ubuntu), libuv-devel (Fedora) or libuv (conda)'
    uv=()
}
python=${TAGC_PYTHON:-python3}
text=$("$python" -W ignore -c 'import torch
if not torch.cuda.is_available(): raise SystemExit(f"torch {torch.__version__} finds no CUDA device")' 2>&1 >/dev/null) ||
    why_no[torch]="skipped: $python: $(tail -n 1 <<<"${text:-it ended with $?}")"
[ -n "${why_no[torch]:-}" ] || arch=native has_gpu=1
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | paste -sd ';') || gpu='a GPU without nvidia-smi'
# nvcc itself knows: it may be a script that calls another one.
toolkit=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' || true)
# For bench_device alone: torch has libraries of its own, which an older toolkit's would replace.
cudart=$(find -L "$toolkit"/{lib64,lib,targets} -maxdepth 3 -name 'libcudart.so*' -print -quit 2>/dev/null || true)

# ---- build: a program that does not compile leaves the others ----

declare -A jobs=()
start() { # <what> <command>...
    "${@:2}" >"$build/$1.log" 2>&1 &
    jobs[$1]=$!
}
finish() { # <what> <program that needs it>...
    local why program
    if [ -z "${jobs[$1]:-}" ] || wait "${jobs[$1]}"; then return; fi
    why=$(grep -m 1 -E 'error|undefined' "$build/$1.log" || tail -n 1 "$build/$1.log")
    why=${why:-it took too long}
    echo "gpu.sh: $1 does not compile: $why ($build/$1.log)" >&2
    for program in "${@:2}"; do why_no[$program]=${why_no[$program]:-failed: $1 does not compile: $why}; done
}
each() { # <command>...: for each source in stdin
    timeout $((limit_s < 120 ? 60 : limit_s / 2)) xargs -P"$(nproc)" -I{} "$@" -c {} -o "$objects/{}.o"
}
c_flags=(-std=c11 -O3 -g -w -ffp-contract=off -fPIC -fvisibility=hidden -D_GNU_SOURCE -Iinclude -Ilib
         -DTAGC_HAS_PAPER=1 -DTAGC_HAS_GPU=1 "-DTAGC_HAS_NATIVE=${#uv[@]}" ${CFLAGS:-})
cuda_flags=(-std=c++17 -O3 -lineinfo -fmad=false "-arch=$arch" -Iinclude -Ilib -DTAGC_CUDA_THREADS=256
            -DTAGC_CUDA_LINES=512 -Xcompiler=-fPIC,-fvisibility=hidden)
find lib bench tests/gpu/cuda -type d -exec mkdir -p "$objects/{}" \;
c_sources() {
    find lib -name '*.c' ! -path lib/transport/mpi.c |
        if [ -n "$no_uv" ]; then grep -v ^lib/transport/native/; else cat; fi
}
compile_c() {
    local code=0
    c_sources | each "${cc[@]}" "${c_flags[@]}" || code=$?
    find "$objects" -name '*.c.o' -exec ar rc "$build/libtagc.a" {} +
    return $code
}
compile_cuda() { # <source>...
    printf '%s\n' "$@" | each "$nvcc" "${cuda_flags[@]}"
}
link() { # <program> <command>...
    [ -n "${why_no[$1]:-}" ] || start "$1" "${@:2}" -o "$build/$1"
}
start libtagc.a compile_c
start kernels compile_cuda lib/gpu/cuda/*.cu
start test_cuda_codec.o compile_cuda tests/gpu/cuda/test_cuda_codec.cpp
start bench_cuda.o compile_cuda bench/bench_cuda.cu
finish libtagc.a libtagc.so bench_device bench_flags # the others need little of it
finish kernels test_cuda_codec bench_device bench_cuda libtagc-cuda.so
finish test_cuda_codec.o test_cuda_codec
finish bench_cuda.o bench_cuda
c_link=(-Wl,-z,defs "${uv[@]}" -lpthread -lm -ldl)
kernels=("$objects"/lib/gpu/cuda/*.cu.o "$build/libtagc.a")
link libtagc.so "${cc[@]}" -shared -Wl,--version-script=cmake/libtagc.map -Wl,--whole-archive "$build/libtagc.a" \
    -Wl,--no-whole-archive "${c_link[@]}"
link bench_device "${cc[@]}" "${c_flags[@]}" bench/bench_device.c "$build/libtagc.a" "${c_link[@]}"
link bench_flags "${cc[@]}" "${c_flags[@]}" bench/bench_flags.c "$build/libtagc.a" "${c_link[@]}"
link libtagc-cuda.so "$nvcc" "${cuda_flags[@]}" -shared "${kernels[@]}" -Xlinker=--exclude-libs,ALL
link test_cuda_codec "$nvcc" "${cuda_flags[@]}" "$objects/tests/gpu/cuda/test_cuda_codec.cpp.o" "${kernels[@]}"
link bench_cuda "$nvcc" "${cuda_flags[@]}" "$objects/bench/bench_cuda.cu.o" "${kernels[@]}"
finish libtagc.so libtagc.so
finish libtagc-cuda.so libtagc-cuda.so bench_device
for program in bench_device bench_flags test_cuda_codec bench_cuda; do finish $program $program; done
why_no[torch]=${why_no[torch]:-${why_no[libtagc.so]:-}}
if [ $has_gpu = 0 ]; then
    for program in "${!why_no[@]}"; do [[ ${why_no[$program]} != failed* ]] || exit 1; done
    echo "gpu.sh: compiled for $arch; no GPU to run it on" >&2
    exit 77
fi

# ---- run ----

mkdir -p "$out/parts" # the output of each part by itself
rm -f "$out"/parts/*.txt "$out"/page.txt "$out"/gpu.json "$out"/gpu.txt "$out"/reducers.json "$out"/kernels.json "$out"/torch.json
export TAGC_LIBRARY=$build/libtagc.so
unset TAGC_CUDA_LIBRARY
[ -n "${why_no[libtagc-cuda.so]:-}" ] || export TAGC_CUDA_LIBRARY=$build/libtagc-cuda.so
parts='' page='' failed=() skipped=() is_complete=''
result_of() { # <file>: what a part has written
    if [ -s "$out/$1" ]; then cat "$out/$1"; else echo null; fi
}
write() {
    {
        printf '{"type": "gpu", "format": 2, "gpu": "%s", "nvcc": "%s", "commit": "%s", "date": "%s", "seconds": %d,\n' \
            "$gpu" "$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" \
            "$(git describe --always --dirty 2>/dev/null || echo unknown)" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" $SECONDS
        printf '"parts": {%s},\n"reducers": %s,\n"torch": %s,\n"kernels": %s}\n' "$parts" "$(result_of reducers.json)" \
            "$(result_of torch.json)" "$(result_of kernels.json)"
    } >"$out/gpu.json"
    write_page >"$out/page.txt"
}
note() { # <part> <how it ended> <seconds>
    local how
    how=$(tr -d '"\\' <<<"$2" | tr -c '[:print:]\n' ' ')
    parts+="${parts:+, }\"$1\": {\"result\": \"$how\", \"seconds\": $3}"
    page+=$(printf '  %-34s %5d s  %s' "$1" "$3" "$how")$'\n'
    case $2 in passed) ;; skipped*) skipped+=("$1") ;; *) failed+=("$1") ;; esac
    echo "-- $1: $how, $3 s"
    write
}
part() { # <name> <program that it needs, or torch> <file that it writes, or ""> <seconds that it may take> <command>...
    local name=$1 needs=$2 file=$3 may_take=$4 begin=$SECONDS code=0 how=passed said left_s=$((limit_s - SECONDS))
    shift 4
    [ -z "${why_no[$needs]:-}" ] || { note "$name" "${why_no[$needs]}" 0; return; }
    echo "== $name"
    [ $left_s -ge 5 ] || { note "$name" "skipped: no time was left" 0; return; }
    [ $may_take -le $left_s ] || may_take=$left_s
    timeout -k 5 "$may_take" "$@" 2>&1 | tee "$out/parts/${name//[^a-z0-9]/-}.txt" || code=${PIPESTATUS[0]}
    if [ $code != 0 ]; then
        sleep 0.2 # tee writes
        said=$(tac "$out/gpu.txt" | sed '/^== /Q' || true)
        how="failed with $code: $(head -n 1 <<<"$said" | cut -c 1-200)"
        # Slow, or hanging: what it began last, and when, tells.
        [ $code != 124 ] && [ $code != 137 ] || how="stopped after $may_take s, $(grep -m 1 '^at ' <<<"$said" || echo "without a word")"
        [ $code != 124 ] && [ $code != 137 ] || [ $may_take != $left_s ] || how="skipped: no time was left after $may_take s"
        [ $needs != sanitizer ] || [[ $said != *"Device not supported"* ]] || how="skipped: $1 does not support this device"
    fi
    # A file that ends in the middle is no JSON.
    [ -z "$file" ] || [[ $(tail -c 2 "$out/$file" 2>/dev/null) == *"}"* ]] || rm -f "$out/$file"
    note "$name" "$how" $((SECONDS - begin))
}
# How a driver may be at its worst: what to set, with the words for it.
conditions=("eager loading: CUDA_MODULE_LOADING=EAGER"
            "lazy loading: CUDA_MODULE_LOADING=LAZY"
            "one connection: CUDA_DEVICE_MAX_CONNECTIONS=1"
            "launches that wait: CUDA_LAUNCH_BLOCKING=1"
            "no cache of memory: PYTORCH_NO_CUDA_MEMORY_CACHING=1"
            "all of it: CUDA_MODULE_LOADING=LAZY CUDA_DEVICE_MAX_CONNECTIONS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1")
train_in_conditions() {
    local condition settings name took may_take=150 # the first reads torch from the disk, and all of its kernels
    for condition in "${conditions[@]}"; do
        read -ra settings <<<"${condition#*: }"
        name="training, ${condition%%: *}" took=$SECONDS
        if [ -n "$no_uv" ] && [[ $condition == *NO_CUDA_MEMORY_CACHING* ]]; then
            note "$name" "skipped: it may hang while libtagc sends by gloo; $no_uv" 0
            continue
        fi
        part "$name" torch "" $may_take env "${settings[@]}" "$python" lab/studies/torch_gpu.py --only losses --loss-steps 8
        took=$((SECONDS - took)) # a machine that is slow is so in all conditions
        [ $may_take != 150 ] || may_take=$((took < 150 ? took + 60 : 75))
    done
}
write_page() {
    echo "$gpu, $(date -u +%Y-%m-%d), $(git describe --always --dirty 2>/dev/null || echo unknown)"
    printf '%s' "$page"
    [ -z "$no_uv" ] || echo "libtagc sends by gloo here, as no build with libuv does: $no_uv"
    if [ -z "$is_complete" ]; then
        echo "Not complete: other parts follow."
    elif [ ${#failed[@]} -gt 0 ]; then
        echo "The path does NOT work here: ${#failed[@]} parts failed: $(printf '%s; ' "${failed[@]}" | sed 's/; $//')."
    elif [ ${#skipped[@]} -gt 0 ]; then
        echo "What was tried works here. Not tried: $(printf '%s; ' "${skipped[@]}" | sed 's/; $//')."
    else
        echo "The path works here."
    fi
    echo "Figures: $out/gpu.txt and $out/gpu.json, after $SECONDS s"
}
all() {
    local sanitizer tool connections
    for connections in 1 8 32; do
        part "flags, connections $connections" bench_flags "" 40 env CUDA_DEVICE_MAX_CONNECTIONS=$connections \
            "$build/bench_flags" ${cudart:+--library "$cudart"}
    done
    part tests test_cuda_codec "" 100 "$build/test_cuda_codec"
    [ -n "${why_no[torch]:-}" ] || train_in_conditions
    part reducers bench_device reducers.json 100 "$build/bench_device" --required ${cudart:+--library "$cudart"} --json "$out/reducers.json"
    part torch torch torch.json 200 "$python" lab/studies/torch_gpu.py --json "$out/torch.json"
    part bench bench_cuda kernels.json 90 "$build/bench_cuda" "$out/kernels.json"
    sanitizer=$(command -v compute-sanitizer ||
        find -L "$toolkit"/{bin,compute-sanitizer} -maxdepth 1 -name compute-sanitizer -print -quit 2>/dev/null || true)
    [ -n "$sanitizer" ] || why_no[sanitizer]='skipped: no compute-sanitizer'
    why_no[sanitizer]=${why_no[test_cuda_codec]:-${why_no[sanitizer]:-}}
    for tool in memcheck racecheck initcheck; do
        part $tool sanitizer "" 90 "$sanitizer" --tool $tool --error-exitcode 1 "$build/test_cuda_codec" 10
    done
    is_complete=1
    write
    rm -f "$out/reducers.json" "$out/kernels.json" "$out/torch.json"
    cat "$out/page.txt"
    [ ${#failed[@]} = 0 ]
}
all 2>&1 | tee "$out/gpu.txt"
