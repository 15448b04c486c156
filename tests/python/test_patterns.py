"""The loops of examples/pytorch/patterns.py, all of them, and that its comparison finds what is wrong."""

import contextlib
import io
import re
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import launch
import ranks
from wrappers import present

PATTERNS = launch.EXAMPLES / "patterns.py"
NAMES = re.findall(r"^def (\w+)\(line, hook\)", PATTERNS.read_text(), re.MULTILINE)


@pytest.mark.slow
def test_every_loop_works_with_one_line_more():
    for kind, n_at_least in present([("fsdp2", 14), ("ddp", 15), ("fsdp1", 4)]):
        assert sum(name.split("_")[0] == kind for name in NAMES) >= n_at_least
    (code, said), (other_code, _) = ranks.run(main_of, 2, "own", timeout_s=500)
    verdicts = dict(re.findall(r"^(\w+) +(ok|error) ", said, re.MULTILINE))
    assert code == other_code == 0 and verdicts == dict.fromkeys(NAMES, "ok"), said


def constant(value):
    return [value - 0.1 * i for i in range(6)]


def wrong(calls):
    """Loops of which all but the first are to be found out."""

    def right(line, hook):
        return constant(5.0)

    def another_loss_with_tagc(line, hook):
        return constant(5.0 + 0.01 * next(calls))

    def no_progress(line, hook):
        return [5.0] * 6

    def fails_on_one_rank(line, hook):
        if torch.distributed.get_rank() == 1:
            raise KeyError("something")
        return constant(5.0)

    def not_finite(line, hook):
        return [float("nan")] * 6

    return right, another_loss_with_tagc, no_progress, fails_on_one_rank, not_finite


def main_of(rank, world_size, loops, *names):
    """(exit code, what it said) of the script, among ranks that are there already; loops: the wrong ones
    instead of its own."""
    sys.path.insert(0, str(launch.EXAMPLES))
    import patterns

    patterns.dist.init_process_group = patterns.dist.destroy_process_group = lambda *_, **__: None
    if loops == "wrong":
        patterns.PATTERNS.clear()
        for loop in wrong(iter(range(100))):
            patterns.pattern(loop)
    sys.argv = ["patterns.py", *names]
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
        patterns.main()
    return ended.value.code, said.getvalue()


def test_it_finds_what_is_wrong():
    (code, said), (other_code, _) = ranks.run(main_of, 2, "wrong")
    verdicts = dict(re.findall(r"^(\w+) +(ok|error) ", said, re.MULTILINE))
    assert code == other_code == 1
    assert verdicts == {"right": "ok", "another_loss_with_tagc": "error", "no_progress": "error",
                        "fails_on_one_rank": "error", "not_finite": "error"}, said  # fmt: skip
    assert "at sparsity 0 loss 0 is 5.0100000, without tagc 5.0000000" in said
    assert "rank 1: Traceback" in said and "KeyError: 'something'" in said


def test_a_name_that_is_none():
    for code, _ in ranks.run(main_of, 2, "own", "fsdp3_*"):
        assert "no pattern is called fsdp3_*" in code and "fsdp2_layers_and_root" in code
