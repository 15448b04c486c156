"""Reads buffers of versions and messages of changes as docs/reference/wire-format.md draws them, with nothing
of tagc but its XXH3, of which there is no other one here."""

import struct

from tagc import _library as lib

SEGMENT = 1 << 20


def hash_of(data):
    return int(lib.load().tagc_checksum(bytes(data), len(data)))


def read_frame(data):
    """Returns what the header of a buffer says, its messages with their boxes, and its text."""
    magic, form, flags, part, n_parts, zero, n_messages = struct.unpack_from("<4sBBHHHI", data)
    run, version, base, described, n_table, n_bytes, total = struct.unpack_from("<7Q", data, 16)
    assert (magic, zero, n_bytes) == (b"TAGW", 0, len(data))
    assert total == hash_of(data[:64] + data[72 : 72 + n_table])
    at, message_at, rows = 72, 72 + n_table, []
    for _ in range(n_messages):
        number, n_dims, before, n, sum_of_message = struct.unpack_from("<IIQQQ", data, at)
        box = [struct.unpack_from("<QQ", data, at + 32 + 16 * d) for d in range(n_dims)]
        at += 32 + 16 * n_dims
        message = data[message_at : message_at + n]
        message_at += n
        assert hash_of(message) == sum_of_message
        rows.append((number, box, before, message))
    assert message_at == len(data)
    head = {"format": form, "flags": flags, "part": part, "parts": n_parts, "run": run}
    return head | {"version": version, "base": base}, rows, bytes(data[at : 72 + n_table])


class Bits:
    def __init__(self, data):
        self.number, self.at = int.from_bytes(data, "little"), 0

    def take(self, n):
        self.at += n
        return self.number >> (self.at - n) & ((1 << n) - 1)

    def integer(self, code):
        k, n_zeros = code % 32, 0
        if code >= 64:
            return self.take(code - 64)
        while not self.take(1):
            n_zeros += 1
        if code >= 32:
            return (n_zeros << k) + self.take(k)
        return (1 << (k + n_zeros)) + self.take(k + n_zeros) - (1 << k)


def _moved(word, difference, bits):
    half = 1 << (bits - 1)
    rank = (half - 1 - word if word >= half else word) + difference
    rank = (rank + half) % (2 * half) - half
    return half - 1 - rank if rank < 0 else rank


def apply_message(message, words, width):
    """Changes a list of elements, as integers of `width` bytes. Returns what the message has: "whole",
    "place" or "magnitude"."""
    magic, version, kind, coding, flags, rank, k, n_elems = struct.unpack_from("<4sBBBBIIQ", message)
    (n_body,), (total,) = struct.unpack_from("<Q", message, 40), struct.unpack_from("<Q", message, 56)
    assert (magic, kind, k, n_elems) == (b"TAGC", 9, width, len(words)) and version in (2, 3)
    body, forms = message[64:], set()
    assert n_body == len(body)
    for begin in range(0, len(words), SEGMENT):
        n = min(SEGMENT, len(words) - begin)
        n_read, form = _apply_segment(body, words, begin, n, width)
        body = body[n_read:]
        forms.add(form)
    assert not len(body) and (coding or forms == {"whole"})
    return max(forms, key=["whole", "none", "place", "magnitude"].index, default="none")


def _apply_segment(body, words, begin, n, width):
    n_items, form, n_lists, zero = struct.unpack_from("<IBBH", body)
    if form == 0:
        assert n_items == n and n_lists == 0
        for i in range(n):
            words[begin + i] = int.from_bytes(body[8 + i * width : 8 + (i + 1) * width], "little")
        return 8 + n * width, "whole"
    bits, at, before = 8 * width, 8 + 12 * n_lists, words[begin : begin + n]
    grades = [(word & ((1 << (bits - 1)) - 1)) >> (bits - 9 if width > 1 else 0) for word in before]
    rows = [struct.unpack_from("<BBBBII", body, 8 + 12 * i) for i in range(n_lists)]
    firsts = sorted({row[0] for row in rows}) + [256]
    for first, of_gaps, of_integers, size, n_of_list, n_bytes in rows:
        end = firsts[firsts.index(first) + 1]
        of_class = [i for i in range(n) if first <= grades[i] < end]
        stream, number = Bits(bytes(body[at : at + n_bytes])), -1
        for _ in range(n_of_list):
            number += 1 + stream.integer(of_gaps)
            integer = stream.integer(of_integers) + (2 << size) - 2
            difference = (integer + 1) // 2 if integer % 2 else -(integer + 2) // 2
            i = of_class[number]
            words[begin + i] = _moved(before[i], difference, bits)
        assert (stream.at + 7) // 8 == n_bytes
        at += n_bytes
    assert sum(row[4] for row in rows) == n_items
    return at, "magnitude" if len(firsts) > 2 else "place" if n_items else "none"
