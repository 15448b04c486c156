"""The places of parameters in the flat tensor that a hook gets, and in the tensors of reducers.

    input of a hook   | a.row0 b.row0 c.row0 | a.row1 b.row1 c.row1 |      (W, row)
    part "compressed" | a.row0 c.row0 | a.row1 c.row1 |                    (W, shard)
    part "dense"      | b.row0 | b.row1 |

A part is the data of one reducer: the pieces of all parameters of one class, level and split. Rank r owns
row r. All rows of a part have the length of the longest; shorter ones are padded with zeros. An all-reduce
has one row, without an owner.

A parameter's residual is in wire order: the order of its elements in the rows."""

from __future__ import annotations

import ctypes
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


class Run(NamedTuple):
    """A copy between two flat tensors."""

    start: int
    target: int
    length: int


class Part:
    """The data of one reducer."""

    def __init__(
        self,
        kind: str,
        level: int,
        rows: list[list[Piece]],
        n_rows_of_output: int,
        parameters: Sequence[Parameter],
    ) -> None:
        """rows: pieces of each row, of these parameters. n_rows_of_output: 1 for an all-reduce."""
        self.kind, self.level = kind, level
        self.shard = max(sum(piece.length for piece in row) for row in rows)
        if n_rows_of_output:  # an all-reduce divides its only row among the ranks
            self.shard = _round_up(self.shard, 16 * n_rows_of_output)
        self.n_elems = self.shard * len(rows)
        self.pieces = []  # (piece, its place in this part)
        for r, row in enumerate(rows):
            at = r * self.shard
            for piece in row:
                self.pieces.append((piece, at))
                at += piece.length
        self.n_real = sum(piece.length for piece, _ in self.pieces)
        self.weights: dict[str, int] = {}  # name of a parameter -> its elements here
        for piece, _ in self.pieces:
            name = parameters[piece.parameter].name
            self.weights[name] = self.weights.get(name, 0) + piece.length
        self.runs = _merged(Run(piece.start, at, piece.length) for piece, at in self.pieces)
        self.gaps = _between(self.runs, self.n_elems)  # of its input: padding, which is zero

    def is_whole(self, n_elems: int) -> bool:
        """Returns whether the reducer can use the hook's own tensor."""
        return self.runs == [Run(0, 0, n_elems)] and self.n_elems == n_elems


class Layout:
    """All parts of one input. `pieces` in any order; n_rows is W, or 1 for an all-reduce over world_size
    ranks. is_cut: whether rows are cut inside of parameters, by cut()."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        pieces: list[Piece],
        n_elems: int,
        n_rows: int,
        world_size: int,
        is_cut: bool = False,
    ) -> None:
        self.parameters, self.n_elems, self.world_size = tuple(parameters), n_elems, world_size
        self.is_cut = is_cut
        self.row = n_elems // n_rows
        self.all_reduce = n_rows == 1
        self.slices: Slices | None = None  # of which this is one, where an all-reduce has two levels
        self.gaps = _between([Run(0, piece.start, piece.length) for piece in pieces], n_elems)  # of its input
        self._pieces: list[list[Piece]] = [[] for _ in self.parameters]
        kinds: dict[tuple[str, int, tuple[str, ...]], list[list[Piece]]] = {}
        for piece in sorted(pieces, key=lambda piece: piece.start):
            parameter = self.parameters[piece.parameter]
            # What tensor parallelism replicates must stay equal on its ranks, so it is not selected together
            # with what it splits. Where all values travel, nothing is selected.
            split = () if parameter.kind == "dense" else parameter.split
            rows = kinds.setdefault((parameter.kind, parameter.level, split), [[] for _ in range(n_rows)])
            rows[piece.start // self.row].append(piece)
            self._pieces[piece.parameter].append(piece)
        n_rows_of_output = world_size if self.all_reduce else 0
        self.parts = [
            Part(kind, level, rows, n_rows_of_output, self.parameters)
            for (kind, level, _), rows in sorted(kinds.items())
        ]

    def regrouped(self, levels: Sequence[int]) -> Layout:
        """Returns the layout of the same input with other levels of the parameters, and so other parts."""
        parameters = [p._replace(level=level) for p, level in zip(self.parameters, levels)]
        pieces = [piece for of_parameter in self._pieces for piece in of_parameter]
        n_rows = 1 if self.all_reduce else self.n_elems // self.row
        return Layout(parameters, pieces, self.n_elems, n_rows, self.world_size, self.is_cut)

    def pieces_of(self, parameter: int) -> list[Piece]:
        """Returns the pieces of the parameter with that index."""
        return self._pieces[parameter]

    def begins_of(self, parameter: int) -> list[int]:
        """Returns of how many elements of that parameter rows before each one are, and all of them:
        (n_rows + 1,)."""
        lengths = [0] * (self.n_elems // self.row + 1)
        for piece in self._pieces[parameter]:
            lengths[piece.start // self.row + 1] += piece.length
        return list(itertools.accumulate(lengths))

    def gaps_by_name(self) -> dict[str, list[Run]]:
        """Returns name of a parameter -> what is not here of its wire order, with a start of 0."""
        return {
            parameter.name: _between(
                [Run(0, piece.offset, piece.length) for piece in pieces], parameter.numel
            )
            for parameter, pieces in zip(self.parameters, self._pieces)
        }

    def output_runs(self, part: Part, rank: int) -> list[Run]:
        """Returns the copies from the output of a part's reducer to the output of the hook."""
        if self.all_reduce:
            return [Run(run.target, run.start, run.length) for run in part.runs]
        first, last = rank * part.shard, (rank + 1) * part.shard
        return _merged(
            Run(at - first, piece.start - rank * self.row, piece.length)
            for piece, at in part.pieces
            if first <= at < last
        )


def copy_runs(source: torch.Tensor, target: torch.Tensor, runs: Iterable[Run]) -> None:
    for run in runs:
        target[run.target : run.target + run.length].copy_(source[run.start : run.start + run.length])


def move_runs(flat: torch.Tensor, runs: Iterable[Run]) -> None:
    """Copies within a flat tensor in CPU memory, run by run. A run may overlap its target."""
    address, n = flat.data_ptr(), flat.element_size()
    for run in runs:
        if run.start != run.target:
            ctypes.memmove(address + n * run.target, address + n * run.start, n * run.length)


def _round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


def _merged(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last and last.start + last.length == run.start and last.target + last.length == run.target:
            merged[-1] = Run(last.start, last.target, last.length + run.length)
        else:
            merged.append(run)
    return merged


def _between(runs: Sequence[Run], n_elems: int) -> list[Run]:
    """Returns what the runs leave out of their target, with a start of 0."""
    gaps, end = [], 0
    for run in sorted(runs, key=lambda run: run.target):
        gaps.append(Run(0, end, run.target - end))
        end = run.target + run.length
    gaps.append(Run(0, end, n_elems - end))
    return [gap for gap in gaps if gap.length]


# ---- how each kind of wrapper lays parameters out ----


def chunked(parameters: Sequence[Parameter], world_size: int, n_rows: int = 0) -> Layout:
    """Returns FSDP2's layout: row r is the r-th chunk of every parameter along its sharded dimension, padded
    to the first one's size. n_rows: of so many of the rows, in their order; 0: of all. A parameter is then
    what these have of it, with padding."""
    sizes = [chunked_elems(parameter, world_size) // world_size for parameter in parameters]
    if n_rows:
        parameters = [p._replace(shape=(n_rows * size,), dim=0) for p, size in zip(parameters, sizes)]
    row, n_rows = sum(sizes), n_rows or world_size
    pieces = []
    for r in range(n_rows):
        start = r * row
        for i, size in enumerate(sizes):
            if size:
                pieces.append(Piece(i, start, r * size, size))
            start += size
    return Layout(parameters, pieces, row * n_rows, n_rows, n_rows)


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
    parameter. rows: of these alone, one after the other; residuals are zero elsewhere."""
    row = n_elems // world_size
    pieces = []
    for i, (parameter, start) in enumerate(zip(parameters, starts)):
        offset = 0
        while offset < parameter.numel:
            at = start + offset
            length = min(parameter.numel - offset, row - at % row)
            pieces.append(Piece(i, at, offset, length))
            offset += length
    if rows is None:
        return Layout(parameters, pieces, n_elems, world_size, world_size, is_cut=True)
    mine = [
        piece._replace(start=rows.index(piece.start // row) * row + piece.start % row)
        for piece in pieces
        if piece.start // row in rows
    ]
    return Layout(parameters, mine, len(rows) * row, len(rows), len(rows))


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
    """Parameters that lie one after the other (or at `starts`) in an all-reduce, each cut into one slice per
    rank of a host, so that all these ranks exchange as much of each parameter. Slices are those of
    chunked_elems().

        source | a.slice0 a.slice1 b.slice0 b.slice1 |
        rows   | a.slice0 b.slice0 | a.slice1 b.slice1 |     (n_slices, row), padded with zeros"""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        n_slices: int,
        starts: Iterable[int] | None = None,
        n_elems: int = 0,
    ) -> None:
        self.n_slices = n_slices
        sizes = [chunked_elems(parameter, n_slices) // n_slices for parameter in parameters]
        ends = [0, *itertools.accumulate(parameter.numel for parameter in parameters)]
        self.row, self.n_elems = sum(sizes), ends[-1] if starts is None else n_elems
        self._places = [  # (start in the source, elements there, start in a row, elements there)
            (start, parameter.numel, at, size)
            for parameter, start, at, size in zip(
                parameters, ends if starts is None else starts, [0, *itertools.accumulate(sizes)], sizes
            )
        ]
        self.parameters = [
            parameter._replace(shape=(size,), dim=0) for parameter, size in zip(parameters, sizes)
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


def sliced(parameters: Sequence[Parameter], n_hosts: int, n_slices: int) -> Layout:
    """Returns the layout of one slice of bucket(), which `n_hosts` ranks exchange. Residuals are of slices,
    with padding."""
    slices = Slices(parameters, n_slices)
    layout = bucket(slices.parameters, n_hosts)
    layout.slices = slices
    return layout


def part(whole: Layout, n_hosts: int, n_slices: int, number: int) -> Layout:
    """Returns the layout of slice `own` of any all-reduce; of one slice, that is the whole. Residuals are of
    whole parameters, and zero elsewhere."""
    if n_slices == 1:
        return whole
    pieces = [piece for i in range(len(whole.parameters)) for piece in whole.pieces_of(i)]
    cut = [whole.parameters[piece.parameter]._replace(shape=(piece.length,), dim=0) for piece in pieces]
    slices = Slices(cut, n_slices, [piece.start for piece in pieces], whole.n_elems)
    of_slice = [
        Piece(pieces[i].parameter, start, pieces[i].offset + offset, length)
        for i, start, offset, length in slices.pieces(number)
    ]
    layout = Layout(whole.parameters, of_slice, slices.row, 1, n_hosts)
    layout.slices = slices
    return layout


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
