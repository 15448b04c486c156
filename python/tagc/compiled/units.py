"""Which parameters of a model are exchanged together: those of each module on which a user of FSDP2 calls
fully_shard(), as a rule a block, and as the root's those that are in none of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from tagc._library import Error


class Unit:
    """Modules whose parameters are exchanged together have one of these, as `tagc_unit`: parameters belong to
    that of the nearest module around them."""


def mark(model: nn.Module, modules: Any) -> None:
    """Gives modules their units. modules: as data_parallel() has it."""
    for together in [[model], *_checked(model, modules)]:
        unit = Unit()
        for module in together:
            vars(module)["tagc_unit"] = unit


def _checked(model: nn.Module, modules: Any) -> list[list[nn.Module]]:
    """Returns the modules of each unit but the root's. Error if they are not modules of the model. Local."""
    if modules is None:
        return blocks(model)
    if isinstance(modules, str) or not isinstance(modules, Iterable):
        raise Error("argument", f"modules is {modules!r}, must be modules of the model, or None")
    within, units, seen = set(model.modules()), [], {model}
    for i, given in enumerate(modules):
        together = list(given) if isinstance(given, (list, tuple)) else [given]
        for module in together:
            if not isinstance(module, nn.Module):
                raise Error(
                    "argument",
                    f"modules has {module!r} at {i}, must have modules, and lists of modules that are "
                    "exchanged together",
                )
            what = f"modules has a {type(module).__name__} at {i}"
            if module not in within:
                raise Error("argument", f"{what}, which is not in the model")
            if module in seen:
                raise Error("argument", f"{what}, which is the model itself or has come before")
            seen.add(module)
        units.append(together)
    return units


def blocks(model: nn.Module) -> list[list[nn.Module]]:
    """Returns, each by itself, the items of the outermost containers that have a model's blocks: ModuleLists,
    and ModuleDicts whose items are of one class."""
    units: list[list[nn.Module]] = []
    for child in model.children():
        kinds = {type(item) for item in child.children()}
        if isinstance(child, nn.ModuleList) or isinstance(child, nn.ModuleDict) and len(kinds) == 1:
            units += [[item] for item in child.children()]
        else:
            units += blocks(child)
    return units


def units_of(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Returns (name, modules in FSDP2's order) of each unit: of those that data_parallel() made, or of
    blocks() in another's model. The root's comes last: what it shares with another unit is that one's."""
    names = {module: name or "the root module" for name, module in model.named_modules()}
    marks = {module: vars(module)["tagc_unit"] for module in names if "tagc_unit" in vars(module)}
    if not marks:
        marks = {module: Unit() for together in [[model], *blocks(model)] for module in together}
    root = marks.setdefault(model, Unit())
    modules_of: dict[Unit, list[nn.Module]] = {unit: [] for module, unit in marks.items() if unit is not root}
    modules_of[root] = []
    seen = set[nn.Module]()

    def visit(module: nn.Module, unit: Unit) -> None:
        seen.add(module)
        unit = marks.get(module, unit)
        for child in module.children():
            if child not in seen:
                visit(child, unit)
        modules_of[unit].append(module)

    visit(model, root)
    marked = {unit: [names[module] for module in marks if marks[module] is unit] for unit in modules_of}
    return [
        ("-".join(dict.fromkeys((marked[unit][0], marked[unit][-1]))), modules)
        for unit, modules in modules_of.items()
    ]
