"""python -m tagc run: trainers that others own, which take long to import: one run uncompressed, one that
saves, and one that goes on from its checkpoint. And accelerate's own launcher."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import ranks  # noqa: F401  # run.py looks for it
from run_script import SCRIPTS, SELECTING, TRIAL, furthest, losses, plain, ran, share_sent


def check_trainer(folder, script, is_exact, *words):
    off = losses(ran(folder, ("--off",), script, "off", "save", *words))
    options = (*SELECTING, "--record", "record.jsonl")
    on = losses(ran(folder, options, script, "out", "save", *words))
    assert on != off and furthest(on, off) < 0.2 and share_sent(folder / "record.jsonl") < 0.45
    text = ran(folder, SELECTING, script, "out", "resume", *words)
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


def launched(folder, *words):
    """What `accelerate launch` with two processes prints. With --multi_gpu it is torchrun inside, and the
    script asks for processors."""
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
         "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
         "--main_process_port", "0", *words],
        cwd=folder, env=alone | {"ACCELERATE_USE_CPU": "true"}, text=True, capture_output=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_accelerate_launch(tmp_path):
    pytest.importorskip("accelerate")
    script = (str(SCRIPTS / "accelerated.py"), ".", "plain")
    expected = losses(launched(tmp_path, *script))
    assert expected == losses(plain(tmp_path, "accelerated.py", ".", "plain"))
    assert expected == losses(launched(tmp_path, "-m", "tagc", "run", "--off", *script))
    said = launched(tmp_path, "-m", "tagc", "run", *TRIAL, "--record", "record.jsonl", *script)
    assert losses(said) != expected and furthest(losses(said), expected) < 0.1
    assert share_sent(tmp_path / "record.jsonl") < 0.45 and said.count("this rank sent") == 1
