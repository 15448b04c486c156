"""A call of Collectives: what is checked of it on this rank, and what its caller gets."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.collectives.keys import Use
from tagc.torch.exchange.unit import check_tensors, scale_of


class Work(dist.Work):
    """Of one call, as torch's collectives return one."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output, self.over = output, threading.Event()
        self.failure: BaseException | None = None
        self.future: torch.futures.Future[Any] | None = None  # of the output, once the call is on its way
        self.is_raised = False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits until the output is there, and returns True. If the call has failed, it raises the Error that
        all ranks raise. For tensors on a device the current stream waits, and the host does not: failures are
        then raised by synchronize(), or by the first call of the next step."""
        if timeout is not None and not self.over.wait(timeout.total_seconds()):
            raise Error(
                "transport", f"wait(): no result within {timeout.total_seconds():g} s; the call goes on"
            )
        assert self.future is not None  # it was submitted
        self.future.wait()
        if self.failure is not None:
            self.is_raised = True
            raise self.failure
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of [output], which fails as wait() does."""

        def value(_: torch.futures.Future[Any]) -> list[torch.Tensor]:
            if self.failure is not None:
                self.is_raised = True
                raise self.failure
            return [self._output]

        assert self.future is not None
        return self.future.then(value)

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set() and self.failure is None

    def result(self) -> list[torch.Tensor]:
        return [self._output]


class Call(NamedTuple):
    """What a user has called, with flat tensors. failure: why this rank only tells the others."""

    use: Use
    name: str | None
    key: Any
    source: torch.Tensor
    target: torch.Tensor
    op: Any
    failure: Error | None


def check(what: str, source: Any, target: Any, n_ranks: int) -> None:
    """Raises Error unless these tensors fit. Local."""
    for name, tensor in {"input": source, "output": target}.items():
        name = "tensor" if what == "all_reduce" else name
        if not isinstance(tensor, torch.Tensor):
            raise Error("argument", f"{name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise Error("argument", f"{name} of shape {tuple(tensor.shape)} is not contiguous")
        if not tensor.numel():
            raise Error("argument", f"{name} of shape {tuple(tensor.shape)} has no elements")
    check_tensors(source, target, what)
    n_in, n_out = source.numel(), target.numel()
    wanted = {"reduce_scatter": n_out * n_ranks == n_in, "all_gather": n_in * n_ranks == n_out}
    if not wanted.get(what, True):
        more, less = ("input", "output") if what == "reduce_scatter" else ("output", "input")
        raise Error(
            "argument",
            f"input has {n_in} elements and output {n_out}: over {n_ranks} ranks, {more} must have "
            f"{n_ranks} times as many as {less}",
        )


def copy(call: Call) -> None:
    """Does the call of a rank that is alone."""
    if call.failure is not None:
        raise call.failure
    call.target.copy_(call.source)
    if call.op is not None and (factor := scale_of(call.op, 1)) != 1.0:
        call.target.mul_(factor)


def uses(about: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Use], dict[str, Use], int]:
    """Returns name -> class, and name -> use, of the keys of reductions, and of those of gathers; and the
    number of calls without a key."""
    try:
        keys = about["keys"]
        reduced, gathered = (
            {name: Use(str(what), int(n), str(dtype)) for name, (what, n, dtype) in keys[each].items()}
            for each in ("reduced", "gathered")
        )
        kinds, n_once = {name: str(keys["kinds"][name]) for name in reduced}, int(keys["without"])
    except (AttributeError, KeyError, TypeError, ValueError):
        text = "tagc state: it says nothing of keys: it must be what Collectives.state_dict() gives"
        raise Error("argument", text) from None
    return kinds, reduced, gathered, n_once
