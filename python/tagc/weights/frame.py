"""The bytes of a version of weights, or of what changed since the one before: messages of tagc/changes.h
behind a header and a table. docs/reference/wire-format.md draws them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.weights.tensors import Box, Entry, product

_HEADER = struct.Struct("<4sBBHHHI7Q")
_MAGIC, _FORMAT = b"TAGW", 1
_WHOLE, _HASHED = 1, 2
_ROW = struct.Struct("<IIQQ")
_RANGE = struct.Struct("<QQ")


class Piece(NamedTuple):
    """A box of a tensor, and the message that has it."""

    entry: int  # its number
    box: Box
    hash: int  # of what it was before; 0 if the frame has none
    address: int  # of the message
    n_bytes: int


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
    memory: Any  # keeps the addresses valid


def checksum(address: int, n_bytes: int) -> int:
    """Returns the XXH3 of bytes in memory."""
    return int(lib.load().tagc_checksum(address if n_bytes else None, n_bytes))


def checksum_of(text: bytes) -> int:
    return int(lib.load().tagc_checksum(text, len(text)))


def description(entries: Sequence[Entry]) -> bytes:
    """Returns what senders and receivers must have alike, as text."""
    return "\n".join(entry.words() for entry in entries).encode()


def _sum(head: bytes, body_address: int, n_bytes: int) -> int:
    return checksum_of(struct.pack("<QQ", checksum_of(head), checksum(body_address, n_bytes)))


# ---- elements ----


def words_of(dtype: torch.dtype, numel: int) -> tuple[int, int]:
    """Returns element_bytes and n_elems by which libtagc takes an array."""
    width = min(dtype.itemsize, 4)
    return width, numel * (dtype.itemsize // width)


def encode(before: torch.Tensor | None, after: torch.Tensor) -> tuple[bytes, int]:
    """Returns the message that turns `before`, or anything if it is None, into `after`, and how many
    elements differ: all if it is None. Both are contiguous and in CPU memory."""
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


def check(piece: Piece, dtype: torch.dtype, is_whole: bool) -> None:
    """Raises an Error unless apply() takes the message."""
    found = ctypes.c_int()
    width, n = words_of(dtype, piece.box.numel())
    lib.call("tagc_changes_check", width, piece.address, piece.n_bytes, n, ctypes.byref(found))
    if is_whole and not found.value:
        raise Error("corrupt", "the buffer says that it is whole, and has changes")


def apply(piece: Piece, values: torch.Tensor) -> None:
    """Turns values, contiguous and in CPU memory, into what the sender had after."""
    width, n = words_of(values.dtype, values.numel())
    lib.call("tagc_changes_apply", width, piece.address, piece.n_bytes, values.data_ptr(), n)


# ---- frames ----


def write(frame: Frame, messages: Sequence[bytes], entries: Sequence[Entry], fingerprint: int) -> bytes:
    """Returns the bytes of a frame. Of its pieces, the index, the box and the hash count."""
    text = description(entries) if frame.is_whole else b""
    rows = []
    for piece, message in zip(frame.pieces, messages):
        rows.append(_ROW.pack(piece.entry, len(piece.box.sizes), piece.hash, len(message)))
        rows += [_RANGE.pack(*pair) for pair in zip(*piece.box)]
    body = b"".join([*rows, text, *messages])
    flags = frame.is_whole * _WHOLE | frame.is_hashed * _HASHED
    head = _HEADER.pack(
        _MAGIC, _FORMAT, flags, frame.part, frame.n_parts, 0, len(messages), frame.run, frame.version,
        frame.base, fingerprint, len(text), _HEADER.size + len(body), 0,
    )[:-8]  # fmt: skip
    address = numpy.frombuffer(body, dtype=numpy.uint8).ctypes.data if body else 0
    return head + struct.pack("<Q", _sum(head, address, len(body))) + body


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


def read(buffer: Any, entries: Sequence[Entry], fingerprint: int) -> Frame:
    """Returns what a buffer holds. Accepts any bytes: Error, unless they are a frame of these entries whose
    pieces lie within their tensors. Messages are not checked yet."""
    memory = memory_of(buffer)
    n_all = int(memory.size)
    if n_all < _HEADER.size:
        raise Error("corrupt", f"the buffer has {n_all} bytes, too few for a header of {_HEADER.size}")
    head = memory[: _HEADER.size].tobytes()
    (
        magic,
        form,
        flags,
        part,
        n_parts,
        zero,
        n_pieces,
        run,
        version,
        base,
        theirs,
        n_text,
        n_bytes,
        total,
    ) = _HEADER.unpack(head)
    if magic != _MAGIC:
        raise Error(
            "corrupt", f"the buffer begins with {magic!r}, not with {_MAGIC!r}: it is none of WeightSync"
        )
    if form != _FORMAT:
        raise Error("unsupported", f"the buffer has format {form}, this tagc reads {_FORMAT}")
    if n_bytes != n_all:
        raise Error("corrupt", f"the buffer has {n_all} bytes, and says that it has {n_bytes}")
    if total != _sum(head[:-8], memory.ctypes.data + _HEADER.size, n_all - _HEADER.size):
        raise Error("corrupt", "the checksum of the buffer is wrong")
    is_whole = bool(flags & _WHOLE)
    if zero or flags & ~(_WHOLE | _HASHED) or part >= n_parts or version < 1 or is_whole != (base == 0):
        raise Error("corrupt", f"the header of the buffer contradicts itself: {head[:24]!r}")
    if not is_whole and base != version - 1:
        raise Error("corrupt", f"the buffer goes from version {base} to {version}")
    pieces, at = _read_table(memory, n_pieces, n_text)
    if theirs != fingerprint:
        raise Error("mismatch", _difference(memory[at - n_text : at].tobytes(), entries, theirs, fingerprint))
    _check_boxes(pieces, entries)
    frame = Frame(part, n_parts, is_whole, bool(flags & _HASHED), run, version, base, pieces, memory)
    for piece in pieces:
        check(piece, entries[piece.entry].dtype, is_whole)
    return frame


def _read_table(memory: numpy.ndarray[Any, Any], n_pieces: int, n_text: int) -> tuple[list[Piece], int]:
    """Returns the pieces, and where the first message begins: all of them lie within the buffer."""
    rows, at, n_all = [], _HEADER.size, int(memory.size)
    for _ in range(n_pieces):
        if n_all - at < _ROW.size:
            raise Error("corrupt", "the table of the buffer is cut off")
        index, n_dims, before, n_bytes = _ROW.unpack(memory[at : at + _ROW.size].tobytes())
        at += _ROW.size
        if n_dims > 64 or n_all - at < n_dims * _RANGE.size:
            raise Error("corrupt", "the table of the buffer is cut off")
        numbers = struct.unpack(f"<{2 * n_dims}Q", memory[at : at + n_dims * _RANGE.size].tobytes())
        at += n_dims * _RANGE.size
        rows.append((index, Box(numbers[::2], numbers[1::2]), before, n_bytes))
    first = at + n_text
    if sum(row[3] for row in rows) != n_all - first:
        raise Error("corrupt", "the messages of the buffer do not fill it")
    pieces, begin = [], memory.ctypes.data + first
    for index, box, before, n_bytes in rows:
        pieces.append(Piece(index, box, before, begin, n_bytes))
        begin += n_bytes
    return pieces, first


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
