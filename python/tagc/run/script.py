"""Runs a script or a module as `python FILE` and `python -m MODULE` do: __main__, sys.argv and sys.path are
what they are there. Not by runpy, which puts another __main__ back when the script's code ends, and threads,
workers and exit handlers of the script still look for theirs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from tagc import Error


def find_script(path: str) -> tuple[types.CodeType, dict[str, Any]]:
    """Returns the code of a file, and what python sets in its __main__."""
    whole = os.path.join(os.getcwd(), path.removeprefix("./"))
    if os.path.isdir(path):
        raise Error("argument", f"{path} is a folder, must be a script; -m MODULE takes a package")
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), whole, "exec")
    except OSError as failure:
        raise Error("io", f"the script cannot be read: {failure}") from None
    loader = importlib.machinery.SourceFileLoader("__main__", whole)
    return code, {
        "__file__": whole,
        "__spec__": None,
        "__package__": None,
        "__loader__": loader,
        "__cached__": None,
    }


def find_module(name: str) -> tuple[types.CodeType, dict[str, Any]]:
    """As find_script(), of a module, or of a package's __main__."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError:
        spec = None
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise Error("argument", f"there is no module {name} that python -m could run")
    names = {"__file__": spec.origin, "__spec__": spec, "__package__": spec.parent, "__loader__": spec.loader}
    return code, {**names, "__cached__": spec.cached}


def run(code: types.CodeType, names: dict[str, Any], argv: Sequence[str], is_module: bool) -> None:
    """Runs it. argv: its path as the user wrote it, and its own arguments."""
    main = types.ModuleType("__main__")
    vars(main).update(names)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.argv[:] = [names["__file__"] if is_module else argv[0], *argv[1:]]
    if not is_module and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(
            os.path.realpath(argv[0])
        )  # `python -m tagc` has put the working folder there
    sys.modules["__main__"] = main
    exec(code, vars(main))
