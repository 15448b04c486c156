"""What compress() says besides its table: from weights, hosts and cards that are as they say."""

import contextlib
import io
import socket

import pytest

torch = pytest.importorskip("torch")
import ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def test_one_line_or_none():
    from tagc.torch.advise.first_words import line

    far = [{"host": "a"}, {"host": "b"}]
    assert line(far, False, True) == ""
    near = line([{"host": "a"}] * 2, False, True)
    assert "all 2 ranks that exchange gradients are on one host" in near and near.endswith(
        "tagc.advise(model) measures what to expect"
    )
    assert "tagc sends every value" in line(far, True, True) and "without sparsity=" in line(far, True, False)
    assert "\n" not in line([{"host": "a"}] * 2, True, True)


def frozen_base(rank, world_size):
    """The table is of what is trained, and norms that are frozen say nothing of it."""
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    model = nn.Sequential()
    model.base, model.norm = nn.Linear(100, 64), nn.LayerNorm(64)
    model.lora, model.own_norm = nn.Linear(64, 80, bias=False), nn.LayerNorm(80)
    for part in (model.base, model.norm):
        part.requires_grad_(False)
    torch.nn.init.normal_(model.own_norm.weight)
    fully_shard(model)
    with tagc.compress(model, verbose=False) as handle:
        table = handle.table().splitlines()
        assert table[0] == "frozen, not exchanged: 6,592 elements" and "base" not in handle.table(), table
        assert table[-1] == "5,120 of 5,280 elements compressed (97.0 %)", table
        assert set(handle.state.schedule.levels().values()) == {1}, "the norm that is trained is not fresh"
    torch.nn.init.ones_(model.own_norm.weight)
    torch.nn.init.normal_(model.norm.weight)
    with tagc.compress(model, verbose=False) as handle:
        assert set(handle.state.schedule.levels().values()) == {0}, "the norm that is trained is fresh"


def test_frozen_parameters():
    ranks.run(frozen_base, 2)


def test_weights_that_look_fresh():
    from tagc.torch.advise.first_words import look_fresh
    from tagc.torch.schedule import policy

    model = nn.ModuleDict({"ln_1": nn.LayerNorm(8), "mlp": nn.Linear(8, 8), "norm": nn.RMSNorm(8)})

    def fresh(named):
        named = list(named)
        return look_fresh(policy.classify(named), named)

    assert fresh(model.named_parameters())
    # nothing to be seen
    assert fresh((name, p) for name, p in model.named_parameters() if name.startswith("mlp")) is None
    assert fresh((name, torch.empty_like(p, device="meta")) for name, p in model.named_parameters()) is None
    with torch.no_grad():
        model["norm"].weight[3] += 1e-6
    assert fresh(model.named_parameters()) is False


def said(rank, world_size):
    """On rank 0, below the table, once."""
    import tagc.torch as tagc

    for learnt in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 64))
        model.add_module("norm", nn.LayerNorm(64))
        if learnt:
            nn.init.normal_(model.norm.weight)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            tagc.compress(DistributedDataParallel(model))
        lines = output.getvalue().splitlines()
        own = [
            text
            for text in lines
            if text.startswith("tagc: all 2 ranks that exchange gradients are on one host")
        ]
        assert len(own) == (rank == 0), lines
        if rank == 0:
            assert (
                ("weights look fresh" in own[0]) == (not learnt)
                and lines[0].startswith("compressed: ")
                and lines[-1] == own[0]
            )
    socket.gethostname = lambda: f"host{rank}"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        tagc.compress(DistributedDataParallel(model))
    assert "tagc:" not in output.getvalue()


def test_it_is_said_once():
    ranks.run(said, 2)
