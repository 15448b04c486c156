"""tagc::all_gather and tagc::reduce_scatter, which a compiler sees as one node each: with fake kernels, and
with the gradient of a gather as a reduce-scatter. tagc::wait_tensor is outside of its graphs.

A reduce-scatter only begins, in every mode. What it returns goes the way of a gradient, to Late, where
autograd waits for the sums in its place: behind the graph, and behind all else of an eager backward pass. So
no compiler places waits, and where it moves a reduce-scatter, the wait for it is behind it still.

Which parameter it is, an operator learns from a tensor, its key. A number or a name would be part of the
graph, and the blocks of a model could not share one. What exchanges it is found when the operator runs, so
that nothing of a handle, such as the schedule's levels, is in a graph either."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tagc._library import Error
from tagc.compiled import internals


class Exchanges(Protocol):
    """The exchanges of one parameter. What they return is new memory."""

    def all_gather(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def reduce_scatter(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def wait(self) -> torch.Tensor: ...


_numbers = itertools.count()
_of: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def key_of(exchanges: Exchanges) -> torch.Tensor:
    """Returns a new key, which finds them as long as they are kept. Local."""
    number = next(_numbers)
    _of[number] = exchanges
    return torch.tensor(number)


def _find(key: torch.Tensor) -> Exchanges:
    found: Exchanges | None = _of.get(int(key))
    if found is None:
        raise Error(
            "state",
            "this graph was made for a tagc handle that is closed or gone: call the compiled model, which "
            "sees that, or compile it again",
        )
    return found


@torch.library.custom_op("tagc::all_gather", mutates_args=())
def all_gather(
    shard: torch.Tensor, key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Returns the whole parameter, of that shape and dtype. Collective."""
    return _find(key).all_gather(shard, dtype)


@all_gather.register_fake
def _(shard: torch.Tensor, key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return shard.new_empty(shape, dtype=dtype)


@torch.library.custom_op("tagc::reduce_scatter", mutates_args=())
def reduce_scatter(
    gradient: torch.Tensor, key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Begins to exchange gradients. Returns zeros of that shape and dtype, for wait_tensor(). Collective."""
    return _find(key).reduce_scatter(gradient, dtype)


@reduce_scatter.register_fake
def _(gradient: torch.Tensor, key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return gradient.new_empty(shape, dtype=dtype)


@torch.library.custom_op("tagc::wait_tensor", mutates_args=())
def wait_tensor(begun: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of the gradients' sum or mean, from what reduce_scatter() has returned, or
    from a sum of several such tensors with one key."""
    return _find(key).wait()


@wait_tensor.register_fake
def _(begun: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(begun)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    shard, key, _, _ = inputs
    ctx.save_for_backward(key)
    ctx.shape, ctx.dtype = shard.shape, shard.dtype


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    (key,) = ctx.saved_tensors
    return reduce_scatter(gradient, key, ctx.shape, ctx.dtype), None, None, None


all_gather.register_autograd(_backward, setup_context=_keep)
internals.keep_order_of(reduce_scatter)


class Late(torch.autograd.Function):
    """A shard, once for all passes: that autograd has made it before all else is why its backward() comes
    last. It saves no tensor, so that many passes can use it."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        ctx.key = key
        return shard.detach()

    @staticmethod
    def backward(ctx: Any, begun: torch.Tensor) -> tuple[torch.Tensor, None]:
        return wait_tensor(begun, ctx.key), None


late: Any = Late.apply
