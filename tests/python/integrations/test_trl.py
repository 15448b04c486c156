"""trl's DPOTrainer with a loss of preferences and one of supervised tuning, full and LoRA, under DDP and
FSDP2, by the recipe in docs/guide/trainers.md. scripts/loops.sh runs it; without trl and peft it is
skipped."""

import re

import pytest

torch = pytest.importorskip("torch")
for library in ("trl", "peft", "accelerate", "transformers"):
    pytest.importorskip(library, reason=f"{library} is not installed: scripts/loops.sh")
import ranks
import test_docs
import torch.distributed as dist
from oracles import check_alike
from test_integrations import as_launched, furthest, pretend_to_shard, shared_folder, whole
from torch.distributed.fsdp import FSDPModule

WORDS = [f"w{i}" for i in range(60)]


def tokenizer():
    """Of words; nothing is downloaded."""
    import tokenizers
    import transformers

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<end>", "<unknown>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def dataset():
    """Those that count are preferred."""
    import datasets

    rows = []
    for i in range(96):
        words = [WORDS[(i + k) % 60] for k in range(12)]
        noise = torch.randint(60, (8,), generator=torch.Generator().manual_seed(i)).tolist()
        texts = [" ".join(words[:4]), " " + " ".join(words[4:]), " " + " ".join(WORDS[k] for k in noise)]
        rows.append(dict(zip(("prompt", "chosen", "rejected"), texts)))
    return datasets.Dataset.from_list(rows)


def model():
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1)  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def recipe():
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", page(), re.S) if "DPOConfig" in text]
    return found


def page():
    return (test_docs.ROOT / "docs/guide/trainers.md").read_text()


def trained(folder, options, fsdp, lora, n_steps=6):
    """(parameters, losses, handle or None) after the recipe; options None: without its line of tagc's."""
    import peft
    import trl

    settings = dict(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=n_steps, learning_rate=5e-3,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=5,
        bf16=False, gradient_checkpointing=False, beta=0.5)  # fmt: skip
    if fsdp:
        settings |= {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        }
    own = {"ref_model": model()}
    if lora:
        own = {"peft_config": peft.LoraConfig(r=64, target_modules="all-linear", task_type="CAUSAL_LM")}

    def made(*arguments, **others):
        pretend_to_shard(fsdp)  # after DPOConfig, which asks what the machine has
        return trl.DPOTrainer(*arguments, **others, **own)

    names = {"settings": settings, "model": model(), "dataset": dataset(), "tokenizer": tokenizer()}
    names |= {"DPOConfig": trl.DPOConfig, "DPOTrainer": made}
    text = recipe()
    if options is None:
        text = text.replace("trainer.add_callback(TagcCallback(trainer))", "")
    else:
        text = text.replace("TagcCallback(trainer)", "TagcCallback(trainer, **options)")
        assert "**options" in text
        names["options"] = options
    exec(text, names)
    trainer = names["trainer"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert isinstance(trainer.model_wrapped, FSDPModule) == fsdp and len(losses) == n_steps
    found = whole(trainer.model_wrapped)
    for name in sorted(found):
        check_alike(found[name], name)
    handles = [c.handle for c in trainer.callback_handler.callbacks if type(c).__name__ == "TagcCallback"]
    return found, losses, handles[0] if handles else None


def preferences(rank, world_size):
    as_launched(rank, world_size)
    keep, folder = shared_folder(rank)
    for fsdp in (False, True):
        for lora in (False, True):
            dense, losses, _ = trained(folder, None, fsdp, lora)
            found, found_losses, handle = trained(
                folder, {"sparsity": 0, "values": "fp32", "verbose": False}, fsdp, lora
            )
            assert furthest(found, dense) < 2e-5 and handle.n_steps == 6, (fsdp, lora)
            torch.testing.assert_close(found_losses, losses, rtol=1e-5, atol=1e-6)
            handle.close()
            _, trained_losses, handle = trained(folder, {"verbose": False}, fsdp, lora, n_steps=12)
            assert sum(trained_losses[-2:]) < 0.97 * sum(trained_losses[:2]), trained_losses
            stats = handle.stats()
            n_trained = sum(p.numel() for p in handle.model.parameters() if p.requires_grad)
            assert stats["n_compressed"] > 0 and stats["bits_per_param"] < 24, stats
            assert n_trained <= stats["n_elems"] < 1.05 * n_trained, (stats, n_trained)  # with padding
            handle.close()
    dist.barrier()


def test_preferences():
    ranks.run(preferences, 2, timeout_s=500)
