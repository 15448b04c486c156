"""The peers of lab/parity against what their papers promise: nothing is lost that error feedback
keeps, the codes are what they say, sizes are those of real bytes. And the rule by which arms are tuned."""

import copy
import dataclasses
import itertools
import json
import math
import pathlib
import re
import sys

import numpy
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "lab" / "parity"))

import arms
import corpus
import drawing
import ranks
import runner
import simulate
import tables
import train
from peers import Sent, blocks, clip, demo, local, onebit

W, LR = 2, 1e-2


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.randn(96, 130)), torch.nn.Parameter(torch.randn(7))
        self.c = torch.nn.Parameter(torch.randn(100, 64))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def net(seeded):
    torch.manual_seed(3)
    return Net()


def adamw(model, lr=LR, decay=0.0):
    return torch.optim.AdamW(
        model.parameters(), lr=lr, betas=onebit.BETAS, eps=onebit.EPS, weight_decay=decay
    )


def stream(model, seed=0, scale=1.0):
    """gradients(rank) of step after step, the same whenever it is asked with the same seed; magnitudes over
    six decades."""
    for step in itertools.count():

        def gradients(rank, _=None, step=step):
            g = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
            return [
                scale * torch.randn(p.shape, generator=g) * 10 ** (6 * torch.rand(p.shape, generator=g) - 3)
                for p in model.parameters()
            ]

        yield gradients


def mean_of(gradients):
    return [sum(parts) / W for parts in zip(*(gradients(rank) for rank in range(W)))]


# ---- blocks ----


@pytest.mark.parametrize("n_bits", [4, 8])
def test_blocks_err_by_half_a_level_at_most_and_say_their_size(n_bits):
    x = torch.randn(1000) * 10 ** (4 * torch.rand(1000) - 2)
    arrived = blocks.quantize(x, n_bits)
    levels = 2 ** (n_bits - 1) - 1
    for begin in range(0, 1000, blocks.BLOCK):
        own, theirs = x[begin : begin + blocks.BLOCK], arrived[begin : begin + blocks.BLOCK]
        step = own.abs().max() / levels
        assert (own - theirs).abs().max() <= step * (0.5 + 2**-7 * levels)  # bf16's scale moves the top level
        assert len(theirs.unique()) <= 2 * levels + 1
    assert blocks.n_bits_of(1000, n_bits) == 1000 * n_bits + 4 * 16
    assert not blocks.quantize(torch.zeros(5), n_bits).any()


@pytest.mark.parametrize("n_bits", [4, 8])
def test_blocks_lose_nothing_over_time(net, n_bits):
    peer = blocks.Blocks(net, W, adamw, n_bits=n_bits)
    due = [torch.zeros_like(p, dtype=torch.float64) for p in net.parameters()]
    came = [torch.zeros_like(d) for d in due]
    for gradients in itertools.islice(stream(net), 20):
        mean, sent = peer.exchange([gradients(rank) for rank in range(W)])
        for d, c, g, m in zip(due, came, mean_of(gradients), mean):
            d += g
            c += m
    for i, (d, c) in enumerate(zip(due, came)):
        kept = sum(errors[i] for errors in peer.state["rank"]) / W + peer.state["owner"][i]
        assert (d - c - kept).abs().max() < 1e-5 * d.abs().max()
        assert kept.abs().max() > 0
    n_elems = sum(p.numel() for p in net.parameters())
    n_scales = sum(math.ceil(p.numel() / 256) for p in net.parameters())
    assert sent.bits(W) == n_bits * n_elems + 16 * n_scales  # two legs, half of each


# ---- 1-bit Adam ----


def test_sign_keeps_signs_and_the_mean_magnitude():
    x = torch.tensor([3.0, -1.0, 0.0, -4.0])
    assert onebit.sign(x).tolist() == [2.0, -2.0, 2.0, -2.0]
    assert onebit.n_bits_of([x, x.view(2, 2)]) == 2 * (4 + 32)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_onebit_adam_warms_up_as_adamw_does(net, decay):
    other = Net()
    other.load_state_dict(net.state_dict())
    optimizer = adamw(other, decay=decay)
    peer = onebit.OneBitAdam(net, W, lambda model: adamw(model, decay=decay), warmup=100)
    for step, gradients in enumerate(itertools.islice(stream(net), 8)):
        assert peer.step(gradients, LR, step, 1e9).bits(W) == 32 * sum(p.numel() for p in net.parameters())
        for p, g in zip(other.parameters(), mean_of(gradients)):
            p.grad = g
        optimizer.step()
    for p, q in zip(net.parameters(), other.parameters()):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


def test_onebit_adam_freezes_the_second_moment_and_loses_no_momentum(net):
    peer = onebit.OneBitAdam(net, W, adamw, warmup=2)
    source = stream(net)
    for step in range(2):
        peer.step(next(source), LR, step, 1e9)
    frozen = [v.clone() for v in peer.state["v"]]
    for step in range(2, 12):
        gradients = next(source)
        m, errors, owner = (
            [t.clone() for t in peer.state["m"]],
            [[t.clone() for t in own] for own in peer.state["rank"]],
            [t.clone() for t in peer.state["owner"]],
        )
        sent = peer.step(gradients, LR, step, 1e9)
        for i in range(len(m)):
            due = (
                torch.lerp(m[i], mean_of(gradients)[i], 1 - onebit.BETAS[0])
                + sum(own[i] for own in errors) / W
                + owner[i]
            )
            now = peer.state["m"][i] + sum(own[i] for own in peer.state["rank"]) / W + peer.state["owner"][i]
            assert torch.allclose(due, now, rtol=1e-4, atol=1e-4 * float(due.abs().max()))
            assert len(peer.state["m"][i].unique()) == 2
    assert all(torch.equal(a, b) for a, b in zip(frozen, peer.state["v"]))
    assert sent.bits(W) == onebit.n_bits_of(list(net.parameters()))


def test_zero_one_adam_renews_the_second_moment_ever_more_rarely(net):
    peer = onebit.OneBitAdam(net, W, adamw, warmup=10, refresh=1.3)
    dense = [
        step
        for step, gradients in zip(range(60), stream(net))
        if peer.step(gradients, LR, step, 1.0).bits(W) > 100000
    ]
    later = [step for step in dense if step >= 10]
    assert dense[:10] == list(range(10)) and 3 <= len(later) <= 8
    gaps = [b - a for a, b in zip(later, later[1:])]
    assert gaps == sorted(gaps) and gaps[-1] > gaps[0]


# ---- DeMo ----


@pytest.mark.parametrize("n", [1, 2, 48, 64])
def test_dct_is_orthonormal_and_scipys_formula(n):
    matrix = demo.dct(n).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(n, dtype=torch.float64), atol=1e-5)
    x = torch.randn(n, dtype=torch.float64)
    for k in (0, n // 2, n - 1):  # the sum itself
        by_hand = sum(
            x[i].item() * math.cos(math.pi * (2 * i + 1) * k / (2 * n)) for i in range(n)
        ) * math.sqrt((1 if k == 0 else 2) / n)
        assert abs((matrix @ x)[k].item() - by_hand) < 1e-4


@pytest.mark.parametrize("shape", [(7,), (96,), (128, 192), (67, 50), (1, 64)])
def test_chunks_come_back(shape):
    x = torch.randn(shape)
    coefficients = demo.encode(x)
    assert coefficients.shape[1] <= 64 * 64 and coefficients.numel() == x.numel()
    assert torch.allclose(demo.decode(coefficients, shape), x, atol=1e-5)
    assert abs(coefficients.norm() - x.norm()) < 1e-3 * x.norm()


def test_demo_takes_out_what_it_sends(net):
    """Momentum before, plus the gradient, is what was sent and what is left, on every rank; a step is a
    sign."""
    k = 4
    peer = demo.DeMo(net, W, adamw, k=k)
    for step, gradients in zip(range(3), stream(net)):
        before = [[m.clone() for m in own] for own in peer.state["momentum"]]
        weights = [p.detach().clone() for p in net.parameters()]
        sent = peer.step(gradients, LR, step, 1.0)
        n_coefficients = 0
        for i, (p, old) in enumerate(zip(net.parameters(), weights)):
            for rank in range(W):
                full = demo.DECAY * before[rank][i] + LR * gradients(rank)[i]
                difference = demo.encode(full - peer.state["momentum"][rank][i])
                largest = full.abs().max() + demo.encode(full).abs().max()
                assert ((difference.abs() > 1e-5 * largest).sum(1) <= k).all()
                left = demo.encode(peer.state["momentum"][rank][i])
                came, all_of = difference.abs().amax(1), demo.encode(full).abs().amax(1)
                assert (came >= 0.99 * all_of - 1e-5 * largest).all()  # the largest one left
                assert left.norm() <= demo.encode(full).norm()
            n_coefficients += min(k, demo.encode(p.detach()).shape[1]) * demo.encode(p.detach()).shape[0]
            moved = (p - old).abs() / LR
            assert ((moved - 1).abs() < 1e-3).float().mean() > 0.9
        assert sent.shared == 0 and 17 * n_coefficients <= sent.own <= 28 * n_coefficients


def test_demo_sends_everything_when_asked_to(net):
    """With every coefficient the momentum is empty, up to bf16, and the step is the sign of the mean
    gradient."""
    peer = demo.DeMo(net, 1, adamw, k=4096)
    gradients = next(stream(net))
    old = [p.detach().clone() for p in net.parameters()]
    peer.step(gradients, LR, 0, 1.0)
    for p, q, g in zip(net.parameters(), old, gradients(0)):
        large = g.abs() > 0.05 * g.abs().max()
        assert torch.equal((q - p).sign()[large], g.sign()[large])
    assert all(m.norm() < 0.01 * LR * g.norm() for m, g in zip(peer.state["momentum"][0], gradients(0)))


# ---- local steps ----


def test_sparsify_sends_the_largest_in_two_bits():
    x = torch.randn(10000)
    arrived, n_bits = local.sparsify(x)
    for begin in range(0, 10000, local.CHUNK):
        own, theirs = x[begin : begin + local.CHUNK], arrived[begin : begin + local.CHUNK]
        k = math.ceil(64 * len(own) / 4096)
        assert (theirs != 0).sum() == k
        assert own[theirs != 0].abs().min() >= own[theirs == 0].abs().max()
        assert len(theirs.unique()) <= 5 and (theirs * own >= 0).all()
        assert abs(theirs.sum() - own[theirs != 0].sum()) < 0.01 * k * own.abs().max()
    ks = [64, 64, math.ceil(64 * 1808 / 4096)]
    assert n_bits == sum(ks) * 14 + 3 * 32
    assert not local.sparsify(torch.zeros(10))[0].any()


def test_diloco_with_an_outer_step_of_one_averages_parameters(net):
    peer = local.Local(net, W, adamw, every=3, outer_lr=1.0, momentum=0.0)
    single = [Net() for _ in range(W)]
    for one in single:
        one.load_state_dict(net.state_dict())
    optimizers = [adamw(one) for one in single]
    for step, gradients in zip(range(3), stream(net)):
        before = [p.detach().clone() for p in net.parameters()]
        sent = peer.step(gradients, LR, step, 1.0)
        for rank, (one, optimizer) in enumerate(zip(single, optimizers)):
            for p, g in zip(one.parameters(), gradients(rank)):
                p.grad = g
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
        if step < 2:
            assert sent.bits(W) == 0 and all(torch.equal(a, p) for a, p in zip(before, net.parameters()))
    assert sent.bits(W) == 32 * sum(p.numel() for p in net.parameters())
    for p, *own in zip(net.parameters(), *(one.parameters() for one in single)):
        assert torch.allclose(p, sum(own) / W, atol=1e-6)
    assert all(
        torch.equal(p, q) for replica in peer.replicas for p, q in zip(net.parameters(), replica.parameters())
    )


def test_diloco_outer_step_is_torchs_nesterov(net):
    peer = local.Local(
        net, 1, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), every=1, outer_lr=0.7, momentum=0.9
    )
    other = Net()
    other.load_state_dict(net.state_dict())
    outer = torch.optim.SGD(other.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step, gradients in zip(range(4), stream(net)):
        peer.step(gradients, 0.1, step, 1e9)
        for p, g in zip(other.parameters(), gradients(0)):
            p.grad = 0.1 * g  # what one step of SGD at rate 0.1 moves
        outer.step()
    for p, q in zip(net.parameters(), other.parameters()):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-4)


def test_sparseloco_feeds_back_what_it_did_not_send(net):
    peer = local.Local(net, W, adamw, every=1, sparse=True)
    source = stream(net)
    peer.step(next(source), LR, 0, 1.0)
    errors = [[e.clone() for e in own] for own in peer.state["errors"]]
    old = [p.detach().clone() for p in net.parameters()]
    replicas = [[p.detach().clone() for p in replica.parameters()] for replica in peer.replicas]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in peer.optimizers]
    gradients = next(source)
    ahead = [Net() for _ in range(W)]
    for rank, one in enumerate(ahead):
        with torch.no_grad():
            for p, value in zip(one.parameters(), replicas[rank]):
                p.copy_(value)
        optimizer = adamw(one)
        optimizer.load_state_dict(states[rank])
        for p, g in zip(one.parameters(), gradients(rank)):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        optimizer.step()
    peer.step(gradients, LR, 1, 1.0)
    for i, p in enumerate(net.parameters()):
        due = (
            sum(0.95 * errors[rank][i] + old[i] - list(ahead[rank].parameters())[i] for rank in range(W)) / W
        )
        left = sum(own[i] for own in peer.state["errors"]) / W
        assert torch.allclose(due, (old[i] - p) + left, atol=1e-5)


# ---- counting, clipping, tuning, tables, text ----


def test_bits_of_a_rank_grow_with_ranks_as_they_must():
    assert Sent(shared=64).bits(2) == 32 and Sent(shared=64).bits(64) == 63
    assert Sent(own=10).bits(2) == 10 and Sent(own=10).bits(64) == 630


def test_clip_is_torchs():
    parameters = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(2, 3))]
    for norm in (0.1, 1e6):
        own = [torch.randn(p.shape) for p in parameters]
        for p, g in zip(parameters, own):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(parameters, norm)
        assert all(torch.allclose(p.grad, g) for p, g in zip(parameters, clip(own, norm)))


def fake(arm, rate, seed, loss, setting, bits=1.0):
    points = [
        {
            "step": step,
            "loss": loss + 1 - step / setting.steps,
            "bits": bits * step,
            "latencies": 2 * step,
            "step_bits": bits,
        }
        for step in range(setting.eval_every, setting.steps + 1, setting.eval_every)
    ]
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "loss": loss,
        "evals": points,
        "is_whole": True,
        "n_params": 1000,
        "steps": setting.steps,
    }


def test_every_arm_is_tuned_until_no_neighbour_is_better():
    """Losses whose best rate stands at either end and in between; the runs asked for must find it, and then
    the seeds."""
    setting = arms.SETTINGS["tiny"]
    for best in setting.rates:
        runs = []
        for _ in range(30):
            missing = runner.wanted(setting, runs, ["dense"])
            if not missing:
                break
            arm, rate, seed = missing[0]
            assert (rate, seed) not in [(run["rate"], run["seed"]) for run in runs]
            loss = abs(math.log2(rate / best)) + 3
            # above, it diverges
            runs.append(fake(arm, rate, seed, loss if rate <= best else math.nan, setting))
        assert not missing and runner.best_rate(setting, runs) == (best, True)
        assert runner.chosen_rate(setting, runs) == best
        whole = [
            rate
            for rate in setting.rates
            if sorted(run["seed"] for run in runs if run["rate"] == rate) == [1, 2, 3]
        ]
        assert (
            whole == sorted(runner.finalists(setting, runs))
            and best in whole
            and len(whole) == (1 if best == setting.rates[0] else 2)
        )


def test_a_rate_that_was_best_for_one_seed_only_is_not_chosen():
    setting = arms.SETTINGS["tiny"]
    runs = [
        fake("dense", rate, 1, loss, setting)
        for rate, loss in ((1e-3, 4.5), (2e-3, 4.1), (4e-3, 4.0), (8e-3, 4.2))
    ]
    assert runner.finalists(setting, runs) == [4e-3, 2e-3] and runner.chosen_rate(setting, runs) == 4e-3
    assert set(runner.wanted(setting, runs, ["dense"])) == {
        ("dense", rate, seed) for rate in (2e-3, 4e-3) for seed in (2, 3)
    }
    runs += [fake("dense", 4e-3, seed, 4.3, setting) for seed in (2, 3)] + [
        fake("dense", 2e-3, 2, 4.1, setting)
    ]
    assert runner.chosen_rate(setting, runs) == 4e-3  # the third seed of the other rate is missing
    runs += [fake("dense", 2e-3, 3, 4.1, setting)]
    assert runner.chosen_rate(setting, runs) == 2e-3 and not runner.wanted(setting, runs, ["dense"])


def found_of(runs, setting):
    text = {
        "packages": [{"name": "a", "version": "1", "n_chars": 9, "n_chars_kept": 8}],
        "repeated_windows": 0.1,
    }
    fields = {name: getattr(setting, name) for name in setting.__dataclass_fields__}
    return {"setting": fields, "runs": runs, "command": ["x"], "torch": "0", "corpus": text}


def row_of(text, arm):
    return next(line for line in text.splitlines() if line.startswith(f"| `{arm}`"))


def test_the_table_holds_every_arm_against_the_best_dense_one_seed_by_seed():
    setting, runs = arms.SETTINGS["tiny"], []
    for arm, loss, bits in (
        ("dense", 4.0, 32.0),
        ("dense-b1=0", 3.9, 32.0),
        ("bf16", 4.1, 16.0),
        ("tagc", 3.9 * 1.01, 1.0),
    ):
        for seed, shift in ((1, 0.0), (2, 0.5), (3, 1.0)):
            runs.append(fake(arm, 2e-3, seed, loss / 3.9 * (3.9 + shift), setting, bits))
        runs += [fake(arm, rate, 1, loss + 1, setting, bits) for rate in (1e-3, 4e-3)]
    for run in runs:
        if run["arm"] == "tagc":
            # much at the beginning, then 0.6 of gradients per direction, and 0.1 each for agreements
            for point in run["evals"]:
                point["gradient_bits"], point["control_bits"] = (
                    100 + 0.7 * point["step"],
                    30 + 0.1 * point["step"],
                )
    text = tables.markdown(found_of(runs, setting))
    assert "+1.00 (+1.00 to +1.00) %" in row_of(text, "tagc") and "Unfinished" not in text
    assert (
        row_of(text, "tagc").split("|")[6].strip() == "0.6"
        and row_of(text, "bf16").split("|")[6].strip() == ""
    )
    assert "above `dense-b1=0`" in text and "the baseline" in row_of(text, "dense-b1=0")
    link = next(line for line in text.splitlines() if line.startswith("| `bf16` |"))
    # 100 Mbit/s: 32 bits x 124 M are 39.68 s beside 0.25 s of computing
    speed = (0.25 + 39.68) / (0.25 + 19.84)
    assert 0.8 * speed < float(link.split("|")[3]) < speed  # its loss is 0.1 higher


def test_another_machine_goes_on_and_the_table_says_who_ran_what(tmp_path):
    setting = arms.SETTINGS["tiny"]
    old = [fake("dense", 4e-3, 1, 5.0, setting), fake("dense", 2e-3, 1, 4.0, setting) | {"cpu": "X, AVX2",
        "commit": "abc"},
           fake("bf16", 4e-3, 1, 5.0, setting) | {"is_whole": False}]  # fmt: skip
    own = fake("dense", 2e-3, 1, 3.0, setting) | {"cpu": "Y, AVX-512", "commit": "def"}
    runner.path_of(tmp_path, "dense", 2e-3, 1).write_text(json.dumps(own))
    kept = json.loads(json.dumps([runner.small(run) for run in old]))
    runner.take_over(tmp_path, found_of(kept, setting))
    runs = sorted(runner.read(tmp_path, is_whole=False), key=lambda run: run["rate"])
    # of which the result has less
    lasts = [
        {name: point[name] for name in point if name not in runner.LAST} for point in old[0]["evals"][:-2]
    ]
    # its own run stays, what was unfinished begins anew
    assert runs == [own, old[0] | {"evals": lasts + old[0]["evals"][-2:]}]
    text = tables.markdown(found_of(runs + [old[1] | {"arm": "tagc"}], setting))
    assert "Before runs noted their processor, runs: 1 of `dense`." in text
    assert (
        "Y, AVX-512, commit def, runs: 1 of `dense`." in text
        and "X, AVX2, commit abc, runs: 1 of `tagc`." in text
    )
    assert set(runner.origin()) == {"commit", "cpu"}


def test_until_all_arms_are_tuned_the_table_shows_one_rate():
    setting = arms.SETTINGS["tiny"]
    runs = [fake("dense", 4e-3, 1, 5.0, setting), fake("dense", 2e-3, 1, 4.0, setting), fake("tagc", 4e-3, 1,
        5.1, setting),
            {**fake("demo-32", 4e-3, 1, 5.1, setting), "is_whole": False}]  # fmt: skip
    text = tables.markdown(found_of(runs, setting))
    assert "+2.00 %" in row_of(text, "tagc") and "5.0000" in row_of(text, "dense") and "Unfinished" in text
    assert "| `dense` | 4.0000 | 5.0000 |" in text and "| `tagc` |  | 5.1000 |" in text
    assert "unfinished" in row_of(text, "demo-32") and "`onebit`" in text.split("Not run yet")[1]


def test_curves_are_read_between_evaluations():
    points = [(0, 7.0), (10, 5.0), (20, 5.0), (30, 4.0)]
    assert simulate.at(points, 5) == 6.0 and simulate.at(points, 25) == 4.5 and simulate.at(points, 99) == 4.0
    assert (
        simulate.reaches(points, 6.0) == 5
        and simulate.reaches(points, 4.5) == 25
        and simulate.reaches(points, 3.9) is None
    )
    assert simulate.seconds(10, 320, 20, 1e9) == pytest.approx(10 * 0.25 + 20e-4 + 320 * 124e6 / 1e9)


def test_repeats_are_counted_as_by_hand():
    rng = numpy.random.default_rng(5)
    fresh = rng.integers(0, 256, 200_000, dtype=numpy.uint8).tobytes()
    text = fresh + fresh[50_000:150_000] + fresh[60_000:70_000]
    repeats = corpus._Repeats()
    repeats.add(text)
    windows = [text[i : i + 64] for i in range(len(text) - 64)]
    assert repeats.share() == pytest.approx(1 - len(set(windows)) / len(windows), abs=0.02)


def test_paragraphs_count_once():
    seen = set()
    long = "a paragraph that is long enough to be dropped when it comes again"
    assert (
        corpus._unseen(f"Head\n\n{long}\n\n{long.replace(' ', '  ')}\n\nHead", seen)
        == f"Head\n\n{long}\n\nHead"
    )
    assert corpus._unseen(f"{long}\n\nother", seen) == "other"


def test_documents_are_english_text_of_the_endings_asked_for(tmp_path, monkeypatch):
    texts = {f"{i}.txt": f"The text of document {i}, which is longer than most. " * 20 for i in range(40)}
    texts |= {"again.md": texts["0.txt"], "page.html": "<p>" + texts["1.txt"], "changelog.txt": "x" * 999}
    texts |= {"short.txt": "Too short.", "de/a.txt": texts["2.txt"], "greek.txt": "αβγδ " * 200}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(
        corpus, "_unpacked", lambda cache, name: (tmp_path, "1.2") if name == "a" else (None, None)
    )
    found = list(corpus.documents(tmp_path, ["missing", "a"], set(), corpus.PLAIN, one_in=4))
    assert len(found) == 41 and {row[:2] for row in found} == {("a", "1.2")}
    assert [kept for *_, kept in found].count("") == 1  # of 0.txt and again.md, the second
    assert 4 <= sum(is_held_out for *_, is_held_out, _ in found) <= 18


STORED = pathlib.Path(__file__).parents[1] / "results" / "parity"


@pytest.mark.parametrize("name", ["3m", "tiny-long", "tiny-no-bias", "tiny-untied"])
def test_a_picture_is_what_is_stored(name, tmp_path):
    pytest.importorskip("altair")
    kept = json.loads((STORED / f"{name}.json").read_text())
    drawing.draw(kept | {"runs": [runner.whole(run) for run in kept["runs"]]}, tmp_path / name)
    words = [
        re.findall(r">([^<>]+)</text>", (folder / f"{name}.svg").read_text()) for folder in (tmp_path, STORED)
    ]
    assert words[0] == words[1] and set(words[0]) & set(drawing.NAMES.values())


def test_every_arm_can_be_made():
    names = [arm.name for arm in arms.ALL]
    assert len(set(names)) == len(names) and sum(arm.is_baseline for arm in arms.ALL) == 5
    assert all(
        set(setting.arms) <= set(names) and setting.first_rate in setting.rates
        for setting in arms.SETTINGS.values()
    )
    import tagc.torch as tagc

    for arm in arms.ALL:
        if "tagc" in arm.hook:
            tagc.check_options(**tagc.grouped(arm.hook["tagc"]))


# ---- a run, interrupted and resumed ----

SHORT = dataclasses.replace(
    arms.SETTINGS["tiny"], n_layer=1, n_embd=32, n_head=2, n_positions=8, n_vocabulary=256, batch_size=2,
    steps=9, warmup=2, eval_every=3,
    eval_tokens=256, final_tokens=256, save_every=3,
)  # fmt: skip


def losses_of(make, folder, is_first=True, stop=None):
    """Of a run: [(step, loss, bits)] of its evaluations, and the last loss. stop: it breaks off in that step,
    once, and begins anew."""

    class Interrupted(Exception):
        pass

    path, trainer = pathlib.Path(folder) / f"stop-{stop}.json", make()
    if stop is not None:
        step = trainer.step
        trainer.step = lambda at, rate: step(at, rate) if at < stop else (_ for _ in ()).throw(Interrupted)
        with pytest.raises(Interrupted):
            train._train(trainer, SHORT, path, is_first)
        getattr(trainer, "close", lambda: None)()
        trainer = make()
    train._train(trainer, SHORT, path, is_first)
    getattr(trainer, "close", lambda: None)()
    found = json.loads(path.read_text()) if is_first else None
    assert not list(pathlib.Path(folder).glob(f"*.rank{trainer.rank}.pt"))
    return found and (
        [(point["step"], point["loss"], point["bits"]) for point in found["evals"]],
        found["loss"],
    )


def tokens_in(folder):
    rng = numpy.random.default_rng(1)
    for kind in ("train", "val"):
        (rng.zipf(1.5, 5000) % 256).astype(numpy.uint16).tofile(folder / f"{kind}-256.bin")


@pytest.mark.parametrize("name", [arm.name for arm in arms.ALL if arm.kind == "simulated"])
def test_a_simulated_run_goes_on_as_if_nothing_had_been(name, tmp_path):
    tokens_in(tmp_path)
    arm = dataclasses.replace(
        arms.BY_NAME[name], options=arms.BY_NAME[name].options | ({"every": 2} if "loco" in name else {})
    )

    def make():
        return train._Simulated(SHORT, arm, 4e-3, 1, tmp_path, 0)

    whole = losses_of(make, tmp_path)
    assert losses_of(make, tmp_path, stop=5) == whole
    assert [point[0] for point in whole[0]] == [3, 6, 9] and whole[0][0][1] > whole[1]
    assert all(a < b for a, b in itertools.pairwise(point[2] for point in whole[0]))


GLOO = {
    "dense": 32,
    "bf16": 16,
    "tagc-int2": 10,
    "tagc-all-4": 16,
    "local-4": 6,
}  # bits of a parameter at most; so small a model has many biases


def gloo_runs(rank, world_size, folder):
    found = {}
    for name in GLOO:
        arm = arms.BY_NAME[name]
        if "local" in arm.hook:
            arm = dataclasses.replace(arm, hook={"local": arm.hook["local"] | {"every": 3}})

        def make(arm=arm):
            return train._Gloo(SHORT, arm, 4e-3, 1, folder, rank)

        found[name] = losses_of(make, folder, rank == 0), losses_of(make, folder, rank == 0, stop=5)
    return found


@pytest.mark.slow
def test_a_gloo_run_goes_on_as_if_nothing_had_been(tmp_path):
    tokens_in(tmp_path)
    for name, (whole, resumed) in ranks.run(gloo_runs, 2, str(tmp_path))[0].items():
        # DDP's buckets and the deltas of parameters begin anew, and with them where blocks of values begin
        tolerance = 1e-6 if "tagc" not in name else 1e-2
        for a, b in zip(whole[0], resumed[0]):
            assert a[0] == b[0] and b[1] == pytest.approx(a[1], rel=tolerance), name
        assert resumed[1] == pytest.approx(whole[1], rel=tolerance) and whole[1] < whole[0][0][1], name
        assert 0.3 * GLOO[name] < whole[0][-1][2] / 9 <= GLOO[name], name
