"""Turned: reductions of matrices whose optimizer makes all directions equally large, as Muon does. There,
what rounding adds to a direction with small gradients counts as much as in one with large ones. So a gradient
is turned into a basis of its directions before it is rounded: a block of values, which has one scale, is then
of one direction, and its rounding errors are as small as that direction is.

    x (rows, columns)       what a rank has of a matrix for one owner
    short (s, long)         x, or x transposed if it has more rows than columns
    basis (s, s)            orthogonal: eigenvectors of short @ short.T, added up over some sums
    y = basis.T @ short     what travels. basis @ (the sum of all ranks' y) is the sum of all ranks' short

All ranks must have the same basis, so one of them sends it to all, at most once in 20 calls. It may be a
coarse one, as long as it is orthogonal: then a direction is a little of others, and sums stay right."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import functools
import math
import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.collectives.calls import Work, check, flat
from tagc.collectives.collectives import Collectives
from tagc.torch.extension import ReduceOp

WINDOW = 20  # calls before the first basis; and those just before a basis, of whose sums it is made
VALUES, BLOCK = "int4", 32  # of bases on the wire


@dataclasses.dataclass
class Matrices:
    """What is known of a key. Shapes begin with the owners and the matrices of each: one owner has all of an
    all-reduce, and each rank is one of a reduce-scatter."""

    key: Any  # kept, so that no other tensor gets its id
    shape: tuple[int, int, int, int]  # owners, matrices of each, rows, columns
    place: int  # of the owner whose sums this rank gets
    makes: bool  # whether this rank makes the bases of that owner
    senders: list[int]  # the rank that makes them, of each owner
    device: torch.device
    n_calls: int = 0
    renews_at: int = WINDOW  # the call with new bases
    follows: bool = False  # whether new bases follow from the last ones
    bases: torch.Tensor | None = None  # (owners, matrices, s, s)
    squares: torch.Tensor | None = None  # (matrices, s, s): sum of short @ short.T in this window

    @property
    def n_short(self) -> int:
        return min(self.shape[2:])

    def short(self, x: torch.Tensor) -> torch.Tensor:
        """Flat values of some owners as (owners, matrices, s, long), in fp32."""
        x = x.view(-1, *self.shape[1:]).float()
        return x if self.shape[2] <= self.shape[3] else x.mT

    def long(self, short: torch.Tensor) -> torch.Tensor:
        """The inverse of short(), flat."""
        return (short if self.shape[2] <= self.shape[3] else short.mT).flatten()

    def sent(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what travels, flat, which may be x itself."""
        short = self.short(x)
        return (short if self.bases is None else self.bases.mT @ short).flatten()

    def came(self, sums: torch.Tensor, bases: torch.Tensor | None) -> torch.Tensor:
        """Returns what was sent with these bases, turned back: (1, matrices, s, long)."""
        y = sums.view(1, self.shape[1], self.n_short, -1)
        return y if bases is None else bases[self.place] @ y

    def add(self, short: torch.Tensor) -> None:
        """Takes sums (matrices, s, long) into the next bases."""
        square = (short @ short.mT).nan_to_num(0.0, 0.0, 0.0)
        self.squares = square if self.squares is None else self.squares + square

    def new_bases(self) -> torch.Tensor:
        """Returns bases of `squares` as they travel, large directions first; of those that are not finite the
        bases that there are."""
        squares, self.squares = self.squares, None
        one = torch.eye(self.n_short, device=self.device).expand(self.shape[1], -1, -1)
        bases = one if self.bases is None else self.bases[self.place]
        if squares is not None and squares.isfinite().all():
            if self.follows:  # a step of QR from the last ones costs less, and does as well
                bases = torch.linalg.qr(squares @ bases)[0]
            else:
                with contextlib.suppress(torch.linalg.LinAlgError):
                    bases = torch.linalg.eigh(squares)[1].flip(-1)
                    self.follows = True
        message = encoded(bases)
        sent = decoded(message, bases.shape, self.device)
        if (sent.mT @ sent - one).abs().max() < 0.02:  # products may be in TF32
            return message
        self.follows = False
        return encoded(one)

    def turned(self, kept: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
        """Returns what was kept of what was sent, (n,), in other bases."""
        y = kept.to(self.device).view(*self.shape[:2], self.n_short, -1)
        return (bases.mT @ (y if self.bases is None else self.bases @ y)).flatten()


class Turned:
    """Reductions of matrices that Muon or an optimizer of its kind updates, in the basis of their directions:

        comm = Collectives()
        turned = Turned(comm)
        turned.reduce_scatter(output, input, key=parameter)

    comm: makes the calls. It must send every value, as it does by default. Its other keys are as ever.
    every: the calls of a key between two bases, from 20 on. The first is there after 20 calls.

    Tensors have the shape (rows, columns) or (matrices, rows, columns). Of the input of reduce_scatter() each
    rank gets whole matrices, or whole rows of a single one. All other arguments, the order of calls, and
    Errors are as of Collectives. What a call has rounded off is added to the next one; only on hosts of
    several ranks, which share it out, it is dropped where a basis changes. After an Error a key begins anew,
    and so it does in a resumed run: bases are not in checkpoints. What comm sends whole is not turned.

    With s as the smaller side of what a rank gets of a matrix, a basis has s * s values, which travel in 4
    bits each and are kept in 4 bytes on every rank. One rank computes each basis, and all ranks multiply what
    they send by it."""

    def __init__(self, comm: Collectives, every: int = WINDOW) -> None:
        if not isinstance(comm, Collectives):
            raise Error("argument", f"comm is a {type(comm).__name__}, must be a Collectives")
        if isinstance(every, bool) or not isinstance(every, int) or every < WINDOW:
            raise Error("argument", f"every is {every!r}, must be a number of calls from {WINDOW} on")
        if comm.sparsity:
            raise Error(
                "argument",
                f"comm has a sparsity of {comm.sparsity:g}, and Turned drops what waits where a basis "
                "changes: make one that sends every value, with sparsity=0",
            )
        self._comm, self._every, ranks = comm, every, comm.ranks
        self._n_ranks, self._rank = len(ranks), ranks.index(dist.get_rank())
        self._lock = threading.RLock()  # held while a call takes its place
        self._matrices: dict[Any, Matrices] = {}  # by name, or id of a parameter

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        key: torch.Tensor | str,
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Does what Collectives.reduce_scatter() does. With async_op=True, the wait() of what it returns
        writes the output."""
        return self._submit("reduce_scatter", key, input, output, op, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, *, key: torch.Tensor | str, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> dist.Work | None:
        """Does what Collectives.all_reduce() does. async_op: as of reduce_scatter()."""
        return self._submit("all_reduce", key, tensor, tensor, op, async_op)

    # ---- a call ----

    def _submit(self, what: str, key: Any, source: Any, target: Any, op: Any, is_async: bool) -> Any:
        # what inference mode makes would not do for later calls
        with self._lock, torch.inference_mode(False), torch.no_grad():
            try:
                work = self._begin(what, key, source, target, op)
            except BaseException:
                self._restart(key)
                raise
        if is_async:
            return work
        work.wait()
        return None

    def _begin(self, what: str, key: Any, source: Any, target: Any, op: Any) -> dist.Work:
        self._renew(self._matrices.get(_number_of(key)))
        try:
            matrices = self._find(what, key, source, target)
        except Error as failure:  # the other ranks are about to call
            self._restart(key)
            return self._comm.begin(what, key, source, target, op, failure)
        if matrices is None:
            return self._comm.begin(what, key, source, target, op)
        is_in_window = matrices.renews_at - matrices.n_calls <= WINDOW
        matrices.n_calls += 1
        bases, sent, into = matrices.bases, matrices.sent(flat(source)), flat(target)
        sums = sent if target is source else sent.new_empty(len(into))

        def finish() -> None:
            short = matrices.came(sums, bases)
            into.copy_(matrices.long(short))
            if is_in_window and matrices.makes:
                matrices.add(short[0])

        work = self._comm.begin(what, key, sent, sums, op)
        return TurnedWork(work, target, sent, finish, lambda: self._restart(key))

    def _restart(self, key: Any) -> None:
        """Makes the next call with this key its first one, on all ranks: where a call failed, it may have
        counted on some of them alone."""
        self._matrices.pop(_number_of(key), None)

    def _find(self, what: str, key: Any, source: Any, target: Any) -> Matrices | None:
        """Returns what is known of a key; of a new one, what it is for. None: it is sent as it is. Local."""
        check(what, source, target, self._n_ranks)
        if not isinstance(key, (str, torch.nn.Parameter)):
            raise Error("argument", f"key is a {type(key).__name__}, must be a parameter or a name")
        name, is_compressed = self._comm.look_up(key, source)
        if not is_compressed:
            return None
        n_owners = self._n_ranks if what == "reduce_scatter" else 1
        shape = _shape_of(what, tuple(source.shape), n_owners)
        known = self._matrices.get(_number_of(key))
        if known is None:
            self._comm.forget(key)  # what a former run has left was in a basis that is gone
            senders = list(range(n_owners)) if n_owners > 1 else [zlib.crc32(name.encode()) % self._n_ranks]
            place = self._rank if n_owners > 1 else 0
            known = Matrices(key, shape, place, senders[place] == self._rank, senders, source.device)
            self._matrices[_number_of(key)] = known
        if known.shape != shape:
            raise Error(
                "mismatch",
                f"key {name or 'of a parameter'}: (owners, matrices, rows, columns) are {shape}; in its "
                f"first call they were {known.shape}: give it a key of its own",
            )
        return known

    def _renew(self, matrices: Matrices | None) -> None:
        """Gives all keys new bases that have come as often as this one, if it is time. Collective."""
        if matrices is None or matrices.n_calls != matrices.renews_at:
            return
        due = [one for one in self._matrices.values() if one.n_calls == one.renews_at]
        try:
            for one, bases in zip(due, self._exchanged(due)):
                self._comm.change_residual(one.key, functools.partial(one.turned, bases=bases))
                one.bases, one.renews_at = bases, one.renews_at + self._every
        except BaseException:
            for one in due:
                self._restart(one.key)
            raise

    def _exchanged(self, due: list[Matrices]) -> list[torch.Tensor]:
        """Returns the new bases of each, (owners, matrices, s, s), as all ranks have them. Collective."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        mine = torch.cat([nothing, *(one.new_bases() for one in due if one.makes)])
        shapes = [(one.shape[1], one.n_short, one.n_short) for one in due]
        n_bytes = [
            [n_of(shape) * (rank in one.senders) for one, shape in zip(due, shapes)]
            for rank in range(self._n_ranks)
        ]
        receives = list(map(sum, n_bytes))
        theirs = mine.new_empty(sum(receives))
        self._comm.all_to_all(theirs, mine.repeat(self._n_ranks), receives, [len(mine)] * self._n_ranks)
        of_ranks = [of_rank.split(n) for of_rank, n in zip(theirs.split(receives), n_bytes)]
        return [
            torch.stack([decoded(of_ranks[rank][i], shape, one.device) for rank in one.senders])
            for i, (one, shape) in enumerate(zip(due, shapes))
        ]


def _number_of(key: Any) -> Any:
    return key if isinstance(key, str) else id(key)


def _shape_of(what: str, shape: tuple[int, ...], n_owners: int) -> tuple[int, int, int, int]:
    """Returns (owners, matrices of each, rows, columns)."""
    if len(shape) in (2, 3):
        n_matrices, n_rows, n_columns = (1, *shape)[-3:]
        if n_matrices % n_owners == 0:
            return n_owners, n_matrices // n_owners, n_rows, n_columns
        if n_matrices == 1 and n_rows % n_owners == 0:
            return n_owners, 1, n_rows // n_owners, n_columns
    whole = f", of which {n_owners} ranks get whole matrices, or whole rows of one" if n_owners > 1 else ""
    raise Error(
        "argument",
        f"{what}() of a tensor of shape {shape}: must be (rows, columns) or (matrices, rows, columns){whole}",
    )


# ---- bases on the wire ----


def _coded(what: str, *arguments: Any) -> None:
    options = lib.initialised(lib.BlocksOptions, "tagc_blocks_options_init")
    options.format, options.block = lib.FORMATS[VALUES], BLOCK
    lib.call(f"tagc_blocks_{what}", ctypes.byref(options), *arguments)


def n_of(shape: tuple[int, ...]) -> int:
    """Returns the bytes of such bases."""
    n = ctypes.c_uint64()
    _coded("bytes", math.prod(shape), ctypes.byref(n))
    return n.value


def encoded(bases: torch.Tensor) -> torch.Tensor:
    values = bases.to("cpu", torch.float32).contiguous()
    message = torch.empty(n_of(values.shape), dtype=torch.uint8, device="cpu")
    _coded("encode", values.data_ptr(), values.numel(), message.data_ptr(), message.numel())
    return message


def decoded(message: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns bases (matrices, s, s) made orthogonal again, if they are nearly so."""
    bases = torch.empty(shape, dtype=torch.float32, device="cpu")
    _coded("decode", message.data_ptr(), message.numel(), bases.data_ptr(), bases.numel())
    bases = bases.to(device)
    for _ in range(5):  # each squares what is wrong
        bases = 1.5 * bases - 0.5 * bases @ (bases.mT @ bases)
    return bases


class TurnedWork(dist.Work):
    """Of one call, as Collectives returns one.

    sent: what another stream may read until wait(). finish: writes the output, when the sums are there. fail:
    what follows a failure."""

    def __init__(
        self,
        work: Work,
        output: torch.Tensor,
        sent: torch.Tensor,
        finish: Callable[[], None],
        fail: Callable[[], None],
    ) -> None:
        super().__init__()
        self._work, self._output, self._finish, self._fail = work, output, finish, fail
        self._sent: torch.Tensor | None = sent
        self._lock, self._is_finished = threading.Lock(), False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits as a Work of Collectives does, and writes the output."""
        try:
            self._work.wait(timeout)
        except BaseException:
            if self._work.over.is_set():  # and not only this wait
                self._fail()
            raise
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not self._is_finished:
                self._finish()
            self._is_finished, self._sent = True, None
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of [output], which fails as wait() does."""

        def value(_: Any) -> list[torch.Tensor]:
            self.wait()
            return [self._output]

        return self._work.get_future().then(value)

    def is_completed(self) -> bool:
        if self._work.is_success():
            self.wait()
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self._work.is_success()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self._output]
