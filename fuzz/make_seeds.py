#!/usr/bin/env python3
"""Writes the first seeds of the fuzzers of whole exchanges (peers.h).

For each case: the honest exchange, and two in which messages are edited, one of them with another call of the
hostile rank.

    fuzz/make_seeds.py build-fuzz/first      # a folder for each fuzzer; scripts/fuzz.sh goes on from there
"""

import pathlib
import struct
import sys

CASES = {
    "exchange_all_to_all": 7,
    "exchange_reducers": 10,
    "exchange_gatherers": 10,
    "paper_reducers": 7,
    "unit_exchange": 7,
}
ACTS = (1, 2, 4, 8, 16)
XOR, OVERWRITE, _, HEADER, WHOLE, REPLAY, CUT, LENGTHEN = range(8)
SUMMED = 8
STATUS, STEP = 11, 13  # fields of a header, as EDIT_HEADER numbers them


def edit(transfer: int, what: int, at: int = 0, data: bytes = b"", part: int = 0) -> bytes:
    return struct.pack("<BBHB", transfer, what | part << 4, at, len(data)) + data


def seeds_of(case: int):
    """Yields (name, bytes) of one case."""
    edits = [
        ("damaged", edit(case, XOR, 70, b"\x40")),
        ("crafted", edit(case + 1, OVERWRITE | SUMMED, 64, b"\xff\xff\xff\x7f")),
        ("failed", edit(case + 2, HEADER | SUMMED, STATUS, b"\x03")),
        ("of-another-unit", edit(case + 3, REPLAY, 1)),
        ("step", edit(case + 4, HEADER | SUMMED, STEP, b"\x07", part=1)),
        ("cut", edit(case + 5, CUT, 40)),
        ("longer", edit(case + 6, LENGTHEN, 0, b"\0" * 8, part=1)),
        ("noise", edit(case + 7, WHOLE, 0, b"\x5a\x00\xc3")),
    ]
    yield "honest", bytes([case, 0])
    for i, act in ((0, 0), (1, ACTS[case % len(ACTS)])):
        name, data = edits[(2 * case + i) % len(edits)]
        yield name, bytes([case, act]) + data


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for fuzzer, n_cases in CASES.items():
        folder = pathlib.Path(sys.argv[1], fuzzer)
        folder.mkdir(parents=True, exist_ok=True)
        for case in range(n_cases):
            for name, data in seeds_of(case):
                (folder / f"{case}-{name}").write_bytes(data)


if __name__ == "__main__":
    main()
