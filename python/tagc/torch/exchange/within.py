"""Sums within a host, of gradients on a device: before tagc's exchange between hosts each rank gets those of
what the ranks of its place own. libtagc does that itself for gradients in CPU memory.

    reduce-scatter   this rank's gradient (H, L, row) -> of all ranks of the host, added up -> (H, row)
    all-reduce       (n,) -> slices (L, row) -> added up -> this rank's slice (row,) -> exchange between hosts
                     -> slices of all ranks (L, row) -> (n,)

The model's own backend adds up, in the gradient's dtype, in the order of the current stream. For a
reduce-scatter no row is moved: host by host, the rows of its ranks are the input of one of torch's.

A rank that has failed takes part, so that the others of its host do not wait for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.layout import Slices
from tagc.torch.exchange.model import scale_of


def op_between(op: Any) -> Any:
    """Returns the reduce op of the exchange of sums that were made with `op`."""
    return op if op == dist.ReduceOp.AVG else dist.ReduceOp.SUM


class HostSums:
    """Of one exchange. comm: tagc's connection within the host. slices: of an all-reduce's gradient; None: it
    is a reduce-scatter's."""

    def __init__(
        self,
        hosts: Hosts,
        comm: Comm,
        source: torch.Tensor,
        op: Any,
        slices: Slices | None,
        name: str,
        timeout_s: float,
    ) -> None:
        assert hosts.within is not None  # or there is one rank per host, and nothing to add up
        self._per_host, self._op, self._slices = hosts.per_host, op, slices
        what = f"gradients of {name}, within the host"
        self._collectives = hosts.collectives(comm, source.device, what, timeout_s)
        whole = source if slices is None else slices.cut(source)
        # until it is added up: an exchange under way would keep it
        self._whole: torch.Tensor | None = whole.view(
            hosts.n_hosts if slices is None else 1, self._per_host, -1
        )
        self.sums = source.new_empty(whole.numel() // self._per_host)

    @property
    def n_bytes(self) -> int:
        """What this rank sends to others of its host."""
        n_times = 1 if self._slices is None else 2
        return n_times * self.sums.nbytes * (self._per_host - 1)

    def add_up(self) -> None:
        """Computes the sums, or with AVG the means, of all ranks of the host. Collective over it."""
        source, self._whole = self._whole, None
        assert source is not None  # it is called once
        sums = self.sums.view(source.size(0), -1)
        if not self._collectives.is_gloo(source.device):
            self._collectives.reduce_scatter_rows(sums, source.flatten(1), self._op)
            return
        # gloo has a reduce-scatter only by an all-reduce of everything, and no mean
        received, factor = torch.empty_like(source[0]), scale_of(self._op, self._per_host)
        is_large = source.dtype == torch.float16 and factor < 1.0  # the sum may be
        for mine, total in zip(source, sums):
            self._collectives.all_to_all(received, mine)
            torch.sum(received.mul_(factor) if is_large else received, 0, out=total)
        if factor != 1.0 and not is_large:
            sums.mul_(factor)

    def spread(self, target: torch.Tensor) -> None:
        """Copies the slices of all ranks, of which each has its own in `sums`, to the target of an
        all-reduce. Collective over the host."""
        assert self._slices is not None  # a reduce-scatter's sums are where they belong
        rows = self.sums.new_empty(self._slices.n_slices, self._slices.row)
        self._collectives.all_gather(rows.view(-1), self.sums)
        self._slices.join(rows, target)
