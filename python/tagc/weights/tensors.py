"""What a WeightSync sends: tensors of a model by name, and which box of each this rank holds. A box is a
range of indices in each dimension."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tagc._library import Error
from tagc.torch.extension import unwrapped

PIECE_ELEMS = 1 << 23  # of one message: threads share a large tensor, and a receiver holds one at a time
_STRIP_ELEMS = 1 << 22  # of a matrix that is computed with in fp32
# of torch.compile(), of activation checkpoints, and of FSDP1
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Memory(NamedTuple):
    """Where a tensor lies on this rank. Tied tensors have equal ones."""

    device: torch.device
    begin: int  # an address
    dims: tuple[tuple[int, int], ...]  # stride in bytes and size of each that has more than one index
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor, if it is sharded

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory | None:
        """Returns None if it has no memory."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        held = tensor.detach()
        held = held.to_local() if isinstance(held, DTensor) else held
        storage, width = held.untyped_storage().data_ptr(), held.itemsize
        dims = tuple((step * width, n) for step, n in zip(held.stride(), held.shape) if n != 1)
        begin = storage + int(held.storage_offset()) * width
        return cls(held.device, begin, dims, held.dtype, tuple(tensor.shape)) if storage else None

    @property
    def end(self) -> int:
        """Returns the address behind it; at most begin if this rank holds nothing."""
        if any(n == 0 for _, n in self.dims):
            return self.begin
        return self.begin + sum(step * (n - 1) for step, n in self.dims) + self.dtype.itemsize

    def shares_elements(self) -> bool:
        """Returns whether some of its elements are the same memory, as in an expanded tensor, or may be."""
        end = self.dtype.itemsize
        for step, n in sorted(self.dims):
            if step < end:
                return True
            end += step * (n - 1)
        return False

    def overlaps(self, other: Memory) -> bool:
        """Returns whether both have some byte of memory. They may lie between each other's elements."""
        first = min(self.begin, other.begin)
        taken = torch.zeros(max(self.end, other.end) - first, dtype=torch.bool)

        def bytes_of(memory: Memory) -> torch.Tensor:
            steps, sizes = zip(*((step, n) for step, n in (*memory.dims, (1, memory.dtype.itemsize)) if step))
            return taken.as_strided(sizes, steps, memory.begin - first)

        bytes_of(self).fill_(True)
        return bool(bytes_of(other).any())


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


def strips(n_rows: int, n_columns: int) -> Iterator[slice]:
    """Yields rows of a matrix, some at a time, so that a copy of them in fp32 is small."""
    step = max(1, _STRIP_ELEMS // max(1, n_columns))
    for at in range(0, n_rows, step):
        yield slice(at, min(n_rows, at + step))


def product(numbers: Iterable[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


class Part(NamedTuple):
    """Memory of this rank that has a box of a tensor: all of it from these indices on."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """A tensor whose elements lie in parts of others on this rank, such as rows of a packed weight, or of
    which it holds a shard, or nothing. Parts of a receiver may have the same box: both are written.
    keeps_dtype: travels as it is, in whichever dtype others travel."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...] = ()
    keeps_dtype: bool = False


Tensors = Mapping[str, "torch.Tensor | Parts"]
Model = torch.nn.Module | Tensors | Callable[[], Tensors]


@dataclasses.dataclass
class Entry:
    """One tensor. dtype: in which it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_sharded: bool
    boxes: tuple[Box, ...]  # what this rank holds
    held: torch.dtype  # in which this rank has it

    def form(self) -> str:
        """Returns what must stay as it was when the WeightSync was made."""
        text = f"{self.shape} {self.held}"
        return f"sharded, {text}, here {list(self.boxes)}" if self.is_sharded else text

    def words(self) -> str:
        """Returns what all ranks must have alike."""
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def named_tensors(model: Model, buffers: bool) -> dict[str, torch.Tensor | Parts]:
    """Returns the tensors by name, tied ones once, under their first name. Of a module these are its
    parameters, and if asked for the buffers that checkpoints have."""
    if callable(model) and not isinstance(model, torch.nn.Module):
        model = model()
    named: dict[str, torch.Tensor | Parts] = {}
    seen = set()
    for name, tensor in (model if isinstance(model, Mapping) else _of_module(model, buffers)).items():
        if not isinstance(name, str) or not isinstance(tensor, (torch.Tensor, Parts)):
            raise Error("argument", f"{name} is a {type(tensor).__name__}, must be a tensor by name")
        for held in memories(tensor):
            if type(held).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # it may have no memory
                where = "here " if isinstance(tensor, DTensor) else ""
                kind = type(held).__name__
                raise Error("unsupported", f"{name} is {where}a {kind}, must be a plain tensor")
        memory = Memory.of(tensor) if isinstance(tensor, torch.Tensor) else None
        if memory is None or memory not in seen:
            named[name] = tensor
        seen.add(memory)
    return named


def memories(tensor: torch.Tensor | Parts) -> list[torch.Tensor]:
    """Returns what this rank holds of a tensor, as plain tensors."""
    if isinstance(tensor, Parts):
        return [part.tensor.detach() for part in tensor.parts]
    held = tensor.detach()
    return [held.to_local() if isinstance(held, DTensor) else held]


def _of_module(model: torch.nn.Module, buffers: bool) -> dict[str, torch.Tensor]:
    module: torch.nn.Module = unwrapped(model)
    if isinstance(module, DistributedDataParallel):
        module = unwrapped(module.module)
    if not isinstance(module, torch.nn.Module):
        raise Error("argument", f"model is {model!r:.80}, must be a module or a dict of tensors by name")
    if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
        raise Error(
            "unsupported",
            "the model is under FSDP1, whose parameters are views of flat ones: give WeightSync a dict "
            "of tensors "
            "by name, or use FSDP2",
        )
    named: dict[str, torch.Tensor] = {plain_name(name): p for name, p in module.named_parameters()}
    if buffers:  # state_dict() drops some wrappers from names, and named_buffers() none
        in_checkpoints = set(map(plain_name, module.state_dict()))
        held = {plain_name(name): buffer for name, buffer in module.named_buffers()}
        named |= {name: buffer for name, buffer in held.items() if name in in_checkpoints}
    return named


def plain_name(name: str) -> str:
    """Returns the name without what torch.compile(), activation checkpoints and FSDP put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def entries_of(tensors: Tensors, dtype: torch.dtype | None) -> list[Entry]:
    """Returns an entry per tensor, in the order of names, so that ranks need not build a model in the same
    order. dtype: in which floating-point numbers travel; None: in their own."""
    entries = []
    for name in sorted(tensors):
        tensor = tensors[name]
        for held in [tensor] if isinstance(tensor, torch.Tensor) else memories(tensor):
            is_lazy = held.is_conj() or held.is_neg()
            if held.layout is not torch.strided or held.is_meta or held.is_quantized or is_lazy:
                raise Error(
                    "unsupported",
                    f"{name} is not a plain tensor in memory (meta, sparse, quantized or conjugate)",
                )
        travels = tensor.dtype
        keeps_dtype = isinstance(tensor, Parts) and tensor.keeps_dtype
        if dtype is not None and travels.is_floating_point and not keeps_dtype:
            travels = dtype
        entries.append(_entry(name, tensor, travels))
    if not entries:
        raise Error("argument", "the model has no parameters")
    _check_apart(tensors)
    return entries


def _entry(name: str, tensor: torch.Tensor | Parts, travels: torch.dtype) -> Entry:
    is_sharded = not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor)
    return Entry(name, tuple(tensor.shape), travels, is_sharded, boxes_of(name, tensor), tensor.dtype)


def _check_apart(tensors: Tensors) -> None:
    """Raises an Error if two tensors overlap in memory: a change of both would be made twice."""
    placed = [
        (name, memory)
        for name, tensor in tensors.items()
        for held in ([tensor] if isinstance(tensor, torch.Tensor) else memories(tensor))
        if (memory := Memory.of(held)) is not None
    ]
    beside: list[tuple[str, Memory]] = []
    for name, memory in sorted(placed, key=lambda item: (str(item[1].device), item[1].begin)):
        beside = [o for o in beside if o[1].device == memory.device and o[1].end > memory.begin]
        for other, theirs in beside if memory.end > memory.begin else ():
            if memory.overlaps(theirs):
                names = " and ".join(sorted((name, other)))
                raise Error(
                    "argument", f"{names} overlap in memory, and are not the same tensor: give one of them"
                )
        beside.append((name, memory))


def boxes_of(name: str, tensor: torch.Tensor | Parts) -> tuple[Box, ...]:
    """Returns what of the tensor this rank holds, a box for each of memories()."""
    if isinstance(tensor, Parts):
        boxes = tuple(Box(tuple(part.offsets), tuple(part.tensor.shape)) for part in tensor.parts)
        for box, part in zip(boxes, tensor.parts):
            n_dims = {len(tensor.shape), len(box.offsets), len(box.sizes)}
            if len(n_dims) > 1 or any(not 0 <= a <= a + n <= m for a, n, m in zip(*box, tensor.shape)):
                raise Error("argument", f"{name} is {list(tensor.shape)}, and has no {box}")
            if part.tensor.dtype != tensor.dtype:
                raise Error(
                    "argument", f"{name} is of {tensor.dtype}, and a part of it of {part.tensor.dtype}"
                )
        return boxes
    if not isinstance(tensor, DTensor):
        return (Box((0,) * tensor.ndim, tuple(tensor.shape)),)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    box = shard_of(name, tensor.shape, mesh.shape, coordinate, tensor.placements)
    if tuple(tensor.to_local().shape) != box.sizes:
        raise Error(
            "unsupported",
            f"{name}: this rank holds {tuple(tensor.to_local().shape)} of it, and torch's even sharding "
            f"gives it {box.sizes}",
        )
    return (box,) if box.numel() else ()


def shard_of(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[object],
) -> Box:
    """Returns what a rank has of a tensor, by its coordinate in a mesh: shards are those of torch.chunk().
    Where tensor or expert parallelism has divided a dimension, FSDP2 divides each of its shards, and calls
    that strided, since its axis comes first in the mesh."""
    offsets, sizes = [0] * len(shape), list(shape)
    axes: list[tuple[bool, int, int]] = []  # whether strided, of the mesh, of the tensor
    kinds = [(type(placement).__name__, getattr(placement, "dim", -1)) for placement in placements]
    for axis, (placement, (kind, dim)) in enumerate(zip(placements, kinds)):
        behind = product(mesh_shape[i] for i in range(axis + 1, len(kinds)) if kinds[i] == ("Shard", dim))
        is_strided = kind == "_StridedShard" and getattr(placement, "split_factor", 0) == behind
        if kind == "Shard" or is_strided:
            axes.append((is_strided, axis, dim))
        elif kind != "Replicate":  # partial, or strided otherwise
            raise Error(
                "unsupported",
                f"{name} is placed as {placement}, must be as Shard or Replicate: redistribute() it first",
            )
    for _, axis, dim in sorted(axes):
        chunk = -(-sizes[dim] // mesh_shape[axis])
        begin = min(coordinate[axis] * chunk, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(chunk, sizes[dim] - begin)
    return Box(tuple(offsets), tuple(sizes))


def local(entry: Entry, tensor: torch.Tensor | Parts) -> list[tuple[Box, torch.Tensor]]:
    """Returns what this rank holds of a tensor, which must be as it was when the entry was made."""
    now = _entry(entry.name, tensor, entry.dtype)
    if now.form() != entry.form():
        hint = " (FSDP2: call model.reshard() first)" if entry.is_sharded > now.is_sharded else ""
        raise Error("state", f"{entry.name} has changed: it was {entry.form()}, and is {now.form()}{hint}")
    return list(zip(entry.boxes, memories(tensor)))
