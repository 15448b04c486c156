"""The bytes of a version of weights, or of what changed since the one before: messages of tagc/changes.h
behind a header and a table. docs/reference/wire-format.md draws them."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.weights.tensors import Box, Entry, product

_HEADER = struct.Struct("<4sBBHHHI7Q")
_MAGIC, _FORMAT = b"TAGW", 3
_READ = (2, 3)  # formats, which differ in their messages alone
_WHOLE, _HASHED = 1, 2
_ROW = struct.Struct("<IIQQQ")
_RANGE = struct.Struct("<QQ")
_FORM_WHOLE, _FORM_BY_MAGNITUDE = 0, 2  # of tagc/changes.h
_IN_MEMORY = 8 << 20  # bytes of a frame that is kept in memory while it is read, and not in a file

Bytes = numpy.ndarray[Any, Any]  # of uint8


class Source(Protocol):
    """The bytes of a frame."""

    n_bytes: int

    def read(self, at: int, n_bytes: int) -> Bytes:
        """Returns these bytes, of which there are as many."""
        ...


class InMemory:
    def __init__(self, memory: Bytes) -> None:
        self._memory, self.n_bytes = memory, int(memory.size)

    def read(self, at: int, n_bytes: int) -> Bytes:
        return self._memory[at : at + n_bytes]


class InFile:
    """A range of a file."""

    def __init__(self, file: Any, begin: int, n_bytes: int) -> None:
        self._file, self._begin, self.n_bytes = file, begin, n_bytes

    def read(self, at: int, n_bytes: int) -> Bytes:
        room = numpy.empty(n_bytes, dtype=numpy.uint8)
        n_read = 0
        while n_read < n_bytes:  # threads share the file, and no place in it
            n = os.preadv(self._file.fileno(), [room.data[n_read:]], self._begin + at + n_read)
            if n == 0:
                raise Error("corrupt", f"the buffer ends after {at + n_read} of {self.n_bytes} bytes")
            n_read += n
        return room


def kept(streams: Iterable[tuple[Iterable[bytes], int]], n_bytes: int, folder: str | None) -> list[Source]:
    """Returns streams of bytes, each with its length, n_bytes in all: in memory if they are few, else in a
    file without a name, which ends with what is returned or with this process. folder: where it is."""
    if n_bytes <= _IN_MEMORY:
        return [InMemory(numpy.frombuffer(b"".join(chunks), dtype=numpy.uint8)) for chunks, _ in streams]
    sources: list[Source] = []
    file = tempfile.TemporaryFile(dir=folder)
    for chunks, _ in streams:
        begin = file.tell()
        for chunk in chunks:
            file.write(chunk)
        sources.append(InFile(file, begin, file.tell() - begin))
    file.flush()
    return sources


class Piece(NamedTuple):
    """A box of a tensor, and the message that has it."""

    entry: int  # its number
    box: Box
    hash: int  # of what it was before; 0 if the frame has none
    source: Any  # with the message
    at: int  # in it
    n_bytes: int
    checksum: int  # of the message
    by_magnitude: bool = False  # who has a part of the box cannot apply it

    def message(self) -> Bytes:
        return self.source.read(self.at, self.n_bytes)


def piece_of(index: int, box: Box, before: int, message: bytes) -> Piece:
    """Returns a piece with a message in memory."""
    memory = numpy.frombuffer(message, dtype=numpy.uint8)
    return Piece(index, box, before, InMemory(memory), 0, len(message), checksum_of(message))


class Frame(NamedTuple):
    """What one of the senders made. is_whole: it needs no version before it."""

    part: int
    n_parts: int
    is_whole: bool
    is_hashed: bool
    run: int  # a number of the senders' WeightSync
    version: int  # the weights after it, from 1
    base: int  # the version before it; 0 if is_whole
    pieces: list[Piece]


def checksum(address: int, n_bytes: int) -> int:
    """Returns the XXH3 of bytes in memory."""
    return int(lib.load().tagc_checksum(address if n_bytes else None, n_bytes))


def checksum_of(text: bytes) -> int:
    return int(lib.load().tagc_checksum(text, len(text)))


def description(entries: Sequence[Entry]) -> bytes:
    """Returns what senders and receivers must have alike, as text."""
    return "\n".join(entry.words() for entry in entries).encode()


def described(text: bytes) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Returns the names, shapes and dtypes in a description."""
    rows = []
    for line in text.decode().split("\n"):
        name, _, rest = line.rpartition(" [")
        sizes, _, dtype = rest.partition("] ")
        shape = tuple(int(size) for size in sizes.split(", ") if size)
        of_torch = getattr(torch, dtype, None)
        if not name or not isinstance(of_torch, torch.dtype):
            raise Error("unsupported", f"the buffer has {line!r}: no tensor that this torch has")
        rows.append((name, shape, of_torch))
    return rows


# ---- elements ----


def words_of(dtype: torch.dtype, numel: int) -> tuple[int, int]:
    """Returns element_bytes and n_elems by which libtagc takes an array."""
    width = min(dtype.itemsize, 4)
    return width, numel * (dtype.itemsize // width)


def encode(before: torch.Tensor | None, after: torch.Tensor, by_magnitude: bool = False) -> tuple[bytes, int]:
    """Returns the message that turns `before`, or anything if it is None, into `after`, and how many
    elements differ: all if it is None. Both are contiguous and in CPU memory. by_magnitude: for receivers
    that have all of `before`."""
    width, n = words_of(after.dtype, after.numel())
    n_bytes, n_changes = ctypes.c_uint64(), ctypes.c_uint64()
    lib.call("tagc_changes_max_bytes", width, n, ctypes.byref(n_bytes))
    room = numpy.empty(n_bytes.value, dtype=numpy.uint8)
    lib.call(
        "tagc_changes_encode",
        width,
        None if before is None else before.data_ptr(),
        after.data_ptr(),
        n,
        by_magnitude,
        room.ctypes.data,
        room.size,
        ctypes.byref(n_bytes),
        ctypes.byref(n_changes),
    )
    n_differ = n_changes.value
    if before is not None and n != after.numel():  # several words make an element
        words = [t.reshape(-1).view(torch.int32).view(after.numel(), -1) for t in (before, after)]
        n_differ = int((words[0] != words[1]).any(1).sum())
    return room[: n_bytes.value].tobytes(), n_differ if before is not None else after.numel()


def check(piece: Piece, dtype: torch.dtype, is_whole: bool) -> Piece:
    """Raises an Error unless apply() takes the message."""
    form = ctypes.c_int()
    width, n = words_of(dtype, piece.box.numel())
    message = piece.message()
    if checksum(message.ctypes.data, message.size) != piece.checksum:
        raise Error("corrupt", "the checksum of a message of the buffer is wrong")
    lib.call("tagc_changes_check", width, message.ctypes.data, message.size, n, ctypes.byref(form))
    if is_whole and form.value != _FORM_WHOLE:
        raise Error("corrupt", "the buffer says that it is whole, and has changes")
    return piece._replace(by_magnitude=form.value == _FORM_BY_MAGNITUDE)


def apply(piece: Piece, values: torch.Tensor) -> None:
    """Turns values, contiguous and in CPU memory, into what the sender had after."""
    width, n = words_of(values.dtype, values.numel())
    message = piece.message()
    lib.call("tagc_changes_apply", width, message.ctypes.data, message.size, values.data_ptr(), n)


# ---- frames ----


def write(frame: Frame, entries: Sequence[Entry], fingerprint: int) -> list[Any]:
    """Returns the bytes of a frame, as buffers one behind the other."""
    rows = []
    for piece in frame.pieces:
        rows.append(_ROW.pack(piece.entry, len(piece.box.sizes), piece.hash, piece.n_bytes, piece.checksum))
        rows += [_RANGE.pack(*pair) for pair in zip(*piece.box)]
    table = b"".join([*rows, description(entries) if frame.is_whole else b""])
    flags = frame.is_whole * _WHOLE | frame.is_hashed * _HASHED
    n_bytes = _HEADER.size + len(table) + sum(piece.n_bytes for piece in frame.pieces)
    head = _HEADER.pack(
        _MAGIC, _FORMAT, flags, frame.part, frame.n_parts, 0, len(frame.pieces), frame.run, frame.version,
        frame.base, fingerprint, len(table), n_bytes, 0,
    )[:-8]  # fmt: skip
    total = struct.pack("<Q", checksum_of(head + table))
    return [head + total + table, *(piece.message().data for piece in frame.pieces)]


def memory_of(buffer: Any) -> numpy.ndarray[Any, Any]:
    """Returns the bytes of a buffer without a copy, where they lie in CPU memory."""
    if isinstance(buffer, torch.Tensor):
        if buffer.dtype != torch.uint8:
            raise Error("argument", f"the buffer is a tensor of {buffer.dtype}, must be of torch.uint8")
        buffer = buffer.detach().cpu().contiguous().numpy()
    try:
        return numpy.frombuffer(buffer, dtype=numpy.uint8)
    except (TypeError, ValueError, BufferError) as wrong:
        if isinstance(buffer, (bytes, bytearray, memoryview)):  # an empty one
            return numpy.empty(0, dtype=numpy.uint8)
        raise Error("argument", f"the buffer is a {type(buffer).__name__}, must be bytes: {wrong}") from wrong


def source_of(buffer: Any) -> Source:
    return buffer if isinstance(buffer, (InMemory, InFile)) else InMemory(memory_of(buffer))


def text_of(source: Source) -> bytes:
    """Returns the description in a frame; empty if it has none."""
    return _open(source)[2]


def read(buffer: Any, entries: Sequence[Entry], fingerprint: int) -> Frame:
    """Returns what a buffer holds. Accepts any bytes: Error, unless they are a frame of these entries whose
    pieces lie within their tensors and have sound messages."""
    frame, theirs, text = _open(source_of(buffer))
    if theirs != fingerprint:
        raise Error("mismatch", _difference(text, entries, theirs, fingerprint))
    _check_boxes(frame.pieces, entries)
    pieces = [check(piece, entries[piece.entry].dtype, frame.is_whole) for piece in frame.pieces]
    return frame._replace(pieces=pieces)


def pieces_of(sources: Sequence[Source]) -> dict[int, list[Piece]]:
    """Returns the pieces of frames that read() has taken, by the number of the tensor."""
    pieces: dict[int, list[Piece]] = {}
    for source in sources:
        for piece in _open(source)[0].pieces:
            pieces.setdefault(piece.entry, []).append(piece)
    return pieces


def _open(source: Source) -> tuple[Frame, int, bytes]:
    """Returns the frame, the fingerprint of its entries, and their description."""
    n_all = source.n_bytes
    if n_all < _HEADER.size:
        raise Error("corrupt", f"the buffer has {n_all} bytes, too few for a header of {_HEADER.size}")
    head = source.read(0, _HEADER.size).tobytes()
    magic, form, flags, part, n_parts, zero, n_pieces, *numbers = _HEADER.unpack(head)
    run, version, base, fingerprint, n_table, n_bytes, total = numbers
    if magic != _MAGIC:
        raise Error(
            "corrupt", f"the buffer begins with {magic!r}, not with {_MAGIC!r}: it is none of WeightSync"
        )
    if form not in _READ:
        raise Error("unsupported", f"the buffer has format {form}, this tagc reads {_READ[0]} and {_READ[1]}")
    if n_bytes != n_all:
        raise Error("corrupt", f"the buffer has {n_all} bytes, and says that it has {n_bytes}")
    if n_table > n_all - _HEADER.size:
        raise Error("corrupt", "the table of the buffer is cut off")
    table = source.read(_HEADER.size, n_table).tobytes()
    if total != checksum_of(head[:-8] + table):
        raise Error("corrupt", "the checksum of the buffer is wrong")
    is_whole = bool(flags & _WHOLE)
    if zero or flags & ~(_WHOLE | _HASHED) or part >= n_parts or version < 1 or is_whole != (base == 0):
        raise Error("corrupt", f"the header of the buffer contradicts itself: {head[:24]!r}")
    if not is_whole and base != version - 1:
        raise Error("corrupt", f"the buffer goes from version {base} to {version}")
    pieces, n_rows = _read_table(source, table, n_pieces)
    frame = Frame(part, n_parts, is_whole, bool(flags & _HASHED), run, version, base, pieces)
    return frame, fingerprint, table[n_rows:]


def _read_table(source: Source, table: bytes, n_pieces: int) -> tuple[list[Piece], int]:
    """Returns the pieces, all of which lie within the source, and the bytes of their rows."""
    pieces, row_at, at = [], 0, _HEADER.size + len(table)
    for _ in range(n_pieces):
        if len(table) - row_at < _ROW.size:
            raise Error("corrupt", "the table of the buffer is cut off")
        index, n_dims, before, n_bytes, total = _ROW.unpack_from(table, row_at)
        row_at += _ROW.size
        if n_dims > 64 or len(table) - row_at < n_dims * _RANGE.size:
            raise Error("corrupt", "the table of the buffer is cut off")
        numbers = struct.unpack_from(f"<{2 * n_dims}Q", table, row_at)
        row_at += n_dims * _RANGE.size
        pieces.append(Piece(index, Box(numbers[::2], numbers[1::2]), before, source, at, n_bytes, total))
        at += n_bytes
    if at != source.n_bytes:
        raise Error("corrupt", "the messages of the buffer do not fill it")
    return pieces, row_at


def _check_boxes(pieces: Sequence[Piece], entries: Sequence[Entry]) -> None:
    for index, box, *_ in pieces:
        shape = entries[index].shape if index < len(entries) else None
        if (
            shape is None
            or len(box.sizes) != len(shape)
            or not all(n > 0 and at + n <= most for at, n, most in zip(*box, shape))
        ):
            raise Error(
                "corrupt", f"a piece of the buffer, {box} of tensor {index}, lies in none of this model"
            )


def _difference(text: bytes, entries: Sequence[Entry], theirs: int, mine: int) -> str:
    """Returns in words how the senders' tensors differ from these. text: empty if the buffer has none."""
    if not text:
        return (
            f"the buffer is of other names, shapes or dtypes: their sum is {theirs:016x}, here it is "
            f"{mine:016x}"
        )
    sent, here = text.decode(errors="replace").split("\n"), [entry.words() for entry in entries]
    absent = next((words for words in sent if words not in here), None)
    if absent is not None:
        name = absent.split(" ")[0]
        instead = next((words for words in here if words.split(" ")[0] == name), None)
        return f"the senders have {absent}, and this model has {instead or 'no tensor of that name'}"
    more = next((words for words in here if words not in sent), None)
    return f"this model has {more}, and the senders have no tensor of that name"


def check_parts(frames: Sequence[Frame], entries: Sequence[Entry]) -> None:
    """Raises an Error unless these are all the parts of one version, which have every element once."""
    first = frames[0]
    for frame in frames[1:]:
        if frame[1:7] != first[1:7]:
            raise Error(
                "argument",
                f"the buffers are of different versions: {first.version} of {first.n_parts} parts, and "
                f"{frame.version} of {frame.n_parts}",
            )
    given = sorted(frame.part for frame in frames)
    if given != list(range(first.n_parts)):
        raise Error(
            "argument",
            f"version {first.version} has parts 0 to {first.n_parts - 1}, one of each sender; given are "
            f"{given}: apply() takes all at once",
        )
    held: list[list[Box]] = [[] for _ in entries]
    for frame in frames:
        for piece in frame.pieces:
            held[piece.entry].append(piece.box)
    for boxes, entry in zip(held, entries):
        n = sum(box.numel() for box in boxes)
        if n != product(entry.shape):
            raise Error("corrupt", f"the buffers have {n} elements of {entry.words()}")
        if _overlap(boxes):
            raise Error("corrupt", f"the buffers have elements of {entry.words()} twice")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Returns whether two boxes share an element, none of which is empty. Boxes are gone through along the
    dimension in which most of them begin at different places, beside those that have not ended there."""
    n_dims = len(boxes[0].sizes) if boxes else 0
    if not n_dims:
        return len(boxes) > 1
    along = max(range(n_dims), key=lambda d: len({box.offsets[d] for box in boxes}))
    beside: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[along]):
        beside = [other for other in beside if other.offsets[along] + other.sizes[along] > box.offsets[along]]
        if any(box.common(other).numel() for other in beside):
            return True
        beside.append(box)
    return False
