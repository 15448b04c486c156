#!/usr/bin/env bash
# at_level.sh <level> <test_core_cpu> <program> [argument...]: runs the program as on a processor with nothing better than this level;
# exits with 77, and says so, where this processor lacks it.
set -euo pipefail
"$2" --has "$1" || exit 77
TAGC_CPU=$1 exec "${@:3}"
