#!/usr/bin/env bash
# The lab with two hosts and a run of a few steps: the result and its tables, that nothing is left behind also when it
# is interrupted, killed or its run fails, and what it says to wrong input.
#   test_lab.sh TAGC SCRATCH
set -uo pipefail
tagc=$(realpath "$1")
scratch=$2
root=$(realpath "$(dirname "$0")/../..")
lab=$root/experiments/lab/lab
rm -rf "$scratch"
mkdir -p "$scratch"
cd "$scratch" || exit 1
# Open MPI keeps sockets there, whose paths must be short.
TMPDIR=$(mktemp -d /tmp/test_lab.XXXXXX)
trap 'rm -rf "$TMPDIR"' EXIT
export TMPDIR PYTHONDONTWRITEBYTECODE=1

fail() {
    echo "FAILED: $*" >&2
    tail -n 20 err >&2
    exit 1
}
# lab <exit code> <arguments>...: output in out and err, its process in $ended.
lab() {
    local expected=$1 code=0
    shift
    "$lab" "$@" >out 2>err &
    ended=$!
    wait "$ended" || code=$?
    [ "$code" = "$expected" ] || fail "exit code $code instead of $expected: lab $*"
}
says() {
    local text
    for text in "$@"; do grep -qF -e "$text" err || fail "stderr lacks \"$text\""; done
    grep -q Traceback err && fail "a traceback"
}
no_leftovers() {
    ip netns list | grep -q "tagc-lab-$1-" && fail "$2: hosts are left: $(ip netns list | tr '\n' ' ')"
    pgrep -f "tagc-lab-$1-" >pids && fail "$2: processes are left: $(tr '\n' ' ' <pids)"
    ls -d "$TMPDIR/tagc-lab-$1-"* 2>/dev/null && fail "$2: a scratch folder is left"
    return 0
}

python3 -c 'import tomllib' 2>/dev/null || { echo "skipped: python3 is older than 3.11"; exit 77; }
grep -qa '__[at]san_init' "$tagc" && { echo "skipped: the lab is tested with a plain build"; exit 77; }

# ---- wrong input: no hosts are needed for this ----
# A lab of its own, so that broken experiment files can be put there.
mkdir -p copy/experiments && cp -r "$root/experiments/lab" "$root/experiments/configs" copy/experiments/ && cp -r "$root/scripts" "$root/python" copy/
n_broken=0
broken() { # <text in the file> <what it says>...
    n_broken=$((n_broken + 1))
    printf '%s\n' "$1" >copy/experiments/lab/experiments/broken$n_broken.toml
    shift
    printf '%s\n' "$@" >broken$n_broken.said
}
good='title = "t"
kind = "train"
table = "bits"
minutes = 1
arms = ["experiments/configs/fsdp.conf"]'
broken "$good
rates = [1e-3]" 'rates has no meaning without base'
broken "${good/bits/quality}" 'table = "quality" needs base and seeds'
broken "$good
rate = 5" 'rate is 5, allowed:'
broken "$good
rate = \"1gbit/\"" "rate is '1gbit/', allowed:" 'up and down'
broken "$good
links = [\"1gbit\", \"0mbit/1gbit\"]" 'links is' 'up and down'
broken "$good
hosts = 3
links = [\"1gbit\", \"1gbit\"]" 'links has 2 rates, and hosts is 3'
broken "$good
wireguard = true" 'wireguard has no meaning for hosts = 1'
broken "$good
hosts = 0" 'hosts is 0, allowed: a whole number from 1 to'
broken "$good
hosts = 2
latency = \"10\"" "latency is '10', allowed: the way from one host to another, from 0.1 ms to 1 s"
broken "$good
hosts = 2
latency = \"50us\"" "latency is '50us', allowed:"
broken "$good
hosts = 2
latency = \"2s\"" "latency is '2s', allowed:"
broken "$good
hosts = 2
latency = 10" "latency is 10, allowed:"
broken "$good
latency = \"10ms\"" 'latency has no meaning for hosts = 1'
broken "$good
host = 2" 'unknown key "host"' 'did you mean "hosts"?'
broken "$good
pairs = [[\"a\", \"b\"]]" 'pairs has no meaning for kind = "train"'
broken "${good/train/bench}
pairs = [[\"fsdp\", \"pakced\"]]" 'pairs has "pakced"' 'the arms are: fsdp'
broken "${good/\"]/\", \"experiments/configs/fsdp.conf\"]}" 'two arms of one name'
broken "${good/train/watch}" "kind is 'watch', allowed: bench or train or torch"
broken "${good/train/torch}" 'kind = "torch" and table = "torch", "cluster" or "pipeline" go together'
broken "${good/minutes = 1/}" 'minutes is missing'
broken "${good/experiments\/configs\/fsdp.conf/fsdp}" 'arms has "fsdp"' 'config files'
broken "$good
[options]
Steps = 1" 'options is'
broken "$good
[[case]]
seeds = [1]" '[[case]]: unknown key "seeds"'
broken "$good
= 1" 'Invalid'
broken '' 'title is missing'
# All in one process: starting Python takes longer than the rest.
python3 - copy/experiments/lab $n_broken >out 2>err <<'END' || fail "broken files"
import contextlib, io, pathlib, runpy, sys
lab, n_broken = pathlib.Path(sys.argv[1]), int(sys.argv[2])
sys.path.insert(0, str(lab))
main = runpy.run_path(str(lab / "lab"))["main"]
for i in range(1, n_broken + 1):
    sys.argv = ["lab", "show", f"broken{i}"]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main()
    texts = [f"broken{i}.toml", *pathlib.Path(f"broken{i}.said").read_text().splitlines()]
    missing = [text for text in texts if text not in said.getvalue()]
    assert code == 1 and not missing, (i, code, missing, said.getvalue())
END
rm copy/experiments/lab/experiments/broken*.toml

lab 1 run smoek
says 'no experiment "smoek"' 'did you mean "smoke"?' known:
lab 1 run smoke --tagc no/tagc
says "no/tagc is not there" "make build"
for cases in 1 x 0-1 -1 0, 1-0; do
    lab 1 run smoke "--cases=$cases" --tagc "$tagc"
    says "--cases is \"$cases\", allowed: numbers from 0 to 0"
done
lab 1 run torch --quick --tagc "$tagc" --python no/python
says "no/python cannot be used as a Python with torch: no program"
touch file
lab 1 run figure4 --quick --tagc "$tagc" --out file
says "--out file: "
sed 's/^minutes.*/&\nmemory_gb = 10000/' "$root/experiments/lab/experiments/figure4.toml" >copy/experiments/lab/experiments/large.toml
copy/experiments/lab/lab run large --quick --tagc "$tagc" --out results >out 2>err && fail "more memory than there is"
says "large needs 10000 GB of memory"
lab 1 tables nowhere.json
says "nowhere.json: No such file"
echo '{"type": "lab"' >torn.json
lab 1 tables torn.json
says "torn.json is no JSON"
echo '{"type": "bench"}' >other.json
lab 1 tables other.json
says "other.json is no result of the lab"
# Every experiment, in one process as well.
python3 - "$root/experiments/lab" >out 2>err <<'END' || fail "show"
import contextlib, io, pathlib, runpy, sys
lab = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(lab))
main = runpy.run_path(str(lab / "lab"))["main"]
files = sorted(lab.glob("experiments/*.toml"))
assert len(files) > 10
for file in files:
    for more in [], ["--quick"]:
        sys.argv = ["lab", "show", file.stem, *more]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert main() == 0 and said.getvalue(), file
END
lab 0 show smoke
lab 0 list
if [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null; then
    chmod -R a+rX "$root/experiments/lab" 2>/dev/null
    setpriv --reuid 65534 --clear-groups "$lab" check >out 2>err && fail "check without root"
    grep -q Permission err || says "need root" "Nothing else in the project needs root"
fi

# ---- tables of hand-made results, against figures worked out by hand ----
python3 "$root/tests/lab/check_tables.py" "$root/experiments/lab" || fail "tables"

# ---- forks of one trained state: no root ----
cat >copy/experiments/lab/experiments/forks.toml <<'END'
title = "t"
kind = "train"
table = "quality"
minutes = 1
ranks_per_host = 2
data = "words"
seeds = [1, 2]
rates = [1e-9, 3e-3]
arms = ["dense: experiments/configs/fsdp.conf", "half: experiments/configs/packed.conf+sparsity=0.5", "own rate: experiments/configs/packed.conf+lr=1e-3"]
[base]
model = "tiny"
ranks = 2
batch-size = 2
steps = 6
[options]
batch-size = 2
steps = 12
schedule-from = "fork"
warmup = 0
eval-every = 3
eval-batches = 2
END
timeout 60 copy/experiments/lab/lab run forks --tagc "$tagc" --out results >out 2>err || fail "forks"
grep -q '^base: --model=tiny' out || fail "no base was trained"
python3 "$root/tests/lab/check_forks.py" results/forks.json || fail "the result of forks"
grep -q '^| `half` |' out || fail "no table of forks"
can_draw=yes
grep -q 'has altair and vl-convert-python' err && can_draw=no # then the result is there all the same
[ $can_draw = no ] || grep -q '</svg>' results/forks.svg || fail "no picture of forks"
timeout 60 copy/experiments/lab/lab run forks --tagc "$tagc" --out results >out 2>err || fail "forks again"
grep -q '^base: from runs/lab/cache/' out || fail "the base is trained anew"
sed -i 's/^steps = 12/steps = 6/' copy/experiments/lab/experiments/forks.toml
timeout 60 copy/experiments/lab/lab run forks --tagc "$tagc" --out results >out 2>err && fail "forks without a step"
says "steps is 6, allowed: more than the base's 6"
rm copy/experiments/lab/experiments/forks.toml

# ---- two hosts ----
"$tagc" version | grep -q '^parts:.* mpi$' || { echo "skipped from here: tagc is built without MPI"; exit 77; }
if ! "$lab" check >out 2>err; then
    echo "skipped from here: $(cat err)"
    exit 77
fi
lab 0 run smoke --quick --tagc "$tagc" --out results
python3 "$root/tests/lab/check_smoke.py" results/smoke.json || fail "the result"
no_leftovers "$ended" "after a run"
if [ $can_draw = yes ]; then
    grep -q '</svg>' results/smoke.svg || fail "no picture"
    lab 0 pictures results/smoke.json
fi
cp other.json results/
lab 0 tables results
grep -q '^| `packed` |' out || fail "no table"
printf 'before\n<!-- table smoke -->\nold\n<!-- end -->\nafter\n' >page.md
lab 0 tables --into page.md results/smoke.json
grep -q '^| `fsdp` |' page.md && grep -q '^after$' page.md && ! grep -q '^old$' page.md || fail "tables --into"
lab 1 tables --into torn.json results/smoke.json
says "torn.json has no place for any of smoke"

# ---- latency ----
latency=$(dirname "$tagc")/tagc-lab-latency
refused() { # <what it says> <arguments>...
    local text=$1 code=0
    shift
    timeout 20 "$latency" "$@" >out 2>err || code=$?
    [ $code = 2 ] || fail "exit code $code instead of 2: $*"
    says "$text"
}
refused '--one-way-us is "0", allowed: a whole number from 1 to 10000000' --one-way-us 0 --queue-bytes 1 a:b=c:d
refused '--one-way-us is "1ms", allowed:' --one-way-us 1ms --queue-bytes 1 a:b=c:d
refused '--queue-bytes is "-1", allowed: a whole number from 1 to' --one-way-us 1 --queue-bytes=-1 a:b=c:d
for wire in a:b a:b=c a:=c:d a:b=c: :b=c:d a:b=c:d:e ../x:b=c:d a:sixteen-letters-=c:d a:b=c:d=e:f; do
    refused "a wire is \"$wire\", allowed: NAMESPACE:DEVICE=NAMESPACE:DEVICE" --one-way-us 1 --queue-bytes 1 "$wire"
done
refused 'usage:' --one-way-us 1 a:b=c:d
"$latency" --one-way-us 1 --queue-bytes 1 nowhere:eth0=nowhere:eth1 >out 2>err && fail "a namespace that is not there"
says "nowhere:eth0: there is no such network namespace"
if [ ! -w /dev/net/tun ] || ! command -v ping >/dev/null; then
    echo "latency is not tested: no /dev/net/tun, or no ping"
elif ! python3 - "$root/experiments/lab" "$tagc" >out 2>err <<'END'; then
import sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import experiment, hosts
case = experiment.Case(**experiment.DEFAULTS | {"hosts": 2, "arms": [], "latency": "1ms"})
with hosts.Network(case, sys.argv[2]):
    pass
END
    echo "latency is not tested: $(tail -n 1 err)"
else
    python3 "$root/tests/lab/check_latency.py" "$root/experiments/lab" "$tagc" || fail "frames over links with latency"
    sed 's/^hosts = 2/&\nlatency = "20ms"/' copy/experiments/lab/experiments/smoke.toml >copy/experiments/lab/experiments/distant.toml
    lab=copy/experiments/lab/lab
    lab 0 run distant --quick --tagc "$tagc" --out results
    python3 - results/distant.json <<'END' || fail "the result of a run with latency"
import json, sys
(case,) = json.load(open(sys.argv[1]))["cases"]
found = case["link"]["latency"]
assert found["asked"] == "20ms" and found["one_way_s"] == 0.02
assert len(found["ping_round_trip_s"]) == 2 and all(0.0395 <= s <= 0.0425 for s in found["ping_least_round_trip_s"]), found
assert found["forwarder"]["dropped_frames"] == 0 and found["forwarder"]["frames"] > 100, found
assert case["link"]["tcp"]["tcp_slow_start_after_idle"] == "0"
# A dense step exchanges, gathers and agrees: four ways of 20 ms one after the other at the very least.
assert all(run["total_s"]["min"] > 0.08 for run in case["runs"]), [run["total_s"] for run in case["runs"]]
END
    no_leftovers "$ended" "after a run with latency"
    # Its link goes away in the middle.
    sed -i 's/^steps = .*/steps = 100000/' copy/experiments/lab/experiments/distant.toml
    copy/experiments/lab/lab run distant --quick --tagc "$tagc" --out nothing >out 2>err &
    ended=$!
    for _ in $(seq 400); do pgrep -f "$tagc train.*tagc-lab-$ended-" >/dev/null && break; sleep 0.1; done
    pkill -KILL -f "tagc-lab-latency .*tagc-lab-$ended-h1:eth0" || fail "no program to kill"
    code=0
    wait "$ended" || code=$?
    [ $code = 1 ] || fail "exit code $code after the link went away"
    says "tagc-lab-latency was ended by signal 9 while its links were in use"
    [ -e nothing/distant.json ] && fail "a result of a run without its link"
    no_leftovers "$ended" "after the link went away"
    lab=$root/experiments/lab/lab
fi

# A run that fails: a step that needs more positions than the model has.
cp copy/experiments/lab/experiments/smoke.toml copy/experiments/lab/experiments/failing.toml
sed -i 's/^steps = .*/seq-len = 9999/' copy/experiments/lab/experiments/failing.toml
lab=copy/experiments/lab/lab
lab 1 run failing --quick --tagc "$tagc" --out results
says "exit status" "mpirun" "--seq-len is 9999"
[ -e results/failing.json ] && fail "a result of a failed run"
no_leftovers "$ended" "after a failed run"

# A lab that is ended in the middle: by a signal it cleans up itself; by SIGKILL the next one does.
cp copy/experiments/lab/experiments/smoke.toml copy/experiments/lab/experiments/long.toml
sed -i 's/^steps = .*/steps = 100000/' copy/experiments/lab/experiments/long.toml
ended_by() { # <signal> <exit code>
    copy/experiments/lab/lab run long --quick --tagc "$tagc" --out results >out 2>err &
    local pid=$! code=0
    for _ in $(seq 400); do
        pgrep -f "$tagc train.*tagc-lab-$pid-" >/dev/null && break
        sleep 0.1
    done
    pgrep -f "$tagc train.*tagc-lab-$pid-" >/dev/null || fail "the run does not start"
    sleep 0.3
    kill -"$1" "$pid"
    wait "$pid" || code=$?
    [ $code = "$2" ] || fail "exit code $code instead of $2 after SIG$1"
    [ -e results/long.json ] && fail "a result of an ended run"
    ended=$pid # as lab does
}
ended_by TERM 143
says interrupted
no_leftovers "$ended" "after SIGTERM"
ended_by INT 130
no_leftovers "$ended" "after Ctrl-C"
ended_by KILL 137
ip netns list | grep -q "tagc-lab-$ended-" || fail "SIGKILL left nothing, so that clean has nothing to show"
killed=$ended
lab 0 clean
no_leftovers "$killed" "after clean"
echo "all well"
