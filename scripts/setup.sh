#!/usr/bin/env bash
# Installs what is missing of the groups asked for: build (default), lib (of these what libtagc alone needs), tests (the C tests), text (the manual of Perl, on which the demo and the lab train), lint (clang-format and clang-tidy), lab (the lab's hosts and links), browser (the test
# that opens a report), abi (the tests of libtagc's interface against older versions and with LLVM's linker), model (the model checker), ccache (make check
# then compiles once what it needs twice), aarch64 (cross compiler and qemu for scripts/aarch64.sh), python (what scripts/python.sh makes its environment
# with). Says nothing when nothing is missing. Without root and without passwordless sudo it prints the one line to run, and fails. Where all but the build's
# and the lab's packages cannot be had, it says so and goes on: what needs them is skipped.
set -euo pipefail

lib=(build-essential cmake ninja-build pkg-config libuv1-dev libssl-dev)
build=("${lib[@]}" libopenblas-dev libopenmpi-dev openmpi-bin libjansson-dev zlib1g-dev python3)
tests=(libcmocka-dev libxxhash-dev)
text=(perl-doc)
lint=(clang-format-14 clang-tidy-14)
abi=(abigail-tools lld)
model=(spin)
ccache=(ccache)
lab=(iproute2 iperf3 iputils-ping python3 openmpi-bin)
browser=(chromium poppler-utils)
aarch64=(gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)
python=(python3-venv)

if ! command -v dpkg-query >/dev/null; then
    echo "setup: this is not a Debian or Ubuntu system; install the equivalents of: ${build[*]}" >&2
    exit 1
fi

is_installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null || true)" = installed ] && return
    # pkgconf provides pkg-config on newer systems under its own name.
    [ "$1" = pkg-config ] && command -v pkg-config >/dev/null
}

install_group() { # <packages...>
    local missing=() package as_root apt log
    for package in "$@"; do is_installed "$package" || missing+=("$package"); done
    [ ${#missing[@]} -eq 0 ] && return
    local line="apt-get install -y --no-install-recommends ${missing[*]}"
    if [ "$(id -u)" = 0 ]; then
        as_root=(env)
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root=(sudo -n env)
    else
        echo "setup: missing: ${missing[*]}" >&2
        echo "setup: run this, then again what you ran:" >&2
        echo "    sudo apt-get update && sudo $line" >&2
        return 1
    fi
    echo "setup: installing ${missing[*]}"
    apt=("${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends
         -o Dpkg::Use-Pty=0 -o Acquire::Retries=3)
    log=$(mktemp)
    # Package lists may be absent or older than the mirror: refresh them only when the first try fails.
    if ! "${apt[@]}" install "${missing[@]}" >"$log" 2>&1 &&
        ! { "${apt[@]}" update && "${apt[@]}" install "${missing[@]}"; } >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        rm -f "$log"
        echo "setup: could not install; by hand: $line" >&2
        return 1
    fi
    rm -f "$log"
}

for group in "${@:-build}"; do
    case $group in
    lib) install_group "${lib[@]}" ;;
    build) install_group "${build[@]}" ;;
    text) install_group "${text[@]}" || echo "setup: going on without the manual of Perl" >&2 ;;
    tests) install_group "${tests[@]}" ;;
    lint) install_group "${lint[@]}" || echo "setup: going on without clang-format and clang-tidy" >&2 ;;
    lab) install_group "${lab[@]}" ;;
    browser) install_group "${browser[@]}" || echo "setup: going on without a browser" >&2 ;;
    abi) install_group "${abi[@]}" || echo "setup: going on without abidiff and lld" >&2 ;;
    model) install_group "${model[@]}" || echo "setup: going on without spin" >&2 ;;
    ccache) install_group "${ccache[@]}" || echo "setup: going on without ccache" >&2 ;;
    aarch64) install_group "${aarch64[@]}" || echo "setup: going on without aarch64" >&2 ;;
    python) # a python3 that is not Debian's has venv already
        python3 -c 'import ensurepip, venv' 2>/dev/null || install_group "${python[@]}" ||
            echo "setup: going on without venv" >&2
        ;;
    *) echo "setup: \"$group\" is no group; known: build, lib, tests, text, lint, lab, browser, abi, model, ccache, aarch64, python" >&2; exit 2 ;;
    esac
done
