"""How fast changes of bf16 weights are encoded and applied, on one core, beside what others send: the table
of lab/docs/weight-changes.md.

    OMP_NUM_THREADS=1 python lab/studies/weight_speed.py        # a minute of one core, 400 MB

All codes take turns in each round, so that what else the machine does meets all of them. A round's figure is
GB/s of weights, at 2 bytes each; shown are the median and the best of the rounds. `apply` of tagc checks
the message, too, as receivers do. int32 + bf16 are torch's nonzero() and index; zstd is libzstd, if it is
there."""

import argparse
import ctypes
import ctypes.util
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python")]

from tagc.weights import Follower, Publisher, frame
from tagc.weights.tensors import PIECE_ELEMS, Box

LEVEL = 1  # of zstd


def words(values):
    return values.view(torch.int16)


# ---- weights ----


def by_units(before, share, random):
    """Returns weights of which a share has moved by one unit in the last place, wherever."""
    moves = torch.rand(before.shape, generator=random) < share
    signs = 2 * torch.randint(2, before.shape, generator=random, dtype=torch.int16) - 1
    return (words(before) + moves * signs).view(torch.bfloat16)


def by_a_step(before, share, random):
    """Returns weights after a step that moves all as far on average, in fp32, of which a share then rounds to
    others: what is small changes more often."""
    masters = before.float()
    masters += (torch.rand(before.shape, generator=random) - 0.5) * (masters.abs() / 256)  # within the unit
    start = masters.bfloat16()
    moves = torch.randn(before.shape, generator=random)
    low, high = 1e-9, 1e-2
    for _ in range(16):
        size = (low * high) ** 0.5
        after = (masters + size * moves).bfloat16()
        is_more = float((words(after) != words(start)).float().mean()) > share
        low, high = (low, size) if is_more else (size, high)
    return start, after


# ---- codes: encode(before, after) -> message; apply(message, weights) ----


class Tagc:
    def __init__(self, by_magnitude):
        self.by_magnitude, self.name = by_magnitude, "tagc, by magnitude" if by_magnitude else "tagc"

    def encode(self, before, after):
        return [
            frame.piece_of(0, Box((at,), (len(b),)), 0, frame.encode(a, b, self.by_magnitude)[0])
            for at, a, b in pieces(before, after)
        ]

    def apply(self, message, weights):
        for piece, (_, target, _) in zip(message, pieces(weights, weights)):
            frame.check(piece, weights.dtype, False)
            frame.apply(piece, target)

    def n_bytes(self, message):
        return sum(piece.n_bytes for piece in message)


def pieces(*both):
    for at in range(0, len(both[0]), PIECE_ELEMS):
        yield at, *(one[at : at + PIECE_ELEMS] for one in both)


class Indices:
    name = "int32 + bf16"

    def encode(self, before, after):
        at = (words(before) != words(after)).nonzero()[:, 0].int()
        return at, after[at]

    def apply(self, message, weights):
        weights[message[0]] = message[1]

    def n_bytes(self, message):
        return sum(part.nbytes for part in message)


class Zstd:
    """Of the bits that differ in all weights, or of indices and values."""

    def __init__(self, library, inner=None):
        self.library, self.inner = library, inner
        self.name = f"zstd -{LEVEL} of {inner.name if inner else 'the difference'}"

    def encode(self, before, after):
        if self.inner is None:
            return [self._packed(words(before) ^ words(after))]
        return [self._packed(part) for part in self.inner.encode(before, after)]

    def apply(self, message, weights):
        parts = [self._unpacked(*part) for part in message]
        if self.inner is None:
            words(weights).bitwise_xor_(parts[0])
        else:
            self.inner.apply(parts, weights)

    def _packed(self, values):
        room = torch.empty(self.library.ZSTD_compressBound(values.nbytes), dtype=torch.uint8)
        n = self.library.ZSTD_compress(room.data_ptr(), room.nbytes, values.data_ptr(), values.nbytes, LEVEL)
        assert not self.library.ZSTD_isError(n)
        return room[:n].clone(), values.shape, values.dtype

    def _unpacked(self, packed, shape, dtype):
        values = torch.empty(shape, dtype=dtype)
        n = self.library.ZSTD_decompress(values.data_ptr(), values.nbytes, packed.data_ptr(), packed.nbytes)
        assert n == values.nbytes
        return values

    def n_bytes(self, message):
        return sum(part[0].nbytes for part in message)


class Store:
    """A Publisher and a Follower, with all that they do: hashes, files in memory, the sender's own copy."""

    name = "Publisher, Follower"

    def __init__(self, folder, before):
        self.here, self.there = {"a": before.clone()}, {"a": before.clone()}
        self.sender = Publisher(self.here, folder, check_every=0)
        self.receiver = Follower(self.there, folder)
        self.sender.publish(), self.receiver.update()

    def encode(self, before, after):
        self.here["a"] = before
        self.sender.publish(), self.receiver.update()
        self.here["a"] = after
        begun = time.process_time()
        self.sender.publish()
        return time.process_time() - begun

    def apply(self, message, weights):
        begun = time.process_time()
        self.receiver.update()
        return time.process_time() - begun

    def n_bytes(self, message):
        return self.sender.last.n_bytes


def zstd():
    found = ctypes.util.find_library("zstd")
    if found is None:
        return None
    library, size = ctypes.CDLL(found), ctypes.c_size_t
    library.ZSTD_compressBound.argtypes, library.ZSTD_compressBound.restype = [size], size
    library.ZSTD_compress.argtypes = [ctypes.c_void_p, size, ctypes.c_void_p, size, ctypes.c_int]
    library.ZSTD_decompress.argtypes = [ctypes.c_void_p, size, ctypes.c_void_p, size]
    library.ZSTD_compress.restype = library.ZSTD_decompress.restype = size
    library.ZSTD_isError.argtypes = [size]
    return library


def timed(call):
    begun = time.process_time()
    result = call()
    return time.process_time() - begun, result


def measure(codes, before, after, rounds):
    """Returns by name (GB/s of each encode, of each apply, bytes)."""
    found = {code.name: ([], [], []) for code in codes}
    for _ in range(rounds):
        for code in codes:
            seconds, message = timed(lambda: code.encode(before, after))
            weights = before.clone()
            again, result = timed(lambda: code.apply(message, weights))
            if isinstance(code, Store):
                seconds, again, weights = message, result, code.there["a"]
            assert torch.equal(words(weights), words(after)), code.name
            for kept, value in zip(found[code.name], (seconds, again, code.n_bytes(message))):
                kept.append(value)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--elements", type=int, default=1 << 25, help="weights (2^25)")
    add("--share", type=float, default=0.01, help="that changes (0.01)")
    add("--rounds", type=int, default=5, help="(5)")
    args = parser.parse_args()
    if args.elements < 1 or not 0 < args.share < 1 or args.rounds < 1:
        parser.error("--elements and --rounds must be positive, and --share between 0 and 1")
    torch.set_num_threads(1)
    random, library = torch.Generator().manual_seed(1), zstd()
    weights = (0.02 * torch.randn(args.elements, generator=random)).bfloat16()
    print(f"{args.elements} bf16, {args.share:.1%} change; load {os.getloadavg()[0]:.1f}")
    cases = {
        "one unit, anywhere": (weights, by_units(weights, args.share, random)),
        "a step of one size": by_a_step(weights, args.share, random),
    }
    print("| changes | code | bits per change | encode GB/s, best | apply GB/s, best |")
    print("|---|---|---:|---:|---:|")
    for case, (before, after) in cases.items():
        k = int((words(before) != words(after)).sum())
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            codes = [Tagc(False), Tagc(True), Store(folder, before), Indices()]
            if library is not None:
                codes += [Zstd(library), Zstd(library, Indices())]
            for name, (encodes, applies, sizes) in measure(codes, before, after, args.rounds).items():
                cells = [case, name, f"{8 * sizes[0] / k:.1f}"]
                for seconds in (encodes, applies):
                    speeds = [before.nbytes / 1e9 / one for one in seconds]
                    cells.append(f"{statistics.median(speeds):.2f}, {max(speeds):.2f}")
                print("| " + " | ".join(cells) + " |", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
