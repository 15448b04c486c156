# list_fields FOLDER: prints "type field" for every field of a public struct in the headers of that folder.
list_fields() {
    cat "$1"/tagc/{tagc,paper,native,blocks,all_to_all,model}.h | awk '
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
