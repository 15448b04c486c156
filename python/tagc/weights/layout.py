"""Where the tensors of a store lie in a receiver's model: under other names, in rows of packed weights, in
shards of tensor parallelism, in the experts of one rank.

The store has tensors as checkpoints of Hugging Face have them: whole, and none packed. An engine's rank has
some of their elements, where its loaders put them. Of vLLM 0.33 and SGLang 0.5.23, whose layers have the same
attributes, engine_layout() reads from the modules which these are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tagc._library import Error
from tagc.weights.tensors import Model, Part, Parts, Tensors, memories, named_tensors

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Of an expert: first and second half of the first weight, and the second weight.
_EXPERT = re.compile(
    r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.(weight|weight_scale|weight_scale_inv)"
)
# Of quantised weights, one of each block of rows and columns.
_BLOCK_SCALES = "weight_scale_inv"
_HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}

# Name, shape and dtype of a tensor of the store. None: of whichever dtype the model has it.
Row = tuple[str, tuple[int, ...], torch.dtype | None]


class Target(NamedTuple):
    """A part of a tensor of the model, and the first index that it has of the store's."""

    tensor: str
    at: tuple[Any, ...]  # slices and numbers; (): all of it
    offsets: tuple[int, ...]


class Layout:
    """tensors: returns those of the model by name, each of whose elements some tensor of the store has.
    place: returns the places of a tensor of the store among these, by its name and shape: none if this rank
    has nothing of it; None if the model has no such tensor, which is an Error."""

    def __init__(
        self,
        tensors: Callable[[], Tensors],
        place: Callable[[Tensors, str, tuple[int, ...]], Sequence[Target] | None],
    ) -> None:
        self._tensors, self._place = tensors, place
        self._bound_at: list[int] = []

    def bind(self, rows: Iterable[Row], is_all: bool = True) -> dict[str, torch.Tensor | Parts]:
        """Returns the model's memory by names of the store. is_all: the rows have all that the model has.
        Error if one lacks what the other has."""
        tensors = self._tensors()
        bound: dict[str, torch.Tensor | Parts] = {}
        n_written = dict.fromkeys(tensors, 0)
        for name, shape, dtype in rows:
            places = self._place(tensors, name, shape)
            if places is None:
                raise Error(
                    "mismatch", f"the store has {name} {list(shape)}, and the model has no such tensor"
                )
            parts = []
            for place in places:
                target = tensors[place.tensor]
                dtype = dtype or target.dtype
                if not place.at:
                    bound[name] = _same(name, shape, dtype, place.tensor, target)
                    n_written[place.tensor] = _numel(target)
                    continue
                if not isinstance(target, torch.Tensor):
                    raise Error("argument", f"{place.tensor} is in parts, and {name} is a part of it")
                parts.append(Part(target.detach()[place.at], place.offsets))
                n_written[place.tensor] += parts[-1].tensor.numel()
            if name not in bound:  # of what has no part here any dtype will do
                bound[name] = Parts(shape, dtype or torch.float32, tuple(parts))
        for name, n in n_written.items() if is_all else ():
            if n != _numel(tensors[name]):
                raise Error(
                    "mismatch",
                    f"the store has {n} of the {_numel(tensors[name])} elements that this rank has of {name}",
                )
        self._bound_at = _addresses(tensors)
        return bound

    def has_moved(self) -> bool:
        """Returns whether the model's tensors lie elsewhere than when they were bound."""
        return self._bound_at != _addresses(self._tensors())


class Copies(Layout):
    """Memory of its own for each tensor of a store: `tensors`, once a Follower has updated them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        super().__init__(lambda: self.tensors, lambda there, name, shape: None)

    def bind(self, rows: Iterable[Row], is_all: bool = True) -> dict[str, torch.Tensor | Parts]:
        self.tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in rows}
        self._bound_at = _addresses(self.tensors)
        return dict(self.tensors)


def _same(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, of: str, tensor: torch.Tensor | Parts
) -> torch.Tensor | Parts:
    if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
        there, here = f"{list(shape)} {dtype}", f"{list(tensor.shape)} {tensor.dtype}"
        raise Error("mismatch", f"{name} is {there} in the store, and {of} is {here} in the model")
    return tensor


def _numel(tensor: torch.Tensor | Parts) -> int:
    return sum(held.numel() for held in memories(tensor))


def _addresses(tensors: Tensors) -> list[int]:
    return [held.data_ptr() for tensor in tensors.values() for held in memories(tensor)]


def by_name(model: Model, names: Callable[[str], str | None] | None, buffers: bool) -> Layout:
    """Returns the layout of a model that has whole tensors, or DTensors. names: returns the model's name for
    one of the store, or None for a tensor that the model is not to get."""

    def tensors() -> Tensors:
        return named_tensors(model, buffers)

    def place(there: Tensors, name: str, shape: tuple[int, ...]) -> Sequence[Target] | None:
        here = name if names is None else names(name)
        if here is None:
            return ()
        return [Target(here, (), (0,) * len(shape))] if here in there else None

    return Layout(tensors, place)


# ---- engines ----


class Rank(NamedTuple):
    """Of tensor parallelism."""

    rank: int
    size: int


def engine_layout(
    model: torch.nn.Module, rank: Rank, names: Callable[[str], str | None] | None = None
) -> Layout:
    """Returns the layout of a model of vLLM or SGLang on one rank.

    names: returns the engine's name, as if nothing were packed, for one of the store; None leaves it out.
    What is packed is in the model's packed_modules_mapping, else PACKED. Quantised weights and their scales
    lie as weights do. Error, when tensors are bound, for what is not of the store's dtype, or of a shape that
    no shard has."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or PACKED
    within = {part: whole for whole, parts in packed.items() for part in parts if len(parts) > 1}
    modules = dict(model.named_modules())

    def tensors() -> Tensors:
        # rows that an engine adds to a vocabulary so that all ranks have as many are no weights
        held = named_tensors(model, False)
        return {name: _without_padding(modules[name.rpartition(".")[0]], held[name]) for name in held}

    def place(there: Tensors, name: str, shape: tuple[int, ...]) -> Sequence[Target] | None:
        here = name if names is None else names(name)
        if here is None:
            return ()
        if expert := _EXPERT.fullmatch(here):
            return _of_expert(modules, there, expert, shape, rank)
        stem, _, leaf = here.rpartition(".")  # model.layers.0.self_attn.q_proj, weight
        above, _, last = stem.rpartition(".")
        if here not in there and last in within:
            target = f"{above}.{within[last]}.{leaf}"
            if target not in there:
                return None
            parts = packed[within[last]]
            module = modules[f"{above}.{within[last]}"]
            return _of_packed(module, target, there[target], list(parts).index(last), len(parts), shape, rank)
        if here not in there:
            return None
        return _of_shard(here, there[here], shape, modules[stem], rank)

    return Layout(tensors, place)


def _rank_of(module: torch.nn.Module, rank: Rank, group: str = "tp_group") -> Rank:
    """Returns the rank among those that share a module's weights, which may be replicated instead. vLLM's
    modules have their rank, and SGLang's the group, or None."""
    if hasattr(module, group):
        theirs: Any = getattr(module, group)
        return Rank(theirs.rank_in_group, theirs.world_size) if theirs else Rank(0, 1)
    return Rank(getattr(module, "tp_rank", rank.rank), getattr(module, "tp_size", rank.size))


def _without_padding(module: torch.nn.Module, tensor: torch.Tensor | Parts) -> torch.Tensor | Parts:
    shard = getattr(module, "shard_indices", None)
    if shard is None or not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor[: shard.org_vocab_end_index - shard.org_vocab_start_index]


def _of_shard(
    name: str, tensor: torch.Tensor | Parts, shape: tuple[int, ...], module: torch.nn.Module, rank: Rank
) -> Sequence[Target]:
    """Returns the place of what a rank has of a tensor: all, or its shard of the dimension that is
    smaller."""
    here = tuple(tensor.shape)
    if here == shape:
        return [Target(name, (), (0,) * len(shape))]
    smaller = [d for d, (n, m) in enumerate(zip(here, shape)) if n != m]
    number, size = _rank_of(module, rank)
    vocabulary = getattr(module, "shard_indices", None)
    if len(here) == len(shape) and len(smaller) == 1:
        d = smaller[0]
        begin = number * here[d] if vocabulary is None else int(vocabulary.org_vocab_start_index)
        if size * here[d] == shape[d] or (vocabulary is not None and begin + here[d] <= shape[d]):
            return [Target(name, (slice(None),), tuple(begin if i == d else 0 for i in range(len(shape))))]
    raise Error(
        "mismatch", f"{name} is {list(here)} on rank {number} of {size}, which is no shard of {list(shape)}"
    )


def _of_packed(
    module: torch.nn.Module,
    name: str,
    tensor: torch.Tensor | Parts,
    number: int,
    n_parts: int,
    shape: tuple[int, ...],
    rank: Rank,
) -> Sequence[Target]:
    """Returns the place of one of the tensors whose rows a packed one has, in their order. The heads of keys
    and values may be on several ranks each."""
    rank = _rank_of(module, rank)
    head = getattr(module, "head_size", None)
    is_of_blocks = name.endswith(_BLOCK_SCALES)
    block = (getattr(module, "weight_block_size", None) or (128, 128))[0] if is_of_blocks else 1
    if n_parts == 3 and head is not None:
        n, n_kv = (int(getattr(module, key)) for key in ("num_heads", "num_kv_heads"))
        rows = [n * head, n_kv * head, n_kv * int(getattr(module, "v_head_size", head))]
        of_kv = _rank_of(module, rank, "kv_tp_group").rank // getattr(module, "num_kv_head_replicas", 1)
        among = of_kv if number else rank.rank
    else:
        # each part's rows, of all ranks
        rows = [n // rank.size for n in getattr(module, "output_sizes", [shape[0] * block] * n_parts)]
        among = rank.rank
    rows = [-(-n // block) for n in rows]
    begin, offset = sum(rows[:number]), among * rows[number]
    if (
        sum(rows) != tensor.shape[0]
        or offset + rows[number] > shape[0]
        or tuple(tensor.shape[1:]) != shape[1:]
    ):
        raise Error(
            "mismatch",
            f"{name} is {list(tensor.shape)}, and has no shard of {list(shape)} as its part {number}",
        )
    return [Target(name, (slice(begin, begin + rows[number]),), (offset, *(0 for _ in shape[1:])))]


def _of_expert(
    modules: Mapping[str, torch.nn.Module],
    tensors: Tensors,
    match: re.Match[str],
    shape: tuple[int, ...],
    rank: Rank,
) -> Sequence[Target] | None:
    """Returns the place of one expert's weight in w13_weight (experts, 2 x rows, columns) or w2_weight of the
    ranks that have it."""
    is_first = match[3] in _HALVES
    which = ("w13_" if is_first else "w2_") + match[4]
    target = next((name for name in tensors if name.startswith(match[1]) and name.endswith(which)), None)
    if target is None:
        return None
    module, held = modules[target.rpartition(".")[0]], tensors[target]
    local_number = getattr(module, "_map_global_expert_id_to_local_expert_id", lambda number: number)
    number = int(local_number(int(match[2])))
    if number < 0:
        return ()
    sizes = list(held.shape[1:])
    first = 0
    if is_first:
        sizes[0] //= 2
        first = sizes[0] * _HALVES[match[3]]
    d = 0 if is_first else 1
    n_shards, rest = divmod(shape[d], sizes[d])
    if rest or sizes[1 - d] != shape[1 - d] or number >= held.shape[0]:
        raise Error(
            "mismatch", f"{target} is {list(held.shape)} on this rank, and has no shard of {list(shape)}"
        )
    # vLLM's ranks of data parallelism share experts' rows, too
    config = getattr(module, "moe_config", None)
    own = config.tp_rank if config else getattr(module, "moe_tp_rank", _rank_of(module, rank).rank)
    among = int(own) if n_shards > 1 else 0
    offsets = tuple(among * sizes[d] if i == d else 0 for i in range(2))
    return [Target(target, (number, slice(first, first + sizes[0])), offsets)]
