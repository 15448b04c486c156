"""Adapters of LoRA: they alone travel, and a receiver adds them to weights that it has.

Publisher(adapters(model), store)        whole at first, then as changes, as any tensors
Follower(Copies(), store)                adapters as they are, for an engine that takes such
Merged(model, store, scale)              the model's weights, with the newest adapter added to them"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import torch

from tagc._library import Error
from tagc.weights.follow import Follower
from tagc.weights.layout import Copies, Layout, by_name
from tagc.weights.names import without_wrappers
from tagc.weights.tensors import Box, Model, Tensors, boxes_of, memories, named_tensors, strips

_FACTOR = re.compile(r"(.*)\.lora_(A|B)\.weight")


def adapter_name(name: str, adapter: str = "default") -> str | None:
    """Returns the name that an adapter's tensor has in PEFT's checkpoints; None if it is none of it."""
    plain, which = without_wrappers(name), re.escape(adapter)
    for pattern, instead in (
        (rf"(\.lora_\w+)\.{which}(?=\.|$)", r"\1"),
        (rf"\.modules_to_save\.{which}\.", "."),
    ):
        saved, n = re.subn(pattern, instead, plain)
        if n:
            return saved
    return None


def adapters(model: Model, adapter: str = "default") -> Tensors:
    """Returns the tensors of one adapter of a model of PEFT, also under FSDP2, by the names that they have in
    PEFT's checkpoints: a model for a Publisher. They are the model's own memory."""
    named = named_tensors(model, False)
    found = {saved: tensor for name, tensor in named.items() if (saved := adapter_name(name, adapter))}
    if not found:
        raise Error("argument", f"the model has no adapter {adapter!r}: none of its names has it")
    return found


def base_name(name: str) -> str:
    """Returns the tensor to which an adapter of a model of transformers belongs, by its checkpoint's name."""
    return name.removeprefix("base_model.model.")


class Merged:
    """Keeps a model at its own weights with the newest adapter of a store added to them.

    model: as that of a Follower, with the weights to which the adapter is added. They are copied to CPU
    memory before the first is written, as far as the adapter changes them.
    scale: of the product of the two factors, lora_alpha / r, or a function that returns it for the name of a
    weight.
    names: returns the model's name of the weight for the adapter's, such as
    base_model.model.layers.0.q_proj.weight. Not given: without base_model.model.
    folder, threads: as those of a Follower.

    Each version is added to the weights as they were, in fp32, and then rounded: nothing adds up."""

    def __init__(
        self,
        model: Model | Layout,
        store: str | os.PathLike[str],
        scale: float | Callable[[str], float],
        *,
        names: Callable[[str], str] = base_name,
        folder: str | None = None,
        threads: int = 1,
    ) -> None:
        self._layout = model if isinstance(model, Layout) else by_name(model, None, False)
        self._scale = scale if callable(scale) else lambda name: scale
        self._copies, self._names = Copies(), names
        self._follower = Follower(self._copies, store, folder=folder, threads=threads)
        self._base: dict[str, list[torch.Tensor]] = {}  # what held() names, as it was
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._run, self._version = 0, 0

    @property
    def version(self) -> int:
        """Returns the version of the adapter in the weights; 0: none, or one that was added in part."""
        return self._version

    def update(self, version: int | None = None, wait_s: float = 0.0) -> int:
        """Adds a version of the adapter, as Follower.update() takes one, and returns its number."""
        newest = self._follower.update(version, wait_s)
        if (self._follower.run, newest) != (self._run, self._version) or self._layout.has_moved():
            self._run, self._version = 0, 0
            with torch.no_grad():
                self._merge()
            self._run, self._version = self._follower.run, newest
        return newest

    def _merge(self) -> None:
        factors, whole = self._sorted()
        shapes: dict[str, tuple[int, ...]] = {
            name: (b.shape[0], a.shape[1]) for name, (a, b) in factors.items()
        }
        shapes |= {name: tuple(tensor.shape) for name, tensor in whole.items()}
        # of adapters before, too: they are taken out
        rows = [(name, shape, None) for name, shape in (self._shapes | shapes).items()]
        found = self._layout.bind(rows, is_all=False)
        held = {name: list(zip(boxes_of(name, one), memories(one))) for name, one in found.items()}
        for name in shapes.keys() - self._base.keys():
            self._base[name] = [memory.to("cpu", copy=True) for _, memory in held[name]]
        self._shapes |= shapes
        written = [memory for name in self._shapes for _, memory in held[name]]
        # torch writes to tensors of inference mode within it only
        with torch.inference_mode(any(memory.is_inference() for memory in written)):
            for name in self._shapes:
                for (box, memory), base in zip(held[name], self._base[name]):
                    if name in factors:
                        _add(memory, base, *factors[name], box, float(self._scale(name)))
                    else:
                        memory.copy_(whole[name][box.within(_all_of(whole[name]))] if name in whole else base)

    def _sorted(self) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
        """Returns the factors (r, columns) and (rows, r) by the weight that they change, and tensors that
        stand for the model's."""
        factors: dict[str, dict[str, torch.Tensor]] = {}
        whole = {}
        for name, tensor in self._copies.tensors.items():
            if match := _FACTOR.fullmatch(name):
                factors.setdefault(self._names(f"{match[1]}.weight"), {})[match[2]] = tensor
            elif ".lora_" in name:
                raise Error("unsupported", f"{name} is no factor of LoRA of a matrix, which alone are added")
            else:
                whole[self._names(name)] = tensor
        pairs = {}
        for name, both in factors.items():
            a, b = both.get("A"), both.get("B")
            if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
                shapes = {which: list(factor.shape) for which, factor in sorted(both.items())}
                raise Error("mismatch", f"the factors for {name} make no matrix: {shapes}")
            pairs[name] = (a, b)
        return pairs, whole


def _all_of(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.ndim, tuple(tensor.shape))


def _add(
    memory: torch.Tensor, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, box: Box, scale: float
) -> None:
    """Writes base + scale b a, of which memory (rows, columns) is that box."""
    rows, columns = box.within(Box((0, 0), (b.shape[0], a.shape[1])))
    left, right = (factor.to(memory.device, torch.float32) for factor in (b[rows], a[:, columns]))
    for strip in strips(*memory.shape):
        sums = torch.addmm(base[strip].to(memory.device, torch.float32), left[strip], right, alpha=scale)
        memory[strip] = sums.to(memory.dtype)
