"""What LocalSteps has to remember, by rank and parameter:

    {"rank3": {"about": json, "anchor": {name: (n,) fp32}, "residual": {...}, "velocity": {...}, "delta":
    {...}}}

Names are the parameters', n is what the rank exchanges of them. residual: of what is compressed; velocity:
where there is an outer momentum; delta: where there is a delay, of all parameters, since
torch.distributed.checkpoint wants the same keys every time. Keys carry the rank, since it would take equal
ones for copies. about["begun"] lists the deltas under way: {fragment: step}. An exchange under way begins
once more, with the residuals that it began with, and comes to the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from tagc._library import Error
from tagc.local.options import Settings

VERSION = 1  # of about; no other is read
_NUMBERS = ("sites", "site", "steps", "exchanges", "open", "fragments", "delay", "managed")


def bad(text: str) -> Error:
    return Error("argument", f"state of LocalSteps: {text}")


def kinds_of(settings: Settings) -> list[str]:
    """Returns what there is to save of parameters."""
    velocity, delta = ["velocity"] * (settings.outer_momentum > 0), ["delta"] * (settings.delay > 0)
    return ["anchor", "residual", *velocity, *delta]


def entry_of(saved: Any, rank: int, residuals: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (about, the entry) of this rank; without its residuals, of the only one there is."""
    if not isinstance(saved, Mapping) or not saved:
        raise bad(f"is a {type(saved).__name__}, must be what state_dict() gives")
    own = f"rank{rank}"
    if own not in saved and (residuals or len(saved) != 1):
        raise bad(
            f"has {', '.join(map(str, saved))}, and this is {own}: each rank saves and loads its own; a site "
            "that joins loads another's with residuals=False"
        )
    entry = saved[own] if own in saved else next(iter(saved.values()))
    if not isinstance(entry, dict):
        raise bad(f"{own} is a {type(entry).__name__}, must be what state_dict() gives")
    return _about(entry.get("about")), entry


def _about(text: Any) -> dict[str, Any]:
    try:
        about = json.loads(text) if isinstance(text, str) else {}
        version = about.get("version")
        if about and version != VERSION:
            raise bad(f"is of version {version!r}, this tagc reads version {VERSION}")
        about["begun"] = {int(index): step for index, step in about["begun"].items()}
        numbers = [about[key] for key in _NUMBERS] + [*about["begun"].values(), *about["begun"]]
        fits = all(isinstance(number, int) and number >= 0 for number in numbers) and about["sites"] > 0
    except (AttributeError, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise bad(f"'about' is {str(text)[:200]!r}")
    return dict(about)


def check(named: Any, kind: str, sizes: Mapping[str, int]) -> None:
    """Raises Error unless it has finite values of these parameters. sizes: name -> elements."""
    if not isinstance(named, dict) or set(named) != set(sizes):
        odd = sorted(set(sizes) ^ set(named)) if isinstance(named, dict) else []
        raise bad(
            f"{kind} is of other parameters than these local steps have{f', such as {odd[0]}' if odd else ''}"
        )
    for name, n in sizes.items():
        values = named[name]
        is_tensor = isinstance(values, torch.Tensor)
        if not is_tensor or not values.is_floating_point() or tuple(values.shape) != (n,):
            what = f"{values.dtype} {tuple(values.shape)}" if is_tensor else type(values).__name__
            raise bad(f"{kind} of {name} is {what}, must be floating ({n},)")
        if not values.isfinite().all():
            raise bad(f"{kind} of {name} is not finite")
