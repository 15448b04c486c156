"""python -m tagc: what a user who has only run pip finds."""

import ctypes
import ctypes.util
import json
import pathlib
import re
import unittest.mock

import plan_parts
import pytest
import torch

from tagc import _library as lib
from tagc.commands import info, main

ROOT = pathlib.Path(__file__).resolve().parents[2]


def tagc(capsys, code, *words):
    """Returns what the command prints."""
    assert main.main([str(word) for word in words]) == code
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def planned(capsys, *words):
    return json.loads(tagc(capsys, 0, "plan", "--json", "-", *words))


def test_mistakes_are_answered_with_what_was_meant(capsys):
    assert 'did you mean "plan"?' in tagc(capsys, 2, "paln")
    assert 'did you mean "version"?' in tagc(capsys, 2, "verison")
    assert "did you mean" not in tagc(capsys, 2, "xyzzy")
    assert "allowed: run, plan, advise, data, info, version" in tagc(capsys, 2, "xyzzy")
    assert "unknown option --parms; did you mean --params?" in tagc(capsys, 2, "plan", "--parms", "1b")
    assert "did you mean --gpus-per-host?" in tagc(capsys, 2, "plan", "--gpu-per-hosts=3")
    for words, text in (
        (("--link", "10gbit,x"), '"10gbit,x", allowed: rates with kbit, mbit, gbit or tbit'),
        (("--link", "10gbit,"), '"10gbit,", allowed: rates with kbit'),
        (("--link", "0gbit"), '"0gbit", allowed: rates with kbit'),
        (("--link", ""), '--link is "", allowed: rates with kbit'),
        (("--link", "0x10gbit"), '"0x10gbit", allowed: rates with kbit'),
        (("--json", ""), '--json is "", allowed: a file, or -'),
        (("--params", "-1"), "--params"),
        (("--params", "1000"), '--params is "1000", allowed: 1e+07 to 2e+12, as in 350m'),
        (("--params", "2.1t"), '--params is "2.1t", allowed: 1e+07 to 2e+12'),
        (("--params", "1e16"), '--params is "1e16", allowed: 1e+07 to 2e+12'),
        (("--params", "0x7b"), '--params is "0x7b", allowed: 1e+07'),
        (
            ("--hosts", "8192", "--gpus-per-host", "64"),
            "--hosts 8192 with --gpus-per-host 64 are 524288 ranks, allowed: at most 65536",
        ),
        (("--hosts", "1"), '"1", allowed: a whole number from 2 to 8192'),
        (("--latency", "50"), '"50", allowed: a number with us, ms or s'),
        (("--codec-ns", "nan"), '"nan", allowed: a number from 0 to 1000000 or measured'),
    ):
        assert text in tagc(capsys, 2, "plan", *words), words
    assert "start it by torchrun" in tagc(capsys, 2, "advise")


def test_help_names_every_command(capsys):
    said = tagc(capsys, 0, "help")
    assert all(f"  {name} " in said for name in main.COMMANDS)
    assert (
        f"tagc {lib.version()}" == tagc(capsys, 0, "version").strip() == tagc(capsys, 0, "--version").strip()
    )


def test_info_measures_the_codec(capsys):
    said = tagc(capsys, 0, "info")
    measured = [float(number) for number in re.findall(r"codec here.*: (\S+) ns per element", said)]
    assert len(measured) == len(plan_settings()) and all(0.05 < ns < 1000 for ns in measured), said


def test_info_says_what_computes_products(capsys, monkeypatch):
    monkeypatch.setattr(info.planner, "codec_ns", lambda *_: 1)
    blas = info.torch_blas()
    assert f"products of torch: {blas['name']}, kernel {blas['kernel']}, {blas['n_threads']} threads" in tagc(
        capsys, 0, "info"
    )
    assert f"BLAS_INFO={blas['name']}" in torch.__config__.show() and blas["kernel"] != "unknown"
    # A torch with OpenBLAS: the library that is loaded says which kernel it uses.
    found = ctypes.util.find_library("openblas")
    if not found:
        pytest.skip("this machine has no OpenBLAS beside torch's library")
    core = ctypes.CDLL(found).openblas_get_corename
    core.restype = ctypes.c_char_p
    monkeypatch.setattr(torch.__config__, "show", lambda: "Build settings: BLAS_INFO=open, X=1")
    assert info.torch_blas()["kernel"] == core().decode()
    assert info.torch_blas()["name"] == "open"


def test_info_says_by_what_messages_travel(capsys, monkeypatch):
    def without(name, *_):
        raise lib.Error("unsupported", "this libtagc was built without it")

    monkeypatch.setattr(info.planner, "codec_ns", lambda *_: 1)
    monkeypatch.setattr(lib, "call", without)
    assert "messages between ranks: gloo, because this libtagc was built" in tagc(capsys, 0, "info")
    monkeypatch.setattr(lib, "call", lambda *_: None)
    monkeypatch.setattr(lib, "load", unittest.mock.Mock())
    assert "messages between ranks: native" in tagc(capsys, 0, "info")


def plan_settings():
    from tagc.commands.info import CODEC_SETTINGS

    return CODEC_SETTINGS


def test_bytes_are_those_that_anyone_can_count(capsys):
    """FSDP2 in bf16 gathers parameters twice and scatters gradients once, 16 bits each, times (W-1)/W."""
    made = planned(capsys, "--params", "1b", "--codec-ns", 1, "--link", "10gbit")
    full, kept, four, _ = made["rows"]
    n, part = made["n_params"], 3 / 4
    assert abs(n / 1e9 - 1) < 0.05
    # the embedding is not read by the backward pass, and so gathered once
    embedding = 32_000 * plan_parts.shape_of(1e9)[1]
    assert full["gradient_bytes"] == pytest.approx(2 * n * part, rel=0.01)
    assert full["parameter_bytes"] == pytest.approx(2 * (2 * n - embedding) * part, rel=0.03)
    assert kept["parameter_bytes"] == pytest.approx(2 * n * part, rel=0.01)
    assert four["gradient_bytes"] == pytest.approx(4.5 / 8 * n * part, rel=0.02)
    assert four["parameter_bytes"] == pytest.approx(4.06 / 8 * n * part, rel=0.02)
    # parameters, gradients and two moments in fp32 of an owned value; a bf16 copy; a replica and residuals
    assert full["memory_bytes"] == pytest.approx(16 * n / 4, rel=0.01)
    assert kept["memory_bytes"] == pytest.approx((16 / 4 + 2) * n, rel=0.01)
    assert four["memory_bytes"] == pytest.approx((16 / 4 + 2 + 1) * n, rel=0.01)
    assert made["card"] == []  # a rank is a host
    # no step is shorter than its bytes on the link, or its products
    bytes_per_s = 10e9 / 8 * 1448 / 1538
    for row in made["rows"]:
        sent = row["gradient_bytes"] + row["parameter_bytes"]
        assert row["step_s"][0] >= max(sent / bytes_per_s, 6 * n * 16_384 * 0.9 / 150e12)


def test_a_plan_says_in_which_gpus_a_rank_fits(capsys):
    words = ("--model", "7b", "--hosts", 2, "--ranks-per-host", 8, "--codec-ns", 1, "--link", "10gbit")
    made = planned(capsys, *words)
    plain, flat, levels, deltas, ddp, ddp_levels = made["memory"]
    n, unit = made["n_params"], 12 * plan_parts.shape_of(7e9)[1] ** 2
    assert plain["device"] == pytest.approx(16 * n / 16, rel=0.01) and plain["fits"] == [24, 40, 80]
    assert ddp["device"] == pytest.approx(16 * n, rel=0.01) and ddp["fits"] == []
    # residuals are of what a rank sends between hosts: everything, or what it owns of its host's sums
    assert n <= flat["residual"] <= 1.1 * n
    for row in (levels, deltas, ddp_levels):
        assert row["residual"] == pytest.approx(flat["residual"] / 8, rel=0.03)
        assert 0 < row["buffers"] < flat["buffers"] / 4 and 0 < row["pinned"] < flat["pinned"] / 7
    assert deltas["replicas"] == pytest.approx(2 * n / 8, rel=0.01) and levels["replicas"] == 0
    assert 2 * unit < flat["pinned"] < 2.1 * unit  # bodies in 8 bits, of two exchanges
    of_model, of_tagc = ("parameters", "gradients", "adam"), ("residual", "replicas", "buffers")
    for row in made["memory"]:
        assert row["device"] == sum(row[part] for part in of_model + of_tagc)
        assert row["host"] == row["pinned"]
        assert row["fits"] == [size for size in (24, 40, 80) if row["device"] <= size * 1e9]
    for row, there in zip(planned(capsys, *words, "--codec", "host")["memory"], made["memory"]):
        assert row["device"] == sum(row[part] for part in of_model)
        assert row["host"] == row["pinned"] + sum(row[part] for part in of_tagc)
        assert row["residual"] == there["residual"] and row["replicas"] == there["replicas"]
    text = tagc(capsys, 0, "plan", *map(str, words))
    assert "fits in" in text and "none of 24 GB, 40 GB, 80 GB" in text
    on_mesh = ("--model", "llama-3-8b", "--hosts", 2, "--gpus-per-host", 8)
    for codec, here, there in (("host", "host", "device"), ("device", "device", "host")):
        row = planned(capsys, *on_mesh, "--codec", codec)["rows"][4]
        assert row["compresses"] and row[here]["residual"] > 0 == row[there]["residual"], row


def test_classes_are_those_of_compress(capsys):
    """Buffers follow from the classes that compress() gives to matrices of these names; they are largest with
    every value in 8 bits."""
    policy = pytest.importorskip("tagc.torch.schedule.policy")
    n_layer, width = plan_parts.shape_of(1e9)
    matrices = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4, "mlp.c_proj": 4}
    named = [(f"h.0.{name}.weight", (n * width, width)) for name, n in matrices.items()]
    of = {"compressed": 0, "mild": 0, "dense": 13 * width}
    for row in policy.classify(named):
        of[row.class_] += row.n_elems
    every = dict(exchange=lib.EXCHANGES["direct"], format=lib.FORMATS["int8"], sparsity=0.0)
    whole = every | dict(format=lib.FORMATS["fp32"])
    units = [
        [
            dict(n_elems=-(-n // 64) * 64) | (every if class_ != "dense" else whole)
            for class_, n in unit.items()
        ]
        for unit in n_layer * [of] + 2 * [{"compressed": 32_000 * width}]
    ]
    needs = plan_parts.host_memory(units, 4, 1)
    made = planned(capsys, "--params", "1b", "--codec-ns", 1, "--codec", "host")["memory"]
    assert made[1]["name"] == "FSDP2, tagc, each rank by itself"
    assert made[1]["buffers"] == needs.buffers + needs.transient


def test_large_numbers_have_no_exponents(capsys):
    words = ("--params", "1t", "--link", "1gbit")
    for more in (("--codec-ns", 0), ("--micro-batches", 1)):
        said = tagc(capsys, 0, "plan", *words, *more)
        assert "1.01 T parameters" in said and "e+0" not in said, said


def test_hosts_with_several_gpus_share_their_card(capsys):
    made = planned(capsys, "--params", "1b", "--gpus-per-host", 8, "--codec-ns", 1)
    full, hybrid, four_sharded, few_sharded, four, _ = made["rows"]
    n, part = made["n_params"], 3 / 4
    assert full["gradient_bytes"] == pytest.approx(2 * n * part, rel=0.02)  # once per host and not per GPU
    # biases and norms, too, are added up within the host first
    assert four_sharded["gradient_bytes"] == pytest.approx(4.5 / 8 * n * part, rel=0.01)
    assert four_sharded["parameter_bytes"] == pytest.approx(4.06 / 8 * n * part, rel=0.02)
    assert few_sharded["gradient_bytes"] < 0.3 * four_sharded["gradient_bytes"]
    # a replica and residuals of what one rank of each host owns
    assert four_sharded["memory_bytes"] == pytest.approx((16 / 32 + 2 / 8 + 1 / 8) * n, rel=0.01)
    assert hybrid["parameter_bytes"] == 0  # gathers stay within the host
    assert hybrid["gradient_bytes"] == pytest.approx(2 * 2 * n * part, rel=0.02)  # there and back
    assert full["memory_bytes"] == pytest.approx(16 * n / 32, rel=0.01)
    assert hybrid["memory_bytes"] == pytest.approx(16 * n / 8, rel=0.01)
    assert four["memory_bytes"] == pytest.approx((16 + 1) * n / 8, rel=0.01)


def test_what_passes_a_card(capsys):
    """By counting on paper: a ring passes all but a W-th once, two levels all but an H-th, and ranks that
    send by themselves as much as that for each of them."""
    for n_hosts, per_host in ((2, 8), (4, 2)):
        words = ("--params", "1b", "--hosts", n_hosts, "--ranks-per-host", per_host, "--codec-ns", 0)
        made = planned(capsys, *words)
        ring, dense, flat, four, few = made["card"]
        n, n_ranks, across = made["n_params"], n_hosts * per_host, (n_hosts - 1) / n_hosts
        assert ring["gradient_bytes"] == pytest.approx(2 * n * (n_ranks - 1) / n_ranks, rel=0.02)
        assert dense["gradient_bytes"] == pytest.approx(2 * n * across, rel=0.02)
        assert four["gradient_bytes"] == pytest.approx(4.5 / 8 * n * across, rel=0.02)
        assert four["parameter_bytes"] == pytest.approx(4.06 / 8 * n * across, rel=0.02)
        for what in ("gradient_bytes", "parameter_bytes", "bytes_of_a_rank"):
            assert flat[what] == pytest.approx(per_host * four[what], rel=0.02), what
        for row in made["card"]:
            both = row["gradient_bytes"] + row["parameter_bytes"]
            assert row["bytes_of_a_rank"] == pytest.approx(both / per_host)
        assert few["parameter_bytes"] == four["parameter_bytes"] and few["name"] != four["name"]
        said = tagc(capsys, 0, "plan", *words)
        assert "through the card of a host in a step, in each direction" in said
        assert re.search(r"in two levels +[0-9.]+ [MG]B +[0-9.]+ [MG]B +[0-9.]+ [MG]B +[0-9.]+ [MG]B\n", said)


def test_off_comes_first_where_compression_loses(capsys):
    slow_codec = tagc(capsys, 0, "plan", "--link", "25gbit", "--codec-ns", 20)
    assert slow_codec.startswith("25 Gbit/s: off. ")
    slow_link = tagc(capsys, 0, "plan", "--link", "1gbit", "--codec-ns", 1)
    assert slow_link.startswith("1 Gbit/s: compress. ")
    assert "the codec has not been measured on a GPU" in slow_link and "simulated" in slow_link


def test_the_codec_is_measured_where_it_is_not_given(capsys):
    said = tagc(capsys, 0, "plan", "--link", "1gbit")
    found = re.search(r"codec: (\S+) ns per element, measured here on \d+ threads?", said)
    assert found and 0.05 < float(found[1]) < 1000, said


def test_a_slower_codec_never_makes_a_faster_step(capsys):
    steps = [planned(capsys, "--link", "10gbit", "--codec-ns", ns)["rows"] for ns in (0, 1, 4)]
    for free, fast, slow in zip(*steps):
        if free["compresses"]:
            assert free["step_s"] < fast["step_s"] < slow["step_s"]
        else:
            assert free["step_s"] == fast["step_s"] == slow["step_s"]


def call_of_readme(cluster):
    """Returns the lines of code of a row of README's table of calls."""
    rows = [row.split("|") for row in (ROOT / "README.md").read_text().splitlines() if row[:1] == "|"]
    (code,) = (cells[2] for cells in rows if cells[1].strip() == cluster)
    return re.findall(r"`([^`]*)`", code)


IMPORT = "import tagc.torch as tagc"


def test_the_code_of_the_best_row_is_that_of_readme(capsys):
    """test_docs.py runs both."""
    alone = ("--hosts", 4, "--codec-ns", 1, "--link", "250mbit,1gbit,100gbit")
    slow, fast, off = planned(capsys, *alone)["links"]
    assert (slow["choice"], fast["choice"], off["choice"]) == ("compress", "compress", "off")
    assert (slow["verdict"], off["verdict"]) == ("pays", "costs")
    assert slow["code"] == fast["code"] == [IMPORT, *call_of_readme("FSDP2, one GPU per machine")]
    said = tagc(capsys, 0, "plan", *alone).splitlines()
    assert said[1:5] == [f"    {line}" for line in slow["code"]], said
    assert said[5].startswith("1 Gbit/s: compress") and said[6].startswith("100 Gbit/s: off"), said

    near = ("--hosts", 2, "--gpus-per-host", 8, "--codec-ns", 0, "--link", "10gbit")
    (link,) = planned(capsys, *near)["links"]
    expected = call_of_readme("FSDP2, several GPUs per machine, the model fits in one machine")
    assert link["code"][1:] == [line.replace("n_hosts, gpus_per_host", "2, 8") for line in expected]
    (link,) = planned(capsys, *near, "--codec", "host")["links"]
    assert link["code"][-1] == 'handle = tagc.compress(model, optimizer, options=tagc.Options(codec="host"))'
    (link,) = planned(capsys, "--codec-ns", 1.5, "--link", "25gbit")["links"]
    assert link["packed"].startswith("tagc, 4 bits"), link
    assert link["code"][1:] == ["fully_shard(model)", 'handle = tagc.compress(model, parameters="delta4")'], (
        link
    )


def test_micro_steps_exchange_gradients_once(capsys):
    words = ("--codec-ns", 0, "--link", "10gbit", "--tokens", 16384)
    one, four = (planned(capsys, *words, "--accumulate", n) for n in (1, 4))
    for before, after in zip(one["rows"], four["rows"], strict=True):
        assert after["compute_s"] == pytest.approx(4 * before["compute_s"])
        assert after["gradient_bytes"] == before["gradient_bytes"]
        gathers = 4 if before["name"] == "FSDP2 in bf16" else 1  # the others keep what they have gathered
        assert after["parameter_bytes"] == pytest.approx(gathers * before["parameter_bytes"], rel=0.01)
    factors = [f"{made['links'][0]['factor']:.1f}" for made in (one, four)]
    guide = " ".join((ROOT / "docs/guide/does-it-pay.md").read_text().split())
    assert f"{factors[0]} times as fast with one micro-step" in guide, factors
    assert f"and {factors[1]} times with four" in guide, factors
    larger = planned(capsys, *words[:-1], 65536)  # as many tokens between exchanges: the same gradients
    assert four["rows"][-1]["step_s"] == pytest.approx(larger["rows"][-1]["step_s"], rel=0.05)
    assert "are not counted" in tagc(capsys, 0, "plan", *words, "--accumulate", 4)
    said = tagc(capsys, 2, "plan", "--tensor-parallel", 2, "--accumulate", 4)
    assert "--accumulate is not for a mesh, where a step has --micro-batches" in said


def cells_of_the_guide():
    """Returns (words, cells) of each row of the guide's table, and the two commands below it."""
    text = (ROOT / "docs/guide/does-it-pay.md").read_text()
    text = text[text.index("### 1 B and 7 B parameters") : text.index("### On your hosts")]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| **" in line
    ]
    commands = re.findall(r"^python -m tagc (plan .*?) +#", text, re.M)
    return rows, [command.split() for command in commands]


def told(link):
    return f"{link['factor']:.1f}" if link["choice"] == "compress" else "off"


def test_readme_says_what_these_commands_say_by_tokens(capsys):
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| tokens |") :].split("\n\n")[0].splitlines()
    tokens, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in table)
    made = {}
    for n in tokens[1:]:
        words = "plan --params 1b --hosts 4 --link 1gbit,10gbit --tokens".split()
        slow, free = (
            json.loads(tagc(capsys, 0, *words, n.replace(",", ""), "--codec-ns", codec_ns, "--json", "-"))[
                "links"
            ]
            for codec_ns in (1.5, 0)
        )
        made[n] = [told(a) if told(a) == told(b) else f"{told(a)} to {told(b)}" for a, b in zip(slow, free)]
    assert [row[1:] for row in rows] == [list(cells) for cells in zip(*made.values())], made


def test_the_guide_says_what_its_commands_say(capsys):
    rows, commands = cells_of_the_guide()
    assert len(commands) == 2 and [(row[0], row[1]) for row in rows] == [
        (f"**{params} B**", gpus) for params in "17" for gpus in "18"
    ]
    for params, gpus, *cells in rows:
        made = []
        for command in commands:
            words = [*command, "--params", f"{params.strip('*')[0]}b", "--gpus-per-host", gpus]
            made.append(json.loads(tagc(capsys, 0, *words, "--json", "-")))
        slow, free = (one["links"] for one in made)
        expected = [told(a) if told(a) == told(b) else f"{told(a)} to {told(b)}" for a, b in zip(slow, free)]
        packed = made[0]["rows"][-1]["memory_bytes"]
        expected += [f"{n / 1e9:.3g} GB" for n in (made[0]["rows"][1]["memory_bytes"], packed)]
        assert cells == expected, (params, gpus)
