"""Weights as a receiver quantises them, made by the sender: they travel as what changed in them and in their
scales, and arrive bit for bit.

    largest()   the largest magnitude of each block -> all senders know those of blocks that several hold
    fill()      scale = largest / most, weight = round(weight / scale) -> tensors that WeightSync sends"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from tagc._library import Error
from tagc.weights.tensors import Box, Model, Part, Parts, boxes_of, memories, named_tensors, strips

_NOT_LAYERS = ("embed", "lm_head", "norm", "mlp.gate.", "router")


def of_layers(name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether a tensor is a matrix of a layer, as engines quantise them: no embedding, head, norm or
    router, by names of Hugging Face."""
    return len(shape) >= 2 and name.endswith(".weight") and not any(part in name for part in _NOT_LAYERS)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How matrices are quantised, symmetrically.

    dtype: torch.float8_e4m3fn or torch.int8. block: rows and columns that have one scale, 0 for all of them;
    the matrices of a tensor with more dimensions have scales of their own.
    scale: the ending of the scales' name: that of a.weight is a.weight_scale with "_scale". Scales are fp32,
    what a weight is multiplied by.
    floor: at least so large is the largest magnitude taken to be. which: decides by name and shape."""

    dtype: torch.dtype
    block: tuple[int, int]
    scale: str = "_scale"
    floor: float = 1e-12
    which: Callable[[str, tuple[int, ...]], bool] = of_layers

    @property
    def most(self) -> float:
        """Returns the largest magnitude of a quantised weight."""
        return 127.0 if self.dtype == torch.int8 else float(torch.finfo(self.dtype).max)

    def steps(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the elements of a block in each dimension."""
        last = (n if block == 0 else block for n, block in zip(shape[-2:], self.block))
        return (1,) * (len(shape) - 2) + tuple(last)


def fp8_per_tensor(which: Callable[[str, tuple[int, ...]], bool] = of_layers) -> Recipe:
    """Returns the recipe of one scale per matrix: a.weight in fp8 e4m3, a.weight_scale []."""
    return Recipe(torch.float8_e4m3fn, (0, 0), which=which)


def int8_per_channel(which: Callable[[str, tuple[int, ...]], bool] = of_layers) -> Recipe:
    """Returns the recipe of one scale per row: a.weight in int8, a.weight_scale [rows, 1]."""
    return Recipe(torch.int8, (1, 0), which=which)


def fp8_in_blocks(
    rows: int = 128, columns: int = 128, which: Callable[[str, tuple[int, ...]], bool] = of_layers
) -> Recipe:
    """Returns the recipe of DeepSeek's checkpoints: a.weight in fp8 e4m3, and for each block one scale in
    a.weight_scale_inv [ceil(rows / 128), ceil(columns / 128)]."""
    return Recipe(torch.float8_e4m3fn, (rows, columns), "_scale_inv", 1e-4, which)


# Returns what travels instead of a whole tensor, by names; None: the tensor itself.
Function = Callable[[str, torch.Tensor], "Mapping[str, torch.Tensor] | None"]


@dataclasses.dataclass
class _Matrix:
    """What this rank holds of a tensor that a Recipe quantises, and memory for the result. Each list has an
    item per box."""

    form: tuple[tuple[int, ...], torch.dtype]
    steps: tuple[int, ...]
    boxes: tuple[Box, ...]
    weights: list[torch.Tensor]  # quantised
    scales: list[torch.Tensor]  # of the blocks that begin in the box
    largest: list[torch.Tensor]  # magnitude of the blocks that it touches

    @property
    def is_whole(self) -> bool:
        """Returns whether no other rank has elements of its blocks."""
        return self.boxes == (Box((0,) * len(self.form[0]), self.form[0]),)


class Quantized:
    """The tensors of a model, quantised: those of the last fill()."""

    def __init__(self, model: Model, buffers: bool, recipe: Recipe | Function) -> None:
        self._model, self._buffers, self._recipe = model, buffers, recipe
        self._matrices: dict[str, _Matrix] = {}
        self._made: dict[str, dict[str, torch.Tensor]] = {}  # by a function

    # ---- a version ----

    def largest(self) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        """Returns the largest magnitudes in blocks of which other ranks may have elements, too."""
        told = {}
        for name, tensor in self._tensors().items():
            matrix = self._matrix(name, tensor)
            if matrix is None:
                continue
            matrix.largest = [
                _largest(memory, box, matrix.steps) for box, memory in zip(matrix.boxes, memories(tensor))
            ]
            if not all(bool(blocks.isfinite().all()) for blocks in matrix.largest):
                raise Error("argument", f"{name} has values that are not finite, and cannot be quantised")
            if not matrix.is_whole:
                touched = (_touched(box, matrix.steps) for box in matrix.boxes)
                told[name] = list(zip(touched, matrix.largest))
        return told

    def fill(self, told: Sequence[Mapping[str, Sequence[tuple[Box, torch.Tensor]]]]) -> None:
        """Quantises the weights as they are now. told: what largest() has just returned on each sender."""
        for name, tensor in self._tensors().items():
            matrix = self._matrix(name, tensor)
            if matrix is not None:
                others = [one for theirs in told for one in theirs.get(name, ())]
                for each in zip(
                    matrix.boxes, memories(tensor), matrix.largest, matrix.scales, matrix.weights
                ):
                    self._quantize(matrix.steps, others, *each)
            elif self._made.get(name):
                self._make_again(name, tensor)

    def _quantize(
        self,
        steps: tuple[int, ...],
        others: Sequence[tuple[Box, torch.Tensor]],
        box: Box,
        memory: torch.Tensor,
        largest: torch.Tensor,
        scales: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Writes the scales and weights of a box."""
        recipe = self._of_recipe()
        touched, begun = _touched(box, steps), _begun(box, steps)
        for theirs, magnitudes in others:
            common = touched.common(theirs)
            if common.numel():
                here = largest[common.within(touched)]
                torch.maximum(here, magnitudes[common.within(theirs)], out=here)
        largest.clamp_(min=recipe.floor)
        if begun.numel():
            scales.copy_((largest[begun.within(touched)] / recipe.most).view_as(scales))
        # (r, c) of each matrix, and the blocks in which its rows and columns are
        rows, columns = (
            torch.div(torch.arange(at, at + n), step, rounding_mode="floor") - at // step
            for at, n, step in zip(box.offsets[-2:], box.sizes[-2:], steps[-2:])
        )
        for one, to, most in zip(_matrices(memory), _matrices(weights), _matrices(largest)):
            factors = (recipe.most / most).to(one.device)
            columns = columns.to(one.device)
            for strip in strips(*one.shape):
                by_row = factors.index_select(0, rows[strip].to(one.device))
                by_element = by_row if by_row.shape[1] == 1 else by_row.index_select(1, columns)
                values = one[strip].to(torch.float32) * by_element
                if recipe.dtype == torch.int8:
                    values.round_()
                to[strip] = values.clamp_(-recipe.most, recipe.most).to(recipe.dtype)

    def _make_again(self, name: str, tensor: torch.Tensor | Parts) -> None:
        for made, value in self._of_function(name, tensor).items():
            former = self._made[name].get(made)
            if former is None or (former.shape, former.dtype) != (value.shape, value.dtype):
                raise Error("state", f"quantize made other tensors of {name} than before, such as {made}")
            former.copy_(value)

    # ---- what there is ----

    def tensors(self) -> dict[str, torch.Tensor | Parts]:
        """Returns what travels, by name."""
        named: dict[str, torch.Tensor | Parts] = {}
        for name, tensor in self._tensors().items():
            for made, value in self._made_of(name, tensor).items():
                if made in named:
                    raise Error(
                        "argument",
                        f"two tensors are {made} when the model is quantised: one of them is made of {name}",
                    )
                named[made] = value
        return named

    def _made_of(self, name: str, tensor: torch.Tensor | Parts) -> Mapping[str, torch.Tensor | Parts]:
        matrix = self._matrix(name, tensor)
        if matrix is not None:
            return self._named(name, matrix)
        if not isinstance(self._recipe, Recipe):
            if name not in self._made:
                self._made[name] = {
                    made: value.detach().to("cpu", copy=True).contiguous()
                    for made, value in self._of_function(name, tensor).items()
                }
            if self._made[name]:
                return {made: _kept(value) for made, value in self._made[name].items()}
        return {name: tensor}

    def _named(self, name: str, matrix: _Matrix) -> dict[str, torch.Tensor | Parts]:
        recipe, shape = self._of_recipe(), matrix.form[0]
        weights = tuple(Part(each, box.offsets) for each, box in zip(matrix.weights, matrix.boxes))
        is_single = recipe.block == (0, 0) and len(shape) == 2
        scales = []
        for box, each in zip(matrix.boxes, matrix.scales):
            begun = _begun(box, matrix.steps)
            if begun.numel():
                scales.append(Part(each, () if is_single else begun.offsets))
        n_blocks = tuple(-(-n // step) for n, step in zip(shape, matrix.steps))
        return {
            name: Parts(shape, recipe.dtype, weights, True),
            name + recipe.scale: Parts(() if is_single else n_blocks, torch.float32, tuple(scales), True),
        }

    def _matrix(self, name: str, tensor: torch.Tensor | Parts) -> _Matrix | None:
        """Returns what is quantised by a Recipe; None for what is not."""
        recipe, shape = self._recipe, tuple(tensor.shape)
        if not isinstance(recipe, Recipe) or not tensor.dtype.is_floating_point or len(shape) < 2:
            return None
        boxes = boxes_of(name, tensor)
        matrix = self._matrices.get(name)
        if matrix is not None:
            if matrix.form != (shape, tensor.dtype) or matrix.boxes != boxes:
                raise Error("state", f"{name} has changed: it was {matrix.form} here, in {matrix.boxes}")
            return matrix
        if not recipe.which(name, shape):
            return None
        steps = recipe.steps(shape)
        is_single = recipe.block == (0, 0) and len(shape) == 2
        scales = [torch.zeros(() if is_single else _begun(box, steps).sizes) for box in boxes]
        weights = [torch.zeros(box.sizes, dtype=recipe.dtype) for box in boxes]
        self._matrices[name] = _Matrix((shape, tensor.dtype), steps, boxes, weights, scales, [])
        return self._matrices[name]

    def _of_function(self, name: str, tensor: torch.Tensor | Parts) -> Mapping[str, torch.Tensor]:
        assert not isinstance(self._recipe, Recipe)
        held = memories(tensor)
        if len(held) != 1 or tuple(held[0].shape) != tuple(tensor.shape):
            raise Error(
                "unsupported", f"{name} is sharded, and quantize a function of whole tensors: give a Recipe"
            )
        return self._recipe(name, held[0]) or {}

    def _of_recipe(self) -> Recipe:
        assert isinstance(self._recipe, Recipe)
        return self._recipe

    def _tensors(self) -> dict[str, torch.Tensor | Parts]:
        if not callable(self._recipe) and not isinstance(self._recipe, Recipe):
            raise Error("argument", f"quantize is {self._recipe!r:.80}, must be a Recipe or a function")
        return named_tensors(self._model, self._buffers)


def _kept(tensor: torch.Tensor) -> Parts:
    """Returns a whole tensor as one that keeps its dtype."""
    shape = tuple(tensor.shape)
    return Parts(shape, tensor.dtype, (Part(tensor, (0,) * len(shape)),), True)


# ---- blocks ----


def _touched(box: Box, steps: Sequence[int]) -> Box:
    """Returns the blocks of which a box has some element."""
    ends = (-(-(at + n) // step) for at, n, step in zip(*box, steps))
    begin = tuple(at // step for at, step in zip(box.offsets, steps))
    return Box(begin, tuple(end - first for first, end in zip(begin, ends)))


def _begun(box: Box, steps: Sequence[int]) -> Box:
    """Returns the blocks whose first element is in a box. Each block is in one of boxes that share a
    tensor."""
    ends = (-(-(at + n) // step) for at, n, step in zip(*box, steps))
    begin = tuple(-(-at // step) for at, step in zip(box.offsets, steps))
    return Box(begin, tuple(end - first for first, end in zip(begin, ends)))


def _matrices(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return [tensor] if tensor.ndim == 2 else tensor.reshape(-1, *tensor.shape[-2:]).unbind()


def _largest(memory: torch.Tensor, box: Box, steps: Sequence[int]) -> torch.Tensor:
    """Returns the largest magnitude of what the box has of each block that it touches, in CPU memory."""
    touched = _touched(box, steps)
    if not box.numel():
        return torch.zeros(touched.sizes)
    found = [_by_block(one, box.offsets[-2:], steps[-2:], touched.sizes[-2:]) for one in _matrices(memory)]
    return torch.stack(found).view(touched.sizes)


def _by_block(
    matrix: torch.Tensor, offsets: Sequence[int], steps: Sequence[int], n_blocks: Sequence[int]
) -> torch.Tensor:
    n_rows, n_columns = matrix.shape
    before = [at % step for at, step in zip(offsets, steps)]
    of_rows = torch.empty(n_rows, n_blocks[1])
    for strip in strips(n_rows, n_columns):
        values = matrix[strip].abs().to(torch.float32)
        if n_blocks[1] > 1 or before[1]:
            after = n_blocks[1] * steps[1] - before[1] - n_columns
            values = torch.nn.functional.pad(values, (before[1], after))
        of_rows[strip] = values.view(len(values), n_blocks[1], -1).amax(-1)
    after = n_blocks[0] * steps[0] - before[0] - n_rows
    padded = torch.nn.functional.pad(of_rows, (0, 0, before[0], after))
    return padded.view(n_blocks[0], steps[0], n_blocks[1]).amax(1)
