#!/usr/bin/env bash
# Configures a build folder: installs what is missing of a group of packages (setup.sh) where apt may do so, and goes on without it where it may
# not. Says nothing but what the build leaves out; where CMake fails, what it lacks and the one line that installs it.
#   configure.sh <folder> <groups of setup.sh> <arguments of cmake>...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1 groups=$2
shift 2
log=$(mktemp) missing=$(mktemp)
trap 'rm -f "$log" "$missing"' EXIT
read -ra groups <<<"$groups"
# Once per folder: without a network, apt takes its time to say so.
tried=$folder/setup-tried.txt
grep -qxF "${groups[*]}" "$tried" 2>/dev/null || scripts/setup.sh "${groups[@]}" 2>"$missing" || true
generator=()
if [ ! -e "$folder/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
if cmake -S . -B "$folder" "${generator[@]}" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON "$@" >"$log" 2>&1; then
    grep '^tagc: ' "$log" || true
    echo "${groups[*]}" >>"$tried"
else
    rm -f "$tried"
    grep -q '^CMake Error' "$log" || cat "$log" >&2
    awk '/^--/ { inside = 0 } /^CMake Error/ { inside = 1 } inside && NF' "$log" >&2
    cat "$missing" >&2
    exit 1
fi
