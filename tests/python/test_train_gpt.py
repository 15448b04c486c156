"""examples/pytorch/train_gpt.py as its page says to start it."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import launch
import ranks
from wrappers import HAS_FSDP1

TRAIN = launch.EXAMPLES / "train_gpt.py"
SMALL = [
    "--n-layer",
    1,
    "--n-embd",
    64,
    "--n-positions",
    32,
    "--batch-size",
    4,
    "--warmup",
    2,
    "--eval-batches",
    1,
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Data that no one edits meanwhile."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text to learn\n" % (i * i % 997) for i in range(1000)))
    return path


def losses(said):
    """{(step, what): loss}; the fourth decimal is all that is printed."""
    found = re.findall(r"^step +(\d+)  (loss|evaluation loss) ([\d.]+)", said, re.MULTILINE)
    return {(int(step), what): float(loss) for step, what, loss in found}


def trained(rank, world_size, *runs):
    """What each of `runs`, arguments of the script, says."""
    import torch.distributed as dist

    sys.path.insert(0, str(launch.EXAMPLES))
    import train_gpt

    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # there is one already
    texts = []
    for arguments in runs:
        sys.argv = ["train_gpt.py", *map(str, [*SMALL, *arguments])]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            train_gpt.main()
        texts.append(said.getvalue())
    return texts


@pytest.mark.parametrize("options", [
    ["--wrap", "fsdp2", "--parameters", "delta8"],
    ["--wrap", "fsdp2", "--bf16", "--checkpoint-activations", "--accumulate", 2],
    ["--wrap", "ddp", "--tied", "--bf16", "--accumulate", 2],
    *([["--wrap", "fsdp1"]] if HAS_FSDP1 else []),
], ids=lambda options: "".join(map(str, options)))  # fmt: skip
def test_learns_and_goes_on_from_a_checkpoint(text, tmp_path, options):
    options = [*options, "--data", text, "--steps", 12, "--save-every", 6]
    said, again = ranks.run(
        trained, 2, [*options, "--save", tmp_path], [*options, "--resume", tmp_path / "step-000006"]
    )[0]
    whole, again = losses(said), losses(again)
    assert whole[11, "loss"] < 0.9 * whole[0, "loss"], said
    assert "elements compressed" in said
    bits = [float(x) for x in re.findall(r"([\d.]+) bits per parameter", said)]
    assert 0 < bits[-1] <= bits[0] < 20, said  # it begins gently
    assert again and set(again) < set(whole)
    # DDP begins with other buckets than it goes on with, and the largest of a bucket are not the largest of
    # another. Deltas begin with a copy of the parameters as they are, which had lagged behind them a little.
    tolerance = 5e-3 if "ddp" in options else 1e-3 if "delta8" in options else 0
    assert again == pytest.approx({key: whole[key] for key in again}, rel=tolerance, abs=0)


def test_what_tagc_refuses(text):
    outcomes = ranks.attempt(trained, 2, ["--data", text, "--wrap", "ddp", "--parameters", "delta8"])
    for _, trace in outcomes:
        assert "parameters is 'delta8'" in trace and "fully_shard" in trace


@pytest.mark.slow
def test_under_torchrun_without_tagc(text):
    """It is not imported where it is not wanted."""
    code, said = launch.torchrun(TRAIN, "--data", text, *SMALL, "--no-compress", "--steps", 3, PYTHONPATH="",
                                 TAGC_LIBRARY="/nowhere")  # fmt: skip
    assert code == 0, said
    assert len(losses(said)) == 3 and "32 bits per parameter" in said


def test_what_it_prints_is_what_it_does(text):
    """It gives tagc the optimizer, so no line says that tagc waits for it; and torch alone sends as many bits
    as the documents count."""
    ddp, fsdp2, said = ranks.run(
        trained,
        2,
        *(["--data", text, "--steps", 1, "--no-compress", "--wrap", wrap] for wrap in ("ddp", "fsdp2")),
        ["--data", text, "--steps", 1],
    )[0]
    assert " 64 bits per parameter" in ddp and " 32 bits per parameter" in fsdp2
    assert "AdamW: beta1 is 0.5 for what is compressed" in said and "until tagc knows" not in said
    assert "goes on to the above when its gradient is mostly noise" in said


def test_with_one_rank(text):
    (said,) = ranks.run(trained, 1, ["--data", text, "--steps", 3])[0]
    assert len(losses(said)) == 3 and "0.00 bits per parameter" in said


def test_a_wrong_option(text):
    for _, trace in ranks.attempt(trained, 2, ["--data", text, "--sparsity", 1.5]):
        assert "sparsity is 1.5" in trace


def alone(*arguments, **environment):
    """Without torchrun and without a process group."""
    command = [sys.executable, TRAIN, "--wrap", "none", *SMALL, "--steps", 3, *arguments]
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=100, env=os.environ | environment
    )


def test_in_one_process(text, tmp_path):
    done = alone("--data", text, "--save", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 3 and (tmp_path / "step-000003" / ".metadata").exists()


@pytest.mark.parametrize(
    "arguments", [["--data", "/nowhere"], ["--resume", "/nowhere"]], ids=lambda arguments: arguments[0]
)
def test_what_is_not_there_is_named(text, arguments):
    ((_, trace),) = ranks.attempt(trained, 1, ["--wrap", "none", "--data", text, "--steps", 3, *arguments])
    assert "/nowhere" in trace


def test_several_ranks_without_torchrun(text):
    done = alone("--data", text, WORLD_SIZE="2")
    assert done.returncode != 0 and "without torchrun" in done.stderr
