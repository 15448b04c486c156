"""python -m tagc info: what this installation has."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
from collections.abc import Sequence
from importlib import metadata

from tagc import _library as lib
from tagc.commands import planner
from tagc.report import parser

CODEC_SETTINGS = (("every value in 4 bits", "int4", 0.0), ("95 % zero, 2 bits", "int2", 0.95))


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> str:
    path = lib.library_path().with_name("libtagc-cuda.so")
    if not path.is_file():
        return "none (libtagc-cuda.so is built where nvcc works)"
    try:
        ctypes.CDLL(str(path))
    except OSError as failure:
        return f"{path} does not load: {failure}"
    return str(path)


def _connections() -> str:
    """Returns by what messages of PyTorch's ranks travel, if all of them have the same."""
    port = ctypes.c_void_p()
    try:
        lib.call("tagc_native_open", None, 0, 1, ctypes.byref(port))
    except lib.Error as failure:
        return f"gloo, because {failure}"
    lib.load().tagc_native_destroy(port)
    return "native, libtagc's own TCP connections"


def run(words: Sequence[str]) -> int:
    made = parser.Parser(prog="python -m tagc info", description="What this installation has.")
    made.parse_args(list(words))
    print(f"tagc {lib.version()}, {lib.library_path()}")
    print(f"python {platform.python_version()}, {platform.machine()}")
    print(f"torch {_version_of('torch')}, numpy {_version_of('numpy')}")
    has_report = all(importlib.util.find_spec(name) for name in ("altair", "vl_convert"))
    how = "yes" if has_report else 'no: pip install "tagc-train[report]"'
    print(f"pictures of reports: {how}")
    print(f"messages between ranks: {_connections()}")
    print(f"kernels for GPUs: {_kernels()}; not measured on one yet")
    for name, values, sparsity in CODEC_SETTINGS:
        print(f"codec here, one thread, {name}: {planner.codec_ns(values, sparsity):.3g} ns per element")
    return 0
