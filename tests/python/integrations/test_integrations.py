"""Loops that others own: the recipes of docs/guide/trainers.md in them, on two ranks; what comes out against
the same loop without tagc, and resumed runs against those that were not broken off."""

import logging
import os
import pathlib
import shutil
import tempfile
import types
import unittest.mock
import warnings

import pytest

torch = pytest.importorskip("torch")
import ranks
import test_docs
import torch.distributed as dist
from oracles import check_alike
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tagc.torch import Error

LOSSLESS = {"sparsity": 0, "values": "fp32", "verbose": False}
# 2 bits would tell DDP's buckets apart, which it makes anew
LOSSY = {"sparsity": 0.9, "values": "fp32", "verbose": False}
# all that a line of a trainer's log gets
LOGGED = {f"tagc/{name}" for name in ("bits_per_param", "sparsity", "ratio", "exchange_s", "n_nonfinite")}


def shared_folder(rank):
    """The same on all ranks; gone with rank 0's."""
    folder = tempfile.TemporaryDirectory() if rank == 0 else None
    name = [folder.name if rank == 0 else None]
    dist.broadcast_object_list(name)
    return folder, pathlib.Path(name[0])


def as_launched(rank, world_size):
    """What torchrun sets."""
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TOKENIZERS_PARALLELISM": "false",
    }
    logging.disable(logging.WARNING)


def pretend_to_shard(fsdp):
    """accelerate takes FSDP for GPUs alone, but what it does then works on CPUs, too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    PartialState(cpu=True)
    if fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def whole(model):
    """Its parameters by name, of all ranks together."""
    names = lambda name: name.removeprefix("module.").removeprefix("model.")
    return {
        names(name): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def furthest(found, expected):
    assert found.keys() == expected.keys() and found
    return max((found[name] - expected[name]).abs().max().item() for name in found)


def refused_alone(call, advice):
    """In a script that was started without torchrun."""
    alone = unittest.mock.patch.object(dist, "is_initialized", lambda: False)
    with alone, pytest.raises(Error, match=f"torch.distributed is not initialised.*{advice}"):
        call()


# ---- transformers ----


def gpt2():
    import transformers

    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=96, n_positions=16, n_embd=64, n_layer=2, n_head=2,
                                     resid_pdrop=0.0, embd_pdrop=0.0,
                                     attn_pdrop=0.0, tie_word_embeddings=False, bos_token_id=0,
                                     eos_token_id=0)  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        tokens = torch.randint(96, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def trained(folder, options, fsdp=False, resume=None, logging="steps"):
    """(parameters, log, callback) of a Trainer that accumulates and clips."""
    import transformers

    from tagc.integrations.transformers import TagcCallback

    wrap = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    }
    saves = options is not None and options["sparsity"] > 0
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_grad_norm=0.5, max_steps=6,
        save_strategy="steps" if saves else "no", save_steps=3, logging_strategy=logging, logging_steps=2,
        learning_rate=5e-3, lr_scheduler_type="cosine",
        warmup_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, seed=5,
        **(wrap if fsdp else {}))  # fmt: skip
    pretend_to_shard(fsdp)
    trainer, callback = transformers.Trainer(gpt2(), arguments, train_dataset=Text()), None
    if options is not None:
        callback = TagcCallback(trainer, **options)
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    found = whole(trainer.model_wrapped)
    for name in sorted(found):
        check_alike(found[name], name)
    return found, trainer.state.log_history, callback


def in_the_trainer(rank, world_size):
    """Under DDP and FSDP2. Lossless options: the weights of a Trainer without tagc. Others: what a run broken
    off at a checkpoint and resumed has, and one that was not; without the residuals, which the checkpoint
    has, it is far from that."""
    as_launched(rank, world_size)
    keep, folder = shared_folder(rank)
    dense, _, _ = trained(folder / "dense", None)
    for fsdp in (False, True):
        found, log, callback = trained(folder / f"lossless{fsdp}", LOSSLESS, fsdp)
        assert furthest(found, dense) < 2e-5
        assert callback.handle.n_steps == 6  # one exchange for two micro-steps
        assert isinstance(callback._trainer.model_wrapped, FSDPModule) == fsdp
        logged = [entry for entry in log if "tagc/bits_per_param" in entry]
        assert (
            [entry["step"] for entry in logged]
            == [2, 4, 6]
            == [entry["step"] for entry in log if "loss" in entry]
        )
        assert all({key for key in entry if "tagc/" in key} == LOGGED for entry in logged), logged
        callback.handle.close()
        checkpoint = folder / f"lossy{fsdp}" / "checkpoint-3"
        unbroken, _, _ = trained(checkpoint.parent, LOSSY, fsdp)
        assert sorted(p.name for p in (checkpoint / "tagc").iterdir()) == ["rank0.pt", "rank1.pt"]
        resumed, _, callback = trained(folder / f"other{fsdp}", LOSSY, fsdp, resume=str(checkpoint))
        assert callback.handle.n_steps == 6 and furthest(resumed, unbroken) < 1e-4, furthest(
            resumed, unbroken
        )
    dist.barrier()
    if rank == 0:
        shutil.rmtree(checkpoint / "tagc")
        shutil.rmtree(checkpoint.parent / "checkpoint-6")
    dist.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        forgetful, log, callback = trained(checkpoint.parent, LOSSY, fsdp, True, "epoch")
        callback._resumed = None  # as if it had not seen train()
        callback.on_train_begin(callback._trainer.args, callback._trainer.state, None, optimizer=None)
    said = " ".join(str(w.message) for w in seen)
    for text in (f"{checkpoint} has no folder 'tagc'", "is not known, give TagcCallback its resume_from="):
        assert (text in said) == (rank == 0), said
    assert furthest(forgetful, unbroken) > 1e-3
    for name in ("tagc/bits_per_param", "loss"):
        assert [entry["step"] for entry in log if name in entry] == [2, 6]  # 2: of the run before
    refused_alone(lambda: callback.on_train_begin(None, None, None), "torchrun")
    dist.barrier()


# ---- accelerate ----


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 64)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_of(model, rank, step):
    random = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 64, generator=random)
    return (model(x) - x.roll(1, 1)).square().mean()


def tensors_of(state):
    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(state) if torch.is_tensor(leaf)]


def with_accelerate(rank, world_size):
    """prepare(), save_state() and load_state(), with DDP and with FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from tagc.integrations.accelerate import compress

    as_launched(rank, world_size)
    keep, folder = shared_folder(rank)
    states = []  # tensors of the handle's state, when it is saved and when it is loaded

    def run(options, first, fsdp, load=None, save=None):
        pretend_to_shard(fsdp)
        plugin = (
            FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Sequential"],
                state_dict_type="SHARDED_STATE_DICT",
            )
            if fsdp
            else None
        )
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        handle = compress(accelerator, model, optimizer, **options) if options is not None else None
        if load:
            accelerator.load_state(load)
            states.append(tensors_of(handle.state_dict()))
        for step in range(first, 6):
            if save and step == 3:
                accelerator.save_state(save)
                states.append(tensors_of(handle.state_dict()))
            for micro in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, rank, 2 * step + micro))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        return whole(model), handle

    refused_alone(lambda: compress(None, Small()), "torchrun")
    dense, _ = run(None, 0, False)
    for fsdp in (False, True):
        found, handle = run(LOSSLESS, 0, fsdp)
        assert furthest(found, dense) < 2e-5 and handle.n_steps == 6
        unbroken, _ = run(LOSSY, 0, fsdp, save=str(folder / f"{fsdp}"))
        dist.barrier()
        resumed, handle = run(LOSSY, 3, fsdp, load=str(folder / f"{fsdp}"))
        loaded, saved = states.pop(), states.pop()
        assert len(loaded) == len(saved) > 0 and all(map(torch.equal, loaded, saved))
        # in the first pass after it, DDP's buckets have another order, and so values have other owners
        assert handle.n_steps == 6 and furthest(resumed, unbroken) < (1e-4 if fsdp else 2e-2)
    dist.barrier()


# ---- Lightning ----


def with_lightning(rank, world_size):
    """DDPStrategy and ModelParallelStrategy: fit(), and from a checkpoint in its middle, by a new callback
    and by one that has a handle from an earlier fit(). test() with that checkpoint needs no handle."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from tagc.integrations.lightning import TagcCallback

    as_launched(rank, world_size)
    keep, folder = shared_folder(rank)
    warnings.simplefilter("ignore")

    class Module(pl.LightningModule):
        def __init__(self, shards):
            super().__init__()
            self.shards, self.model = shards, Small()

        def configure_model(self):
            if self.shards and not isinstance(self.model, FSDPModule):
                mesh = self.device_mesh["data_parallel"]
                for layer in self.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.model, mesh=mesh)

        def training_step(self, batch, i):
            # what a resumed fit() gets of the loader begins anew, and i goes on
            return loss_of(self.model, rank, i)

        def test_step(self, batch, i):
            pass

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6), "interval": "step"}
            ]

    def run(options, shards, load=None, save=None, callback=None):
        strategy = (
            ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
            if shards
            else DDPStrategy()
        )
        callbacks = [callback or TagcCallback(**options)] if options is not None else []
        if save:
            callbacks.append(ModelCheckpoint(save, "{step}", every_n_train_steps=3, save_top_k=-1))
        clipping = {} if shards else {"gradient_clip_val": 1.0}
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            plugins=[test_docs.environment(rank, world_size)],
            callbacks=callbacks,
            logger=False,
            max_steps=6,
            accumulate_grad_batches=2,
            enable_checkpointing=bool(save),
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            barebones=False,
            **clipping,
        )
        data = torch.utils.data.DataLoader(torch.zeros(12, 1), batch_size=None)
        module = Module(shards)
        trainer.fit(module, data, ckpt_path=load)
        found, metrics = whole(module), trainer.callback_metrics
        if callback:
            callback.handle.close()
            trainer.test(module, data, ckpt_path=load, verbose=False)
        return found, callbacks[0] if callbacks else None, metrics

    refused_alone(lambda: TagcCallback().on_fit_start(None, None), 'strategy="ddp"')
    for shards in (False, True):
        # ModelParallelStrategy exchanges after every micro-step, with tagc or without
        n_exchanges = 12 if shards else 6
        dense, _, _ = run(None, shards)
        found, callback, metrics = run(LOSSLESS, shards)
        assert (
            furthest(found, dense) < 2e-5
            and callback.handle.n_steps == n_exchanges
            and metrics["tagc/bits_per_param"] > 30
            and {name for name in metrics if "tagc/" in name} == LOGGED
        ), metrics
        unbroken, earlier, _ = run(LOSSY, shards, save=folder / f"{shards}")
        for again in (None, earlier):
            checkpoint = folder / f"{shards}" / "step=3.ckpt"
            resumed, callback, _ = run(LOSSY, shards, load=checkpoint, callback=again)
            # DDP: as under Accelerate
            assert callback.handle.n_steps == n_exchanges
            assert furthest(resumed, unbroken) < (1e-4 if shards else 2e-2)


# ---- torchtitan ----


def with_fabric(rank, world_size):
    """Fabric's wrapper is looked through, and names are the model's."""
    from lightning.fabric.wrappers import _FabricModule

    import tagc.torch as tagc

    inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    wrapped = _FabricModule(nn.parallel.DistributedDataParallel(inner), types.SimpleNamespace(), inner)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    with tagc.compress(wrapped, optimizer, verbose=False) as handle:
        wrapped._forward_module(torch.randn(4, 64)).square().mean().backward()
        assert handle.n_steps == 1 and handle.stats()["n_units"] >= 1
        assert {p.name for p in handle.wrapper.parameters()} == {name for name, _ in inner.named_parameters()}


def with_torchtitan(rank, world_size):
    """Specs as torchtitan 0.3 and 0.2 have them; what their trainers call, in their order: parallelize_fn on
    meta, to_empty(), weights, optimizers."""
    import dataclasses

    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc
    from tagc.integrations.torchtitan import checkpointed, compressed

    @dataclasses.dataclass
    class ModelSpec:
        name: str
        parallelize_fn: object
        post_optimizer_build_fn: object

    @dataclasses.dataclass
    class TrainSpec:
        parallelize_fn: object
        build_optimizers_fn: object

    def parallelize(model, *, parallel_dims):
        assert parallel_dims == "dims"
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)

    def optimizers_of(model_parts, *arguments):
        assert arguments in (("options", "dims"), ())
        return types.SimpleNamespace(
            optimizers=[torch.optim.AdamW(model.parameters(), lr=1e-3) for model in model_parts]
        )

    built = []
    for spec in (
        ModelSpec("llama3", parallelize, lambda *a: built.append(a)),
        TrainSpec(parallelize, optimizers_of),
    ):
        spec = compressed(spec, verbose=False)
        with torch.device("meta"):
            model = Small()
        model = spec.parallelize_fn(model, parallel_dims="dims")
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().copy_(
                    torch.randn(p.to_local().shape, generator=torch.Generator().manual_seed(rank)) * 0.1
                )
        if isinstance(spec, TrainSpec):
            container = spec.build_optimizers_fn([model], "options", "dims")
        else:
            container = optimizers_of([model])
            spec.post_optimizer_build_fn(container, [model], "dims")
        (handle,) = spec.handles
        assert len(built) == 1 and "AdamW: beta1 is 0.5" in handle.state.moments.words
        before = whole(model)
        for step in range(2):
            loss_of(model, rank, step).backward()
            container.optimizers[0].step()
        assert handle.n_steps == 2 and furthest(whole(model), before) > 0
        trainer = types.SimpleNamespace(checkpointer=types.SimpleNamespace(states={}))
        assert checkpointed(trainer, spec).checkpointer.states == {"tagc": handle} and isinstance(
            handle, tagc.Compressed
        )
        checkpointed(types.SimpleNamespace(checkpointer=object()), spec)  # checkpoints are off


def recipes(rank, world_size):
    """As docs/guide/trainers.md has them."""
    pretend_to_shard(False)
    test_docs.run_recipes(rank, world_size, "transformers", "accelerate")


def recipe_of_lightning(rank, world_size):
    test_docs.run_recipes(rank, world_size, "lightning")


def test_torchtitan():
    ranks.run(with_torchtitan, 2)


def test_transformers_and_accelerate():
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    ranks.run_each((in_the_trainer, with_accelerate, recipes), 2, timeout_s=450)


def test_lightning():
    pytest.importorskip("lightning")
    ranks.run_each((with_fabric, with_lightning, recipe_of_lightning), 2, timeout_s=450)
