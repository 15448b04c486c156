"""What tagc-report reads of what handle.record() and on_step write."""

import json
import math

import pytest

pytest.importorskip("torch")
import ranks
from recorded import N_STEPS, train

from tagc.report import inputs, model


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
    assert drawing.spec()["padding"]["left"] > 15  # the names of levels, in a wider font


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


def test_a_run_that_went_on_from_an_earlier_checkpoint_replaces_what_it_does_again(tmp_path):
    ranks.run(train, 2, tmp_path, False, 8)
    text = (tmp_path / "runs" / "here.jsonl").read_text().splitlines()
    (tmp_path / "again.jsonl").write_text("\n".join([*text, *text[-3:]]) + "\n")
    (run,) = report_of(tmp_path / "again.jsonl").runs
    assert [step.step for step in run.steps] == list(range(1, 9))
