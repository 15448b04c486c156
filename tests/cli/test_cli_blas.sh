#!/usr/bin/env bash
# The kernel of OpenBLAS: the program begins again, once, where OpenBLAS does not know the processor, and leaves the user's choice alone.
source "$(dirname "$0")/lib.sh" "$@"

flags=$(grep -m 1 '^flags' /proc/cpuinfo)
case "$flags" in
*avx512vl*) better=SkylakeX ;;
*avx2*) better=Haswell ;;
*) skip "this processor has no AVX2" ;;
esac
bench=(bench --model tiny --only floor --ranks 2)

# The user's own choice stays, with one line that says what it costs.
OPENBLAS_CORETYPE=Prescott run 0 "${bench[@]}"
grep -q "^products: OpenBLAS .*, kernel Prescott, 1 thread$" out || fail "not the kernel that was asked for: $(cat out)"
says "note: OPENBLAS_CORETYPE makes OpenBLAS use its Prescott kernel, and this processor could use $better"
make_data
OPENBLAS_CORETYPE=Prescott run 0 train --data data --model tiny --steps 1 --ranks 1 --out run
grep -q '"blas":{"name":"OpenBLAS [^"]*","kernel":"Prescott","n_threads":1}' run/metrics.jsonl || fail "the run does not say its kernel"
OPENBLAS_CORETYPE=$better run 0 "${bench[@]}"
grep -q "kernel $better," out || fail "not the kernel that was asked for: $(cat out)"
[ ! -s err ] || fail "a note about the right kernel: $(cat err)"

[ "$sanitized" = no ] || exit 0 # a sanitizer wants to be loaded first
command -v cc >/dev/null || skip "no C compiler for a library that does not know this processor"

# In place of an OpenBLAS that does not know this processor: it says Prescott until it is told, or always. Each start of the program
# adds a line.
cat >fake.c <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
char *openblas_get_corename(void) {
    char *told = getenv("OPENBLAS_CORETYPE");
    static char prescott[] = "Prescott";
    return told && !getenv("FAKE_IS_OLD") ? told : prescott;
}
__attribute__((constructor)) static void start(void) {
    char name[4096] = "";
    FILE *file = fopen("/proc/self/comm", "r");
    if (!file || !fgets(name, sizeof name, file) || fclose(file) || strcmp(name, "tagc\n")) return;
    file = fopen(getenv("FAKE_STARTS"), "a");
    fprintf(file, "%s\n", openblas_get_corename());
    fclose(file);
}
END
cc -shared -fPIC -o fake.so fake.c || fail "cc"
export FAKE_STARTS=$PWD/starts
# starts <kernel>...: of the starts since the last look, sorted, since processes of mpirun overtake each other.
starts() {
    diff <(printf '%s\n' "$@") <(LC_ALL=C sort "$FAKE_STARTS") >differ || fail "starts: $(cat differ)"
    rm "$FAKE_STARTS"
}

for threads in OPENBLAS_NUM_THREADS=1 -uOPENBLAS_NUM_THREADS; do # without it, the program begins again for that, too, at the same time
    env "$threads" LD_PRELOAD="$PWD/fake.so" "$tagc" "${bench[@]}" --json bench.json >out 2>err || fail "$threads"
    grep -q "^products: OpenBLAS .*, kernel $better, " out || fail "kernel: $(cat out)"
    grep -qE "\"kernel\": \"$better\"" bench.json || fail "the result does not say its kernel"
    [ ! -s err ] || fail "$(cat err)"
    starts Prescott "$better"
done

# An OpenBLAS that has nothing better: begun again once, and said so.
FAKE_IS_OLD=1 LD_PRELOAD=$PWD/fake.so run 0 "${bench[@]}"
starts Prescott Prescott
says "note: this OpenBLAS uses its Prescott kernel and has none for this processor ($better)"

# Never against the user's choice.
OPENBLAS_CORETYPE=Nehalem LD_PRELOAD=$PWD/fake.so run 0 "${bench[@]}"
starts Nehalem
says "kernel, and this processor could use $better"

# Under mpirun each process begins again, before MPI has started; and rank 0 speaks for all.
has_mpirun || exit 0
LD_PRELOAD= mpirun --oversubscribe -n 2 -x LD_PRELOAD="$PWD/fake.so" "$tagc" bench --model tiny --only floor >out 2>err || fail "mpirun"
grep -q "kernel $better," out || fail "under mpirun: $(cat out)"
starts Prescott Prescott "$better" "$better"
mpirun --oversubscribe -n 2 -x OPENBLAS_CORETYPE=Prescott "$tagc" bench --model tiny --only floor >out 2>err || fail "mpirun"
says "note: OPENBLAS_CORETYPE makes OpenBLAS use its Prescott kernel"
