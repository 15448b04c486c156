#!/usr/bin/env bash
# Collects real text for the demo: the manual of Perl, which Debian and Ubuntu ship as plain .pod files in the package
# perl-doc. OUT_DIR gets copies of them, about 9 MB; nothing is downloaded.
#
#   scripts/corpus.sh OUT_DIR
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 OUT_DIR" >&2
    exit 2
fi
out=$1

pods=$(dpkg -L perl-doc 2>/dev/null | grep '\.pod$' || true)
if [ -z "$pods" ]; then
    echo "$0: the text of the demo is missing; this installs it:" >&2
    echo "    sudo apt-get install -y perl-doc" >&2
    exit 1
fi

mkdir -p "$out"
n=0
while IFS= read -r pod; do
    [ -f "$pod" ] || continue # a container image may leave documentation out
    # Two folders may have a file of the same name.
    name=$(printf '%s' "${pod#/usr/share/}" | tr / _)
    cp -f "$pod" "$out/.$name.part"
    mv -f "$out/.$name.part" "$out/$name"
    n=$((n + 1))
done <<<"$pods"

if [ "$n" -eq 0 ]; then
    echo "$0: perl-doc is installed, but its files are not there; this puts them back:" >&2
    echo "    sudo apt-get install -y --reinstall perl-doc" >&2
    exit 1
fi
echo "$n files, $(du -shL "$out" | cut -f1) in $out"
