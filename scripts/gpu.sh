#!/usr/bin/env bash
# gpu.sh [folder for results]: on a machine with nvcc and a GPU, in less than ten minutes, the most important first: the tests of the kernels
# on the device; where a Python has torch with CUDA, training under FSDP2 and DDP with each codec and with transport="group", against the
# same on the processor, on a driver at its worst (lazy and eager loading of kernels, one connection, no cache of memory, all of it): what hangs
# is stopped and named; reducers with kernels against those of the processor, bits and times (bench_device); time and peak of memory of a
# step of PyTorch; the bench of the kernels; the tests again under compute-sanitizer (memcheck and racecheck) where that is there.
# With two GPUs PyTorch's processes have one each, over NCCL, and rank 0 the second one; with one GPU they share it over gloo.
# The last page of output, page.txt, says whether the path works; gpu.json and gpu.txt have everything, and are written as parts end.
# TAGC_PYTHON: the Python (python3). TAGC_GPU_BUILD: where to build (build-gpu). A part that fails or runs out of time is named, the others
# go on, and the script exits with 1. Exits with 77, and says why, where nvcc or a GPU is missing; without a GPU it compiles all of it first.
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
limit_s=580
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || { echo "gpu.sh: no nvcc: in PATH or /usr/local/cuda/bin" >&2; exit 77; }
arch=native has_gpu=1
nvidia-smi >/dev/null 2>&1 || { arch=sm_90 has_gpu=0; }
python=${TAGC_PYTHON:-python3} targets=(module_gpu module_fences)
why_no_torch=$("$python" -c 'import torch
if not torch.cuda.is_available(): raise SystemExit(f"torch {torch.__version__} finds no CUDA device")' 2>&1 | tail -n 1) || true
[ -n "$why_no_torch" ] || targets+=(tagc_shared)

# ---- build ----

cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DTAGC_GPU=HOST -DTAGC_MPI=OFF -DTAGC_TRAINER=OFF -DBUILD_TESTING=OFF >/dev/null
cmake --build "$build" -j"$(nproc)" --target "${targets[@]}"
libraries=("$build"/libmodule_{gpu,codec,core}.a)
flags=(-std=c++17 -O3 -lineinfo -fmad=false "-arch=$arch" -Iinclude -Ilib)
kernels=(lib/gpu/cuda/*.cu)
"$nvcc" "${flags[@]}" -DTAGC_CUDA_THREADS=256 -DTAGC_CUDA_LINES=512 -o "$build/test_cuda_codec" tests/gpu/cuda/test_cuda_codec.cpp \
    "${kernels[@]}" "${libraries[@]}" &
jobs=($!)
modules=(-Wl,--start-group "$build"/libmodule_{gpu,paper,exchange,fences,transport,codec,core}.a -Wl,--end-group)
"${CC:-cc}" -std=c11 -O3 -D_GNU_SOURCE -Iinclude -Ilib -o "$build/bench_device" bench/bench_device.c "${modules[@]}" -lpthread -lm -ldl &
jobs+=($!)
"$nvcc" "${flags[@]}" -shared -Xcompiler=-fPIC,-fvisibility=hidden -o "$build/libtagc-cuda.so" "${kernels[@]}" "${libraries[@]}" \
    -Xlinker=--exclude-libs,ALL &
jobs+=($!)
"$nvcc" "${flags[@]}" -o "$build/bench_cuda" bench/bench_cuda.cu "${kernels[@]}" "${libraries[@]}" &
jobs+=($!)
for job in "${jobs[@]}"; do wait "$job"; done
[ $has_gpu = 1 ] || { echo "gpu.sh: compiled for $arch; no GPU to run it on" >&2; exit 77; }

# ---- run ----

mkdir -p "$out"
rm -f "$out"/page.txt "$out"/gpu.json "$out"/gpu.txt "$out"/reducers.json "$out"/kernels.json "$out"/torch.json
build_path=$(cd "$build" && pwd)
export TAGC_CUDA_LIBRARY=$build_path/libtagc-cuda.so TAGC_LIBRARY=$build_path/libtagc.so
export LD_LIBRARY_PATH=$(dirname "$(dirname "$(readlink -f "$nvcc")")")/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
parts='' page='' failed=()
result_of() { # <file>: what a part has written
    if [ -s "$out/$1" ]; then cat "$out/$1"; else echo null; fi
}
write() {
    {
        printf '{"type": "gpu", "format": 2, "gpu": "%s", "nvcc": "%s", "commit": "%s", "date": "%s", "seconds": %d,\n' \
            "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)" \
            "$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" \
            "$(git describe --always --dirty 2>/dev/null || echo unknown)" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" $SECONDS
        printf '"parts": {%s},\n"reducers": %s,\n"torch": %s,\n"kernels": %s}\n' "$parts" "$(result_of reducers.json)" \
            "$(result_of torch.json)" "$(result_of kernels.json)"
    } >"$out/gpu.json"
}
note() { # <part> <how it ended> <seconds>
    parts+="${parts:+, }\"$1\": {\"result\": \"$2\", \"seconds\": $3}"
    page+=$(printf '  %-34s %5d s  %s' "$1" "$3" "$2")$'\n'
    case $2 in passed | skipped*) ;; *) failed+=("$1") ;; esac
    echo "-- $1: $2, $3 s"
    write
}
part() { # <name> <file that it writes, or ""> <seconds that it may take> <command>...
    local name=$1 file=$2 may_take=$3 begin=$SECONDS code=0 how=passed
    shift 3
    echo "== $name"
    [ $may_take -le $((limit_s - SECONDS)) ] || may_take=$((limit_s - SECONDS))
    [ $may_take -ge 5 ] || { note "$name" "no time was left" 0; return; }
    timeout -k 5 "$may_take" "$@" || code=$?
    [ $code = 0 ] || how="failed with $code"
    [ $code != 124 ] && [ $code != 137 ] || how="stopped after $may_take s"
    # A file that ends in the middle is no JSON.
    [ -z "$file" ] || [[ $(tail -c 2 "$out/$file" 2>/dev/null) == *"}"* ]] || rm -f "$out/$file"
    note "$name" "$how" $((SECONDS - begin))
}
# How a driver may be at its worst: what to set, with the words for it.
conditions=("eager loading: CUDA_MODULE_LOADING=EAGER"
            "lazy loading: CUDA_MODULE_LOADING=LAZY"
            "one connection: CUDA_DEVICE_MAX_CONNECTIONS=1"
            "no cache of memory: PYTORCH_NO_CUDA_MEMORY_CACHING=1"
            "all of it: CUDA_MODULE_LOADING=LAZY CUDA_DEVICE_MAX_CONNECTIONS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1")
train_in_conditions() {
    local condition settings
    for condition in "${conditions[@]}"; do
        read -ra settings <<<"${condition#*: }"
        part "training, ${condition%%: *}" "" 75 env "${settings[@]}" "$python" experiments/studies/torch_gpu.py --only losses --loss-steps 8
    done
}
write_page() {
    {
        echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | paste -sd ';'), $(date -u +%Y-%m-%d), $(git describe --always --dirty 2>/dev/null || echo unknown)"
        printf '%s' "$page"
        if [ ${#failed[@]} -gt 0 ]; then
            echo "The path does NOT work here: ${#failed[@]} parts failed: $(printf '%s; ' "${failed[@]}" | sed 's/; $//')."
        elif [ -n "$why_no_torch" ]; then
            echo "The kernels work here. PyTorch was not tried: $why_no_torch."
        else
            echo "The path works here."
        fi
        echo "Figures: $out/gpu.txt and $out/gpu.json, after $SECONDS s"
    } | tee "$out/page.txt"
}
all() {
    local sanitizer tool
    part tests "" 100 "$build/test_cuda_codec"
    [ -n "$why_no_torch" ] || train_in_conditions
    part reducers reducers.json 100 "$build/bench_device" --required --json "$out/reducers.json"
    if [ -z "$why_no_torch" ]; then
        part torch torch.json 200 "$python" experiments/studies/torch_gpu.py --json "$out/torch.json"
    else
        note torch "skipped: $python: $(tr -d '"\\' <<<"$why_no_torch")" 0
    fi
    part bench kernels.json 90 "$build/bench_cuda" "$out/kernels.json"
    sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
    for tool in memcheck racecheck; do
        if [ -x "$sanitizer" ]; then
            part $tool "" 90 "$sanitizer" --tool $tool --error-exitcode 1 "$build/test_cuda_codec" 10
        else
            note $tool "skipped: no compute-sanitizer" 0
        fi
    done
    rm -f "$out/reducers.json" "$out/kernels.json" "$out/torch.json"
    write_page
    [ ${#failed[@]} = 0 ]
}
all 2>&1 | tee "$out/gpu.txt"
