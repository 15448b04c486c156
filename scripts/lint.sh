#!/usr/bin/env bash
# Checks the form of all sources, and looks for common mistakes, in under a minute and without changing a file: clang-format over
# C, C++ and CUDA, ruff over Python, clang-tidy over the C of the products. Where one of them is missing, it says so and goes on.
#   lint.sh           all three
#   lint.sh format    only the form: clang-format and ruff format
#   lint.sh fix       writes the form instead of checking it, and sorts Python's imports
#   lint.sh lab       the form and ruff's rules, of lab/ alone
#   lint.sh analyze   clang-tidy with the analyzer of clang, which takes minutes
# clang-tidy reads build/compile_commands.json (make lint makes it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
verb=${1:-all}
jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}
failed=() folder=.

sources() { git ls-files -z -- "$@"; }
say_seconds() { echo "lint: $1: $((SECONDS - start)) s"; }

# Another version of LLVM formats otherwise and warns of other things.
llvm_14() { # <name>
    local name
    for name in "$1-14" "$1"; do
        [[ $("$name" --version 2>/dev/null || true) == *"version 14."* ]] || continue
        echo "$name"
        return
    done
    echo "lint: $1 14 is not installed (scripts/setup.sh lint): C is not checked by it" >&2
    return 1
}

# In the environment of the Python tests, else on the path.
find_ruff() {
    local python
    if ! grep -q '^\[tool\.ruff' pyproject.toml; then
        echo "lint: pyproject.toml has no rules of ruff: Python is not checked by it" >&2
        return 1
    fi
    python=$(scripts/python.sh find 2>/dev/null || true)
    if [ -n "$python" ] && [ -x "$(dirname "$python")/ruff" ]; then
        echo "$(dirname "$python")/ruff"
    elif ! command -v ruff; then
        echo "lint: ruff is not installed (make python, or pip install ruff): Python is not checked by it" >&2
        return 1
    fi
}

form() { # <clang-format's arguments> -- <ruff's>
    local tool start=$SECONDS clang=()
    while [ "$1" != -- ]; do clang+=("$1"); shift; done
    shift
    if tool=$(llvm_14 clang-format); then
        sources "$folder/*".{c,h,cpp,cu,cuh} | xargs -0 -P"$jobs" -n40 "$tool" "${clang[@]}" || failed+=(clang-format)
        say_seconds clang-format
    fi
    start=$SECONDS
    if tool=$(find_ruff); then
        "$tool" format --quiet "$@" "$folder" || failed+=("ruff format")
        say_seconds "ruff format"
    fi
}

tidy() { # <clang-tidy's arguments>
    local tool start=$SECONDS
    tool=$(llvm_14 clang-tidy) || return 0
    sources 'lib/*.c' 'engine/*.c' 'planning/*.c' 'command/*.c' |
        xargs -0 -P"$jobs" -n8 "$tool" -p build --quiet "$@" 2> >(grep -v ' warnings\? generated\.$' >&2 || true) ||
        failed+=(clang-tidy)
    say_seconds clang-tidy
}

rules() { # <ruff check's arguments>
    local tool start=$SECONDS
    tool=$(find_ruff) || return 0
    "$tool" check --quiet "$@" "$folder" || failed+=("ruff check")
    say_seconds "ruff check"
}

case $verb in
all) form --dry-run -Werror -- --diff; rules; tidy '--checks=-clang-analyzer-*' ;;
format) form --dry-run -Werror -- --diff ;;
lab) folder=lab; form --dry-run -Werror -- --diff; rules ;;
fix) form -i --; rules --select I --fix ;;
analyze) tidy ;;
*) echo "lint.sh: \"$verb\" is unknown; known: format, lab, fix, analyze" >&2; exit 2 ;;
esac
if [ ${#failed[@]} -gt 0 ]; then
    echo "lint: FAILED: $(IFS=,; echo "${failed[*]}"); make format mends the form" >&2
    exit 1
fi
