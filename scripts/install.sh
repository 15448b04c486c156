#!/usr/bin/env bash
# Installs a build and says how programs find libtagc.so; or removes what it installed, which a list in the build folder (or TAGC_INSTALLED)
# names. DESTDIR is read, as cmake reads it.
#   install.sh <build folder> <prefix>
#   install.sh --uninstall <build folder>
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$1" = --uninstall ]; then
    list=${TAGC_INSTALLED:-$2/installed.txt}
    [ -e "$list" ] || { echo "uninstall: $2 has installed nothing; make install does" >&2; exit 1; }
    folders=()
    while IFS= read -r file || [ -n "$file" ]; do
        rm -f "${DESTDIR:-}$file"
        folders+=("${DESTDIR:-}$(dirname "$file")")
    done <"$list"
    # Folders of our own alone: others have files in the rest.
    printf '%s\n' "${folders[@]}" | sort -ru | grep '/tagc$' | xargs -r rmdir --ignore-fail-on-non-empty 2>/dev/null || true
    echo "uninstall: removed $(grep -c . "$list") files"
    rm "$list"
    exit
fi

build=$1 prefix=$2
cmake --install "$build" --prefix "$prefix"
# A list of its own: tests install this build, too, elsewhere.
list=${TAGC_INSTALLED:-$build/installed.txt}
cp "$build/install_manifest.txt" "$list"
library=$(grep -m 1 '/libtagc\.so$' "$list")
folder=$(dirname "$library")
[ -z "${DESTDIR:-}" ] || exit 0
[ "$(id -u)" != 0 ] || ldconfig 2>/dev/null || true
if { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -qF "=> $folder/libtagc.so"; then
    echo "install: programs find libtagc.so in $folder"
else
    echo "install: $folder is not where programs look for libraries: link with -Wl,-rpath,$folder, or as root run" \
        "\"echo $folder >/etc/ld.so.conf.d/tagc.conf && ldconfig\""
fi
