"""Run by hand, the tests take the package from this source tree and the library from build/, as ctest
does."""

import os
import pathlib
import sys

_ROOT = pathlib.Path(__file__).parents[2]
if "TAGC_LIBRARY" not in os.environ:
    os.environ["TAGC_LIBRARY"] = str(_ROOT / "build" / "libtagc.so")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(_ROOT / "python"))
