"""The lab's tests of Python start ranks and find libtagc as the product's do."""

import pathlib
import runpy
import sys

SHARED = pathlib.Path(__file__).parents[2] / "tests" / "python"
sys.path.insert(0, str(SHARED))
hooks = runpy.run_path(str(SHARED / "conftest.py"))
globals().update({name: hook for name, hook in hooks.items() if name.startswith("pytest_")})
