"""libtagc by ctypes: finds the library, and raises Error instead of returning a status. _declared.py has its
structs, words and functions, which include/tagc describes.

Every call releases the GIL, so hooks on several threads do not block each other. A transport written in
Python takes it only for its own few lines."""

from __future__ import annotations

import ctypes
import os
import pathlib
import threading
from typing import Any, TypeVar

from tagc import _declared
from tagc._declared import *  # noqa: F403

# Kinds of parameter gathers: (format, delta, lossless).
GATHERS = {"fp32": ("fp32", 0, 0), "bf16": ("bf16", 0, 0), "lossless": ("bf16", 0, 1), "int8": ("int8", 0, 0),
           "delta8": ("int8", 1, 0), "delta4": ("int4", 1, 0), "delta2": ("int2", 1, 0)}  # fmt: skip
# By number; two of them are not libtagc's.
_NUMBERS = _declared.STATUS_NUMBERS | {"io": 8, "interrupted": 9}
STATUSES = tuple(sorted(_NUMBERS, key=_NUMBERS.__getitem__))
# Of failures after which there is no connection any more.
LOST = ("transport", "timeout")


class Error(RuntimeError):
    """A failure of libtagc or of this package. `status` is one of STATUSES."""

    def __init__(self, status: int | str, text: str) -> None:
        super().__init__(text)
        self.status = STATUSES[status] if isinstance(status, int) else status


_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None
_Struct = TypeVar("_Struct", bound=ctypes.Structure)


def library_path() -> pathlib.Path:
    """Returns the path of the libtagc in use: $TAGC_LIBRARY, or the one in this package."""
    named = os.environ.get("TAGC_LIBRARY")
    return pathlib.Path(named) if named else pathlib.Path(__file__).parent / "lib" / "libtagc.so"


def load() -> ctypes.CDLL:
    """Returns the library, loaded once. Error if it is missing, cannot be loaded, or has another version."""
    global _loaded
    if _loaded is not None:  # without the lock: the garbage collector may interrupt a thread that holds it
        return _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load(library_path())
        return _loaded


def _load(path: pathlib.Path) -> ctypes.CDLL:
    if not path.is_file():
        raise Error(
            "io",
            f"libtagc is not at {path}: install the package with pip, or set TAGC_LIBRARY to a libtagc.so",
        )
    try:
        library = ctypes.CDLL(str(path))
        for header, functions in _declared.FUNCTIONS.items():
            for name, (arguments, result) in functions.items():
                if header == "device.h" and not hasattr(library, name):
                    continue  # built without lib/gpu
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as failure:
        raise Error("io", f"libtagc at {path} cannot be used: {failure}") from failure
    return library


def version() -> str:
    return str(load().tagc_version().decode())


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status; raises Error with the library's text if it is not OK."""
    library = load()
    status = getattr(library, name)(*arguments)
    if status:
        raise Error(status, library.tagc_last_error().decode(errors="replace"))


def verdict(baseline_s: float, compressed_s: float, spread_s: float = 0.0) -> str:
    """Returns what compression does to a step of baseline_s seconds: "pays", "makes no difference", "costs"
    or "unknown"."""
    library = load()
    return str(
        library.tagc_verdict_name(library.tagc_verdict_of(baseline_s, compressed_s, spread_s)).decode()
    )


def initialised(kind: type[_Struct], init: str) -> _Struct:
    """Returns a struct with the library's defaults, also if the library has more fields than this package
    knows."""
    fields = kind()
    getattr(load(), init + "_sized")(ctypes.byref(fields), ctypes.sizeof(kind))
    return fields
