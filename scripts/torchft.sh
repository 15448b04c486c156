#!/usr/bin/env bash
# The tests of tagc under torchft, which the usual ones skip where torchft is missing, as it is in CI: there is no time left there.
#   torchft.sh                    tests/python/quorum/test_torchft*.py, after make build
#   torchft.sh <arguments>...     runs the interpreter that has torchft: torchft.sh lab/studies/torch_chaos.py --steps 300
# The environment is that of scripts/python.sh, with torchft on top of it; it is made once. torchft takes torch as it is there.
set -euo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
torchft=torchft==0.2.0
base=$("$root/scripts/python.sh" find)
key=$(echo "$base $torchft" | sha256sum | cut -c 1-16)
environment=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/tagc/torchft-$key
if [ ! -e "$environment/made" ]; then
    "$base" -m venv --clear "$environment"
    "$base" -c 'import site; print(site.getsitepackages()[0])' >"$("$environment/bin/python" -c 'import site; print(site.getsitepackages()[0])')/base.pth"
    "$environment/bin/python" -m pip install --disable-pip-version-check --no-input --quiet --progress-bar off "$torchft"
    touch "$environment/made"
fi
[ $# -gt 0 ] || set -- -m pytest -q -p no:cacheprovider "$root"/tests/python/quorum/test_torchft*.py
exec "$environment/bin/python" "$@"
