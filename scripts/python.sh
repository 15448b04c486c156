#!/usr/bin/env bash
# The Python that the tests of the Python part run with: a virtual environment in the user's cache, made once from
# tests/python/requirements.txt and used by every clone that asks for the same.
#   python.sh make               makes it where it is missing
#   python.sh find               prints the path of its interpreter
#   python.sh run <arguments>... runs its interpreter, with TAGC_PRELOAD as LD_PRELOAD
#   python.sh say                prints why the tests are skipped, and nothing where they are not
# Where there is none, it says why and exits with 77, which ctest takes for skipped. TAGC_PYTHON=<interpreter with torch
# and pytest> is used as it is.
set -euo pipefail
requirements=$(dirname "${BASH_SOURCE[0]}")/../tests/python/requirements.txt
needs='import numpy, pytest, torch'
verb=${1:-make}
[ $# -eq 0 ] || shift

none() { # <why>
    case $verb in
    say) echo "python tests: skipped, because $*"; exit 0 ;;
    run) echo "skipped: $*" ;; # ctest shows what a test prints
    *) echo "python tests will be skipped: $*" >&2 ;;
    esac
    exit 77
}
cause() { # <output>: pip's last error, or the last line of whatever else it was
    { grep '^ERROR: ' <<<"$1" || sed '/^ *$/d' <<<"$1"; } | tail -n 1 | sed 's/^ERROR: //' | cut -c 1-200
}

if [ -n "${TAGC_PYTHON:-}" ]; then
    said=$("$TAGC_PYTHON" -c "$needs" 2>&1) ||
        none "TAGC_PYTHON=$TAGC_PYTHON cannot be used: $(cause "$said")"
    python=$TAGC_PYTHON
else
    # The same requirements on another Python are another environment.
    base=$(python3 -c 'import sys; assert sys.version_info >= (3, 10), sys.version
print(sys._base_executable, sys.version)' 2>&1) ||
        none "there is no python3 of at least 3.10: $(cause "$base")"
    key=$({ cat "$requirements"; echo "$base"; } | sha256sum | cut -c 1-16)
    cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/tagc
    environment=$cache/python-$key
    python=$environment/bin/python
fi

is_made() { # The stamp is written last. An interpreter that has gone takes its environments with it.
    [ -n "${TAGC_PYTHON:-}" ] || { [ -e "$environment/made" ] && "$python" -c pass 2>/dev/null; }
}

# An environment cannot be moved, so it is made where it stays, by one process at a time.
make_environment() {
    local log=$environment.log
    mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || none "$cache cannot be written"
    exec 9>"$environment.lock"
    flock 9
    is_made && return
    rm -rf "$environment" "$environment.why"
    echo "python: making $environment (once): $(grep -v '^#' "$requirements" | tr '\n' ' ')"
    if ! { python3 -m venv "$environment" &&
        "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off -r "$requirements" &&
        "$python" -c "$needs"; } >"$log" 2>&1; then
        cause "$(cat "$log")" >"$environment.why"
        rm -rf "$environment"
        none "$(cat "$environment.why") (more in $log)"
    fi
    touch "$environment/made"
}

case $verb in
make) is_made || make_environment ;;
find | run | say)
    is_made || none "$(cat "$environment.why" 2>/dev/null || echo "their environment is missing; \"make python\" makes it")"
    case $verb in
    find) echo "$python" ;;
    run) [ -z "${TAGC_PRELOAD:-}" ] || export LD_PRELOAD=$TAGC_PRELOAD; exec "$python" "$@" ;;
    esac
    ;;
*) echo "python.sh: \"$verb\" is unknown; known: make, find, run, say" >&2; exit 2 ;;
esac
