"""The types of the package hold, and those who use it get them. tests/python/<annex>/typed_<annex>.py uses an
annex."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("mypy", reason="mypy is not installed")
pytest.importorskip("torch", reason="torch is not installed")

ROOT = pathlib.Path(__file__).resolve().parents[2]
# An error that is expected and does not come is one: pyproject.toml says "strict".
PROGRAM = """import torch
import tagc.torch as tagc

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
handle: tagc.Compressed = tagc.compress(model, optimizer, sparsity=0.9, hosts=2, on_step=print)
tagc.compress(model, hosts="2")  # type: ignore[arg-type]
steps: int = handle.n_steps
tagc.compress(model, sparsity="0.9")  # type: ignore[arg-type]
tagc.compress(model, sparcity=0.9)  # type: ignore[arg-type]
tagc.compress(model, on_step=3)  # type: ignore[arg-type]
tagc.compress(model, values="int8", parameters="delta4", layers="all")
tagc.compress(model, options=tagc.Options(exchange="packed", mild="dense", threads=2))
tagc.compress(model, values="int3")  # type: ignore[arg-type]
tagc.Options(exchange="ring")  # type: ignore[arg-type]
tagc.compress(model, parameters="delta3")  # type: ignore[arg-type]
tagc.Options(mild="mild")  # type: ignore[arg-type]
tagc.compress(model, layers="linear")  # type: ignore[arg-type]
tagc.compress(model, rules={"*": "sparse"})  # type: ignore[dict-item]
tagc.buckets(model, 3)  # type: ignore[arg-type]
handle.at("folder", key=3)  # type: ignore[arg-type]
tagc.advise(model, step=3)  # type: ignore[arg-type]
"""


def test_the_package_and_a_program_that_uses_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # What mypy has read of torch stays with the environment: without it, this takes twenty times as long.
    kept = pathlib.Path(sys.prefix) / "mypy_cache"
    cache = (
        kept if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK) else tmp_path / "mypy_cache"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        ROOT / "pyproject.toml",
        "--cache-dir",
        cache,
        "tagc",
        program,
        *sorted((ROOT / "tests" / "python").glob("*/typed_*.py")),
    ]
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT / "python",
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"MYPYPATH": str(ROOT / "python")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
