"""Parameters that are exchanged together, as FSDP2 does it for each fully_shard()-ed module: one gather gives
them all, and one reduce-scatter takes the gradients of those that got one.

A compiler sees an operator for each parameter all the same. So no value has to go from one place of the
model to the others, which neither a checkpointed region nor another graph would let through; an operator is
saved, computed again or left out for its own sake; and a parameter without a gradient has none. The operators
meet here, when they run: the first one that asks for a parameter gathers them all, and the others find
theirs. The last gradient begins the exchange of them all."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import torch

from tagc.compiled.passes import Pass
from tagc.compiled.sharded import Sharded
from tagc.compiled.starts import Started
from tagc.torch.extension import (
    DTYPES,
    AllGather,
    Disagreement,
    Gradient,
    Kinds,
    Unit,
    all_gather,
    layouts,
    scale_of,
)

Version = tuple[tuple[object, ...], ...]  # of each parameter


class Gradients:
    """Those of a module that are exchanged next, as FSDP2 lays them out: (ranks, row), of which each
    parameter has some columns."""

    def __init__(self, parameters: Sequence[Sharded], device: torch.device) -> None:
        """parameters: that may come."""
        one, self.at, n = parameters[0], dict[Sharded, slice](), 0
        for shard in parameters:
            self.at[shard] = slice(n, n + shard.n_shard)
            n += shard.n_shard
        self._rows = torch.empty(one.n_ranks, n, dtype=one.reduced_dtype, device=device)
        self._have = set[Sharded]()

    def add(self, one: Sharded, values: torch.Tensor) -> None:
        columns = self._rows[:, self.at[one]]
        rows = _padded(values, columns.numel()).view(columns.shape)
        if one in self._have:
            columns += rows
        else:
            columns.copy_(rows)
        self._have.add(one)

    def packed(self) -> tuple[tuple[Sharded, ...], torch.Tensor]:
        """Returns (the parameters that have one, their rows)."""
        have = tuple(one for one in self.at if one in self._have)
        if len(have) == len(self.at):
            return have, self._rows.view(-1)
        return have, torch.cat([self._rows[:, self.at[one]] for one in have], dim=1).view(-1)


class Module:
    """parameters: in FSDP2's order, of one kind()."""

    def __init__(self, name: str, parameters: Sequence[Sharded]) -> None:
        self.name, self.parameters, one = name, tuple(parameters), parameters[0]
        self.group, self.n_ranks, self.dtype = one.group, one.n_ranks, one.dtype
        self.n_shard = sum(shard.n_shard for shard in parameters)
        self.n_elems = self.n_ranks * self.n_shard
        self._layouts: dict[tuple[Sharded, ...], layouts.Layout] = {}
        self._pass: Pass | None = None
        # the whole parameters, the row of one rank after that of the other, and their version()
        self._whole: tuple[torch.Tensor, Version] | None = None
        self._unread = set[Sharded]()  # which nobody has read since they came
        # the same, which this rank has gathered because others wanted that
        self._joined: tuple[torch.Tensor, Version] | None = None
        self._gradients: Gradients | None = None
        # how many gradients each parameter has got in this pass, and in the last one
        self._now, self._last = collections.Counter[Sharded](), collections.Counter[Sharded]()

    @property
    def what(self) -> str:
        """What ranks call a gather of it."""
        return f"parameters of {self.name}"

    @property
    def what_changed(self) -> str:
        """The same of a rank that needs it because its shard is not what the last one took."""
        return f"changed {self.what}"

    def set_kinds(self, kinds: Kinds) -> None:
        before = [shard.parameter for shard in self.parameters]
        for shard in self.parameters:
            shard.parameter = shard.parameter._replace(**kinds[shard.parameter.name])
        if before != [shard.parameter for shard in self.parameters]:  # else its reducers stay
            self._layouts.clear()

    def connect(self, shared: Pass, tag: int) -> AllGather | None:
        """Makes what exchanges it. Returns what gathers it, unless torch does."""
        self._pass, handle = shared, shared.handle
        shared.add(self)
        for shard in self.parameters:
            shard.connect(self)
        self._hosts = handle.wrapper.hosts(self.group)
        held = None if self._hosts.is_flat else self._hosts.rows
        parameters = [shard.parameter for shard in self.parameters]
        self._unit = handle.state.add_unit(self.name, Unit, parameters, self.n_ranks, held)
        if self.dtype not in DTYPES:
            self._gather: Any = all_gather
            return None
        wire = handle.state.options.parameters or ("bf16" if self.dtype == torch.bfloat16 else "fp32")
        owned = self.group, self.n_shard, lambda: [shard.own() for shard in self.parameters]
        gather = self._gather = AllGather(handle.passes, self.name, owned, wire, tag, may_run_beside=False)
        handle.passes.frees.append(gather.close)
        return gather

    def _lasts(self, dtype: torch.dtype) -> bool:
        """Returns whether exchanges go on in the runner's thread. Not on a device, whose streams order them;
        and not within one host, by the caller's own group, of whose collectives only the caller knows the
        order."""
        return not self._hosts.is_one and dtype in DTYPES and self._device.type == "cpu" and self.n_ranks > 1

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.parameters[0].sharded.device
        return device

    def _connected(self) -> Pass:
        assert self._pass is not None  # the keys are given by install()
        return self._pass

    # ---- parameters ----

    def read(self, one: Sharded) -> torch.Tensor:
        shared = self._connected()
        is_forward = shared.is_forward()
        # A forward pass that reads one again is a new one: on all ranks, while a change shows on one alone.
        kept = self._whole if one in self._unread or not is_forward else None
        have_changed = kept is not None and not self._is_fresh(one, kept[1])
        if kept is None or have_changed:
            version = self.version()
            if self._lasts(self.dtype):
                values = shared.ahead.take(self, is_forward, have_changed)
            else:
                shared.starts.drain()
                values = self.gathered(have_changed)
            kept = self._whole = values, version
            self._unread = set(self.parameters)
            shared.keep(self)
        self._unread.discard(one)
        if not self._unread:
            self.drop()
        return self._cut(kept[0], one)

    def _is_fresh(self, one: Sharded, version: Version) -> bool:
        """Returns whether a parameter is as it was in that version: by this rank's shard of it, or if that is
        empty, by its shards of all."""
        if not one.own().numel():
            return version == self.version()
        return version[self.parameters.index(one)] == one.version()

    def _cut(self, whole: torch.Tensor, one: Sharded) -> torch.Tensor:
        start = sum(shard.n_shard for shard in self.parameters[: self.parameters.index(one)])
        columns = whole.view(self.n_ranks, self.n_shard)[:, start : start + one.n_shard]
        wire = torch.empty(columns.shape, dtype=columns.dtype, device=columns.device).copy_(columns).view(-1)
        return layouts.from_wire(wire[: one.parameter.numel], one.parameter, self.n_ranks)

    @property
    def is_unread(self) -> bool:
        return bool(self._unread)

    def drop(self) -> None:
        self._whole, self._unread = None, set()

    def version(self) -> Version:
        return tuple(shard.version() for shard in self.parameters)

    def gathered(self, have_changed: bool = False) -> torch.Tensor:
        """Returns the whole parameters, in their turn. Collective. have_changed: since an earlier gather,
        whose values ranks whose shards have not would use: they must come, too."""
        while True:
            joined, self._joined = self._joined, None
            if joined is not None and not have_changed:
                if joined[1] == self.version():
                    return joined[0]
                have_changed = True
            try:
                if have_changed:
                    have_changed = False
                    self._say_changed()
                return self._gathered()
            except Disagreement as problem:
                if not self._connected().handle.wrapper.joins(problem.whats):
                    raise

    def _say_changed(self) -> None:
        if self._lasts(self.dtype) and self._hosts.is_flat:
            passes = self._connected().handle.passes
            comm = passes.comm(self.group)
            comm.agree(self.what_changed, {})
            passes.recorder.add_control(comm.agreement_bytes)

    def join(self) -> None:
        """Gathers them because some rank wants them, and keeps them until this one does. Collective."""
        version = self.version()
        self._joined = self._gathered(), version

    def _gathered(self) -> torch.Tensor:
        shards = [_padded(shard.own().to(self.dtype).reshape(-1), shard.n_shard) for shard in self.parameters]
        row = torch.cat(shards)
        if self.n_ranks == 1:
            return row
        whole = row.new_empty(self.n_elems)
        self._gather(whole, row, self.group)
        return whole

    # ---- gradients ----

    @property
    def scale(self) -> float:
        return scale_of(self.parameters[0].op, self.n_ranks)

    def take(self, one: Sharded, values: torch.Tensor) -> None:
        """Takes a gradient in wire order. The exchange begins when as many have come of each parameter as in
        the last pass: some are read in several places, and others not at all. In the first pass, when all
        that are trained have one."""
        shared = self._connected()
        is_in_pass = shared.opens()
        if self._gradients is not None and one not in self._gradients.at:
            self.begin()
        if self._gradients is None:
            may_come = [shard for shard in self.parameters if shard.sharded.requires_grad or shard is one]
            self._gradients = Gradients(may_come, values.device)
            shared.wait_for_more(self)
        self._gradients.add(one, values)
        self._now[one] += 1
        if not is_in_pass or not (self._last or collections.Counter(self._gradients.at.keys())) - self._now:
            self.begin()

    def begin(self) -> None:
        shared, gradients, self._gradients = self._connected(), self._gradients, None
        assert gradients is not None
        shared.has_all(self)
        self.drop()  # the backward pass is through with it
        have, source = gradients.packed()
        dtype, op = self.parameters[0].sharded.dtype, self.parameters[0].op

        def exchange() -> torch.Tensor:
            target = source.new_empty(source.numel() // self.n_ranks)
            find_layout = functools.partial(self._layout, have)
            gradient = Gradient(self._unit, self.group, source, target, op, find_layout)
            shared.handle.passes.exchange(gradient._replace(recurs=False, agrees=True))
            return target.to(dtype)

        if self._lasts(source.dtype):
            started = shared.starts.start(exchange, source.numel())
        else:
            shared.starts.drain()
            started = Started(0, exchange())
        at = 0
        for shard in have:
            shard.comes(started, slice(at, at + shard.n_shard))
            at += shard.n_shard

    def begin_all(self) -> None:
        self._connected().begin_all()

    def sums(self, started: Started) -> torch.Tensor:
        shared = self._connected()
        sums = shared.starts.wait(started)
        shared.handle.passes.runners.keep(sums)
        return sums

    def _layout(self, have: tuple[Sharded, ...]) -> layouts.Layout:
        if have not in self._layouts:
            self._layouts[have] = layouts.chunked([shard.parameter for shard in have], self.n_ranks)
        return self._layouts[have]

    def end(self) -> None:
        """Notes how many gradients came in a pass that all ranks have ended."""
        self._last = self._now

    def forget(self) -> None:
        self.drop()
        self._joined = self._gradients = None
        self._now = collections.Counter()
        for shard in self.parameters:
            shard.forget()


def _padded(flat: torch.Tensor, n_elems: int) -> torch.Tensor:
    if flat.numel() == n_elems:
        return flat
    padded = flat.new_zeros(n_elems)
    padded[: flat.numel()].copy_(flat)
    return padded
