"""python -m tagc info: what this installation has."""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import platform
import re
from collections.abc import Sequence
from importlib import metadata

from tagc import _library as lib
from tagc import _planner as planner
from tagc.commands import parser

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


def _lacks(has_tls: bool) -> str:
    """Returns why this rank has no connections of libtagc's own, with TLS or without; "": it has them."""
    port = ctypes.c_void_p()
    options = lib.initialised(lib.NativeOptions, "tagc_native_options_init")
    options.tls = int(has_tls)
    try:
        lib.call("tagc_native_open", ctypes.byref(options), 0, 1, ctypes.byref(port))
    except lib.Error as failure:
        return str(failure)
    lib.load().tagc_native_destroy(port)
    return ""


def _connections() -> str:
    """Returns by what messages of PyTorch's ranks travel, if all of them have the same."""
    if lacks := _lacks(has_tls=False):
        return f"gloo, because {lacks}"
    lacks = _lacks(has_tls=True)
    tls = f"no TLS, because {lacks}" if lacks else "with TLS if TAGC_NATIVE_TLS is set"
    return f"native, libtagc's own TCP connections; {tls}"


def _openblas_kernel() -> str:
    """Returns what the OpenBLAS of this process says that it uses; numpy's own has other names."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "openblas" in pathlib.Path(path).name and hasattr(ctypes.CDLL(path), "openblas_get_corename"):
            ask = ctypes.CDLL(path).openblas_get_corename
            ask.restype = ctypes.c_char_p
            return str(ask().decode())
    return "unknown"


def torch_blas() -> dict[str, str | int]:
    """Returns what torch computes products with: a library; its kernel, or where the library does not say,
    the vector instructions of torch's own loops; threads of a product."""
    import torch

    named = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    name = named[1] if named else "unknown"
    kernel = _openblas_kernel() if name == "open" else torch.backends.cpu.get_cpu_capability()
    return {"name": name, "kernel": kernel, "n_threads": torch.get_num_threads()}


def run(words: Sequence[str]) -> int:
    made = parser.Parser(prog="python -m tagc info", description="What this installation has.")
    made.parse_args(list(words))
    print(f"tagc {lib.version()}, {lib.library_path()}")
    print(f"python {platform.python_version()}, {platform.machine()}")
    print(f"torch {_version_of('torch')}, numpy {_version_of('numpy')}")
    if importlib.util.find_spec("torch"):
        blas = torch_blas()
        print(f"products of torch: {blas['name']}, kernel {blas['kernel']}, {blas['n_threads']} threads")
    has_report = all(importlib.util.find_spec(name) for name in ("altair", "vl_convert"))
    how = "yes" if has_report else 'no: pip install "tagc-train[report]"'
    print(f"pictures of reports: {how}")
    print(f"messages between ranks: {_connections()}")
    print(f"kernels for GPUs: {_kernels()}; not measured on one yet")
    for name, values, sparsity in CODEC_SETTINGS:
        print(f"codec here, one thread, {name}: {planner.codec_ns(values, sparsity):.3g} ns per element")
    return 0
