#!/usr/bin/env python3
"""cuda_runtime.py LIBRARY: prints which tools made libtagc-cuda.so, as its own bytes say: the PTX for
devices that have no binary, and the binary of each architecture. Exits with 1 where one is newer than CUDA
12.8, the first that knows all devices from sm_75 to sm_120, or where the library has or needs a CUDA runtime,
which needs a driver as new as itself. Drivers of 525 and newer run binaries of CUDA 12.8, those of 570 and
newer its PTX; where a driver is too old, nothing is left but the processor's codec. TAGC_CUDA_NEWEST:
another version, such as 13.0. Needs no GPU."""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

PTX = 1  # of the kinds of code
MAGIC, HEADER_BYTES = 0xBA55ED50, 16  # of a fat binary
COMPRESSED = 0xA000  # flags of code: by one method or another
# Binaries, by ELF's ABI version: those of 7 do not say who made them; CUDA 13 makes none.
FORMAT_OF_12, MOST_FORMAT = 7, 8
# The first CUDA with each PTX; from 9.0 on they count alike, from CUDA 13.0.
CUDA_OF = {(8, 4): (12, 4), (8, 5): (12, 5), (8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9)}


def fail(text: str) -> None:
    sys.exit(f"cuda_runtime.py: {text}")


def section(library: bytes, wanted: bytes) -> bytes:
    """Returns the contents of a section of an ELF file of 64 bits."""
    (headers,) = struct.unpack_from("<Q", library, 40)
    size, n, names = struct.unpack_from("<HHH", library, 58)
    places = [struct.unpack_from("<IIQQQQ", library, headers + i * size) for i in range(n)]
    for name, _, _, _, at, n_bytes in places:
        begin = places[names][4] + name
        if library[begin : library.index(b"\0", begin)] == wanted:
            return library[at : at + n_bytes]
    return b""


def code(fat: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields (kind, architecture, contents) of the fat binaries, which lie one after the other."""
    at = 0
    while at + HEADER_BYTES <= len(fat):
        magic, _, header, size = struct.unpack_from("<IHHQ", fat, at)
        if magic != MAGIC:  # between two of them
            at += 8
            continue
        one, at = at + header, at + header + size
        while one < at:
            kind, _, header, size = struct.unpack_from("<HHIQ", fat, one)
            (architecture,) = struct.unpack_from("<I", fat, one + 28)
            (flags,) = struct.unpack_from("<Q", fat, one + 40)
            if flags & COMPRESSED:
                fail(f"code for sm_{architecture} is compressed, must be as it is (nvcc --no-compress)")
            yield kind, architecture, fat[one + header : one + header + size]
            one += header + size


def described(kind: int, architecture: int, contents: bytes) -> tuple[str, tuple[int, ...]]:
    """Returns what code is, and the oldest CUDA that has such code."""
    if kind == PTX:
        found = re.search(rb"^\.version (\d+)\.(\d+)", contents, re.MULTILINE)
        major, minor = (int(found[1]), int(found[2])) if found else (99, 0)
        needs = (major + 4, minor) if major > 8 else CUDA_OF.get((major, minor), (12, 0))
        return f"PTX {major}.{minor} for sm_{architecture} and newer", needs
    maker = re.search(rb"Build cuda_(\d+\.\d+)\.", contents)
    said = f"binary for sm_{architecture}, format {contents[8]}"
    if maker and contents[8] <= MOST_FORMAT:
        return f"{said}, by CUDA {maker[1].decode()}", versions(maker[1].decode())
    return said, (12,) if contents[8] == FORMAT_OF_12 else (99,)


def versions(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def main() -> None:
    path, newest = Path(sys.argv[1]).resolve(), os.environ.get("TAGC_CUDA_NEWEST", "12.8")
    library = path.read_bytes()
    needs = dict.fromkeys(described(*one) for one in code(section(library, b".nv_fatbin")))
    print(f"{path}:", *(said for said, _ in needs), sep="\n  ")
    if not needs:
        fail("no code for a device is in it")
    if b"libcudart" in library:
        fail("it has or needs a CUDA runtime, must have none (nvcc -cudart none)")
    if wrong := [said for said, version in needs if version > versions(newest)]:
        fail(
            f"must be of CUDA {newest} or older, and has {'; '.join(wrong)}: build with those tools "
            f"(CUDA_HOME, or -DTAGC_PTXAS=), or set TAGC_CUDA_NEWEST"
        )


main()
