"""Command lines: what a mistake is answered with."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn


class UsageError(Exception):
    """A mistake in the command line. The text is for the user."""


class Parser(argparse.ArgumentParser):
    """Says what may have been meant, and raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            message = f"{unknown[1]} is no option of {self.prog}{meant(unknown[1], self._known())}"
        raise UsageError(message)

    def _known(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]


def meant(word: str, known: Iterable[str]) -> str:
    """Returns '; did you mean "..."?', or "" if nothing is like the word."""
    like = difflib.get_close_matches(word.partition("=")[0], list(known), 1, 0.6)
    return f'; did you mean "{like[0]}"?' if like else ""
