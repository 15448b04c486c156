"""The legs of an all-reduce that stay within a host: before tagc's exchange between hosts each rank gets its
slice of the sum of its host, and after it all slices come together again.

    this rank's gradient (n,) -> slices of all ranks of the host, added up -> this rank's (n / L,)
    -> exchange between hosts -> slices of all ranks -> the sum of all (n,)

A rank whose exchange has failed takes part in the last leg and says so there, so that the others of its host
neither wait for it nor train on what it has."""

from __future__ import annotations

from typing import Any

import torch

from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.layout import Layout, Parameter, Slices
from tagc.torch.exchange.rows import Rows


class Slice(Rows):
    """Of one exchange of `sums` into `result`."""

    def __init__(
        self,
        hosts: Hosts,
        comm: Comm,
        source: torch.Tensor,
        target: torch.Tensor,
        op: Any,
        layout: Layout | None,
        name: str,
        timeout_s: float,
    ) -> None:
        """layout: None where that of the source is not known."""
        slices = None if layout is None else layout.slices
        self._slices = slices or Slices([Parameter("", (source.numel(),), "dense")], hosts.per_host)
        super().__init__(hosts, comm, self._slices.cut(source).view(-1), op, name, timeout_s, n_rows=1)
        self._target, self._name = target, name
        self.result = self.sums

    @property
    def n_bytes(self) -> int:
        return super().n_bytes + self.result.nbytes * (self.hosts.per_host - 1)

    def spread(self, failure: BaseException | None = None) -> None:
        """Copies the slices of all ranks to the target. failure: of this rank's exchange. Collective over the
        host. In CPU memory it raises the same Error on all ranks if one has failed; on a device, where
        failures are known at the end of the pass, they get NaN."""
        sent = torch.cat([self.result, self.result.new_zeros(1)])
        if failure is not None:
            sent.fill_(float("nan"))
        rows = sent.new_empty(self._slices.n_slices, self._slices.row + 1)
        self._collectives.all_gather(rows.view(-1), sent)
        if failure is not None or rows.device.type == "cpu" and rows[:, -1].isnan().any():
            self.comm.agree(f"gradients of {self._name}, within the host", {}, failure)
        self._slices.join(rows[:, :-1], self._target)
