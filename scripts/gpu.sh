#!/usr/bin/env bash
# gpu.sh [folder for results]: on a machine with nvcc and a GPU, in less than eight minutes: the tests of the kernels on the device, again
# under compute-sanitizer (memcheck and racecheck) where that is there, the bench of the kernels, and, where a Python has torch with
# CUDA, bench/torch_gpu.py: two processes that share the GPU over gloo. Leaves gpu.json and the table gpu.txt.
# TAGC_PYTHON: the Python (python3). A part that fails or runs out of time is named, the others go on, and the script exits with 1.
# Exits with 77, and says why, where nvcc or a GPU is missing; without a GPU it compiles all of it first.
# gpu.sh --architectures: compiles the kernels for all devices from sm_75 to sm_121 instead; no GPU needed (cuda_architectures.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "${1:-}" != --architectures ] || exec scripts/cuda_architectures.sh "${@:2}"
case ${1:-} in
-h | --help) exec sed -n '2,/^set /s/^# //p' scripts/gpu.sh ;;
-*) echo "gpu.sh: option \"$1\" is not known, allowed: --architectures, --help, or a folder for results" >&2; exit 2 ;;
esac
[ $# -le 1 ] || { echo "gpu.sh: $# folders, allowed is one for results" >&2; exit 2; }
out=${1:-build-gpu/results}
limit_s=470
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || { echo "gpu.sh: no nvcc: in PATH or /usr/local/cuda/bin" >&2; exit 77; }
arch=native has_gpu=1
nvidia-smi >/dev/null 2>&1 || { arch=sm_90 has_gpu=0; }
python=${TAGC_PYTHON:-python3} targets=(room_codec)
why_no_torch=$("$python" -c 'import torch
if not torch.cuda.is_available(): raise SystemExit(f"torch {torch.__version__} finds no CUDA device")' 2>&1 | tail -n 1) || true
[ -n "$why_no_torch" ] || targets+=(tagc_shared)

# ---- build ----

cmake -S . -B build-gpu -DCMAKE_BUILD_TYPE=Release -DTAGC_CUDA=OFF -DTAGC_MPI=OFF -DTAGC_TRAINER=OFF -DBUILD_TESTING=OFF >/dev/null
cmake --build build-gpu -j"$(nproc)" --target "${targets[@]}"
libraries=(build-gpu/libroom_codec.a build-gpu/libroom_core.a)
flags=(-std=c++17 -O3 -lineinfo -fmad=false "-arch=$arch" -Iinclude -Isrc)
kernels=(src/cuda/batch.cu src/cuda/delta.cu)
"$nvcc" "${flags[@]}" -DTAGC_CUDA_THREADS=256 -DTAGC_CUDA_LINES=512 -o build-gpu/test_cuda_codec tests/cuda/test_cuda_codec.cpp \
    "${kernels[@]}" "${libraries[@]}" &
"$nvcc" "${flags[@]}" -o build-gpu/bench_cuda bench/bench_cuda.cu "${kernels[@]}" "${libraries[@]}"
wait $!
[ $has_gpu = 1 ] || { echo "gpu.sh: compiled for $arch; no GPU to run it on" >&2; exit 77; }

# ---- run ----

mkdir -p "$out"
rm -f "$out"/gpu.json "$out"/gpu.txt "$out"/kernels.json "$out"/torch.json
parts='' n_failed=0
note() { # <part> <how it ended> <seconds>
    parts+="${parts:+, }\"$1\": {\"result\": \"$2\", \"seconds\": $3}"
    echo "-- $1: $2, $3 s"
}
part() { # <name> <seconds that it may take> <command>...
    local name=$1 may_take=$2 begin=$SECONDS code=0 how=passed
    shift 2
    echo "== $name"
    [ $may_take -le $((limit_s - SECONDS)) ] || may_take=$((limit_s - SECONDS))
    [ $may_take -ge 5 ] || { n_failed=$((n_failed + 1)); note "$name" "no time was left" 0; return; }
    timeout -k 5 "$may_take" "$@" || code=$?
    [ $code = 0 ] || { n_failed=$((n_failed + 1)); how="failed with $code"; }
    [ $code != 124 ] && [ $code != 137 ] || how="stopped after $may_take s"
    note "$name" "$how" $((SECONDS - begin))
}
result_of() { # <file>: what a part that passed wrote
    if [ -s "$1" ]; then cat "$1"; else echo null; fi
}
all() {
    part "tests" 120 build-gpu/test_cuda_codec
    local sanitizer tool
    sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
    for tool in memcheck racecheck; do
        if [ -x "$sanitizer" ]; then
            part $tool 90 "$sanitizer" --tool $tool --error-exitcode 1 build-gpu/test_cuda_codec 10
        else
            note $tool "skipped: no compute-sanitizer" 0
        fi
    done
    part bench 120 build-gpu/bench_cuda "$out/kernels.json"
    [[ $parts == *'"bench": {"result": "passed"'* ]] || rm -f "$out/kernels.json" # it may end in the middle
    if [ -z "$why_no_torch" ]; then
        TAGC_LIBRARY=$PWD/build-gpu/libtagc.so part torch 200 "$python" bench/torch_gpu.py --json "$out/torch.json"
    else
        note torch "skipped: $python: $(tr -d '"\\' <<<"$why_no_torch")" 0
    fi
    {
        printf '{"type": "gpu", "format": 1, "gpu": "%s", "nvcc": "%s", "commit": "%s", "date": "%s", "seconds": %d,\n' \
            "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)" \
            "$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" \
            "$(git describe --always --dirty 2>/dev/null || echo unknown)" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" $SECONDS
        printf '"parts": {%s},\n"kernels": %s,\n"torch": %s}\n' "$parts" "$(result_of "$out/kernels.json")" \
            "$(result_of "$out/torch.json")"
    } >"$out/gpu.json"
    rm -f "$out/kernels.json" "$out/torch.json"
    echo "gpu.sh: $out/gpu.json and $out/gpu.txt, after $SECONDS s"
    [ $n_failed = 0 ] || { echo "gpu.sh: $n_failed parts failed"; return 1; }
}
all 2>&1 | tee "$out/gpu.txt"
