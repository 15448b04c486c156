#!/usr/bin/env bash
# fields.sh CC OLDER NEWER SCRATCH: every field of a public struct in the older headers lies in the newer ones where it lay, and
# is as large.
set -euo pipefail
cc=$1 older=$2 newer=$3 scratch=$4
rm -rf "$scratch" && mkdir -p "$scratch"
. "$(dirname "${BASH_SOURCE[0]}")/list_fields.sh"
places() { # <name> <headers to compile with>
    {
        printf '#include <stdio.h>\n#include <tagc/paper.h>\n#include <tagc/native.h>\n#include <tagc/all_to_all.h>\n#include <tagc/model.h>\nint main(void) {\n'
        list_fields "$older" | while read -r type field; do
            printf 'printf("%s.%s at %%zu, %%zu bytes\\n", offsetof(%s, %s), sizeof((%s *)0)->%s);\n' \
                "$type" "$field" "$type" "$field" "$type" "$field"
        done
        printf '}\n'
    } >"$scratch/$1.c"
    "$cc" -I"$2" "$scratch/$1.c" -o "$scratch/$1" || { echo "a field of $older is not in $2"; exit 1; }
    "$scratch/$1" >"$scratch/$1.txt"
}
places older "$older"
places newer "$newer"
[ "$(wc -l <"$scratch/older.txt")" -ge 50 ] || { echo "the older headers were not read"; exit 1; }
diff "$scratch/older.txt" "$scratch/newer.txt" || { echo "< $older, > $newer: fields moved"; exit 1; }
