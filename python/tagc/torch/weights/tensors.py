"""What a WeightSync sends: tensors of a model by name, and which box of each this rank holds. A box is a
range of indices in each dimension."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from tagc._library import Error
from tagc.torch.exchange import internals

PIECE_ELEMS = 1 << 24  # of one message, so that threads share the work of a large tensor
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile() and of activation checkpoints


class Box(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def numel(self) -> int:
        """Returns how many elements it has."""
        return product(self.sizes)

    def common(self, other: Box) -> Box:
        """Returns what is in both; its sizes may be 0."""
        begin = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other))
        return Box(begin, tuple(max(0, end - first) for first, end in zip(begin, ends)))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Returns where it lies in an array of the other, which contains it."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(*self, other.offsets))

    def pieces(self) -> Iterator[Box]:
        """Yields boxes of whole rows, of at most PIECE_ELEMS elements where a row is not longer."""
        if not self.sizes:
            yield self
            return
        n_rows = self.sizes[0]
        step = max(1, PIECE_ELEMS // max(1, product(self.sizes[1:])))
        for at in range(0, n_rows, step):
            sizes = (min(step, n_rows - at), *self.sizes[1:])
            yield Box((self.offsets[0] + at, *self.offsets[1:]), sizes)


def product(numbers: Iterable[int]) -> int:
    found = 1
    for number in numbers:
        found *= number
    return found


@dataclasses.dataclass
class Entry:
    """One tensor. dtype: in which it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_sharded: bool
    box: Box | None  # what this rank holds; None: nothing

    def words(self) -> str:
        """Returns what all ranks must have alike."""
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def named_tensors(
    model: torch.nn.Module | Mapping[str, torch.Tensor], buffers: bool
) -> dict[str, torch.Tensor]:
    """Returns the parameters by name, tied ones once, and if asked for the buffers that checkpoints have."""
    if isinstance(model, Mapping):
        return dict(model)
    module: torch.nn.Module = internals.unwrapped(model)
    if isinstance(module, DistributedDataParallel):
        module = internals.unwrapped(module.module)
    if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
        raise Error(
            "unsupported",
            "the model is under FSDP1, whose parameters are views of flat ones: give WeightSync a dict "
            "of tensors "
            "by name, or use FSDP2",
        )
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    if buffers:
        in_checkpoints = module.state_dict().keys()
        found |= {name: b for name, b in module.named_buffers() if name in in_checkpoints}
    return {_plain_name(name): tensor for name, tensor in found.items()}


def _plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def entries_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> list[Entry]:
    """Returns an entry per tensor, in the order of names, so that ranks need not build a model in the same
    order. dtype: in which floating-point numbers travel; None: in their own."""
    entries = []
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor):
            raise Error("argument", f"{name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise Error("unsupported", f"{name} is not a plain tensor in memory (meta, sparse or quantized)")
        travels = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        entries.append(
            Entry(name, tuple(tensor.shape), travels, isinstance(tensor, DTensor), box_of(name, tensor))
        )
    if not entries:
        raise Error("argument", "the model has no parameters")
    return entries


def box_of(name: str, tensor: torch.Tensor) -> Box | None:
    """Returns what of the tensor this rank holds; None if nothing."""
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(tuple(offsets), tuple(sizes))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for i, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:  # strided or partial
            raise Error("unsupported", f"{name} is placed as {placement}, must be as Shard or Replicate")
        chunk = -(-sizes[placement.dim] // tensor.device_mesh.size(i))
        begin = min(coordinate[i] * chunk, sizes[placement.dim])
        offsets[placement.dim] += begin
        sizes[placement.dim] = min(chunk, sizes[placement.dim] - begin)
    if tuple(tensor.to_local().shape) != tuple(sizes):
        raise Error(
            "unsupported",
            f"{name}: this rank holds {tuple(tensor.to_local().shape)} of it, and torch's even sharding "
            f"gives it "
            f"{tuple(sizes)}",
        )
    return Box(tuple(offsets), tuple(sizes)) if product(sizes) else None


def local(entry: Entry, tensor: Any) -> torch.Tensor:
    """Returns what this rank holds of a tensor, which must be as it was when the entry was made."""
    is_sharded = isinstance(tensor, DTensor)
    if tuple(tensor.shape) != entry.shape or is_sharded != entry.is_sharded:
        raise Error(
            "state",
            f"{entry.name} has changed: it was {'sharded, ' if entry.is_sharded else ''}{entry.shape}, "
            f"and is "
            f"{'sharded, ' if is_sharded else ''}{tuple(tensor.shape)} (FSDP2: call model.reshard() first)",
        )
    held: torch.Tensor = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held
