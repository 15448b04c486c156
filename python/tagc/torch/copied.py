"""The handle in a copy of its model."""

from __future__ import annotations

from typing import NoReturn

from tagc._library import Error


class Copied:
    """Replaces the handle in a copy of its model."""

    is_closed = True

    def close(self) -> None:
        """Does nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy and pickle look for optional methods
            raise AttributeError(name)
        raise Error("state", f"{name}: this is the copy of a tagc handle, which exchanges nothing: call compress() on this model")
