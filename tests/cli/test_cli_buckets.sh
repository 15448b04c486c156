#!/usr/bin/env bash
# --bucket-elems from the command line: the same training in fewer messages, on threads and over MPI; checkpoints go on with
# other buckets; what makes no sense is refused.
source "$(dirname "$0")/lib.sh" "$@"
make_data
export ASAN_OPTIONS=detect_leaks=0

deep=("${tiny[@]}" --n-layer 6 --batch-size 2 --steps 4)
control() { grep '"type":"step"' "$1/metrics.jsonl" | tail -n 1 | grep -o '"bits_sent_per_param":{[^}]*}' | grep -o '"control":[^,}]*' | cut -d: -f2; }

# Dense and not clipped, no bit of a loss changes; every unit has an agreement of its own, so that these bits say how many there are.
dense=(--compress none --exchange dense --clip 0)
for sharding in full grad none; do
    run 0 train "${deep[@]}" "${dense[@]}" --sharding $sharding --ranks 2 --out plain
    run 0 train "${deep[@]}" "${dense[@]}" --sharding $sharding --ranks 2 --bucket-elems 1000000000 --out bucket
    same_losses plain bucket
    awk -v a="$(control plain)" -v b="$(control bucket)" 'BEGIN { exit !(b > 0 && a / b > 3) }' ||
        fail "$sharding: $(control plain) bits of agreements, with buckets $(control bucket)"
    rm -rf plain bucket
done

# Gone on with other buckets and another number of ranks.
run 0 train "${deep[@]}" --ranks 2 --bucket-elems 20000 --save-every 2 --keep 5 --out run
rm -r run/step-00000004
cp -r run again
run 0 train --out run --resume --bucket-elems 0 --no-quiet
grep -q "^note: --bucket-elems 0, where the checkpoint had 20000" out || fail "no note: $(cat out)"
run 0 train --out again --resume --ranks 3 --bucket-elems 1000000
[ "$(column again loss | wc -l)" = 4 ] || fail "gone on: $(column again loss)"

# What makes no sense.
run 2 train "${deep[@]}" --bucket-elems -3
says "--bucket-elems" "-3" "from 0"
run 2 train "${deep[@]}" --bucket-elems many
says "--bucket-elems" "many"
run 2 train "${deep[@]}" --bucket-elems 5 --wrap matrix
says "--bucket-elems is 5" "--wrap block"
run 2 train "${deep[@]}" --bucket-elems auto
says "--bucket-elems" "auto"

# Ranks that are processes: the same losses as ranks that are threads.
if has_mpirun; then
    recipe=(--exchange direct --gentle no --sharding grad --gather delta4 --bucket-elems 20000)
    run 0 train "${deep[@]}" "${recipe[@]}" --ranks 3 --out threads
    mpi 3 train "${deep[@]}" "${recipe[@]}" --out processes >out 2>err || fail "mpirun: $(cat out)"
    same_losses threads processes
fi
echo ok
