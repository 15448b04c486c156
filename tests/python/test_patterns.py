"""The loops of examples/pytorch/patterns.py, all of them, and that its comparison finds what is wrong."""

import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import launch

PATTERNS = launch.EXAMPLES / "patterns.py"
NAMES = re.findall(r"^def (\w+)\(line, hook\)", PATTERNS.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("kind, n_at_least", [("fsdp2", 14), ("ddp", 15), ("fsdp1", 4)])
def test_every_loop_works_with_one_line_more(kind, n_at_least):
    names = [name for name in NAMES if name.split("_")[0] == kind]
    assert len(names) >= n_at_least
    code, said = launch.torchrun(PATTERNS, *names)
    verdicts = dict(re.findall(r"^(\w+) +(ok|error) ", said, re.MULTILINE))
    assert code == 0 and verdicts == dict.fromkeys(names, "ok"), said


WRONG = """
import sys
sys.path.insert(0, {examples!r})
import patterns
import torch

torch.manual_seed(7)

def constant(value):
    return [value - 0.1 * i for i in range(6)]

patterns.PATTERNS.clear()

@patterns.pattern
def right(line, hook):
    return constant(5.0)

calls = iter(range(100))

@patterns.pattern
def another_loss_with_tagc(line, hook):
    return constant(5.0 + 0.01 * next(calls))

@patterns.pattern
def no_progress(line, hook):
    return [5.0] * 6

@patterns.pattern
def fails_on_one_rank(line, hook):
    if patterns.dist.get_rank() == 1:
        raise KeyError("something")
    return constant(5.0)

@patterns.pattern
def not_finite(line, hook):
    return [float("nan")] * 6

patterns.main()
"""


def test_it_finds_what_is_wrong(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(WRONG.format(examples=str(launch.EXAMPLES)))
    code, said = launch.torchrun(script)
    verdicts = dict(re.findall(r"^(\w+) +(ok|error) ", said, re.MULTILINE))
    assert code != 0
    assert verdicts == {"right": "ok", "another_loss_with_tagc": "error", "no_progress": "error",
                        "fails_on_one_rank": "error", "not_finite": "error"}, said  # fmt: skip
    assert "at sparsity 0 loss 0 is 5.0100000, without tagc 5.0000000" in said
    assert "rank 1: Traceback" in said and "KeyError: 'something'" in said


def test_a_name_that_is_none():
    code, said = launch.torchrun(PATTERNS, "fsdp3_*")
    assert code != 0 and "no pattern is called fsdp3_*" in said and "fsdp2_layers_and_root" in said
