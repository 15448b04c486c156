#!/usr/bin/env bash
# As a user: an sdist, a wheel of it, installed beside torch, used under torchrun from another folder with no variables set.
#   test_install.sh SOURCE SCRATCH
set -euo pipefail
source=$(realpath "$1") scratch=$2

fail() {
    echo "FAILED: $*" >&2
    exit 1
}
python=$("$source/scripts/python.sh" find 2>&1) || { echo "$python"; exit 77; }
rm -rf "$scratch"
mkdir -p "$scratch"
cd "$scratch"
scratch=$PWD
version=$(sed -n 's/^project(tagc VERSION \([0-9.]*\).*/\1/p' "$source/CMakeLists.txt")
backend=$(sed -n 's/^requires = \["\(.*\)"\]$/\1/p' "$source/pyproject.toml")
pip() {
    "$python" -m pip --disable-pip-version-check --no-input "$@"
}

pip install --target tools "$backend" hatch-fancy-pypi-readme >tools.log 2>&1 ||
    { echo "skipped: $backend cannot be had: $(grep '^ERROR' tools.log | tail -n 1)"; exit 77; }
(cd "$source" && PYTHONPATH=$scratch/tools "$python" -c \
    "from scikit_build_core.build import build_sdist; build_sdist('$scratch/dist')") >sdist.log 2>&1 ||
    { cat sdist.log; fail "no sdist"; }
sdist=dist/tagc_train-$version.tar.gz
[ -e "$sdist" ] || fail "not $sdist: $(ls dist)"
! tar tf "$sdist" | cut -d/ -f2 | sort -u | grep -E '^(build.*|runs|data|tests|lab)$' || fail "the above in the sdist"

# This tests the package and not the compilers, which take longest with all that they can do. `make wheels` has them do it.
export SKBUILD_CMAKE_BUILD_TYPE=None SKBUILD_CMAKE_DEFINE=TAGC_CUDA_ARCHITECTURES=90 CFLAGS=-O1
# No cache, for pip keeps wheels of files that it has seen.
pip wheel --no-deps --no-cache-dir -w wheels "$sdist" >wheel.log 2>&1 || { cat wheel.log; fail "no wheel"; }
wheel=$(echo wheels/*)
[[ $wheel == wheels/tagc_train-$version-py3-none-* ]] || fail "name of the wheel: $wheel"
# What PyPI shows: links that lead somewhere from there, and no address that nobody has registered.
"$python" -m zipfile -e "$wheel" content
metadata=content/tagc_train-$version.dist-info/METADATA
! grep -oE '\]\([^)]*\)' "$metadata" | grep -vE '^\]\((https?://|#)' || fail "the above links of the README are not addresses"
! grep -nE '!\[|\.example' "$metadata" || fail "the above in the README of the wheel"
grep -q '^Name: tagc-train$' "$metadata" || fail "its name is $(grep '^Name:' "$metadata")"
grep -q '^Provides-Extra: torch$' "$metadata" || fail "no extra for torch"
for needed in torch numpy; do
    grep -q "^Requires-Dist: $needed.*; extra == .torch." "$metadata" || fail "the extra for torch does not ask for $needed"
done
[ -e content/tagc/py.typed ] || fail "no py.typed"
[ -e content/tagc/report/page.css ] && grep -q "^tagc-report *= *tagc.report.command:main" content/*.dist-info/entry_points.txt ||
    fail "no tagc-report"
"$python" -m venv --without-pip env
site=$(env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pip install --no-deps --no-index --target "$site" "$wheel" >install.log 2>&1 || { cat install.log; fail "no install"; }
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/torch.pth"
library=$site/tagc/lib/libtagc.so
libraries=$(find "$site" -name '*tagc*.so*' ! -name libtagc-cuda.so | sort)
[ "$libraries" = "$site/tagc/lib/libtagc-plan.so"$'\n'"$library" ] || fail "installed libraries: $libraries"
! ldd $libraries | grep -vE '^/.*:$' | grep -vE 'linux-vdso|libc\.so|libm\.so|libpthread|ld-linux|libuv\.so' || fail "the above is needed to run"
# Kernels are in the wheel where nvcc made them, and need no CUDA to be loaded.
kernels=$site/tagc/lib/libtagc-cuda.so
if [ -e "$kernels" ]; then
    "$python" -c "import ctypes, sys; ctypes.CDLL(sys.argv[1]).tagc_cuda_maker" "$kernels" || fail "$kernels does not load"
fi

user() { # as in a new shell
    (cd / && timeout 200 env -i PATH=/usr/bin:/bin HOME="${HOME:-/}" "$scratch/env/bin/python" "$@")
}
said=$(user -c 'import importlib.metadata as m, tagc; print(tagc.__version__, m.version("tagc-train"), tagc.library_path())')
[ "$said" = "$version $version $library" ] || fail "version: $said"

said=$(user -m tagc plan --link 1gbit) || fail "python -m tagc plan"
grep -q "^1 Gbit/s: " <<<"$said" || { echo "$said"; fail "no answer of python -m tagc plan"; }

cat >train.py <<'EOF'
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import tagc.torch as tagc

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 129), nn.ReLU(), nn.Linear(129, 64))
batches = torch.randn(dist.get_world_size(), 8, 64)
model(batches).square().mean().backward()
expected = [p.grad for p in model.parameters()]
model.zero_grad()
fully_shard(model)
with tagc.compress(model, sparsity=0) as handle:
    model(batches[dist.get_rank()]).square().mean().backward()
    got = [p.grad.full_tensor() for p in model.parameters()]
torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-7)
print(f"rank {dist.get_rank()}: as in one process")
dist.destroy_process_group()
EOF
said=$(user -m torch.distributed.run --standalone --nproc-per-node 2 "$scratch/train.py" 2>&1) || { echo "$said"; fail "torchrun"; }
# Both ranks may write before either ends its line.
[ "$(grep -o 'as in one process' <<<"$said" | wc -l)" = 2 ] || { echo "$said"; fail "two ranks"; }
echo "$said"
