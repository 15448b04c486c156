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
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from tagc._library import Error
from tagc.local.fragments import Flight, Fragment
from tagc.local.options import Settings
from tagc.local.sites import Site
from tagc.torch.extension import Comm


class Exchanges(Protocol):
    """The exchanges of sites that join and leave."""

    def run(self, fragment: Fragment | None) -> bool: ...

    def run_all(self) -> None: ...

    def connection(self) -> Comm: ...

    def residuals_before(self, fragment: Fragment) -> Mapping[str, torch.Tensor] | None:
        """Returns residuals from before an exchange that did not count here; None if there is no such
        exchange."""
        ...

    def forget(self) -> None:
        """Forgets that exchange: residuals are new, and none of them is undone."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Others(Protocol):
    """Who knows sites that join and leave."""

    def check(self, optimizer: Any, between: Any, delay: Any) -> None:
        """Raises Error if LocalSteps cannot work with these. Local."""
        ...

    def join(self, handle: Any, fingerprint: Mapping[str, Any]) -> Exchanges:
        """Returns the exchanges of these LocalSteps. fingerprint: what all sites must have alike, by name."""
        ...


class Remembered(Protocol):
    """What there is to save of LocalSteps."""

    is_closed: bool
    lock: threading.RLock
    settings: Settings
    site: Site
    fragments: list[Fragment]
    flying: list[Flight]
    managed: Exchanges | None
    n_steps: int
    n_exchanges: int
    has_anchor: bool

    def drop_flights(self) -> None: ...

    def resume(self, about: Mapping[str, Any], flights: Sequence[tuple[int, int, torch.Tensor]]) -> None: ...


VERSION = 1  # of about; no other is read
_NUMBERS = ("sites", "site", "steps", "exchanges", "open", "fragments", "delay", "managed")


def _bad(text: str) -> Error:
    return Error("argument", f"state of LocalSteps: {text}")


def _check_open(handle: Remembered) -> None:
    if handle.is_closed:
        raise Error("state", "these local steps are closed, and their residuals are gone")


def _kinds(handle: Remembered) -> list[str]:
    return [
        "anchor",
        "residual",
        *(["velocity"] if handle.settings.outer_momentum else []),
        *(["delta"] if handle.settings.delay else []),
    ]


def save(handle: Remembered) -> dict[str, Any]:
    with handle.lock:
        _check_open(handle)
        flights = {flight.fragment.index: flight for flight in handle.flying}
        tensors: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in _kinds(handle)}
        for fragment in handle.fragments:
            flight = flights.get(fragment.index)
            residual = torch.zeros(fragment.n_elems, dtype=torch.float32, device="cpu")
            before = None if handle.managed is None else handle.managed.residuals_before(fragment)
            if flight is not None:
                residual = flight.residual_before()
            elif before is not None:
                for place in fragment.places:
                    if place.kind == "compressed":
                        residual[place.at].copy_(before[place.trained.name])
            else:
                fragment.copy_residual(residual)
            sources = {
                "anchor": fragment.anchor,
                "residual": residual,
                "velocity": fragment.velocity,
                "delta": torch.zeros(fragment.n_elems, dtype=torch.float32, device="cpu")
                if flight is None
                else flight.delta,
            }
            for place in fragment.places:
                for kind, named in tensors.items():
                    if kind != "residual" or place.kind == "compressed":
                        named[place.trained.name] = sources[kind][place.at].clone()
        about = {
            "version": VERSION,
            "sites": handle.site.n_sites,
            "site": handle.site.site,
            "steps": handle.n_steps,
            "exchanges": handle.n_exchanges,
            "open": int(handle.has_anchor),
            "fragments": handle.settings.fragments,
            "delay": handle.settings.delay,
            "begun": {str(index): flight.step for index, flight in flights.items()},
            "managed": int(handle.managed is not None),
        }
        return {f"rank{handle.site.rank}": {"about": json.dumps(about), **tensors}}


def load(handle: Remembered, saved: Mapping[str, Any], residuals: bool) -> None:
    with handle.lock:
        _check_open(handle)
        entry = _entry(handle, saved, residuals)
        about = _about(entry)
        if bool(about["managed"]) != (handle.managed is not None):
            raise _bad(
                f"was {'' if about['managed'] else 'not '}saved where sites join and leave, and residuals "
                f"are parts of the mean: load it {'there' if about['managed'] else 'elsewhere'}"
            )
        begun = {int(index): int(step) for index, step in about["begun"].items()}
        mine = handle.settings
        if begun and (about["fragments"], about["delay"]) != (mine.fragments, mine.delay):
            raise _bad(
                f"has exchanges under way of {about['fragments']} fragments with a delay of "
                f"{about['delay']}; here it is {mine.fragments} with "
                f"{mine.delay}"
            )
        for kind in _kinds(handle):
            if kind != "delta" or begun:
                _check(handle, entry, kind)
        factor = (
            0.0
            if not residuals
            else 1.0
            if handle.managed is not None
            else handle.site.n_sites / about["sites"]
        )
        if handle.managed is not None:
            handle.managed.forget()
        handle.drop_flights()
        flights = []
        for fragment in handle.fragments:
            arrays = {
                kind: torch.zeros(fragment.n_elems, dtype=torch.float32, device="cpu")
                for kind in ("residual", "delta")
            } | {"anchor": fragment.anchor, "velocity": fragment.velocity}
            for place in fragment.places:
                for kind in _kinds(handle):
                    if (kind != "residual" or place.kind == "compressed") and (kind != "delta" or begun):
                        arrays[kind][place.at].copy_(entry[kind][place.trained.name])
            if fragment.index in begun:
                flights.append((fragment.index, begun[fragment.index], arrays["delta"]))
            fragment.set_residual(arrays["residual"].mul_(factor) if factor != 1 else arrays["residual"])
        handle.resume(about, sorted(flights, key=lambda one: one[1]))


def shared(handle: Remembered) -> dict[str, Any]:
    """Returns what torchft sends to a replica that joins: as save(), without the residual and what there is
    only with a delay."""
    tensors: dict[str, dict[str, torch.Tensor]] = {"anchor": {}, "velocity": {}}
    for fragment in handle.fragments:
        for place in fragment.places:
            tensors["anchor"][place.trained.name] = fragment.anchor[place.at].clone()
            if handle.settings.outer_momentum:
                tensors["velocity"][place.trained.name] = fragment.velocity[place.at].clone()
    return {"steps": handle.n_steps, "exchanges": handle.n_exchanges, **tensors}


def load_shared(handle: Remembered, state: Mapping[str, Any]) -> None:
    kinds = ["anchor", *(["velocity"] if handle.settings.outer_momentum else [])]
    for kind in kinds:
        _check(handle, state, kind)
    for fragment in handle.fragments:
        for place in fragment.places:
            fragment.anchor[place.at].copy_(state["anchor"][place.trained.name])
            if handle.settings.outer_momentum:
                fragment.velocity[place.at].copy_(state["velocity"][place.trained.name])
    handle.n_steps, handle.n_exchanges = int(state["steps"]), int(state["exchanges"])


def _entry(handle: Remembered, saved: Any, residuals: bool) -> dict[str, Any]:
    """Returns this rank's entry; without its residuals, the only one there is."""
    if not isinstance(saved, Mapping) or not saved:
        raise _bad(f"is a {type(saved).__name__}, must be what state_dict() gives")
    own = f"rank{handle.site.rank}"
    if own not in saved and (residuals or len(saved) != 1):
        raise _bad(
            f"has {', '.join(map(str, saved))}, and this is {own}: each rank saves and loads its own; a site "
            "that joins loads another's with residuals=False"
        )
    entry = saved[own] if own in saved else next(iter(saved.values()))
    if not isinstance(entry, dict):
        raise _bad(f"{own} is a {type(entry).__name__}, must be what state_dict() gives")
    return entry


def _about(entry: Mapping[str, Any]) -> dict[str, Any]:
    text = entry.get("about")
    try:
        about = json.loads(text) if isinstance(text, str) else {}
        version = about.get("version")
        if about and version != VERSION:
            raise _bad(f"is of version {version!r}, this tagc reads version {VERSION}")
        fits = (
            all(isinstance(about[key], int) and about[key] >= 0 for key in _NUMBERS)
            and about["sites"] > 0
            and isinstance(about["begun"], dict)
        )
        fits = fits and all(
            isinstance(step, int) and int(index) >= 0 for index, step in about["begun"].items()
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise _bad(f"'about' is {str(text)[:200]!r}")
    return dict(about)


def _check(handle: Remembered, entry: Mapping[str, Any], kind: str) -> None:
    named = entry.get(kind, {})
    wanted = {
        place.trained.name: place.length
        for fragment in handle.fragments
        for place in fragment.places
        if kind != "residual" or place.kind == "compressed"
    }
    if not isinstance(named, dict) or set(named) != set(wanted):
        odd = sorted(set(wanted) ^ set(named)) if isinstance(named, dict) else []
        raise _bad(
            f"{kind} is of other parameters than these local steps have{f', such as {odd[0]}' if odd else ''}"
        )
    for name, length in wanted.items():
        values = named[name]
        if (
            not isinstance(values, torch.Tensor)
            or not values.is_floating_point()
            or tuple(values.shape) != (length,)
        ):
            what = (
                f"{values.dtype} {tuple(values.shape)}"
                if isinstance(values, torch.Tensor)
                else type(values).__name__
            )
            raise _bad(f"{kind} of {name} is {what}, must be floating ({length},)")
        if not values.isfinite().all():
            raise _bad(f"{kind} of {name} is not finite")
