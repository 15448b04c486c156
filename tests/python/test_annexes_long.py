"""Tests of the core run without each annex: without its folder, its tests' folder and its page."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
from test_annexes import ANNEXES, tree, without  # noqa: F401

TESTS = ("commands", "names", "policy", "record")


@pytest.mark.parametrize("annex", ANNEXES)
def test_the_core_passes(tree, annex):  # noqa: F811
    environment = {k: v for k, v in os.environ.items() if k not in ("TAGC_TEST_ORIGIN", "PYTHONPATH")}
    environment["PYTHONPATH"] = str(tree / "python")
    with without(annex, tree):
        tests = [str(tree / "tests" / "python" / f"test_{name}.py") for name in TESTS]
        command = [sys.executable, str(tree / "tests" / "python" / "run.py"), "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *tests], env=environment, capture_output=True, text=True, timeout=500
        )
    assert done.returncode == 0, done.stdout + done.stderr
