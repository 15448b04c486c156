# What the tests of the command share: a scratch folder, a small corpus, checks that say what they saw.
# Use: source lib.sh "$@" with the path of tagc and of the scratch folder.
set -uo pipefail

tagc=$(realpath "$1")
scratch=$2
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
rm -rf "$scratch"
mkdir -p "$scratch"
cd "$scratch" || exit 1

fail() {
    echo "FAILED: $*" >&2
    [ -s err ] && { echo "--- stderr:" >&2; tail -n 20 err >&2; }
    exit 1
}
skip() {
    echo "skipped: $*"
    exit 77
}

# Sanitized programs are slower, and cannot be killed by a file size limit as cleanly.
sanitized=no
grep -qa '__[at]san_init' "$tagc" && sanitized=yes

# run <expected exit code> <arguments of tagc>...: output in out and err.
run() {
    local expected=$1 code=0
    shift
    timeout 300 "$tagc" "$@" >out 2>err || code=$?
    [ "$code" = "$expected" ] || fail "exit code $code instead of $expected: tagc $*"
}
# says <text>...: all of them are in stderr of the last run, which is one line.
says() {
    local text
    for text in "$@"; do grep -qF -e "$text" err || fail "stderr lacks \"$text\""; done
    [ "$(grep -c '^tagc: ' err)" = 1 ] || fail "not one message but $(grep -c '^tagc: ' err)"
}

# Test machines are small, and often run as root inside a container.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none

# One thread for products: tests run side by side, and thread sanitizers do not see how OpenBLAS synchronises its own.
export OPENBLAS_NUM_THREADS=1
unset OPENBLAS_CORETYPE TAGC_BLAS_KERNEL # whoever runs the tests may need them; the tests find the kernel by themselves

has_mpirun() {
    command -v mpirun >/dev/null && "$tagc" version | grep -q '^parts:.* mpi$'
}
# mpi <n> <arguments of tagc>...
mpi() {
    local n=$1
    shift
    timeout 300 mpirun --oversubscribe -n "$n" "$tagc" "$@"
}

# A text with some structure, the same every time.
make_data() {
    [ -e data/train.bin ] && return
    mkdir -p text
    awk 'BEGIN { srand(7); split("the of owner shard sends each rank its values index gather reduce step and when", w, " ");
        for (i = 0; i < 6000; i++) printf "%s%s", w[int(rand() * 14) + 1], (i % 9 == 8) ? ".\n" : " " }' >text/a.txt
    "$tagc" data --quiet --out data text || fail "tagc data"
}

# column <run> <field>: the field of every step line, one per line.
column() {
    grep '"type":"step"' "$1/metrics.jsonl" | grep -o "\"$2\":[^,}]*" | cut -d: -f2
}
val_column() {
    grep '"type":"eval"' "$1/metrics.jsonl" | grep -o '"val_loss":[^,}]*' | cut -d: -f2
}
# same_losses <run> <run>: digit for digit.
same_losses() {
    [ -n "$(column "$1" loss)" ] || fail "$1 has no losses"
    diff <(column "$1" loss; val_column "$1") <(column "$2" loss; val_column "$2") >differ ||
        fail "losses of $1 and $2 differ: $(head -n 4 differ | tr '\n' ' ')"
}
# near_losses <run> <run> <relative difference>
near_losses() {
    paste <(column "$1" loss) <(column "$2" loss) | awk -v most="$3" '
        { d = $1 / $2 - 1; if (d < 0) d = -d; if (d > worst) worst = d; if (NF != 2) bad = 1 }
        END { if (bad || NR == 0 || worst > most) { print "worst relative difference " worst; exit 1 } }' >differ ||
        fail "losses of $1 and $2: $(cat differ)"
}

# A tiny run: quick, but with every part of a real one.
tiny=(--data data --model tiny --warmup 2 --lr 3e-3 --min-lr 3e-4 --eval-every 3 --eval-batches 2 --quiet)
