"""What the cells of the two matrices share (test_two_at_once.py, test_one_rank_differs.py): a small model in
each wrapper, over one rank per host or hosts of two ranks, with tagc or without. Nothing here knows how tagc
works: a cell calls compress(), handles and torch, and looks at gradients. Kinds of annexes are in their own
tests (test_<annex>_cells.py), which add them here.

With EXACT every value travels as it is, so torch's own sums are the oracle. With DEFAULT they are chosen and
rounded, and what a handle does beside another one must be what it does alone, bit for bit."""

import contextlib
import functools
import gc
import inspect
import itertools

import torch
import torch.distributed as dist
from torch import nn
from wrappers import HAS_FSDP1

N, N_LAYERS, N_STEPS = 64, 3, 3
EXACT, DEFAULT = {"sparsity": 0, "values": "fp32"}, {"sparsity": 0.9}
TIMEOUT_S = 100.0  # of compress()
TOLERANCE = 1e-5  # of a tensor's norm
STRIDE = 3  # of sample(): it divides few numbers of cells that a name has
SHAPES = {"1x2": 2, "2x2": 4}  # ranks per host x hosts -> ranks

# between: FSDP2 within each host, whose sums tagc adds up over hosts; torch alone has HSDP for that
KINDS = ["ddp", "ddp that finds unused", "fsdp2", "hsdp", "between", "replicate", *["fsdp1"] * HAS_FSDP1]
GATHERING = {"fsdp2", "hsdp", "between", "fsdp1"}  # whose parameters torch gathers, over its own groups
ALONE = {"between": "hsdp"}  # kind -> that of torch alone, where it is another one


class Stack(nn.Module):
    """Layers of one size. after: called with the number of a layer and its output; what it returns goes on.
    order: of the layers."""

    def __init__(self, seed=1, spare=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(N, N, dtype=dtype) for _ in range(N_LAYERS)])
        self.spare = nn.Linear(N, N, dtype=dtype) if spare else None  # in use where a cell says so
        self.after, self.order, self.uses_spare, self.dtype = None, range(N_LAYERS), False, dtype

    def forward(self, x):
        x = x.to(self.dtype)
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
            x = x if self.after is None else self.after(i, x)
        return self.spare(x) if self.uses_spare else x


@functools.cache
def mesh(shape, names):
    """Of a process's ranks; each makes process groups, which torch has no safe way to end."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def groups():
    """Two more groups of all ranks, and one of the user's own."""
    return [dist.new_group() for _ in range(3)]


def wrapped(kind, model, group=None):
    """The model in a wrapper of that kind, over all ranks. group: of these, by which the wrapper sums, for
    kinds that take one."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    n = dist.get_world_size()
    if kind.startswith("ddp"):
        return DistributedDataParallel(
            model,
            bucket_cap_mb=0.02,
            process_group=group,
            find_unused_parameters=kind != "ddp",
            init_sync=False,
        )
    if kind == "fsdp1":
        model.layers = nn.ModuleList([fsdp1(layer, group) for layer in model.layers])
        return fsdp1(model, group)
    if kind in ("hsdp", "between"):
        whole = mesh((2, n // 2), ("hosts", "within"))
        of_model = whole if kind == "hsdp" else whole["within"]
    elif group is not None:
        of_model = DeviceMesh.from_group(group, "cpu")
    else:
        of_model = mesh((n,), ("all",))
    wrap = replicate if kind == "replicate" else fully_shard
    # torch 2.9's replicate() takes none of one dimension, and all ranks by default
    over = {"mesh": of_model} if "mesh" in inspect.signature(wrap).parameters else {}
    for layer in [*model.layers, *filter(None, [model.spare])]:
        wrap(layer, **over)
    wrap(model, **over)
    return model


def fsdp1(module, group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(
        module, use_orig_params=True, process_group=group, device_id=torch.device("cpu")
    )


def compress(kind, model, *optimizers, **options):
    import tagc.torch as tagc

    n = dist.get_world_size()
    own = {"verbose": False, "layers": "all", "timeout_s": TIMEOUT_S}
    if kind == "between":
        own["between"] = mesh((2, n // 2), ("hosts", "within"))["hosts"]
    elif n > 2:
        own["hosts"] = 2
    return tagc.compress(model, *optimizers, **tagc.grouped(own | options))


def batch(rank, step, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + 100 * step + rank)
    return torch.randn(3, N, generator=generator)


def loss_of(y):
    return y.float().square().mean()


def whole(tensor):
    """A copy of all of a parameter or gradient."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


class Trained:
    """A wrapped model with its optimizer, and its handle where it has one. options: of compress(); None:
    torch alone. group: of wrapped()."""

    def __init__(self, kind, options, seed=1, group=None, made=None, **of_model):
        self.plain, self.kind, self.group = Stack(seed, **of_model), kind, group
        self.model = self.wrap()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1) if made is None else made(self.model)
        self.handle = None
        if options is not None:
            self.compress(getattr(self.optimizer, "each", self.optimizer), options)
        self.gradients = []  # of each step

    def wrap(self):
        return wrapped(self.kind, self.plain, self.group)

    def compress(self, optimizer, options):
        self.handle = compress(self.kind, self.model, optimizer, **options)

    def parameters(self):
        """(name, parameter) as the optimizer has them."""
        return [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in self.model.named_parameters()]

    def note(self):
        """Keeps the gradients of a pass, to be compared. Collective."""
        if self.kind == "fsdp1":
            self.gradients += _whole_of_fsdp1(self.model)
            return
        self.gradients += [whole(p.grad) for _, p in self.parameters() if p.grad is not None]

    def step(self):
        """Of the optimizer, with its gradients noted. Collective."""
        self.note()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, step, rank=None):
        rank = dist.get_rank() if rank is None else rank
        loss_of(self.model(batch(rank, step))).backward()

    def exchanges(self, yes):
        """Within: a micro-step, that is exchanged or not."""
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(yes)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if yes else self.model.no_sync()

    def close(self):
        if self.handle is not None:
            self.handle.close()


OF_ANNEXES = {}  # kind -> its Trained


def training(kind, options, *arguments, **about):
    """A Trained of that kind, or as torch alone has it."""
    kind = ALONE.get(kind, kind) if options is None else kind
    return OF_ANNEXES.get(kind, Trained)(kind, options, *arguments, **about)


def _whole_of_fsdp1(model):
    """A rank has pieces of gradients, one after the other: all of these, rank by rank."""
    mine = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, mine.numel())
    rows = [torch.zeros(max(sizes)) for _ in sizes]
    dist.all_gather(rows, torch.cat([mine, mine.new_zeros(max(sizes) - mine.numel())]))
    return [row[:size].clone() for row, size in zip(rows, sizes)]


def check_close(found, expected, about):
    assert len(found) == len(expected), (about, len(found), len(expected))
    for i, (one, other) in enumerate(zip(found, expected)):
        assert one.shape == other.shape, (about, i)
        worst = ((one - other).norm() / other.norm().clamp(min=1e-12)).item()
        assert worst < TOLERANCE, (about, f"tensor {i} of {len(found)}", worst)


def check_same_bits(found, expected, about):
    assert len(found) == len(expected), (about, len(found), len(expected))
    for i, (one, other) in enumerate(zip(found, expected)):
        assert torch.equal(one, other), (about, f"tensor {i} of {len(found)}", (one - other).norm().item())


def sample(cells, first):
    """The sample of the usual check: of the cells that have the same name, one, and of the next name's the
    next one. first: where that begins."""
    rows = [[*row] for _, row in itertools.groupby(cells, key=lambda cell: cell[0])]
    return [row[(first + STRIDE * i) % len(row)] for i, row in enumerate(rows)]


def run_each(rank, run, cells):
    """Runs cells one after the other. All ranks take part in all of them, so none goes on after a failure."""
    for cell in cells:
        if rank == 0:
            print(" x ".join(map(str, cell)), flush=True)  # a hang ends with its name
        try:
            run(cell)
        except BaseException as failure:
            raise AssertionError(f"in the cell {cell}: {type(failure).__name__}: {failure}") from failure
        gc.collect()
