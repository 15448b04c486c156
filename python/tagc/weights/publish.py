"""Publisher: writes a trainer's weights to a store, version after version.

    publish()   what changed -> a file of each sender -> all know all files -> the first writes the manifest

What dies before the manifest is there leaves the version before it. Who starts again reads from the store
what receivers have, and goes on with the next number."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.extension import number, say, share, timeout_of
from tagc.weights import store as stores
from tagc.weights.follow import fetch
from tagc.weights.links import rank_and_size
from tagc.weights.quantize import Function, Quantized, Recipe
from tagc.weights.store import Manifest, Version
from tagc.weights.sync import Sent, WeightSync
from tagc.weights.tensors import Model, Parts, Tensors, named_tensors

# All weights are written again once changes since come to so much of them: a receiver that comes late then
# reads at most 1.5 times the weights.
_SHARE_OF_WHOLE = 0.5


class Publisher:
    """Writes versions of a model's weights to a store, for any number of Followers.

    model: a module, also under FSDP2 or DDP, a dict of tensors by name, or a function that returns one.
    store: a path, or an address that fsspec knows. One sender at a time writes to it, or one group of ranks.
    group: the ranks that hold shards, or tensors that others have not, as stages and experts; all of them
    make a Publisher and call publish(). None: this process alone.
    keep: of versions, newest first, whose changes stay; a receiver further behind takes all weights.
    state: of an earlier Publisher, from state_dict(), for a store that was emptied or is another one.
    quantize: what receivers have instead of matrices: a Recipe, such as quantize.fp8_in_blocks(), or a
    function of a tensor's name and the whole tensor, which returns tensors by name, or None for one that
    stays. Weights travel quantised, with their scales; dtype then is that of the others.
    by_magnitude: True if no receiver is sharded, as by tensor parallelism: changes then take 17 to 50 % fewer
    bytes. A receiver that holds a part of a tensor refuses such.
    dtype, buffers, check_every, threads, timeout_s: as those of WeightSync.

    Where the store has versions of these tensors, this goes on behind them. Collective over the group."""

    def __init__(
        self,
        model: Model,
        store: str | os.PathLike[str],
        group: dist.ProcessGroup | None = None,
        *,
        keep: int = 32,
        state: dict[str, int] | None = None,
        quantize: Recipe | Function | None = None,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        by_magnitude: bool = False,
        check_every: int = 16,
        threads: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        number("keep", keep, 1, 2**31 - 1, int)
        rank, size = rank_and_size(group)
        model = _with_others(model, group, buffers, timeout_s)
        self._quantized: Quantized | None = None
        if quantize is not None:
            self._quantized = Quantized(model, buffers, quantize)
            model = self._quantized.tensors
        self._sync = WeightSync(
            model,
            group,
            range(size),
            dtype=dtype,
            buffers=buffers,
            by_magnitude=by_magnitude,
            check_every=check_every,
            threads=threads,
            timeout_s=timeout_s,
        )
        self._keep, self._is_first, self._size, self._rank = keep, rank == 0, size, rank
        self._token = secrets.token_hex(4)
        self._store: stores.Store | None = None
        self._manifest: Manifest | None = None
        self._is_refused = False

        def look() -> bytes:
            self._store = stores.open_store(store)
            newest = stores.newest(self._store) if self._is_first else None
            return b"" if newest is None else newest.text()

        text = self._sync.agreed(look)[0]
        if text:
            self._manifest = Manifest.of("the manifest of rank 0", text)
        has_base = all(self._sync.agreed(lambda: self._resume(state)))
        self._needs_whole = not has_base

    @property
    def version(self) -> int:
        """Returns the number of the version that was published last; 0: none."""
        return self._sync.version

    @property
    def last(self) -> Sent | None:
        """Returns what this rank encoded last."""
        return self._sync.last

    def state_dict(self) -> dict[str, int]:
        """Returns what a checkpoint may keep, so that versions go on after the store was lost."""
        return {"run": self._sync.run, "version": self.version}

    def publish(self) -> int:
        """Writes the next version of the weights, and returns its number. After an Error receivers have no
        new version, and the next one has all weights. Collective."""
        assert self._store is not None
        self._sync.agreed(self._check)
        if (quantized := self._quantized) is not None:
            largest = self._sync.agreed(quantized.largest)
            self._sync.agreed(lambda: quantized.fill(largest))
        is_whole, self._needs_whole = self._needs_whole, True
        files = self._sync.agreed(lambda: self._write(is_whole))
        manifest = self._next(files)
        self._sync.agreed(lambda: self._create(manifest) if self._is_first else None)
        self._manifest, self._needs_whole = manifest, False
        return self.version

    def _check(self) -> None:
        if self._is_refused:  # which the first rank alone knows
            raise Error("state", "another sender has taken this store over: this one publishes no more")

    # ---- at the start ----

    def _resume(self, state: dict[str, int] | None) -> bool:
        """Goes on behind what the store has. Returns whether this rank has a copy of what receivers have: not
        if changes are by magnitude, and were divided otherwise among the ranks."""
        assert self._store is not None
        newest = self._manifest
        if newest is not None:
            for_all = newest.path(0, 0, newest.version)
            self._sync.go_on(fetch(self._store, [one], None)[0] for one in for_all)
        if state is not None:
            self._sync.begin_behind(int(state["run"]), int(state["version"]))
        return self._sync.has_base() and newest is not None and self.version == newest.version

    # ---- a version ----

    def _write(self, is_whole: bool) -> dict[str, tuple[str, int]]:
        """Writes this rank's files, and returns their names and sizes."""
        kind = "whole" if is_whole else "changes"
        files = {kind: self._file(kind, self._sync.encode_buffers(is_whole))}
        if not is_whole and self._is_whole_due():
            files["whole"] = self._file("whole", self._sync.encode_current_buffers())
        return files

    def _file(self, kind: str, buffers: list[Any]) -> tuple[str, int]:
        assert self._store is not None
        name = f"{kind}-{self.version:010d}-{self._rank}-of-{self._size}-{self._token}"
        self._store.write(name, buffers)
        return name, sum(map(len, buffers))

    def _is_whole_due(self) -> bool:
        """Decides from the manifest, which all ranks have alike."""
        manifest = self._manifest
        if manifest is None or not manifest.whole:
            return True
        last = manifest.whole[-1]
        n_bytes = sum(one.n_bytes for one in manifest.changes if one.version > last.version)
        return n_bytes > _SHARE_OF_WHOLE * last.n_bytes

    def _next(self, told: list[dict[str, tuple[str, int]]]) -> Manifest:
        """Returns the manifest with the files that all ranks have written."""
        former = self._manifest or Manifest(0, 0, [], [])
        new = {kind: Version(self.version, [files[kind] for files in told]) for kind in told[0]}
        whole = [*former.whole, new["whole"]][-1:] if "whole" in new else former.whole
        changes = [*former.changes, new["changes"]] if "changes" in new else former.changes
        oldest = min(self.version - self._keep, whole[-1].version)
        return Manifest(self._sync.run, self.version, whole, [one for one in changes if one.version > oldest])

    def _create(self, manifest: Manifest) -> None:
        assert self._store is not None
        try:
            self._store.create(manifest.name, manifest.text())
        except FileExistsError as exists:
            self._is_refused = True
            for name in manifest.files():
                if f"-{manifest.version:010d}-" in name:
                    self._store.remove(name)
            raise Error(
                "state", f"another sender has published version {manifest.version} in this store"
            ) from exists
        self._sweep(manifest)

    def _sweep(self, manifest: Manifest) -> None:
        """Removes files that the manifest has no more, and what senders before have left. What cannot be
        removed is removed by the next."""
        assert self._store is not None
        try:
            there = self._store.names()
            # a receiver may just have seen the manifest before
            kept = {*manifest.files(), *stores.manifests(there)[-2:]}
            for name in sorted(set(there) - kept):
                # a sender that takes this one for dead may be writing the next
                if (version := stores.version_of(name)) is not None and version <= manifest.version:
                    self._store.remove(name)
        except Exception as problem:
            say(f"files of old versions of weights stay in the store: {problem}")


def _with_others(
    model: Model, group: dist.ProcessGroup | None, buffers: bool, timeout_s: float | None
) -> Model:
    """Returns the model, and of tensors that other ranks alone have nothing. Collective."""
    if group is None:
        return model
    named: Tensors = {}
    with contextlib.suppress(Exception):  # WeightSync raises it on all ranks
        named = named_tensors(model, buffers)
    mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
    patience = datetime.timedelta(seconds=timeout_of(group) if timeout_s is None else timeout_s)
    everyone = share(group, mine, patience)
    absent = {name: Parts(*form) for theirs in everyone for name, form in theirs.items() if name not in mine}
    return (lambda: {**named_tensors(model, buffers), **absent}) if absent else model
