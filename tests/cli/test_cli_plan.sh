#!/usr/bin/env bash
# tagc plan: what it prints and writes, bytes equal to those that tagc train counts, and what it refuses.
source "$(dirname "$0")/lib.sh" "$@"
make_data

# json <python expression over p>: of plan.json.
json() {
    python3 -c "import json; p = json.load(open('plan.json')); print($1)" || fail "plan.json: $1"
}

# ---- tables ----
run 0 plan --world-size 8 --hosts 4 --arms fsdp,packed --placement none,zero1,zero2,zero3,hybrid
for text in "8 ranks on 4 hosts" "sharded, gathered on use" "not run by tagc train" "no time without --profile" \
    "left out, hybrid: arm packed" "hybrid     sharded within a host"; do
    grep -qF -e "$text" out || fail "the plan lacks \"$text\""
done
grep -q Simulated out && fail "times without costs"

# FSDP2 with deltas: the bytes of zero2's between hosts, the memory of zero3 and 2 bytes per parameter.
run 0 plan --world-size 8 --hosts 4 --arms fsdp,all-legs --placement zero2,zero3 --json plan.json
grep -qF "zero3 with deltas: as PyTorch's FSDP2, with a replica of parameters in bf16 (not run by tagc train)" out || fail "deltas without a word"
[ "$(json '[(r["arm"], r["placement"]["name"], r["placement"]["is_run"]) for r in p["rows"]]')" = \
    "[('fsdp', 'zero2', True), ('fsdp', 'zero3', True), ('all-legs', 'zero2', True), ('all-legs', 'zero3', False)]" ] || fail "rows"
[ "$(json 'p["rows"][2]["n_host_bytes_sent"] == p["rows"][3]["n_host_bytes_sent"]')" = True ] || fail "bytes of deltas"
[ "$(json 'abs((p["rows"][3]["memory_bytes"]["parameters"] - p["rows"][1]["memory_bytes"]["parameters"]) / p["model"]["n_params"] - 2) < 0.01')" = True ] ||
    fail "memory of replicas"
run 0 plan --world-size 8 --hosts 4 --arms all-legs --placement zero3 --quiet
run 0 plan --world-size 8 --hosts 4 --arms fsdp,all-legs --placement zero2,hybrid
grep -qF "left out, hybrid: arm all-legs: gather is delta4, which needs sharding grad, but sharding is hybrid" out || fail "deltas within a host"
grep -q "zero3 with deltas" out && fail "a word on what is not there"
run 1 plan --world-size 8 --arms all-legs --placement hybrid,none
says "no arm can be placed so" "gather"

# ---- through a host's card: a ring passes all but a W-th of the bytes once, two levels all but an H-th, and ranks by themselves ----
# ---- as much as that for each of them ----
run 0 plan --model demo --world-size 8 --hosts 2 --arms zero2-bf16,zero2-direct+gather=delta4,fsdp+sharding=hybrid+ranks-per-host=4 --json plan.json
grep -q "^  zero2-bf16  *zero2 .* [0-9.]* MB  *[0-9.]* MB  *[0-9.]* MB$" out || fail "no table of the card"
python3 - <<'EOP' || fail "what passes the card"
import json
plan = json.load(open("plan.json"))
n = plan["model"]["n_params"]
dense, packed, hybrid = (row["card_bytes"] for row in plan["rows"])
near = lambda found, expected: abs(found / expected - 1) < 0.03
assert near(dense["ring"], 4 * n * 7 / 8) and near(dense["two_levels"], 4 * n / 2), (dense, n)
assert near(dense["one_level"], 4 * dense["two_levels"]), dense
assert packed["ring"] is None and packed["two_levels"] < dense["two_levels"] / 3, packed
assert 3.3 < packed["one_level"] / packed["two_levels"] < 4.1, packed # fragments of a small model have headers
assert set(hybrid.values()) == {None}, hybrid
for row in plan["rows"][:2]: # planned as one level
    assert near(sum(row["n_host_bytes_sent"].values()), row["card_bytes"]["one_level"]), row
EOP
run 0 plan --model demo --world-size 2 --arms zero2-bf16 --json plan.json
grep -q "network card" out && fail "a card of one rank"
[ "$(json 'set(p["rows"][0]["card_bytes"].values())')" = "{None}" ] || fail "a card of one rank"

# ---- bytes as counted by a run of the same options ----
legs='"n_bytes_sent":{'
for sharding in full grad none; do
    for exchange in dense sketch packed; do
        case $sanitized-$sharding-$exchange in no-* | *-full-dense | *-grad-sketch | *-none-packed) ;; *) continue ;; esac
        arm="packed+sharding=$sharding+exchange=$exchange+sparsity=0.98+ratio=$([ $exchange = sketch ] && echo 4 || echo auto)"
        run 0 train "${tiny[@]}" --ranks 4 --steps 2 --eval-every never --batch-size 2 --sharding $sharding \
            --exchange $exchange --sparsity 0.98 --ratio "$([ $exchange = sketch ] && echo 4 || echo auto)" \
            --out "run-$sharding-$exchange"
        run 0 plan --quiet --model tiny --world-size 4 --arms "$arm" --json plan.json
        # packed values and results depend on the union; all else is the same on every run
        for leg in index gather control $([ $exchange != packed ] && echo values); do
            counted=$(grep '"type":"step"' "run-$sharding-$exchange/metrics.jsonl" | tail -n 1 | sed "s/.*$legs//; s/}.*//" |
                tr ',' '\n' | grep "\"$leg\"" | cut -d: -f2)
            planned=$(json "round(p['rows'][0]['n_bytes_sent']['$leg'])")
            [ "$counted" = "$planned" ] || fail "$arm: $leg counted $counted, planned $planned"
        done
    done
done

# direct: blocks of mild flats and deltas are the same on every run; positions are about as many
printf '%s\n' "sharding = grad" "exchange = direct" "sparsity = 0" "values = int8" "mild = int4" "gather = delta4" \
    "ranks-per-host = 2" "two-level = yes" >direct.conf
run 0 train "${tiny[@]}" --config direct.conf --ranks 4 --steps 3 --eval-every never --batch-size 2 --out run-direct
run 0 plan --quiet --model tiny --world-size 4 --hosts 2 --arms direct.conf --json plan.json
for leg in index values gather control; do
    counted=$(grep '"type":"step"' run-direct/metrics.jsonl | tail -n 1 | sed "s/.*$legs//; s/}.*//" | tr ',' '\n' |
        grep "\"$leg\"" | cut -d: -f2)
    planned=$(json "round(p['rows'][0]['n_bytes_sent']['$leg'])")
    [ "$counted" = "$planned" ] || fail "direct: $leg counted $counted, planned $planned"
done

# ---- times ----
run 0 plan --model tiny --world-size 2,4 --link-rate 1gbit,10gbit --latency 50us --compute-s 0.1 --codec-ns 2 \
    --arms fsdp,packed --json plan.json
[ "$(json 'len(p)')" = 4 ] || fail "not a plan for each world size and link"
[ "$(json 'all(q["simulated"] and r["iteration_s"] > 0.1 for q in p for r in q["rows"])')" = True ] || fail "times"
[ "$(json 'p[0]["rows"][0]["iteration_s"] >= p[1]["rows"][0]["iteration_s"]')" = True ] || fail "a faster link is slower"
[ "$(json '[q["world_size"] for q in p]')" = "[2, 2, 4, 4]" ] || fail "order of plans"
run 0 plan --model tiny --world-size 2 --link-rate 1gbit --compute-s 0.1 --arms fsdp,packed --json plan.json
[ "$(json '[r["iteration_s"] is None for r in p["rows"]]')" = "[False, True]" ] || fail "invented the cost of a codec"
grep -q "no profile with such an arm, nor --codec-ns, says what exchange packed takes" out || fail "does not say why there is no time"

# Whether compression pays: what it saves on a slow link, what its codec costs on a fast one, and nothing in between.
run 0 plan --model demo --world-size 2 --link-rate 100mbit,100gbit --compute-s 0.1 --codec-ns 2 --arms zero2-bf16,all-legs --json plan.json
[ "$(json '[q["verdict"]["verdict"] for q in p]')" = "['pays', 'makes no difference']" ] || fail "verdicts"
grep -q "^  100 Mbit/s: all-legs pays: [0-9]* ms a step, [0-9]* ms without it by zero2-bf16 (1\.[0-9]*x)" out || fail "does not say that it pays"
run 0 plan --model demo --world-size 2 --link-rate 100gbit --compute-s 0.1 --codec-ns 50 --arms zero2-bf16,all-legs --json plan.json
[ "$(json 'p["verdict"]["verdict"]')" = costs ] || fail "a slow codec on a fast link"
grep -q "all-legs costs: " out || fail "does not say that it costs"
[ "$(json 'abs(p["rows"][0]["iteration_s"] / p["rows"][1]["iteration_s"] - p["verdict"]["speedup"]) < 1e-9')" = True ] || fail "speed-up"
run 0 plan --model demo --world-size 2 --link-rate 1gbit --compute-s 0.1 --arms fsdp,zero2-bf16 --json plan.json
[ "$(json 'p["verdict"]')" = None ] || fail "a verdict on nothing"
grep -q "Does compression pay" out && fail "a heading over nothing"

# Each rate with each latency; without a profile a large message takes three ways, and farther is slower.
run 0 plan --model demo --world-size 2 --link-rate 100mbit,1gbit --latency 1ms,10ms,0.05s --compute-s 0.001 --arms fsdp \
    --json plan.json
[ "$(json '[round(1000 * q["link"]["latency_s"], 6) for q in p]')" = "[1.0, 10.0, 50.0, 1.0, 10.0, 50.0]" ] || fail "latencies"
[ "$(json '[q["link"]["line_bits_per_s"] / 1e8 for q in p]')" = "[1.0, 1.0, 1.0, 10.0, 10.0, 10.0]" ] || fail "rates"
[ "$(json 'all(abs(q["link"]["large_latency_s"] - 3 * q["link"]["latency_s"]) < 1e-9 for q in p)')" = True ] || fail "large"
[ "$(json 'all(p[i]["rows"][0]["iteration_s"] < p[i + 1]["rows"][0]["iteration_s"] for i in (0, 1, 3, 4))')" = True ] ||
    fail "distance costs nothing"
grep -q '100 Mbit/s 50 ms' out || fail "the table does not name its links"
run 0 plan --model tiny --world-size 2 --link-rate 1gbit,1gbit/10gbit,10gbit/1gbit,10gbit/2gbit --compute-s 0.1 --arms fsdp --json plan.json
[ "$(json '[q["link"]["line_bits_per_s"] / 1e9 for q in p]')" = "[1.0, 1.0, 1.0, 2.0]" ] || fail "the slower direction"

# ---- a model from config.json ----
run 0 export --from run-full-dense --out hf
run 0 plan --quiet --config-json hf/config.json --world-size 4 --arms fsdp --json plan.json
[ "$(json 'p["model"]["n_embd"]')" = 32 ] || fail "the model of config.json"
[ "$(json 'p["link"]')" = None ] || fail "a link from nowhere"
run 0 plan --config-json hf/config.json --world-size 4 --arms fsdp --json -
python3 -c '
import json
piped, filed = (json.load(open(name)) | {"origin": None} for name in ("out", "plan.json"))
assert piped == filed
' && ! [ -e - ] || fail "--json - is not the file: $(cat out)"

# ---- profile and check ----
if "$tagc" help | grep -q ' bench '; then
    run 0 bench --model tiny --ranks 2 --rounds 1 --steps-per-round 2 --arms fsdp,tagc-10x,packed --json bench.json
    run 0 plan --model tiny --profile bench.json --check bench.json --fit-arms fsdp,packed --world-size 2,64 \
        --link-rate 1gbit --json plan.json
    grep -q "Costs fitted to 2 measured arms" out || fail "costs are not shown"
    blas=$("$tagc" version | sed -n 's/^products: //p')
    grep -qE "^  products [0-9.]+ Gflop/s \\($blas, 1 thread\\), memory" out || fail "the kernel of the profile: $(cat out)"
    grep -q "held out from the fit: 1 points" out || fail "held-out points are not told"
    grep -q "^the arm that the simulation calls fastest was the fastest in [01] of 1 places" out || fail "who was chosen"
    [ "$(json '[c["is_held_out"] for c in p[0]["checks"]]')" = "[False, True, False]" ] || fail "which were held out"
    [ "$(json 'p[0]["rows"][4]["union_source"]')" = profile ] || fail "the union is not the measured one"
    # What was measured is what is planned, unless another model is named.
    run 0 bench --model tiny --n-layer 3 --batch-size 2 --seq-len 32 --accumulate 2 --ranks 2 --rounds 1 \
        --steps-per-round 1 --arms fsdp --only link,arms --json other.json
    run 0 plan --quiet --profile other.json --world-size 2 --json plan.json
    [ "$(json '[p["model"]["n_layer"], p["batch_size"], p["seq_len"]]')" = "[3, 2, 32]" ] || fail "the profile's model"
    run 0 plan --quiet --profile other.json --model demo --batch-size 4 --world-size 2 --json plan.json
    [ "$(json '[p["model"]["name"], p["batch_size"]]')" = "['demo', 4]" ] || fail "the model asked for"
    run 2 plan --model tiny --fit-arms fsdp
    says "--fit-arms needs --profile"
    run 1 plan --model tiny --profile bench.json --fit-arms nonsense
    says "--fit-arms" "no such arm"
    head -c 2000 bench.json >torn.json
    run 1 plan --profile torn.json
    says "torn.json: line"
    python3 -c "import json; b = json.load(open('bench.json')); del b['arms'][1]['iterations'][0]['compute_s']
json.dump(b, open('holes.json', 'w'))"
    run 1 plan --profile holes.json
    says "holes.json: arms.iterations.compute_s"
    run 1 plan --profile plan.json
    says "plan.json" "\"bench\" or \"lab\""
    run 0 bench --model tiny --only floor --json floor.json
    run 1 plan --profile floor.json
    says "floor.json: link is missing"
    run 2 plan --profile bench.json:1
    says "no cases"
fi

# ---- where a result goes: what is no plain file stays what it is ----
if mknod -m 666 device c 1 7 2>/dev/null && (: >device) 2>/dev/null; then # root's own /dev/full, to be lost without harm
    for words in "plan --json device" "bench --model tiny --only floor --json device" \
        "train ${tiny[*]} --steps 5 --eval-every never --trace device"; do
        run 1 $words --quiet
        says "device: No space left on device"
        [ -c device ] || fail "tagc $words put a file in place of a device"
    done
fi
mkfifo pipe
cat pipe >piped &
run 0 plan --quiet --arms fsdp --json pipe
wait $!
[ -p pipe ] && python3 -m json.tool piped >/dev/null || fail "a plan through a pipe"
: >behind.json
ln -s behind.json link.json
run 0 plan --quiet --arms fsdp --json link.json
[ -L link.json ] && python3 -m json.tool behind.json >/dev/null || fail "a plan through a link"

# What ranks keep together is said once for each arm and value of it.
run 0 plan --model demo --world-size 8 --hosts 4 --arms direct,packed --placement none,zero1,zero2,zero3,hybrid
grep "ranks together keep" out >together
[ "$(wc -l <together)" = 3 ] && [ "$(grep -c '^  direct, \(none\|hybrid\): ' together)" = 2 ] || fail "$(cat together)"
run 0 plan --arms direct --placement none,zero1,hybrid
[ "$(grep -c "ranks together keep" out)" = 1 ] || fail "said more than once: $(grep together out)"

# ---- what is refused ----
run 2 plan --world-size 6 --hosts 4
says "--hosts is 4" "world size of 6"
run 2 plan --world-size 2,x
says "--world-size" "1 to 65536"
run 2 plan --link-rate fast
says "--link-rate is \"fast\"" "gbit"
run 2 plan --link-rate 10gb
says "--link-rate"
run 2 plan --link-rate 0gbit
says "--link-rate"
for wrong in 1gbit/ /1gbit 1gbit/2gbit/3gbit 1gbit/fast; do
    run 2 plan --link-rate $wrong
    says "--link-rate is \"$wrong\"" "up and down"
done
run 2 plan --latency 50
says "--latency is \"50\""
run 2 plan --latency 1ms,
says "--latency is \"1ms,\""
run 2 plan --link-rate 1gbit,2gbit,3gbit --latency 1ms,2ms,3ms,4ms,5ms,6ms
says "make 18 links, allowed are 16"
run 2 plan --placement zero4
says "--placement is \"zero4\"" "hybrid"
run 2 plan --link-rate 1gbit --bytes-per-s 1e8
says "give one"
run 2 plan --arms nothing
says "\"nothing\" is no arm"
run 1 plan --profile .
says ".: Is a directory"
echo '[1]' >list.json
run 1 plan --profile list.json
says "list.json: is no object"
run 1 plan --profile nowhere.json
says "nowhere.json: No such file"
run 2 plan --profile bench.json,
says "empty name"
run 2 plan --check nowhere.json
says "--check needs --profile"
run 1 plan --config-json nowhere.json
says "nowhere.json"
echo '{"model_type": "llama", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 9}' >llama.json
run 1 plan --config-json llama.json
says "llama.json" "gpt2"
run 2 plan --config-json hf/config.json --n-layer 3
says "--n-layer and --config-json"
run 1 plan --world-size 16 --arms packed+index=sum4
says "sum4" "world size is 16"
run 1 plan --json /nowhere/plan.json
says "/nowhere/plan.json"
[ -z "$(ls ./*.partial 2>/dev/null)" ] || fail "a half-written file is left"
echo "plans are as counted"
