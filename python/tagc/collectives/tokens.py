"""all_to_all() of Collectives: what each rank has for each other one, in few bits between hosts. There is no
residual: which token goes where changes from call to call.

    flat hosts       one all-to-all of libtagc over all ranks
    several ranks    neighbours first give each other, whole and by the caller's backend, what is for their
    on a host        place on any host; then libtagc's all-to-all over the ranks of this place

The second one has as many messages as there are other hosts, and what arrives lies in the order of the
output."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.collectives.calls import check_plain
from tagc.torch.extension import Comm, Hosts, Passes

Boundary = Literal["int8", "int4", "whole"]
BOUNDARIES = ("int8", "int4", "whole")
BLOCK = 64
# What is encoded, and as what libtagc reads it. Everything else travels whole.
_CODED = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
_FORMATS = {torch.float32: lib.FORMATS["fp32"], torch.bfloat16: lib.FORMATS["bf16"]}


class TokenCall(NamedTuple):
    """One call as this rank sees it, with tensors of any device without their history. failure: why this rank
    only tells the others."""

    name: str  # of the key, for seeds and messages
    input: torch.Tensor
    output: torch.Tensor
    sends: list[int]  # elements for each rank
    receives: list[int]
    values: Boundary
    seed: int | None  # of rounding at random; None: to the nearest
    failure: Error | None


def _counts(what: str, tensor: torch.Tensor, splits: Sequence[int] | None, n_ranks: int) -> list[int]:
    """Returns the elements of `tensor` for each rank. splits: of its rows; None: equal ones."""
    n_rows = tensor.shape[0]
    if splits is None:
        if n_rows % n_ranks:
            raise Error(
                "argument",
                f"{what} has {n_rows} rows, no multiple of {n_ranks} ranks: give {what}_split_sizes",
            )
        splits = [n_rows // n_ranks] * n_ranks
    try:
        rows = [int(n) for n in splits]
    except (TypeError, ValueError) as problem:
        raise Error("argument", f"{what}_split_sizes is {splits!r}, must be numbers: {problem}") from problem
    if len(rows) != n_ranks or min(rows) < 0 or sum(rows) != n_rows:
        raise Error(
            "argument",
            f"{what}_split_sizes is {rows}, must be {n_ranks} numbers of 0 or more that add up to the "
            f"{n_rows} rows of {what}",
        )
    row = tensor[0].numel() if n_rows else 0
    return [n * row for n in rows]


def check_tokens(
    output: Any, input: Any, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None, n: int
) -> tuple[list[int], list[int]]:
    """Returns the elements that go to each of n ranks, and that come from each. Error unless all fits.
    Local."""
    for name, tensor in {"input": input, "output": output}.items():
        check_plain(name, tensor)
        if tensor.layout != torch.strided or not tensor.is_contiguous() or not tensor.dim():
            raise Error(
                "argument", f"{name} of shape {tuple(tensor.shape)} must be contiguous, of rows for ranks"
            )
    if input.dtype != output.dtype or input.device != output.device:
        raise Error(
            "argument",
            f"input is of {input.dtype} on {input.device}, output of {output.dtype} on {output.device}: they "
            "must be alike",
        )
    if input.shape[1:] != output.shape[1:]:
        raise Error(
            "argument",
            f"rows of input have the shape {tuple(input.shape[1:])}, and of output {tuple(output.shape[1:])}",
        )
    return _counts("input", input, input_splits, n), _counts("output", output, output_splits, n)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Returns 64 bits of each that look random, as SplitMix64 does, the same on every rank."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> 31)


def _checksum(first: int, step: int, counts: Sequence[int]) -> int:
    """Returns a sum over counts, each mixed with the pair of ranks that it is of: pair first + i * step."""
    pairs = torch.arange(first, first + step * len(counts), step, dtype=torch.int64, device="cpu")
    numbers = torch.tensor(list(counts), dtype=torch.int64, device="cpu")
    return int(_mixed(_mixed(pairs) + numbers).sum()) & 2**64 - 1


class Words(NamedTuple):
    """What this rank, or its host, sends and expects. Over all ranks the sums are equal, or a call fails."""

    sent: int
    expected: int


class AllToAll:
    """libtagc's over the ranks of a comm, for tensors in host memory. Collective to make."""

    def __init__(self, comm: Comm) -> None:
        options = lib.initialised(lib.AllToAllOptions, "tagc_all_to_all_options_init")
        options.tag = zlib.crc32(b"all_to_all")
        self.comm, self._made = comm, ctypes.c_void_p()
        lib.call("tagc_all_to_all_create", comm.handle, ctypes.byref(options), ctypes.byref(self._made))

    def run(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
        values: Boundary,
        seed: int | None,
        words: Words = Words(0, 0),
    ) -> None:
        """Sends flat `source` and fills flat `target`, of one dtype. values: of fp32 or bf16. seed: of
        rounding at random; None: to the nearest. Collective."""
        call = lib.initialised(lib.AllToAllCall, "tagc_all_to_all_call_init")
        call.input, call.n_input = source.data_ptr() or None, source.numel()
        call.output, call.n_output = target.data_ptr() or None, target.numel()
        array = ctypes.c_uint64 * len(sends)
        counts = array(*sends), array(*receives)
        call.sends, call.receives = counts
        call.n_counts, call.element_bytes = len(sends), source.element_size()
        call.sent_word, call.expected_word = words
        if values != "whole":
            blocks = lib.initialised(lib.BlocksOptions, "tagc_blocks_options_init")
            blocks.format, blocks.block, blocks.element = lib.FORMATS[values], BLOCK, _FORMATS[source.dtype]
            blocks.rounding, blocks.seed = int(seed is not None), seed or 0
            call.blocks = ctypes.pointer(blocks)
        lib.call("tagc_all_to_all_run", self._made, ctypes.byref(call))

    def fail(self, failure: Error) -> None:
        """Takes part in a call that this rank cannot begin, and raises. Collective."""
        status = lib.STATUSES.index(failure.status)
        lib.call("tagc_all_to_all_fail", self._made, status, str(failure).encode())

    def close(self) -> None:
        lib.load().tagc_all_to_all_destroy(self._made)


class Tokens:
    """Those of one Collectives, made at its first all_to_all()."""

    def __init__(self, passes: Passes, group: dist.ProcessGroup, hosts: Hosts) -> None:
        self._passes, self._group, self._hosts = passes, group, hosts
        self._made: AllToAll | None = None
        self.n_ranks, self.rank = group.size(), group.rank()

    def run(self, call: TokenCall) -> None:
        """Exchanges. Collective; all ranks raise an Error where one fails."""
        if self.n_ranks == 1:
            if call.failure is not None:
                raise call.failure
            call.output.copy_(call.input)
            return
        self._passes.runners.wait()
        with torch.inference_mode(False):
            if self._hosts.is_two_level:
                self._two_levels(call)
            else:
                words = self._own_words(call)
                self._between(call, call.input, call.sends, call.receives, words, call.failure)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    # ---- private ----

    def _own_words(self, call: TokenCall) -> Words:
        """Also of what all ranks must have alike: equal sums in a ring, in which each rank is once."""
        if call.failure is not None:
            return Words(0, 0)
        alike = zlib.crc32(f"{call.name} {call.input.dtype} {call.values} {call.seed is None}".encode())
        rank, n = self.rank, self.n_ranks
        sent = _checksum(rank * n, 1, call.sends) + _checksum(rank, 1, [alike])
        expected = _checksum(rank, n, call.receives) + _checksum((rank + 1) % n, 1, [alike])
        return Words(sent & 2**64 - 1, expected & 2**64 - 1)

    def _two_levels(self, call: TokenCall) -> None:
        hosts, failure = self._hosts, call.failure
        assert hosts.within is not None
        comm = self._passes.comm(hosts.within)
        try:
            comm.agree(f"all_to_all() of key {call.name}", {}, failure)
        except Error as problem:  # other hosts hear of it between hosts
            nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._between(call, nothing, [], [], Words(0, 0), problem)
            raise
        words_here = self._own_words(call)
        said = comm.all_gather(
            struct.pack(f"<{2 + self.n_ranks}Q", words_here.sent, words_here.expected, *call.sends)
        )
        neighbours = [struct.unpack(f"<{2 + self.n_ranks}Q", one) for one in said]
        words = Words(*(sum(one[i] for one in neighbours) & 2**64 - 1 for i in range(2)))
        counts = [one[2:] for one in neighbours]  # of each neighbour, what it has for each rank
        staged = self._spread_within(comm, call, counts)
        first, per_host = hosts.host * hosts.per_host, hosts.per_host
        for place, theirs in enumerate(counts):
            n = theirs[first + hosts.place]
            if n != call.receives[first + place]:
                failure = Error(
                    "mismatch",
                    f"{call.receives[first + place]} elements are expected of rank {comm.ranks[place]}, "
                    f"which sends {n}",
                )
        sends = [
            sum(theirs[host * per_host + hosts.place] for theirs in counts) for host in range(hosts.n_hosts)
        ]
        receives = [
            sum(call.receives[host * per_host : (host + 1) * per_host]) for host in range(hosts.n_hosts)
        ]
        self._between(call, staged, sends, receives, words, failure)

    def _spread_within(self, comm: Comm, call: TokenCall, counts: list[tuple[int, ...]]) -> torch.Tensor:
        """Gives neighbours what is for ranks of their place, whole, and returns what neighbours have for this
        place, by host and then by neighbour. comm: of this host."""
        hosts, per_host = self._hosts, self._hosts.per_host
        parts = list(call.input.split(call.sends))
        packed = torch.cat([part for place in range(per_host) for part in parts[place::per_host]])
        for_places = [sum(call.sends[place::per_host]) for place in range(per_host)]
        theirs = [sum(one[hosts.place :: per_host]) for one in counts]
        came = packed.new_empty(sum(theirs))
        size, device = packed.element_size(), packed.device
        collectives = hosts.collectives(comm, device, "all_to_all()", self._passes.state.options.timeout_s)
        collectives.all_to_all(
            came.view(torch.uint8),
            packed.view(torch.uint8),
            [n * size for n in theirs],
            [n * size for n in for_places],
        )
        of_neighbours = [
            list(part.split(list(one[hosts.place :: per_host])))
            for part, one in zip(came.split(theirs), counts)
        ]
        return torch.cat([parts[host] for host in range(hosts.n_hosts) for parts in of_neighbours])

    def _all_to_all(self) -> AllToAll:
        """Returns libtagc's over the ranks of this place. Collective at the first call."""
        comm = self._passes.comm(self._hosts.between)
        if self._made is None or self._made.comm is not comm:
            self.close()
            self._made = AllToAll(comm)
        return self._made

    def _between(
        self,
        call: TokenCall,
        source: torch.Tensor,
        sends: list[int],
        receives: list[int],
        words: Words,
        failure: Error | None,
    ) -> None:
        made = self._all_to_all()
        is_coded = call.values != "whole" and source.dtype in _CODED and not self._hosts.is_one
        dtype = _CODED[source.dtype] if is_coded else source.dtype
        target = call.output
        if failure is None:
            try:
                source = source.to("cpu", dtype)
                if target.device.type != "cpu" or target.dtype != dtype:
                    target = torch.empty(target.shape, dtype=dtype, device="cpu")
            except Exception as lack:  # of memory, before libtagc had a part in it
                failure = Error("memory", f"all_to_all(): {lack}")
        if failure is not None:
            with contextlib.suppress(Error):  # of this rank, as all know then
                made.fail(failure)
            raise failure
        values: Boundary = call.values if is_coded else "whole"
        try:
            made.run(source, target, sends, receives, values, call.seed, words)
        except Error as problem:
            raise Error(problem.status, f"all_to_all() of key {call.name}: {problem}") from problem
        if target is not call.output:
            call.output.copy_(target)
