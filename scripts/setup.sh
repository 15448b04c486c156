#!/usr/bin/env bash
# Installs what the build, the tests and the demo need and the machine lacks. Says nothing when nothing is missing.
# Without root and without passwordless sudo it prints the one line to run, and fails.
set -euo pipefail

packages=(build-essential cmake ninja-build pkg-config libopenblas-dev libopenmpi-dev openmpi-bin libcmocka-dev
          libxxhash-dev libjansson-dev zlib1g-dev perl-doc)

if ! command -v dpkg-query >/dev/null; then
    echo "setup: this is not a Debian or Ubuntu system; install the equivalents of: ${packages[*]}" >&2
    exit 1
fi

missing=()
for package in "${packages[@]}"; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] && continue
    # pkgconf provides pkg-config on newer systems under its own name.
    [ "$package" = pkg-config ] && command -v pkg-config >/dev/null && continue
    missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

line="apt-get install -y --no-install-recommends ${missing[*]}"
if [ "$(id -u)" = 0 ]; then
    as_root=(env)
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n env)
else
    echo "setup: missing: ${missing[*]}" >&2
    echo "setup: run this, then again what you ran:" >&2
    echo "    sudo apt-get update && sudo $line" >&2
    exit 1
fi

echo "setup: installing ${missing[*]}"
apt=("${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends
     -o Dpkg::Use-Pty=0 -o Acquire::Retries=3)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Package lists may be absent or older than the mirror: refresh them only when the first try fails.
if ! "${apt[@]}" install "${missing[@]}" >"$log" 2>&1; then
    if ! { "${apt[@]}" update && "${apt[@]}" install "${missing[@]}"; } >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        echo "setup: could not install; by hand: $line" >&2
        exit 1
    fi
fi
