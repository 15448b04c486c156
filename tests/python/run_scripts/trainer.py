"""Hugging Face's Trainer."""

import sys

import torch
import transformers


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        tokens = torch.randint(96, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def main(folder, verb):
    torch.manual_seed(5)
    config = transformers.GPT2Config(vocab_size=96, n_positions=16, n_embd=64, n_layer=1, n_head=2,
                                     bos_token_id=0, eos_token_id=0)  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6,
        save_steps=3, save_strategy="no" if verb == "plain" else "steps", logging_steps=1,
        learning_rate=5e-3, report_to=[], use_cpu=True, disable_tqdm=True, seed=5)  # fmt: skip
    trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=Text())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if verb == "resume" else None)
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history:
            if "loss" in row and not (verb == "resume" and row["step"] <= 3):
                print(f"loss {row['step']} {row['loss']!r}")


main(*sys.argv[1:])
