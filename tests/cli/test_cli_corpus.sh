#!/usr/bin/env bash
# The text of the demo where perl-doc cannot be had: other text of this machine, the same each time, and said so.
source "$(dirname "$0")/lib.sh" "$@"
corpus=$here/../../scripts/corpus.sh

mkdir bin
printf '#!/bin/sh\nexit 1\n' >bin/dpkg
chmod +x bin/dpkg
export PATH=$PWD/bin:$PATH

! bash "$corpus" none >out 2>err || fail "text without perl-doc: $(cat out)"
grep -q 'apt-get install -y perl-doc' err || fail "no line that installs it"
bash "$corpus" --any some >out 2>err || {
    grep -q 'no text to train on' err || fail "--any"
    skip "this machine has no other text"
}
grep -q '^perl-doc is not installed: text of Perl, Python and licences' out || fail "does not say what it took: $(cat out)"
LC_ALL=C.UTF-8 bash "$corpus" --any again >/dev/null || fail "the second time"
diff -r some again >differ || fail "another choice: $(head -n 3 differ)"
n_bytes=$(cat some/* | wc -c)
[ "$n_bytes" -ge 500000 ] && [ "$n_bytes" -le 9000000 ] || fail "$n_bytes bytes"
run 0 data --quiet --out data --lossy some
run 0 train --data data --model tiny --steps 2 --ranks 2 --quiet --out run
