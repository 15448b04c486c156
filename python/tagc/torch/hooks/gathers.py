"""FSDP2's all-gathers through libtagc, and the replicas that gathers of deltas keep.

A replica is what a gather left on every rank: the bf16 values of a module's parameters. The next delta is a
difference to it, so it is part of a checkpoint. Each rank saves the row of it that it owns. The first gather
after loading puts the rows together again, by a gather of whole bf16 values that changes none of them, and
goes on from there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tagc.torch.exchange.call import Call
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.interfaces import Replica
from tagc.torch.exchange.reducer import Gatherer, Way
from tagc.torch.exchange.runner import Runner
from tagc.torch.exchange.unit import DTYPES, check_tensors
from tagc.torch.handle import Compressed
from tagc.torch.hooks.replicas import CHANGED, RESET, Gathers, checksum, fingerprint

_LOADED, _FITS, _COUNT = 4, 8, 16  # further bits of a vote; the number of gathers is above them

Key = tuple[tuple[int, ...], int]  # ranks, and elements that one of them owns


class FsdpComm:
    """What FSDP2 wants of a reduce-scatter and of an all-gather."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathering(Call):
    """One all-gather of one module."""

    def __init__(
        self,
        gather: Callable[[Way, torch.Tensor | None, torch.Tensor | None, BaseException | None], None],
        comm: Comm,
        group: Any,
        failure: BaseException | None,
        wants_kernels: bool,
    ) -> None:
        super().__init__(comm, group, failure, wants_kernels=wants_kernels)
        self._gather = gather

    def perform(
        self,
        way: Way,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        failure: BaseException | None,
    ) -> Callable[[], object]:
        self._gather(way, source, target, failure)
        return lambda: None


class AllGather(FsdpComm):
    """For set_custom_all_gather(): one per module. With deltas every rank keeps a replica of all parameters
    of the module, and a second gather of the same values (backward after forward) sends nothing at all."""

    def __init__(
        self,
        handle: Compressed,
        name: str,
        owned: tuple[dist.ProcessGroup, int, Callable[[], list[torch.Tensor]]],
        wire: str,
        tag: int,
    ) -> None:
        """owned: the ranks over which the module is sharded, how many elements one of them owns, and what
        gives these."""
        self.name, self.is_delta = name, wire.startswith("delta")
        self._handle, self._wire, self._tag, self._own = handle, wire, tag, owned[2]
        self._key: Key = tuple(dist.get_process_group_ranks(owned[0])), owned[1]
        self._gathers: dict[Key, Gathers] = {}
        self._loaded: Replica | None = None  # until the next gather

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        comm, runners = self._handle.passes.comm(group), self._handle.passes.runners
        runner: Runner = runners.host
        failure: BaseException | None = None
        try:
            runner = runners.own(input_tensor)
            check_tensors(input_tensor, output_tensor, "parameters")
        except Exception as problem:
            failure = problem
        # With kernels where the user has asked for them: replicas take 2 bytes per parameter, on the device
        # then.
        wants_kernels = self._handle.state.options.codec == "device" and self.is_delta
        runner.run(Gathering(self._gather, comm, group, failure, wants_kernels), input_tensor, output_tensor)

    def _gather(
        self,
        way: Way,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        failure: BaseException | None,
    ) -> None:
        """Gathers. source, target: None where there is a failure, which this rank then only tells the
        others."""
        comm, kernels = way.comm, way.kernels
        gather, loaded, vote, found, numbers = None, None, 0, "", {}
        try:
            if failure is None and source is not None:
                key = comm.ranks, source.numel()
                gather = self._gathers.setdefault(key, Gathers(self.is_delta))
                loaded = self._loaded if key == self._key else None
                vote, found = gather.vote(source) if loaded is None else self._vote_loaded(loaded, source)
                numbers = {"elements": source.numel(), "dtype": DTYPES.index(source.dtype)}
        except Exception as problem:
            failure = problem
        begin = time.perf_counter()
        votes = comm.agree(f"parameters of {self.name}", numbers, failure, vote)
        agreed = time.perf_counter()
        assert gather is not None and source is not None and target is not None  # or agree() has raised
        asked = max(vote & CHANGED for vote in votes) | max(vote & RESET for vote in votes)
        with self._handle.state.lock:
            if gather.gatherer is None:
                gather.gatherer = Gatherer(
                    comm, target.numel(), self._wire, self._tag, self._handle.state.options.threads, kernels
                )
            if max(vote & _LOADED for vote in votes):
                if (
                    min(vote & (_LOADED | _FITS) for vote in votes) == _LOADED | _FITS
                    and len({vote // _COUNT for vote in votes}) == 1
                ):
                    assert loaded is not None
                    gather.restore(loaded, source, kernels)
                    gather.sent = found
                else:
                    asked |= RESET
                    self._handle.state.say_once(
                        "tagc: parameters are not those that were saved with the replicas of deltas, on "
                        "some rank: the next "
                        "gather sends them whole"
                    )
                self._loaded = None
            sent, received = comm.bytes_sent()["gather"], comm.bytes_received()["gather"]
            gather.run(gather.gatherer, source, target, kernels, asked, found)
            self._handle.passes.recorder.add_gather(
                comm.bytes_sent()["gather"] - sent,
                comm.bytes_received()["gather"] - received,
                target.numel(),
                comm,
                time.perf_counter() - agreed,
                agreed - begin,
            )

    def _vote_loaded(self, loaded: Replica, source: torch.Tensor) -> tuple[int, str]:
        changed = fingerprint(source, loaded.sent) != loaded.sent
        fits = checksum(self._own()) == loaded.parameters
        vote = (CHANGED if changed else 0) | _LOADED | (_FITS if fits else 0) | loaded.n_gathers * _COUNT
        return vote, fingerprint(source)

    def reset(self) -> None:
        """Makes all parameters travel next time, because they were changed from outside."""
        self._loaded = None
        for gather in self._gathers.values():
            gather.wants_reset = True

    def loaded(self) -> None:
        """Notes that parameters were loaded: whether they are those of a replica that was loaded, the next
        gather sees."""
        if self._loaded is None:
            self.reset()

    # ---- for checkpoints ----

    def replica(self) -> Replica:
        """Returns the state for a checkpoint. Local; changes nothing."""
        if self._loaded is not None:
            return self._loaded._replace(row=self._loaded.row.clone())
        gather = self._gathers.get(self._key)
        row, n_gathers = (None, 0) if gather is None else gather.row(self._key[0].index(dist.get_rank()))
        if row is None or gather is None:
            return Replica(torch.zeros(self._key[1], dtype=torch.bfloat16), 0, "", "")
        return Replica(row, n_gathers, gather.sent, checksum(self._own()))

    def set_replica(self, replica: Replica | None) -> None:
        """Loads a replica for the next gather; None: that sends whole parameters. Local."""
        self.reset()
        if replica is not None and replica.n_gathers:
            self._loaded = replica._replace(row=replica.row.detach().cpu().to(torch.bfloat16).clone())
            if self._key in self._gathers:
                self._gathers[self._key].wants_reset = False

    @property
    def n_shard(self) -> int:
        return self._key[1]

    def close(self) -> None:
        for gather in self._gathers.values():
            gather.close()
        self._gathers, self._loaded = {}, None
