#!/usr/bin/env bash
# exports.sh NM LIBRARY SOURCE: the library exports what the headers mark TAGC_API, each with a version, and nothing else.
set -euo pipefail
nm=$1 library=$2 source=$3
marked=$(cd "$source/include/tagc" && cat tagc.h all_to_all.h blocks.h changes.h model.h policy.h schedule.h paper.h transport.h native.h device.h | tr '\n' ' ' | grep -oE 'TAGC_API [^;(]*\(' |
    grep -oE 'tagc_[a-z_0-9]+\($' | tr -d '(' | sort)
exported=$("$nm" -D --defined-only --with-symbol-versions "$library" | awk '$2 != "A" {print $3}' | sort)
[ "$(wc -l <<<"$marked")" -ge 46 ] || { echo "only $(wc -l <<<"$marked") functions found in the headers"; exit 1; }
unversioned=$(grep -vE '@@TAGC_[0-9]+\.[0-9]+$' <<<"$exported" || true)
[ -z "$unversioned" ] || { echo "exported without a version: $unversioned"; exit 1; }
diff <(echo "$marked") <(sed 's/@@.*//' <<<"$exported") ||
    { echo "< marked TAGC_API in include/tagc, > exported by cmake/libtagc.map"; exit 1; }
