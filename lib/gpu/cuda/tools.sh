#!/usr/bin/env bash
# tools.sh NVCC PTXAS FOLDER: makes a toolkit in FOLDER that compiles as NVCC does, but has PTXAS, of an older CUDA, assemble the
# kernels: drivers that are older than NVCC's CUDA then run them. Prints its nvcc, or NVCC where that is not newer. What NVCC's compiler writes
# is labelled as PTX of PTXAS's version, which refuses what it does not know. PyPI has a ptxas of 12.8 (nvidia-cuda-nvcc-cu12) and no nvcc.
set -euo pipefail
fail() {
    echo "tools.sh: $*" >&2
    exit 1
}
[ $# = 3 ] || fail "$# arguments, must be three: nvcc, ptxas, folder"
release() { "$1" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p'; }
nvcc=$(command -v "$1") || fail "there is no $1"
ptxas=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
[ -x "$ptxas" ] || fail "$2 is no program"
newer=$(release "$nvcc") older=$(release "$ptxas")
[ -n "$newer" ] && [ -n "$older" ] || fail "$1 or $2 does not say its release"
if [ "$(printf '%s\n' "$newer" "$older" | sort -V | tail -n 1)" = "$older" ]; then
    echo "$nvcc"
    exit
fi
case $older in # the newest PTX that it reads
12.4) version=8.4 ;; 12.5 | 12.6) version=8.5 ;; 12.8) version=8.7 ;; 12.9) version=8.8 ;;
*) fail "$2 is of CUDA $older, must be of 12.4, 12.5, 12.6, 12.8 or 12.9" ;;
esac
top=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p') # nvcc may be a script that calls another one
[ -x "$top/nvvm/bin/cicc" ] || fail "$1 has no $top/nvvm/bin/cicc"
mkdir -p "$3/bin" "$3/nvvm/bin"
tools=$(cd "$3" && pwd)
for part in "$top"/bin/*; do ln -sfn "$part" "$tools/bin/"; done
for part in "$top"/*; do [ "${part##*/}" = bin ] || [ "${part##*/}" = nvvm ] || ln -sfn "$part" "$tools/"; done
for part in "$top"/nvvm/*; do [ "${part##*/}" = bin ] || ln -sfn "$part" "$tools/nvvm/"; done
for own in nvcc nvcc.profile; do # nvcc looks for the others beside itself
    rm -f "$tools/bin/$own"
    cp "$top/bin/$own" "$tools/bin/"
done
ln -sfn "$ptxas" "$tools/bin/ptxas"
rm -f "$tools/nvvm/bin/cicc"
cat >"$tools/nvvm/bin/cicc" <<END
#!/bin/sh
"$top/nvvm/bin/cicc" "\$@" || exit
for word; do
    case \$word in *.ptx) sed -i 's/^\.version [0-9.]*\$/.version $version/' "\$word" ;; esac
done
END
chmod +x "$tools/nvvm/bin/cicc"
echo "$tools/bin/nvcc"
