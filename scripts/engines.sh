#!/usr/bin/env bash
# Tests of tagc.weights with vLLM's and verl's own code: layers, loaders, reload, factories, registries, on a processor. The environment
# is that of scripts/python.sh with their wheels on top of it, without their kernels' libraries; it is made once, of 350 MB.
#   engines.sh                runs the tests
#   engines.sh <arguments>... runs its interpreter
# Where it cannot be made, it says why and exits with 77, which ctest takes for skipped.
set -euo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
wheels="vllm==0.33.0 verl==0.9.1 xgrammar==0.2.8 apache-tvm-ffi==0.1.11"
needed="blake3 cachetools cbor2 cloudpickle einops fastapi llguidance msgspec openai orjson oss-harmony partial-json-parser pillow \
    prometheus_client py-cpuinfo pybase64 python-json-logger pyzmq tiktoken transformers<5.21 uvloop"
base=$("$root/scripts/python.sh" find)
key=$(echo "$base $wheels $needed" | sha256sum | cut -c 1-16)
environment=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/tagc/engines-$key
where='import site; print(site.getsitepackages()[0])'
make_environment() { # of which each step needs the one before
    local pip=("$environment/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off)
    # shellcheck disable=SC2086
    "$base" -m venv --clear "$environment" &&
        "$base" -c "$where" >"$("$environment/bin/python" -c "$where")/base.pth" &&
        "${pip[@]}" $needed && "${pip[@]}" --no-deps $wheels &&
        touch "$environment/made"
}
mkdir -p "$(dirname "$environment")"
exec 9>"$environment.lock"
flock 9
if [ ! -e "$environment/made" ] && ! make_environment >"$environment.log" 2>&1; then
    echo "skipped: $wheels cannot be installed: $(tail -n 1 "$environment.log") (more in $environment.log)"
    exit 77
fi
exec 9>&-
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
unset TAGC_TEST_ORIGIN # the process that others' tests are forks of has another environment
[ $# -gt 0 ] || set -- "$root"/tests/python/run.py -q -p no:cacheprovider "$root"/tests/python/weights/test_weight_vllm.py \
    "$root"/tests/python/weights/test_weight_vllm_layers.py "$root"/tests/python/weights/test_weight_engines.py
exec "$environment/bin/python" "$@"
