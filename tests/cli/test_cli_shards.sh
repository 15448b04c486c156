#!/usr/bin/env bash
# A corpus in shards trains as the file that it was cut from: from a folder, by a pattern, resumed, on other numbers of ranks.
source "$(dirname "$0")/lib.sh" "$@"
make_data

# Raw 16-bit tokens can be cut anywhere; data/train.bin has a byte each.
command -v python3 >/dev/null || skip "no python3"
python3 - <<'END'
import os
tokens = open("data/train.bin", "rb").read()[128:]
raw = b"".join(bytes([t, 0]) for t in tokens)
os.makedirs("shards"), os.makedirs("whole")
open("whole/train.bin", "wb").write(raw)
open("whole/val.bin", "wb").write(raw[:4000])
open("shards/text_val_000000.bin", "wb").write(raw[:4000])
cuts = [0, 2002, 2004, 20000, len(raw)]
for i in range(4):
    open(f"shards/text_train_{i:06d}.bin", "wb").write(raw[cuts[i]:cuts[i + 1]])
END
shape=("${tiny[@]:2}" --vocab-size 256 --batch-size 4)
run 0 train --data whole "${shape[@]}" --steps 8 --ranks 2 --out whole-run
run 0 train --data shards "${shape[@]}" --steps 8 --ranks 2 --save-every 4 --out shards-run
same_losses whole-run shards-run
run 0 train --data 'shards/*train*.bin' --val-data 'shards/*val*.bin' "${shape[@]}" --steps 8 --ranks 2 --out pattern-run
same_losses whole-run pattern-run

# It goes on where it was; another shard is another text.
cp -r shards-run resumed
rm -r resumed/step-00000008
run 0 train --quiet --out resumed --resume
same_losses shards-run resumed
rm -r resumed/step-00000008
cp -r shards kept
printf '\001' | dd of=shards/text_train_000002.bin bs=1 seek=100 conv=notrunc 2>/dev/null
run 1 train --quiet --out resumed --resume
says "shards is not the text that the run has trained on" "to go on with it, give --data"
rm -r shards
mv kept shards

# The shard that is wrong is named.
head -c 301 shards/text_train_000003.bin >short && mv short shards/text_train_000003.bin
run 1 train --data shards "${shape[@]}" --steps 1
says "shards/text_train_000003.bin: 301 bytes cannot be raw uint16 tokens"
printf '\377\377' >shards/text_train_000003.bin
run 1 eval --data 'shards/*train_000003.bin' --from whole-run
says "text_train_000003.bin"
run 1 train --data 'nowhere/*.bin' "${shape[@]}" --steps 1
says "no file matches nowhere/*.bin"
run 0 info whole
run 0 data --out one text/a.txt
grep -q "^1 file, " out || fail "one file: $(cat out)"
mkdir empty
run 1 train --data empty "${shape[@]}" --steps 1
says "empty has no train.bin, and no shards *.bin"
