"""What the programs in lab/studies refuse, by name, before they train; and that one trains."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import launch
import ranks
from test_fine_tune import model  # noqa: F401 (a fixture: a small model of BERT's kind)

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "lab" / "studies"), str(ROOT / "lab" / "parity")]


def refused(*words):
    """What a program prints that ends with the exit code of a wrong command line."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_all_find_what_they_import():
    """In one process: torch is imported once. Programs of lab/ import each other by their names."""
    paths = sorted(map(str, (ROOT / "lab" / "studies").glob("*.py")))
    assert len(paths) > 5
    script = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path)"
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_torch_bench_skips_exchanges_or_not():
    program = "lab/studies/torch_bench.py"
    said = refused(program, "--skip-exchanges=ture")
    assert all(word in said for word in ("--skip-exchanges", "'ture'", "true", "false")), said
    assert "the ranks are missing" in refused(
        program, "--skip-exchanges", "--skip-exchanges=true", "--skip-exchanges=false"
    )


def test_torch_chaos_leaves_an_older_run_alone(tmp_path):
    (tmp_path / "text").write_text("an older run's")
    said = refused("lab/studies/torch_chaos.py", "--out", tmp_path)
    assert "--out" in said and str(tmp_path) in said and "not empty" in said, said
    assert (tmp_path / "text").read_text() == "an older run's"
    assert "not empty" in refused("lab/studies/torch_chaos.py", "--out", tmp_path / "text")


def test_torch_gpu_judges_memory():
    """A step may allocate what it does without tagc, and two of the largest unit."""
    path = ROOT / "lab" / "studies" / "torch_gpu.py"
    script = f"""if True:
        import runpy
        judge = runpy.run_path({str(path)!r})["too_much_memory"]
        def said(**peaks):
            arms = [{{"name": name.replace("_", "-"), "peak_bytes": n}} for name, n in peaks.items()]
            return judge({{"largest_unit_bytes": 5 << 20, "arms": arms}})
        assert said(alone=1, ddp=100 << 20, ddp_tagc=110 << 20, ddp_tagc_device=110 << 20) == []
        assert said(alone=None, ddp=None, ddp_tagc=None) == []
        wrong, = said(alone=1, ddp=100 << 20, ddp_tagc=111 << 20)
        assert wrong.startswith("ddp-tagc: a step allocates 111 MiB, allowed are 100 without"), wrong
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_other_optimizers_train(tmp_path):
    program, rows = ROOT / "lab" / "studies" / "torch_optimizers.py", tmp_path / "rows.json"
    words = ["--steps", 2, "--optimizers", "muon", "--arms", "dense", "4 bits"]
    ranks.run(launch.as_main, 2, program, *words, "--json", rows)
    assert [row["arm"] for row in json.loads(rows.read_text())] == ["dense", "4 bits"]


# ---- forks ----


def fork_rows(*keys):
    """Rows with the losses of a dense rate of 3e-4, which is the better one."""
    return [{"arm": arm, "rate": rate, "seed": seed, "loss": 2 + rate} for arm, rate, seed in keys]


def test_forks_run_dense_first_and_then_what_readme_has():
    import fork

    rows, names = [], []
    while job := fork.next_job(rows, fork.ARMS):
        rows += fork_rows(job.values())
        names.append(tuple(job.values()))
    assert names[:2] == [("dense", 3e-4, 1), ("dense", 1e-3, 1)]
    assert fork.next_job([], ["one line"]) is None
    assert fork.next_job([], ["one line"], 3e-4) == {"arm": "one line", "rate": 3e-4, "seed": 1}
    n = 1 + len(fork.ARMS)
    assert [name for name, *_ in names[2:n]] == [name for name in fork.ARMS if name != "dense"]
    assert {rate for name, rate, _ in names[2:] if "LoRA" not in name} == {3e-4}
    assert names[n:] == [(name, 3e-4, seed) for seed in (2, 3) for name in fork.OF_README]
    assert fork.next_job(fork_rows(*names[:2]), ["LocalSteps"])["arm"] == "LocalSteps"


def test_forks_are_held_against_dense_of_their_seed():
    import fork

    rows = fork_rows(("dense", 1e-3, 1), ("dense", 3e-4, 1), ("dense", 3e-4, 2), ("one line", 3e-4, 2))
    rows[-1]["loss"] = 1.01 * rows[-2]["loss"]
    assert fork.above(rows, "one line") == {2: pytest.approx(0.01)}
    rows += fork_rows(("LoRA", 1e-3, 1), ("LoRA, with the optimizer", 1e-3, 1))
    rows[-1]["loss"] = 0.98 * rows[-2]["loss"]
    assert fork.above(rows, "LoRA, with the optimizer") == {1: pytest.approx(-0.02)}
    assert fork.above(rows[1:], "one line") == fork.above(rows, "one line")  # the other rate is not there yet


def test_shares_of_levels_follow_their_changes():
    import fork

    levels = {"a": {"n": 3, "changes": [[1, 1], [6, 3]]}, "b": {"n": 1, "changes": [[1, 1], [9, 2]]}}
    found = {(row["step"], row["level"]): row["share"] for row in fork.shares({"levels": levels}, 12)}
    assert [found[step, "every"] for step in (1, 6, 11, 12)] == [1, 0.25, 0, 0]
    assert [found[step, "last"] for step in (1, 6, 11, 12)] == [0, 0.75, 0.75, 0.75]
    assert found[12, "largest"] == 0.25


def fork_documents():
    """What corpus.documents() yields, in a few words of the small model's tokenizer."""
    words = "the rank of the text, each with its own. "
    yield from (("package", "1", 0, number == 2, words * 60) for number in range(4))


def fork_setting():
    import fork

    return fork.SETTING | {
        "steps": 6, "length": 16, "warmup": 2, "held_every": 3, "held": 8, "held_at_end": 16, "held_rows": 8
    }  # fmt: skip


def fork_runs(rank, world_size, folder, tokens):
    import fork
    import fork_run

    rows, setting = {}, fork_setting()
    for name, arm in fork.ARMS.items():
        arm = arm | {"local": {"every": 3}} if "local" in arm else arm
        rows[name] = fork_run.one_run({"arm": name, "rate": 1e-3, "seed": 1}, arm, setting, folder, tokens)
    if rank == 0:
        check_fork_rows(rows)


def check_fork_rows(rows):
    first = {name: row["losses"][0] for name, row in rows.items()}  # "every leg" gathers bf16
    preferred = [first.pop(name) for name in list(first) if "preferences" in name]
    at_first = math.log(2) + 0.2 * first["dense"]  # the policy is the reference
    assert preferred == pytest.approx([at_first, at_first], rel=1e-4), preferred
    assert first == pytest.approx(dict.fromkeys(first, first["dense"]), rel=1e-4), first
    assert all(row["loss"] < row["losses"][0] for row in rows.values()), rows
    sent = {name: row["bytes_of_host"] for name, row in rows.items()}
    assert sent["every leg"] < sent["with the optimizer"] < sent["dense"], sent
    assert sent["LoRA, with the optimizer"] < sent["LoRA"] and sent["LocalSteps"] < sent["dense"], sent
    row = rows["with the optimizer"]
    name = "bert.encoder.layer.0.output.dense.weight"
    assert row["levels"][name] == {"n": 64 * 128, "changes": [[1, 0]]}  # the small model is a fresh one
    assert row["n_params"] == row["n_trained"] > rows["LoRA"]["n_trained"]


def test_forks_train(model, tmp_path):  # noqa: F811
    import fork_run

    tokens, about = fork_run.made_text(tmp_path, model, 16, fork_documents())
    assert fork_run.made_text(tmp_path, model, 16, fork_documents()) == (tokens, about)
    assert about["packages"] == {"package": "1"} and about["n_tokens"]["held"] >= 256, about
    ranks.run(fork_runs, 4, model, tokens)
    job = {"arm": "dense", "rate": 1e-3, "seed": 1}
    row = fork_run.run(job, {}, fork_setting(), model, tokens)  # in processes of its own
    assert job.items() <= row.items() and row["loss"] < row["losses"]["0"], row


# ---- the ladder ----


def test_ladder_fits_a_line_as_numpy_does():
    import ladder
    import numpy

    random = numpy.random.default_rng(1)
    points = [
        (n, 0.3 + 0.2 * numpy.log10(n) + random.normal()) for n in (3e5, 3e5, 3e5, 9e5, 9e5, 9e5, 2.6e6)
    ]
    line = ladder.fitted(points)
    xs, ys = numpy.log10([n for n, _ in points]), [gap for _, gap in points]
    (slope, at_zero), errors = numpy.polyfit(xs, ys, 1, cov=True)
    assert line.slope == pytest.approx(slope) and line.at(1e8) == pytest.approx(at_zero + 8 * slope)
    assert line.slope_error() == pytest.approx(2.57 * errors[0, 0] ** 0.5)
    rest = sum((y - at_zero - slope * x) ** 2 for x, y in zip(xs, ys)) / 5
    of_line = numpy.array([8, 1]) @ errors @ numpy.array([8, 1])
    assert line.error(1e8, 3) == pytest.approx(2.57 * (of_line + rest / 3) ** 0.5)
    assert ladder.fitted(points[:3]) is None and ladder.fitted(points[:2]) is None


def test_ladder_is_run_from_the_small_sizes_on_at_the_better_rate_of_dense():
    import ladder

    rows = []
    while job := ladder.next_job(rows):
        size, arm, rate, seed = job
        loss = 3 + rate + (0.03 if arm == "tagc" else 0)
        n_params = 1e6 * float(size.split()[0])
        own = {
            "n_params": n_params,
            "loss": loss,
            "bits": 4.0,
            "last_bits": 1.0,
            "autocast": False,
            "cpu": "?",
        }
        rows.append({"size": size, "arm": arm, "rate": rate, "seed": seed} | own)
    assert len(rows) == 2 * (1 + 3 * 5) + 1 + 5
    assert [row["size"] for row in rows] == sorted(row["size"] for row in rows)
    assert all(gap == pytest.approx(100 * 0.03 / (3 + 4e-3)) for _, gap in ladder.gaps(rows, "tagc")[:3])
    assert len(ladder.gaps(rows, "tagc-optimizer")) == 7
    assert "refutes the line" in ladder.said_of(rows) and "Nothing is missing" in ladder.table(rows)


def test_ladder_stores_each_row_and_repeats_none(tmp_path, monkeypatch):
    import argparse
    import dataclasses

    import corpus
    import ladder
    import numpy

    for kind in ("train", "val"):
        tokens = numpy.random.default_rng(1).zipf(1.5, 5000) % 256
        tokens.astype(numpy.uint16).tofile(tmp_path / f"{kind}-256.bin")
    small = dataclasses.replace(
        ladder.SIZES["0.3 M"], n_layer=1, n_embd=32, n_head=2, n_positions=8, n_vocabulary=256, batch_size=2,
        steps=4, warmup=1, eval_every=2, eval_tokens=1024, final_tokens=1024, seeds=(1,)
    )  # fmt: skip
    monkeypatch.setattr(ladder, "SIZES", {"0.3 M": small})
    monkeypatch.setattr(ladder, "ARMS", {"dense": "dense", "tagc-all-optimizer": "every leg"})
    monkeypatch.setattr(corpus, "make", lambda cache, n: {"n_tokens": n})
    path = tmp_path / "ladder.json"
    args = argparse.Namespace(json=path, cache=tmp_path, sizes=["0.3 M"], autocast=False, minutes=9)
    ladder.run_missing(args)
    rows = json.loads(path.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["dense", "dense", "tagc-all-optimizer"]
    assert all(4 < row["loss"] < 6 and row["bits"] > 0 for row in rows), rows
    ladder.run_missing(args)
    assert json.loads(path.read_text())["rows"] == rows
    monkeypatch.setattr(corpus, "make", lambda cache, n: {"n_tokens": n + 1})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": rows[:2]}))
    with pytest.raises(SystemExit, match="rows of another text: give another --json"):
        ladder.run_missing(args)


def test_peers_are_reproduced_or_say_what_is_missing():
    import peers_verdict as peers

    losses = {"dense": 4.0, "diloco": 4.03, "sparseloco": 4.02, "powersgd-4": 4.1, "powersgd-1": 4.2}
    assert peers.verdict("diloco", losses, 1000) == (pytest.approx(0.75), "reproduced")
    assert peers.verdict("sparseloco", losses, 1000)[1] == "reproduced"
    assert peers.verdict("sparseloco", losses | {"sparseloco": 4.04}, 1000)[1].endswith(
        "its order is another"
    )
    assert "66 exchanges, not 1000" in peers.verdict("diloco", losses, 66)[1]
    assert "its order" in peers.verdict("powersgd-4", losses, 1000)[1]
    assert peers.verdict("powersgd-1", losses, 1000)[1] == "reproduced"
    assert peers.verdict("demo-32", losses, 1000) is None


def test_recipes_train(tmp_path):
    program, rows = ROOT / "lab" / "studies" / "recipes.py", tmp_path / "rows.json"
    ranks.run(launch.as_main, 4, program, "--steps", 4, "--json", rows)
    found = json.loads(rows.read_text())
    assert len(found) == 4 * 4 and all(row["last"] > 0 for row in found)
    losses = {row["last"] for row in found if "optimizer" not in row["arm"]}
    assert len(losses) == 4 * 3, found  # each does something else; the last arm not yet, in so few steps
    own = [row for row in found if "compress" in row["arm"]]
    assert len(own) == 8 and all(row["bytes_of_host"] < row["dense_bytes_of_host"] for row in own), own


def tokens_loss_has_the_bits_of_processes(rank, world_size):
    from tokens_loss import Wire

    from tagc.collectives import Collectives

    counts, key = torch.tensor([[40, 50], [60, 33]]), "layer 0 dispatch"
    torch.manual_seed(4)
    rows, gradient = (torch.randn(183, 128).pow(3).bfloat16() for _ in range(2))
    own, came = rows.split(counts.sum(1).tolist())[rank], gradient.split(counts.sum(0).tolist())[rank]
    for formats in ("int8", "int8"), ("int8", "int4"), ("whole", "whole"):
        wire = Wire(*formats)
        with Collectives(forward=formats[0], backward=formats[1], timeout_s=60) as comm:
            exchange = comm.tokens(key)
            for step in range(2):
                x = own.clone().requires_grad_()
                y = exchange(x, counts[:, rank].tolist(), counts[rank].tolist())
                y.backward(came)
                moved = wire.move(rows, counts, key, False)
                back = wire.move(gradient, counts.T.contiguous(), key, True)
                assert y.equal(moved.split(counts.sum(0).tolist())[rank]), (formats, step)
                assert x.grad.equal(back.split(counts.sum(1).tolist())[rank]), (formats, step)


def test_tokens_loss_has_the_bits_of_processes():
    ranks.run_each([tokens_loss_has_the_bits_of_processes], 2)


def test_tokens_loss_computes_a_mixture_of_experts():
    """Token by token, with nothing rounded but to bf16."""
    from tokens_loss import Experts, Wire

    torch.manual_seed(5)
    layer = Experts(128, 4, 256, "layer 0")
    layer.wire = Wire("whole", "whole")
    x = torch.randn(8, 16, 128).bfloat16().float()
    weights, chosen = layer.router(x).softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    each = torch.stack(
        [torch.nn.functional.gelu(x @ up) @ down for up, down in zip(layer.up, layer.down)], -1
    ).bfloat16()
    exact = sum(
        weights[..., i, None] * each.gather(-1, chosen[..., i, None, None].expand(*x.shape, 1))[..., 0]
        for i in range(2)
    )
    assert (layer(x) - exact).abs().max() < 0.02 * exact.abs().max()


# ---- formats of Muon's matrices ----


FORMATS = [
    "blocks, 4 bits",
    "lines, 4 bits",
    "both, 4 bits",
    "turned, residual kept, 4 bits",
    "turned, 4 bits",
    "V in 4 bits by one QR, each 20, 4 bits",
    "V's change in 4 bits by one QR, each 20, 4 bits",
    "V in 4 bits, each 20, blocks of 96, 4 bits",
]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_of_muon_rounds_off_comes_later(name):
    """Nothing is lost, but for what is dropped with an old basis. Where they are turned, small directions are
    rounded finely."""
    import muon_formats

    format = muon_formats.ARMS[name].matrices
    own, draws = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    exchange = muon_formats.Exchange(format, own)
    sizes = 0.9 ** torch.arange(64)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=draws))[0] for n in (96, 64))
    signal = left[:, :64] * sizes @ right.mT
    given, came, errors = torch.zeros(96, 64), torch.zeros(96, 64), torch.zeros(64)
    for step in range(45):
        gradients = signal * (1 + 0.1 * torch.randn(1, 1, 3, 1, 1, generator=draws))
        mean = exchange(gradients)
        given, came = given + gradients.mean((0, 1, 2)), came + mean[0, 0]
        if step >= 25:
            errors += (left.mT[:64] @ (mean[0, 0] - gradients.mean((0, 1, 2))) @ right).square().sum(0)
        if format.basis:
            exchange.turn(mean, mean, mean)
    kept = exchange.turned_back(exchange.residual.mean(2, keepdim=True))[0, 0, 0]
    assert kept.abs().max() > 1e-4, "nothing was rounded"
    if format.kept == "turned":
        torch.testing.assert_close(came + kept, given, rtol=1e-3, atol=1e-3)
    large, small = errors[:8].mean(), errors[-16:].mean()
    # a basis in 4 bits lets a little of large directions into small ones
    assert (small < (0.02 if format.basis_bits == 16 else 0.05) * large) == bool(format.basis), (large, small)


def test_gaps_are_those_to_dense_of_the_seed():
    import muon_formats

    rows = [
        {"arm": arm, "seed": seed, "steps": 500, "loss": loss}
        for arm, seed, loss in (("dense", 1, 2.0), ("nudged", 1, 2.02), ("nudged", 2, 1.0), ("dense", 3, 1.0))
    ]
    assert muon_formats.gaps(rows, "nudged") == {1: pytest.approx(1.0)}
    assert "| nudged | 32.00 | +1.00 % (seeds 1) | +1.00 % |" in muon_formats.table(rows)
    bits = {name: muon_formats.bits_of_matrices(arm.matrices, 500) for name, arm in muon_formats.ARMS.items()}
    assert bits["blocks, 4 bits"] == 4.5
    # a twelfth is of 96 x 96 values, and the other bases are of as many values: 5 of them, and 7
    assert bits["turned, 4 bits"] == pytest.approx(4.5 + 5 * 16 / 500 * (1 + 1 + 1 + 1) / 12)
    n_bases = 24  # after 20, 40 and so on to 480 steps
    assert bits["V in 4 bits by one QR, each 20, 4 bits"] == pytest.approx(4.5 + n_bases * 4.5 / 500 * 4 / 12)
    assert bits["turned, doubling, 4 bits"] == pytest.approx(4.5 + 7 * 16 / 500 * (1 + 1 + 1 + 1) / 12)
