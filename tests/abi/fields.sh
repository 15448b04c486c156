#!/usr/bin/env bash
# fields.sh CC SOURCE SCRATCH: every field of a public struct in the frozen header lies in today's where it lay, and is as
# large; and no struct ends in padding, in which a field could be added that the size does not tell of.
set -euo pipefail
cc=$1 source=$2 scratch=$3
rm -rf "$scratch" && mkdir -p "$scratch"
list_fields() { # <folder of headers>: "type field" per line
    cat "$1"/tagc/{tagc,paper}.h | awk '
        /^typedef struct tagc_[a-z_]+ \{/ { type = $3; next }
        /^} / { type = "" }
        type != "" && /;$/ && !/^ *(\/\*|\*)/ {
            sub(/;$/, "")
            n = split($0, names, ",")
            for (i = 1; i <= n; i++) {
                sub(/\[.*/, "", names[i])
                match(names[i], /[a-z_0-9]+$/)
                print type, substr(names[i], RSTART)
            }
        }'
}
places() { # <name> <headers that tell the fields> <headers to compile with>
    {
        printf '#include <stdio.h>\n#include <tagc/paper.h>\nint main(void) {\n'
        list_fields "$2" | while read -r type field; do
            printf 'printf("%s.%s at %%zu, %%zu bytes\\n", offsetof(%s, %s), sizeof((%s *)0)->%s);\n' \
                "$type" "$field" "$type" "$field" "$type" "$field"
        done
        printf '}\n'
    } >"$scratch/$1.c"
    "$cc" -I"$3" "$scratch/$1.c" -o "$scratch/$1" || { echo "a field of $2 is not in $3"; exit 1; }
    "$scratch/$1" >"$scratch/$1.txt"
}
places frozen "$source/tests/abi/0.1" "$source/tests/abi/0.1"
places kept "$source/tests/abi/0.1" "$source/include"
places today "$source/include" "$source/include"
[ "$(wc -l <"$scratch/frozen.txt")" -ge 50 ] || { echo "the frozen header was not read"; exit 1; }
diff "$scratch/frozen.txt" "$scratch/kept.txt" || { echo "< tests/abi/0.1, > include/tagc: fields moved"; exit 1; }

{
    printf '#include <tagc/paper.h>\n'
    list_fields "$source/include" | awk '{ last[$1] = $2 } END { for (type in last) print type, last[type] }' |
        while read -r type field; do
            printf '_Static_assert(offsetof(%s, %s) + sizeof((%s *)0)->%s == sizeof(%s), "%s ends in padding");\n' \
                "$type" "$field" "$type" "$field" "$type" "$type"
        done
} >"$scratch/padding.c"
"$cc" -std=c11 -I"$source/include" -c "$scratch/padding.c" -o "$scratch/padding.o"
