#!/usr/bin/env bash
# The test of tagc under trl's trainers, which the usual ones skip where trl is missing, as it is in CI: tests/python/integrations/test_trl.py, after
# make build. trl.sh <arguments>... runs the interpreter that has trl. The environment is that of scripts/python.sh, with trl and peft on top
# of it; it is made once.
set -euo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
packages="trl==1.16.0 peft==0.21.2"
base=$("$root/scripts/python.sh" find)
key=$(echo "$base $packages" | sha256sum | cut -c 1-16)
environment=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/tagc/trl-$key
if [ ! -e "$environment/made" ]; then
    "$base" -m venv --clear "$environment"
    "$base" -c 'import site; print(site.getsitepackages()[0])' >"$("$environment/bin/python" -c 'import site; print(site.getsitepackages()[0])')/base.pth"
    # shellcheck disable=SC2086
    "$environment/bin/python" -m pip install --disable-pip-version-check --no-input --quiet --progress-bar off $packages
    touch "$environment/made"
fi
export HF_HUB_OFFLINE=1
[ $# -gt 0 ] || set -- -m pytest -q -p no:cacheprovider "$root"/tests/python/integrations/test_trl.py
exec "$environment/bin/python" "$@"
