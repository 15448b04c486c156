#!/usr/bin/env bash
# data, info, eval, generate, export and compare around one trained model.
source "$(dirname "$0")/lib.sh" "$@"
make_data

run 0 train "${tiny[@]}" --steps 12 --batch-size 4 --ranks 2 --out a --exchange direct # parameters in fp32, as eval and export have them
run 0 train "${tiny[@]}" --steps 12 --batch-size 4 --ranks 2 --out b --exchange dense --compress none

run 0 info data a a/step-00000012 gpt2-162m tiny --tensors
grep -q "162" out || fail "no parameter count of gpt2-162m"
grep -q "after step 12" out || fail "no step of the checkpoint"
grep -q "h.11.mlp.c_proj.weight" out || fail "no tensors"
TAGC_CPU=sse9 run 2 version
says 'TAGC_CPU is "sse9"' "scalar"
TAGC_CPU=scalar run 0 version
grep -q "scalar" out || fail "version does not print the level"
run 1 info nothing-like-it
says "nothing-like-it"

# The loss is the same from the checkpoint, from its export, on one rank and on two, and what training said.
run 0 eval --from a --data data --batch-size 4 --ranks 2 --batches 2 --json
grep -o '"val_loss": [0-9.]*' out | cut -d' ' -f2 >from-run
val_column a | tail -n 1 >from-training
run 0 export --from a --out hf
run 0 eval --from hf --data data --batch-size 8 --batches 2 --json
grep -o '"val_loss": [0-9.]*' out | cut -d' ' -f2 >from-export
paste from-run from-training from-export | awk '{ exit !(NF == 3 && ($1 - $2)^2 < 1e-10 && ($1 - $3)^2 < 1e-10) }' ||
    fail "losses differ: $(paste from-run from-training from-export)"

# Weights that were exported into a run's folder are not taken for the run, which may be further by now.
cp -r a both
run 0 export --from both --out both
run 0 train --quiet --out both --resume --steps 14
for words in "eval --data data" "generate --n-tokens 1" "export --out both" "info"; do
    run 1 $words $([ "$words" = info ] || echo --from) both
    says "both holds checkpoints and model.safetensors"
done
# Nor is what a folder holds overwritten, unless that is asked for.
cp both/model.safetensors exported
run 1 export --from both/step-00000014 --out both
says "both/model.safetensors is there already" "--force"
cmp both/model.safetensors exported || fail "overwritten without --force"
run 0 export --from both/step-00000014 --out both --force
cmp -s both/model.safetensors exported && fail "--force overwrites nothing"
cp exported both/model.safetensors
run 0 eval --from both/step-00000014 --data data --batches 1
run 0 eval --from both/model.safetensors --data data --batches 1

# A file with fewer sequences than a batch is read once, not until the batch is full.
head -c 1000 text/a.txt >short.txt
run 0 data --quiet --out short --val-share 0.2 short.txt
for batch in 1 6 64; do
    run 0 eval --from a --data short/val.bin --batch-size $batch
    grep -q "over 192 tokens" out || fail "201 tokens in batches of $batch: $(cat out)"
    cut -d' ' -f2- out >>short-losses
done
run 0 eval --from a --data short/val.bin --batch-size 64 --ranks 3
cut -d' ' -f2- out >>short-losses
[ "$(sort -u short-losses | wc -l)" = 1 ] || fail "the loss is of another part of the file: $(cat short-losses)"
run 1 eval --from a --data short/val.bin --ranks 7
says "short/val.bin has 6 sequences of 32 tokens, fewer than there are ranks (7)"
still=(--exchange direct --val-data short/val.bin --steps 1 --lr 0 --min-lr 0 --init-from hf/model.safetensors)
run 0 train "${tiny[@]}" "${still[@]}" --batch-size 6 --out d1
run 0 train "${tiny[@]}" "${still[@]}" --batch-size 16 --ranks 2 --out d2
paste <(val_column d1) <(val_column d2) | awk '{ n++; if (NF != 2 || ($1 - $2)^2 > 1e-10) exit 1 } END { exit n != 2 }' ||
    fail "training validates on another part of the file"
run 1 train "${tiny[@]}" "${still[@]}" --batch-size 1 --ranks 7
says "6 sequences of 32 tokens, fewer than there are ranks (7)" "--eval-every never"
run 0 train "${tiny[@]}" "${still[@]}" --batch-size 1 --ranks 7 --eval-every never

# GPT-2's end of text is not a token of a smaller vocabulary.
grep -q '"eos_token_id": null' hf/config.json || fail "config.json leaves the end of text to the reader"

# Weights that were exported are what training starts from when asked to.
run 0 train "${tiny[@]}" --steps 1 --lr 0 --min-lr 0 --batch-size 4 --ranks 2 --exchange direct --init-from hf/model.safetensors --out c
val_column c | head -n 1 | paste - from-training | awk '{ exit !(($1 - $2)^2 < 1e-10) }' || fail "--init-from"
# They begin in 4 bits, and random ones in 8: 4.5 and 8.125 with scales. A resumed run goes on in 8, and a fork of it in 4.
random=("${tiny[@]}" --batch-size 4 --ranks 2 --exchange direct)
run 0 train "${random[@]}" --steps 1 --no-quiet --out random
grep -q "^at first: every value in 8 bits, then in 4 bits until" out || fail "8 bits are not told: $(cat out)"
run 0 train "${random[@]}" --steps 1 --compress none --no-quiet --out without
grep "^at first" out && fail "a dense run has no gentle start"
run 0 train "${random[@]}" --steps 1 --no-quiet --fork without
grep -qx "at first: every value in 4 bits until gradients are mostly noise" out || fail "a fork of a dense run: $(cat out)"
run 0 train "${random[@]}" --steps 1 --compress none --no-quiet --fork without
grep "^at first" out && fail "nor has a dense fork"
run 0 train "${random[@]}" --steps 2 --no-quiet --fork random --out forked
grep -qx "at first: every value in 4 bits until gradients are mostly noise" out ||
    fail "4 bits of a fork are not told: $(cat out)"
run 0 train "${random[@]}" --steps 2 --resume --out random
paste <(column random compressed | head -n 1) <(column random compressed | tail -n +2) <(column c compressed) <(column forked compressed) |
    awk '{ exit !(NR == 1 && NF == 4 && $1 == $2 && $3 == $4 && $1 > 1.7 * $3 && $1 < 1.9 * $3) }' ||
    fail "bytes of random weights, of these resumed, of given ones and of a fork: $(column random compressed) $(column c compressed) $(column forked compressed)"
# A weight that is infinite makes every gradient so: such a run ends at once, and not well.
cp hf/model.safetensors infinite.safetensors
printf '\x00\x00\x80\x7f' | dd of=infinite.safetensors bs=1 seek=$(($(wc -c <infinite.safetensors) - 4)) conv=notrunc 2>/dev/null
run 1 train "${tiny[@]}" --steps 100 --batch-size 1 --ranks 2 --init-from infinite.safetensors
says "the gradients of the last 20 steps, 1 to 20, were not finite"
run 0 train "${tiny[@]}" --no-quiet --steps 0 --init-from infinite.safetensors
grep -q "^note: this validation loss is not finite" out || fail "no note about a validation loss that is none: $(cat out)"
run 1 train "${tiny[@]}" --steps 4 --batch-size 1 --init-from infinite.safetensors
says "the gradients of the last 4 steps, 1 to 4, were not finite"

run 0 generate --from a --prompt "the owner" --n-tokens 20 --seed 3
cp out first
grep -q "^the owner" out || fail "the prompt is not there"
[ "$(wc -c <out)" -ge 20 ] || fail "too little text"
run 0 generate --from hf --prompt "the owner" --n-tokens 20 --seed 3
cmp out first || fail "checkpoint and export say different things"
# A terminal gets no control characters, a file gets the text as it is.
prompt=$(printf 'a\033[31mb\302\233c')
run 0 generate --from a --prompt "$prompt" --n-tokens 1
grep -qF "$prompt" out || fail "the prompt is not there"
if command -v script >/dev/null; then
    PROMPT=$prompt TAGC=$tagc script -qec '"$TAGC" generate --from a --n-tokens 1 --prompt "$PROMPT"' typed \
        >/dev/null </dev/null
    LC_ALL=C grep -qa "a?\[31mb" typed || fail "nothing on the terminal: $(cat -v typed)"
fi

run 0 generate --from a --n-tokens 50 --temperature 0
run 0 generate --from a --prompt "$(printf 'x%.0s' $(seq 200))" --n-tokens 5 --top-k 4

run 0 compare a b
grep -q "validation loss, last" out || fail "no table"
grep -q "against a" out || fail "no difference"
grep -q "validation losses are of different text" out && fail "a note about other text, though it is the same"
# --eval-batches are batches of a rank: the same weights have another loss over other text, and compare says so.
same=("${tiny[@]}" --lr 0 --min-lr 0 --steps 1 --init-from hf/model.safetensors)
run 0 train "${same[@]}" --batch-size 2 --out two
run 0 train "${same[@]}" --batch-size 8 --ranks 3 --preset fsdp --out twenty-four
run 0 compare two twenty-four
grep -qE '^  over so many tokens +128 +1536$' out && grep -q "validation losses are of different text" out ||
    fail "no note about different text: $(cat out)"
# Times within the spread are marked by the rule of tagc-report: the middle 80 % of the steps overlap. Steps of given times:
times() { # <run> <milliseconds>...: a run whose steps took so long
    local run=$1 n=0 ms
    shift
    mkdir -p "$run"
    echo '{"type":"run","world_size":2,"n_params":100,"n_compressed":50}' >"$run/metrics.jsonl"
    for ms; do
        n=$((n + 1))
        echo "{\"type\":\"step\",\"step\":$n,\"loss\":3.0,\"wall_s\":$(awk -v ms="$ms" 'BEGIN { printf "%.4f", ms / 1000 }')}" >>"$run/metrics.jsonl"
    done
}
# two steps of warm-up, then eleven, of which the least and the largest are left out
times slow 9000 9000 100 101 102 103 104 105 106 107 108 109 900
times fast 9000 9000 50 51 52 53 54 55 56 57 58 59 400
times like 9000 9000 97 98 99 100 101 102 103 104 105 106 107
run 0 compare slow fast like
grep -qE '^  middle 80 % of the steps +101 to 109 +51 to 59 +98 to 106$' out || fail "the spread of times: $(cat out)"
grep -qE '^  times as fast as slow +- +1\.91 +1\.03\?$' out || fail "which times differ: $(cat out)"
grep -q '?: within the spread, since the middle 80 % of the steps overlap with those of slow' out || fail "the mark is not explained"
run 0 compare slow fast
grep -q '?: within' out && fail "a mark is explained that is not there"

# The same as CSV: every number as in metrics.jsonl, a run whose name has a comma and a quote quoted.
cp -r c 'c,"2"'
sed -i 's/"lr":[^,]*,//; s/"loss":[0-9.]*/"loss":null/' 'c,"2"/metrics.jsonl'
run 0 compare a 'c,"2"' --csv all.csv
run 0 compare a 'c,"2"' --csv -
cmp out all.csv || fail "--csv - is not the file"
csv_column() { # <run> <column>: of its steps, empty fields as null; step 0 has only the evaluation before them
    awk -F, -v run="$1" -v name="$2" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) at = i; next }
        $1 == run && $2 > 0 { print $at == "" ? "null" : $at }' all.csv
}
same_numbers() { paste "$1" "$2" | awk '{ bad += NF != 2 || $1 != $2 } END { exit bad || NR == 0 }'; }
for name in step loss lr grad_norm n_tokens wall_s optimizer_s; do
    column a $name >from-jsonl
    csv_column a $name >from-csv
    same_numbers from-jsonl from-csv || fail "--csv has other values of $name: $(paste from-jsonl from-csv)"
done
for leg in index values leftover result gather control; do
    grep '"type":"step"' a/metrics.jsonl | sed 's/.*"bits_sent_per_param":{\([^}]*\)}.*/\1/' | grep -o "\"$leg\":[^,]*" | cut -d: -f2 >from-jsonl
    csv_column a ${leg}_bits_sent_per_param >from-csv
    same_numbers from-jsonl from-csv || fail "--csv has other bits of $leg: $(paste from-jsonl from-csv)"
done
val_column a >from-jsonl
awk -F, '$1 == "a" && $4 != "" { print $4 }' all.csv >from-csv
same_numbers from-jsonl from-csv || fail "--csv has other validation losses: $(paste from-jsonl from-csv)"
[ "$(awk -F, '$1 == "a" && $4 != "" { printf "%s ", $2 }' all.csv)" = "$(grep '"type":"eval"' a/metrics.jsonl | grep -o '"step":[0-9]*' | cut -d: -f2 | tr '\n' ' ')" ] ||
    fail "validation losses are in the rows of other steps"
[ "$(csv_column a skipped | sort -u)" = 0 ] || fail "skipped is $(csv_column a skipped | sort -u)"
[ "$(awk -F, '{ print NF }' all.csv | sort -u)" = "$(printf '21\n22')" ] || fail "rows of different lengths" # 22: the comma of the name
[ "$(grep -c '^"c,""2""",[1-9][0-9]*,,[0-9.]*,,' all.csv)" = "$(column 'c,"2"' step | wc -l)" ] || fail "no rows of the quoted run with empty fields"
# A damaged line, and a file that cannot be written: a message, and what was there before stays.
cp all.csv before.csv
printf 'garbage\n' >>'c,"2"/metrics.jsonl'
run 1 compare a 'c,"2"' --csv all.csv
says 'c,"2"/metrics.jsonl line'
cmp all.csv before.csv || fail "a failure left another CSV behind"
[ ! -e all.csv.partial ] || fail "a failure left all.csv.partial"
run 1 compare a --csv no-folder/all.csv
says "no-folder/all.csv"
# What is no run's folder is left out, as long as one is left.
mkdir empty
run 0 compare empty a c
grep -q "note: tagc compare leaves out empty, which holds no metrics.jsonl" err || fail "no note about a folder that is no run's"
grep -q "note: the runs have different numbers of steps" out || fail "no note about the numbers of steps"
run 1 compare empty
says "empty/metrics.jsonl"
run 1 compare a nowhere
says "nowhere/metrics.jsonl"
run 1 compare nowhere
says "nowhere/metrics.jsonl"
printf 'garbage\n' >>b/metrics.jsonl
run 1 compare a b
says "b/metrics.jsonl line"

# JSON lines are for the command of Python; --lossy takes any file as it is.
printf '{"text": "one"}\n' >lines.jsonl
run 1 data --out lines lines.jsonl
says "lines.jsonl is JSON lines, and tagc data reads plain text: python -m tagc data takes a field of each line"
run 0 data --out lines --lossy lines.jsonl
printf '\377\376h\0i\0' >utf16.txt
run 1 data --out lines-5 utf16.txt
says "utf16.txt is UTF-16 text, and tagc data reads UTF-8: iconv -f UTF-16 -t UTF-8 utf16.txt > NEW.txt converts it"

# What a folder has beside files is told, and a file counts once by all its names.
mkdir -p odd/sub && printf 'some text that is enough for both' >odd/a && printf 'and some more of it' >odd/sub/b
ln odd/a odd/hard && ln -s a odd/soft && ln -s /nowhere odd/gone && ln -s sub odd/up && ln -s ring odd/ring
mkfifo odd/pipe && : >odd/.hidden && : >odd/empty
run 0 data --out from-odd odd odd/a odd/sub
cat >expected <<'END'
1 empty file was left out
skipped 1: hidden (odd/.hidden)
skipped 2: links to nothing (odd/gone, odd/ring)
skipped 1: links to folders (odd/up)
skipped 1: pipes, sockets or devices (odd/pipe)
skipped 4: reached before, each is counted once (odd/hard, odd/soft, odd/a, ...)
END
tail -n +2 out >told
grep -q "^3 files, 52 B of text" out || fail "files that are counted twice: $(cat out)"
diff expected told || fail "what is left out: $(cat out)"
run 0 data --quiet --out from-odd --force odd
[ ! -s out ] || fail "--quiet prints: $(cat out)"
# What is named is read, a pipe of the shell, too.
printf 'text of a pipe' >piped.txt
run 0 data --quiet --out from-pipe --val-share 0 <(cat piped.txt)
[ "$(tail -c 15 from-pipe/train.bin | tr '\0' '|')" = "text of a pipe|" ] || fail "a pipe of the shell is not read"

# Data: what is not text is refused with its place, unless asked for.
printf 'abc\377def\n' >bad.txt
run 1 data --out d2 bad.txt
says "bad.txt"
run 0 data --out d2 --lossy --quiet --val-share 0 bad.txt
[ ! -e d2/val.bin ] || fail "--val-share 0 wrote a val.bin"
# Nor is the val.bin of other text left beside a new train.bin.
cp -r data d4 && cp d4/train.bin was.bin
run 1 data --out d4 --lossy --quiet bad.txt
says "d4/train.bin is there already" "--force"
cmp d4/train.bin was.bin || fail "overwritten without --force"
run 1 data --out d4 --force --lossy --quiet --val-share 0 bad.txt
says "--val-share is 0" "d4/val.bin is there already"
cmp d4/train.bin was.bin && cmp d4/val.bin data/val.bin || fail "a refused build changed its folder"
run 0 data --out d4 --force --quiet text/a.txt
cmp d4/train.bin was.bin && cmp d4/val.bin data/val.bin || fail "--force made something else"
: >nothing.txt
run 1 data --out d5 nothing.txt
says "nothing.txt: 1 file and no text in it"
printf a >a-byte.txt
run 1 data --out d5 a-byte.txt
says "--val-share is 0.1: of 2 tokens nothing is left for val.bin"
run 2 data --out d3
says "no text is named"
run 1 data --out d3 absent.txt
says "absent.txt"

# Tokens of one tokenizer mean nothing to a model of another, even where the vocabulary is large enough.
# The file is one of python -m tagc data --train-bpe 300.
mkdir bpe && cp "$here/other_tokens.bin" bpe/train.bin && cp bpe/train.bin bpe/val.bin
run 0 train "${tiny[@]}" --data bpe --batch-size 1 --steps 2 --out bpe-run
run 1 eval --from bpe-run --data data
says "data/val.bin holds tokens of tokenizer bytes" "trained on those of tokenizers-"
run 1 train --quiet --out bpe-run --resume --steps 4 --data data
says "data/train.bin holds tokens of tokenizer bytes"
run 1 train "${tiny[@]}" --data bpe --val-data data/val.bin --batch-size 1 --steps 2
says "data/val.bin holds tokens of tokenizer bytes"
run 0 eval --from bpe-run --data bpe
# The engine knows no text of them: numbers go in and come out.
run 0 generate --from bpe-run --prompt " 7  299 " --n-tokens 3
grep -Eqx '7 299( [0-9]+){3} ' out || fail "numbers of tokens: $(cat out)"
for prompt in "" "the" "7 300" "7 -1" "7x" "7 99999999999999999999"; do
    run 1 generate --from bpe-run --prompt "$prompt" --n-tokens 3
    says "--prompt is \"$prompt\": the model's tokens are no bytes but those of tokenizers-" "from 0 to 299 are needed"
done
run 1 eval --from bpe-run --data bpe --seq-len 33
says "--seq-len is 33" "block-size of 32"
# A name with a quote stays JSON; what cannot be printed is a failure.
mv bpe-run 'bpe"run'
run 0 eval --from 'bpe"run' --data bpe --json
grep -qF '"from": "bpe\"run/step-00000002"' out || fail "not JSON: $(cat out)"
if [ -e /dev/full ]; then
    "$tagc" eval --from 'bpe"run' --data bpe >/dev/full 2>err && fail "a result that was not written"
    says "could not be written"
fi
