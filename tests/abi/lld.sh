#!/usr/bin/env bash
# lld.sh NM STATIC_LIBRARY SOURCE SCRATCH [LIBUV]: LLVM's linker reads the version script as GNU's does. Links the objects of libtagc.a
# with lld, by clang where there is one and by gcc otherwise, and holds what comes out to exports.sh. Where lld warns of or
# refuses what GNU ld lets pass, such as a name in the script that nothing defines, this fails.
set -euo pipefail
nm=$1 archive=$2 source=$3 scratch=$4 libuv=${5:-}
newest() { # <name>: it, or the newest of name-14, name-15 ...
    command -v "$1" || compgen -c "$1-" | grep -xE "$1-[0-9]+" | sort -t- -k2 -n | tail -n 1
}
lld=$(newest ld.lld) && [ -n "$lld" ] || { echo "skipped: no lld"; exit 77; }
compiler=$(newest clang) && [ -n "$compiler" ] || compiler=gcc
rm -rf "$scratch" && mkdir -p "$scratch/bin"
ln -s "$(command -v "$lld")" "$scratch/bin/ld.lld"
said=$("$compiler" -B"$scratch/bin" -fuse-ld=lld -shared -o "$scratch/libtagc.so" -Wl,--no-undefined \
    -Wl,--no-undefined-version -Wl,--version-script="$source/cmake/libtagc.map" \
    -Wl,--whole-archive "$archive" -Wl,--no-whole-archive $libuv -lpthread -lm -ldl 2>&1) || { echo "$compiler and $lld: $said"; exit 1; }
[ -z "$said" ] || { echo "$compiler and $lld: $said"; exit 1; }
readelf -p .comment "$scratch/libtagc.so" | grep -q LLD || { echo "not linked by lld"; exit 1; }
bash "$source/tests/abi/exports.sh" "$nm" "$scratch/libtagc.so" "$source"
