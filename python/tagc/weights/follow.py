"""Follower: turns weights into the newest version in a store.

    manifest -> files of all versions on the way, fetched as a whole -> checked -> written, one by one

Nothing is written before all of it is here, so that what happens to the store or its sender meanwhile leaves
the version that the weights have. Of files that are larger than some MB only one message is in memory at a
time."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from tagc._library import Error
from tagc.torch.extension import number
from tagc.weights import frame as frames
from tagc.weights import store as stores
from tagc.weights.layout import Layout, Row, by_name
from tagc.weights.store import Manifest, Store, Version
from tagc.weights.sync import WeightSync, write
from tagc.weights.tensors import Box, Model, Parts, Tensors, memories

_LONGEST_PAUSE_S = 0.5  # between two looks for a version
_TRIES = 10  # to fetch files before old ones are removed


def fetch(store: Store, versions: Sequence[Version], folder: str | None) -> list[list[frames.Source]]:
    """Returns the frames of versions, one of each sender. FileNotFoundError if a file is not there any
    more."""
    files = [file for one in versions for file in one.files]
    n_bytes = sum(size for _, size in files)
    sources = iter(frames.kept(((store.chunks(name), size) for name, size in files), n_bytes, folder))
    fetched = []
    for one in versions:
        fetched.append([next(sources) for _ in one.files])
        for (name, size), source in zip(one.files, fetched[-1]):
            if source.n_bytes != size:
                raise Error("corrupt", f"{name} has {source.n_bytes} bytes, and {size} in the manifest")
    return fetched


class Follower:
    """Keeps a model at the newest version in a store, into which a Publisher writes.

    model: a module, a dict of tensors by name, or a Layout, which says where the store's tensors lie in an
    engine's.
    names: returns the model's name for one of the store; None leaves it out. Not given: they are the same.
    loader: an engine's own, for tensors as checkpoints have them. The first time that all weights are read it
    gets them, and must write the bits that the Layout has written: else this is an Error.
    folder: for files that are fetched, as large as what is read; None: where the system has such files.
    buffers, threads: as those of WeightSync.

    Local: each rank of an engine has its own, and reads what it needs. Error if the model has tensors that
    the store has not."""

    def __init__(
        self,
        model: Model | Layout,
        store: str | os.PathLike[str],
        *,
        names: Callable[[str], str | None] | None = None,
        buffers: bool = False,
        folder: str | None = None,
        threads: int = 1,
        loader: Callable[[Iterator[tuple[str, torch.Tensor]]], None] | None = None,
    ) -> None:
        number("threads", threads, 1, 256, int)
        self._layout = model if isinstance(model, Layout) else by_name(model, names, buffers)
        self._store, self._folder, self._threads = stores.open_store(store), folder, threads
        self._sync: WeightSync | None = None
        self._loader = loader

    @property
    def version(self) -> int:
        """Returns the version that the weights are; 0: none, or one that was written in part."""
        return 0 if self._sync is None else self._sync.version

    @property
    def run(self) -> int:
        """Returns the number of the sender's run of which that version is; 0: none."""
        return 0 if self._sync is None else self._sync.run

    def update(self, version: int | None = None, wait_s: float = 0.0) -> int:
        """Turns the weights into a version of the store, and returns its number. version: None takes the
        newest, of which there may be none newer than these weights.
        wait_s: for which this waits until there is that version, or a newer one than these weights.
        After an Error the weights are as before, or a version on the way. If `version` is 0 then, they were
        written in part, for want of memory for instance: the next call writes all of them."""
        end = time.monotonic() + wait_s
        if self._sync is not None and self._layout.has_moved():
            self.forget()  # as after an engine has slept
        for _ in range(_TRIES):
            manifest = self._await(version, end)
            if manifest is None:
                return self.version
            try:
                self._go(manifest, manifest.version if version is None else version)
                return self.version
            except FileNotFoundError:  # newer versions have come since
                continue
        raise Error("transport", f"files of the store were removed {_TRIES} times before they were read")

    def forget(self) -> None:
        """Makes the next update() write all weights, for weights that something else has changed."""
        self._sync = None

    def _await(self, version: int | None, end: float) -> Manifest | None:
        """Returns the manifest that has what is asked for; None if these weights are that."""
        begin = time.monotonic()
        while True:
            manifest = stores.newest(self._store)
            is_same_run = manifest is not None and self._sync is not None and manifest.run == self._sync.run
            if version is not None and is_same_run and self.version > version:
                raise Error("state", f"version {version} is older than version {self.version}, which is here")
            if is_same_run and self.version == version:
                return None
            if manifest is not None and (version is None or manifest.version >= version):
                if not (is_same_run and self.version == manifest.version):
                    return manifest
            now = time.monotonic()
            if now >= end:
                break
            time.sleep(min(_LONGEST_PAUSE_S, 0.01 + 0.1 * (now - begin), end - now))
        if version is None and self.version:
            return None
        there = "no version" if manifest is None else f"version {manifest.version}"
        raise Error(
            "state", f"the store has {there} yet" + ("" if version is None else f", and not {version}")
        )

    def _go(self, manifest: Manifest, to: int) -> None:
        here = (0, 0) if self._sync is None else (self._sync.run, self._sync.version)
        path = manifest.path(*here, to)
        if path and path[0] in manifest.changes:
            try:
                self._apply(path)
                return
            except Error as problem:
                if problem.status != "mismatch":
                    raise
                warnings.warn(f"tagc: {problem}; version {to} is read as a whole", stacklevel=4)
                path = manifest.path(0, 0, to)
        if not path:
            raise Error("state", f"the store has version {manifest.version}, and no way to version {to}")
        self._apply(path, is_first_whole=True)

    def _apply(self, path: Sequence[Version], is_first_whole: bool = False) -> None:
        fetched = fetch(self._store, path, self._folder)
        if is_first_whole:
            rows = frames.described(frames.text_of(fetched[0][0]))
            tensors = self._layout.bind(rows)
            self._sync = WeightSync(tensors, threads=self._threads)
        assert self._sync is not None
        for one, sources in zip(path, fetched):
            try:
                self._sync.apply(*sources)
            except Error as problem:
                raise Error(problem.status, f"version {one.version}: {problem}") from problem
            if is_first_whole and self._loader is not None:  # of the first version alone
                self._compare(self._loader, tensors, rows, sources)

    def _compare(
        self,
        loader: Callable[[Iterator[tuple[str, torch.Tensor]]], None],
        tensors: Tensors,
        rows: Sequence[Row],
        sources: Sequence[frames.Source],
    ) -> None:
        """Lets an engine's loader write what has been written, once."""
        before = {name: _sums(tensor) for name, tensor in tensors.items()}
        pieces = frames.pieces_of(sources)

        def whole() -> Iterator[tuple[str, torch.Tensor]]:
            for index, (name, shape, dtype) in enumerate(rows):
                room = torch.empty(shape, dtype=dtype)
                for piece in pieces.get(index, []):
                    write(piece, [(Box((0,) * len(shape), shape), room)])
                yield name, room

        loader(whole())
        for name, tensor in tensors.items():
            if _sums(tensor) != before[name]:
                self.forget()
                raise Error(
                    "unsupported",
                    f"{name}: the engine keeps it in another form than a checkpoint's, so that changes "
                    "cannot be written to it in place",
                )
        self._loader = None


def _sums(tensor: torch.Tensor | Parts) -> list[int]:
    held = [memory.to("cpu").contiguous() for memory in memories(tensor)]
    return [frames.checksum(one.data_ptr(), one.nbytes) for one in held]
