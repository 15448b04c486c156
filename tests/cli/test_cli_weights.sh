#!/usr/bin/env bash
# Weights as people have them: in several files, under the names that wrappers give, in other formats; and what is no GPT-2 or no
# safetensors, which is named. A run and its export have one loss.
source "$(dirname "$0")/lib.sh" "$@"
command -v python3 >/dev/null || skip "no python3"
make_data

loss() { # <folder>: all digits
    run 0 eval --from "$1" --data data --batches 2 --json
    grep -o '"val_loss": [0-9.]*' out | cut -d' ' -f2
}

# Ranks compute with what --gather makes of the parameters. What is evaluated, continued and exported are the owners' values.
for gather in delta4 int8 bf16; do
    sharding=full
    [ $gather = delta4 ] && sharding=grad
    run 0 train "${tiny[@]}" --ranks 2 --steps 6 --eval-every 6 --sharding $sharding --gather $gather --out "run-$gather"
    run 0 export --from "run-$gather" --out "hf-$gather"
    [ "$(loss "run-$gather")" = "$(loss "hf-$gather")" ] ||
        fail "--gather $gather: the run has loss $(loss "run-$gather"), its export $(loss "hf-$gather")"
    for from in "run-$gather" "hf-$gather"; do
        run 0 generate --from "$from" --prompt "the " --n-tokens 40
        mv out "said-${from%%-*}"
    done
    cmp -s said-run said-hf || fail "--gather $gather: the run and its export continue a text in two ways"
done

mkdir made
python3 "$here/weights.py" hf-delta4 made || fail "weights.py"
whole=$(loss hf-delta4)
for good in sharded sharded/model.safetensors.index.json compiled ddp bare blocks fsdp f64; do
    [ "$(loss "made/$good")" = "$whole" ] || fail "$good: $(cat out)"
done
run 0 train "${tiny[@]}" --init-from made/sharded --steps 1 --lr 0 --min-lr 0 --ranks 2 --preset fsdp --out started
run 0 train "${tiny[@]}" --init-from hf-delta4/model.safetensors --steps 1 --lr 0 --min-lr 0 --ranks 2 --preset fsdp --out started-whole
same_losses started started-whole
run 0 info made/sharded --tensors
grep -q "29 tensors in 3 files" out && grep -q "transformer.h.1.mlp.c_fc.weight" out || fail "info: $(cat out)"
run 0 info made/sharded/model.safetensors.index.json
grep -q "29 tensors in 3 files" out || fail "info of an index: $(cat out)"

refuses() { # <weights> <text>...: eval and train say so
    local from=$1
    shift
    run 1 eval --from "made/$from" --data data --batches 1
    says "$@"
    run 1 train "${tiny[@]}" --init-from "made/$from" --steps 1
    says "$@"
}
refuses twice 'tensors "transformer.wpe.weight" and "module.wpe.weight" are both wpe.weight'
refuses f8 'tensor "transformer.wpe.weight" is F8_E4M3, F64, F32, F16 and BF16 can be read'
refuses transposed 'has shape (96, 32), this model needs (32, 96): it is transposed'
refuses incomplete 'there is no tensor "h.1.ln_2.weight"; the first of 27 is "'
refuses absent 'model.safetensors.index.json: names the file model-00002-of-00003.safetensors, which is not beside it'
refuses lies 'tensor "transformer.wpe.weight" is not in model-0000' 'where the index says it is'
refuses outside 'the file "../sharded/model-0000' 'must be one beside the index'
refuses deeper 'the file "more/model-0000' 'must be one beside the index'
refuses short 'there is no tensor "wpe.weight"'
for model in llama mistral qwen2 gpt_neox; do
    run 1 eval --from made/$model --data data
    says "made/$model/config.json: model_type is \"$model\", allowed is \"gpt2\""
    run 1 train --data data --init-from made/$model/model.safetensors --steps 1 --quiet
    says "made/$model/config.json: model_type is \"$model\", allowed is \"gpt2\""
done
refuses torch 'made/torch holds weights of PyTorch (pytorch_model.bin), and tagc reads safetensors' 'save_pretrained'
refuses torch/pytorch_model.bin 'pytorch_model.bin is a zip archive, and tagc reads safetensors' 'torch.save'
refuses old.pt 'old.pt is a pickle of Python, and tagc reads safetensors'
refuses q4.gguf 'q4.gguf is a GGUF model, and tagc reads safetensors'
run 1 eval --from made/unnamed --data data
says "has no config.json beside it"
run 1 eval --from made/unnamed --model tiny --data data
says 'there is no tensor "wte.weight"; the first of 1 is "model.embed_tokens.weight"'
run 1 info made/torch/pytorch_model.bin
says "is a zip archive, and no raw uint16 tokens"
run 1 train "${tiny[@]}" --data made/torch/pytorch_model.bin --steps 1
says "is a zip archive, and no raw uint16 tokens"
