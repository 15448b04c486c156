#!/usr/bin/env bash
# Builds in build/ what the tests of one module need, and runs them (make quick, make test TEST=). Not among them, and left to
# make check: tests at lesser levels of the processor, fuzzers, sanitizers.
#   quick.sh module <name>   as codec, exchange, cli; python/<folder> is a folder of python/tagc/torch, python all of Python
#   quick.sh test <name>     one test, as test_codec_select or test_python_ddp
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}
verb=${1:-} name=${2:-}

has_target() { grep -Eq "(^|/)$1\.dir\$" build/CMakeFiles/TargetDirectories.txt; }
run() { # <targets> <ctest's arguments>
    local start=$SECONDS
    cmake --build build -j"$jobs" --target $1
    shift
    ctest --test-dir build --output-on-failure --no-tests=error -j$((2 * jobs + 2)) "$@"
    echo "quick: $((SECONDS - start)) s"
}
labels=$(ctest --test-dir build --print-labels 2>/dev/null | sed -n 's/^  //p')

case $verb:$name in
module:?*)
    name=${name%/}
    name=${name/#python\/tagc\/torch\//python/}
    name=${name/#python\/tagc\//python/}
    case $name in
    python | python/*) target=tests_of_python ;;
    *) target=tests_of_${name##*/} name=${name##*/} ;; # lib/codec is codec
    esac
    if ! grep -Fxq "$name" <<<"$labels" || ! has_target "$target"; then
        echo "quick: \"$name\" is no module; known:" \
            $(grep -Evx 'abi|bench|fuzz|install|lab|level|mpi' <<<"$labels") >&2
        exit 2
    fi
    run "$target" -L "^$name\$"
    ;;
test:?*)
    name=${name##*/} name=${name%.*} target=$name
    if ! has_target "$target"; then # a script
        case $name in
        test_python_door) target=tagc ;;
        test_python_*) target=tests_of_python ;;
        test_cli_*) target=tagc ;;
        *) target="all tests" ;;
        esac
    fi
    run "$target" -R "^$name(_[0-9]+)?\$"
    ;;
*) sed -n '2,5s/^# //p' "$0" >&2; exit 2 ;;
esac
