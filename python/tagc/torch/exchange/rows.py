"""The leg of a reduce-scatter that stays within a host: before tagc's exchange between hosts each rank gets
the sums of its host, of the rows that the ranks of its place own.

    this rank's gradient (H, L, row) -> of all ranks of the host, added up -> the rows of its place (H, row)

The model's own backend adds up, or gloo in CPU memory, in the gradient's dtype. No row is moved for that:
host by host, the rows of its ranks are the input of one reduce-scatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.unit import scale_of


class Rows:
    """Of one exchange. comm: tagc's connection within the host, by which its ranks agree."""

    def __init__(
        self,
        hosts: Hosts,
        comm: Comm,
        source: torch.Tensor,
        op: Any,
        name: str,
        timeout_s: float,
        n_rows: int | None = None,
    ) -> None:
        """n_rows: of the sums; None: one for each host."""
        assert hosts.within is not None  # or there is one rank per host, and nothing to add up
        self.hosts, self.comm, self._op = hosts, comm, op
        self._source: torch.Tensor | None = source  # until it is added up: an exchange under way keeps this
        self._n_bytes = source.nbytes // hosts.per_host * (hosts.per_host - 1)
        self._n_rows = hosts.n_hosts if n_rows is None else n_rows
        what = f"gradients of {name}, within the host"
        self._collectives = hosts.collectives(comm, source.device, what, timeout_s)
        self.sums = source.new_empty(source.numel() // hosts.per_host)

    @property
    def op_between(self) -> Any:
        """The reduce op of the exchange of the sums."""
        return self._op if self._op == dist.ReduceOp.AVG else dist.ReduceOp.SUM

    @property
    def n_bytes(self) -> int:
        """What this rank sends to others of its host."""
        return self._n_bytes

    def add_up(self) -> None:
        """Computes the sums, or with AVG the means, of all ranks of the host. Collective over it."""
        n_rows, per_host = self._n_rows, self.hosts.per_host
        whole, self._source = self._source, None
        assert whole is not None  # it is called once
        source, sums = whole.view(n_rows, per_host, -1), self.sums.view(n_rows, -1)
        if not self._collectives.is_gloo(source.device):
            self._collectives.reduce_scatter_rows(sums, source.flatten(1), self._op)
            return
        # gloo has a reduce-scatter only by an all-reduce of everything, and no mean
        received, factor = torch.empty_like(source[0]), scale_of(self._op, per_host)
        is_large = source.dtype == torch.float16 and factor < 1.0  # the sum may be
        for mine, total in zip(source, sums):
            self._collectives.all_to_all(received, mine)
            torch.sum(received.mul_(factor) if is_large else received, 0, out=total)
        if factor != 1.0 and not is_large:
            sums.mul_(factor)
