#!/usr/bin/env bash
# Trains a small GPT-2 on two ranks under plain FSDP, under TAGC as published, and with tagc's default, which compresses every leg, on the
# same data in the same order, and ends with a table. Ranks are threads of one process, so that it
# needs no MPI set-up; DEMO_STEPS changes the length.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh build text
echo "== building the command (a minute or less)"
log=$(mktemp)
{ make --no-print-directory configure BUILD_TYPE=Release && cmake --build build --target tagc -j"$(nproc)"; } >"$log" 2>&1 || { cat "$log" >&2; rm -f "$log"; exit 1; }
rm -f "$log"
tagc=build/tagc
runs=runs/demo

echo "== corpus: the manual of Perl, or other text of this machine"
if [ ! -e data/demo/train.bin ]; then
    scripts/corpus.sh --any data/demo/text
    "$tagc" data --out data/demo --lossy data/demo/text
fi

echo "== training three times, ${DEMO_STEPS:-300} steps each (half a minute each on two cores)"
rm -rf "$runs"
train() { # <name> <options>...
    local name=$1
    shift
    echo
    echo "== $name: ${*:-no options, the default}"
    "$tagc" train --config experiments/configs/demo.conf --data data/demo --ranks 2 ${DEMO_STEPS:+--steps "$DEMO_STEPS"} \
        --out "$runs/$name" --trace "$runs/$name.trace.json" "$@"
}
mkdir -p "$runs"
train fsdp --compress none --exchange dense
train tagc-10x --exchange sketch --ratio 10 --sparsity 0.9875 --index or --compress non-attention-linear
# The default with several ranks: gradients by the direct exchange, parameters as 4-bit differences once per step. It begins gently, since
# weights that are still random want small gradients now.
train all-legs

echo
"$tagc" compare "$runs/fsdp" "$runs/tagc-10x" "$runs/all-legs"
echo "timelines: $runs/{fsdp,tagc-10x,all-legs}.trace.json; open them at https://ui.perfetto.dev
make report draws all of this as a page"
