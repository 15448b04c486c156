"""That the library is found, is this version's, and that one which is missing or wrong says so by name."""

import ctypes
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tagc
from tagc import _library

ROOT = pathlib.Path(__file__).parents[2]


def python(code, **environment):
    """Output of a fresh interpreter, for libtagc is loaded only once in each."""
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
                          text=True, timeout=60, check=True).stdout.strip()


def test_version_is_that_of_the_package():
    version = re.search(r"project\(tagc VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert tagc.__version__ == version


def test_structs_are_those_of_the_header():
    for kind in ("CommOptions", "ReducerOptions", "GathererOptions", "ReducerStats"):
        init = "tagc_" + re.sub(r"(?<!^)([A-Z])", r"_\1", kind).lower() + "_init"
        options = _library.initialised(getattr(_library, kind), init)
        assert options.struct_bytes == ctypes.sizeof(options)


def test_package_needs_no_torch():
    assert python("import sys, tagc; tagc.__version__; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("path", ["/nowhere/libtagc.so", str(ROOT), str(ROOT / "LICENSE"), "libm"])
def test_wrong_library_is_an_error_that_names_it(path):
    if path == "libm":  # a library, but another one
        path = next(line.split()[-1] for line in open("/proc/self/maps") if "/libm" in line)
    said = python("import tagc\ntry: tagc.__version__\nexcept tagc.Error as e: print(e.status, e)", TAGC_LIBRARY=path)
    assert said.startswith("io ") and path in said and "Traceback" not in said
