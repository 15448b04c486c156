#!/usr/bin/env bash
# Every option of every command at and past the ends of its range, names that do not exist, config files that are wrong.
source "$(dirname "$0")/lib.sh" "$@"

for command in train eval generate data export info compare; do
    run 0 "$command" --help
    grep -q "^usage: tagc $command" out || fail "$command --help has no usage line"
    run 0 help "$command"
    run 0 "$command" --help-table
    cp out "table.$command"
    [ -s "table.$command" ] || fail "$command has no options"
    # What the help lists and what the table lists are the same options.
    run 0 "$command" --help-all
    while IFS=$'\t' read -r name _; do
        grep -qE -e "--(\[no-\])?$name( |\$)" out || fail "$command --help-all lacks --$name"
    done <"table.$command"
done
# The short help fits a screen, is that of `tagc help`, and names options that exist.
for command in train bench plan; do
    run 0 "$command" --help
    [ "$(wc -l <out)" -le 24 ] || fail "$command --help has $(wc -l <out) lines"
    grep -q "tagc $command --help-all explains all" out || fail "$command --help does not name --help-all"
    cp out short
    run 0 help "$command"
    cmp -s out short || fail "tagc help $command differs from tagc $command --help"
    [ "$(grep -c "^  --" short)" -ge 7 ] || fail "$command --help: $(cat short)"
done
run 0 help
cp out commands
for command in train bench compare plan eval generate data export info; do
    run 0 "$command" --help
    grep -qxF -- "$(printf '  %-10s %s' "$command" "$(head -n 1 out | sed "s/^tagc $command: //")")" commands ||
        fail "tagc help does not say: $(head -n 1 out)"
done
run 0 version
grep -qE '^tagc [0-9]+\.[0-9]+\.[0-9]+, commit ([0-9a-f]{7,}(-dirty)?|unknown)$' out || fail "tagc version: $(cat out)"
grep -qE '^parts: paper(, gpu)?(, native(, tls)?)?(, mpi)?$' out || fail "tagc version: $(cat out)"
grep -qE '^processor: (scalar|neon|avx2|avx512)$' out || fail "tagc version: $(cat out)"
grep -qE '^products: OpenBLAS [0-9.]+[^ ]*, kernel [A-Za-z0-9_]+$' out || fail "tagc version: $(cat out)"
[ "$(wc -l <out)" = 4 ] || fail "tagc version: $(cat out)"
cp out version
for short in -V --version; do
    run 0 $short
    [ "$(cat out)" = "$(head -n 1 version | cut -d, -f1)" ] || fail "tagc $short: $(cat out)"
done
TAGC_CPU=scalar run 0 version
grep -qx 'processor: scalar' out || fail "tagc version: $(cat out)"
run 2
run 2 trian
says '"trian" is no command; did you mean tagc train?'
run 2 help trian
says 'did you mean tagc train?'
run 2 --versoin
says '"--versoin" is no command; did you mean tagc version?'
run 2 benchmark
says 'did you mean tagc bench?'
run 2 tokenize
says 'did you mean tagc data?'
run 2 xylophone
says '"xylophone" is no command; tagc help lists them'
run 2 train --sparsty 0.5
says "unknown option --sparsty" "did you mean --sparsity"
run 2 train --learning-rate 1e-3
says "unknown option --learning-rate" "did you mean --lr?"
run 2 eval --checkpoint runs
says "unknown option --checkpoint" "did you mean --from?"
run 2 train --preset everything
says "--preset is \"everything\"" "zero2-bf16" "all-legs"
run 2 train --steps
says "--steps needs a value"
run 2 train stray
says '"stray" is not an option'
run 2 train -x
says "unknown option -x"

n=0 at=0 odd=0
words=(nonsense "" 1x nan inf " 1" 0x1 1e999)
for command in train eval generate data; do
    while IFS=$'\t' read -r name type range initial; do
        case $type in
        int | real)
            low=$(echo "$range" | sed 's/.* or //' | awk '{print $1}')
            high=$(echo "$range" | awk '{print $NF}')
            if [ "$type" = int ]; then
                below=$((low - 1)) above=$(awk -v h="$high" 'BEGIN { printf "%.0f", h + 1 }')
            else
                below=$(awk -v l="$low" 'BEGIN { printf "%.9g", l - 0.0001 - (l < 0 ? -l : l) * 1e-4 }')
                [ "$low" = 0.001 ] && below=0.0009
                above=$(awk -v h="$high" 'BEGIN { printf "%.9g", h * 1.01 }')
            fi
            # One parser reads them all, so each option meets its own bounds and one of the words that are no numbers. A sanitized one is
            # slow, and reads every second of these.
            for value in "$below" "$above" "${words[$((at++ % ${#words[@]}))]}"; do
                [ $sanitized = no ] || [ $((odd++ % 2)) = 0 ] || continue
                run 2 "$command" "--$name=$value"
                says "--$name is \"$value\"" "from $low to $high"
                n=$((n + 1))
            done
            ;;
        choice)
            run 2 "$command" "--$name" nonsense
            says "--$name is \"nonsense\"" "$range"
            n=$((n + 1))
            ;;
        flag)
            run 2 "$command" "--$name=perhaps"
            says "--$name is \"perhaps\"" "yes or no"
            n=$((n + 1))
            ;;
        esac
    done <"table.$command"
done
[ "$n" -gt $([ $sanitized = no ] && echo 150 || echo 80) ] || fail "only $n values were tried"

# What no single range can say.
run 2 train --data x --model demo --seq-len 129
says "--seq-len is 129" "128"
run 2 train --data x --lr 1e-4 --min-lr 1e-3
says "--min-lr"
run 1 train --data x --lr 0
says "x does not exist"
run 2 train --data x --compress names
says "--compress-names"
run 2 train --data x --model gpt5
says "gpt5"
run 2 train --data x --n-embd 130 --n-head 4
says "130"
run 2 train --data x --trace-steps 5-3
says "--trace-steps"
run 1 train --model tiny
says "--data DIR is needed"

# Config files: errors name the line, the command line wins.
printf '# comment\nsteps = 3 # and more\n\nmodel = tiny\nquiet = yes\n' >good.conf
printf 'steps = 3\n\nsteps = many\n' >value.conf
printf 'model = tiny\nstep = 3\n' >name.conf
printf 'steps 3\n' >form.conf
run 2 train --config value.conf
says "value.conf line 3" "--steps is \"many\""
run 2 train --config name.conf
says "name.conf line 2" "did you mean --steps"
run 2 train --config form.conf
says "form.conf line 1" "name = value"
printf 'config = good.conf\n' >nested.conf
run 2 train --config nested.conf
says "nested.conf line 1" "cannot name another"
run 2 train --config absent.conf
says "absent.conf"
truncate -s 8M zeros.conf # where a line has no end
run 2 train --config zeros.conf
says "zeros.conf: more than 1048576 bytes"
printf 'steps = 3\n# \0\n' >zero.conf
run 2 train --config zero.conf
says "zero.conf line 2" "a zero byte"
make_data
run 0 train --steps 2 --config good.conf --data data --out won --no-quiet
# As an editor on another system writes it; the last of two lines counts.
printf '\xef\xbb\xbfsteps = 9\r\nmodel = tiny\r\nsteps = 3' >foreign.conf
run 0 train --config foreign.conf --data data --out foreign --quiet
grep -q '"steps":"3"' foreign/metrics.jsonl || fail "a config file with BOM and CRLF"
grep -q '"steps":"2"' won/metrics.jsonl || fail "the command line did not win over the config file"
# Options without a say in the run are named; the headline says what has one.
run 0 train "${tiny[@]}" --no-quiet --steps 1 --exchange sketch --ratio 4 --index sum4 --unpeeled packed
grep -q "^gradients: sketch 4x, index sum4, sparsity 98.75 %, on .* dense$" out || fail "headline: $(cat out)"
grep -q "^note: --" out && fail "a note about options that have an effect"
run 0 train "${tiny[@]}" --no-quiet --steps 1 --exchange packed --ratio 4 --sparsity 0.9
grep -q "note: --ratio is for --exchange sketch and has no effect here" out || fail "no note about --ratio"
grep -q "note: --sparsity" out && fail "a note about --sparsity, which has an effect"
run 0 train "${tiny[@]}" --no-quiet --steps 1 --compress none --sparsity 0.9
grep -q "note: --sparsity .* no effect with --compress none" out || fail "no note about --sparsity"
run 0 train "${tiny[@]}" --no-quiet --steps 1 --compress none --exchange packed --schedule-from fork --trace-steps 1-1 \
    --save-every 1 --keep 3
for note in "exchange is for --compress other than none" "schedule-from is for --fork" "trace-steps is for --trace" \
    "save-every is for --out" "keep is for --out"; do
    grep -q "^note: --$note and has no effect here" out || fail "no note about --$note: $(cat out)"
done
run 0 train "${tiny[@]}" --no-quiet --steps 1 --compress none --exchange dense --schedule-from start --trace x.json \
    --trace-steps 1-1 --save-every 1 --keep 3 --out noted
grep -q "nothing of this run is kept" out && fail "a run with --out is said to keep nothing"
run 0 train --data data --resume noted --steps 2
grep -q "^note: nothing of this run is kept: --out DIR" out || fail "a run without --out is not told of it: $(cat out)"
run 0 train "${tiny[@]}" --no-quiet --steps 1 --compress none --exchange dense --schedule-from start --trace x.json \
    --trace-steps 1-1 --save-every 1 --keep 3 --out noted-2
grep -q "^note: --" out && fail "a note about options that have an effect: $(cat out)"
run 0 train "${tiny[@]}" --no-quiet --steps 1 --compress paper
grep -q "paper matches no tensor of this model" out || fail "no word about a policy without tensors"

# A preset is the arm of that name; what is given on the command line or in a file wins.
run 0 train "${tiny[@]}" --ranks 2 --steps 1 --preset all-legs --out preset
grep -q '"gather":"delta4"' preset/metrics.jsonl && grep -q '"sharding":"grad"' preset/metrics.jsonl || fail "--preset all-legs"
printf 'preset = all-legs\ngather = bf16\n' >preset.conf
run 0 train "${tiny[@]}" --ranks 2 --steps 1 --config preset.conf --wire fp32 --out preset-less
grep -q '"gather":"bf16"' preset-less/metrics.jsonl && grep -q '"wire":"fp32"' preset-less/metrics.jsonl &&
    grep -q '"sharding":"grad"' preset-less/metrics.jsonl || fail "what is given does not win over --preset"

# Several ranks compress every leg, unless one option that a preset sets is given: then each has its own default.
legs() { # <run>: how its parameters and gradients travel
    grep -o '"\(sharding\|gather\|wire\|compress\|exchange\)":"[^"]*"' "$1/metrics.jsonl" | cut -d'"' -f4 | sort | tr '\n' ' '
}
expect_legs() { # <legs> <options>...
    local wanted=$1
    shift
    rm -rf legs
    run 0 train "${tiny[@]}" --steps 1 --no-quiet --out legs "$@"
    [ "$(legs legs)" = "$wanted " ] || fail "$*: $(legs legs)"
}
expect_legs "bf16 delta4 direct grad non-attention-linear" --ranks 2
grep -q "^not given: --preset all-legs --sparsity 0.95 " out || fail "the default is not told: $(cat out)"
expect_legs "bf16 delta4 direct grad non-attention-linear" --ranks 4 --sparsity 0.9 --two-level --ranks-per-host 2 --mild dense
expect_legs "dense fp32 fp32 full non-attention-linear" --ranks 1
expect_legs "direct fp32 fp32 full non-attention-linear" --ranks 2 --exchange direct
grep -q "preset" out && fail "a preset is named that was not taken: $(cat out)"
expect_legs "direct fp32 fp32 hybrid non-attention-linear" --ranks 4 --sharding hybrid --ranks-per-host 2
expect_legs "direct fp32 fp32 non-attention-linear none" --ranks 2 --sharding none
expect_legs "direct fp32 fp32 full none" --ranks 2 --compress none
expect_legs "bf16 direct fp32 full non-attention-linear" --ranks 2 --wire bf16
expect_legs "bf16 bf16 dense grad none" --ranks 2 --preset bf16
# A checkpoint goes on with the options that it wrote down, whatever the defaults are; a fork is a new run.
run 0 train "${tiny[@]}" --ranks 2 --steps 5 --save-every 3 --exchange direct --out of-own-whole
cp -r of-own-whole of-own
rm -r of-own/step-00000005
run 0 train --quiet --out of-own --resume
[ "$(legs of-own)" = "direct direct fp32 fp32 fp32 fp32 full full non-attention-linear non-attention-linear " ] || fail "resumed: $(legs of-own)"
same_losses of-own of-own-whole
expect_legs "bf16 delta4 direct grad non-attention-linear" --ranks 2 --fork of-own --steps 6

# One rank has no other to send to. It compresses only on request.
run 0 train "${tiny[@]}" --ranks 1 --steps 1 --no-quiet
grep -q "^one rank has no peers: gradients stay dense" out && grep -q "^gradients: dense$" out || fail "one rank: $(cat out)"
grep -q "parameters, 1 rank, not sharded$" out || fail "one rank: $(cat out)"
run 0 train "${tiny[@]}" --ranks 1 --steps 1 --no-quiet --sparsity 0.9
grep -q "^gradients: direct int2, sparsity 90 %" out || fail "one rank, asked for: $(cat out)"
run 0 train "${tiny[@]}" --ranks 2 --steps 1 --no-quiet
grep -q "^gradients: direct int2, sparsity 95 %" out || fail "two ranks: $(cat out)"
run 0 train "${tiny[@]}" --ranks 2 --steps 1 --no-quiet --sparsity 1
grep -q "^note: --sparsity 1 never sends" out || fail "no word about --sparsity 1: $(cat out)"

# Threads of a product: what is given, what the environment says, this rank's share of the processors.
threads() { # <number> <tagc's options>...
    local wanted=$1
    shift
    run 0 train "${tiny[@]}" --ranks 1 --steps 1 --out "threads-$wanted" "$@"
    grep -qF "\\\"blas-threads\\\":\\\"$wanted\\\"" "threads-$wanted"/step-*/manifest.json || fail "not $wanted threads"
    rm -r "threads-$wanted"
}
threads 1
threads 3 --blas-threads 3
OPENBLAS_NUM_THREADS=2 threads 2
[ "$sanitized" = yes ] || (unset OPENBLAS_NUM_THREADS && threads "$(nproc)") || exit 1

# Weights tell their shape.
run 0 export --from preset --out exported
run 0 train --data data --init-from exported/model.safetensors --steps 1 --no-quiet --batch-size 2
grep -q "^exported/model.safetensors, 42.9 k parameters" out || fail "the shape of the weights: $(cat out)"
run 1 train --data data --init-from exported/model.safetensors --model demo --steps 1
says "has shape"
run 0 info gpt2-large
grep -q "774 M parameters (774030080)" out || fail "gpt2-large"

# Data that are not there, and raw tokens above the model's vocabulary: the remedy is named.
run 1 train "${tiny[@]}" --data nowhere
says "nowhere does not exist; tagc data makes"
mkdir raw
head -c 20000 /dev/zero | tr '\0' '\110' >raw/train.bin
cp raw/train.bin raw/val.bin
run 1 train "${tiny[@]}" --data raw --steps 1
says "give --vocab-size, 50257 for GPT-2"

grep -q '"model":"tiny"' won/metrics.jsonl || fail "the config file was not read"
echo "$n values of options were refused as they should"
