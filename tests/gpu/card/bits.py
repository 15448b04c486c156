"""Training on one GPU as two hosts of two GPUs: the codec on the device against the codec on the host, bit
for bit. Four processes share the card, and gloo joins them.

    python tests/gpu/card/bits.py --load build-gpu/libtagc-load.so
    python tests/gpu/card/bits.py --fake      # on the fake runtime (tests/python/fake_device.py)
    python tests/gpu/card/bits.py --trace t.json.gz --kinds fsdp2 --conditions "8 connections"

Each condition is a driver at its worst in one way: some hardware queues, kernels that spin beside each
backward pass as NCCL's do, no cache of memory, launches that wait. --load: the library of bench/gpu_load.h,
without which nothing spins. --trace: what torch's profiler sees of rank 0's last step with the codec on the
device. One line per case; the last line is the verdict."""

import argparse
import contextlib
import ctypes
import os
import pathlib
import sys
import time
import traceback

import forks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tagc.torch

TESTS = pathlib.Path(__file__).resolve().parents[2] / "python"
N_RANKS, N_HOSTS = 4, 2
KINDS = ("fsdp2", "hsdp", "ddp", "between", "fsdp2-bf16", "fsdp2-delta4")
SPIN_BLOCKS, SPIN_NS = 32, 5 * 10**9


class Condition:
    """environment: of the processes. Where launches wait, only the host's codec works."""

    def __init__(self, name, environment=(), spins=False, waits=False):
        self.name, self.environment, self.spins, self.waits = name, dict(environment), spins, waits


# the most important first: a machine's time may end
CONDITIONS = (
    Condition("8 connections", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
    Condition("1 connection", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    Condition("8 connections, spinning kernels", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, spins=True),
    Condition("1 connection, spinning kernels", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, spins=True),
    Condition("no cache of memory", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    Condition("launches that wait", {"CUDA_LAUNCH_BLOCKING": "1"}, waits=True),
)


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm, self.mlp, self.out = nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def forward(self, x):
        return x + self.out(torch.tanh(self.mlp(self.norm(x))))


class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layers = nn.ModuleList([Block(n), Block(n)])
        self.head = nn.Linear(n, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---- devices ----


class Card:
    """The machine's own, with something that spins beside each backward pass."""

    def __init__(self, args, condition):
        torch.cuda.set_device(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # what reads such memory is to be seen
        self.device, self._load = torch.device("cuda", 0), None
        if condition.spins:
            self._load = ctypes.CDLL(args.load)
            self._load.tagc_load_spin.argtypes = [
                ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64,
            ]  # fmt: skip
            self._flag, self._number = torch.zeros(16, dtype=torch.int32).pin_memory(), 0
            self._stream = torch.cuda.Stream(priority=-1)

    def on(self, codec):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def beside(self):
        if self._load is None:
            yield
            return
        self._number += 1
        code = self._load.tagc_load_spin(
            self._stream.cuda_stream, SPIN_BLOCKS, self._flag.data_ptr(), self._number, SPIN_NS
        )
        assert code == 0, f"a launch failed with {code}"
        begin = time.monotonic()
        try:
            yield
        finally:
            self._flag[0] = self._number
        assert time.monotonic() - begin < 1e-9 * SPIN_NS, "the pass outlived what spins beside it"


class Fake:
    """The fake runtime's, new for each run. rank: of its seed."""

    device = torch.device("cpu")

    def __init__(self, args, condition):
        sys.path.insert(0, str(TESTS))
        self._seed, self._manners = 1000 * args.seed + int(os.environ["RANK"]), condition.environment

    @contextlib.contextmanager
    def on(self, codec):
        from fake_device import Installed

        self._seed += 10
        with Installed(self._seed, kernels=codec != "host") as device:
            yield
        device.check()

    def beside(self):
        return contextlib.nullcontext()


# ---- a run ----


def wrapped(kind, n, device):
    """Returns a model, and what compress() is given for it."""
    torch.manual_seed(0)
    model = Model(n).to(device)
    if kind == "ddp":
        return DistributedDataParallel(model), {"hosts": N_HOSTS}
    mesh = init_device_mesh(device.type, (N_HOSTS, N_RANKS // N_HOSTS), mesh_dim_names=("host", "inside"))
    fully, given = {}, {"hosts": N_HOSTS}
    if kind == "hsdp":
        fully["mesh"], given = mesh, {}
    elif kind == "between":
        fully["mesh"], given = mesh["inside"], {"between": mesh["host"].get_group()}
    elif kind == "fsdp2-bf16":
        fully["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    elif kind == "fsdp2-delta4":
        given["parameters"] = "delta4"
    for module in (*model.layers, model):
        fully_shard(module, **fully)
    for module in model.modules():
        if isinstance(module, FSDPModule) and hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model, given


@contextlib.contextmanager
def tracing(args, codec, step):
    if not args.trace or codec != "device" or step + 1 < args.steps or os.environ["RANK"] != "0":
        yield
        return
    with torch.profiler.profile() as profile:
        yield
    profile.export_chrome_trace(args.trace)


def train(card, args, kind, codec, condition):
    """Returns losses, this rank's parameters, and what it has not sent."""
    model, given = wrapped(kind, args.width, card.device)
    handle = tagc.torch.compress(
        model, sparsity=0.9, layers="all", verbose=False, options=tagc.torch.Options(codec=codec), **given
    )
    assert codec is None or handle.codec == codec, f"the codec is on the {handle.codec}"
    assert not (condition.waits and handle.codec == "device"), "kernels where launches wait"
    optimizer = torch.optim.AdamW(handle.param_groups(lr=1e-2))
    generator, losses = torch.Generator().manual_seed(int(os.environ["RANK"])), []
    for step in range(args.steps):
        x, y = (torch.randn(6, n, generator=generator).to(card.device) for n in (args.width, 8))
        with tracing(args, codec, step):
            loss = ((model(x) - y) ** 2).mean()
            # the first launch of a kernel may wait until the device is idle: not beside what spins
            with card.beside() if step else contextlib.nullcontext():
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    handle.synchronize()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in (p.detach() for p in model.parameters())]
    found = [torch.tensor(losses, dtype=torch.float64), *(p.cpu().clone() for p in local)]
    (saved,) = handle.state_dict().values()
    found += [saved["residuals"][name].cpu() for name in sorted(saved["residuals"])]
    handle.close()
    return found


def n_different(one, other):
    same = len(one) == len(other) and [
        a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        for a, b in zip(one, other)
    ]
    return same.count(False) if same else 1


def try_to_train(card, args, kind, codec, condition):
    """Returns what train() does; None where it fails: the other kinds are tried all the same."""
    try:
        with card.on(codec):
            return train(card, args, kind, codec, condition)
    except Exception:
        sys.stdout.write(f"rank {os.environ['RANK']}: {kind}, codec {codec}: {traceback.format_exc()}\n")
        return None


def compare(rank, args, condition, kinds):
    """The host's codec where launches wait; else both."""
    card = (Fake if args.fake else Card)(args, condition)
    n_wrong = 0
    for kind in kinds:
        begin, results = time.monotonic(), []
        for codec in (None,) if condition.waits else ("host", "device"):
            if rank == 0:
                print(
                    f"at {time.time() - args.began:.0f} s: {condition.name}: {kind}, codec {codec}",
                    flush=True,
                )
            results.append(try_to_train(card, args, kind, codec, condition))
        wrong = torch.ones(2, dtype=torch.int64)
        if None not in results:
            n_infinite = int(not results[0][0].isfinite().all())
            wrong = torch.tensor([n_different(results[0], results[-1]), n_infinite])
        torch.distributed.all_reduce(wrong)
        n_wrong += int(wrong.sum())
        if rank == 0:
            how = "the host's codec" if condition.waits else "same bits"
            print(
                f"{condition.name}: {kind:12} {how if not wrong.sum() else f'DIFFERENT: {wrong.tolist()}'}, "
                f"{time.monotonic() - begin:.1f} s",
                flush=True,
            )
    assert not n_wrong, f"{n_wrong} arrays or losses are wrong"


def chosen(args):
    conditions = [c for c in CONDITIONS if not args.conditions or c.name in args.conditions]
    if args.fake:  # its one thread runs a kernel to its end; torch's memory is the processor's
        conditions = [
            c for c in conditions if not c.spins and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in c.environment
        ]
    return [c for c in conditions if args.load or not c.spins]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--fake", action="store_true", help="the fake runtime, small")
    add("--load", help="libtagc-load.so")
    add("--trace", metavar="FILE", help="a trace for chrome://tracing, .json or .json.gz")
    add("--kinds", nargs="+", choices=KINDS, default=KINDS)
    add("--conditions", nargs="+", choices=[c.name for c in CONDITIONS])
    add("--width", type=int, help="of the model (1024; fake: 16)")
    add("--steps", type=int, default=4)
    add("--seed", type=int, default=1)
    add("--seconds", type=float, default=140, help="for everything")
    args = parser.parse_args()
    args.began = time.time()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, on {os.cpu_count()} cores", flush=True)
    args.width = args.width or (16 if args.fake else 1024)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    wrong, skipped, conditions = [], [], chosen(args)
    most_s = args.seconds * (0.42 if len(conditions) > 1 else 1)
    for number, condition in enumerate(conditions):
        left_s = args.seconds - (time.time() - args.began)
        if left_s < 5:
            skipped.append(condition.name)
            continue
        kinds = args.kinds if number < 2 else [kind for kind in args.kinds if kind in KINDS[:3]]
        problem = forks.run(
            compare, N_RANKS, min(left_s, most_s), condition.environment, (args, condition, kinds)
        )
        if problem:
            wrong.append(f"{condition.name}: {problem}")
    for line in wrong:
        print(f"WRONG: {line}")
    if skipped:
        print(f"no time was left for: {'; '.join(skipped)}")
    print("bits: " + ("WRONG" if wrong else "the same in all that was tried"), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
