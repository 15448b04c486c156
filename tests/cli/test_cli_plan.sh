#!/usr/bin/env bash
# tagc plan: what it prints and writes, what it refuses, and that python -m tagc plan is the same.
source "$(dirname "$0")/lib.sh" "$@"

run 0 plan --model llama-3-8b --hosts 4 --json plan.json
grep -q "^memory of a GPU" out || fail "a named model is no plan on a mesh"
python3 -c "import json; p = json.load(open('plan.json')); assert p['mesh']['data'] == 4 and p['model'] == 'llama-3-8b'" || fail "plan.json"
run 0 plan --params 1b --codec-ns 1 --json -
python3 -c "import json; p = json.load(open('out')); assert p['simulated'] and len(p['rows']) == 4" || fail "JSON alone"
[ -e - ] && fail "--json - made a file of that name"
run 2 plan --model tiny
says '--model is "tiny", allowed: 1e+07 to 2e+12' "llama-3-8b"
run 2 plan --params 7b --arms fsdp
says "unknown option --arms"
run 2 plan --model lama-3-8b --tensor-parallel 2
says '"lama-3-8b"' 'did you mean "llama-3-8b"?'
run 2 plan --tensor-paralel 2
says "unknown option --tensor-paralel" "did you mean --tensor-parallel?" "(tagc plan --help-all explains)"
run 2 plan --model 7b --gpus-per-host 9 --tensor-parallel 3
says "which does not divide the 32 heads; allowed with 36 ranks: 1, 2, 4 (tagc plan --help-all explains)"
run 1 plan --params 1b --codec-ns 1 --json /nowhere/plan.json
says "/nowhere/plan.json"
[ -z "$(ls ./*.partial 2>/dev/null)" ] || fail "a half-written file is left"

# ---- where a result goes: what is no plain file stays what it is ----
if mknod -m 666 device c 1 7 2>/dev/null && (: >device) 2>/dev/null; then # root's own /dev/full, to be lost without harm
    make_data
    for words in "plan --model llama-3-8b --json device" "bench --model tiny --only floor --quiet --json device" \
        "train ${tiny[*]} --steps 5 --eval-every never --quiet --trace device"; do
        run 1 $words
        says "device: No space left on device"
        [ -c device ] || fail "tagc $words put a file in place of a device"
    done
fi
mkfifo pipe
cat pipe >piped &
run 0 plan --model llama-3-8b --json pipe
wait $!
[ -p pipe ] && python3 -m json.tool piped >/dev/null || fail "a plan through a pipe"
: >behind.json
ln -s behind.json link.json
run 0 plan --model llama-3-8b --json link.json
[ -L link.json ] && python3 -m json.tool behind.json >/dev/null || fail "a plan through a link"

run 0 plan --help-all
cp out all
run 0 plan --params 1b --help-table
while IFS=$'\t' read -r name _; do grep -qE -e "^  --$name( |\$)" all || fail "the help lacks --$name"; done <out

# ---- both commands: the same text, JSON, codes and words about mistakes ----
library=$(dirname "$tagc")/libtagc.so
[ -e "$(dirname "$tagc")/libtagc-plan.so" ] || skip "the second half needs libtagc-plan.so, which sanitizers do without"
TAGC_LIBRARY=$library PYTHONPATH=$here/../../python python3 - "$tagc" <<'EOP' || fail "the two commands differ"
import contextlib, io, json, subprocess, sys
from tagc.commands import main

def ours(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.main(["plan", *words])
    return code, out.getvalue(), err.getvalue().splitlines()[:1]

def theirs(words):
    done = subprocess.run([sys.argv[1], "plan", *words], capture_output=True, text=True)
    return done.returncode, done.stdout, [line.removesuffix(" (tagc plan --help-all explains)") for line in done.stderr.splitlines()]

n_good = n_bad = 0
for line in """
--params 1b --codec-ns 1
--params 350m --hosts 2 --gpus-per-host 4 --codec-ns 2 --link 10gbit,250mbit --tokens 100 --latency 1ms --host-link 100gbit --tflops 20
--model 7B --hosts 2 --ranks-per-host 8 --codec-ns 0 --accumulate 4
--model mixtral-8x7b --hosts 4 --gpus-per-host 8 --tensor-parallel 4 --sequence-parallel --context-parallel 2 --expert-parallel 2 --pipeline-parallel 2 --micro-batches 8 --sequence-length 8192 --recompute full --offload optimizer,activations
--model llama-3-405b --hosts 128 --gpus-per-host 8 --tensor-parallel 8 --pipeline-parallel 2 --pipeline-schedule zero-bubble --stages-per-rank 3 --micro-batches 32 --micro-batch-size 2
--params 13b --hosts 8 --gpus-per-host 8 --experts 16 --experts-per-token 3 --expert-parallel 8
--params 1b --hosts 4 --gpus-per-host 2 --experts 16 --expert-parallel 8 --codec-ns 2 --latency 1ms --link 100mbit,400gbit --token-values int8,int4
--params 1b --hosts 2 --pipeline-parallel 2 --pipeline-values bf16,int4 --offload parameters
--model llama-3-70b --hosts 8 --gpus-per-host 8 --tensor-parallel 8 --sequence-parallel megatron --recompute attention
--params 1b --tensor-parallel 0
--params lots
--params 1000
--params 1b --model 1b
--params 1b --hosts 1
--params 1b --link 10gbit,
--params 1b --latency 50
--params 1b --codec-ns nan
--params 1b --tensor-parallel 3
--params 1b --tensor-parallel 2 --tokens 4096
--params 1b --tensor-parallel 2 --accumulate 4
--params 1b --sequence-parallel
--params 1b --sequence-parallel=all
--params 1b --expert-parallel 2
--params 1b --experts-per-token 2
--params 1b --stages-per-rank 2
--params 1b --offload parameters,gradient
--params 1b --pipeline-parallel 2 --pipeline-values int8
--params 1b --experts 8 --expert-parallel 2 --token-values bf8,int4
--params 1b --pipeline-parallel 2 --pipeline-schedule dualpipe
--params 1b --pipeline-parallel 2 --hosts 2 --stages-per-rank 2
--params 1b --tensor-parallel
--params 1b stray
""".strip().splitlines():
    words = line.split()
    a, b = ours(words), theirs(words)
    assert a == b, (line, a, b)
    if a[0] == 0:
        a, b = ours([*words, "--json", "-"]), theirs([*words, "--json=-"])
        assert a == b and json.loads(a[1])["type"] == "tagc plan", line
        n_good += 1
    else:
        assert a[0] == 2 and a[2][0].startswith("tagc: "), a
        n_bad += 1
assert (n_good, n_bad) == (9, 23), (n_good, n_bad)
EOP
echo "one plan, by two commands"
