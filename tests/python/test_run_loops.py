"""python -m tagc run: trl's SFTTrainer and torchtitan's trainer. scripts/loops.sh runs it, in an environment
that has them; without them they are skipped."""

import importlib.util

import pytest

torch = pytest.importorskip("torch")
import ranks  # noqa: F401  # run.py looks for it
from run_script import SELECTING, furthest, losses, plain, ran, share_sent
from test_run_trainers import check_trainer

HOW = "is not installed: scripts/loops.sh"


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_trl(tmp_path, kind):
    for library in ("trl", "peft"):
        pytest.importorskip(library, reason=f"{library} {HOW}")
    off = losses(ran(tmp_path, ("--off",), "sft.py", "off", "plain", kind))
    assert off == losses(plain(tmp_path, "sft.py", "plain", "plain", kind))
    check_trainer(tmp_path, "sft.py", False, kind)


def test_torchtitan(tmp_path):
    if importlib.util.find_spec("torchtitan") is None:  # as it is, it can be imported only beside triton
        pytest.skip(f"torchtitan {HOW}")
    off = losses(plain(tmp_path, "titan.py", "plain", "6"))
    assert off == losses(ran(tmp_path, ("--off",), "titan.py", "off", "6"))
    options = (*SELECTING, "--record", "record.jsonl")
    on = losses(ran(tmp_path, options, "titan.py", "out", "6"))
    assert on != off and furthest(on, off) < 0.2 and share_sent(tmp_path / "record.jsonl") < 0.45
    ran(tmp_path, SELECTING, "titan.py", "again", "3")
    text = ran(tmp_path, SELECTING, "titan.py", "again", "6")
    again = losses(text)
    assert "residuals go on from" in text
    assert again == {step: loss for step, loss in on.items() if step > 3}
