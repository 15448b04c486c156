"""What the modules of one handle share: the exchanges under way, and the pass that they are of."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.distributed as dist

from tagc.compiled.ahead import Ahead
from tagc.compiled.starts import Starts
from tagc.torch import Compressed
from tagc.torch.extension import Disagreement


class Module(Protocol):
    """One whose parameters are exchanged together (modules.py)."""

    @property
    def n_elems(self) -> int: ...

    @property
    def is_unread(self) -> bool:
        """Whether it has its parameters, and some have not been read since they came."""
        ...

    def drop(self) -> None:
        """Frees them."""
        ...

    def begin(self) -> None:
        """Begins the exchange of the gradients that have come. Collective."""
        ...

    def end(self) -> None:
        """Notes that all ranks have ended a pass."""
        ...

    def forget(self) -> None:
        """Drops what is left at the end of a pass."""
        ...


class Pass:
    def __init__(self, handle: Compressed, most: int) -> None:
        """most: elements of the largest module."""
        self.handle, self._most = handle, most
        self.starts = Starts(handle.passes.runners.host, most)
        self.ahead = Ahead(self.starts, most)
        self._modules: list[Module] = []
        self._whole: list[Module] = []  # that have their parameters, the newest last
        self._waiting: list[Module] = []  # that have gradients, and wait for more
        self._is_open = False  # whether a backward pass has begun since the last one ended

    def add(self, module: Module) -> None:
        self._modules.append(module)

    def opens(self) -> bool:
        """Returns whether this is in a backward pass, at whose end all exchanges will have ended."""
        is_within = self.handle.passes.await_end()
        self._is_open |= is_within
        return is_within

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

    # ---- what modules keep ----

    def keep(self, module: Module) -> None:
        """Notes that a module has got its parameters, which it keeps until all have been read. Others keep
        theirs if they have together at most as many elements as the largest module."""
        kept = [each for each in self._whole if each is not module and each.is_unread]
        while sum(each.n_elems for each in kept) > self._most:
            kept.pop(0).drop()
        self._whole = [*kept, module]

    def wait_for_more(self, module: Module) -> None:
        """Notes that a module has the first gradients of its next exchange."""
        self._waiting.append(module)

    def has_all(self, module: Module) -> None:
        """Notes that it begins that exchange."""
        self._waiting.remove(module)

    def begin_all(self) -> None:
        """Begins the exchanges of all gradients that wait, where no more come."""
        for module in list(self._waiting):
            module.begin()

    # ---- the end ----

    def end(self) -> None:
        """Exchanges what is left of a backward pass, and waits for all. Collective."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self.begin_all()
            for group in self.handle.wrapper.groups():
                if self.handle.wrapper.hosts(group).is_flat and group.size() > 1:
                    self.starts.start(functools.partial(self._meet, group))
            self.starts.drain()
            for module in self._modules:
                module.end()
        finally:
            self._forget()

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
        self._waiting, self._whole = [], []
        for module in self._modules:
            module.forget()
