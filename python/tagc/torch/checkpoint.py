"""What a checkpoint has of a handle's state: residuals, because a resumed run would lose the values that were
not sent yet; and replicas, the base of deltas:

    {"rank3": {"about": json, "residuals": {name: (shape of the parameter)}, "replicas": {module: (shard,),
    bf16}}}

Residuals are in bf16, which holds what is stored in 16 bits or fewer without loss, or in fp32.

One form serves torch.save and torch.distributed.checkpoint (DCP). Keys contain the rank, because each rank
has its own residuals and DCP writes only one of several equal keys.

    about["version"]                  2; 1, which had other names for "about" and "replicas", is read, too
    about["world_size"], ["rank"]     of torch.distributed
    about["managed"]                  1 of replicas that join and leave
    about["replica"], ["replicas"]    the residuals of all replicas add up to the unsent gradient: every rank
                                      that averages gradients with this one is a replica, or where they are
                                      first averaged within hosts, as with `between`, every host
    about["where"]                    {dimension of the mesh: [place, size]} of those that tell this rank from
                                      ranks with other parameters or pieces of them, as of a pipeline or of
                                      tensor parallelism; {"ranks": those of the process group} where it has
                                      no mesh. Residuals go only to ranks with the same
    about["place"], ["places"]        of a rank within its host, where gradients are averaged within hosts
    about["chunks"]                   0: a residual has the parameter's shape. Else it is so many chunks, in
                                      wire order with padding: of places * chunks of them, number `place` and
                                      each `places` further on; 1 with `between`
    about["dims"]                     with chunks: {parameter: the dimension along which it is cut}, of those
                                      where that is not the first; absent in files of before
    about["part"], ["parts"]          0 of 1. Else residuals of the ranks of one replica and place add up, as
                                      each is zero but for a part of its own; which, says about["cut"]
    about["step"], ["loss_scale"]     exchanges so far, from which the rounding of residuals derives; factor
                                      by which gradients were multiplied
    about["schedule"]                 tagc_schedule_save(), in base64; absent without levels. Open windows
                                      count only for the same number of ranks
    about["pending"]                  {parameter: sums of a window of the schedule that was full when this was
                                      saved, and not added up over ranks yet}; absent if there is none
    about["gathered"]                 of each module in "replicas": [gathers so far, checksum of this rank's
                                      input to the last one, checksum of its shard when this was saved]; only
                                      if `parameters` are deltas. With another number of ranks, or if
                                      parameters differ from the saved ones, the first gather sends whole
                                      values

W' replicas instead of W keep 1/W times the sum over replicas: new replica r' gets W'/W times the sum of all
old r with r mod W' = r'. If W' > W, the new replicas that are r modulo W share an old residual equally. If
one of them got all of it, its residual would be W'/W times too large for its gradients: selection would take
little else for many steps, and the quantiser's scales would fit the residual and not the gradients. Shared,
each residual has the usual size for W' ranks. (torch divides gradients that are reduced in fp16 by a power of
two that depends on W, 2 for 4 ranks and 4 for 8. A change of that is not corrected.)"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pathlib
import pickle
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.interfaces import ALONE, Replica
from tagc.torch.schedule import policy, schedule
from tagc.torch.state import Keeper, State

VERSION = 2
ABOUT, REPLICAS = "about", "replicas"
# What version 1 called them, with advice for who reads DCP's error of a missing key.
_OF_VERSION_1 = {
    ABOUT: "about (not there: where another number of ranks saved, load handle.at(path); where no tagc "
    "handle was saved, leave it out)",
    REPLICAS: "replicas (not there: saved without deltas, or by ranks that are others now: load "
    "handle.at(path))",
}
_NOW = {old: name for name, old in _OF_VERSION_1.items()}
_NUMBERS = {
    "world_size": 1,
    "rank": 0,
    "managed": 0,
    "replica": 0,
    "replicas": 1,
    "place": 0,
    "places": 1,
    "part": 0,
    "parts": 1,
    "chunks": 0,
    "step": 0,
    "loss_scale": 0,
}


# path of a file that save_files() has written -> what it is of, the last one last
_writers: dict[str, list[weakref.ref[State]]] = {}


_PLACE = ("replica", "place", "part", "cut", "where")  # of a rank, in "about"
_SIZES = ("world_size", "replicas", "places", "parts", "chunks")  # of all ranks


def save(state: State) -> dict[str, Any]:
    """Copies of this rank's residuals and of its rows of replicas. Local."""
    with state.lock:
        _check_open(state)
        residuals = {}
        for keeper in _keepers(state):
            held = keeper.unit.residuals_on_the_wire()
            for parameter in keeper.parameters:
                wire = held.pop(parameter.name, None)
                if wire is None:
                    wire = torch.full((_n_wire(parameter, keeper),), -0.0, dtype=torch.float32, device="cpu")
                residuals[parameter.name] = _from_wire(wire, parameter, keeper)
        about, entry = _about(state), {"residuals": residuals}
        if replicas := state.wrapper.replicas():
            about["gathered"] = {name: list(replica[1:]) for name, replica in replicas.items()}
            entry[REPLICAS] = {name: replica.row for name, replica in replicas.items()}
        return {f"rank{_place(state)[0]}": {ABOUT: json.dumps(about), **entry}}


def abouts(saved: Any) -> dict[int, dict[str, Any]]:
    """Returns what each rank that saved says of itself."""
    return {rank: about for rank, (about, _) in _ranks(saved, residuals=False).items()}


def renamed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what one rank saved, by the names of this version."""
    return {_NOW.get(name, name): value for name, value in entry.items()}


def load(state: State, saved: Any, is_selected: bool = False) -> None:
    """Loads a checkpoint. saved: the result of save() on this rank; with another world size, a list of those
    of all ranks (is_selected: only of ranks that this one needs). Local; changes nothing if it raises."""
    with state.lock:
        _check_open(state)
        about_now, old = _about(state), _ranks(saved)
        for about, _ in old.values():
            if bool(about["managed"]) != state.wrapper.is_elastic:
                raise _bad(
                    f"was {'' if about['managed'] else 'not '}saved by replicas that join and leave, whose "
                    "residuals are parts of the mean gradient: load it "
                    f"{'there' if about['managed'] else 'elsewhere'}"
                )
        first = next(iter(old.values()))[0]
        if state.wrapper.has_several_meshes and any(first[key] != about_now[key] for key in _SIZES):
            raise Error(
                "unsupported",
                f"tagc state: was saved by {_many(first)} ranks, and there are {_many(about_now)} now; "
                "gradients of some parameters of this model are averaged over other ranks than those of "
                "others, and which ranks have the same is not known: load it with as many ranks, or leave "
                "it out",
            )
        wanted = _sources(about_now, {rank: about for rank, (about, _) in old.items()}, is_selected)
        if alone := {name for name, why in state.wrapper.left_to_torch().items() if why == ALONE}:
            for about, residuals in old.values():
                old[about["rank"]] = about, {n: values for n, values in residuals.items() if n not in alone}
            state.say("tagc: residuals of what one rank trains alone now are left out of what was loaded")
        names = {name for rank in wanted for name in old[rank][1]}
        keepers = _keepers(state, names)
        if new := sorted({p.name for keeper in keepers for p in keeper.parameters} - names):
            more = f" and {len(new) - 1} more begin" if len(new) > 1 else " begins"
            state.say(f"tagc: the residual of {new[0]}{more} at zero: what was loaded has none of it")
            keepers = [k._replace(parameters=[p for p in k.parameters if p.name in names]) for k in keepers]
        for rank in wanted:
            _check(keepers, rank, *old[rank], is_own=wanted[rank] is None)
        sources = [_Source(*old[rank], factor) for rank, factor in wanted.items()]
        about, is_alike = sources[0].about, sources[0].factor is None
        about_then = old[about_now["rank"]][0] if about_now["rank"] in old else None
        is_of_as_many = about_then is not None and about_then["world_size"] == about_now["world_size"]
        replicas = _replicas(state, saved, about_then, is_alike) if about_then and is_of_as_many else {}
        for keeper in keepers:
            keeper.unit.set_residuals_on_the_wire(
                {p.name: _resharded(p, keeper, sources) for p in keeper.parameters}
            )
        if state.wrapper.replica_sizes():
            state.wrapper.set_replicas(replicas)
            if not replicas:
                why = "it has no replicas" if is_alike else f"{about['world_size']} ranks saved it"
                state.say(
                    "tagc: the next gather sends all parameters whole, not what changed: this state was "
                    f"loaded, and {why}"
                )
        state.resume(about["step"], about["loss_scale"])
        state.moments.load(about, is_alike)


def save_files(state: State, folder: Any) -> None:
    """Writes this rank's file of a folder, and deletes those of ranks that are no more. Local."""
    _check_open(state)
    folder = _folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise Error("io", f"{folder} cannot be made: {failure}") from failure
    path = _file(folder, _place(state)[0])
    _check_writers(state, path)
    others = [writer for writer in _open_writers(path) if writer is not state]
    # of one handle that a process has more of, such as of stages, this is known at once
    are_apart = not state.wrapper.is_elastic and bool(state.wrapper.place().where)
    are_apart |= not all(writer.wrapper.shares_folder for writer in (*others, state))
    if others and are_apart:
        raise _taken(path)
    _writers[str(path.resolve())] = [weakref.ref(writer) for writer in (*others, state)]
    part = path.with_suffix(".part")
    try:
        torch.save(save(state), part)
        part.replace(path)
    except (OSError, RuntimeError) as failure:  # torch says neither the file nor why where a disk is full
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise Error("io", f"{part} cannot be written, is the disk full? {failure}") from failure
    n_ranks = _place(state)[1]
    for old in folder.glob("rank*.pt"):  # of a run with more ranks
        if (rank := old.stem.removeprefix("rank")).isdecimal() and int(rank) >= n_ranks:
            old.unlink(missing_ok=True)


def read_files(state: State, folder: Any) -> Any:
    """Returns this rank's file, or those of all ranks if their number has changed. Local."""
    _check_open(state)
    rank = _place(state)[0]
    folder = _folder(folder)
    _check_writers(state, _file(folder, rank))
    first = rank if _file(folder, rank).exists() else 0
    file = _read(folder, first)
    saved, about_now = next(iter(_ranks(file).values()))[0], _about(state)
    n_saved = saved["world_size"]
    if first == rank and all(saved[key] == about_now[key] for key in _SIZES) and _is_place(saved, about_now):
        return file
    everyone = []
    for r in range(n_saved):
        everyone.append(file if r == first else _read(folder, r))
        for about, _ in _ranks(everyone[-1], residuals=False).values():
            _check_same_save(saved, about)  # before a file is missed that this save did not write
    return everyone


def _open_writers(path: pathlib.Path) -> list[State]:
    """Returns the open handles of this process that have written the file, the last one last."""
    known = (one() for one in _writers.get(str(path.resolve()), ()))
    return [writer for writer in known if writer is not None and not writer.is_closed]


def _check_writers(state: State, path: pathlib.Path) -> None:
    """Raises Error if another handle has replaced this one's file. That a handle which was never closed has
    written it before is no mistake: a resumed run may be in the process of the one before it."""
    writers = _open_writers(path)
    if state in writers[:-1]:
        raise _taken(path)


def _taken(path: pathlib.Path) -> Error:
    return Error(
        "argument",
        f"{path} was saved by another open handle of this process: give each handle, as of each model and of "
        "each stage of a pipeline, a folder of its own",
    )


def _folder(folder: Any, name: str = "folder") -> pathlib.Path:
    if not isinstance(folder, (str, os.PathLike)):
        raise Error("argument", f"{name} is {folder!r}, must be a path")
    return pathlib.Path(folder)


def _file(folder: pathlib.Path, rank: int) -> pathlib.Path:
    return folder / f"rank{rank}.pt"


def _read(folder: pathlib.Path, rank: int) -> Any:
    path = _file(folder, rank)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as failure:
        raise Error(
            "io",
            f"{path} cannot be read: {failure}; a folder that handle.save() wrote has a file of each rank, "
            "and with another number of ranks all of them are read",
        ) from failure


class Reader:
    """handle.at(path): replaces the handle in a dcp.load() of a checkpoint that another number of ranks
    saved. It loads the residuals that this rank takes over."""

    def __init__(
        self, state: State, checkpoint_id: Any, key: str | None = None, storage_reader: Any = None
    ) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        self._state, self._where = state, f"checkpoint {checkpoint_id}"
        reader = storage_reader or FileSystemReader(_folder(checkpoint_id, "checkpoint_id"))
        try:
            self._metadata: Any = reader.read_metadata()
        except (OSError, EOFError, ValueError) as failure:
            raise Error("io", f"{self._where} cannot be read: {failure}") from failure
        self._key = self._find(key)
        is_old = any(path[-1] == _OF_VERSION_1[ABOUT] for path in self._paths() if path[:-2] == self._key)
        self._about, self._replicas = _OF_VERSION_1.values() if is_old else (ABOUT, REPLICAS)
        self._abouts = self._read_abouts(reader)

    def _paths(self) -> Iterator[tuple[Any, ...]]:
        return (path for path in (self._metadata.planner_data or {}).values() if isinstance(path, tuple))

    def _find(self, key: str | None) -> tuple[Any, ...]:
        """Returns the path of the handle within the checkpoint."""
        handles = {path[:-2] for path in self._paths() if path[-1] in (ABOUT, _OF_VERSION_1[ABOUT])}
        fitting = {path for path in handles if key in (None, path[-1], ".".join(map(str, path)))}
        if len(fitting) != 1:
            names = ", ".join(sorted(repr(".".join(map(str, path))) for path in handles))
            raise Error(
                "argument",
                f"{self._where} has the states of tagc handles under the keys {names}; key is {key!r}, must "
                "be one of them"
                if handles
                else f"{self._where} was saved without a tagc handle: leave the handle out of dcp.load(), "
                "and its residuals begin at zero",
            )
        return fitting.pop()

    def _read_abouts(self, reader: Any) -> dict[int, dict[str, Any]]:
        import torch.distributed.checkpoint as dcp

        ours = (path for path in self._paths() if path[-1] == self._about and path[:-2] == self._key)
        nested = {path[-2]: {self._about: ""} for path in ours}
        wrapped: dict[str, Any] = nested
        for name in reversed(self._key):
            wrapped = {name: wrapped}
        dcp.load(wrapped, storage_reader=reader, no_dist=True)
        return {rank: about for rank, (about, _) in _ranks(nested, residuals=False).items()}

    def state_dict(self) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for rank in _sources(_about(self._state), self._abouts):
            entries[f"rank{rank}"] = {
                self._about: "",
                "residuals": self._tensors(f"rank{rank}", "residuals", torch.float32),
            }
            if rank == _place(self._state)[0]:
                if replicas := self._tensors(f"rank{rank}", self._replicas, torch.bfloat16):
                    entries[f"rank{rank}"][self._replicas] = replicas
        return entries

    def _tensors(self, rank: str, kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Returns empty tensors, for what the checkpoint has there."""
        return {
            path[-1]: torch.empty(self._metadata.state_dict_metadata[fqn].size, dtype=dtype, device="cpu")
            for fqn, path in self._metadata.planner_data.items()
            if isinstance(path, tuple) and path[:-3] == self._key and path[-3:-1] == (rank, kind)
        }

    def load_state_dict(self, saved: Any) -> None:
        load(self._state, saved, is_selected=True)


# ---- ranks, units and parameters ----


def _place(state: State) -> tuple[int, int]:
    """Returns (rank, ranks). A replica counts as alone where others join and leave."""
    if state.wrapper.is_elastic:
        keeper = state.keepers()[0]
        return keeper.place, keeper.places
    return dist.get_rank(), dist.get_world_size()


def _about(state: State) -> dict[str, Any]:
    rank, world_size = _place(state)
    about: dict[str, Any] = (
        {
            "version": VERSION,
            "world_size": world_size,
            "rank": rank,
            "managed": int(state.wrapper.is_elastic),
            "replica": rank,
            "replicas": world_size,
            "where": {},
            "place": 0,
            "places": 1,
            "part": 0,
            "parts": 1,
            "cut": "",
            "chunks": 0,
            "step": state.n_steps,
            "loss_scale": state.loss_scale,
        }
        | state.schedule.state()
        | state.wrapper.about()
    )
    if not state.wrapper.is_elastic:
        about |= state.wrapper.place()._asdict()
    keeper = next(iter(state.keepers()), None)
    if keeper is not None and keeper.held is not None:
        about |= {"place": keeper.place, "places": keeper.places, "chunks": len(keeper.held)}
        about["dims"] = {p.name: p.dim for keeper in state.keepers() for p in keeper.parameters if p.dim}
        if state.wrapper.is_elastic:
            about |= {"replica": 0, "replicas": 1}
    return about


def _keepers(state: State, saved: Set[str] = frozenset()) -> list[Keeper]:
    """Returns keepers of trainable parameters, and of frozen ones that still have a residual, here or in the
    checkpoint."""
    frozen = {name for name, p in policy.named_parameters(state.model) if not p.requires_grad}
    keepers = []
    for unit, parameters, n_chunks, held in state.keepers():
        named = saved | unit.names_of_residuals() if frozen else ()
        keepers.append(
            Keeper(
                unit,
                [
                    p
                    for p in parameters
                    if p.numel
                    and state.options.feeds_back(p.kind)
                    and (p.name not in frozen or p.name in named)
                ],
                n_chunks,
                held,
            )
        )
    return keepers


def _n_chunk(parameter: layouts.Parameter, n_chunks: int) -> int:
    return layouts.chunked_elems(parameter, n_chunks) // n_chunks


def _n_wire(parameter: layouts.Parameter, keeper: Keeper) -> int:
    if keeper.held is None:
        return parameter.numel
    return len(keeper.held) * _n_chunk(parameter, keeper.n_chunks)


def _from_wire(wire: torch.Tensor, parameter: layouts.Parameter, keeper: Keeper) -> torch.Tensor:
    if keeper.held is not None:
        return wire
    return layouts.from_wire(wire, parameter, keeper.n_chunks).contiguous()


# ---- loading ----


def _check_open(state: State) -> None:
    if state.is_closed:
        raise Error("state", "this tagc handle is closed, and its residuals are gone")


def _bad(text: str) -> Error:
    return Error("argument", f"tagc state: {text}")


def _ranks(saved: Any, residuals: bool = True) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """Converts any form of a state to {rank: (about, {name: tensor})}."""
    entries = {}
    for part in saved if isinstance(saved, (list, tuple)) else [saved]:
        if not isinstance(part, dict) or not part:
            what = "empty" if part == {} else f"a {type(part).__name__}"
            raise _bad(f"is {what}, must be what state_dict() gives, or a list with that of each rank")
        for name, entry in part.items():
            entry = renamed(entry) if isinstance(entry, dict) else {}
            text = entry.get(ABOUT)
            if not isinstance(text, str):
                raise _bad(f"{name!r} is not what state_dict() gives")
            if residuals and not isinstance(entry.get("residuals", {}), dict):
                raise _bad(f"residuals of {name} are a {type(entry['residuals']).__name__}, must be a dict")
            about = _parsed(name, text)
            if about["rank"] in entries or name != f"rank{about['rank']}":
                raise _bad(f"{name} is there twice, or says that it is rank {about['rank']}")
            entries[about["rank"]] = about, entry.get("residuals", {})  # DCP writes no empty dict
    if not entries:
        raise _bad("has no rank's")
    return entries


def _parsed(name: str, text: str) -> dict[str, Any]:
    try:
        about = json.loads(text)
        version = about.get("version")
        if about and version not in (1, VERSION):
            raise _bad(f"{name} is of version {version!r}, this tagc reads versions 1 and {VERSION}")
        fits = (
            all(
                isinstance(about[key], (int, float))
                and not isinstance(about[key], bool)
                and about[key] >= low
                for key, low in _NUMBERS.items()
            )
            and about["replica"] < about["replicas"]
            and about["place"] < about["places"]
            and about["part"] < about["parts"]
            and isinstance(about["cut"], str)
            and _is_where(about["where"])
            and all(type(dim) is int and dim > 0 for dim in about.get("dims", {}).values())
        )
        fits = fits and 0 < about["loss_scale"] < math.inf and schedule.fits(about)
    except (AttributeError, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise _bad(f"{ABOUT!r} of {name} is {text[:200]!r}")
    return about


def _sources(
    about_now: Mapping[str, Any], abouts: Mapping[int, Mapping[str, Any]], is_selected: bool = False
) -> dict[int, float | None]:
    """Returns {old rank: factor of its residuals} of the ranks whose residuals this one takes over, in order
    of replica and place; None: no factor, bit for bit."""
    first = abouts[min(abouts)]
    for about in abouts.values():
        _check_same_save(first, about)
    if all(about_now[key] == first[key] for key in _SIZES):
        rank_now = about_now["rank"]
        if rank_now not in abouts:
            raise _bad(
                f"has {_listed(abouts)}, and this is rank {rank_now}: each rank has its own residuals, "
                "so call handle.save(folder) and handle.load(folder) on every rank, or give dcp.save() the "
                "handle"
            )
        if _is_place(abouts[rank_now], about_now):
            return {rank_now: None}
    same = {rank: about for rank, about in abouts.items() if about["where"] == about_now["where"]}
    if not same:
        raise _bad(
            f"was saved by {first['world_size']} ranks, of which rank {first['rank']} had place "
            f"{_where(first)}; this one of {about_now['world_size']} ranks has place {_where(about_now)}, "
            "and no saved rank had the same: residuals of other stages or pieces do not fit. Load it with "
            "the same mesh but for the dimension that averages gradients, or leave it out"
        )
    old, new = first["replicas"], about_now["replicas"]
    congruent = range(about_now["replica"] % old if new > old else about_now["replica"], old, min(old, new))
    n_heirs = len(range(about_now["replica"] % old, new, old)) if new > old else 1
    heirs = sorted(
        (about["replica"], about["place"], about["part"], rank)
        for rank, about in same.items()
        if about["replica"] in congruent
    )
    wanted = {rank: new / old / n_heirs for *_, rank in heirs}
    # Check all, not only those that this rank needs: else one rank would raise and another continue.
    if (
        len(wanted) != len(congruent) * first["places"] * first["parts"]
        or not is_selected
        and len(abouts) != first["world_size"]
    ):
        raise _bad(
            f"was saved by {_many(first)} ranks, and there are {_many(about_now)} now; only residuals of "
            f"{_listed(abouts)} are here: load a list of all ranks' state_dict(), or with "
            "torch.distributed.checkpoint handle.at(path) instead of handle"
        )
    return wanted


def _is_place(about: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether that is of a rank with this one's place, and with chunks of the same elements."""
    are_alike = about.get("dims", now.get("dims")) == now.get("dims")
    return are_alike and all(about[key] == now[key] for key in _PLACE)


def _as_saved(parameter: layouts.Parameter, about: Mapping[str, Any]) -> layouts.Parameter:
    """Returns a parameter as it was cut into the chunks of a saved residual."""
    if "dims" not in about:
        return parameter
    return parameter._replace(dim=about["dims"].get(parameter.name, 0))


def _check_same_save(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raises Error unless two ranks saved at the same step of the same run, as far as their numbers tell."""
    for key in (*_SIZES, "step"):
        if other[key] != one[key]:
            raise _bad(
                f"{key} is {one[key]} of rank {one['rank']} and {other[key]} of rank {other['rank']}: they "
                "are not of the same moment"
            )


def _many(about: Mapping[str, Any]) -> str:
    """Returns how many ranks there are, as text."""
    return f"{about['world_size']}" + (f" ({about['places']} per host)" if about["chunks"] else "")


def _is_where(where: Any) -> bool:
    return isinstance(where, dict) and all(
        isinstance(name, str)
        and isinstance(numbers, list)
        and all(isinstance(number, int) for number in numbers)
        and (name == "ranks" or len(numbers) == 2)
        for name, numbers in where.items()
    )


def _where(about: Mapping[str, Any]) -> str:
    """Returns where a rank was, as text."""
    if "ranks" in about["where"]:
        return f"{about['replica']} of the process group {about['where']['ranks']}, which has no mesh"
    places = [f"{place} of {size} of {name!r}" for name, (place, size) in about["where"].items()]
    return ", ".join(places) or f"{about['replica']} of {about['replicas']} that average gradients"


def _listed(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(map(str, sorted(ranks))) if ranks else "no rank"


def _check(
    keepers: Iterable[Keeper], rank: int, about: Mapping[str, Any], residuals: Mapping[str, Any], is_own: bool
) -> None:
    """Raises Error unless these residuals fit. is_own: whether this rank saved them, as it is now."""
    names = {parameter.name for keeper in keepers for parameter in keeper.parameters}
    missing, unknown = sorted(names - set(residuals)), sorted(set(residuals) - names)
    if missing:
        raise _bad(
            f"rank {rank} has no residual of {missing[0]}, which this model compresses (classes must be the "
            "same)"
        )
    if unknown:
        raise _bad(
            f"rank {rank} has a residual of {unknown[0]}, which this model does not compress, or does not "
            "have"
        )
    for keeper in keepers:
        for parameter in keeper.parameters:
            values, what = residuals[parameter.name], f"residual of {parameter.name} of rank {rank}"
            if not isinstance(values, torch.Tensor) or not values.is_floating_point():
                kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
                raise _bad(f"{what} is {kind}, must be a floating tensor")
            shape = tuple(parameter.shape)
            if n := about["chunks"]:
                cut, n_chunks = _as_saved(parameter, about), about["places"] * n
                if cut.dim and (cut.dim >= len(shape) or shape[cut.dim] % n_chunks):
                    raise _bad(f"{what} was cut into {n_chunks} along dimension {cut.dim} of {shape}")
                shape = (n * _n_chunk(cut, n_chunks),)
            if is_own:
                shape = (_n_wire(parameter, keeper),) if keeper.held is not None else tuple(parameter.shape)
            if tuple(values.shape) != shape:
                raise _bad(f"{what} is {tuple(values.shape)}, must be {shape}")
            if not values.isfinite().all():
                raise _bad(f"{what} is not finite")


def _replicas(state: State, saved: Any, about: Mapping[str, Any], is_alike: bool) -> dict[str, Replica]:
    """Returns this rank's rows, as they were saved, of the modules that keep one here. A row does not depend
    on which ranks share a host. is_alike: else those of other sizes are left out."""
    rank = f"rank{about['rank']}"
    entry = next(
        part[rank] for part in (saved if isinstance(saved, (list, tuple)) else [saved]) if rank in part
    )
    if not state.wrapper.replica_sizes():
        return {}
    rows, gathered, replicas = renamed(entry).get(REPLICAS, {}), about.get("gathered", {}), {}
    if not isinstance(rows, dict) or not isinstance(gathered, dict) or set(rows) != set(gathered):
        raise _bad(
            f"replicas of {rank} are a {type(rows).__name__}, must be a dict with a tensor of each module "
            "that 'gathered' names"
        )
    for name, n_shard in state.wrapper.replica_sizes().items():
        if name not in rows or not is_alike and getattr(rows[name], "shape", None) != (n_shard,):
            continue
        row, numbers = rows[name], gathered[name]
        if not isinstance(row, torch.Tensor) or row.dtype != torch.bfloat16 or row.shape != (n_shard,):
            what = f"{row.dtype} {tuple(row.shape)}" if isinstance(row, torch.Tensor) else type(row).__name__
            raise _bad(f"replica of {name} of {rank} is {what}, must be torch.bfloat16 ({n_shard},)")
        if not row.isfinite().all():
            raise _bad(f"replica of {name} of {rank} is not finite")
        if (
            not isinstance(numbers, list)
            or [type(number) for number in numbers] != [int, str, str]
            or not 0 <= numbers[0] < 2**50
        ):
            raise _bad(f"'gathered' of {name} of {rank} is {numbers!r}, must be a count and two checksums")
        replicas[name] = Replica(row, *numbers)
    return replicas


class _Source(NamedTuple):
    """The residual of a saved rank."""

    about: dict[str, Any]
    residuals: dict[str, Any]
    factor: float | None  # None: no factor, bit for bit

    def tensor(self, parameter: layouts.Parameter) -> torch.Tensor:
        return self.residuals[parameter.name].to(torch.float32)


def _resharded(parameter: layouts.Parameter, keeper: Keeper, sources: list[_Source]) -> torch.Tensor:
    """Returns the part of a parameter's residual that this rank takes over, in its own wire order."""
    if len(sources) == 1 and sources[0].factor is None:
        values = sources[0].residuals[parameter.name]
        return values if keeper.held is not None else layouts.to_wire(values, parameter, keeper.n_chunks)
    total = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
    scale = sources[0].about["loss_scale"]
    for _, replica in itertools.groupby(sources, key=lambda source: source.about["replica"]):
        first, *others = replica
        assert first.factor is not None  # or there is one source
        whole = _joined(parameter, [first, *others])
        total.add_(whole, alpha=first.factor * scale / first.about["loss_scale"])
    values = layouts.to_wire(total, parameter, keeper.n_chunks)
    if keeper.held is not None:
        n = _n_chunk(parameter, keeper.n_chunks)
        values = torch.nn.functional.pad(values, (0, n * keeper.n_chunks - values.numel()))
        values = values.view(keeper.n_chunks, n)[list(keeper.held)].reshape(-1)
    return values


def _joined(parameter: layouts.Parameter, ranks: list[_Source]) -> torch.Tensor:
    """Returns the residual of one replica, of the parameter's shape. ranks: all of it, in the order of places
    and parts."""
    n_chunks, of_places = ranks[0].about["chunks"], dict[int, torch.Tensor]()
    cut = _as_saved(parameter, ranks[0].about)
    for source in ranks:
        values, place = source.tensor(parameter), source.about["place"]
        of_places[place] = of_places[place] + values if place in of_places else values
    if not n_chunks:
        return of_places[0]
    held = torch.stack([values.view(n_chunks, -1) for values in of_places.values()], dim=1)
    return layouts.from_wire(held.reshape(-1)[: parameter.numel], cut, n_chunks * len(of_places))
