#!/usr/bin/env bash
# check.sh [--large] [folder to work in]: searches all interleavings of protocol.pml with Spin. The protocol of today must end on every
# machine and with right results; the old one, and each planted mistake, must fail. Exits with 77 where there is no spin.
# With --large, only the two searches that take longer than all others together.
# check.sh --show VARIABLE=VALUE...: prints what happens on the way to the first failure of that case.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v spin >/dev/null || { echo "check.sh: no spin (apt-get install spin): the model was not searched" >&2; exit 77; }
show=()
if [ "${1:-}" = --show ]; then
    show=("${@:2}")
    set --
fi
large=no
if [ "${1:-}" = --large ]; then
    large=yes
    shift
fi
if [ $# -gt 0 ]; then
    work=$1
    mkdir -p "$work"
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
cd "$work"
spin -a "$here/protocol.pml"
cc -O1 -w -DSAFETY -DVECTORSZ=2048 -o pan pan.c

# search <variables>: what was found, in one word
search() {
    local text
    rm -f protocol.pml.trail
    text=$(env "$@" ./pan -n -m200000) || true
    case $text in
    *"pan:1: invalid end state"*) found=hang ;;
    *"pan:1: assertion violated"*) found=wrong ;;
    *"search depth too small"* | *"out of memory"*) found=unfinished ;;
    *"errors: 0"*) found=right ;;
    *) found=unknown ;;
    esac
    n_states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' <<<"$text")
}

if [ ${#show[@]} -gt 0 ]; then
    search "${show[@]}"
    echo "$found"
    [ ! -e protocol.pml.trail ] || env "${show[@]}" ./pan -r protocol.pml.trail
    exit 0
fi

failed=0
expect() { # <what> <variables>
    local wanted=$1 mark=ok
    search "${@:2}"
    [ "$found" = "$wanted" ] || { mark=FAILED failed=1; }
    printf '%-8s %-6s %10s states  %s\n' "$mark" "$found" "$n_states" "${*:2}"
}
if [ $large = yes ]; then
    expect right ALLOCATOR=1 KERNELS=1 QUEUES=2 DEPTH=8
    expect right ALLOCATOR=1 KERNELS=1 QUEUES=3 EXCHANGES=2 BUFFERS=1 DEPTH=8
    exit $failed
fi
expect right ALLOCATOR=1
expect right ALLOCATOR=1 QUEUES=2
expect right ALLOCATOR=1 QUEUES=3 EXCHANGES=2 BUFFERS=1 WAITS=0
expect right ALLOCATOR=1 DAMAGE=1 EXCHANGES=2 BUFFERS=1
expect right ALLOCATOR=1 KERNELS=1 DEPTH=8
expect right ALLOCATOR=1 KERNELS=1 DAMAGE=1 EXCHANGES=2 BUFFERS=1 DEPTH=8
expect right ALLOCATOR=1 REFUSES=1 EXCHANGES=2 BUFFERS=1 DEPTH=8
expect right ALLOCATOR=1 REFUSES=1 KERNELS=1 DAMAGE=1 EXCHANGES=2 BUFFERS=1 DEPTH=8
expect right BLOCKS=2 STEPS=1 REFUSES=1
expect right BLOCKS=2 STEPS=1 ALLOCATOR=1        # where calls wait, step by step
expect right BLOCKS=2 STEPS=1 DAMAGE=1 EXCHANGES=2 BUFFERS=1
expect right BLOCKS=2 PROBE=1                    # as compress() finds it out, each rank by itself
expect right BLOCKS=1 PROBE=1 KERNELS=1 DEPTH=8
expect right PROBE=1 KERNELS=1 DEPTH=8 EXCHANGES=2 BUFFERS=1 # where none waits, and a slow machine may look as if
expect hang BLOCKS=2 PROBE=1 BUG=10              # a probe that nobody lets go
expect hang KERNELS=1 DEPTH=8 BLOCKS=1 EXCHANGES=2 # a launch behind a flag, where launches wait
expect hang BLOCKS=2                            # a copy behind a flag, where copies wait
expect hang KERNELS=1                           # a launch queue that cannot hold one exchange
expect hang ALLOCATOR=1 PYTHON=1 DEPTH=20       # flags, and messages that Python sends
expect hang PYTHON=1                            # likewise, with a launch queue that fills up
expect hang THREAD=1 DEPTH=20                   # flags, and a thread that calls CUDA
expect right OLD=1 PYTHON=1 DEPTH=20            # host functions, where the driver never waits
expect hang OLD=1 PYTHON=1 DEPTH=20 ALLOCATOR=1
expect hang OLD=1 PYTHON=1
expect hang OLD=1 PYTHON=1 DEPTH=20 THREAD=1
expect wrong WAITS=0 QUEUES=3 DEPTH=20 BUG=1    # buffers are used again at once
expect hang OLD=1 QUEUES=3 BUG=2                # the result is waited for before the input is handed over
expect hang BUG=3                               # likewise, in one hardware queue
expect wrong BUG=4                              # the flag is written before the copy
expect hang DAMAGE=1 BUG=5                      # a rank leaves early
expect wrong KERNELS=1 WAITS=0 QUEUES=3 DEPTH=20 BUG=1 # rooms are used again at once
expect wrong KERNELS=1 DEPTH=8 BUG=6            # bodies are added before they are there
expect wrong KERNELS=1 DEPTH=8 BUG=7            # ranks agree before the sums are there
expect hang KERNELS=1 DEPTH=20 BUG=8            # sums are waited for before fragments are handed over
expect hang KERNELS=1 REFUSES=1 DEPTH=8 EXCHANGES=2 BUG=9 # sums of which no stream has anything
exit $failed
