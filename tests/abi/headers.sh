#!/usr/bin/env bash
# headers.sh CC HEADERS SCRATCH: ctypes can call all that the headers declare: no inline function, no varargs and no bit-field.
# No public struct ends in padding, in which a field could be added that the size does not tell of.
set -euo pipefail
cc=$1 headers=$2 scratch=$3
rm -rf "$scratch" && mkdir -p "$scratch"
. "$(dirname "${BASH_SOURCE[0]}")/list_fields.sh"
[ "$(list_fields "$headers" | wc -l)" -ge 50 ] || { echo "the headers were not read"; exit 1; }
for header in "$headers"/tagc/*.h; do # -fpreprocessed takes the comments out
    found=$("$cc" -fpreprocessed -E -P -x c "$header" | grep -nE '\binline\b|\.\.\. *\)|[a-z_0-9] *: *[0-9A-Z_]+ *[;,]') || continue
    echo "$header has what ctypes cannot load: $found" && exit 1
done
{
    printf '#include <tagc/paper.h>\n#include <tagc/native.h>\n#include <tagc/all_to_all.h>\n#include <tagc/model.h>\n'
    list_fields "$headers" | awk '{ last[$1] = $2 } END { for (type in last) print type, last[type] }' |
        while read -r type field; do
            printf '_Static_assert(offsetof(%s, %s) + sizeof((%s *)0)->%s == sizeof(%s), "%s ends in padding");\n' \
                "$type" "$field" "$type" "$field" "$type" "$type"
        done
} >"$scratch/padding.c"
"$cc" -std=c11 -I"$headers" -c "$scratch/padding.c" -o "$scratch/padding.o"
