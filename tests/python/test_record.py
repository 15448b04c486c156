"""What handle.record() and on_step write."""

import shutil

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import Even, batch_of, loss_of
from recorded import N_STEPS, lines_of, train
from wrappers import heard


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


def test_a_resumed_run_goes_on_in_its_file(tmp_path):
    ranks.run(train, 2, tmp_path, False, 8)
    with open(tmp_path / "runs" / "here.jsonl", "a") as file:
        file.write('{"type": "step", "st')  # what a crash leaves
    ranks.run(train, 2, tmp_path, False, 4, True)
    lines = lines_of(tmp_path / "runs" / "here.jsonl")
    assert [line.get("step") for line in lines] == [None, *range(1, 13)]
    ranks.run(train, 2, tmp_path, False, 3)  # a new run begins anew
    assert len(lines_of(tmp_path / "runs" / "here.jsonl")) == 1 + 3


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
        with heard("cannot be written, the record ends") as said:
            for step in range(3):
                loss_of(model, batch_of(rank, step)).backward()
        assert len(said) == (rank == 0), said


def test_a_wrong_path_is_refused(tmp_path):
    ranks.run(wrong_paths, 2, tmp_path)
