"""A call of Collectives: what is checked of it on this rank, and what its caller gets."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.collectives.keys import Saved, Use
from tagc.torch.extension import State, check_tensors, checkpoint, scale_of


class Work(dist.Work):
    """Of one call, as torch's collectives return one."""

    def __init__(self, output: torch.Tensor, failed: list[Work]) -> None:
        """failed: the calls whose failures nobody has raised yet."""
        super().__init__()
        self._output, self._failed, self.over = output, failed, threading.Event()
        self._failure: BaseException | None = None
        self.future: torch.futures.Future[Any] | None = None  # of the output, once the call is on its way

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._failed.append(self)

    def _check(self) -> None:
        """Raises the failure, if there is one."""
        if self._failure is not None:
            with contextlib.suppress(ValueError):
                self._failed.remove(self)  # which would keep the tensors
            raise self._failure

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits until the output is there, and returns True. If the call has failed, it raises the Error that
        all ranks raise. For tensors on a device the current stream waits, and the host does not: failures are
        then raised by synchronize(), or by the first call of the next step."""
        if timeout is not None and not self.over.wait(timeout.total_seconds()):
            raise Error(
                "timeout", f"wait(): no result within {timeout.total_seconds():g} s; the call goes on"
            )
        assert self.future is not None  # it was submitted
        self.future.wait()
        self._check()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of [output], which fails as wait() does."""

        def value(_: torch.futures.Future[Any]) -> list[torch.Tensor]:
            self._check()
            return [self._output]

        assert self.future is not None
        return self.future.then(value)

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set() and self._failure is None

    def result(self) -> list[torch.Tensor]:
        return [self._output]


class Call(NamedTuple):
    """What a user has called, with flat tensors. failure: why this rank only tells the others."""

    use: Use
    key: Any
    source: torch.Tensor
    target: torch.Tensor
    op: Any
    failure: Error | None


def check_plain(name: str, tensor: Any) -> None:
    """Raises Error unless this is a tensor, and no subclass with operators of its own. Local."""
    if not isinstance(tensor, torch.Tensor):
        raise Error("argument", f"{name} is a {type(tensor).__name__}, must be a tensor")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        advice = ": pass .to_local()" if hasattr(tensor, "to_local") else ""
        raise Error("argument", f"{name} is a {type(tensor).__name__}, must be a plain tensor{advice}")


def check(what: str, source: Any, target: Any, n_ranks: int) -> None:
    """Raises Error unless these tensors fit. Local."""
    for name, tensor in {"input": source, "output": target}.items():
        name = "tensor" if what == "all_reduce" else name
        check_plain(name, tensor)
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


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as (n,), without its history. Call it outside of inference mode, so that calls of
    all kinds may write to it, also from a thread."""
    if not tensor.is_inference():
        return tensor.detach().view(-1)
    values, at = tensor.untyped_storage(), tensor.storage_offset()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(values, at, (tensor.numel(),), (1,))


def copy(call: Call) -> None:
    """Does the call of a rank that is alone."""
    if call.failure is not None:
        raise call.failure
    call.target.copy_(call.source)
    if call.op is not None and (factor := scale_of(call.op, 1)) != 1.0:
        call.target.mul_(factor)


def keys_of(about: Mapping[str, Any]) -> Saved:
    """Returns those of what a rank says of itself."""
    try:
        keys = about["keys"]
        reduced, gathered = (
            {name: Use(str(what), int(n), str(dtype)) for name, (what, n, dtype) in keys[each].items()}
            for each in ("reduced", "gathered")
        )
        kinds = {name: str(keys["kinds"][name]) for name in reduced}
        n_backward = {str(name): int(n) for name, n in keys.get("backward", {}).items()}
        named = list(keys.get("named", ()))
        return Saved(reduced, gathered, kinds, named, int(keys["without"]), n_backward)
    except (AttributeError, KeyError, TypeError, ValueError):
        text = "tagc state: it says nothing of keys: it must be what Collectives.state_dict() gives"
        raise Error("argument", text) from None


def check_complete(saved: Any, abouts: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises Error if dcp.load() has read less than was saved, as it does into an object without the keys."""
    for part in saved if isinstance(saved, (list, tuple)) else [saved]:
        for rank, about in abouts.items():
            entry = checkpoint.renamed(part.get(f"rank{rank}", {}))
            saw = {*entry.get("residuals", ()), *entry.get(checkpoint.REPLICAS, ())}
            missing = {*about.get("keys", {}).get("kept", ()), *about.get("gathered", ())} - saw
            if entry and missing:
                raise Error(
                    "argument",
                    f"tagc state: what rank {rank} saved of key {min(missing)} is not here: dcp.load() reads "
                    "only what this object has already: give it comm.at(path) instead of comm",
                )


class Reader(checkpoint.Reader):
    """Of Collectives.at(). load(saved, is_selected)."""

    def __init__(self, load: Callable[[Any, bool], None], state: State, *where: Any) -> None:
        super().__init__(state, *where)
        self._load = load

    def load_state_dict(self, saved: Any) -> None:
        self._load(saved, True)
