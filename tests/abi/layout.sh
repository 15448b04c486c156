#!/usr/bin/env bash
# layout.sh CC OLDER NEWER SCRATCH: the values of enums and the arguments of functions in the older headers are in the newer
# what they were; values may follow at the end. (Fields of structs: fields.sh.) abidiff (Debian: abigail-tools) compares two small
# libraries that name all of it, one built with each header.
set -euo pipefail
cc=$1 older=$2 newer=$3 scratch=$4
command -v abidiff >/dev/null || { echo "skipped: no abidiff (Debian: abigail-tools)"; exit 77; }
rm -rf "$scratch" && mkdir -p "$scratch"
{
    echo '#include <tagc/paper.h>'
    echo '#include <tagc/tagc.h>'
    echo '#include <tagc/native.h>'
    echo '#include <tagc/all_to_all.h>'
    echo '#include <tagc/changes.h>'
    for type in $(cat "$older"/tagc/{tagc,paper,native,blocks,all_to_all}.h | grep -oE '^} tagc_[a-z_]+;' | tr -d '}; '); do
        echo "extern $type *probe_of_$type; $type *probe_of_$type;"
    done
    for function in $(cat "$older"/tagc/{tagc,paper,native,blocks,all_to_all,changes}.h | tr '\n' ' ' | grep -oE 'TAGC_API [^;(]*\(' | grep -oE 'tagc_[a-z_0-9]+\($' |
        tr -d '('); do
        echo "extern __typeof__(&$function) probe_of_$function; __typeof__(&$function) probe_of_$function;"
    done
} >"$scratch/probe.c"
[ "$(grep -c probe_of_ "$scratch/probe.c")" -ge 50 ] || { echo "the older headers were not read"; exit 1; }
build() { # <name> <folder of headers>
    "$cc" -g -gdwarf-4 -O0 -shared -fPIC -fvisibility=default -I"$2" "$scratch/probe.c" -o "$scratch/$1.so" ||
        { echo "what $older declares, $2 does not"; exit 1; }
}
build older "$older"
build newer "$newer"
cat >"$scratch/appended" <<'END'
[suppress_type]
  type_kind = struct
[suppress_type]
  type_kind = enum
  changed_enumerators = TAGC_N_LEGS, TAGC_N_PHASES
END
abidiff --suppressions "$scratch/appended" "$scratch/older.so" "$scratch/newer.so" ||
    { echo "programs that were compiled against $older do not fit a libtagc of $newer"; exit 1; }
