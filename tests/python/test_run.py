"""python -m tagc run: scripts that know nothing of tagc (run_scripts/), as two ranks, beside the same scripts
as they are."""

import os
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import ranks  # noqa: F401  # run.py looks for it
import run_script
from run_script import SCRIPTS, SELECTING, TRIAL, check, losses, plain, ran, resumed, started

from tagc.commands import main
from tagc.run import options


def test_ddp(tmp_path):
    expected = check(tmp_path, "ddp.py")
    assert "is not compressed: its 2 ranks are on one host" in (text := ran(tmp_path, (), "ddp.py"))
    assert losses(text) == expected
    resumed(tmp_path, "ddp.py", ("--save-at", "4"), ("--resume",))


def test_last_checkpoint(tmp_path):
    """No training pass comes after it."""
    ran(tmp_path, SELECTING, "ddp.py", "--save-at", "4", "--steps", "4")
    text = ran(tmp_path, SELECTING, "ddp.py", "--resume")
    assert "residuals go on from" in text
    assert losses(text).items() <= losses(ran(tmp_path, SELECTING, "ddp.py")).items()


def test_fsdp2(tmp_path):
    check(tmp_path, "fsdp2.py", "plain", "none")
    resumed(tmp_path, "fsdp2.py", ("save", "saved"), ("resume", "saved"))
    assert (tmp_path / "saved-early" / "elsewhere").is_dir()  # by async_save(), and moved by resumed()


def test_nanogpt(tmp_path):
    check(tmp_path, "nanogpt.py", ".", "scratch", off=False)
    # whose buckets DDP makes anew after a step, so that what is selected differs a little
    resumed(tmp_path, "nanogpt.py", (".", "scratch"), (".", "resume"), exact=False, forgets=False)


def test_compiled(tmp_path):
    """The global hook breaks no graph."""
    text = ran(tmp_path, TRIAL, "nanogpt.py", ".", "scratch", "compiled")
    assert "GPT: exchanges: 9" in text or "OptimizedModule: exchanges: 9" in text, text


def test_several(tmp_path):
    check(tmp_path, "several.py", off=False)
    text = ran(tmp_path, TRIAL, "several.py")
    assert re.findall(r"tagc run: (\w+): exchanges: (\d)", text) == [
        ("Generator", "3"), ("Discriminator", "3"), ("Lora", "3")
    ], text  # fmt: skip
    assert "frozen, not exchanged: 16,512 elements" in text


def test_own_call(tmp_path):
    text = ran(tmp_path, TRIAL, "own_call.py")
    assert text.count("is left as the script has it: this model is compressed already") == 1
    assert text.count("exchanges by its own handle") == 2, text  # two ranks write into one pipe


def test_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    check(tmp_path, "accelerated.py", ".", "plain", off=False)
    resumed(tmp_path, "accelerated.py", ("state", "save"), ("state", "resume"), forgets=False)


def test_advice(tmp_path):
    text = ran(tmp_path, (*TRIAL, "--advise"), "ddp.py")
    assert "all 2 ranks are on one host" in text
    assert ("is not compressed, as advised" in text) != ("this rank sent" in text)


def test_options(tmp_path, capsys):
    """Mistakes end before the script begins."""

    def refused(*words):
        with pytest.raises(SystemExit) as end:
            main.main(["run", *words])
        assert end.value.code == 2
        return capsys.readouterr().err

    script = str(SCRIPTS / "describe.py")
    (tmp_path / "wrong.json").write_text('{"sparsty": 0.9}')
    (tmp_path / "broken.toml").write_text("sparsity")
    for words, text in (
        (("--sparsty", "0.9", script), "of python -m tagc run; did you mean --sparsity?"),
        (("--sparsity", "1.9", script), "sparsity is 1.9, must be a number from 0 to 1"),
        (("--sparsity", "much", script), '--sparsity is "much", allowed: a number'),
        (("--threads=1.5", script), '--threads is "1.5", allowed: a whole number'),
        (("--gentle", "yes", script), '--gentle is "yes", allowed: true, false'),
        (("--values", "int5", script), 'allowed: fp32, bf16, int8, int4, int2; did you mean int8?'),
        (("--rules", "head", script), '--rules is "head", allowed: JSON'),
        (("--exchange", "packed", "--values", "int4", script), "values is 'int4', which is for exchange"),
        (("--options", f"{tmp_path}/wrong.json", script), "sparsty is no option; did you mean sparsity?"),
        (("--options", f"{tmp_path}/none.json", script), "none.json cannot be read"),
        (("--advise", "--between", "dp", script), "--advise takes no --between"),
        (("--on_step", "f", script), "--on_step is no option"),
        ((), "a script is missing"),
        (("--off", "-m"), "-m: a module is missing"),
    ):  # fmt: skip
        assert text in refused(*words), words
    with pytest.raises(SystemExit) as end:
        main.main(["run", "--help"])
    said = capsys.readouterr().out
    assert not end.value.code
    assert all(f"--{name.replace('_', '-')} " in said for name in options.of_compress())
    assert main.main(["run", "nowhere.py"]) == 1
    assert main.main(["run", "-m", "nowhere.at_all"]) == 1


def test_options_of_a_file(tmp_path):
    (tmp_path / "options.json").write_text('{"sparsity": 0.5, "mild-sparsity": 0.4, "rules": {"*": "mild"}}')
    if sys.version_info >= (3, 11):
        (tmp_path / "options.toml").write_text(
            'sparsity = 0.5\nmild-sparsity = 0.4\nrules = {"*" = "mild"}\n'
        )
        assert options.of_file(f"{tmp_path}/options.toml") == options.of_file(f"{tmp_path}/options.json")
    text = ran(tmp_path, (*TRIAL, "--options", "options.json", "--mild", "int8"), "ddp.py")
    assert "mild: direct, 40 % zero, int8" in text, text


def test_as_python_starts_it(tmp_path, monkeypatch):
    """argv, __main__, __file__ and sys.path of a script, and of a module. test_torchrun starts `python -m
    tagc run` itself."""
    script = os.path.relpath(SCRIPTS / "describe.py", tmp_path)
    alone = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS)])  # of a rank, too
    for words in ([script, "a", "--", "--off", "-m"], ["-m", "describe", "--sparsity"]):
        plainly = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=alone, text=True, capture_output=True, check=True
        )
        text = started(tmp_path, "run", "--off", *words, n=1)
        assert text == f"tagc run: off: nothing is compressed\n{plainly.stdout}"


def test_ranks_that_hang_are_shown(tmp_path, monkeypatch):
    """They wait, and do nothing."""
    monkeypatch.setattr(run_script, "PATIENCE_S", 2)
    (tmp_path / "waits.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(1000)\n")
    with pytest.raises(AssertionError, match="has done nothing for 2 s") as hang:
        plain(tmp_path, f"{tmp_path}/waits.py")
    assert str(hang.value).count("rank process") == 2


def test_torchrun(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "tagc", "run", *TRIAL, str(SCRIPTS / "ddp.py"), "--steps", "2"],
        cwd=tmp_path, env=os.environ | {"PYTHONFAULTHANDLER": "1"}, text=True, capture_output=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Sequential: exchanges: 2; this rank sent" in done.stdout
