"""torchtitan's trainer and its Llama 3, small. torchtitan trains on GPUs alone, so that before it starts, its
questions to a GPU are answered for a processor, and FSDP2 is told that gloo has sums alone. Of its trainer
and its checkpoints nothing is changed."""

import os
import pathlib
import sys
import types

import datasets
import tokenizers
import torch

# its kernels for experts are in triton, which torch for processors lacks
sys.modules["torchtitan.models.moe.kernels"] = types.SimpleNamespace(generate_permute_indices=None)
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device: "a processor"
torch.cpu.get_device_properties = lambda device: types.SimpleNamespace(total_memory=1 << 34)
torch.cpu.memory_stats = lambda device: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.current_device = lambda: 0
os.environ["LOCAL_RANK"] = "0"  # the only processor of each rank

from torchtitan import train
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models import llama3
from torchtitan.models.llama3 import TransformerModelArgs

WORDS = [f"w{i}" for i in range(60)]


def parallelize(model, *words, of=llama3.parallelize_llama, **more):
    model = of(model, *words, **more)
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def text(_):
    rows = [" ".join(WORDS[(i + k) % 60] for k in range(40)) for i in range(200)]
    return datasets.Dataset.from_dict({"text": rows})


def write_tokenizer(folder):
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: i for i, word in enumerate(["<begin>", "<end>", "<unknown>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<begin>", "eos_token": "<end>"}')


class Losses:
    """Of torchtitan's metrics what a test compares."""

    def log(self, metrics, step):
        print(f"loss {step} {metrics['loss_metrics/global_avg_loss']!r}", flush=True)

    def close(self):
        pass


def main(folder, steps):
    folder = pathlib.Path(folder)
    write_tokenizer(folder / "tokenizer")
    text_datasets.DATASETS["counting"] = DatasetConfig(
        path="counting", loader=text, sample_processor=lambda sample: sample["text"]
    )
    llama3.parallelize_llama = parallelize
    llama3.llama3_args["tiny"] = TransformerModelArgs(
        dim=64, n_layers=2, n_heads=2, vocab_size=64, multiple_of=32, max_seq_len=32
    )
    words = {
        "model.name": "llama3", "model.flavor": "tiny", "model.hf_assets_path": folder / "tokenizer",
        "job.dump_folder": folder, "training.dataset": "counting", "training.local_batch_size": 2,
        "training.global_batch_size": 8, "training.seq_len": 32, "training.steps": steps,
        "optimizer.lr": 3e-3, "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0,
        "metrics.log_freq": 1,
        "activation_checkpoint.mode": "none", "training.mixed_precision_param": "float32",
        "checkpoint.interval": 3, "debug.seed": 1,
    }  # fmt: skip
    words = [*(f"--{name}={value}" for name, value in words.items()), "--checkpoint.enable",
             "--checkpoint.no-last-save-model-only"]  # fmt: skip
    trainer = train.Trainer(ConfigManager().parse_args(words))
    if torch.distributed.get_rank() == 0:
        trainer.metrics_processor.logger = Losses()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


main(*sys.argv[1:])
