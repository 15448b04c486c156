#!/usr/bin/env bash
# One global batch on 1, 2, 3 and 4 ranks, in all shardings and ways to accumulate: the same loss curve.
source "$(dirname "$0")/lib.sh" "$@"
make_data

dense=("${tiny[@]}" --steps 8 --compress none --exchange dense)
run 0 train "${dense[@]}" --batch-size 12 --ranks 1 --out one
for ranks in 2 3 4; do
    run 0 train "${dense[@]}" --batch-size $((12 / ranks)) --ranks "$ranks" --out "ranks-$ranks"
    near_losses one "ranks-$ranks" 1e-5
done
for sharding in full grad none; do
    run 0 train "${dense[@]}" --batch-size 4 --ranks 3 --sharding "$sharding" --out "sharding-$sharding"
    near_losses one "sharding-$sharding" 1e-5
done
run 0 train "${dense[@]}" --batch-size 4 --ranks 3 --wrap matrix --out wrap
near_losses one wrap 1e-5
run 0 train "${dense[@]}" --batch-size 2 --ranks 2 --accumulate 3 --out accumulate
near_losses one accumulate 1e-4
run 0 train "${dense[@]}" --batch-size 2 --ranks 2 --accumulate 3 --exchange-each-micro-step --out each
near_losses accumulate each 1e-4

# Sparsity 0 through the compressed path is dense training.
run 0 train "${tiny[@]}" --steps 8 --batch-size 4 --ranks 3 --exchange packed --sparsity 0 --compress all --out zero
near_losses one zero 1e-5
paste <(column zero sparsity) <(column zero union_density) | awk '{ n++; if ($1 != 0 || $2 != 1) exit 1 } END { exit n != 8 }' ||
    fail "of everything $(column zero sparsity | head -n 1) stays, and the union is $(column zero union_density | head -n 1)"

# The same run twice is the same run, with one codec thread or two.
sparse=("${tiny[@]}" --steps 8 --batch-size 4 --ranks 2 --sparsity 0.9)
run 0 train "${sparse[@]}" --out twice-a
run 0 train "${sparse[@]}" --out twice-b --codec-threads 2
same_losses twice-a twice-b

# Something was learnt.
awk 'NR == 1 { first = $1 } END { exit !($1 < first - 0.3) }' <(column twice-a loss) || fail "the loss did not fall"
awk '{ n++; bad += $1 < 0.9 } END { exit n != 8 || bad }' <(column twice-a sparsity) || fail "sparsity below what was asked for"

# A folder with a run is not written over.
run 1 train "${sparse[@]}" --out twice-a
says "twice-a holds a run already" "--resume"

# A pattern that matches nothing is a mistake, not a wish for dense training.
run 1 train "${sparse[@]}" --compress names --compress-names "layer.*.mlp.*"
says "layer.*.mlp.*" "matches no tensor"
