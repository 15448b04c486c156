"""The arms of torch_bench.py: torch's own ways to communicate, and tagc's."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tagc.torch

BF16 = torch.bfloat16
DEFAULT_ARMS = "fsdp2,fsdp2-bf16,fsdp2-tagc,fsdp2-tagc-delta4,ddp,ddp-bf16,ddp-powersgd,ddp-tagc"
HOSTS, RANKS = "hosts", "ranks"  # dimensions of a mesh of hosts and of the ranks of each


class Arm:
    """name: what it is called; about: in words; wrap(model, ranks per host) -> (wrapped model, tagc's handle
    or None). reduce_bytes, gather_bytes: of an element, for torch's own. local: options of LocalSteps, which
    exchanges at every step here; then wrap is None."""

    def __init__(self, name, about, wrap, reduce_bytes=4, gather_bytes=4, local=None):
        self.name, self.about, self.wrap, self.local = name, about, wrap, local
        self.reduce_bytes, self.gather_bytes = reduce_bytes, gather_bytes
        self.wrapped = self.handle = self.optimizer = self.rank_memory_bytes = None
        self.iterations = []

    @property
    def needs_hosts(self):
        """Whether it has a mesh of hosts with several ranks each."""
        return self.name.startswith(("hsdp", "between"))

    def must_send(self, n_params, n_root, world_size, ranks_per_host):
        """Bytes through a host's card in a step by formula, for torch's own: what the textbook's collectives
        send there, whose rings leave a host once. None for others."""
        if self.handle or "sgd" in self.name:
            return None
        share = (world_size - 1) / world_size
        if self.name.startswith("ddp"):
            return 2 * n_params * share * self.reduce_bytes
        if self.name.startswith("hsdp"):  # between hosts it is an all-reduce of gradients
            return 2 * n_params * (1 - ranks_per_host / world_size) * self.reduce_bytes
        n_gathered = 2 * n_params - n_root  # the root's parameters stay after forward
        return share * (n_params * self.reduce_bytes + n_gathered * self.gather_bytes)


def _shard(model, **options):
    for block in model.transformer.h:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _compressed(model, options):
    """Returns the model, and the handle where there are options."""
    return model, tagc.torch.compress(
        model, verbose=False, **tagc.torch.grouped(options)
    ) if options else None


def _mesh(ranks_per_host):
    shape = dist.get_world_size() // ranks_per_host, ranks_per_host
    return init_device_mesh("cpu", shape, mesh_dim_names=(HOSTS, RANKS))


def _policy(policy):
    return {"mp_policy": policy} if policy else {}


def _fsdp2_of(policy=None, flat=False, **compress):
    def wrap(model, ranks_per_host):
        if flat:
            compress["hosts"] = dist.get_world_size()
        return _compressed(_shard(model, **_policy(policy)), compress)

    return wrap


def _hsdp_of(policy=None, **compress):
    def wrap(model, ranks_per_host):
        return _compressed(_shard(model, mesh=_mesh(ranks_per_host), **_policy(policy)), compress)

    return wrap


def _between_of(policy=None, **compress):
    def wrap(model, ranks_per_host):
        mesh = _mesh(ranks_per_host)
        sharded = _shard(model, mesh=mesh[RANKS], **_policy(policy))
        return _compressed(sharded, {"between": mesh[HOSTS].get_group(), **compress})

    return wrap


def _ddp_of(hook=None, state=lambda: None, bucket_mb=None, **compress):
    def wrap(model, ranks_per_host):
        model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        if hook:
            model.register_comm_hook(state(), hook)
        return _compressed(model, compress)

    return wrap


def bf16_hook(process_group, bucket):
    """torch refuses its hook by name where the backend is gloo, which has bf16 all the same."""
    return default_hooks.bf16_compress_hook(process_group, bucket)


def _powersgd():
    return powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def arms_of(sparsity, threads):
    both = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    own = {"sparsity": sparsity, "threads": threads}
    every = {"sparsity": 0, "values": "int4", "mild": "int4", "threads": threads}
    dense = {"exchange": "dense", "mild": "dense"}
    made = (
        Arm("fsdp2", "torch's own, fp32", _fsdp2_of()),
        Arm("fsdp2-bf16", "torch's own, bf16 parameters and gradients", _fsdp2_of(both), 2, 2),
        Arm(
            "fsdp2-bf16-reduce",
            "torch's own, bf16 gradients",
            _fsdp2_of(MixedPrecisionPolicy(reduce_dtype=BF16)),
            2,
        ),
        Arm(
            "fsdp2-tagc-dense",
            "all by tagc's connection, nothing compressed, fp32",
            _fsdp2_of(parameters="fp32", **dense),
        ),
        Arm(
            "fsdp2-tagc-dense-bf16",
            "all by tagc's connection, nothing compressed, bf16",
            _fsdp2_of(both, parameters="bf16", **dense),
        ),
        Arm(
            "fsdp2-tagc-dense-lossless-bf16",
            "as fsdp2-tagc-dense-bf16, parameters in fewer bits without loss",
            _fsdp2_of(both, parameters="lossless", **dense),
        ),
        Arm("fsdp2-tagc", "gradients compressed", _fsdp2_of(**own)),
        Arm(
            "fsdp2-tagc-delta4",
            "gradients compressed, parameters as 4-bit deltas",
            _fsdp2_of(parameters="delta4", **own),
        ),
        Arm(
            "fsdp2-tagc-bf16",
            "gradients compressed, parameters whole, computing in bf16",
            _fsdp2_of(both, parameters="bf16", **own),
        ),
        Arm(
            "fsdp2-tagc-lossless-bf16",
            "as fsdp2-tagc-bf16, parameters in fewer bits without loss",
            _fsdp2_of(both, parameters="lossless", **own),
        ),
        Arm(
            "fsdp2-tagc-delta4-bf16",
            "gradients compressed, parameters as 4-bit deltas, computing in bf16",
            _fsdp2_of(both, parameters="delta4", **own),
        ),
        Arm(
            "fsdp2-tagc-4bit-bf16",
            "every value of gradients in 4 bits, parameters whole, computing in bf16",
            _fsdp2_of(both, parameters="bf16", **every),
        ),
        Arm(
            "fsdp2-tagc-4bit-delta4-bf16",
            "every value of gradients in 4 bits, parameters as 4-bit deltas, computing in bf16",
            _fsdp2_of(both, parameters="delta4", **every),
        ),
        Arm(
            "fsdp2-flat-delta4-bf16",
            "as fsdp2-tagc-delta4-bf16, each rank taken for a host",
            _fsdp2_of(both, flat=True, parameters="delta4", **own),
        ),
        Arm(
            "fsdp2-flat-4bit-delta4-bf16",
            "as fsdp2-tagc-4bit-delta4-bf16, each rank taken for a host",
            _fsdp2_of(both, flat=True, parameters="delta4", **every),
        ),
        Arm("hsdp-bf16", "torch's own, sharded within hosts, bf16", _hsdp_of(both), 2, 2),
        Arm(
            "hsdp-tagc-bf16", "sharded within hosts, gradients compressed between them", _hsdp_of(both, **own)
        ),
        Arm(
            "hsdp-tagc-4bit-bf16",
            "sharded within hosts, every value of gradients in 4 bits between them",
            _hsdp_of(both, **every),
        ),
        Arm("between-tagc-bf16", "the same by a mesh in each host and between=", _between_of(both, **own)),
        Arm("ddp", "torch's own, fp32", _ddp_of()),
        Arm("ddp-bf16", "torch's bf16_compress_hook", _ddp_of(bf16_hook), 2),
        # In one bucket: over gloo the exchanges of several run in another order on each rank, and fail.
        Arm(
            "ddp-powersgd",
            "torch's PowerSGD hook, rank 1, one bucket",
            _ddp_of(powerSGD_hook.powerSGD_hook, _powersgd, bucket_mb=100_000),
        ),
        Arm("ddp-tagc", "gradients compressed", _ddp_of(**own)),
        Arm("ddp-tagc-4bit", "every value of gradients in 4 bits", _ddp_of(**every)),
        Arm("local", "local steps, every value in 4 bits", None, local={"threads": threads}),
        Arm("local-2bit", "local steps, selected values in 2 bits", None, local=own | {"values": "int2"}),
    )
    return {arm.name: arm for arm in made}
