"""The places of parameters in the flat tensor that a hook gets, and in that for its sums.

    input of a hook   | a.row0 b.row0 c.row0 | a.row1 b.row1 c.row1 |      (W, row)

Rank r owns row r. An all-reduce has one row, without an owner. A parameter's residual is in wire order: the
order of its elements in the rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from tagc import _library as lib

LAST = lib.LEVELS["last"]  # of the schedule


class Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: str  # "compressed", "mild" or "dense"
    dim: int = 0  # along which it is sharded
    level: int = LAST  # of the schedule
    sparsity: float = 0.0  # that the schedule gives it there, as all ranks must know it
    # dimensions of its mesh over which this piece was cut out of the parameter, beside those of the exchange
    split: tuple[str, ...] = ()
    n_whole: int = 0  # elements of the parameter that this is a piece of; 0: it is no piece

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


class Piece(NamedTuple):
    """Elements [offset, offset + length) of a parameter's wire order, at `start` of the input."""

    parameter: int
    start: int
    offset: int
    length: int


class Layout:
    """Of one input. `pieces` in any order; n_rows is W, or 1 for an all-reduce over world_size ranks. is_cut:
    whether rows are cut inside of parameters, by cut()."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        pieces: Iterable[Piece],
        n_elems: int,
        n_rows: int,
        world_size: int,
        is_cut: bool = False,
    ) -> None:
        self.parameters, self.n_elems, self.world_size = tuple(parameters), n_elems, world_size
        self.is_cut = is_cut
        self.row = n_elems // n_rows
        self.all_reduce = n_rows == 1
        self._slices: dict[int, Slices] = {}  # by their number
        self._pieces: list[list[Piece]] = [[] for _ in self.parameters]
        for piece in sorted(pieces, key=lambda piece: piece.start):
            self._pieces[piece.parameter].append(piece)

    def pieces_of(self, parameter: int) -> list[Piece]:
        """Returns the pieces of the parameter with that index."""
        return self._pieces[parameter]

    def extent_of(self, parameter: int) -> tuple[int, int]:
        """Returns (first, elements) of what an input has of that parameter."""
        own, pieces = self.parameters[parameter], self._pieces[parameter]
        if not self.all_reduce:
            return 0, own.numel
        first = pieces[0].offset
        return first, min(pieces[-1].offset + pieces[-1].length, own.numel) - first

    def slices_of(self, n_slices: int) -> Slices:
        """Returns those of an all-reduce's input, in which each parameter is one piece."""
        if n_slices not in self._slices:
            numbers = [i for i, pieces in enumerate(self._pieces) if pieces]
            taken = []
            for i in numbers:
                own, (_, n) = self.parameters[i], self.extent_of(i)
                taken.append(own if n == own.numel else own._replace(shape=(n,), dim=0))
            starts = [self._pieces[i][0].start for i in numbers]
            self._slices[n_slices] = Slices(taken, n_slices, starts, self.n_elems)
        return self._slices[n_slices]

    def begins_of(self, parameter: int) -> list[int]:
        """Returns of how many elements of that parameter rows before each one are, and all of them:
        (n_rows + 1,)."""
        lengths = [0] * (self.n_elems // self.row + 1)
        for piece in self._pieces[parameter]:
            lengths[piece.start // self.row + 1] += piece.length
        return list(itertools.accumulate(lengths))

    def gaps_by_name(self) -> dict[str, list[slice]]:
        """Returns name of a parameter -> what is not here of its wire order."""
        found = {}
        for parameter, pieces in zip(self.parameters, self._pieces):
            begins = [0, *(piece.offset + piece.length for piece in pieces)]
            ends = [*(piece.offset for piece in pieces), parameter.numel]
            found[parameter.name] = [slice(*gap) for gap in zip(begins, ends) if gap[0] < gap[1]]
        return found


# ---- how each kind of wrapper lays parameters out ----


def chunked(parameters: Sequence[Parameter], world_size: int) -> Layout:
    """Returns FSDP2's layout: row r is the r-th chunk of every parameter along its sharded dimension, padded
    to the first one's size."""
    sizes = [chunked_elems(parameter, world_size) // world_size for parameter in parameters]
    row, pieces = sum(sizes), []
    for r in range(world_size):
        start = r * row
        for i, size in enumerate(sizes):
            if size:
                pieces.append(Piece(i, start, r * size, size))
            start += size
    return Layout(parameters, pieces, row * world_size, world_size, world_size)


def chunked_elems(parameter: Parameter, world_size: int) -> int:
    """Returns elements of a parameter in a chunked() input, with padding."""
    n_dim, n_row = first_dim(parameter)
    return -(-n_dim // world_size) * n_row * world_size


def first_dim(parameter: Parameter) -> tuple[int, int]:
    """Returns (length of its sharded dimension, elements of each row along that): its shape in wire order, as
    owners share it."""
    n_dim = parameter.shape[parameter.dim] if parameter.shape else 1
    return n_dim, parameter.numel // max(1, n_dim)


def cut(
    parameters: Sequence[Parameter],
    starts: Iterable[int],
    n_elems: int,
    world_size: int,
    rows: range | None = None,
) -> Layout:
    """Returns FSDP1's layout: parameters one after the other (at `starts`), cut into W rows, also inside a
    parameter. rows: of these alone."""
    row = n_elems // world_size
    pieces = []
    for i, (parameter, start) in enumerate(zip(parameters, starts)):
        offset = 0
        while offset < parameter.numel:
            at = start + offset
            length = min(parameter.numel - offset, row - at % row)
            pieces.append(Piece(i, at, offset, length))
            offset += length
    pieces = [piece for piece in pieces if rows is None or piece.start // row in rows]
    return Layout(parameters, pieces, n_elems, world_size, world_size, is_cut=True)


def bucket(
    parameters: Sequence[Parameter], world_size: int, starts: Iterable[int] | None = None, n_elems: int = 0
) -> Layout:
    """Returns the layout of DDP and of all-reduces: parameters one after the other (or at `starts`); every
    rank gets all."""
    if starts is None:
        starts, at = [], 0
        for parameter in parameters:
            starts.append(at)
            at += parameter.numel
        n_elems = at
    pieces = [Piece(i, start, 0, p.numel) for i, (p, start) in enumerate(zip(parameters, starts)) if p.numel]
    return Layout(parameters, pieces, n_elems, 1, world_size)


class Slices:
    """Parameters at `starts` in an all-reduce, each cut into one slice per rank of a host, so that all these
    ranks exchange as much of each parameter. Slices are those of chunked_elems().

        source | a.slice0 a.slice1 b.slice0 b.slice1 |
        rows   | a.slice0 b.slice0 | a.slice1 b.slice1 |     (n_slices, row), padded with zeros"""

    def __init__(
        self, parameters: Sequence[Parameter], n_slices: int, starts: Iterable[int], n_elems: int
    ) -> None:
        """n_elems: of the source."""
        sizes = [chunked_elems(parameter, n_slices) // n_slices for parameter in parameters]
        self.n_slices, self.row, self.n_elems = n_slices, sum(sizes), n_elems
        begins = [0, *itertools.accumulate(sizes)]
        self._places = [  # (start in the source, elements there, start in a row, elements there)
            (start, parameter.numel, at, size)
            for parameter, start, at, size in zip(parameters, starts, begins, sizes)
        ]

    def pieces(self, number: int) -> list[Piece]:
        """Returns the pieces of the row with that number."""
        pieces = []
        for i, (_, n, at, size) in enumerate(self._places):
            if (length := min(size, n - number * size)) > 0:
                pieces.append(Piece(i, at, number * size, length))
        return pieces

    def cut(self, source: torch.Tensor) -> torch.Tensor:
        """Returns the rows, (n_slices, row), of a source (n_elems,)."""
        rows = source.new_zeros(self.n_slices, self.row)
        for values, row in self._pairs(source, rows):
            row.copy_(values)
        return rows

    def join(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Copies rows to where they were cut from, and zeros between."""
        if sum(n for _, n, _, _ in self._places) < self.n_elems:
            target.zero_()
        for values, row in self._pairs(target, rows):
            values.copy_(row)

    def _pairs(self, flat: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (elements of a parameter, the same of rows): its whole slices, then the one that is not."""
        for start, n, at, size in self._places:
            n_whole = n // size if size else 0
            if n_whole:
                whole = flat[start : start + n_whole * size]
                yield whole.view(n_whole, size), rows[:n_whole, at : at + size]
            if rest := n - n_whole * size:
                yield flat[start + n - rest : start + n], rows[n_whole, at : at + rest]


def slices_of_one(n_elems: int, n_slices: int) -> Slices:
    """Returns those of an all-reduce's input of which nothing else is known."""
    return Slices([Parameter("", (n_elems,), "dense")], n_slices, [0], n_elems)


def part(whole: Layout, n_slices: int, own: int) -> Layout:
    """Returns the layout of slice `own` of each piece of an all-reduce."""
    mine = []
    for piece in (piece for i in range(len(whole.parameters)) for piece in whole.pieces_of(i)):
        size = -(-piece.length // n_slices)
        if (length := min(size, piece.length - own * size)) > 0:
            at = own * size
            mine.append(Piece(piece.parameter, piece.start + at, piece.offset + at, length))
    return Layout(whole.parameters, mine, whole.n_elems, 1, whole.world_size)


# ---- a parameter's own order and its wire order ----


def to_wire(values: torch.Tensor, parameter: Parameter, world_size: int) -> torch.Tensor:
    """Converts (shape) to wire order, (numel,). They differ if a parameter is sharded along a dimension other
    than 0."""
    values = values.reshape(parameter.shape)
    if parameter.dim:
        values = torch.cat(torch.chunk(values, world_size, dim=parameter.dim), dim=0)
    return values.reshape(-1)


def from_wire(values: torch.Tensor, parameter: Parameter, world_size: int) -> torch.Tensor:
    """Converts wire order, (numel,), to (shape)."""
    if not parameter.dim:
        return values.reshape(parameter.shape)
    shape = list(parameter.shape)
    shape[parameter.dim] //= world_size
    rows = torch.chunk(values.reshape(world_size * shape[0], *shape[1:]), world_size, dim=0)
    return torch.cat(rows, dim=parameter.dim)
