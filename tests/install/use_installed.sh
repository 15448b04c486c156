#!/usr/bin/env bash
# Installs into a scratch prefix, then builds and runs the examples as a stranger would: by pkg-config, by CMake, and
# against the static library. Exit 77: nothing to test in this build.
set -euo pipefail
build=$1 source=$2 scratch=$3 cmake=$4 cc=$5 sanitize=$6

[ -z "$sanitize" ] || { echo "a sanitized library is not for strangers"; exit 77; }
[ -e "$build/libtagc-mpi.a" ] || { echo "built without MPI"; exit 77; }
command -v pkg-config mpirun >/dev/null || { echo "no pkg-config or mpirun"; exit 77; }

rm -rf "$scratch"
mkdir -p "$scratch/by-pkg-config"
export TAGC_INSTALLED=$scratch/installed.txt
"$source/scripts/install.sh" "$build" "$scratch/prefix" >"$scratch/install.log"
grep -q "^install: $scratch/prefix.* is not where programs look for libraries: link with -Wl,-rpath,$scratch/prefix" "$scratch/install.log"

if [ -e "$build/tagc" ]; then # as the command prints them now
    share=$scratch/prefix/share
    diff <("$build/tagc" help --man) "$share/man/man1/tagc.1"
    diff <("$build/tagc" help --bash) "$share/bash-completion/completions/tagc"
    diff <("$build/tagc" help --zsh) "$share/zsh/site-functions/_tagc"
fi

check() {
    local out
    out=$(timeout 100 mpirun -n 2 "$1")
    echo "$out"
    # Within 0.002 of the line in the README.
    grep -h '2 ranks, 4.* bits per element' "$source/examples/README.md" - <<<"$out" |
        awk 'NR == 1 { said = $5 } { d = $5 - said; if ($5 <= 0 || d * d > 4e-6) exit 1 } END { if (NR != 6) exit 1 }'
}

check_units() { # a loss near the noise, equal parameters, and 4 bits and scales in both directions, times (W-1)/W
    local out
    out=$(timeout 100 mpirun -n 2 "$1")
    echo "$out"
    grep -q '^step 40: 0\.0[0-4]' <<<"$out"
    grep -q '2 ranks have equal parameters; .*: gradients 2\.[23].*, parameters 2\.[0-3]' <<<"$out"
}

PKG_CONFIG_PATH=$(dirname "$(find "$scratch/prefix" -name tagc-mpi.pc)")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir tagc)
read -ra flags <<<"$(pkg-config --cflags --libs tagc-mpi)"
"$cc" -Wall -Wextra -Werror -O2 "$source/examples/reduce_scatter.c" -o "$scratch/by-pkg-config/reduce_scatter" \
    "${flags[@]}" -Wl,-rpath,"$libdir"
check "$scratch/by-pkg-config/reduce_scatter"
"$cc" -Wall -Wextra -Werror -O2 "$source/examples/units.c" -o "$scratch/by-pkg-config/units" "${flags[@]}" \
    -Wl,-rpath,"$libdir"
check_units "$scratch/by-pkg-config/units"

"$cc" -Wall -Wextra -Werror -O2 "$source/examples/train.c" -o "$scratch/by-pkg-config/train" "${flags[@]}" -lm -Wl,-rpath,"$libdir"
train() { timeout 100 mpirun -n 2 "$scratch/by-pkg-config/train" "$@"; }
whole=$(train 400)
echo "$whole"
grep -q '^step 400: loss 0\.0[0-9]*, 0\.[0-9]* bits' <<<"$whole" # it has learnt, and selects
rm -f "$scratch"/state.*
train 150 "$scratch/state"
[ "$(train 400 "$scratch/state" | tail -n 1)" = "$(tail -n 1 <<<"$whole")" ] # goes on bit for bit
rm "$scratch/state.1" # of one rank: an error that says so, before the time-out
out=$(train 500 "$scratch/state" 2>&1) && exit 1
grep -q 'state.1 cannot be opened: so on 1 ranks of 2' <<<"$out"

read -ra alone <<<"$(pkg-config --cflags --libs tagc)"
"$cc" -Wall -Wextra -Werror -O2 "$source/examples/native.c" -o "$scratch/by-pkg-config/native" "${alone[@]}" -Wl,-rpath,"$libdir"
out=$(timeout 100 "$scratch/by-pkg-config/native" 2>&1) || grep -q 'TAGC_NATIVE' <<<"$out" # without libuv it says how to get it
echo "$out"
grep -q 'TAGC_NATIVE' <<<"$out" || [ "$(grep -c 'first value of its shard is 2\.00' <<<"$out")" -eq 2 ]

# The plain kernels run under valgrind, without an error of memory.
if command -v valgrind >/dev/null && ! grep -q 'TAGC_NATIVE' <<<"$out"; then
    TAGC_CPU=scalar timeout 300 valgrind -q --error-exitcode=9 "$scratch/by-pkg-config/native" >"$scratch/valgrind.log" 2>&1 || { cat "$scratch/valgrind.log"; exit 1; }
fi

read -ra all_static <<<"$(pkg-config --static --cflags --libs tagc)"
if "$cc" -static -O2 "$source/examples/native.c" -o "$scratch/by-pkg-config/native-static" "${all_static[@]}" 2>"$scratch/static.log"; then
    if ldd "$scratch/by-pkg-config/native-static" 2>/dev/null | grep '=>'; then exit 1; fi
elif ! grep -qE 'cannot find -l(c|m|uv)( |:|$)' "$scratch/static.log"; then # a system without archives of its libraries
    cat "$scratch/static.log"
    exit 1
fi

read -ra includes <<<"$(pkg-config --cflags tagc-mpi)"
for header in "$scratch"/prefix/include/tagc/*.h; do # each alone, in C and in C++
    echo "#include <tagc/$(basename "$header")>" >"$scratch/header.c"
    "$cc" -Wall -Wextra -Werror -fsyntax-only "${includes[@]}" "$scratch/header.c"
    "$cc" -x c++ -fsyntax-only "${includes[@]}" "$scratch/header.c"
done

# Symbols that leave the shared library are the public ones, and no others.
if nm -D --defined-only "$libdir/libtagc.so" | awk '$2 ~ /[TDB]/ { print $3 }' | grep -v '^tagc_'; then
    echo "the lines above are exported and should not be"
    exit 1
fi

"$cmake" -S "$source/examples/cmake" -B "$scratch/by-cmake" -DCMAKE_PREFIX_PATH="$scratch/prefix" \
    -DCMAKE_C_COMPILER="$cc" >"$scratch/configure.log"
"$cmake" --build "$scratch/by-cmake" >"$scratch/build.log"
check "$scratch/by-cmake/reduce_scatter"

read -ra flags <<<"$(pkg-config --cflags --libs --static tagc-mpi | sed "s,-ltagc ,$libdir/libtagc.a ,g")"
"$cc" -O2 "$source/examples/reduce_scatter.c" -o "$scratch/by-pkg-config/static" "${flags[@]}"
if ldd "$scratch/by-pkg-config/static" | grep libtagc; then exit 1; fi
check "$scratch/by-pkg-config/static"

"$source/scripts/install.sh" --uninstall "$build"
find "$scratch/prefix" -type f | { ! grep .; }
[ ! -e "$scratch/prefix/include/tagc" ]
