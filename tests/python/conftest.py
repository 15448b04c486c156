"""Run by hand, the tests take the package from this source tree and the library from build/, as ctest
does."""

import gc
import os
import pathlib
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
if "TAGC_LIBRARY" not in os.environ:
    os.environ["TAGC_LIBRARY"] = str(_ROOT / "build" / "libtagc.so")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(_ROOT / "python"))


gc.disable()  # while torch is imported, of which nothing is garbage


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = 77  # all of this file was left out, which ctest calls skipped


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "callspec") and item.callspec.params.get("world_size", 0) > 2:
            item.add_marker("slow")
