#!/usr/bin/env bash
# Direct exchanges, classes and hosts from the command line: every recipe trains, ranks of one host held to be several
# give the same numbers under mpirun, checkpoints go on exactly, and what makes no sense is told.
source "$(dirname "$0")/lib.sh" "$@"
make_data
export ASAN_OPTIONS=detect_leaks=0

configs=$here/../../lab/configs
for conf in direct direct-bf16 zero2-direct all-legs all-legs-2bit ddp-direct; do
    run 0 train "${tiny[@]}" --no-quiet --config "$configs/$conf.conf" --steps 3 --ranks 2 --batch-size 2 --out $conf
    grep -q "^note:" out && fail "$conf.conf has an option without effect: $(grep '^note:' out)"
    grep -Eq "^gradients: direct int2, sparsity 95 %, on [0-9.]+ % of the parameters; mild int4, sparsity 85 %, on [0-9.]+ %; the rest dense" out ||
        fail "headline of $conf: $(grep gradients: out)"
    [ "$(column $conf loss | wc -l)" = 3 ] || fail "$conf did not do its steps"
    [ "$(column $conf n_mild | sort -u)" -gt 0 ] || fail "$conf has no mild class"
done
# Fewer bits the further it goes, counted over all parameters.
bits() { # of leg $2 in the last step of run $1
    grep '"type":"step"' "$1/metrics.jsonl" | tail -n 1 | grep -o '"bits_sent_per_param":{[^}]*}' | grep -o "\"$2\":[^,}]*" | cut -d: -f2
}
awk -v a="$(bits zero2-direct gather)" -v b="$(bits all-legs gather)" -v c="$(bits all-legs-2bit gather)" \
    'BEGIN { exit !(a > 7.9 && a < 8.6 && b < a / 3 && c < b) }' || # half of 16: two ranks
    fail "gathers: $(bits zero2-direct gather), $(bits all-legs gather), $(bits all-legs-2bit gather) bits"

# Hosts, with ranks as threads; resumed exactly.
recipe=(--exchange direct --sparsity 0.9 --mild int8 --mild-sparsity 0.5 --compressed-beta1 0 --batch-size 2)
for way in "--sharding hybrid" "--sharding full --two-level" "--sharding grad --two-level" "--sharding none --two-level"; do
    rm -rf whole half
    # shellcheck disable=SC2086
    run 0 train "${tiny[@]}" "${recipe[@]}" $way --ranks 4 --ranks-per-host 2 --steps 4 --out whole
    # shellcheck disable=SC2086
    run 0 train "${tiny[@]}" "${recipe[@]}" $way --ranks 4 --ranks-per-host 2 --steps 4 --save-every 2 --keep 5 --out half
    rm -r half/step-00000004
    run 0 train --out half --resume --quiet
    same_losses whole half
done
run 0 train "${tiny[@]}" --no-quiet "${recipe[@]}" --sharding hybrid --ranks 4 --ranks-per-host 2 --steps 2 --out hybrid
grep -q "sharded over the 2 ranks of a host, 2 replicas (HSDP)" out || fail "headline: $(head -n 3 out)"
# Other commands read it on any number of ranks, and see what training saw.
saw=$(grep -o "validation loss [0-9.]*" out | tail -n 1 | cut -d' ' -f3)
run 0 eval --from hybrid --data data --batches 2 --ranks 4 --batch-size 2
grep -q "$saw" out || fail "eval of a hybrid run: $(cat out), training saw $saw"
run 0 export --from hybrid --out hybrid.safetensors
run 0 train "${tiny[@]}" "${recipe[@]}" --fork hybrid --sharding grad --ranks 2 --steps 4 --out forked
run 0 train "${tiny[@]}" --compress none --sharding hybrid --ranks 4 --ranks-per-host 2 --steps 2 --batch-size 2 --out hsdp
run 0 train "${tiny[@]}" --compress none --sharding full --ranks 4 --steps 2 --batch-size 2 --out fsdp
near_losses hsdp fsdp 1e-5

# Parameters in two levels: no loss changes, with any exchange.
for way in "--sharding full --compress none --gather lossless" "--sharding grad --exchange packed --gather delta4 --gather-check-every 2"; do
    says="bf16, without loss in about 11 bits"
    [[ $way == *delta4* ]] && says="bf16, then 4-bit deltas, once per step"
    # shellcheck disable=SC2086
    run 0 train "${tiny[@]}" $way --ranks 4 --batch-size 2 --steps 4 --out one-level
    # shellcheck disable=SC2086
    run 0 train "${tiny[@]}" --no-quiet $way --ranks 4 --batch-size 2 --steps 4 --two-level --ranks-per-host 2 --out two-levels
    grep -q "^parameters: gathered as $says, to each host once" out || fail "headline: $(grep parameters: out)"
    grep -q "^note:" out && fail "a note about two levels: $(cat out)"
    same_losses one-level two-levels
    rm -rf one-level two-levels
done

# Levels by name are the options that they stand for.
levels() { # <levels> <the same by other options>...
    local named=$1
    shift
    run 0 train "${tiny[@]}" "${recipe[@]}" --levels "$named" --steps 3 --out named
    run 0 train "${tiny[@]}" "${recipe[@]}" "$@" --steps 3 --out spelt
    same_losses named spelt
    for run in named spelt; do
        head -n 1 $run/metrics.jsonl | grep -o '"world_size":[0-9]*\|"sharding":"[a-z]*"\|"ranks-per-host":"[0-9]*"\|"two-level":"[a-z]*"' >$run.levels
    done
    [ "$(wc -l <named.levels)" = 4 ] || fail "the run's options: $(cat named.levels)"
    diff named.levels spelt.levels || fail "--levels $named: $(cat named.levels)"
    rm -rf named spelt
}
levels hosts=2,ranks=2 --ranks 4 --ranks-per-host 2 --two-level
levels hosts=3 --ranks 3
for wrong in hosts=2,ranks=x ranks=4 hosts=2,hosts=2 ranks=2,hosts=2 hosts=0 hosts=1025 hosts=2, hosts hosts=-1 sites=2; do
    run 2 train "${tiny[@]}" --levels "$wrong"
    says "--levels is \"$wrong\", allowed: hosts=N"
done
run 2 train "${tiny[@]}" --levels hosts=2,ranks=2 --ranks 3
says "that makes 4 ranks, but this run has 3"
run 2 train "${tiny[@]}" --levels hosts=2,ranks=2 --ranks-per-host 4
says "--ranks-per-host is 4, and by --levels hosts=2,ranks=2 it is 2"

# What makes no sense.
run 2 train "${tiny[@]}" --sharding hybrid --exchange direct
says "--sharding hybrid needs --ranks-per-host"
run 2 train "${tiny[@]}" --sharding hybrid --ranks-per-host 2 --exchange packed
says "--exchange packed does not go with --sharding hybrid"
run 2 train "${tiny[@]}" --gather delta4
says "--gather delta4 needs --sharding grad"
run 2 train "${tiny[@]}" --exchange direct --block 100
says "--block is 100" "power of two"
run 1 train "${tiny[@]}" --two-level --exchange direct --ranks 4 --ranks-per-host 3 --steps 1
says "ranks_per_host is 3"
run 0 train "${tiny[@]}" --no-quiet --steps 1 --exchange packed --values int8 --mild-sparsity 0.5 --ranks-per-host 1 --gather-check-every 3
for option in values mild-sparsity ranks-per-host gather-check-every; do
    grep -q "^note: --$option is for .* and has no effect here" out || fail "no note about --$option: $(cat out)"
done
run 0 train "${tiny[@]}" --no-quiet --steps 1 --two-level
grep -q "^note: --two-level is for --ranks-per-host of 2 or more" out || fail "no note about --two-level: $(cat out)"
run 0 train "${tiny[@]}" --no-quiet --steps 1 --two-level --ranks 2 --ranks-per-host 2 --sharding none --exchange packed
grep -q "^note: --two-level is for direct exchanges and sharded parameters" out || fail "no note about --two-level: $(cat out)"
run 0 train "${tiny[@]}" --no-quiet --steps 1 --compress none --compressed-beta1 0
grep -q "^note: --compressed-beta1 is for compressed gradients" out || fail "no note about --compressed-beta1"
run 0 train "${tiny[@]}" --no-quiet --steps 1 --compress all --mild int4
grep -q "^note: --mild is for matrices that --compress leaves out" out || fail "no note about --mild"

has_mpirun || exit 0
run 0 train "${tiny[@]}" "${recipe[@]}" --sharding hybrid --ranks 4 --ranks-per-host 2 --steps 3 --out local
mpi 4 train "${tiny[@]}" --no-quiet "${recipe[@]}" --sharding hybrid --ranks-per-host 2 --steps 3 --out mpi >out 2>err ||
    fail "mpirun -n 4 tagc train --sharding hybrid"
same_losses local mpi
grep -q "^note: --ranks-per-host is 2, but 4 ranks share a host" out || fail "no note about hosts: $(cat out)"

# Hosts that are not those of --ranks-per-host; a host is what has a name of its own.
unshare --uts hostname elsewhere 2>/dev/null || exit 0
split() { # split <ranks here> <ranks elsewhere> <options>...
    local n_here=$1 n_there=$2
    shift 2
    timeout 120 mpirun --oversubscribe -n "$n_here" "$tagc" train "${tiny[@]}" "${recipe[@]}" "$@" : \
        -n "$n_there" unshare --uts bash -c 'hostname elsewhere; exec "$0" "$@"' "$tagc" train "${tiny[@]}" "${recipe[@]}" "$@"
}
split 2 2 --no-quiet --sharding hybrid --ranks-per-host 2 --steps 3 --out split >out 2>err || fail "two hosts of two"
same_losses local split
grep -q "^note:" out && fail "a note about hosts that are as said: $(cat out)"
split 3 1 --sharding hybrid --ranks-per-host 2 --steps 3 >out 2>err && fail "ranks 2 and 3 are on different hosts"
says "ranks 2 and 3, which it puts together, are on the hosts" "start neighbouring ranks on one host"
split 1 1 --two-level --ranks-per-host 2 --steps 3 >out 2>err && fail "two hosts of one taken for one of two"
says "--ranks-per-host is 2" "as started it is 1"

# What passes the card of a host, counted: two thirds of what each of its two ranks sends to three others, and in two levels less.
"$tagc" help | grep -q ' bench ' || exit 0
bench=(bench --model tiny --only arms --rounds 1 --steps-per-round 2 --arms "fsdp,fsdp+ranks-per-host=2+two-level=yes" --json bench.json)
timeout 120 mpirun --oversubscribe -n 2 "$tagc" "${bench[@]}" : \
    -n 2 unshare --uts bash -c 'hostname elsewhere; exec "$0" "$@"' "$tagc" "${bench[@]}" >out 2>err || fail "bench on two hosts"
grep -q "sent to other hosts in an iteration, counted" out || fail "no table of the card: $(cat out)"
python3 - <<'EOP' || fail "what passes the card"
import json
one, two = json.load(open("bench.json"))["arms"]
sent = sum(one["n_bytes_sent"].values())
assert abs(one["card_bytes"] / (2 * 2 / 3 * sent) - 1) < 0.01, (one["card_bytes"], sent)
assert two["n_bytes_sent"]["gather"] == one["n_bytes_sent"]["gather"] and two["card_bytes"] < 0.8 * one["card_bytes"], (one, two)
EOP
