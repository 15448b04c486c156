"""python -m tagc run: scripts that know nothing of tagc (run_scripts/), as two ranks, beside the same scripts
as they are. Ranks are forks with what torchrun sets, but for one test, which takes torchrun."""

import json
import multiprocessing.connection
import os
import pathlib
import re
import runpy
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
import ranks

from tagc.commands import main

SCRIPTS = pathlib.Path(__file__).parent / "run_scripts"
TRIAL = ("--even-on-one-host",)
SELECTING = (*TRIAL, "--sparsity", "0.9", "--values", "fp32")


def rank_main(words, folder, environment, output):
    """One rank: words of `tagc run`, or a script as it is."""
    os.environ.update(environment)
    os.chdir(folder)
    to = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(to, 1)
    os.dup2(to, 2)
    torch.set_num_threads(1)
    code = 0
    try:
        if words[0] == "run":
            sys.path[0] = str(folder)
            code = main.main(words)
        else:
            sys.path[0], sys.argv = os.path.dirname(words[0]), list(words)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def started(folder, *words, n=2):
    """Returns what the ranks print. Their store is here, as torchrun's is in its agent."""
    store, output = ranks._store(), folder / f"output{time.monotonic_ns()}"
    environment = {
        "WORLD_SIZE": f"{n}", "LOCAL_WORLD_SIZE": f"{n}", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none",
        "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    processes = [
        ranks.fresh().Process(
            target=rank_main,
            args=(words, folder, environment | {"RANK": f"{r}", "LOCAL_RANK": f"{r}"}, output),
        )
        for r in range(n)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 120
    while (
        any(p.is_alive() for p in processes)
        and not any(p.exitcode for p in processes)
        and time.monotonic() < end
    ):
        multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], 1)
    hang = [
        process.kill() for process in processes if process.is_alive()
    ]  # as torchrun does, if one has failed
    for process in processes:
        process.join()
    text = output.read_text()
    assert not hang and not any(process.exitcode for process in processes), text
    return text


def ran(folder, options, script, *words):
    return started(folder, "run", *options, str(SCRIPTS / script), *words)


def plain(folder, script, *words):
    return started(folder, str(SCRIPTS / script), *words)


def losses(text):
    found = {int(step): loss for step, loss in re.findall(r"loss (\d+) (\S+)", text)}
    assert found, text
    return found


def furthest(some, others):
    assert some.keys() == others.keys()
    return max(abs(float(some[step]) - float(others[step])) / float(others[step]) for step in some)


def share_sent(path):
    """Of what gradients take uncompressed."""
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [step for step in steps if "bytes_sent" in step]
    return sum(step["bytes_sent"] for step in steps) / sum(step["dense_bytes"] for step in steps)


def check(folder, script, *words, close=0.1, most=0.45, resume=None):
    """A script as it is; with --off, the same bits; compressed, other losses that are near, from fewer
    bytes. resume: the words by which it begins at its checkpoint; the losses of the two agree as far as
    `exact` says."""
    expected = losses(plain(folder, script, *words))
    text = ran(folder, ("--off",), script, *words)
    assert losses(text) == expected and "off: nothing is compressed" in text
    said = ran(folder, (*TRIAL, "--record", "record.jsonl"), script, *words)
    assert losses(said) != expected and furthest(losses(said), expected) < close, (said, expected)
    assert share_sent(folder / "record.jsonl") < most and "this rank sent" in said
    return said


def resumed(folder, script, saving, resuming, exact=True):
    """A run broken off at its checkpoint and resumed, beside the one that went on: the same bits, and other
    ones without the residuals."""
    on = losses(ran(folder, SELECTING, script, *saving))
    text = ran(folder, SELECTING, script, *resuming)
    assert "residuals go on from" in text
    again = losses(text)
    assert 1 < len(again) < len(on)
    assert not exact or again == {step: on[step] for step in again}
    folders = [path for path in folder.rglob("*tagc") if path.is_dir()]
    assert folders and all((path / "0" / f"rank{r}.pt").is_file() for path in folders for r in range(2))
    for path in folders:
        path.rename(path.with_name("elsewhere"))
    anew = ran(folder, SELECTING, script, *resuming)
    assert anew.count("residuals begin anew") == 1 and losses(anew) != again


def test_ddp(tmp_path):
    check(tmp_path, "ddp.py")
    assert "is not compressed: its 2 ranks are on one host" in (text := ran(tmp_path, (), "ddp.py"))
    assert losses(text) == losses(plain(tmp_path, "ddp.py"))
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


def test_nanogpt(tmp_path):
    check(tmp_path, "nanogpt.py", ".", "scratch")
    # whose buckets DDP makes anew after a step, so that what is selected differs a little
    resumed(tmp_path, "nanogpt.py", (".", "scratch"), (".", "resume"), exact=False)


def test_compiled(tmp_path):
    """The global hook breaks no graph."""
    text = ran(tmp_path, TRIAL, "nanogpt.py", ".", "scratch", "compiled")
    assert "GPT: exchanges: 9" in text or "OptimizedModule: exchanges: 9" in text, text


def test_several(tmp_path):
    check(tmp_path, "several.py")
    text = ran(tmp_path, TRIAL, "several.py")
    assert re.findall(r"tagc run: (\w+): exchanges: (\d)", text) == [
        ("Generator", "3"), ("Discriminator", "3"), ("Lora", "3")
    ], text  # fmt: skip
    assert "frozen, not exchanged: 16,512 elements" in text


def test_own_call(tmp_path):
    text = ran(tmp_path, TRIAL, "own_call.py")
    assert text.count("is left as the script has it: this model is compressed already") == 1
    assert text.count("exchanges by its own handle: 2") == 2


def test_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    check(tmp_path, "accelerated.py", ".", "plain")
    resumed(tmp_path, "accelerated.py", ("state", "save"), ("state", "resume"))


def test_trainer(tmp_path):
    pytest.importorskip("transformers")
    check(tmp_path, "trainer.py", "out", "plain")
    resumed(tmp_path, "trainer.py", ("out", "save"), ("out", "resume"), exact=False)


def test_lightning(tmp_path):
    pytest.importorskip("lightning")
    check(tmp_path, "fit.py", "plain", "save")
    resumed(tmp_path, "fit.py", ("out", "save"), ("out", "resume"))


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
        (("--values", "int5", script), 'allowed: fp32, bf16, int8, int4, int2, sign; did you mean int8?'),
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
    assert main.main(["run", "nowhere.py"]) == 1
    assert main.main(["run", "-m", "nowhere.at_all"]) == 1


def test_options_of_a_file(tmp_path):
    (tmp_path / "options.json").write_text('{"sparsity": 0.5, "mild-sparsity": 0.4, "rules": {"*": "mild"}}')
    text = ran(tmp_path, (*TRIAL, "--options", "options.json", "--mild", "int8"), "ddp.py")
    assert "mild: direct, 40 % zero, int8" in text, text


def test_as_python_starts_it(tmp_path):
    """argv, __main__, __file__ and sys.path of a script, and of a module."""
    script = os.path.relpath(SCRIPTS / "describe.py", tmp_path)
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    paths = os.pathsep.join([str(SCRIPTS), alone.get("PYTHONPATH", "")])
    for words in ([script, "a", "--", "--off", "-m"], ["-m", "describe", "--sparsity"]):
        texts = [
            subprocess.run(
                [sys.executable, *before, *words], cwd=tmp_path, env=alone | {"PYTHONPATH": paths} | rank,
                text=True, capture_output=True, check=True
            ).stdout
            for before, rank in (([], {}), (["-m", "tagc", "run", "--off"], {"RANK": "1"}))
        ]  # fmt: skip
        assert texts[0] == texts[1]


def test_torchrun(tmp_path):
    text = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "tagc", "run", *TRIAL, str(SCRIPTS / "ddp.py"), "--steps", "2"],
        cwd=tmp_path, text=True, capture_output=True, check=True
    ).stdout  # fmt: skip
    assert "Sequential: exchanges: 2; this rank sent" in text
