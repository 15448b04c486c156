"""One parameter of a model whose parameters are properties: what tagc's operators of it do."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from tagc.torch.compiled import ops
from tagc.torch.compiled.ahead import Ahead
from tagc.torch.compiled.parametrize import Found
from tagc.torch.compiled.starts import Started, Starts
from tagc.torch.exchange import internals, waits
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.comm import Disagreement
from tagc.torch.exchange.interfaces import Kinds
from tagc.torch.exchange.unit import DTYPES, Unit, scale_of
from tagc.torch.handle import Compressed
from tagc.torch.hooks.gathers import AllGather


class Pass:
    """What the parameters of one handle share: the exchanges under way, and the pass that they are of."""

    def __init__(self, handle: Compressed, most: int) -> None:
        """most: elements of the largest parameter."""
        self.handle = handle
        self.starts = Starts(handle.passes.runners.host, most)
        self.ahead = Ahead(self.starts, most)
        self._sharded: list[Sharded] = []
        self._is_open = False  # whether a backward pass has begun since the last one ended

    def add(self, sharded: Sharded) -> None:
        self._sharded.append(sharded)

    def opens(self) -> bool:
        """Returns whether this is in a backward pass, at whose end all exchanges will have ended."""
        try:
            internals.at_end_of_backward(self._end)
        except RuntimeError:
            return False
        self._is_open = True
        return True

    def is_forward(self) -> bool:
        """Returns whether this is in a forward pass. Gives up a pass before it that has not come to its
        end."""
        was_open = self._is_open
        if self.opens():
            return False
        if was_open:
            self._is_open = False
            self.starts.drop()
            self.handle.passes.give_up()
            self._forget()
        return True

    def _end(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        for group in self.handle.wrapper.groups():
            if self.handle.wrapper.hosts(group).is_flat and group.size() > 1:
                self.starts.start(functools.partial(self._meet, group))
        try:
            self.starts.drain()
        except BaseException:
            self.handle.passes.give_up()
            raise
        finally:
            self._forget()
        self.handle.passes.end_backward()

    def _meet(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Makes ranks end the pass together. If one gathers ahead what the others do not, they join it here:
        nobody would come to it later, while it waits. Collective."""
        comm = self.handle.passes.comm(group)
        while True:
            try:
                comm.agree("the end of a pass", {})
                self.handle.passes.recorder.add_control(comm.agreement_bytes)
                return torch.empty(0)
            except Disagreement as problem:
                if not self.handle.wrapper.joins(problem.whats):
                    raise

    def _forget(self) -> None:
        self.ahead.end()
        for sharded in self._sharded:
            sharded.forget()


class Sharded:
    """One parameter, sharded over the ranks of a group: rank r has the r-th chunk along a dimension. Padded
    to the size of the first one, that is row r of what is exchanged."""

    def __init__(self, name: str, found: Found) -> None:
        self.sharded, self.op = found.parameter, found.op
        self.precision, self.reshards = found.how.precision, found.how.reshards
        self.group: dist.ProcessGroup = self.sharded.device_mesh.get_group()
        self.n_ranks, dim = self.group.size(), self.sharded.placements[0].dim
        shape = tuple(self.sharded.shape)
        self.parameter = layouts.Parameter(name, shape, "dense", dim, n_whole=self.sharded.numel())
        self.n_shard = layouts.chunked_elems(self.parameter, self.n_ranks) // self.n_ranks
        self.key = ops.key_of(self)
        self._layout: layouts.Layout | None = None
        self._pass: Pass | None = None
        self._sums: list[Started] = []  # whose results wait_tensor() has not given yet
        # what this rank has gathered because others wanted that; of which version
        self._joined: tuple[torch.Tensor, int] | None = None

    @property
    def what(self) -> str:
        """What ranks call a gather of it."""
        return f"parameters of {self.parameter.name}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole parameter, where the model reads it."""
        dtype: torch.dtype = self.precision.param_dtype or self.sharded.dtype
        return dtype

    def reduced_dtype(self) -> torch.dtype:
        return self.precision.reduce_dtype or self.dtype

    def own(self) -> torch.Tensor:
        """Returns this rank's shard, as the optimizer has it."""
        shard: torch.Tensor = self.sharded.detach().to_local()
        return shard

    def set_kind(self, kinds: Kinds) -> None:
        changed = self.parameter._replace(**kinds[self.parameter.name])
        if changed != self.parameter:
            self.parameter, self._layout = changed, None

    def connect(self, own: Pass, tag: int) -> AllGather | None:
        """Makes what exchanges it. Returns what gathers it, unless torch does."""
        self._pass, handle, name = own, own.handle, self.parameter.name
        own.add(self)
        self.read = self._late()
        self._hosts = handle.wrapper.hosts(self.group)
        held = None if self._hosts.is_flat else self._hosts.rows
        self._unit = handle.state.add_unit(name, Unit, [self.parameter], self.n_ranks, held)
        if self.dtype not in DTYPES:
            self._gather: Any = waits.AllGather(name, handle.state.options.timeout_s)
            return None
        wire = handle.state.options.parameters or ("bf16" if self.dtype == torch.bfloat16 else "fp32")
        owned = self.group, self.n_shard, lambda: [self.own()]
        self._gather = AllGather(handle.passes, name, owned, wire, tag, may_run_beside=False)
        handle.passes.frees.append(self._gather.close)
        return self._gather

    def _late(self) -> torch.Tensor:
        """Returns the shard as operators read it. Its gradient comes to the parameter by ops.Late, also where
        that is to be trained only later."""
        if not self.sharded.is_floating_point():
            return self.own()
        is_trained = self.sharded.requires_grad
        with torch.enable_grad():
            late: torch.Tensor = ops.late(self.sharded.requires_grad_(True).to_local(), self.key)
        self.sharded.requires_grad_(is_trained)
        return late

    # ---- what the operators call ----

    def all_gather(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the whole parameter. Collective."""
        own = self._connected()
        is_forward = own.is_forward()
        if self._lasts(self.dtype, shard):
            return own.ahead.take(self, is_forward)
        own.starts.drain()
        return self.gathered()

    def reduce_scatter(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Begins to reduce gradients, and returns zeros in the shape of this rank's shard of them. wait()
        gives that itself. Collective."""
        own, shard = self._connected(), self.own()
        placeholder = gradient.new_zeros(shard.shape, dtype=dtype)
        values = layouts.to_wire(gradient.detach(), self.parameter, self.n_ranks)
        if self.n_ranks == 1:
            alone = values.to(dtype, copy=True).mul_(scale_of(self.op, 1)).view(shard.shape)
            self._sums.append(Started(0, alone))
            return placeholder
        # an exchange takes the memory of its source, and this one is the graph's
        source = torch.empty(self.n_ranks * self.n_shard, dtype=self.reduced_dtype(), device=values.device)
        source[: values.numel()].copy_(values)
        source[values.numel() :].zero_()

        def exchange() -> torch.Tensor:
            target = source.new_empty(self.n_shard)
            own.handle.passes.exchange(
                self._unit, self.group, source, target, self.op, self._find_layout, recurs=False
            )
            return target[: shard.numel()].view(shard.shape).to(dtype)

        if own.opens() and self._lasts(source.dtype, source):
            self._sums.append(own.starts.start(exchange, source.numel()))
        else:
            own.starts.drain()
            self._sums.append(Started(0, exchange()))
        return placeholder

    def wait(self) -> torch.Tensor:
        """Returns the sum of all that reduce_scatter() has begun since the last wait(): a model that reads a
        parameter in several places has several gradients of it."""
        own, started, self._sums = self._connected(), self._sums, []
        sums = [own.starts.wait(each) for each in started]
        if not sums:  # reentrant checkpointing: a pass within the pass has taken them all
            return torch.zeros_like(self.own())
        for more in sums[1:]:
            sums[0] += more
        own.handle.passes.runners.keep(sums[0])
        return sums[0]

    def _lasts(self, dtype: torch.dtype, tensor: torch.Tensor) -> bool:
        """Returns whether exchanges go on in the runner's thread. Not on a device, whose streams order them;
        and not by the caller's own group, of whose collectives only the caller knows the order."""
        is_own = not self._hosts.is_one and not self._connected().handle.passes.runners.in_group
        return is_own and dtype in DTYPES and tensor.device.type == "cpu" and self.n_ranks > 1

    def _connected(self) -> Pass:
        assert self._pass is not None  # the key is given by install()
        return self._pass

    # ---- gathers ----

    @property
    def n_elems(self) -> int:
        return self.parameter.numel

    def version(self) -> int:
        """Returns how often this rank's shard has been changed in place."""
        with torch.inference_mode(False):  # which has no such numbers
            return internals.n_changes(self.own())

    def gathered(self) -> torch.Tensor:
        """Returns the whole parameter, in its turn. Collective."""
        while True:
            joined, self._joined = self._joined, None
            if joined is not None and joined[1] == self.version():
                return joined[0]
            try:
                return self._whole()
            except Disagreement as problem:
                if not self._connected().handle.wrapper.joins(problem.whats):
                    raise

    def join(self) -> None:
        """Gathers it because some rank wants it, and keeps it until this one does. Collective."""
        version = self.version()
        self._joined = self._whole(), version

    def forget(self) -> None:
        """Drops what this rank has not asked for, at the end of a pass."""
        self._joined, self._sums = None, []

    def _whole(self) -> torch.Tensor:
        shard, shape = self.own().to(self.dtype), self.parameter.shape
        if self.n_ranks == 1:
            return shard.clone()
        row = _padded(shard.reshape(-1), self.n_shard)
        whole = row.new_empty(self.n_ranks * self.n_shard)
        self._gather(whole, row, self.group)
        if self.parameter.dim:
            return layouts.from_wire(whole, self.parameter, self.n_ranks)
        return whole[: self.parameter.numel].view(shape)

    def _find_layout(self) -> layouts.Layout:
        if self._layout is None:
            n_rows = 0 if self._hosts.is_flat else len(self._hosts.rows)
            self._layout = layouts.chunked([self.parameter], self.n_ranks, n_rows)
        return self._layout


def _padded(flat: torch.Tensor, n_elems: int) -> torch.Tensor:
    if flat.numel() == n_elems:
        return flat
    padded = flat.new_zeros(n_elems)
    padded[: flat.numel()].copy_(flat)
    return padded
