#!/usr/bin/env bash
# try.sh WHEEL [OPTION OF PIP...]: what a user does with a wheel, in an environment that is empty at first: pip installs it with torch,
# and two ranks train with README's examples, over libtagc's own connections. Not a test of ctest's, because it installs torch. Options of
# pip may choose PyTorch's CPU builds, which are the smallest.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# -ge 1 ] && [ -e "$1" ] || { echo "try.sh: no wheel \"${1:-}\": try.sh WHEEL [OPTION OF PIP...]" >&2; exit 2; }
wheel=$(realpath "$1")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset TAGC_LIBRARY PYTHONPATH
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/python" -m pip install -q --disable-pip-version-check "$@" "tagc-train[torch] @ file://$wheel"
cd "$work" # where no other tagc lies
ranks() { "$work/env/bin/torchrun" --standalone --nproc-per-node 2 "$@"; }

"$work/env/bin/python" -m tagc info
cat >way.py <<'END'
import pathlib, sys
import torch, torch.distributed as dist
import tagc, tagc.torch

dist.init_process_group("gloo")
assert pathlib.Path(sys.prefix) in pathlib.Path(tagc.__file__).parents, tagc.__file__
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
handle = tagc.torch.compress(model, verbose=False)
model(torch.ones(2, 64)).sum().backward()
ways = {comm.transport for comm in handle.passes.comms()}
assert ways == {"native"}, ways
handle.close()
dist.destroy_process_group()
END
ranks way.py
ranks "$root/examples/pytorch/train_gpt.py" --steps 20
ranks "$root/examples/pytorch/own_collectives.py"
echo "$(basename "$wheel"): two ranks train with it, over libtagc's own connections"
