#!/usr/bin/env bash
# The timeline is JSON with all ranks, communication runs while compute does, and no thread does two things at once.
source "$(dirname "$0")/lib.sh" "$@"
command -v python3 >/dev/null || skip "no python3 to read the timeline with"
make_data

# Any overlap at all depends on who else has the processors: it may be missed a few times, but not always.
for attempt in 1 2 3 4 5; do
    rm -rf run
    run 0 train "${tiny[@]}" --steps 6 --batch-size 16 --n-layer 4 --n-embd 64 --ranks 2 --exchange sketch --sparsity 0.9 \
        --ratio 4 --trace trace.json --trace-steps 3-5 --out run
    code=0
    python3 - <<'PY' || code=$?
import json, sys
least = 1
events = json.load(open("trace.json"))["traceEvents"]
names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
spans = [e for e in events if e["ph"] == "X"]
ranks = {e["pid"] for e in spans}
assert len(ranks) == 2, ranks
for rank in ranks:
    mine, threads = {}, {}
    for e in spans:
        if e["pid"] == rank:
            assert e["dur"] >= 0 and e["ts"] >= 0
            threads.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
            name = names[(rank, e["tid"])]
            mine.setdefault("comm" if name.startswith("comm ") else name, []).append(e)
    for tid, times in threads.items():
        times.sort()
        assert all(a[1] <= b[0] for a, b in zip(times, times[1:])), (rank, names[(rank, tid)])
    assert {"compute", "comm", "codec"} <= set(mine), sorted(mine)
    words = {e["name"].split()[0] for e in mine["compute"]}
    assert {"forward", "backward", "optimizer"} <= words, words
    work = [e for e in mine["compute"] if e["name"].split()[0] in ("forward", "backward")]
    together = sum(max(0, min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"]))
                   for a in work for b in mine["comm"])
    total = sum(e["dur"] for e in mine["comm"])
    least = min(least, together / total)
    sent = sum(e.get("args", {}).get("n_bytes", 0) for e in mine["comm"])
    assert sent > 0
print("overlap", least)
sys.exit(0 if least > 0.02 else 3)
PY
    [ $code = 3 ] || break
done
[ $code = 0 ] || fail "the timeline"
# A short run, and one that goes on behind the fifth step, have a timeline too.
run 0 train --out run --resume --ranks 2 --steps 8 --trace resumed.json --quiet
grep -q '"backward' resumed.json || fail "no timeline after --resume"
# A share of each step; never any, of up to forty steps, even on a machine that is busy with other things, would be wrong.
for steps in 8 16 24 32 40; do
    run 0 train --out run --resume --ranks 2 --steps $steps --quiet
    awk '{ bad += $1 < 0 || $1 > 1 } END { exit !(NR > 0 && !bad) }' <(column run overlap) || fail "overlap out of [0, 1]"
    some=$(awk '{ s += $1 } END { print (s > 0) }' <(column run overlap))
    [ "$some" = 1 ] && break
done
[ "$some" = 1 ] || fail "no overlap in the metrics"
