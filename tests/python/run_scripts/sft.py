"""trl's SFTTrainer, with LoRA, on a model, a tokenizer and a text that are made here."""

import sys

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

WORDS = [f"w{i}" for i in range(60)]


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<end>", "<unknown>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def main(folder, verb, kind):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1)  # fmt: skip
    text = [" ".join(WORDS[(i + k) % 60] for k in range(16)) for i in range(64)]
    arguments = trl.SFTConfig(
        output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6,
        save_steps=3, save_strategy="no" if verb == "plain" else "steps", logging_steps=1,
        learning_rate=5e-3, report_to=[], use_cpu=True, disable_tqdm=True, seed=5, max_length=32, bf16=False,
        gradient_checkpointing=False)  # fmt: skip
    lora = peft.LoraConfig(r=64, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian")
    trainer = trl.SFTTrainer(
        transformers.LlamaForCausalLM(config),
        args=arguments,
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"text": text}),
        peft_config=lora if kind == "lora" else None,
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if verb == "resume" else None)
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history:
            if "loss" in row and not (verb == "resume" and row["step"] <= 3):
                print(f"loss {row['step']} {row['loss']!r}")


main(*sys.argv[1:])
