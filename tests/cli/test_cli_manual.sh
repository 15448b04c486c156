#!/usr/bin/env bash
# The man page and the completions list every option of every command, as the tables that parse them have it.
source "$(dirname "$0")/lib.sh" "$@"

for kind in man bash zsh; do
    run 0 help --$kind
    cp out "tagc.$kind"
done
run 0 help
commands=$(sed -n '/^usage/,/^A first run/s/^  \([a-z]*\) .*/\1/p' out | grep -vxE 'report|help|version')
[ "$(wc -w <<<"$commands")" -ge 9 ] || fail "commands: $commands"

# rows <command>: its table.
rows() {
    "$tagc" "$1" --help-table || fail "$1 --help-table"
}
# completed <words>...: what bash offers for the last of them.
completed() {
    bash -c 'source tagc.bash; COMP_WORDS=(tagc "$@"); COMP_CWORD=$#; _tagc; printf "%s\n" "${COMPREPLY[@]}"' _ "$@"
}

n=0
completed "" >offered
for command in $commands help version; do
    grep -qx "$command" offered || fail "bash does not offer $command"
    grep -q "^    '$command:" tagc.zsh || fail "zsh does not offer $command"
done
for command in $commands; do
    awk -v "name=.SH TAGC ${command^^}" '/^\.SH / { is_in = $0 == name } is_in' tagc.man >section
    awk -v "name=$command)" '/^[a-z]*\)$/ { is_in = $0 == name } is_in' tagc.zsh >part
    completed "$command" -- >offered
    grep -qF "$command" section && grep -qx "\.B $command" tagc.man || fail "tagc.1 has no tagc $command"
    while IFS=$'\t' read -r name type range _; do
        escaped=${name//-/\\\\-}
        case $type in
        flag)
            grep -qxF "\\fB\\-\\-[no\\-]${name//-/\\-}\\fR" section || fail "tagc.1, $command: no --$name"
            grep -qx -e "--no-$name" offered && grep -qF -- "'--no-$name[" part || fail "$command: no --no-$name"
            ;;
        *) grep -qE "^\\\\fB\\\\-\\\\-$escaped " section || fail "tagc.1, $command: no --$name" ;;
        esac
        grep -qx -e "--$name" offered || fail "bash, $command: no --$name"
        grep -qF -- "'--$name[" part || fail "zsh, $command: no --$name"
        if [ "$type" = choice ]; then
            wanted=$(sed 's,/[^|]*,,g; s/|/\n/g' <<<"$range")
            [ "$(completed "$command" "--$name" "")" = "$wanted" ] || fail "bash, $command --$name: $(completed "$command" "--$name" "")"
            grep -F -- "'--$name[" part >option
            grep -qF ":word:(${wanted//$'\n'/ })" option || fail "zsh, $command --$name"
        fi
        n=$((n + 1))
    done < <(rows "$command")
done
[ "$n" -ge 150 ] || fail "only $n options"
[ -z "$(completed train --out "")" ] || fail "a word in place of a path" # -o default completes paths then
completed train --spars >offered
grep -qx -e --sparsity offered || fail "--spars"

if command -v groff >/dev/null; then
    groff -man -ww -Tascii tagc.man 2>warnings >page || fail "groff"
    grep -v 'cannot adjust line' warnings >err
    [ ! -s err ] || fail "groff warns"
    grep -q 'blas-threads' page || fail "no page"
fi
if command -v zsh >/dev/null; then zsh -n tagc.zsh 2>err || fail "zsh"; fi
run 2 help --fish
