"""all_to_all() for autograd: in place, as torch's, and as the operator tagc::all_to_all, which a compiler
sees as one node, with a fake kernel and with its gradient as an all-to-all back.

Which Collectives (`maker`) and key it is, the operator learns from a tensor: a number or a name would be part
of the graph, and the blocks of a model could not share one."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tagc._library import Error

Splits = Sequence[int] | None


class InPlace(torch.autograd.Function):
    """Writes to the output, which is the caller's, and appends the Work to `begun`."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        input: torch.Tensor,
        maker: Any,
        output_splits: Splits,
        input_splits: Splits,
        key: Any,
        begun: list[Any],
    ) -> torch.Tensor:
        ctx.mark_dirty(output)
        ctx.call = maker, output_splits, input_splits, key, input.shape
        begun.append(maker._begin_tokens(output, input, output_splits, input_splits, key, False))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        maker, output_splits, input_splits, key, shape = ctx.call
        back = gradient.new_empty(shape)
        maker._begin_tokens(back, gradient.contiguous(), input_splits, output_splits, key, True).wait()
        return None, back, None, None, None, None, None


in_place: Any = InPlace.apply

_numbers = itertools.count()
_of: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()


@torch.library.custom_op("tagc::all_to_all", mutates_args=())
def all_to_all(
    input: torch.Tensor,
    number: torch.Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    is_backward: bool,
) -> torch.Tensor:
    """Returns what came. Collective."""
    exchange = _of.get(int(number))
    if exchange is None:
        raise Error("state", "this graph was made for tokens() of a Collectives that is gone: keep it")
    output = input.new_empty((sum(output_split_sizes), *input.shape[1:]))
    call = output, input.contiguous(), output_split_sizes, input_split_sizes, exchange.key, is_backward
    exchange.maker._begin_tokens(*call).wait()
    return output


@all_to_all.register_fake
def _(
    input: torch.Tensor,
    number: torch.Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    is_backward: bool,
) -> torch.Tensor:
    return input.new_empty((sum(output_split_sizes), *input.shape[1:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, number, received, sent, _ = inputs
    ctx.save_for_backward(number)
    ctx.splits = received, sent


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    (number,) = ctx.saved_tensors
    received, sent = ctx.splits
    return all_to_all(gradient, number, sent, received, True), None, None, None, None


all_to_all.register_autograd(_backward, setup_context=_keep)


class Exchange:
    """What Collectives.tokens() returns."""

    def __init__(self, maker: Any, key: Any, n_ranks: int) -> None:
        self.maker, self.key, self._n_ranks = maker, key, n_ranks
        number = next(_numbers)
        _of[number] = self
        self._number = torch.tensor(number, device="cpu")

    def __call__(
        self, input: torch.Tensor, output_split_sizes: Splits = None, input_split_sizes: Splits = None
    ) -> torch.Tensor:
        """Returns what came. Splits: as of all_to_all(). Collective."""
        even = [input.shape[0] // self._n_ranks] * self._n_ranks
        received = even if output_split_sizes is None else list(output_split_sizes)
        sent = even if input_split_sizes is None else list(input_split_sizes)
        output: torch.Tensor = all_to_all(input, self._number, received, sent, False)
        return output
