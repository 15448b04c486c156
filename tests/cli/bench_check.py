"""Checks a result of tagc bench against docs/reference/results-format.md: every member is there, and whatever
follows from other members follows from them. Usage: bench_check.py FILE TRANSPORT"""

import json
import math
import re
import statistics
import sys

LEGS = ["index", "values", "leftover", "result", "gather", "control"]
PHASES = ["select", "index", "encode", "decode", "wait"]
TIMES = [
    "total_s",
    "compute_s",
    "wait_gather_s",
    "wait_reduce_s",
    "optimizer_s",
    "comm_s",
    "codec_s",
    "exchange_s",
    "gradient_s",
]


def members(value, names, where):
    assert isinstance(value, dict) and list(value) and set(value) == set(names), (
        where,
        sorted(value),
        sorted(names),
    )


def positive(value, where):
    assert (
        isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value)
    ), (where, value)


def count(value, where):
    assert isinstance(value, int) and not isinstance(value, bool) and value >= 0, (where, value)


def near(a, b, where):
    assert abs(a - b) <= 1e-9 * max(abs(a), abs(b), 1e-300), (where, a, b)


def spread(value, samples, where):
    members(value, ["median", "min", "max", "n"], where)
    near(value["median"], statistics.median(samples), where)
    near(value["min"], min(samples), where)
    near(value["max"], max(samples), where)
    assert value["n"] == len(samples), (where, value["n"], len(samples))


def check_origin(origin):
    members(origin, ["version", "commit", "date", "command", "machine"], "origin")
    assert re.fullmatch(r"\d+\.\d+\.\d+", origin["version"]), origin["version"]
    assert origin["commit"] is None or re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", origin["commit"]), origin[
        "commit"
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", origin["date"]), origin["date"]
    assert origin["command"][:2] == ["tagc", "bench"] and "--model" in origin["command"], origin["command"]
    machine = origin["machine"]
    members(machine, ["cpu", "n_cpus", "memory_bytes", "os", "hosts", "blas"], "machine")
    members(machine["blas"], ["name", "kernel", "n_threads"], "machine.blas")
    assert machine["blas"]["name"].startswith("OpenBLAS ") and machine["blas"]["kernel"]
    positive(machine["blas"]["n_threads"], "n_threads")
    assert machine["cpu"] and machine["os"] and machine["hosts"]
    positive(machine["n_cpus"], "n_cpus")
    assert machine["memory_bytes"] > 1 << 26, machine["memory_bytes"]


def check_link(link):
    rates = ["one_way_bytes_per_s", "both_ways_bytes_per_s"]
    members(
        link,
        ["latency_s", "large_latency_s", "large_bytes", "all_to_all_bytes_per_s", "pairs"] + rates,
        "link",
    )
    assert link["large_latency_s"] >= link["latency_s"] and link["large_bytes"] == 131072, link
    assert len(link["pairs"]) == 2 and [(p["from"], p["to"]) for p in link["pairs"]] == [(0, 1), (1, 0)], (
        link["pairs"]
    )
    for pair in link["pairs"]:
        members(pair, ["from", "to", "latency_s"] + rates, "pair")
        for name in ["latency_s"] + rates:
            positive(pair[name], name)
    for name in ["latency_s"] + rates:
        assert link[name] == link["pairs"][0][name], name
    positive(link["all_to_all_bytes_per_s"], "all_to_all")


def check_exchanges(result):
    names = [
        "reduce-scatter fp32",
        "reduce-scatter bf16",
        "gather fp32",
        "gather bf16",
        "gather delta4",
        "all-reduce fp32",
        "sketch 10x",
        "packed",
        "direct 95 % int2",
        "direct int2",
        "all-reduce direct 95 % int2",
    ]
    if result["transport"] == "mpi":
        names += ["MPI_Reduce_scatter fp32", "MPI_Allgather fp32", "MPI_Allreduce fp32"]
    assert [e["name"] for e in result["exchanges"]] == names, result["exchanges"]
    peers = result["world_size"] - 1
    for e in result["exchanges"]:
        members(e, ["name", "n_elems", "n_bytes_sent", "total_s", "bytes_per_s", "share"], "exchange")
        positive(e["total_s"]["min"], e["name"])
        assert e["total_s"]["min"] <= e["total_s"]["median"] <= e["total_s"]["max"] and e["total_s"]["n"] >= 3
        near(e["bytes_per_s"] * e["total_s"]["median"], e["n_bytes_sent"], e["name"]) if e["name"] not in (
            "sketch 10x",
            "packed",
        ) and "direct" not in e["name"] else None  # a mean over ranks, rounded
        near(e["share"], e["bytes_per_s"] / result["link"]["all_to_all_bytes_per_s"], e["name"])
        # Payloads that follow from the number of values; headers come on top.
        shard = e["n_elems"] // result["world_size"]
        factor = {
            "reduce-scatter fp32": 4,
            "gather fp32": 4,
            "all-reduce fp32": 8,
            "reduce-scatter bf16": 2,
            "gather bf16": 2,
            "direct int2": 2.125 / 8,
            "MPI_Reduce_scatter fp32": 4,
            "MPI_Allgather fp32": 4,
            "MPI_Allreduce fp32": 8,
        }
        if e["name"] in factor:
            least = factor[e["name"]] * shard * peers
            assert least <= e["n_bytes_sent"] <= least * 1.01 + 1000, (e["name"], least, e["n_bytes_sent"])
        else:
            assert 0 < e["n_bytes_sent"] < 4 * shard * peers, (e["name"], e["n_bytes_sent"])


def check_codec(result):
    floor = result["floor"]
    members(floor, ["n_threads", "n_elems", "bytes_per_s"], "floor")
    for name in floor:
        positive(floor[name], name)
    assert result["codec"], "codec is empty"
    seen = set()
    for c in result["codec"]:
        members(
            c,
            [
                "exchange",
                "wire",
                "index",
                "all_reduce",
                "sparsity",
                "ratio",
                "values",
                "block",
                "n_elems",
                "n_tensors",
                "n_sent",
                "n_union",
                "n_returned",
                "phase_s",
                "to_floor",
                "total_to_floor",
            ],
            "codec",
        )
        key = tuple(
            c[k]
            for k in ["exchange", "wire", "index", "all_reduce", "sparsity", "ratio", "values", "n_elems"]
        )
        assert key not in seen, key
        seen.add(key)
        members(c["phase_s"], PHASES, "phase_s")
        members(c["to_floor"], PHASES, "to_floor")
        positive(c["total_to_floor"], key)
        positive(c["n_tensors"], key)
        assert c["n_elems"] % (16 * result["world_size"]) == 0, c["n_elems"]
        kept = (1 - c["sparsity"]) * c["n_elems"]
        returned = c["exchange"] == "direct" and c["all_reduce"]
        assert (c["n_returned"] is not None) == returned, (key, c["n_returned"])
        if returned:  # of its own row a rank sends the sums, 2.4 times as many
            sums = min(2.4 * kept, c["n_elems"])
            kept += (sums - kept) / result["world_size"]
            assert sums * 0.99 - 16 <= c["n_returned"] <= sums + 16, (key, c["n_returned"], sums)
        assert kept * 0.99 - 16 <= c["n_sent"] <= kept + 16 * result["world_size"], (key, c["n_sent"], kept)
        knows = c["exchange"] in ("dense", "sketch", "packed") or (
            c["exchange"] == "direct" and c["sparsity"] == 0
        )
        assert (c["n_union"] is not None) == knows, (key, c["n_union"])
        if knows:  # at least what one rank keeps, at most what all do
            assert 0 < c["n_union"] <= c["n_elems"], (key, c["n_union"])
            assert c["exchange"] != "dense" or c["n_union"] == c["n_elems"], (key, c["n_union"])
            assert kept * 0.99 - 16 <= c["n_union"] <= kept * result["world_size"] + 16, (
                key,
                c["n_union"],
                kept,
            )
        assert (c["values"] is not None) == (c["exchange"] == "direct"), key
        works = {
            "dense": ["decode"],
            "gather": ["encode", "decode"],
            "direct": ["select" if c["sparsity"] > 0 else "encode", "decode"],
        }.get(c["exchange"], ["select", "index", "encode", "decode"])
        for phase in works:
            positive(c["phase_s"][phase], (key, phase))
            positive(c["to_floor"][phase], (key, phase))


def check_arms(result):
    world, rounds = result["world_size"], None
    first = result["arms"][0]
    for arm in result["arms"]:
        name = arm["name"]
        members(
            arm,
            [
                "name",
                "options",
                "n_params",
                "n_compressed",
                "n_mild",
                "n_union",
                "n_sent",
                "n_bytes_sent",
                "bits_per_param",
                "iterations",
                "total_s",
                "exposed_s",
                "speedup",
                "memory_bytes",
                "card_bytes",
            ],
            name,
        )
        for option in [
            "sharding",
            "compress",
            "exchange",
            "sparsity",
            "wire",
            "gather",
            "accumulate",
            "seq-len",
        ]:
            assert arm["options"][option] != "", (name, option)
        assert arm["n_params"] == result["model"]["n_params"], name
        for value in ["n_compressed", "n_mild", "n_union", "n_sent"]:
            count(arm[value], (name, value))
        knows = arm["options"]["exchange"] != "direct" or arm["options"]["sharding"] == "none"
        assert arm["n_sent"] <= (arm["n_union"] if knows else arm["n_params"]) <= arm["n_params"] + 4096, name
        members(arm["n_bytes_sent"], LEGS, name)
        members(arm["bits_per_param"], LEGS, name)
        for leg in LEGS:
            count(arm["n_bytes_sent"][leg], (name, leg))
            bits = 8 * arm["n_bytes_sent"][leg] / arm["n_params"] * world / (world - 1)
            assert abs(bits - arm["bits_per_param"][leg]) <= 8 / arm["n_params"] * world, (name, leg)
        members(arm["memory_bytes"], ["parameters", "gradients", "optimizer", "residuals"], name)
        # ranks of one host hold none
        is_one_host = (
            arm["options"]["sharding"] == "hybrid" and int(arm["options"]["ranks-per-host"]) == world
        )
        compresses = arm["n_compressed"] + arm["n_mild"] > 0 and not is_one_host
        assert (arm["memory_bytes"]["residuals"] > 0) == compresses, name
        for i in arm["iterations"]:
            members(i, ["round", "phase_s"] + TIMES, name)
            members(i["phase_s"], PHASES, name)
            positive(i["total_s"], name)
            parts = i["compute_s"] + i["wait_gather_s"] + i["wait_reduce_s"] + i["optimizer_s"]
            assert abs(parts - i["total_s"]) < 1e-6, (name, i)
        spread(arm["total_s"], [i["total_s"] for i in arm["iterations"]], name)
        spread(arm["exposed_s"], [i["wait_gather_s"] + i["wait_reduce_s"] for i in arm["iterations"]], name)
        medians = lambda a: [
            statistics.median(i["total_s"] for i in a["iterations"] if i["round"] == r)
            for r in sorted({i["round"] for i in a["iterations"]})
        ]
        spread(arm["speedup"], [a / b for a, b in zip(medians(first), medians(arm))], name)
        rounds = rounds or len(medians(arm))
        assert len(medians(arm)) == rounds, name


def check_recommendation(result):
    recommendation = result["recommendation"]
    members(recommendation, ["arm", "verdict", "reason", "speedup", "again"], "recommendation")
    again = recommendation["again"]
    members(again, ["median", "min", "max", "n"], "again")
    assert again["n"] == len({i["round"] for i in result["arms"][0]["iterations"]})
    assert 0 < again["min"] <= again["median"] <= again["max"], again
    noise = max(abs(again["max"] - 1), abs(again["min"] - 1))
    assert recommendation["arm"] in ["none"] + [a["name"] for a in result["arms"]], recommendation
    # Its speed-up again, from the iterations.
    rounds = lambda a: {
        r: statistics.median(i["total_s"] for i in a["iterations"] if i["round"] == r)
        for r in {i["round"] for i in a["iterations"]}
    }
    compresses = lambda arm: (
        arm["n_compressed"] + arm["n_mild"] > 0 or arm["options"]["gather"] not in ("fp32", "bf16")
    )
    sent = lambda arm: sum(arm["n_bytes_sent"].values()) if arm["card_bytes"] is None else arm["card_bytes"]
    fastest = lambda arms: min(arms, key=lambda arm: arm["total_s"]["median"], default=None)
    plain = fastest([arm for arm in result["arms"] if not compresses(arm)])
    packed = fastest(
        [arm for arm in result["arms"] if compresses(arm) and (not plain or 1.05 * sent(arm) < sent(plain))]
    )
    best = {False: plain, True: packed}
    if plain and packed:
        a, b = rounds(best[False]), rounds(best[True])
        gains = [a[r] / b[r] for r in a]
        near(recommendation["speedup"], statistics.median(gains), "recommended speed-up")
        costs = [b[r] / a[r] for r in a]
        cost = statistics.median(costs)
        most = max(noise, *(abs(c - cost) for c in costs))
        is_alike = max(cost, 1 / cost) <= 1.05 or abs(cost - 1) <= most
        verdict = "makes no difference" if is_alike else "pays" if cost < 1 else "costs"
        verdict = "unknown" if len(costs) < 5 else verdict
        assert recommendation["verdict"] == verdict, (recommendation, costs)
        assert recommendation["arm"] == (best[True]["name"] if verdict == "pays" else "none"), (
            recommendation,
            costs,
        )
        assert (
            best[True]["name"] in recommendation["reason"] and best[False]["name"] in recommendation["reason"]
        )
    else:
        assert recommendation["arm"] == "none" and recommendation["speedup"] is None
        assert recommendation["verdict"] == "unknown"


def check(path, transport):
    with open(path) as file:
        result = json.load(file)
    members(
        result,
        [
            "type",
            "format",
            "origin",
            "world_size",
            "n_hosts",
            "transport",
            "model",
            "batch_size",
            "seq_len",
            "link",
            "exchanges",
            "floor",
            "codec",
            "arms",
            "recommendation",
        ],
        "result",
    )
    assert (result["type"], result["format"], result["transport"]) == ("bench", 1, transport)
    members(
        result["model"],
        ["name", "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "tied", "n_params"],
        "model",
    )
    assert isinstance(result["model"]["tied"], bool)
    check_origin(result["origin"])
    assert result["n_hosts"] == len(result["origin"]["machine"]["hosts"])
    check_link(result["link"])
    check_exchanges(result)
    check_codec(result)
    check_arms(result)
    check_recommendation(result)


check(sys.argv[1], sys.argv[2])
