#!/usr/bin/env bash
# Builds what a release uploads, into dist/: the source distribution, and wheels made of it for glibc and musl on x86-64 and aarch64.
# zig is the compiler of all, so that any Linux machine makes them; each wheel is checked before it gets there:
#   - auditwheel finds nothing in it that its name does not promise
#   - libtagc.so and libtagc-plan.so need libc and libm only
#   - libuv is compiled in, for the native transport
#   - tests/wheels/exchange.c runs with it, at every level that this processor has (qemu-user is the processor where this is none
#     of that kind), and all wheels give the same bits
#   - pip installs the wheel for this machine, and Python loads it
# Where nvcc works there is a fifth wheel, with libtagc-cuda.so, whose binaries PyPI's ptxas of CUDA 12.8 makes (lib/gpu/cuda/tools.sh): nvcc's host
# compiler links this machine's C library, so that its name asks for a newer one. pip takes it where it can and the other where it cannot.
#   wheels.sh [TARGET...]     as in x86_64-linux-gnu.2.17; without one, all
# Needs python3, cmake, and to run what it built: qemu-user, libc6-arm64-cross, apt-get (for musl's loader).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD work=$PWD/build-wheels dist=$PWD/dist
uvloop=uvloop==0.22.1 # for its libuv
all=(x86_64-linux-gnu.2.17 aarch64-linux-gnu.2.17 x86_64-linux-musl aarch64-linux-musl)
version=$(sed -n 's/^project(tagc VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 1700000000)}

fail() {
    echo "wheels.sh: $*" >&2
    exit 1
}
quietly() { # <log> <command>...
    local log=$work/$1.log
    shift
    "$@" >"$log" 2>&1 || { tail -n 30 "$log"; fail "failed (all of it: $log): $*"; }
}

# ---- tools ----

make_tools() {
    local python=$work/tools/bin/python made=$work/tools/made
    if ! cmp -s scripts/wheels.txt "$made"; then
        rm -rf "$work/tools"
        quietly tools python3 -m venv "$work/tools"
        quietly tools "$python" -m pip install --disable-pip-version-check -r scripts/wheels.txt
        cp scripts/wheels.txt "$made"
    fi
    PATH=$work/tools/bin:$PATH
    export TAGC_ZIG TAGC_ZIG_TOOLS=$work/zig
    TAGC_ZIG=$("$python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
    mkdir -p "$TAGC_ZIG_TOOLS"
    for tool in ar ranlib; do
        printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$TAGC_ZIG" $tool >"$TAGC_ZIG_TOOLS/$tool"
        chmod +x "$TAGC_ZIG_TOOLS/$tool"
    done
}

# libuv's sources, which each wheel's libtagc.so has compiled in: uvloop's source distribution on PyPI brings them.
fetch_libuv() {
    local made=$work/libuv/made
    [ "$(cat "$made" 2>/dev/null)" != "$uvloop" ] || return 0
    rm -rf "$work/libuv" "$work/uvloop"
    quietly libuv python -m pip download --disable-pip-version-check --no-deps --no-binary uvloop --dest "$work/uvloop" "$uvloop"
    mkdir "$work/libuv"
    tar xf "$work"/uvloop/uvloop-*.tar.gz -C "$work/libuv" --strip-components=3 --wildcards 'uvloop-*/vendor/libuv/*'
    [ -e "$work/libuv/include/uv.h" ] && [ -e "$work/libuv/LICENSE" ] || fail "no libuv in $uvloop"
    echo "$uvloop" >"$made"
}

# musl's loader for a processor, from Debian's package; apt gets lists of its own, the system's stay as they are.
fetch_musl() { # <amd64|arm64>
    local apt=$work/apt-$1
    [ ! -e "$work/musl-$1/lib" ] || return 0
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    local options=(-q -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o Dir::State::status=/dev/null
                   -o "APT::Architecture=$1" -o "APT::Architectures=$1" -o Acquire::Languages=none -o APT::Sandbox::User=root)
    (cd "$apt" && apt-get "${options[@]}" update && apt-get "${options[@]}" download musl) >"$work/musl-$1.log" 2>&1 || return 1
    dpkg -x "$apt"/musl_*.deb "$work/musl-$1"
    rm -rf "$apt"
}

# ---- one wheel ----

tag_of() { # <target>: what the wheel's name promises
    local processor=${1%%-*}
    case $1 in
    x86_64-linux-gnu.* | aarch64-linux-gnu.*) echo "manylinux_$(tr . _ <<<"${1#*gnu.}")_$processor" ;;
    x86_64-linux-musl | aarch64-linux-musl) echo "musllinux_1_2_$processor" ;;
    *) fail "target $1 is none of ${all[*]}" ;;
    esac
}

build() { # <target> <tag> <TAGC_GPU: HOST or ON>
    local here=$work/$2
    rm -rf "$here"
    mkdir -p "$here/packed"
    local settings=(-C "cmake.define.CMAKE_TOOLCHAIN_FILE=$root/cmake/zig.cmake" -C "cmake.define.TAGC_GPU=$3"
                    -C cmake.define.TAGC_NATIVE=ON -C "cmake.define.TAGC_LIBUV_SOURCE=$work/libuv"
                    -C "cmake.define.CMAKE_C_FLAGS_RELEASE=-O3" -C "cmake.define.CMAKE_SHARED_LINKER_FLAGS=-Wl,-s"
                    -C install.strip=false -C "build-dir=$here/build" -C "wheel.tags=py3-none-$2")
    [ "$3" = HOST ] || settings+=(-C "cmake.define.TAGC_PTXAS=$(python -c 'import os, nvidia.cuda_nvcc as it
print(os.path.join(os.path.dirname(it.__file__), "bin", "ptxas"))')")
    TAGC_ZIG_TARGET=$1 quietly "$2" python -m build --wheel --no-isolation --outdir "$here" "${settings[@]}" "$work/tagc_train-$version"
    python -m wheel unpack --dest "$here" "$here"/*.whl >/dev/null
    content=$here/tagc_train-$version library=$content/tagc/lib/libtagc.so
    # musl's loader takes any libc.so for itself; auditwheel knows it by Alpine's name.
    [[ $1 != *-musl ]] || patchelf --replace-needed libc.so "libc.musl-${1%%-*}.so.1" "$library" "${library%.so}-plan.so"
    python -m wheel pack --dest-dir "$here/packed" "$content" >/dev/null
    wheel=$here/packed/tagc_train-$version-py3-none-$2.whl
    [ -e "$wheel" ] || fail "not $wheel: $(ls "$here/packed")"
}

check_contents() { # <target> <tag> <TAGC_GPU>
    local said needed
    mkdir -p "$work/no-libraries"
    said=$(auditwheel show --json --ldpaths "$work/no-libraries" "$wheel" 2>"$work/auditwheel.log") ||
        { cat "$work/auditwheel.log"; fail "auditwheel failed"; }
    python -c 'import json, sys; said = json.loads(sys.argv[1]); sys.exit(said["overall_tag"] != sys.argv[2] or said["unsupported_isa"])' \
        "$said" "$2" || fail "auditwheel finds that $wheel is not $2: $said"
    needed=$(readelf -d "$library" "${library%.so}-plan.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vE '^(libc|libc\.musl-.*|libm|libpthread|libdl)\.so|^ld-linux' || true)
    [ -z "$needed" ] || fail "$library needs $needed"
    cmp -s <(cd "$content" && find tagc -name '*.py' | sort) <(cd python && find tagc -name '*.py' | sort) ||
        fail "$wheel does not have all of python/tagc"
    [ -e "$content"/*.dist-info/licenses/LICENSE.libuv ] || fail "$wheel has no licence of libuv"
    [ -e "$content/tagc/py.typed" ] || fail "$wheel has no py.typed"
    [ "$3" = HOST ] || [ -e "$content/tagc/lib/libtagc-cuda.so" ] || fail "$wheel has no libtagc-cuda.so"
    [ "$3" = HOST ] || scripts/cuda_runtime.py "$content/tagc/lib/libtagc-cuda.so" || fail "$wheel needs a new driver"
}

runner_of() { # <target>: sets `runner` to what runs a program of it here, or fails with a word
    runner=()
    case $1 in
    x86_64-*) [ "$(uname -m)" = x86_64 ] || { echo "this machine is $(uname -m)"; return 1; } ;;
    aarch64-*)
        if [ "$(uname -m)" != aarch64 ]; then
            command -v qemu-aarch64 >/dev/null || { echo "no qemu-user"; return 1; }
            runner=(qemu-aarch64)
            [[ $1 == *-musl ]] || runner+=(-L /usr/aarch64-linux-gnu)
        fi
        ;;
    esac
    case $1 in
    *-musl)
        local debian=amd64
        [[ $1 != aarch64-* ]] || debian=arm64
        fetch_musl $debian || { echo "no musl from Debian"; return 1; }
        runner+=("$work/musl-$debian/lib/ld-musl-${1%%-*}.so.1" --library-path "$content/tagc/lib")
        ;;
    aarch64-*) [ "$(uname -m)" = aarch64 ] || [ -e /usr/aarch64-linux-gnu/lib ] || { echo "no libc6-arm64-cross"; return 1; } ;;
    esac
}

run() { # <target>: at every level of the processor; sets `ran`
    local program=$work/exchange-$1 level levels=(scalar neon) found why
    if ! why=$(runner_of "$1"); then
        ran="not run: $why"
        return
    fi
    runner_of "$1"
    "$TAGC_ZIG" cc -target "$1" -O2 -Iinclude tests/wheels/exchange.c -o "$program" -L"$content/tagc/lib" -ltagc -lm -lpthread ||
        fail "tests/wheels/exchange.c does not compile for $1"
    [[ $1 == aarch64-* ]] || levels=(scalar avx2 avx512)
    ran=
    for level in "${levels[@]}"; do
        if found=$(LD_LIBRARY_PATH=$content/tagc/lib TAGC_CPU=$level "${runner[@]}" "$program" "$version" 2>"$work/run.log"); then
            [ "${checksum:=$found}" = "$found" ] || fail "$1 at level $level gives $found, others $checksum"
            ran+="${ran:+, }$level"
        elif [[ $level == avx* ]] && ! grep -qw "${level/%avx512/avx512vl}" /proc/cpuinfo && grep -q TAGC_CPU "$work/run.log"; then
            ran+=", $level not here"
        else
            cat "$work/run.log"
            fail "$1 at level $level"
        fi
    done
}

install_it() { # as a user does, in an environment of its own, with each Python that this machine has; sets `pythons`
    local python name
    pythons=
    for python in $(compgen -c python3. | grep -E '^python3\.[0-9]+$' | sort -uV); do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
        name=$(basename "$python")
        rm -rf "$work/env"
        "$python" -m venv "$work/env" >/dev/null 2>&1 || continue
        quietly "install-$name" "$work/env/bin/python" -m pip install --disable-pip-version-check --no-index --no-deps \
            --find-links "$dist" "tagc-train==$version"
        (cd / && "$work/env/bin/python" -W error -c "import compileall, contextlib, io, sys, tagc
assert tagc.__version__ == '$version', tagc.__version__
from tagc.commands.main import main
assert main(['plan', '--link', '1gbit', '--codec-ns', '1']) == 0
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(['info']) == 0
assert 'messages between ranks: native' in said.getvalue(), said.getvalue()
sys.exit(not compileall.compile_dir(tagc.__path__[0], quiet=1, force=True))") >/dev/null || fail "$name"
        pythons+="${pythons:+, }${name#python}"
    done
    [ -n "$pythons" ] || fail "no Python from 3.10 on with venv to try them with"
}

# ---- all of them ----

targets=("$@")
[ $# -gt 0 ] || targets=("${all[@]}")
for target in "${targets[@]}"; do tag_of "$target" >/dev/null; done
mkdir -p "$work" "$dist"
make_tools
quietly sdist python -m build --sdist --no-isolation --outdir "$work" .
rm -rf "$work/tagc_train-$version" # else it keeps what an earlier commit had
tar xf "$work/tagc_train-$version.tar.gz" -C "$work"
cp "$work/tagc_train-$version.tar.gz" "$dist/"
fetch_libuv
cat "$work/libuv/LICENSE" "$work/libuv/LICENSE-extra" >"$work/tagc_train-$version/LICENSE.libuv"
sed -i 's/^license-files = .*/license-files = ["LICENSE", "LICENSE.libuv"]/' "$work/tagc_train-$version/pyproject.toml"

checksum= table=
make_wheel() { # <target> <TAGC_GPU>
    local tag
    tag=$(tag_of "$1")
    echo "building $tag"
    build "$1" "$tag" "$2"
    check_contents "$1" "$tag" "$2"
    run "$1"
    cp "$wheel" "$dist/"
    table+="$(printf '%-56s %5s kB  %s' "$(basename "$wheel")" "$(($(stat -c %s "$wheel") / 1000))" "$ran")"$'\n'
}
for target in "${targets[@]}"; do make_wheel "$target" HOST; done
if [ $# -eq 0 ] && [ "$(uname -m)" = x86_64 ] && command -v nvcc >/dev/null; then
    make_wheel x86_64-linux-gnu.2.34 ON
fi
install_it
twine check --strict "$dist"/* >"$work/twine.log" || { cat "$work/twine.log"; fail "twine"; }

echo
echo "in dist/, with the levels of the processor at which two ranks have exchanged with them; results are the same bits:"
echo "$(basename "$dist"/*.tar.gz)"
printf '%s' "$table"
echo "installed and loaded by Python $pythons"
grep -q '^\[project.urls\]' pyproject.toml || echo "not yet for PyPI: pyproject.toml has no [project.urls] (CONTRIBUTING.md, A release)"
