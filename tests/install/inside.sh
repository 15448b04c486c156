#!/usr/bin/env bash
# libtagc inside another project, by add_subdirectory(), which FetchContent calls, too: no tests and no installed file of ours, and no warning that is
# an error. Then how this build was compiled. Exit 77: nothing to test in this build.
set -euo pipefail
build=$1 source=$2 scratch=$3 cmake=$4 cc=$5 sanitize=$6
[ -z "$sanitize" ] || { echo "a sanitized library is not for strangers"; exit 77; }
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

rm -rf "$scratch"
mkdir -p "$scratch"
cat >"$scratch/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.20)
project(other VERSION 7.0 LANGUAGES C)
enable_testing()
set(BUILD_TESTING ON)
add_subdirectory("$source" tagc)
foreach(kind shared static)
  add_executable(program_\${kind} program.c)
  target_link_libraries(program_\${kind} PRIVATE tagc::\${kind})
  install(TARGETS program_\${kind})
endforeach()
END
cat >"$scratch/program.c" <<'END'
#include <stdio.h>
#include <tagc/tagc.h>
int main(void) {
    int unused; /* a warning, and no error */
    printf("%016llx\n", (unsigned long long)tagc_checksum("", 0));
    return 0;
}
END
cd "$scratch"
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
"$cmake" -S . -B out "${generator[@]}" -DCMAKE_C_COMPILER="$cc" -DCMAKE_C_FLAGS="-O0 -Wunused" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
    -DTAGC_MPI=OFF -DTAGC_GPU=OFF -DTAGC_PAPER=OFF >configure.log 2>&1 || { cat configure.log; fail "does not configure"; }
! grep -q 'Werror' out/compile_commands.json || fail "warnings are errors"
"$cmake" --build out -j2 >build.log 2>&1 || { tail -n 20 build.log; fail "does not compile"; }
for kind in shared static; do
    [ "$(out/program_$kind)" = 2d06800538d394c2 ] || fail "program_$kind does not run" # XXH3 of nothing
done
"$cmake" --build out --target help >targets.log
! grep -E '(^|[ /])(test|fuzz|bench)_' targets.log || fail "the above targets are ours"
# Options that turn this round, and those that leave parts out.
"$cmake" -S . -B other "${generator[@]}" -DCMAKE_C_COMPILER="$cc" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DTAGC_WERROR=ON -DTAGC_INSTALL=ON \
    -DTAGC_MPI=OFF -DTAGC_GPU=OFF -DTAGC_PAPER=OFF -DTAGC_NATIVE=OFF >other.log 2>&1 || { cat other.log; fail "does not configure otherwise"; }
grep -q 'Werror' other/compile_commands.json || fail "TAGC_WERROR does nothing"
grep -rq 'libtagc.so' --include=cmake_install.cmake other || fail "TAGC_INSTALL does nothing"
! grep -rq 'libtagc.so' --include=cmake_install.cmake out || fail "it would install the library"
! grep -E '/lib/(paper|gpu|transport/(native|mpi))[/_.]' other/compile_commands.json || fail "the above are left out"
(cd out && ctest -N) | grep -q 'Total Tests: 0' || fail "it has tests of ours"
"$cmake" --install out --prefix "$scratch/prefix" >install.log
[ "$(cd prefix && find . -type f -o -type l | sort | paste -sd ' ')" = "./bin/program_shared ./bin/program_static" ] ||
    fail "installed: $(find prefix -type f)"

# Results would differ between ranks.
said=$("$cc" -ffast-math -fsyntax-only -I"$source/include" -I"$source/lib" "$source/lib/codec/topk.c" 2>&1) && fail "-ffast-math compiles"
grep -q 'must not be compiled with -ffast-math' <<<"$said" || { echo "$said"; fail "-ffast-math is not named"; }

# make build compiles no tests, and what it links is hardened.
if [ -e "$build/build.ninja" ] && command -v ninja >/dev/null; then
    ! ninja -C "$build" -t commands all | grep -oE '(tests|fuzz|bench)/[a-z_]+ ' | sort -u | head -n 3 | grep . || fail "make build builds the above"
fi
if command -v readelf >/dev/null; then
    readelf -d "$build/libtagc.so" | grep -q BIND_NOW && readelf -lW "$build/libtagc.so" | grep -q GNU_RELRO || fail "libtagc.so is bound late"
    symbols=$(readelf -sW "$build/libtagc.so")
    grep -q __stack_chk_fail <<<"$symbols" || fail "libtagc.so has no guards of the stack"
    ! grep -q '^CMAKE_BUILD_TYPE:.*=Release' "$build/CMakeCache.txt" || grep -q '__[a-z]*_chk' <<<"${symbols//__stack_chk_fail/}" ||
        fail "libtagc.so is not fortified"
fi
echo passed
