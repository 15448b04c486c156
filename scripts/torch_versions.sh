#!/usr/bin/env bash
# Runs the Python tests on each minor version of torch that tagc supports, one at a time, and leaves a table; --help says how.
# TAGC_PYTHON=<interpreter>: what environments are made with (python3).
set -euo pipefail
exec "${TAGC_PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/torch_versions.py" "$@"
