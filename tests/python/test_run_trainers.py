"""python -m tagc run: trainers that others own, which take long to import: one run uncompressed, one that
saves, and one that goes on from its checkpoint."""

import pytest

torch = pytest.importorskip("torch")
import ranks  # noqa: F401  # run.py looks for it
from run_script import SELECTING, furthest, losses, ran, share_sent


def check_trainer(folder, script, is_exact):
    off = losses(ran(folder, ("--off",), script, "off", "save"))
    options = (*SELECTING, "--record", "record.jsonl")
    on = losses(ran(folder, options, script, "out", "save"))
    assert on != off and furthest(on, off) < 0.2 and share_sent(folder / "record.jsonl") < 0.45
    text = ran(folder, SELECTING, script, "out", "resume")
    again = losses(text)
    assert "residuals go on from" in text and 1 < len(again) < len(on)
    assert furthest(again, {step: on[step] for step in again}) <= (0 if is_exact else 0.01)


def test_transformers(tmp_path):
    """Its model has more than one bucket's order: DDP makes buckets anew after a step."""
    pytest.importorskip("transformers")
    check_trainer(tmp_path, "trainer.py", is_exact=False)


def test_lightning(tmp_path):
    pytest.importorskip("lightning")
    check_trainer(tmp_path, "fit.py", is_exact=True)
