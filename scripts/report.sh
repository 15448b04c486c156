#!/usr/bin/env bash
# Runs tagc-report from this clone: report.sh <arguments of tagc-report>... It takes the first Python that has altair and
# vl-convert-python: TAGC_PYTHON, python3, that of the tests (scripts/python.sh), or an environment in the user's cache.
# `report.sh --make` makes that environment if there is no other. Without one, the exit code is 77.
set -euo pipefail
top=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
pins=$(grep -E '^(altair|vl-convert-python)==' "$top/tests/python/requirements.txt" 2>/dev/null || echo 'altair vl-convert-python')
environment=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/tagc/report-$(sha256sum <<<"$pins" | cut -c 1-8)

find_python() {
    local python
    for python in "${TAGC_PYTHON:-}" python3 "$("$top/scripts/python.sh" find 2>/dev/null)" "$environment/bin/python"; do
        [ -n "$python" ] && "$python" -c 'import altair, vl_convert' 2>/dev/null && echo "$python" && return
    done
    return 77
}

if [ "${1:-}" = --make ]; then
    find_python >/dev/null && exit
    echo "report: making $environment (once): $(tr '\n' ' ' <<<"$pins")"
    rm -rf "$environment"
    # shellcheck disable=SC2086
    python3 -m venv "$environment" && "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-input $pins
    exit
fi
python=$(find_python) || { echo "report: no Python here has altair and vl-convert-python: scripts/report.sh --make" >&2; exit 77; }
export PYTHONPATH=$top/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
exec "$python" -m tagc.report "$@"
