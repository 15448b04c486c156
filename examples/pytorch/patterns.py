"""Loops as people write them for FSDP2, DDP and FSDP1, each with tagc's one line in it.

    torchrun --standalone --nproc-per-node 2 patterns.py ["fsdp2_*" ...]
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        patterns.py --device cuda     # on both hosts; HOST is one of them

Each pattern runs three times from the same weights on the same data: without the line, with it at sparsity 0,
where losses must be those of the first run up to rounding, and with tagc's defaults, where the loss must
fall. One line per pattern; the exit code is 1 where one failed.

In a pattern `line(model)` is the one that tagc adds. Where the user registers a hook by hand, `hook(model)`
gives the state and the hook to register, torch's own or tagc's."""

import argparse
import contextlib
import datetime
import fnmatch
import functools
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from device import add_device, start_on
from gpt import GPT, Block, Config
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)  # fmt: skip
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

N_STEPS = 6
PATTERNS = {}


def pattern(function=None, tolerance=2e-5):
    """tolerance: relative, of losses at sparsity 0; sums in another order round otherwise, in bf16 more
    so."""
    if function is None:
        return functools.partial(pattern, tolerance=tolerance)
    PATTERNS[function.__name__] = function, tolerance
    return function


def gpt(**options):
    torch.manual_seed(0)  # the same weights on every rank
    return GPT(Config(n_vocab=64, n_positions=32, n_embd=64, n_head=2, n_layer=2, **options))


def batches(n=N_STEPS, n_rows=4):
    """Each rank its own: sequences that count, from different beginnings."""
    for step in range(n):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        first = torch.randint(64, (n_rows, 1), generator=generator, device="cpu")
        rows = (first.to(torch.get_default_device()) + torch.arange(33)) % 64
        yield rows[:, :-1], rows[:, 1:]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model, optimizer, data=None, losses=None):
    """The plain loop. The losses, to which those of `losses` come first."""
    losses = losses or []
    for x, y in data or batches():
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- FSDP2 ----


def shard(model, **options):
    for block in model.transformer.h:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@pattern
def fsdp2_layers_and_root(line, hook):
    model = shard(gpt())
    line(model)
    return train(model, adamw(model))


@pattern
def fsdp2_one_mesh_by_hand(line, hook):
    mesh = init_device_mesh(
        torch.get_default_device().type, (dist.get_world_size(),), mesh_dim_names=("data",)
    )
    model = shard(gpt(), mesh=mesh["data"], reshard_after_forward=False)
    line(model)
    return train(model, adamw(model))


@pattern
def fsdp2_from_the_meta_device(line, hook):
    """Built without memory, sharded, given memory, filled from a whole state dict that rank 0 has."""
    whole = gpt(tied=False).state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = gpt(tied=False)
    shard(model)
    model.to_empty(device=torch.get_default_device())
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, whole, options=options)
    line(model)
    return train(model, adamw(model))


@pattern
def fsdp2_explicit_prefetch(line, hook):
    model = shard(gpt())
    blocks = list(model.transformer.h)
    for block, following in zip(blocks, blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    line(model)
    optimizer, losses = adamw(model), []
    for x, y in batches():
        model.unshard()  # the root's all-gather begins before its forward
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pattern(tolerance=2e-3)
def fsdp2_mixed_precision(line, hook):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(gpt(), mp_policy=policy)
    line(model)
    return train(model, adamw(model))


@pattern(tolerance=2e-2)
def fsdp2_gradients_in_bf16(line, hook):
    model = shard(gpt(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    line(model)
    return train(model, adamw(model))


@pattern
def fsdp2_clipping(line, hook):
    model = shard(gpt())
    line(model)
    optimizer, losses = adamw(model), []
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        losses.append(loss.item() + 0 * norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def accumulate(model, set_sync, n_micro=2):
    optimizer, losses = adamw(model), []
    for x, y in batches(n_rows=8):
        total = 0.0
        for i, (micro_x, micro_y) in enumerate(zip(x.chunk(n_micro), y.chunk(n_micro))):
            set_sync(i == n_micro - 1)
            loss = model(micro_x, micro_y) / n_micro
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pattern
def fsdp2_accumulation_without_sync(line, hook):
    model = shard(gpt())
    line(model)

    def set_sync(is_last):
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)

    return accumulate(model, set_sync)


@pattern
def fsdp2_accumulation_with_sync(line, hook):
    """An exchange at every micro-step; sharded gradients add up."""
    model = shard(gpt())
    line(model)
    return accumulate(model, lambda is_last: None)


@pattern
def fsdp2_activation_checkpointing(line, hook):
    model = gpt()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)
    line(model)
    return train(model, adamw(model))


@pattern
def fsdp2_cpu_offload(line, hook):
    model = shard(gpt(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    line(model)
    return train(model, adamw(model))


@pattern
def fsdp2_frozen_layers(line, hook):
    model = gpt()
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[0].attn.requires_grad_(False)
    shard(model)
    line(model)
    return train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3))


@pattern
def fsdp2_full_state_dict(line, hook):
    """Saved whole on rank 0, as one process would, and read by a new model that goes on."""
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    data = list(batches())
    model = shard(gpt())
    optimizer = adamw(model)
    line(model)
    losses = train(model, optimizer, data[:3])
    saved = states.get_state_dict(model, optimizer, options=options)  # empty on all other ranks

    model = shard(gpt())
    optimizer = adamw(model)
    line(model)
    states.set_model_state_dict(model, saved[0], options=options)
    states.set_optimizer_state_dict(model, optimizer, saved[1], options=options)
    return train(model, optimizer, data[3:], losses)


class App(Stateful):
    """What is saved, as torch's recipe for distributed checkpoints wraps it."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, saved):
        states.set_state_dict(
            self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"]
        )


@contextlib.contextmanager
def shared_folder():
    """One folder for all ranks of this host."""
    with tempfile.TemporaryDirectory() as mine:
        name = [mine]
        dist.broadcast_object_list(name)
        yield name[0]
        dist.barrier()


@pattern
def fsdp2_distributed_checkpoint(line, hook):
    data = list(batches())
    model = shard(gpt())
    optimizer = adamw(model)
    line(model)
    losses = train(model, optimizer, data[:3])
    with shared_folder() as folder:
        dcp.save({"app": App(model, optimizer)}, checkpoint_id=folder)

        model = shard(gpt())
        optimizer = adamw(model)
        line(model)
        dcp.load({"app": App(model, optimizer)}, checkpoint_id=folder)
    return train(model, optimizer, data[3:], losses)


@pattern
def fsdp2_compile(line, hook):
    model = gpt()
    for block in model.transformer.h:
        # inductor works as well, where there is a C++ compiler, and takes a minute
        block.compile(backend="aot_eager")
    shard(model)
    line(model)
    return train(model, adamw(model))


# ---- DDP ----


@pattern
def ddp(line, hook):
    model = DistributedDataParallel(gpt())
    line(model)
    return train(model, adamw(model))


@pattern
def ddp_many_buckets(line, hook):
    model = DistributedDataParallel(gpt(), bucket_cap_mb=0.1)  # made anew after the first step
    line(model)
    return train(model, adamw(model))


@pattern
def ddp_gradients_as_bucket_views(line, hook):
    model = DistributedDataParallel(gpt(), gradient_as_bucket_view=True)
    line(model)
    return train(model, adamw(model))


@pattern
def ddp_no_sync(line, hook):
    model = DistributedDataParallel(gpt())
    line(model)
    optimizer, losses, n_micro = adamw(model), [], 2
    for x, y in batches(n_rows=8):
        (x, last_x), (y, last_y) = x.chunk(n_micro), y.chunk(n_micro)
        with model.no_sync():
            first = model(x, y) / n_micro
            first.backward()
        last = model(last_x, last_y) / n_micro
        last.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(first.item() + last.item())
    return losses


@pattern
def ddp_static_graph(line, hook):
    model = DistributedDataParallel(gpt(checkpoint_activations=True), static_graph=True)
    line(model)
    return train(model, adamw(model))


class TwoHeads(nn.Module):
    """Every second step goes through another head, so that each step leaves a part of the model out."""

    def __init__(self):
        super().__init__()
        self.body, self.other, self.n_calls = gpt(tied=False), nn.Linear(64, 64), 0

    def forward(self, x, y):
        self.n_calls += 1
        if self.n_calls % 2 == 0:
            return self.body(x, y)
        return nn.functional.cross_entropy(
            self.other(self.body.transformer.wte(x)).flatten(0, 1), y.flatten()
        )


@pattern
def ddp_unused_parameters(line, hook):
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    line(model)
    return train(model, adamw(model))


@pattern
def ddp_uneven_inputs(line, hook):
    """The last rank has fewer batches; the others' exchanges are shadowed by it."""
    model = DistributedDataParallel(gpt())
    line(model)
    optimizer, losses = adamw(model), []
    is_short = dist.get_rank() == dist.get_world_size() - 1
    with model.join():
        for x, y in batches(N_STEPS - 2 * is_short):
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pattern
def ddp_clipping(line, hook):
    model = DistributedDataParallel(gpt())
    line(model)
    optimizer, losses = adamw(model), []
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pattern(tolerance=2e-2)
def ddp_autocast_and_loss_scaling(line, hook):
    model = DistributedDataParallel(gpt())
    line(model)
    device = torch.get_default_device().type
    optimizer, scaler, losses = adamw(model), torch.amp.GradScaler(device, init_scale=2.0**10), []
    for x, y in batches():
        with torch.autocast(device, torch.bfloat16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pattern
def ddp_hook_by_hand(line, hook):
    model = DistributedDataParallel(gpt())
    state, function = hook(model)
    model.register_comm_hook(state, function)
    return train(model, adamw(model))


@pattern(tolerance=2e-2)
def ddp_hook_in_fp16_wrapper(line, hook):
    model = DistributedDataParallel(gpt())
    state, function = hook(model)
    model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(function))
    return train(model, adamw(model))


@pattern
def ddp_hook_with_a_callback(line, hook):
    """A hook of the user's that calls another and chains something to its future, as encode and decode hooks
    do."""
    model = DistributedDataParallel(gpt())
    state, function = hook(model)

    def halved(state, bucket):
        return function(state, bucket).then(lambda future: future.value() * 0.5)

    model.register_comm_hook(state, halved)
    return train(model, adamw(model))


@pattern
def ddp_zero_redundancy_optimizer(line, hook):
    model = DistributedDataParallel(gpt())
    line(model)
    return train(
        model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-3)
    )


@pattern
def ddp_checkpoint_of_rank_0(line, hook):
    data = list(batches())
    model = DistributedDataParallel(gpt())
    optimizer = adamw(model)
    line(model)
    losses = train(model, optimizer, data[:3])
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            torch.save(
                {"model": model.state_dict(), "optim": optimizer.state_dict()}, f"{folder}/checkpoint.pt"
            )
        dist.barrier()
        saved = torch.load(f"{folder}/checkpoint.pt", map_location="cpu")
    model = DistributedDataParallel(gpt())
    optimizer = adamw(model)
    line(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optim"])
    return train(model, optimizer, data[3:], losses)


@pattern
def ddp_compile(line, hook):
    model = torch.compile(DistributedDataParallel(gpt()), backend="aot_eager")
    line(model)
    return train(model, adamw(model))


# ---- FSDP1 ----


def fsdp1(model, **options):
    options |= {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.get_default_device()}
    return FullyShardedDataParallel(model, **options)


@pattern
def fsdp1_auto_wrap(line, hook):
    model = fsdp1(gpt())
    line(model)
    return train(model, adamw(model))


@pattern
def fsdp1_original_parameters(line, hook):
    model = fsdp1(gpt(), use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    line(model)
    return train(model, adamw(model))


@pattern
def fsdp1_no_sync_and_clipping(line, hook):
    model = fsdp1(gpt(), use_orig_params=True)
    line(model)
    optimizer, losses = adamw(model), []
    for x, y in batches(n_rows=8):
        (x, last_x), (y, last_y) = x.chunk(2), y.chunk(2)
        with model.no_sync():
            first = model(x, y) / 2
            first.backward()
        last = model(last_x, last_y) / 2
        last.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(first.item() + last.item())
    return losses


@pattern(tolerance=2e-2)
def fsdp1_mixed_precision(line, hook):
    model = fsdp1(
        gpt(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    )
    line(model)
    return train(model, adamw(model))


# ---- each of them three times ----


def runs(function):
    """Losses of a pattern without tagc, with all values sent, and with tagc's defaults."""
    import tagc.torch as tagc

    def hook(**options):
        return lambda model: (tagc.ddp_state(model, verbose=False, **options), tagc.ddp_hook)

    yield function(lambda model: None, lambda model: (model.process_group, default_hooks.allreduce_hook))
    for options in {"sparsity": 0}, {}:
        yield function(lambda model: tagc.compress(model, verbose=False, **options), hook(**options))


def problem_of(function, tolerance):
    """What is wrong with a pattern on this rank, or nothing."""
    try:
        dense, everything, defaults = runs(function)
    except Exception:
        return traceback.format_exc()
    for i, (one, other) in enumerate(zip(dense, everything, strict=True)):
        if not abs(one - other) <= tolerance * abs(one):
            return f"at sparsity 0 loss {i} is {other:.7f}, without tagc {one:.7f}"
    for name, losses in ("without tagc", dense), ("with tagc's defaults", defaults):
        if not sum(losses[-2:]) < 0.97 * sum(losses[:2]):  # two, where steps take turns
            return f"{name} the loss does not fall: {', '.join(f'{loss:.4f}' for loss in losses)}"
    return None


def main():
    parser, names = argparse.ArgumentParser(description=__doc__.split("\n")[0]), []
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of patterns, with * (all)")
    add_device(parser)
    arguments = parser.parse_args()
    for wanted in arguments.patterns:
        names += fnmatch.filter(PATTERNS, wanted)
        if not fnmatch.filter(PATTERNS, wanted):
            sys.exit(f"patterns.py: no pattern is called {wanted}; there are {', '.join(PATTERNS)}")
    start_on(arguments.device, timeout=datetime.timedelta(seconds=120))
    n_failed = 0
    for name in names:
        begin = time.perf_counter()
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem_of(*PATTERNS[name]))
        wrong = [(rank, text) for rank, text in enumerate(problems) if text]
        n_failed += bool(wrong)
        if dist.get_rank() == 0:
            print(
                f"{name:34} {'ok' if not wrong else 'error':5}  {time.perf_counter() - begin:4.1f} s",
                flush=True,
            )
            for rank, text in wrong:
                print(f"    rank {rank}: {text}", flush=True)
    dist.barrier()  # let torch's own threads finish: they may still need Python
    dist.destroy_process_group()
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
