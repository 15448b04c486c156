"""advise(): what it chooses from given measurements, and that measuring leaves everything as it was."""

import itertools
import json
import random
import re
import time

import pytest

torch = pytest.importorskip("torch")
import launch
import plan_parts
import ranks
import torch.distributed as dist
from models import Even, batch_of, loss_of
from wrappers import present

from tagc import _library as lib
from tagc import _planner as planner
from tagc.torch.advise import advice, survey
from tagc.torch.advise import choice as choices
from tagc.torch.advise.shape import _shared_out

MEAN = 4_000_000


CODECS = {
    survey.codec_of(part)
    for options in (*survey.GRADIENTS, survey.LOCAL_OPTIONS)
    for dtype in survey.DTYPES
    for part in survey.parts_of(options, dtype)
}


def found_on(bytes_per_s, codec_s_per_elem=2e-9, latency_s=1e-4, gloo_share=1.0):
    """Measurements of two ranks on an ideal link: torch's bytes over its speed, and a codec."""
    seconds = {
        f"torch {what} {dtype}": {
            n: latency_s + n * size / 2 / gloo_share / bytes_per_s for n in (4096, MEAN)
        }
        for dtype, size in (("fp32", 4), ("bf16", 2))
        for what in ("reduce", "gather")
    }
    codec = dict.fromkeys(CODECS, codec_s_per_elem)
    codec |= {f"gather {wire}": codec_s_per_elem / 2 for wire in ("fp32", *survey.WIRES)}
    link = latency_s, bytes_per_s
    return {"seconds": seconds, "link": link, "codec": codec | {survey.AGAIN: 1e-10}, "spread": 1.0}


def shape_of(wrap="fsdp2", n_units=6, **others):
    n_gathers = [2] * n_units if wrap == "fsdp2" else [0] * n_units
    return survey.Shape(
        wrap, 2, [{"compressed": MEAN}] * n_units, n_gathers, all_reduce=wrap == "ddp", **others
    )


def choice(shape, found, step_s=None):
    rows = advice.forecast(shape, found, step_s)
    return advice.choose(rows), rows


@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
@pytest.mark.parametrize("step_s", [None, 1.0])
def test_fast_link_is_left_alone(wrap, step_s):
    chosen, _ = choice(shape_of(wrap), found_on(100e9), step_s)
    assert chosen["choice"] == "off" and chosen["options"] == {}
    # only a step's time shows that half of the exchange is next to nothing
    assert chosen["torch"] == {} or step_s is None
    assert chosen["reason"].startswith("leave ")


@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
def test_copies_of_a_device_count(wrap):
    """Out: the unit, back: the shard, or with DDP the unit; parameters the other way round. Torch's own ways
    have none."""
    found, shape = found_on(1e9), shape_of(wrap, n_units=3)
    before = {row["name"]: row for row in advice.forecast(shape, found)}
    for what, s_per_elem in (("copy out", 1e-9), ("copy back", 3e-9)):
        found["seconds"][what] = {n: n * s_per_elem for n in (4096, MEAN)}
    for row in advice.forecast(shape, found):
        extra_s = 3 * MEAN * (4e-9 if wrap == "ddp" else 2.5e-9) if row["choice"] == "compress" else 0
        gathers_s = 3 * 2 * MEAN * 3.5e-9 if row["options"].get("parameters") else 0
        assert row["gradients_s"] - before[row["name"]]["gradients_s"] == pytest.approx(extra_s, abs=1e-12)
        assert row["parameters_s"] - before[row["name"]]["parameters_s"] == pytest.approx(
            gathers_s, abs=1e-12
        )
    half = advice.forecast(shape_of(wrap, n_units=3, reduce="bf16", gather="bf16"), found)
    whole = advice.forecast(shape_of(wrap, n_units=3, reduce="bf16", gather="bf16"), found_on(1e9))
    extra_s = 3 * MEAN * (2e-9 if wrap == "ddp" else 1.25e-9)
    assert half[-1]["gradients_s"] - whole[-1]["gradients_s"] == pytest.approx(extra_s)
    link = advice.link_of(shape, found)
    assert link["copy_out_bytes_per_s"] == pytest.approx(4e9) and link[
        "copy_back_bytes_per_s"
    ] == pytest.approx(4e9 / 3)


def test_a_codec_on_the_device_needs_no_copies():
    """What stays on the device pays for no copy, and is chosen where it is faster by that; else the codec on
    the host is."""
    way = {"codec": "device"}
    found, shape = found_on(1e8), shape_of("ddp")
    for what in ("copy out", "copy back"):
        found["seconds"][what] = {n: n * 1e-8 for n in (4096, MEAN)}
    for options in survey.GRADIENTS[1:]:
        for part in survey.parts_of(options, "fp32"):
            found["codec"][survey.codec_of(part, True)] = found["codec"][survey.codec_of(part)]
    chosen, rows = choice(shape, found)
    by_name = {row["name"]: row for row in rows}
    for options in survey.GRADIENTS[1:]:
        plain, other = by_name[advice.name_of(options)], by_name[advice.name_of(options | way)]
        assert plain["gradients_s"] - other["gradients_s"] == pytest.approx(6 * MEAN * 2e-8)
        assert other["options"] == options | way
    assert chosen["choice"] == "compress" and way.items() <= chosen["options"].items()
    del found["seconds"]["copy out"], found["seconds"]["copy back"]
    chosen, _ = choice(shape, found)
    assert not way.items() <= chosen["options"].items()


@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
def test_slow_link_is_compressed(wrap):
    chosen, rows = choice(shape_of(wrap), found_on(30e6), step_s=0.3)  # 250 Mbit/s
    assert chosen["choice"] == "compress"
    assert chosen["reason"].startswith("compress")
    assert set(chosen["options"]) <= {"sparsity", "gentle", "values", "mild", "parameters"}
    assert chosen["options"].get("gentle", False) == (chosen["options"].get("sparsity", 0) > 0)
    if wrap == "fsdp2":  # gradients alone cannot win: parameters are two thirds of the bytes
        assert chosen["options"]["parameters"] == "delta4"
    fastest = min(row["step_s"] for row in rows)
    assert min(row["step_s"] for row in rows if row["options"] == chosen["options"]) <= 1.05 * fastest


def test_nothing_is_lost():
    """Gradients as they are go with bf16 parameters in fewer bits, but only where those are bf16 anyway."""
    name = "tagc, uncompressed, parameters {}"
    in_bf16, in_fp32 = (
        {row["name"]: row["exposed_s"] for row in choice(shape_of(gather=gather), found_on(30e6))[1]}
        for gather in ("bf16", "fp32")
    )
    assert in_bf16[name.format("lossless")] < in_bf16[name.format("bf16")]
    assert name.format("fp32") in in_fp32 and name.format("lossless") not in in_fp32


AS_IT_IS = {wrap: f"{wrap.upper()} in fp32, as it is" for wrap in ("fsdp2", "ddp", "fsdp1")}


def found_far(latency_s, bytes_per_s=12.5e6):
    """As found_on(); every call takes so long before its first byte."""
    return found_on(bytes_per_s, latency_s=latency_s)


@pytest.mark.parametrize("wrap", present(["fsdp2", "ddp", "fsdp1"]))
def test_small_units_are_joined(wrap):
    shape = survey.Shape(
        wrap,
        2,
        [{"compressed": 3000, "dense": 1000}] * 64,
        [0 if wrap == "ddp" else 2] * 64,
        all_reduce=wrap == "ddp",
    )
    bucket = advice.bucket_of(shape, found_far(1e-2), None, AS_IT_IS[wrap])
    assert (
        bucket["elems"] & (bucket["elems"] - 1) == 0
        and bucket["n_units"] < 16
        and bucket["comm_s"] < bucket["now_s"] / 4
    )
    assert (
        bucket["now_s"]
        == next(row for row in advice.forecast(shape, found_far(1e-2)) if row["name"] == AS_IT_IS[wrap])[
            "comm_s"
        ]
    )
    word = {
        "fsdp2": f"tagc.buckets(layers, {bucket['elems']})",
        "ddp": "bucket_cap_mb=1",
        "fsdp1": f"min_num_params={bucket['elems']}",
    }[wrap]
    assert word in bucket["how"]
    smaller = advice.bucket_of(shape, found_far(1e-3), None, AS_IT_IS[wrap])
    assert smaller["elems"] < bucket["elems"] and smaller["n_units"] > bucket["n_units"]


def test_units_that_are_large_enough_stay():
    assert advice.bucket_of(shape_of(), found_far(1e-3), None, AS_IT_IS["fsdp2"]) is None
    assert advice.bucket_of(shape_of(n_units=1), found_far(1.0), None, AS_IT_IS["fsdp2"]) is None
    small = survey.Shape("fsdp2", 2, [{"dense": 4000}] * 64, [2] * 64)
    assert advice.bucket_of(small, found_far(1e-2), 1e-9, AS_IT_IS["fsdp2"]) is not None
    # of a step, communication is next to nothing
    assert advice.bucket_of(small, found_far(1e-2), 1000.0, AS_IT_IS["fsdp2"]) is None
    assert advice.bucket_of(small, found_far(0.0), None, AS_IT_IS["fsdp2"]) is None


def joined_by_hand(sizes, n_gathers, elems):
    """Sizes of units, joined one after the other. What is left at the end of a kind joins the unit before."""
    found = []
    for times, same in itertools.groupby(zip(n_gathers, sizes), key=lambda one: one[0]):
        kind = [size for _, size in same]
        groups = [[]]
        while kind:
            if sum(groups[-1]) >= elems and sum(kind) >= elems:
                groups.append([])
            groups[-1].append(kind.pop(0))
        found += map(sum, groups)
    return found


def test_joined_units_keep_what_they_have():
    """The root module is gathered once, and keeps its own. What is sent stays, and each unit less saves
    messages."""
    chance, latency_s = random.Random(3), 1e-3
    for _ in range(40):
        sizes = [chance.randint(1, 20) * 1000 for _ in range(10)]
        n_gathers = [1, *[2] * 9]
        shape = survey.Shape("fsdp2", 2, [{"compressed": n} for n in sizes], n_gathers)
        found = found_on(1e15, codec_s_per_elem=1e-9, latency_s=latency_s)
        for elems in (1, 5000, 30_000, 10**6):
            row = advice.forecast(shape, found, joined=elems)[-1]
            expected = joined_by_hand(sizes, n_gathers, elems)
            assert row["n_units"] == len(expected)
            assert row["gradients_s"] == pytest.approx(
                3 * latency_s * len(expected) + sum(sizes) * 1e-9, rel=1e-3
            )


def test_the_mildest_of_equals():
    found = found_on(30e6)
    found["link"] = 0, 1e15  # messages take no time
    for whole in ("fp32, 0 % zero", "int8, 0 % zero"):
        found["codec"][whole] *= 10
    chosen, _ = choice(shape_of("ddp"), found)
    assert chosen["options"] == survey.GRADIENTS[2]


def test_a_tie_is_off():
    found = found_on(1e9)
    found["seconds"]["torch reduce bf16"] = torchs = found["seconds"]["torch reduce fp32"]
    found["link"] = 0, 1e15
    found["codec"] = dict.fromkeys(found["codec"], torchs[MEAN] / MEAN)
    assert choice(shape_of("ddp"), found)[0]["choice"] == "off"
    for faster, verdict in ((1.04, "makes no difference"), (1.06, "pays")):  # a little faster is not enough
        found["codec"] = dict.fromkeys(found["codec"], torchs[MEAN] / MEAN / faster)
        chosen = choice(shape_of("ddp"), found, step_s=1e-6)[0]
        assert chosen["verdict"] == verdict and chosen["choice"] == (
            "compress" if verdict == "pays" else "off"
        )


def test_it_judges_as_the_library_does():
    """choose() takes compression where tagc_verdict_of says that it pays, whatever is measured, and says its
    word."""
    chance, seen = random.Random(11), set()
    for _ in range(300):
        found = found_on(
            10 ** chance.uniform(7, 10),
            codec_s_per_elem=10 ** chance.uniform(-10, -7),
            gloo_share=chance.uniform(0.1, 1),
        )
        chosen, rows = choice(
            shape_of(chance.choice(["ddp", "fsdp2"])),
            found,
            chance.choice([None, 10 ** chance.uniform(-3, 2)]),
        )
        of = "comm_s" if rows[0]["step_s"] is None else "step_s"
        plain, packed = (
            [row[of] for row in rows if (row["choice"] == "compress") == is_packed]
            for is_packed in (False, True)
        )
        mildest = next(s for s in packed if s <= 1.05 * min(packed))
        verdict = lib.verdict(min(plain), mildest)
        assert chosen["verdict"] == verdict and (chosen["choice"] == "compress") == (verdict == "pays")
        assert ("it pays" if verdict == "pays" else f"tagc {verdict}") in chosen["reason"]
        seen.add(verdict)
    assert seen == {"pays", "makes no difference", "costs"}


def test_a_gain_within_the_spread_is_none():
    """Where communication alone is compared, it must gain or cost more than runs of a measurement differ by;
    where steps are, only what of them is communication differs between runs."""
    chance, seen = random.Random(12), set()

    def rows_of(plain_s, packed_s, compute_s=None):
        return [
            {"name": name, "choice": name, "options": {}, "torch": {}, "comm_s": comm_s, "own_s": 0.0,
             "exposed_s": comm_s, "step_s": None if compute_s is None else compute_s + comm_s}
            for name, comm_s in (("off", plain_s), ("compress", packed_s))
        ]  # fmt: skip

    for _ in range(300):
        plain_s, packed_s, spread = (chance.uniform(*ends) for ends in ((1, 2), (1, 2), (1, 1.6)))
        chosen = choices.choose(rows_of(plain_s, packed_s), spread=spread)
        ratio = max(plain_s, packed_s) / min(plain_s, packed_s)
        word = "pays" if packed_s < plain_s else "costs"
        assert chosen["verdict"] == (word if ratio > max(1.05, spread) else "makes no difference")
        assert (choices.UNSTEADY in chosen["reason"]) == (1.05 < ratio <= spread), (ratio, spread, chosen)
        assert chosen["choice"] == ("compress" if chosen["verdict"] == "pays" else "off")
        seen.add((chosen["verdict"], choices.UNSTEADY in chosen["reason"]))
    assert len(seen) == 4, seen
    for spread, verdict in ((1.9, "pays"), (2.1, "makes no difference")):  # 0.2 s are gained, 0.2 s stay
        assert choices.choose(rows_of(0.4, 0.2, 1.0), spread=spread)["verdict"] == verdict
    each = {"name": "each", "step_s": 1.4, "comm_s": 0.4}
    local = {"name": "local", "step_s": 1.2, "every": 9}
    for spread, verdict in ((1.9, "pays"), (2.1, "makes no difference")):
        says, reason = choices.choose_local(each, local, 1.0, spread)
        assert says == verdict and (choices.UNSTEADY in reason) == (verdict != "pays")


def test_the_call_is_that_of_the_options():
    """Whatever is chosen: the call that the text ends with has these options, and the optimizer where values
    are selected."""
    import tagc.torch as tagc

    given = []
    namespace = {
        "model": "model",
        "optimizer": "optimizer",
        "tagc": type("tagc", (), {
            "Options": tagc.Options,
            "compress": staticmethod(lambda *words, **options: given.append((words, options))),
        }),
    }  # fmt: skip
    found = found_on(30e6)
    for options in survey.GRADIENTS[1:]:
        found["codec"][survey.codec_of(survey.parts_of(options, "fp32")[0], True)] = 1e-9
    rows = [row for row in advice.forecast(shape_of(), found) if row["choice"] == "compress"]
    assert len(rows) > 20
    for row in rows:
        exec(choices.call_of(row["options"]), namespace)
        words, options = given.pop()
        assert options == tagc.grouped(row["options"])
        assert words == ("model", "optimizer")[: 2 if row["options"].get("sparsity") else 1]
        tagc.check_options(**options)
    options = choice(shape_of("ddp"), found_on(1e6), 1.0)[0]["options"]
    assert options and tagc_text(1.0).endswith(f"\n    {choices.call_of(options)}")


@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
def test_nothing_is_selected_where_nothing_is_compressed(wrap):
    """Of norms and biases alone. FSDP2's parameters may pay for themselves."""
    units = [{"dense": MEAN}] * 6
    shape = survey.Shape(wrap, 2, units, [2 * (wrap == "fsdp2")] * 6, all_reduce=wrap == "ddp")
    chosen, _ = choice(shape, found_on(30e6), step_s=0.3)
    assert not chosen["options"].get("sparsity"), chosen
    assert chosen["choice"] == ("compress" if wrap == "fsdp2" else "off")


def test_computing_hides_a_slow_link_under_ddp():
    found = found_on(100e6)  # 0.5 s of communication
    assert choice(shape_of("ddp"), found, step_s=2.0)[0]["choice"] == "off"
    assert choice(shape_of("ddp"), found, step_s=0.1)[0]["choice"] == "compress"
    # FSDP2 waits for it, but beside so much computing there is little to gain.
    assert choice(shape_of("fsdp2"), found, step_s=20.0)[0]["choice"] == "off"


def test_bf16_comes_first():
    found = found_on(100e6, codec_s_per_elem=40e-9)  # a codec as slow as the link
    chosen, _ = choice(shape_of("ddp"), found)
    assert (
        chosen["choice"] == "off"
        and chosen["torch"] == {"reduce": "bf16"}
        and "leave tagc off, use DDP in fp32 with gradients in bf16, tagc costs" in chosen["reason"]
    )
    # Where it is chosen already it is what "off" means.
    chosen, rows = choice(shape_of("ddp", reduce="bf16"), found)
    assert chosen["choice"] == "off" and not any(row["torch"] for row in rows)


def test_what_loses_nothing_where_that_is_enough():
    found = found_on(1e9, codec_s_per_elem=20e-9, gloo_share=0.1)  # gloo fills a tenth of the link
    for what in ("torch reduce bf16", "torch gather bf16"):
        found["seconds"][what] = dict(found["seconds"][what.replace("bf16", "fp32")])
    found["link"] = 1e-4, 1e10
    found["codec"]["fp32, 0 % zero"] = 1e-9
    chosen, _ = choice(shape_of("ddp"), found)
    assert (
        chosen["options"] == survey.GRADIENTS[0]
        and "compress" not in chosen["reason"].split(":")[0].split(", ")[0]
    )
    assert "loss" not in chosen["reason"]


def test_forecast_adds_up():
    found = found_on(100e6, latency_s=0.0, codec_s_per_elem=0.0)
    row = advice.forecast(shape_of(n_units=3), found, step_s=0.5)[0]
    # 3 units of 4 M values, half of which a rank sends: 8 MB each for gradients, twice that for parameters.
    assert row["gradients_s"] == pytest.approx(3 * 0.08)
    assert row["parameters_s"] == pytest.approx(6 * 0.08)
    assert row["step_s"] == pytest.approx(0.5 + 9 * 0.08)
    ddp = advice.forecast(shape_of("ddp", n_units=3), found, step_s=0.3)[0]
    assert ddp["step_s"] == pytest.approx(0.3 + 0.24 - 0.2)


def test_ranks_of_a_host_add_up_first():
    """Each encodes and sends its part of the sums. The rest is what was measured within a host: for DDP
    once more to share what came. Local steps, each rank by itself, have no such part."""
    found = found_on(1e8, latency_s=0.0, codec_s_per_elem=1e-9)
    found["seconds"]["sum within"] = {n: n * 1e-9 for n in (4096, MEAN)}
    found["seconds"]["share within"] = {n: n * 3e-9 for n in (4096, MEAN)}
    for is_ddp, within_s in ((False, 1e-9), (True, 4e-9)):
        shape = survey.Shape(
            "ddp" if is_ddp else "fsdp2", 4, [{"compressed": MEAN}], [0 if is_ddp else 2], all_reduce=is_ddp
        )
        row = advice.forecast(shape, found, per_host=2)[-1 if is_ddp else -4]
        assert row["name"] == "tagc, 98.75 % zero"
        sent_s = row["card_bytes"] / 2 / 1e8  # of one of two ranks, where all that a host sends is gradients
        gathers = 0 if is_ddp else 3 / 4 * 2 * 4 * MEAN  # bytes of torch's, twice
        expected_s = sent_s - gathers / 2 / 1e8 + MEAN * (0.5e-9 + within_s)
        assert row["gradients_s"] == pytest.approx(expected_s)
        alone = advice.forecast(shape, found)[-1 if is_ddp else -4]
        assert alone["gradients_s"] == pytest.approx((alone["card_bytes"] - gathers) / 1e8 + MEAN * 1e-9)


def test_passes_of_a_step():
    """Gradients are exchanged once, parameters gathered in each pass, of which deltas send those of one; and
    DDP hides its exchange behind the last pass alone."""
    found = found_on(100e6, latency_s=0.0, codec_s_per_elem=0.0)
    once, more = (
        {
            row["name"]: row
            for row in advice.forecast(shape_of(n_units=3, accumulate=n), found, step_s=0.5 * n)
        }
        for n in (1, 4)
    )
    assert once.keys() == more.keys()
    again_s = 3 * 2 * MEAN * 1e-10  # of delta4, in each further pass
    for name, row in more.items():
        assert row["gradients_s"] == pytest.approx(once[name]["gradients_s"])
        expected_s = (
            once[name]["parameters_s"] + 3 * again_s if "delta4" in name else 4 * once[name]["parameters_s"]
        )
        assert row["parameters_s"] == pytest.approx(expected_s), name
        assert row["step_s"] == pytest.approx(2.0 + row["comm_s"])
    ddp = advice.forecast(shape_of("ddp", n_units=3, accumulate=4), found, step_s=0.4)[0]
    assert ddp["step_s"] == pytest.approx(0.4 + 0.24 - 0.4 / 4 * 2 / 3)
    # what four passes compute hides the wait for one exchange
    verdicts = [
        choice(shape_of("ddp", accumulate=n), found_on(1e9), step_s=0.5 * n)[0]["verdict"] for n in (1, 64)
    ]
    assert verdicts[-1] == "makes no difference"


def test_buckets_and_shards():
    named = [(f"layers.{i}.weight", torch.Size((1024, 1024))) for i in range(14)]
    buckets = _shared_out(named, 25 << 20)
    assert [len(bucket) for bucket in buckets] == [7, 7]  # the seventh fills one
    assert buckets[0][0][0] == "layers.13.weight"


# ---- with ranks ----


def undisturbed(rank, world_size, wrap, compressed):
    import tagc.torch as tagc

    torch.manual_seed(0)
    model = Even(64)
    handle = None
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif wrap == "fsdp1":
        model = torch.distributed.fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if compressed:
        handle = tagc.compress(model, sparsity=0.9, verbose=False)
    loss_of(model, batch_of(rank)).backward()

    def local(tensor):
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()

    def state():
        residuals = {}
        for unit in handle.state.units.values() if handle else ():
            residuals |= unit.residuals_on_the_wire()
        return (
            [local(p) for p in model.parameters()],
            [local(p.grad) for p in model.parameters()],
            [residuals[name] for name in sorted(residuals)],
            [torch.get_rng_state()],
        )

    before, n_steps = state(), handle.n_steps if handle else 0
    copy = Even(64)
    torch.set_rng_state(before[3][0])
    found = tagc.advise(
        model, seconds=1, verbose=False, step=lambda: loss_of(copy, batch_of(rank)).backward(), every="auto"
    )
    for old, new in zip(before, state()):
        assert len(old) == len(new) and all(torch.equal(a, b) for a, b in zip(old, new))
    assert not compressed or before[2] and any(values.any() for values in before[2])
    assert not handle or handle.n_steps == n_steps
    loss_of(model, batch_of(rank, 1)).backward()  # and it goes on
    if handle:
        assert handle.n_steps == n_steps + 1
    return json.dumps(found)


@pytest.mark.parametrize("wrap", present(["fsdp2", "ddp", "fsdp1"]))
@pytest.mark.parametrize("compressed", [False, True])
def test_measuring(wrap, compressed):
    said = ranks.run(undisturbed, 2, wrap, compressed)
    assert said[0] == said[1]
    found = json.loads(said[0])
    assert found["choice"] in ("off", "compress") and found["wrap"] == wrap and found["world_size"] == 2
    assert found["compute_s"] > 0 and found["n_elems"] == sum(p.numel() for p in Even(64).parameters())
    assert found["n_units"] == (3 if wrap == "fsdp2" else 1)
    names = [row["name"] for row in found["rows"]]
    assert len(set(names)) == len(names) == {"fsdp2": 21, "ddp": 7, "fsdp1": 8}[wrap]
    for row in found["rows"]:
        assert row["gradients_s"] > 0 and (row["parameters_s"] > 0) == (wrap != "ddp")
        assert row["step_s"] >= found["compute_s"]
    assert found["link"]["bytes_per_s"] > 0 and found["reason"] in found["text"]
    local = found["local"]
    assert (
        local["every"] in (5, 10, 20, 30, 50, 100, 200, 300, 500)
        and local["reason"] in found["text"]
        and local["step_s"] >= found["compute_s"]
    )
    # every value in 4 bits with its scales; messages of small tensors have headers
    assert 4.5 < local["bits"] * local["every"] < 6


# ---- local steps: pure ----


def lived_through(compute_s, exchange_s, every, fragments, delay, steps):
    """Seconds of so many steps, one after the other, as LocalSteps does them."""
    now, flying = 0.0, []
    for step in range(1, steps + 1):
        now += compute_s
        if step % every in {(i + 1) * every // fragments % every for i in range(fragments)}:
            flying.append((step + delay, now + exchange_s))
        while flying and flying[0][0] <= step:
            now = max(now, flying.pop(0)[1])
    return now


@pytest.mark.parametrize(
    "every, fragments, delay, exchange_s",
    [(10, 1, 0, 3.0), (30, 3, 4, 2.5), (30, 3, 4, 7.0), (12, 2, 5, 5.0), (5, 5, 0, 0.1)],
)
def test_time_of_a_local_step(every, fragments, delay, exchange_s):
    steps = 100 * every
    lived = lived_through(1.0, exchange_s, every, fragments, delay, steps + delay) - delay
    assert planner.local_s(1.0, exchange_s, every, fragments, delay) == pytest.approx(lived / steps, rel=0.02)


@pytest.mark.parametrize(
    "bytes_per_s, step_s, better", [(1e5, 1.0, "local steps"), (1e9, 10.0, "every step"), (1e6, None, None)]
)
def test_advice_on_local_steps(bytes_per_s, step_s, better):
    """Seconds follow from the bits that it tells, a codec, and three messages of each of three parameters."""
    shape, found = shape_of("ddp"), found_on(bytes_per_s)
    rows = advice.forecast(shape, found, step_s)
    given = advice.choose(rows) | {"rows": rows, "compute_s": step_s}
    for every in "auto", 40:
        local = advice.local_of(shape, found, given, every, 3)
        assert local["choice"] == better and (every == "auto" or local["every"] == 40)
        bits = local["bits"] * local["every"]  # of every value in 4, with its scales
        assert 4.1 < bits < 4.6
        expected_s = 6 * MEAN * (bits / 8 / bytes_per_s + 2e-9) + 3 * 3e-4
        assert local["exchange_s"] == pytest.approx(expected_s, rel=1e-3)


def test_the_guide_says_what_the_planner_says_of_sites():
    """docs/guide/sites.md: four sites whose slowest line sends 110 Mbit/s, with 30 ms, a model of 124 M."""
    n, payload = 124e6, 1448 / 1538
    found = found_on(110e6 / 8 * payload, codec_s_per_elem=0, latency_s=0.03)
    shape = survey.Shape("ddp", 4, [{"compressed": n}], [0], all_reduce=True)
    asked = advice.Asked(shape, found)
    assert 1.0 + asked(options={"sparsity": 0.95, "gentle": True}).gradients_s == pytest.approx(2.5, rel=0.05)
    rows = advice.forecast(shape, found, 1.0)
    given = advice.choose(rows) | {"rows": rows, "compute_s": 1.0}
    assert advice.local_of(shape, found, given, 200, 1)["step_s"] == pytest.approx(1.04, abs=0.005)


def differing_runs(rank, world_size):
    """The spread is that of the rank whose runs differ most, by the median of what was measured."""
    from tagc.torch.advise.survey import Survey

    with Survey(dist.group.WORLD, shape_of("ddp"), 1, 60) as survey:
        slow = 3.0 if rank else 1.0
        survey.times = {
            "agree": {0: [1e-3]},
            "one": {8: [1.0, 2.0, 1.5], 16: [1.0, slow, 1.0]},
            "two": {8: [slow, 1.0, 9.0]},
        }
        found = survey.results()
    assert found["spread"] == 3.0
    assert found["seconds"]["one"] == {8: 1.5, 16: 1.0}
    assert found["seconds"]["two"] == {8: 3.0 if world_size > 1 else 1.0}


def test_differing_runs():
    ranks.run(differing_runs, 2)
    for spread, is_busy in (1.4, False), (1.6, True):
        given = tagc_text(spread)
        assert f"differ by {spread} times" in given
        assert ("the machine or the link is busy, measure again" in given) == is_busy
        assert "passes in a step" not in given
    assert "4 passes in a step, the last one exchanges gradients\n" in tagc_text(1.0, accumulate=4)


def tagc_text(spread, accumulate=1):
    shape, found = shape_of("ddp"), found_on(1e6)
    rows = advice.forecast(shape, found, 1.0)
    about = {
        "wrap": "ddp",
        "world_size": 2,
        "n_params": shape.n_params,
        "n_elems": shape.n_elems,
        "n_units": 6,
        "accumulate": accumulate,
    }
    link = {"bytes_per_s": 1e6, "torch_bytes_per_s": 1e6, "agree_s": 1e-4}
    more = {"rows": rows, "link": link, "ranks_per_host": 1, "where": "", "bucket": None, "local": None}
    return advice.text_of(advice.choose(rows) | about | more | {"spread": spread})


def default_dtype(rank, world_size):
    """What is measured is fp32 in memory, whatever torch makes by default."""
    import tagc.torch as tagc

    torch.set_default_dtype(torch.bfloat16)
    model = Even(256)
    torch.distributed.fsdp.fully_shard(model)
    return tagc.advise(model, seconds=1, verbose=False)["link"]["bytes_per_s"]


def compiled(rank, world_size):
    import tagc.torch as tagc

    model = torch.compile(torch.nn.parallel.DistributedDataParallel(Even(32)))
    return tagc.advise(model, seconds=1, verbose=False)["link"]["bytes_per_s"]


@pytest.mark.parametrize("what", [default_dtype, compiled])
def test_models_of_other_kinds(what):
    assert min(ranks.run(what, 2)) > 0


def in_two_levels(rank, world_size):
    """On hosts of two ranks: what a host sends, and where its ranks are."""
    import tagc.torch as tagc

    model = fully_sharded()
    flat, two, one = (
        tagc.advise(model, hosts=hosts, seconds=1, step_s=0.01, verbose=False) for hosts in (4, 2, 1)
    )
    assert (flat["ranks_per_host"], two["ranks_per_host"], one["ranks_per_host"]) == (1, 2, 4)
    line = (
        "2 hosts x 2 ranks: sums within hosts by gloo, compressed between hosts; all 4 ranks are on one host"
    )
    assert two["where"].startswith(line) and two["where"] in two["text"], two["text"]
    assert "sums within" not in flat["text"] and "all 4 ranks are on one host" in flat["text"]
    four = tagc.advise(model, hosts=2, seconds=1, step=lambda: time.sleep(0.01), accumulate=4, verbose=False)
    assert four["accumulate"] == 4 and "4 passes in a step" in four["text"]
    assert 0.04 <= four["compute_s"] < 4
    assert one["choice"] == "off" and "nothing passes its network card" in one["text"]
    assert [row["name"] for row in two["rows"]] == [row["name"] for row in flat["rows"]]
    assert "a host sends" in two["text"] and "a host sends" not in flat["text"]
    # a ring passes all but a W-th of the bytes through each card, and tagc all but an H-th
    n = sum(p.numel() for p in model.parameters()) // 4 * 4
    by_name = {row["name"]: row["card_bytes"] for row in two["rows"]}
    as_it_is = by_name["FSDP2 in fp32, as it is"]
    assert as_it_is in (pytest.approx(3 / 4 * 8 * n, rel=0.02), pytest.approx(3 / 4 * 12 * n, rel=0.02))
    assert by_name["FSDP2 in bf16"] == pytest.approx(as_it_is / 2)
    whole = by_name["tagc, every value as int8, parameters bf16"]
    deltas = by_name["tagc, every value as int8, parameters delta4"]
    assert deltas == pytest.approx(1 / 2 * (8.13 + 4.06) / 8 * n, rel=0.1)
    once, twice = (pytest.approx(1 / 2 * (16 * times - 4.06) / 8 * n, rel=0.1) for times in (1, 2))
    assert whole - deltas in (once, twice)
    flat_deltas = {row["name"]: row["card_bytes"] for row in flat["rows"]}[
        "tagc, every value as int8, parameters delta4"
    ]
    assert flat_deltas == pytest.approx(3 / 4 * (8.13 + 4.06) / 8 * n, rel=0.15)  # of each of four hosts
    with pytest.raises(tagc.Error, match="hosts is 3, must divide the 4 ranks"):
        tagc.advise(model, hosts=3)
    with pytest.raises(tagc.Error, match="hosts is 2, and between is given"):
        tagc.advise(model, hosts=2, between=dist.group.WORLD)
    with pytest.raises(tagc.Error, match="hosts is 2 on rank 0 and 4 on rank 1"):
        tagc.advise(model, hosts=2 if rank != 1 else 4)


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    return fully_shard(torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)))


def test_hosts_of_several_ranks():
    ranks.run(in_two_levels, 4)


def wrong(rank, world_size):
    import tagc.torch as tagc

    model = torch.nn.parallel.DistributedDataParallel(Even(32))
    said = []
    for arguments in (
        {"step_s": -1.0},
        {"seconds": "long"},
        {"step": 3},
        {"accumulate": 0},
        {"threads": 0},
        {"between": dist.group.WORLD},
        {"seconds": 1 + rank},
        {"step_s": 1.0 if rank else None},
    ):
        with pytest.raises(tagc.Error) as problem:
            tagc.advise(model, verbose=False, **arguments)
        said.append(str(problem.value))
    with pytest.raises(tagc.Error) as problem:
        tagc.advise(Even(32))
    said.append(str(problem.value))

    def breaks():
        if rank:
            raise ValueError("no data left")

    with pytest.raises(tagc.Error) as problem:
        tagc.advise(model, step=breaks, verbose=False)
    return [*said, str(problem.value)]


def test_errors_are_the_same_on_every_rank():
    said = ranks.run(wrong, 2)
    assert said[0] == said[1]
    for text, part in zip(
        said[0],
        [
            "step_s is -1.0",
            "seconds is 'long'",
            "step must be a function",
            "accumulate is 0, must be an integer of 1 to 65536",
            "threads is 0",
            "between is for fully_shard",
            "seconds is 1 on rank 0 and 2",
            "ranks do not agree: step_s",
            "model is a Even",
            "rank 1: no data left",
        ],
    ):
        assert part in text


def test_the_command_asks_the_planner(capfd):
    """It measures link and codec, and prints the plan of such a link."""
    ranks.run(launch.as_main, 2, "tagc", *"advise --params 10m --step-s 0.05 --experts 4".split())
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("no verdict: ")]
    head, answer = lines[:2]
    rate, codec_ns = re.fullmatch(
        r"2 ranks; a host sends (\d+) Mbit/s, an empty message takes \d+ us, "
        r"the codec ([\d.]+) ns per element",
        head,
    ).groups()
    assert float(rate) > 1 and 0.1 < float(codec_ns) < 1000
    assert re.search(r"bit/s: (compress|off)\. tagc, ", answer), answer
    assert re.search(r"bit/s: (compress|off)\. Collectives.tokens\(\) takes ", lines[-1]), lines[-1]


def test_the_command_passes_micro_steps_on():
    from tagc.commands import advise as command

    asked = command.parser().parse_args(["--params=350m", "--accumulate=4"])
    said = command._advice(asked, 2, 1, command.Link(1e-3, 1e8, 1.0), 1.0, "")
    same = ["--params=350m", "--hosts=2", "--latency=1000us", "--codec-ns=1", "--accumulate=4"]
    rate = f"--link={8e8 / command.PAYLOAD / 1e6:.6f}mbit"
    assert said.endswith(planner.plan([*same, rate]).text)


def test_the_command_counts_tokens_of_experts():
    """Over all ranks, as the plan does; off where the codec takes longer than the link."""
    from tagc.commands import advise as command

    asked = command.parser().parse_args(["--params=350m", "--experts=8", "--step-s=0.5"])
    same = command.parser().parse_args(["--params=350m", "--experts-per-token=2", "--tokens=2048"])
    assert (asked.experts_per_token, asked.tokens) == (same.experts_per_token, same.tokens)
    for codec_ns, bytes_per_s, choice in ((2.0, 1e7, "compress"), (50.0, 1e10, "off")):
        link = command.Link(1e-3, bytes_per_s, 1.0)
        said = command._of_tokens(asked, 4, 2, link, codec_ns)
        assert re.search(rf"bit/s: {choice}\. Collectives.tokens\(\) takes ", said), said
        layers, width = plan_parts.shape_of(350e6)
        forecast = plan_parts.ask_tokens(
            "int8",
            "int8",
            world_size=8,
            ranks_per_host=2,
            n_experts=8,
            n_active=2,
            n_tokens=2048,
            width=width,
            element_bytes=2,
            n_forward=2 * layers,
            n_backward=2 * layers,
            codec_s=(1e-9 * codec_ns,) * 2,
            latency_s=1e-3,
            bytes_per_s=bytes_per_s,
            compute_s=0.5,
        )
        takes = [choices.seconds_text(seconds) for seconds in (forecast.comm_s[1], forecast.comm_s[0])]
        assert f"takes {takes[0]} of a step, torch's own all-to-all {takes[1]}" in said, (takes, said)
        assert lib.verdict(*(0.5 + s for s in forecast.comm_s)) == (
            "pays" if choice == "compress" else "costs"
        )
    doubted = command._of_tokens(asked, 4, 2, command.Link(1e-3, 1e7, 3.0), 2.0)
    assert "no verdict: " in doubted


def test_the_command_gives_no_verdict_where_messages_differ_by_more():
    """A gain, a loss, and what makes no difference anyway."""
    from tagc.commands import advise as command

    asked = command.parser().parse_args(["--params=350m"])
    for bytes_per_s, codec_ns in ((1e8, 1.0), (5e9, 1.0), (1e12, 0.0)):
        link = command.Link(1e-4, bytes_per_s, 1.0)
        said = command._advice(asked, 2, 1, link, codec_ns, "")
        assert "no verdict" not in said
        (factor,) = re.findall(r" is ([\d.]+) times as fast as ", said)
        ratio = max(float(factor), 1 / float(factor))
        for spread in (0.9 * ratio, 1.1 * ratio):  # it is printed in two digits
            doubted = command._advice(asked, 2, 1, link._replace(spread=spread), codec_ns, "")
            assert doubted.endswith(said.split("\n", 1)[1])
            assert ("\nno verdict: " in doubted) == (ratio > 1.05 and spread > ratio), doubted


def test_the_rate_of_a_link(monkeypatch):
    """To 3 others, by 5 MB/s and 10 ms."""
    from types import SimpleNamespace

    sizes, clock = [], [0.0]

    def gather(name, handle, mine, n_bytes, into, n_into):
        sizes.append(n_bytes)
        clock[0] += 0.01 + 3 * n_bytes / 5e6

    monkeypatch.setattr(survey.lib, "call", gather)
    monkeypatch.setattr(survey, "share", lambda group, value: [value])
    monkeypatch.setattr(survey.time, "perf_counter", lambda: clock[0])
    latency_s, bytes_per_s, spread = survey.measure_link(SimpleNamespace(handle=None), None, 3)
    assert latency_s == pytest.approx(0.01, rel=1e-3) and bytes_per_s == pytest.approx(5e6, rel=1e-3)
    assert max(sizes) == 1 << 20  # 0.6 s
    assert spread == pytest.approx(1)
    took = iter([*6 * [0.1], 0.5, 0.4, 0.8])  # empty messages, then large ones
    monkeypatch.setattr(survey.lib, "call", lambda *_: clock.__setitem__(0, clock[0] + next(took)))
    assert survey.measure_link(SimpleNamespace(handle=None), None, 3)[2] == pytest.approx(2)


def test_a_measured_step_is_planned_with(capsys):
    """Its seconds take the place of what a GPU computes and of how many tokens."""
    words = ["--params=350m", "--hosts=2", "--link=1gbit", "--codec-ns=0", "--json=-"]
    plans = [
        json.loads(planner.plan([*words, "--compute-s=3.5", *more]).json)
        for more in ([], ["--tflops=1"], ["--tokens=64"])
    ]
    assert all(row["compute_s"] == pytest.approx(3.5, rel=1e-6) for plan in plans for row in plan["rows"][:2])
    assert plans[0]["rows"] == plans[1]["rows"]
