"""Shares of the model that the sites of LocalSteps own: the option, and the elements that it comes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tagc._library import Error
from tagc.torch.schedule import options


def checked(shares: Any) -> list[float] | None:
    """The option as a list; Error where it is none."""
    if shares is None:
        return None
    if isinstance(shares, str) or not isinstance(shares, Sequence):
        raise Error("argument", f"shares is {shares!r}, must be a list with one number for each site")
    made = list(shares)
    for i, share in enumerate(made):
        options.number(f"shares[{i}]", share, 0, 1e6)
    if not sum(made) > 0:
        raise Error("argument", f"shares is {made!r}, must have a number above 0")
    return made


def check_sites(shares: Sequence[float] | None, n_sites: int, is_managed: bool) -> None:
    if shares is None:
        return
    if is_managed:
        raise Error("unsupported", f"shares is {shares!r}, must be None under torchft: sites join and leave, and the numbers belong to certain ones")
    if len(shares) != n_sites:
        raise Error("argument", f"shares is {list(shares)!r}, must have one number for each of {n_sites} sites")


def divide(n_elems: int, shares: Sequence[float]) -> list[int]:
    """Elements that each site owns of n_elems, a multiple of 16 times their number: multiples of 16, at least 16 each, else as `shares`
    are to each other. fsum() gives the same numbers on all sites, whatever their Python."""
    n, more = len(shares), n_elems // 16 - len(shares)
    ends = [i + round(more * math.fsum(shares[:i]) / math.fsum(shares)) for i in range(n + 1)]
    return [16 * (end - begin) for begin, end in zip(ends, ends[1:])]


def words(shares: Sequence[float] | None) -> str:
    return "" if shares is None else f" that own {', '.join(f'{100 * share / math.fsum(shares):.0f}' for share in shares)} %"
