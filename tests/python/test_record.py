"""What handle.record() and on_step write, and what tagc-report reads of it."""

import json
import math
import shutil
import warnings

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import Even, batch_of, loss_of

from tagc.report import inputs, model

N_STEPS = 6


def train(rank, world_size, folder, watches_after, n_steps=N_STEPS, resumes=False):
    """Trains under DDP and records. Returns this rank's losses and statistics."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import tagc.torch as tagc

    torch.manual_seed(0)
    wrapped = DistributedDataParallel(Even())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    losses, seen = [], []
    raw = open(folder / f"raw-{rank}.jsonl", "w")

    def on_step(stats):
        seen.append(stats)
        raw.write(json.dumps(stats) + "\n")

    handle = tagc.compress(wrapped, optimizer, verbose=False, on_step=on_step, rules={"*": "compressed"})
    handle.record(folder / "runs" / "here.jsonl")
    if resumes:
        handle.load(folder / "saved")
    for step in range(n_steps):
        optimizer.zero_grad()
        loss = loss_of(wrapped, batch_of(rank, step))
        if not watches_after:
            handle.watch(loss)
        loss.backward()
        if watches_after:
            handle.watch(loss)
        optimizer.step()
        losses.append(loss.item())
    (level,) = set(handle.state.schedule.levels().values())
    handle.save(folder / "saved")
    raw.close()
    handle.close()
    dist.barrier()
    return losses, seen, level


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("watches_after", (False, True))
def test_a_line_per_step_with_its_own_loss(tmp_path, watches_after):
    (losses, seen, levels), (_, others, _) = ranks.run(train, 2, tmp_path, watches_after)
    about, *lines = lines_of(tmp_path / "runs" / "here.jsonl")
    assert about["type"] == "torch" and about["world_size"] == 2
    assert about["n_params"] == sum(p.numel() for p in Even().parameters())
    assert [line["step"] for line in lines] == list(range(1, N_STEPS + 1))
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-6)
    for line, stats in zip(lines, seen):  # of rank 0, and nothing lost of it
        assert {name: line[name] for name in stats} == stats
    assert seen != others
    assert all(0 < line["wall_s"] < 60 for line in lines)
    assert [line["levels"] for line in lines] == [{"rule *": levels}] * N_STEPS


def report_of(*paths):
    report = inputs.read_report([str(path) for path in paths])
    return report


def test_the_report_has_loss_bits_levels_and_time(tmp_path):
    (losses, seen, _), _ = ranks.run(train, 2, tmp_path, False)
    report = report_of(tmp_path / "runs" / "here.jsonl", tmp_path / "raw-0.jsonl")
    recorded, raw = report.runs
    assert recorded.label == "here" and raw.label == "raw-0" and recorded.is_torch and raw.is_torch
    assert [step.loss for step in recorded.steps] == pytest.approx(losses, rel=1e-6)
    assert all(math.isnan(step.loss) for step in raw.steps)
    for run in report.runs:  # all legs are all bytes, each before (W-1)/W
        for step, stats in zip(run.steps, seen):
            assert sum(step.bits) == pytest.approx(2 * 8 * stats["bytes_sent"] / stats["n_elems"])
            assert step.bits[model.CONTROL] > 0 and step.wait_reduce_s == stats["exchange_s"]
    assert list(recorded.levels) == ["rule *"] and len(recorded.levels["rule *"]) == N_STEPS
    assert any("PyTorch run" in note for note in report.notes)
    pytest.importorskip("altair")
    from tagc.report import figures

    drawn = {figure.name for figure in figures.FIGURES if figure.draw(report, None)}
    assert {"loss", "loss-time", "loss-bits", "levels", "time", "bits"} <= drawn


def test_levels_are_drawn_by_group(tmp_path):
    levels = [{"attention": 0, "head": 1.0}, {"attention": 2.5, "head": 3}]
    with open(tmp_path / "run.jsonl", "w") as file:
        for step, level in enumerate(levels, 1):
            line = {"step": step, "world_size": 2, "n_elems": 8, "bytes_by_leg": {}, "levels": level}
            file.write(json.dumps(line) + "\n")
    pytest.importorskip("altair")
    from tagc.report import figures

    (drawing,) = figures.find("levels").draw(report_of(tmp_path / "run.jsonl"), None)
    rows = {(row["arm"], row["x"]): row["level"] for row in drawing.datasets["levels"]}
    assert rows == {("attention", 1): 0, ("attention", 2): 2.5, ("head", 1): 1, ("head", 2): 3}


def test_a_resumed_run_goes_on_in_its_file(tmp_path):
    ranks.run(train, 2, tmp_path, False, 8)
    with open(tmp_path / "runs" / "here.jsonl", "a") as file:
        file.write('{"type": "step", "st')  # what a crash leaves
    ranks.run(train, 2, tmp_path, False, 4, True)
    lines = lines_of(tmp_path / "runs" / "here.jsonl")
    assert [line.get("step") for line in lines] == [None, *range(1, 13)]
    # and one that went on from an earlier checkpoint replaces what it does again
    text = (tmp_path / "runs" / "here.jsonl").read_text().splitlines()
    (tmp_path / "again.jsonl").write_text("\n".join([*text, *text[-3:]]) + "\n")
    (run,) = report_of(tmp_path / "again.jsonl").runs
    assert [step.step for step in run.steps] == list(range(1, 13))
    ranks.run(train, 2, tmp_path, False, 3)  # a new run begins anew
    assert len(lines_of(tmp_path / "runs" / "here.jsonl")) == 1 + 3


def test_what_is_wrong_is_said(tmp_path):
    line = {"step": 1, "world_size": 2, "n_elems": 8, "bytes_by_leg": {"values": 4}}
    for text, words in (
        (json.dumps({"type": "torch", "format": 2}) + "\n", '"format" is 2, allowed: 1'),
        (json.dumps({**line, "step": None}) + "\n", 'statistics have no number as "step"'),
        (json.dumps({"type": "torch", "format": 1}) + "\n", "holds no steps"),
        (json.dumps(line) + "\n{\n" + json.dumps(line) + "\n", "line 2"),
    ):
        (tmp_path / "wrong.jsonl").write_text(text)
        with pytest.raises(inputs.ReportError, match=words):
            report_of(tmp_path / "wrong.jsonl")
    (tmp_path / "torn.jsonl").write_text(json.dumps(line) + '\n{"step": 2, "wor')
    assert report_of(tmp_path / "torn.jsonl").runs[0].is_torn


def wrong_paths(rank, world_size, folder):
    from torch.nn.parallel import DistributedDataParallel

    import tagc.torch as tagc

    with tagc.compress(DistributedDataParallel(Even()), verbose=False) as handle:
        with pytest.raises(tagc.Error, match="which is a folder; name a file"):
            handle.record(folder)
        with pytest.raises(tagc.Error, match="path is 3, must be the name of a file"):
            handle.record(3)
        model = handle.model
        if rank == 0:
            with pytest.raises(tagc.Error, match="/proc/none/x.jsonl.*cannot be written") as raised:
                handle.record("/proc/none/x.jsonl")
            assert raised.value.status == "io"
        path = folder / "gone" / "x.jsonl"
        handle.record(path)
        loss_of(model, batch_of(rank, 0)).backward()
        if rank == 0:
            assert len(lines_of(path)) >= 1
            shutil.rmtree(path.parent)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                loss_of(model, batch_of(rank, step)).backward()
        assert [
            str(one.message) for one in caught if "cannot be written, the record ends" in str(one.message)
        ][:2] == [str(one.message) for one in caught][:1] * (rank == 0)


def test_a_wrong_path_is_refused(tmp_path):
    ranks.run(wrong_paths, 2, tmp_path)
