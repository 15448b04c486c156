"""tagc: compressed gradient exchange for sharded data parallel training.

This package is a thin layer over libtagc. PyTorch users import tagc.torch; `tagc` itself does not need
torch."""

from __future__ import annotations

from tagc._library import Error, library_path, version

__all__ = ["Error", "library_path", "version"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        return version()
    hint = "" if name.startswith("_") else "; what trains models is in tagc.torch: import tagc.torch as tagc"
    raise AttributeError(f"module 'tagc' has no attribute {name!r}{hint}")
