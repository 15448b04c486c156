#!/usr/bin/env bash
# Tests of tagc in loops of others that make python does not install: trl's trainers and torchtitan's. The environment is that of
# scripts/python.sh, with these on top of it; it is made once.
#   loops.sh                runs the tests
#   loops.sh <arguments>... runs its interpreter
# Where it cannot be made, it says why and exits with 77, which ctest takes for skipped.
set -euo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
packages="trl==1.16.0 peft==0.21.2 torchtitan==0.2.2 datasets==4.7.0"
base=$("$root/scripts/python.sh" find)
key=$(echo "$base $packages" | sha256sum | cut -c 1-16)
environment=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/tagc/loops-$key
where='import site; print(site.getsitepackages()[0])'
make_environment() { # of which each step needs the one before
    # shellcheck disable=SC2086
    "$base" -m venv --clear "$environment" &&
        "$base" -c "$where" >"$("$environment/bin/python" -c "$where")/base.pth" &&
        "$environment/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off $packages &&
        touch "$environment/made"
}
mkdir -p "$(dirname "$environment")"
exec 9>"$environment.lock"
flock 9
if [ ! -e "$environment/made" ] && ! make_environment >"$environment.log" 2>&1; then
    echo "skipped: $packages cannot be installed: $(tail -n 1 "$environment.log") (more in $environment.log)"
    exit 77
fi
exec 9>&-
export HF_HUB_OFFLINE=1
unset TAGC_TEST_ORIGIN # the process that others' tests are forks of has another environment
[ $# -gt 0 ] || set -- "$root"/tests/python/run.py -q -p no:cacheprovider "$root"/tests/python/integrations/test_trl.py "$root"/tests/python/weights/test_weight_trl.py \
    "$root"/tests/python/test_run_loops.py
exec "$environment/bin/python" "$@"
