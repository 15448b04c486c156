"""All Python here is as ruff formats it, and ruff finds no mistake in it: pyproject.toml has the rules."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("ruff", reason="ruff is not installed")

ROOT = pathlib.Path(__file__).resolve().parents[2]


def ruff(*arguments):
    command = [
        sys.executable,
        "-m",
        "ruff",
        *arguments,
        "--config",
        str(ROOT / "pyproject.toml"),
        "--no-cache",
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_this_repository():
    for arguments in (("format", "--check", "."), ("check", ".")):
        done = ruff(*arguments)
        assert done.returncode == 0, f"make format mends most: {done.stdout[-4000:]}{done.stderr}"


@pytest.mark.parametrize(
    "arguments, planted",
    [
        (("format", "--check"), "x = {'a':1}\n"),
        (("check",), "import os\n"),
        (("check",), f"x = '{'long ' * 25}'\n"),
    ],
)
def test_what_is_planted_is_found(tmp_path, arguments, planted):
    (tmp_path / "planted.py").write_text(planted)
    assert ruff(*arguments, str(tmp_path)).returncode == 1
