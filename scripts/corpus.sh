#!/usr/bin/env bash
# Collects real text for the demo and the lab: the manual of Perl, which Debian and Ubuntu ship as plain .pod files in the package
# perl-doc. OUT_DIR gets copies of them, about 9 MB; nothing is downloaded. With --any, a machine without perl-doc gives what other
# text it has, as much of it: always the same files, and a line says which.
#
#   scripts/corpus.sh [--any] OUT_DIR
set -euo pipefail

any=no
[ "${1:-}" = --any ] && any=yes && shift
if [ $# -ne 1 ]; then
    echo "usage: $0 [--any] OUT_DIR" >&2
    exit 2
fi
out=$1
most_bytes=9000000 least_bytes=500000

# One path a line, in an order that depends on no locale.
other_texts() {
    local folder
    for folder in /usr/share/perl /usr/lib/python3 /usr/lib/python3.* /usr/share/common-licenses; do
        [ -d "$folder" ] || continue
        find "$folder" -type f \( -name '*.pod' -o -name '*.rst' -o -name '*.py' -o -path '/usr/share/common-licenses/*' \) | LC_ALL=C sort
    done
    find /usr/share/doc -type f -name copyright 2>/dev/null | LC_ALL=C sort
}

copy() { # <file>
    # Two folders may have a file of the same name.
    local name
    name=$(printf '%s' "${1#/usr/}" | tr / _)
    name=${name#share_}
    cp -f "$1" "$out/.$name.part"
    mv -f "$out/.$name.part" "$out/$name"
}

pods=$(dpkg -L perl-doc 2>/dev/null | grep '\.pod$' || true)
if [ -z "$pods" ] && [ "$any" = no ]; then
    echo "$0: the text of the demo is missing; this installs it:" >&2
    echo "    sudo apt-get install -y perl-doc" >&2
    exit 1
fi

mkdir -p "$out"
n=0
while IFS= read -r pod; do
    [ -f "$pod" ] || continue # a container image may leave documentation out
    copy "$pod"
    n=$((n + 1))
done <<<"$pods"

if [ "$n" -eq 0 ] && [ "$any" = yes ]; then
    n_bytes=0
    while IFS= read -r text; do
        size=$(stat -c %s "$text")
        [ $((n_bytes + size)) -le $most_bytes ] || continue
        copy "$text"
        n=$((n + 1)) n_bytes=$((n_bytes + size))
    done < <(other_texts)
    if [ $n_bytes -lt $least_bytes ]; then
        echo "$0: this machine has no text to train on: no perl-doc, no Python in /usr/lib, no licences in /usr/share" >&2
        exit 1
    fi
    echo "perl-doc is not installed: text of Perl, Python and licences in /usr/share and /usr/lib instead; losses are of that text"
elif [ "$n" -eq 0 ]; then
    echo "$0: perl-doc is installed, but its files are not there; this puts them back:" >&2
    echo "    sudo apt-get install -y --reinstall perl-doc" >&2
    exit 1
fi
echo "$n files, $(du -shL "$out" | cut -f1) in $out"
