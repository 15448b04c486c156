"""Residuals beside the script's own checkpoints. For the script's run, what saves and loads is wrapped:

    torch.distributed.checkpoint   all ranks call it: each writes its residuals at once, to <checkpoint>/tagc
    torch.save, and Lightning's    often rank 0 alone calls it. Only residuals of the same step belong to that
    checkpoints, which go by it    checkpoint, so the others must know before their next exchange. The first
                                   rank broadcasts one number at the first training pass after each exchange,
                                   which arrives during the forward pass: they write to <checkpoint>.tagc

What is loaded before a model trains is where its residuals are, if the first rank has loaded it.

A folder has one of each model, by its number in the order in which they began to train."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.join import Join

import tagc.torch as tagc

FOLDER = "tagc"
# what wrappers put into the names of parameters
_OF_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_DEPTH = 3  # of a checkpoint's tables that are looked into


def folder_of(checkpoint: str) -> pathlib.Path:
    """Returns where the residuals of a checkpoint are: in its folder, or beside its file."""
    path = pathlib.Path(checkpoint)
    return path / FOLDER if path.is_dir() else path.with_name(f"{path.name}.{FOLDER}")


def _tables(saved: Any, depth: int = _DEPTH) -> Iterator[Mapping[Any, Any]]:
    """Yields the tables in a checkpoint."""
    if isinstance(saved, Mapping):
        yield saved
    if isinstance(saved, (Mapping, list)) and depth:
        for value in saved.values() if isinstance(saved, Mapping) else saved:
            yield from _tables(value, depth - 1)


def has_optimizer(saved: Any) -> bool:
    """Returns whether something has an optimizer's state: training can go on from it."""
    return any("state" in table and "param_groups" in table for table in _tables(saved))


def _plain(name: str) -> str:
    for word in _OF_WRAPPERS:
        name = name.replace(word, "")
    return name


def has_weights(saved: Any, model: torch.nn.Module) -> bool:
    """Returns whether something has weights of the model: most tensors of a table have names of its
    parameters."""
    names = {_plain(name) for name, _ in model.named_parameters()} | {
        _plain(n) for n, _ in model.named_buffers()
    }
    for table in _tables(saved):
        keys = [_plain(str(key)) for key, value in table.items() if isinstance(value, torch.Tensor)]
        if keys and 2 * sum(key in names for key in keys) > len(keys):
            return True
    return False


def is_training(module: torch.nn.Module) -> bool:
    """Returns whether a forward pass of the module is of training, not of an evaluation. A wrapper may be in
    eval() around a module that is not, as Lightning's."""
    modes = (module.training, *(child.training for child in module.children()))
    return torch.is_grad_enabled() and any(modes)


def path_of(file: Any) -> str | None:
    """Returns the path of what torch.save() and torch.load() take; None of a buffer in memory."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    return os.path.abspath(name) if isinstance(name, (str, os.PathLike)) else None


class Residuals:
    """Those of one compressed model. Every method is collective over its ranks, but for is_new()."""

    def __init__(
        self,
        root: torch.nn.Module,
        handle: tagc.Compressed,
        ranks: Sequence[int],
        number: int,
        alone: Callable[..., Any],
    ) -> None:
        """alone: calls what saves or loads, unseen."""
        is_world = len(ranks) == dist.get_world_size()
        self._group = dist.new_group(
            None if is_world else list(ranks), backend="gloo", use_local_synchronization=not is_world
        )
        self._first, self._n_ranks, self._number, self._alone = ranks[0], len(ranks), f"{number}", alone
        self.root, self._handle = weakref.ref(root), weakref.ref(handle)
        self._n_steps = handle.n_steps  # when the ranks agreed last
        self._flag, self._work = torch.zeros(1, dtype=torch.int64), None
        self.pending: list[str] = []  # checkpoints of the first rank since then
        self.is_paused = False  # within DDP's join(), where ranks without data make no forward passes
        root.register_forward_pre_hook(self._before)
        root.register_forward_hook(self._after)

    @property
    def handle(self) -> tagc.Compressed | None:
        handle = self._handle()
        return None if handle is None or handle.is_closed else handle

    def is_new(self) -> bool:
        """Returns whether gradients were exchanged since the ranks agreed: the same on all of them."""
        return (handle := self.handle) is not None and handle.n_steps != self._n_steps

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and is_training(module):
            self.begin()

    def _after(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self.end()

    def begin(self) -> None:
        """Asks the first rank for its checkpoints since the last exchange."""
        if self._work is None and self.is_new() and not self.is_paused:
            assert (handle := self.handle) is not None
            self._n_steps = handle.n_steps
            self._flag.fill_(len(self.pending))
            self._work = dist.broadcast(self._flag, self._first, self._group, async_op=True)

    def end(self) -> None:
        """Writes the residuals of these checkpoints, if there are any."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if int(self._flag):
            names = [[*self.pending]]
            dist.broadcast_object_list(names, self._first, self._group)
            for name in names[0]:
                self.save(name)
        self.pending.clear()

    def save(self, checkpoint: str) -> None:
        """Local. What cannot be written costs residuals, not the run."""
        if (handle := self.handle) is not None:
            try:
                self._alone(handle.save, folder_of(checkpoint) / self._number)
            except (OSError, RuntimeError) as failure:
                print(f"tagc run: residuals of {checkpoint} are not saved: {failure}", flush=True)

    def load(self, checkpoint: str | None, say: Callable[[str], None]) -> None:
        """Takes up the residuals of the checkpoint that the first rank has loaded, on all ranks or none."""
        name = [checkpoint]
        dist.broadcast_object_list(name, self._first, self._group)
        handle = self.handle
        if name[0] is None or handle is None:
            return
        folder, why = folder_of(name[0]) / self._number, ""
        has_folder = folder.is_dir()
        if not self._are_all(has_folder):
            if not handle.n_steps:
                say(f"residuals begin anew: {name[0]} was saved without them, or not every rank sees it")
            return
        try:
            self._alone(handle.load, folder)
        except tagc.Error as failure:
            why = str(failure)
        if self._are_all(not why):
            say(f"residuals go on from {folder}")
        else:
            handle.discard()
            say(f"residuals begin anew: {why or 'they do not fit on another rank'}")

    def _are_all(self, is_so: bool) -> bool:
        everyone: list[Any] = [None] * self._n_ranks
        dist.all_gather_object(everyone, is_so, self._group)
        return all(everyone)


class Checkpoints:
    """Sees the script save and load."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._models: list[Residuals] = []
        self._loaded: str | None = None
        self._is_within = False  # another call that saves or loads
        self._originals: list[tuple[Any, str, Any]] = []

    def add(self, root: torch.nn.Module, handle: tagc.Compressed, ranks: Sequence[int]) -> None:
        """Takes up the model's residuals. Collective over its ranks."""
        residuals = Residuals(root, handle, ranks, len(self._models), self._alone)
        self._models.append(residuals)
        residuals.load(self._loaded, self._say)
        for name in ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io"):
            io = getattr(sys.modules.get(name), "TorchCheckpointIO", None)
            if io is not None and (io, "save_checkpoint") not in [known[:2] for known in self._originals]:
                self._wrap(
                    io, "save_checkpoint", lambda _, saved, path, *__, **___: self._on_save(saved, path)
                )

    def end(self) -> None:
        """The last agreement, before the ranks part."""
        if not dist.is_initialized():
            return
        for residuals in self._models:
            try:
                residuals.begin()
                residuals.end()
            except RuntimeError:  # a peer has gone, and with it the checkpoint
                return

    # ---- what is wrapped ----

    def observe(self) -> None:
        self._wrap(
            torch, "save", lambda saved, file=None, *_, **named: self._on_save(saved, named.get("f", file))
        )
        self._wrap(torch, "load", self._on_load, takes_result=True)
        for name in ("save", "async_save"):
            self._wrap(dcp, name, self._on_dcp_save)
        self._wrap(dcp, "load", self._on_dcp_load)
        self._wrap(dist, "destroy_process_group", self._on_destroy, is_before=True)
        self._wrap(Join, "__enter__", lambda _: self._join(True), is_before=True)
        self._wrap(Join, "__exit__", lambda *_: self._join(False))

    def unobserve(self) -> None:
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()

    def _wrap(
        self,
        owner: Any,
        name: str,
        see: Callable[..., None],
        is_before: bool = False,
        takes_result: bool = False,
    ) -> None:
        """Replaces a function by one that calls see() with its arguments, too, unless another wrapped one has
        called it."""
        original = getattr(owner, name)
        self._originals.append((owner, name, original))

        @functools.wraps(original)
        def seen(*arguments: Any, **named: Any) -> Any:
            if self._is_within:
                return original(*arguments, **named)
            if is_before:
                see(*arguments, **named)
            result = self._alone(original, *arguments, **named)
            if not is_before:
                see(*((result,) if takes_result else ()), *arguments, **named)
            return result

        setattr(owner, name, seen)

    def _alone(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls a function whose own calls are not looked at."""
        before, self._is_within = self._is_within, True
        try:
            return function(*arguments, **named)
        finally:
            self._is_within = before

    def _on_save(self, saved: Any, file: Any) -> None:
        if (path := path_of(file)) is None or not self._models:
            return
        goes_on = has_optimizer(saved)
        for residuals in self._models:
            root = residuals.root()
            if root is not None and path not in residuals.pending and (goes_on or has_weights(saved, root)):
                residuals.pending.append(path)

    def _on_load(self, loaded: Any, file: Any = None, *_: Any, **named: Any) -> None:
        path = path_of(named.get("f", file))
        if path is not None and (folder_of(path).is_dir() or self._loaded is None and has_optimizer(loaded)):
            self._loaded = path

    def _on_dcp_save(self, *_: Any, **named: Any) -> None:
        if (path := _dcp_path(named.get("checkpoint_id"), named.get("storage_writer"))) is not None:
            with contextlib.suppress(OSError):  # residuals.save() says so
                pathlib.Path(path).mkdir(parents=True, exist_ok=True)  # async_save() makes it later
            for residuals in self._models:
                residuals.save(path)

    def _on_dcp_load(self, *_: Any, **named: Any) -> None:
        path = _dcp_path(named.get("checkpoint_id"), named.get("storage_reader"))
        if path is None:
            return
        if not self._models:
            self._loaded = path
        for residuals in self._models:
            residuals.load(path, self._say)

    def _on_destroy(self, group: Any = None) -> None:
        if group in (None, dist.group.WORLD) and sys.exc_info()[0] is None:
            self.end()

    def _join(self, begins: bool) -> None:
        if begins:
            self.end()
        for residuals in self._models:
            residuals.is_paused = begins


def _dcp_path(checkpoint_id: Any, storage: Any) -> str | None:
    """Returns the folder of a checkpoint, None where it is not in a file system."""
    where = checkpoint_id or getattr(storage, "checkpoint_id", None)
    return None if where is None or "://" in str(where) else os.path.abspath(where)
