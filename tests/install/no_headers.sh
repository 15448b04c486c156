#!/usr/bin/env bash
# pip's build where /usr/include holds what came with the compiler and the C library, and nothing else: in a namespace of its own, whose other
# headers are hidden. A machine of a developer has them all, so that no other test sees one that a newcomer lacks. CMake is called as scikit-build
# does it (pyproject.toml): no network is needed. Exit 77: this machine does not let us, or is not Debian.
#   no_headers.sh <sources> <scratch> <cmake> <C compiler>
set -euo pipefail
source=$1 scratch=$2 cmake=$3 cc=$4
skip() {
    echo "skipped: $*"
    exit 77
}
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
if [ "${TAGC_HIDDEN:-}" != 1 ]; then
    command -v unshare dpkg-query python3 >/dev/null || skip "no unshare, dpkg or python3"
    rm -rf "$scratch"
    mkdir -p "$scratch"/{include,empty}
    enter=(unshare -m)
    "${enter[@]}" true 2>/dev/null || enter=(unshare -r -m)
    "${enter[@]}" mount --bind "$scratch/empty" /usr/local/include 2>/dev/null || skip "unshare and mount are not permitted"
    packages=$(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' libc6-dev linux-libc-dev libcrypt-dev 'libgcc-*-dev' 'gcc-[0-9]*' | sed -n 's/^ii *//p')
    # shellcheck disable=SC2086 # they are several
    dpkg-query -L $packages | sed -n 's,^/usr/include/,,p' | (cd /usr/include && while IFS= read -r name; do [ ! -f "$name" ] || echo "$name"; done) |
        tar -C /usr/include -cf - -T - | tar -C "$scratch/include" -xf -
    [ -e "$scratch/include/stdio.h" ] || skip "no libc6-dev"
    mkdir "$scratch/uv" # to be found beside the others, below
    if [ -e /usr/include/uv.h ]; then cp -r /usr/include/uv.h /usr/include/uv "$scratch/uv"; fi
    unset CPATH C_INCLUDE_PATH LIBRARY_PATH CMAKE_PREFIX_PATH
    TAGC_HIDDEN=1 exec "${enter[@]}" bash "$0" "$@"
fi

mount --bind "$scratch/include" /usr/include
mount --bind "$scratch/empty" /usr/local/include
for header in xxhash.h uv.h cmocka.h jansson.h openssl/ssl.h; do [ ! -e "/usr/include/$header" ] || fail "/usr/include/$header is not hidden"; done
cd "$scratch"
setting() { sed -n "s/^$1 = //p" "$source/pyproject.toml"; }
defines=()
while read -r name value; do
    case $value in true) value=ON ;; false) value=OFF ;; esac
    defines+=("-D$name=${value//\"/}")
done < <(sed -n '/^\[tool.scikit-build.cmake.define\]/,/^$/s/^\([A-Z_]*\) = /\1 /p' "$source/pyproject.toml")
[ ${#defines[@]} -ge 3 ] || fail "pyproject.toml has no settings for CMake"
targets=$(setting build.targets | tr -d '[]",')
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
# This tests what is needed, and not the compiler, which takes longest with all that it can do.
"$cmake" -S "$source" -B out "${generator[@]}" -DSKBUILD=2 -DSKBUILD_STATE=wheel "${defines[@]}" -DCMAKE_C_COMPILER="$cc" -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_C_FLAGS=-O1 -DTAGC_GPU=HOST -DCMAKE_INSTALL_PREFIX="$scratch/wheel/tagc" >configure.log 2>&1 || { cat configure.log; fail "does not configure"; }
[ "$(grep -c '^tagc: without libuv.*install libuv1-dev' configure.log)" = 1 ] || { cat configure.log; fail "it does not say what it lacks"; }
# shellcheck disable=SC2086 # they are several
"$cmake" --build out -j2 --target $targets >build.log 2>&1 || { tail -n 30 build.log; fail "does not compile"; }
"$cmake" --install out --component python >install.log
libraries=$(cd wheel/tagc && find . -type f | sort | paste -sd ' ')
[ "$libraries" = "./lib/libtagc-plan.so ./lib/libtagc.so" ] || fail "installed: $libraries"
python3 - <<'END'
import ctypes

library = ctypes.CDLL("wheel/tagc/lib/libtagc.so")
library.tagc_checksum.restype, library.tagc_last_error.restype = ctypes.c_uint64, ctypes.c_char_p
assert library.tagc_checksum(None, ctypes.c_uint64(0)) == 0x2D06800538D394C2
assert library.tagc_native_open(None, 0, 1, None) != 0 and b"libuv1-dev" in library.tagc_last_error(), library.tagc_last_error()
ctypes.CDLL("wheel/tagc/lib/libtagc-plan.so")
END

# With libuv and without OpenSSL: a line says so, and asking for TLS names what is missing.
if [ -e uv/uv.h ]; then
    "$cmake" -S "$source" -B uv-alone "${generator[@]}" -DSKBUILD=2 -DSKBUILD_STATE=wheel "${defines[@]}" -DCMAKE_C_COMPILER="$cc" -DCMAKE_BUILD_TYPE=None \
        -DCMAKE_C_FLAGS=-O1 -DTAGC_GPU=HOST -DLIBUV_INCLUDE_DIR="$scratch/uv" >configure-uv.log 2>&1 || { cat configure-uv.log; fail "does not configure with libuv"; }
    [ "$(grep -c '^tagc: ' configure-uv.log)" = 1 ] && grep -q "^tagc: without OpenSSL's headers.*TAGC_NATIVE_TLS.*install libssl-dev" configure-uv.log ||
        { cat configure-uv.log; fail "it does not say that it lacks OpenSSL"; }
    "$cmake" --build uv-alone -j2 --target module_transport module_core >build-uv.log 2>&1 || { tail -n 30 build-uv.log; fail "does not compile with libuv"; }
    cat >tls.c <<'END'
#include "tagc/native.h"
#include <stdio.h>
int main(void) {
    tagc_native_options options;
    tagc_native *native;
    tagc_native_options_init(&options);
    options.tls = 1;
    tagc_status status = tagc_native_open(&options, 0, 2, &native);
    printf("%d %s\n", (int)status, tagc_last_error());
    return 0;
}
END
    "$cc" -I"$source/include" tls.c uv-alone/libmodule_transport.a uv-alone/libmodule_core.a -luv -lpthread -lm -ldl -o tls
    said=$(./tls)
    [[ $said == "7 this libtagc was built without TLS: install libssl-dev"* ]] || fail "without OpenSSL it says: $said"
fi
echo passed
