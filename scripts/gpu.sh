#!/usr/bin/env bash
# gpu.sh build [FOLDER]: compiles all that a machine with a GPU runs, where there is none, into one folder (build-gpu) that can travel with the
# tree. Needs nvcc and a C compiler, and neither CMake nor a network. Names what does not compile, and ends with 1; with 77 where one of
# the two is missing. CC, CFLAGS, TAGC_GPU_ARCH (sm_90). Nothing that it makes has a CUDA runtime in it. TAGC_PTXAS: that of an older CUDA,
# for binaries that older drivers run (lib/gpu/cuda/tools.sh).
#
# gpu.sh run FOLDER OUT [STAGE...]: runs the stages (1 to 8) there; compiles nothing. Each has its own deadline and its own page in OUT,
# which is written as its parts end; a part that fails, hangs, or cannot even be ended leaves those that follow. OUT/summary.txt has
# a line for each stage whose page is in OUT. So a machine that is lent for minutes can be asked in two halves, into one OUT or two:
#   gpu.sh run build-gpu OUT 1 2 3 4      290 seconds: what is there, flags alone, kernels, bits
#   gpu.sh run build-gpu OUT 5 6 7 8      500 seconds: speed, overlap, sanitizers, losses
#   1   20 s  driver, runtime, torch, hardware queues, both ways to the driver's functions
#   2   60 s  what a flag takes, and what stands still while a stream waits for one, with 1, 8 and 32 hardware queues
#   3   60 s  launches that wait and that do not, as compress() finds out; the tests of the kernels
#   4  150 s  training as 2 hosts of 2 GPUs on one card: the device's codec against the host's, bit for bit, in bad conditions
#   5  150 s  kernels at the shapes of 7 B parameters, alone and beside products; an exchange by stage; reducers of both kinds; nsys
#   6   90 s  a backward pass whose messages come 5, 20 and 50 ms late
#   7   90 s  compute-sanitizer: memcheck, racecheck, initcheck
#   8  170 s  GPT-2 124 M: the loss of each step, dense, with one line and with the optimizer
# Programs of C take nvcc's runtime, which travels, or torch's, if the driver there is too old for the former.
# Ends with 0 where all that could be tried passed, with 1 where something failed, with 77 where no stage found a device.
# TAGC_PYTHON: the Python, with torch (python3). TAGC_GPU_SECONDS: what one call may take (590), TAGC_GPU_PART_SECONDS: one
# part at most. --fake before FOLDER: small sizes, for tests on the fake runtime.
#
# gpu.sh --architectures: compiles the kernels for all devices from sm_75 to sm_121 instead; no GPU needed (cuda_architectures.sh).
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
verb=${1:-}
[ $# -eq 0 ] || shift
refuse() {
    echo "gpu.sh: $*" >&2
    exit 2
}
seen_from_here() { # <path>
    case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac
}

# ---- build ----

build() { # <folder>
    local folder=$1 nvcc arch=${TAGC_GPU_ARCH:-sm_90} objects uv=(-luv) cudart toolkit failed=0
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    [ -x "$nvcc" ] || { echo "gpu.sh: no nvcc: in PATH or /usr/local/cuda/bin" >&2; exit 77; }
    read -ra cc <<<"${CC:-cc}"
    # Nothing but what an earlier build made is removed.
    [ -e "$folder/made" ] || [ -z "$(ls -A "$folder" 2>/dev/null)" ] || refuse "$folder is not empty, and \"gpu.sh build\" did not make it"
    rm -rf "$folder"
    mkdir -p "$folder/logs"
    echo "a build that did not end" >"$folder/made"
    folder=$(cd "$folder" && pwd)
    objects=$(mktemp -d)
    trap "rm -rf '$objects'" EXIT
    [ -z "${TAGC_PTXAS:-}" ] || nvcc=$(lib/gpu/cuda/tools.sh "$nvcc" "$TAGC_PTXAS" "$objects/tools") || exit 1
    works() { # <flag>...: whether the program in stdin compiles and runs
        "${cc[@]}" -x c - -o "$objects/probe" "$@" >/dev/null 2>&1 && "$objects/probe" >/dev/null 2>&1
    }
    works <<<'int main(void) { return 0; }' || { echo "gpu.sh: no C compiler that works: CC is \"${cc[*]}\"" >&2; exit 77; }
    works -luv <<<'#include <uv.h>
#if UV_VERSION_HEX < 0x012a00
#error too old
#endif
int main(void) { return uv_version() == 0; }' || {
        echo "gpu.sh: libuv 1.42 or newer is missing (libuv1-dev): libtagc will send by gloo, as no build with libuv does" >&2
        uv=()
    }

    declare -A jobs=()
    start() { # <what> <command>...
        "${@:2}" >"$folder/logs/$1" 2>&1 &
        jobs[$1]=$!
    }
    finish() { # <what>...
        local what why
        for what in "$@"; do
            wait "${jobs[$what]}" && continue
            why=$(grep -m 1 -E 'error|undefined' "$folder/logs/$what" || tail -n 1 "$folder/logs/$what")
            echo "gpu.sh: $what does not compile: ${why:-it says nothing} ($folder/logs/$what)" >&2
            rm -f "$folder/$what"
            failed=1
        done
    }
    local c_flags=(-std=c11 -O3 -g1 -w -ffp-contract=off -fPIC -fvisibility=hidden -D_GNU_SOURCE -Iinclude -Ilib
                   -DTAGC_HAS_PAPER=1 -DTAGC_HAS_GPU=1 "-DTAGC_HAS_NATIVE=${#uv[@]}" ${CFLAGS:-})
    local cuda_flags=(-std=c++17 -O3 -lineinfo -fmad=false "-arch=$arch" -Iinclude -Ilib -Ibench -DTAGC_CUDA_THREADS=256
                      -DTAGC_CUDA_LINES=512 -Xcompiler=-fPIC,-fvisibility=hidden
                      -cudart none --no-compress) # driver.cpp, card_runtime.cpp
    find lib bench tests/gpu/cuda -type d -exec mkdir -p "$objects/{}" \;
    c_sources() {
        find lib -name '*.c' ! -path lib/transport/mpi.c |
            if [ ${#uv[@]} = 0 ]; then grep -v ^lib/transport/native/; else cat; fi
    }
    compile_c() {
        local code=0
        c_sources | xargs -P"$(nproc)" -I{} "${cc[@]}" "${c_flags[@]}" -c {} -o "$objects/{}.o" || code=$?
        find "$objects" -name '*.c.o' -exec ar rc "$objects/libtagc.a" {} +
        return $code
    }
    compile_cuda() {
        printf '%s\n' lib/gpu/cuda/*.{cu,cpp} tests/gpu/cuda/test_cuda_codec.cpp bench/{bench_cuda.cu,gpu_load.cu,card_runtime.cpp} |
            xargs -P"$(nproc)" -I{} "$nvcc" "${cuda_flags[@]}" -c {} -o "$objects/{}.o"
    }
    start C compile_c
    start kernels compile_cuda
    finish C kernels
    local near='-Wl,-rpath,$ORIGIN' c_link=(-Wl,--as-needed -Wl,-z,defs "${uv[@]}" -lpthread -lm -ldl) name
    start libtagc-cuda.so "$nvcc" "${cuda_flags[@]}" -shared "$objects"/lib/gpu/cuda/*.o "$objects/libtagc.a" \
        -Xlinker=--exclude-libs,ALL -Xlinker=-soname,libtagc-cuda.so -o "$folder/libtagc-cuda.so"
    finish libtagc-cuda.so
    local driver=$objects/lib/gpu/cuda/driver.cpp.o
    local kernels=("$objects/bench/card_runtime.cpp.o" "$driver" "$folder/libtagc-cuda.so" "$objects/libtagc.a" "-Xlinker=-rpath,\$ORIGIN")
    start libtagc-load.so "$nvcc" "${cuda_flags[@]}" -shared "$objects/bench/gpu_load.cu.o" "$driver" -o "$folder/libtagc-load.so"
    start libtagc.so "${cc[@]}" -shared -Wl,--version-script=cmake/libtagc.map -Wl,--whole-archive "$objects/libtagc.a" \
        -Wl,--no-whole-archive "$near" "${c_link[@]}" -o "$folder/libtagc.so"
    for name in bench_flags bench_device bench_overlap; do
        start $name "${cc[@]}" "${c_flags[@]}" bench/$name.c "$objects/libtagc.a" "$near" "${c_link[@]}" -o "$folder/$name"
    done
    start test_cuda_codec "$nvcc" "${cuda_flags[@]}" "$objects/tests/gpu/cuda/test_cuda_codec.cpp.o" "${kernels[@]}" \
        -o "$folder/test_cuda_codec"
    start bench_cuda "$nvcc" "${cuda_flags[@]}" "$objects/bench/bench_cuda.cu.o" "${kernels[@]}" -o "$folder/bench_cuda"
    finish libtagc-load.so libtagc.so bench_flags bench_device bench_overlap test_cuda_codec bench_cuda
    # What the machine there may lack, or have older.
    [ ${#uv[@]} = 0 ] || ldd "$folder/libtagc.so" | sed -n 's/.*=> \(.*libuv\.so[^ ]*\).*/\1/p' | xargs -r -I{} cp -L {} "$folder/"
    toolkit=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' || true) # nvcc may be a script that calls another one
    cudart=$(find -L "$toolkit"/{lib64,lib,targets} -maxdepth 3 -name 'libcudart.so.[0-9]*' -print -quit 2>/dev/null || true)
    [ -z "$cudart" ] || cp -L "$cudart" "$folder/$(basename "$cudart" | sed 's/\(so\.[0-9]*\).*/\1/')"
    printf '%s, %s, nvcc %s, built %s\n' "$(git describe --always --dirty 2>/dev/null || echo unknown)" "$arch" \
        "$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" "$(date -u +%Y-%m-%dT%H:%MZ)" >"$folder/made"
    echo "gpu.sh: $folder has $(du -sh "$folder" | cut -f 1): $(cat "$folder/made")"
    return $failed
}

# ---- run: a part ----

declare -A names=([1]=facts [2]=flags [3]=kernels [4]=bits [5]=speed [6]=overlap [7]=sanitizers [8]=losses)
declare -A limits=([1]=20 [2]=60 [3]=60 [4]=150 [5]=150 [6]=90 [7]=90 [8]=170)
no_device='' n_failed=0 n_passed=0 warming=''

# Of what is left to the stage and to this call.
left() {
    local of_stage=$((stage_end - SECONDS)) of_call=$((limit_s - SECONDS))
    echo $((of_stage < of_call ? of_stage : of_call))
}
# Writes what the part says to its log. Returns how it ended; 124 and 137 where it was stopped. What the driver does not let go is left
# behind, after some seconds, and never waited for.
limited() { # <seconds> <log> <command>...
    local pid end=$((SECONDS + $1 + 6)) code=0
    timeout -k 3 "$1" "${@:3}" >"$2" 2>&1 </dev/null &
    pid=$!
    while kill -0 $pid 2>/dev/null && [ $SECONDS -lt $end ]; do sleep 0.1; done
    if kill -0 $pid 2>/dev/null; then
        kill -9 -- -$pid 2>/dev/null || true
        disown $pid
        return 137
    fi
    wait $pid || code=$?
    return $code
}
page() { # writes the stage's page anew, its verdict first
    local how=passed
    [ -z "$stage_skipped" ] || how="passed, but for: ${stage_skipped#; }"
    [ "$n_stage_passed" != 0 ] || how="skipped: ${stage_skipped#; }"
    [ -z "$no_device" ] || how="skipped: $no_device"
    [ -z "$stage_failed" ] || how="FAILED: ${stage_failed#; }"
    {
        printf '%s %s: %s\n' "$stage" "${names[$stage]}" "$how"
        printf '%s; %s; %s\n\n' "$(cat "$folder/made" 2>/dev/null || echo "not built")" "$gpu" "$(date -u +%Y-%m-%dT%H:%MZ)"
        cat "$scratch/body"
    } >"$out/$stage-${names[$stage]}.txt"
    cat "$out"/[1-8]-*.txt 2>/dev/null | grep -E "^[1-8] ($(IFS='|'; echo "${names[*]}")): " >"$out/summary.txt" || true
}
note() { # <part> <how> <seconds>
    case $2 in
    passed) n_stage_passed=$((n_stage_passed + 1)) n_passed=$((n_passed + 1)) ;;
    skipped*) stage_skipped+="; $1 $2" ;;
    *) stage_failed+="; $1 $2" n_failed=$((n_failed + 1)) ;;
    esac
    printf -- '-- %s: %s, %d s\n\n' "$1" "$2" "$3" | tee -a "$scratch/body"
    page
}
part() { # <name> <file that it needs, or ""> <seconds> <command>...
    local name=$1 needs=$2 may_take=$(($3 * patience)) begin=$SECONDS code=0 how=passed
    shift 3
    [ -z "$no_device" ] || { note "$name" "skipped: $no_device" 0; return; }
    [ -z "$needs" ] || [ -e "$folder/$needs" ] || { note "$name" "skipped: $folder has no $needs" 0; return; }
    [ "$may_take" -le "$(left)" ] || may_take=$(left)
    [ "$may_take" -le "$most_s" ] || may_take=$most_s
    [ "$may_take" -ge 2 ] || { note "$name" "skipped: no time was left" 0; return; }
    echo "== $name" | tee -a "$scratch/body"
    limited "$may_take" "$scratch/log" "$@" || code=$?
    tail -c 60000 "$scratch/log" | tee -a "$scratch/body"
    if [ $code != 0 ]; then
        how="failed with $code: $(tail -n 1 "$scratch/log" | tr -c '[:print:]\n' ' ' | cut -c 1-200)"
        [ $code != 77 ] || how="skipped: $(tail -n 1 "$scratch/log" | sed 's/.*skipped: //' | cut -c 1-200)"
        # Slow, or hanging: what it began last, and when, tells.
        [ $code != 124 ] && [ $code != 137 ] || how="stopped after $may_take s, $(grep '^at ' "$scratch/log" | tail -n 1 | grep . || echo "without a word")"
        [[ $name != *check ]] || ! grep -q 'Device not supported' "$scratch/log" || how="skipped: the tool does not support this device"
    fi
    note "$name" "$how" $((SECONDS - begin))
}

# The first CUDA runtime that serves here: the one that travels, torch's, the system's. What finds no device with any finds none later.
find_runtime() {
    local library code
    for library in "$folder"/libcudart.so.* $(timeout 8 "$python" tests/gpu/card/facts.py --runtimes 2>/dev/null || true) ""; do
        case $library in *.so.*) [ -e "$library" ] || continue ;; ?*) continue ;; esac
        cudart=${library:+--library $library} code=0
        limited $((15 * patience)) "$scratch/log" "$folder/bench_flags" --part facts $cudart || code=$?
        if [ $code != 77 ]; then no_device=''; return; fi
        [ -n "$no_device" ] || no_device=$(tail -n 1 "$scratch/log" | sed 's/.*skipped: //' | cut -c 1-200)
    done
}

# ---- run: the stages ----

pick() { # <a real machine's words> <the fake runtime's>
    if [ $is_fake = 1 ]; then echo "$2"; else echo "$1"; fi
}
stage_1() {
    if command -v nvidia-smi >/dev/null; then part "the driver" "" 8 nvidia-smi; else note "the driver" "skipped: no nvidia-smi" 0; fi
    part "the runtime" bench_flags 8 "$folder/bench_flags" --part facts $cudart
    part "torch" "" 18 "$python" tests/gpu/card/facts.py
}
stage_2() {
    local connections small
    for connections in $(pick "1 8 32" "1 8"); do
        small="--rounds 16 --streams 4 --wait-ms 50"
        [ $connections = 1 ] || small="--rounds 16 --streams 4 --wait-ms 5000" # nothing is to stand still
        part "flags, $connections hardware queues" bench_flags 20 env CUDA_DEVICE_MAX_CONNECTIONS=$connections "$folder/bench_flags" $cudart \
            $load $(pick "" "$small")
    done
}
stage_3() {
    part "launches that wait" bench_flags 20 env CUDA_LAUNCH_BLOCKING=1 "$folder/bench_flags" --part waits $cudart
    part "launches that do not" bench_flags 20 "$folder/bench_flags" --part waits $cudart
    local most_s=$(($(left) - 12)) # in which trials begin
    part "tests of the kernels" test_cuda_codec 50 "$folder/test_cuda_codec" $(pick 1 10) $((most_s > 1 ? most_s : 1))
}
stage_4() {
    part "bits" libtagc-cuda.so 150 "$python" tests/gpu/card/bits.py --seconds $(($(left) - 8)) $load \
        $(pick "" "--fake --kinds fsdp2 hsdp ddp --steps 2")
}
stage_5() {
    local nsys
    part "kernels, 7 B" bench_cuda 60 "$folder/bench_cuda" "$out/kernels.json" units
    part "an exchange by stage" bench_overlap 40 "$folder/bench_overlap" $cudart --delays-ms 0 $(pick "" "--elems 3000 --units 1 --steps 2")
    part "reducers of both kinds" bench_device 40 "$folder/bench_device" --required $cudart \
        $(pick "--elems 12582912,25165824" "--elems 3000 --steps 2")
    nsys=$(command -v nsys) || nsys=''
    if [ -n "$nsys" ]; then
        part "a trace" bench_overlap 30 "$nsys" profile -o "$out/trace" --force-overwrite true "$folder/bench_overlap" $cudart $load \
            --delays-ms 5 --steps 2
    else # by torch's own profiler
        part "a trace" libtagc-cuda.so 40 "$python" tests/gpu/card/bits.py --trace "$out/trace.json.gz" --seconds $(pick 36 200) \
            --kinds fsdp2 --conditions "8 connections" $(pick "" "--fake --steps 2")
    fi
    part "kernels, GPT-2, and others'" bench_cuda 60 "$folder/bench_cuda"
}
stage_6() {
    part "overlap" bench_overlap 90 "$folder/bench_overlap" $cudart $load \
        $(pick "--delays-ms 5,20,50 --least-hidden 50" "--elems 2000 --units 2 --steps 2 --compute-ms 1 --delays-ms 2")
}
stage_7() {
    local tool sanitizer
    sanitizer=$(command -v compute-sanitizer || find -L /usr/local/cuda/{bin,compute-sanitizer} -maxdepth 1 -name compute-sanitizer \
        -print -quit 2>/dev/null || true)
    for tool in memcheck racecheck initcheck; do
        if [ -n "$sanitizer" ]; then
            part $tool test_cuda_codec 30 "$sanitizer" --tool $tool --error-exitcode 1 "$folder/test_cuda_codec" 20 12
        else
            note $tool "skipped: no compute-sanitizer" 0
        fi
    done
}
stage_8() {
    part "losses" libtagc.so 170 "$python" tests/gpu/card/losses.py --json "$out/losses.jsonl" --seconds $(($(left) - 8)) \
        $(pick "" "--device cpu --ranks 2")
}
run() { # <folder> <out> <stage>...
    patience=$(pick 1 6) most_s=${TAGC_GPU_PART_SECONDS:-900} # tests share a machine with others, and are not to fail for that
    folder=$(cd "$1" && pwd) out=$2 limit_s=${TAGC_GPU_SECONDS:-$((590 * patience))} python=${TAGC_PYTHON:-python3} cudart='' load='' scratch=$(mktemp -d)
    shift 2
    trap "rm -rf '$scratch'; kill \$warming 2>/dev/null || true" EXIT
    mkdir -p "$out"
    out=$(cd "$out" && pwd)
    [ ! -e "$folder/libtagc-load.so" ] || load="--load $folder/libtagc-load.so"
    export TAGC_LIBRARY=$folder/libtagc.so TAGC_CUDA_LIBRARY=$folder/libtagc-cuda.so PYTHONUNBUFFERED=1
    export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
    gpu=$(timeout 8 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | paste -sd ';') || gpu='a machine without nvidia-smi'
    [ ! -x "$folder/bench_flags" ] || find_runtime
    # From a cold disk this takes longer than stage 1 may; later stages find it read.
    [ -n "$no_device" ] || [ $is_fake = 1 ] || { timeout 120 "$python" -c 'import torch, torch._dynamo' >/dev/null 2>&1 </dev/null & warming=$!; }
    for stage in "$@"; do
        stage_end=$((SECONDS + limits[$stage] * patience)) stage_failed='' stage_skipped='' n_stage_passed=0
        : >"$scratch/body"
        echo "==== $stage ${names[$stage]}"
        "stage_$stage"
    done
    cat "$out/summary.txt"
    echo "$out, after $SECONDS s"
    [ $n_failed = 0 ] || return 1
    [ $n_passed != 0 ] || return 77
}

case $verb in
build)
    [ $# -le 1 ] || refuse "$# folders, allowed is one"
    if [ $# = 0 ]; then build "$PWD/build-gpu"; else build "$(seen_from_here "$1")"; fi
    ;;
run)
    is_fake=0
    [ "${1:-}" != --fake ] || { is_fake=1; shift; }
    [ $# -ge 2 ] || refuse "run needs a folder that \"gpu.sh build\" made, and one for pages"
    [ -d "$(seen_from_here "$1")" ] || refuse "there is no folder $1: \"gpu.sh build $1\" makes it"
    for word in "${@:3}"; do [ -n "${names[$word]:-}" ] || refuse "stage \"$word\" is not known, must be of 1 to 8"; done
    [ $# -gt 2 ] || set -- "$@" 1 2 3 4 5 6 7 8
    run "$(seen_from_here "$1")" "$(seen_from_here "$2")" "${@:3}"
    ;;
--architectures) exec scripts/cuda_architectures.sh "$@" ;;
-h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | grep -v '^set ' || true ;;
*) refuse "\"$verb\" is not known, must be build, run, --architectures or --help" ;;
esac
