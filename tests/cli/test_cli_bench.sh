#!/usr/bin/env bash
# tagc bench: its result has all that docs/reference/results-format.md says, counts the bytes that training counts, and fails
# early, in one line, without leaving half a file.
source "$(dirname "$0")/lib.sh" "$@"
command -v python3 >/dev/null || skip "no python3 to read results with"
make_data
# MPI keeps memory until the process ends; our own leaks show in the tests without it.
export ASAN_OPTIONS=detect_leaks=0

check() { python3 "$here/bench_check.py" "$@" || fail "the result $1"; }
quick=(--model tiny --rounds 2 --steps-per-round 2)
direct=packed+exchange=direct+steps=3+sharding=grad+mild=int8+gather=delta4
hosts=packed+exchange=direct+sparsity=0.9+sharding=hybrid+ranks-per-host=2
arms=fsdp,fsdp-bf16,zero2-packed,ddp-packed,packed+steps=3,tagc-10x+steps=3+sparsity=0.9+ratio=4,$direct,$hosts
[ $sanitized = no ] || arms=fsdp,packed+steps=3,$direct,$hosts # tests of fsdp have the rest under sanitizers

run 0 bench "${quick[@]}" --data data --arms $arms --json local.json
check local.json local
grep -q '^Recommendation: ' out || fail "no recommendation"
# One rate for one kind of traffic: between two ranks, all to all is both ways at once. Where the messages of the exchanges find
# another rate than the link's own, the text says which counts, and why both are none of a network.
grep -q "all ranks to all" out && fail "a second rate for both ways at once: $(cat out)"
grep -q "^ranks are threads of one process: memory takes the place of a network" out || fail "no word about the network that is not there"
check_rates() { # <output> <result>
    python3 - "$@" <<'PY' || fail "rates of $2: $(grep -A3 -e '^Link' -e 'note: plain' "$1")"
import json, sys
text, link = open(sys.argv[1]).read(), json.load(open(sys.argv[2]))["link"]
ratio = link["all_to_all_bytes_per_s"] / link["both_ways_bytes_per_s"]
has_note = "note: plain messages of this size go at" in text
assert has_note == (max(ratio, 1 / ratio) >= 1.25), (ratio, text)
assert not has_note or "All ranks are on one host: both are rates of its memory" in text, text
PY
}
check_rates out local.json
# Every other round goes backwards. The first arm runs again behind the last one.
sed -n 's/^ *round \([0-9]\) of 2  \([^ ]*\).*/\1 \2/p' out >turns
{ echo $arms,the | tr , '\n' | sed 's/^/1 /'; echo $arms,the | tr , '\n' | tac | sed 's/^/2 /'; } | diff - turns ||
    fail "the order of the turns"
if [ $sanitized = no ]; then
    run 0 bench --model tiny --only link --json link.json
    python3 -c 'import json; l = json.load(open("link.json"))["link"]; assert l["all_to_all_bytes_per_s"] == l["both_ways_bytes_per_s"]' ||
        fail "two rates for one kind of traffic: $(cat out)"
fi

# same_as_training <result> <arm> <run>: steps 2 and 3 of the run are what was measured.
same_as_training() {
    python3 - "$@" <<'PY' || fail "$2 of $1 does not count what $3 does"
import json, sys
result, name, run = sys.argv[1:]
arm = next(a for a in json.load(open(result))["arms"] if a["name"] == name)
steps = [json.loads(line) for line in open(run + "/metrics.jsonl")]
steps = [s for s in steps if s["type"] == "step" and s["step"] in (2, 3)]
assert len(steps) == 2, steps
mean = lambda values: int(sum(values) / 2 + 0.5)
for leg, n_bytes in arm["n_bytes_sent"].items():
    assert n_bytes == mean([s["n_bytes_sent"][leg] for s in steps]), (leg, n_bytes, steps)
for count in "n_sent", "n_union":
    assert arm[count] == mean([s[count] for s in steps]), (count, arm[count], steps)
assert arm["n_bytes_sent"]["index"] > 0
assert arm["n_bytes_sent"]["values"] > 0
PY
}
train=(--model tiny --data data --batch-size 1 --seq-len 32 --steps 3 --ranks 2 --eval-every never --quiet)
run 0 train "${train[@]}" --exchange packed --sparsity 0.9875 --out packed
[ $sanitized = yes ] || run 0 train "${train[@]}" --exchange sketch --sparsity 0.9 --ratio 4 --out sketch
run 0 train "${train[@]}" --exchange direct --sparsity 0.9875 --sharding grad --mild int8 --gather delta4 --out direct
same_as_training local.json packed+steps=3 packed
same_as_training local.json $direct direct
[ $sanitized = yes ] || same_as_training local.json tagc-10x+steps=3+sparsity=0.9+ratio=4 sketch

# Accumulation, other ranks, a config file as an arm, synthetic tokens; parts alone.
printf 'exchange = packed\nsparsity = 0.9\n' >mine.conf
run 0 bench "${quick[@]}" --ranks 3 --accumulate 2 --batch-size 2 --seq-len 8 --codec-threads 2 --rounds 5 \
    --arms fsdp,mine.conf --json three.json
check three.json local
grep -q "^  all ranks to all: .* sent by each$" out || fail "no rate of three ranks: $(cat out)"
run 0 bench "${quick[@]}" --only floor --json floor.json --quiet
[ -s out ] && fail "--quiet prints"
run 0 bench "${quick[@]}" --only floor --json -
python3 -c 'import json; assert json.load(open("out"))["floor"]' || fail "--json - prints something else: $(cat out)"
python3 -c '
import json
r = json.load(open("floor.json"))
assert r["floor"] and all(r[k] is None for k in ("link", "exchanges", "codec", "arms", "recommendation")), r
' || fail "--only floor"

# What is wrong is said before anything is measured.
run 2 bench "${quick[@]}" --arms fsdp,nonsense
says '"nonsense" is no arm' fsdp packed
run 2 bench "${quick[@]}" --arms packed,packed
says "the arm packed is there twice"
run 2 bench "${quick[@]}" --arms packed+sparsity=2
says "arm packed+sparsity=2" "--sparsity" "from 0 to 1"
run 2 bench "${quick[@]}" --arms fsdp,packed+n-layer=3
says "arm packed+n-layer=3 has a model of its own"
run 2 bench "${quick[@]}" --arms fsdp,packed+accumulate=2
says "arm packed+accumulate=2 has --accumulate 2, tagc bench 1"
run 2 bench --model tiny --arms packed+batch-size=9
says "arm packed+batch-size=9 has --batch-size 9, tagc bench 1"
run 2 bench --model tiny --arms fsdp,packed+data=elsewhere
says "arm packed+data=elsewhere" "--data is not an arm's own"
run 2 bench "${quick[@]}" --only link,nothing
says '--only has "nothing"' "link, exchanges, floor, codec, arms"
run 2 bench "${quick[@]}" --seq-len 33
says "--seq-len is 33" "block-size of 32"
run 2 bench "${quick[@]}" --rounds 0
says "--rounds" "1 to 1000"
run 1 bench "${quick[@]}" --ranks 1
says "at least 2 ranks"
run 1 bench "${quick[@]}" --arms packed+compress=names+compress-names=nothing.*
says "matches no tensor"
run 1 bench "${quick[@]}" --data missing
says "missing"
run 1 bench "${quick[@]}" --json nowhere/b.json
says "nowhere/b.json" "No such file"
[ -s out ] && grep -q Link out && fail "a missing folder is found out after measuring"
mkdir -p folder
run 1 bench "${quick[@]}" --json folder
says "folder" "Is a directory"
# 640 layers of width 16384: 8 TB.
run 1 bench --model gpt2-162m --n-layer 640 --n-embd 16384 --n-head 16 --arms fsdp
says "arm fsdp needs about" "TB" "which has"

# Interrupted: the end comes within a round, of a thousand; what was there stays.
echo before >kept.json
begun() { # <pid>: waits for the first round
    for _ in $(seq 1200); do
        grep -q 'round 1' out && return
        kill -0 "$1" 2>/dev/null || break
        sleep 0.1
    done
    fail "no round of 1000 has begun"
}
interrupt() { # <pid> <signal>
    begun "$1"
    kill -"$2" "$1" || fail "1000 rounds were over before the signal came"
    for _ in $(seq 600); do kill -0 "$1" 2>/dev/null || return 0; sleep 0.1; done
    kill -KILL "$1"
    fail "still there a minute after SIG$2"
}
"$tagc" bench "${quick[@]}" --rounds 1000 --only arms --json kept.json >out 2>err &
interrupt $! TERM
wait $! && fail "exit code 0 after SIGTERM"
[ "$(cat kept.json)" = before ] || fail "an interrupted bench touched its file"
[ -e kept.json.partial ] && fail "an interrupted bench left a partial file"

has_mpirun || exit 0
[ $sanitized = no ] || exit 0 # test_cli_mpi has the transport, and the above what is measured
arms=fsdp,packed+steps=3 # the others have run above, without MPI
mpi 2 bench "${quick[@]}" --data data --arms $arms --json mpi.json >out 2>err || fail "mpirun -n 2 tagc bench"
check mpi.json mpi
same_as_training mpi.json packed+steps=3 packed
grep -q "point-to-point reduce-scatter" out || fail "nothing is said of MPI's own reduce-scatter"

code=0
timeout 120 mpirun --oversubscribe -n 1 "$tagc" bench "${quick[@]}" --arms fsdp : \
    -n 1 "$tagc" bench "${quick[@]}" --arms fsdp,packed >out 2>err || code=$?
[ $code != 0 ] && [ $code != 124 ] || fail "exit code $code for ranks with different --arms"
grep -qF -e '--arms is "fsdp" on rank 0 and "fsdp,packed" on rank 1' err || fail "the difference is not named"
[ "$(grep -c '^tagc: ' err)" = 1 ] || fail "said more than once"

# One rank dies.
timeout 120 mpirun --oversubscribe -n 2 "$tagc" bench "${quick[@]}" --rounds 1000 --only arms --json kept.json >out 2>err &
pid=$!
begun "$pid"
victim=$(pgrep -P "$(pgrep -P "$pid" | head -n 1)" -x tagc | tail -n 1)
[ -n "$victim" ] || fail "no rank to kill"
kill -KILL "$victim"
code=0
wait "$pid" || code=$?
[ $code != 0 ] && [ $code != 124 ] || fail "exit code $code after a rank was killed" # 124: not noticed within two minutes
[ "$(cat kept.json)" = before ] || fail "a bench that lost a rank touched its file"
