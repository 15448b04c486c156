"""Tables of results that are small enough to work out by hand."""

import sys
import tempfile

sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import cells
import delay
import experiment
import formulas
import linkcheck
import results
import summary
import tables
import traced
from common import LabError

LEGS = ("index", "values", "leftover", "result", "gather", "control")
OPTIONS = {"exchange": "dense", "compress": "none", "index": "or", "wire": "fp32", "ratio": "auto"}
ORIGIN = {
    "commit": "abc1234",
    "date": "2026-01-02T03:04:05Z",
    "machine": {"n_cpus": 2, "cpu": "a processor", "blas": {"name": "OpenBLAS 0.3.21", "kernel": "SkylakeX"}},
}
LINK = {
    "rate": "1gbit",
    "mtu": 9000,
    "burst": "256kb",
    "queue": "",
    "tcp_one_way_bits_per_s": [0.98e9, 0.97e9],
    "tcp_both_ways_bits_per_s": [0.96e9, 0.95e9],
}


def legs(**given):
    return {leg: given.get(leg, 0) for leg in LEGS}


def arm(name, samples, total_bits, **options):
    """samples: per round a list of seconds."""
    iterations = [
        {
            "round": number,
            "total_s": s,
            "wait_gather_s": 0.25 * s,
            "wait_reduce_s": 0.25 * s,
            "gradient_s": 0.5 * s,
        }
        for number, row in enumerate(samples)
        for s in row
    ]
    waits = results.spread([step["total_s"] / 2 for step in iterations])
    return summary.arm(
        {
            "name": name,
            "options": OPTIONS | options,
            "n_params": 1000000,
            "n_compressed": 0,
            "n_union": 0,
            "bits_per_param": legs(values=total_bits),
            "iterations": iterations,
            "exposed_s": waits,
        }
    )


def lab(experiment, table, cases, **settings):
    return {
        "type": "lab",
        "format": 1,
        "experiment": experiment,
        "title": "t",
        "origin": ORIGIN,
        "settings": {"table": table, **settings},
        "cases": cases,
    }


def case(**members):
    return {"hosts": 2, "ranks_per_host": 1, "link": LINK, "interface": None} | members


def row_of(text, start):
    """Cells of the one line that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def equal(seen, expected):
    assert seen == expected, f"{seen!r} instead of {expected!r}"


def check_compressed_part():
    # 1 M parameters, half of them compressed, 4 MB sent by one of two ranks in all: 64 bits each, 32 of them
    # dense.
    carrier = arm("a", [[1.0]], 64, exchange="packed") | {"n_compressed": 500000}
    equal(tables.compressed_bits(carrier), 96.0)
    # What mild matrices sent is not known apart.
    equal(tables.compressed_bits(carrier | {"options": carrier["options"] | {"mild": "int4"}}), None)


def check_times():
    # Rounds of 4.0/2.0 and 6.0/4.0: twice and one and a half times as fast.
    bench = {
        "world_size": 2,
        "arms": [
            arm("fsdp", [[4.0, 4.0, 9.0], [6.0]] * 3, 96),
            arm("fast", [[2.0], [4.0]] * 3, 48, compress="all"),
            arm("mixed", [[5.0], [5.0]] * 3, 64, compress="all"),
            arm("norms", [[2.0], [4.0]] * 3, 95, compress="all"),
        ],
    }
    text = tables.markdown(
        lab(
            "table2",
            "times",
            [case(bench=bench)],
            pairs=[["fsdp", "fast"], ["fsdp", "mixed"], ["fsdp", "norms"]],
        )
    )
    # The paper's figure for fsdp comes from paper.toml; gradients are 4 MB: half of 5 s over 4 MB is 625 ms
    # per MB.
    equal(
        row_of(text, "`fsdp` "),
        ["`fsdp`", "5.00 s (4.00 to 9.00)", "2.50 s", "625.00", "96.0", "26.8 s", "0.73"],
    )
    equal(
        row_of(text, "`fast` against"),
        ["`fast` against `fsdp`", "1.750x (1.500 to 2.000)", "faster", "2.000x", "-"],
    )
    equal(row_of(text, "`mixed` against")[1:3], ["1.000x (0.800 to 1.200)", "within the spread"])
    equal(row_of(text, "`norms` against")[1:3], ["1.750x (1.500 to 2.000)", "sends as much"])
    noisy = bench | {"again": {"median": 1.0, "min": 0.7, "max": 1.8, "n": 6}}
    text_of_noisy = tables.markdown(lab("table2", "times", [case(bench=noisy)], pairs=[["fsdp", "fast"]]))
    equal(row_of(text_of_noisy, "`fast` against")[2], "within the spread")
    equal(cells.verdict([1.001, 1.01, 1.01, 1.01, 1.2]), "within the spread")
    equal(cells.verdict([1.02, 1.03, 1.04, 1.03, 1.04]), "within the spread")  # of the margin
    equal(cells.verdict([1.06, 1.07, 1.08, 1.07, 1.07]), "faster")
    equal(cells.verdict([1.06, 1.07, 1.08, 1.07]), "too few rounds")
    equal(cells.verdict([0.9, 0.91, 0.92, 0.9, 0.91]), "slower")
    equal(cells.verdict([0.9, 0.91, 0.92, 0.9, 0.91], noise=0.1), "within the spread")
    equal(cells.verdict([0.5, 0.95, 0.99, 0.99, 0.99]), "within the spread")
    assert "0.97 Gbit/s one way, 0.95 in both directions" in text and "too few" not in text
    assert (
        "2 cores of a processor, OpenBLAS 0.3.21 with its kernel SkylakeX, commit abc1234, 2026-01-02" in text
    )
    sweep = tables.markdown(lab("links", "times", [case(bench=bench), case(bench=bench, hosts=4)]))
    equal(row_of(sweep, "arm"), ["arm", "2 ranks, 1 Gbit/s", "4 ranks, 1 Gbit/s"])
    equal(row_of(sweep, "`fast`")[1], "3.00 s (1.75x, 1.75x as fast)")
    equal(row_of(sweep, "`mixed`")[1], "5.00 s (1.00x, 1.00x as fast, within the spread)")
    assert "too few" not in sweep
    slow = {
        "world_size": 2,
        "arms": [
            arm("fsdp", [[2.0], [2.0]], 96),
            arm("zero2", [[1.0], [1.0]], 32),
            arm("packed", [[1.25], [1.25]], 70, compress="all"),
        ],
    }
    sweep = tables.markdown(lab("links", "times", [case(bench=slow), case(bench=slow)]))
    equal(row_of(sweep, "`zero2`")[1], "1.00 s (2.00x)")
    equal(row_of(sweep, "`packed`")[1], "1.25 s (1.60x, 0.80x as fast)")
    assert "Rounds: 2, too few to say" in sweep


def run(label, seed=0, **members):
    return {
        "label": label,
        "seed": seed,
        "world_size": 2,
        "options": OPTIONS,
        "n_params": 1000,
        "n_compressed": 0,
        "n_union": 0,
        "n_bytes_sent": legs(),
        "bits_per_param": legs(),
        "evals": [],
    } | members


def check_bits():
    # 600 of 1000 parameters at 5.2 bits, 400 dense: 0.6 * 5.2 + 0.4 * 32 = 15.92 bits, half of it sent at W =
    # 2.
    sent = legs(index=2 * 600 / 16, values=(3.2 * 600 + 32 * 400) / 16, gather=4000)
    options = OPTIONS | {"exchange": "sketch", "compress": "names", "ratio": "10"}
    one = run(
        "tagc-10x-or",
        n_compressed=600,
        n_union=15,
        n_bytes_sent=sent,
        options=options,
        bits_per_param={leg: n * 16 / 1000 for leg, n in sent.items()},
    )
    text = tables.markdown(lab("figure1", "bits", [case(runs=[one], interface={"overhead": 1.0125})]))
    equal(
        row_of(text, "`tagc"),
        ["`tagc-10x-or`", "60.0 %", "5.200", "5.200", "8.4", "1.20", "14.72", "64.00", "79.92", "1.20x"],
    )
    equal(row_of(text, "arm")[5:8], ["index", "values", "gather"])
    assert "1.012 times" in text or "1.013 times" in text
    equal(formulas.gradient_bits(OPTIONS | {"exchange": "packed"}, 0.025), 2.8)
    equal(formulas.gradient_bits(OPTIONS | {"exchange": "sketch", "ratio": "2", "index": "sum4"}, 0.3), 24)
    equal(formulas.lhc_bits(options | {"index": "sum4"}), 14.4)
    equal(formulas.gradient_bits(OPTIONS | {"wire": "bf16"}, 0), 16)


def check_losses():
    runs = [
        run("fsdp", seed, evals=[{"step": 1, "val_loss": 9.0}, {"step": 2, "val_loss": loss}])
        for seed, loss in ((1, 2.0), (2, 2.2))
    ]
    runs += [
        run("tagc-10x-or+index=sum1+unpeeled=estimate", seed, evals=[{"step": 2, "val_loss": loss}])
        for seed, loss in ((1, 2.1), (2, 2.42))
    ]
    text = tables.markdown(lab("figure4", "losses", [case(runs=runs, link=None)]))
    equal(row_of(text, "`fsdp`"), ["`fsdp`", "0.0", "2.1000", "9.52 %", "-", "2", "-"])
    equal(
        row_of(text, "`tagc"),
        [
            "`tagc-10x-or+index=sum1+unpeeled=estimate`",
            "0.0",
            "2.2600",
            "14.16 %",
            "+7.50 % (+5.00 % to +10.00 %)",
            "2",
            "+3.6 %",
        ],
    )

    for run_of in runs[2:3]:  # diverged: told, and not left out of a mean
        run_of["evals"][-1]["val_loss"] = None
    text = tables.markdown(lab("figure4", "losses", [case(runs=runs, link=None)]))
    equal(row_of(text, "`tagc")[4], "no finite loss in 1 of 2")


def check_summary():
    steps = [
        {"round": n, "total_s": s, "compute_s": 1.0, "comm_s": 3.0, "phase_s": {"encode": 0.1 * s}}
        for n, s in ((0, 1.0), (0, 4.0), (1, 2.0))
    ]
    given = {
        "compress": "none",
        "exchange": "direct",
        "sharding": "full",
        "lr": "1",
        "out": "x",
        "values": "int2",
        "n-head": "preset",
        "n-embd": "256",
        "batch-size": "2",
    }
    found = {
        "arms": [
            {
                "name": "a",
                "options": given,
                "iterations": steps,
                "n_bytes_sent": {},
                "bits_per_param": legs(values=1 / 3),
            }
        ],
        "origin": {"machine": {"n_cpus": 2, "cpu": "x"}, "commit": "abc"},
        "recommendation": {},
    }
    made = summary.case({"bench": found})
    (one,) = made["bench"]["arms"]
    equal((one["round_s"], one["total_s"]), ([2.5, 2], {"median": 2, "min": 1, "max": 4, "n": 3}))
    equal(one["iterations"], [{"total_s": 2, "compute_s": 1, "phase_s": {"encode": 0.2}}])
    equal(one["options"], {"compress": "none", "exchange": "direct", "sharding": "full"})
    equal((one["bits_per_param"], "n_bytes_sent" in one), ({"values": 0.3333333}, False))
    equal(made["bench"]["origin"], {"machine": {"n_cpus": 2}})
    equal(summary.case(made), made)
    curve = [{"step": step, "val_loss": 1 / 3} for step in range(201)]
    runs = [
        {
            "label": label,
            "seed": seed,
            "options": {"wire": "bf16", "lr": lr, "quiet": "yes"},
            "evals": curve,
            "bits_per_param": {},
        }
        for label, lr in (("a", "1"), ("b", "2"))
        for seed in (1, 2)
    ]
    made = summary.case({"runs": runs})
    equal(
        (made["options"], [run.get("options") for run in made["runs"]]),
        ({"wire": "bf16"}, [{"lr": "1"}, None, {"lr": "2"}, None]),
    )
    thin = made["runs"][0]["evals"]
    loss = {"val_loss": 0.3333333333}
    equal((len(thin), thin[0], thin[-1]), (summary.MOST_POINTS, curve[0] | loss, curve[-1] | loss))
    equal(summary.case(made), made)
    # One member a line where all are too long for one.
    text = results.laid_out({"a": ["x" * 2000, "y" * 2000], "b": {"c": 1}})
    equal(
        [line[:9] for line in text.splitlines()],
        ["{", ' "a":[', '  "xxxxxx', '  "yyyyyy', " ],", ' "b":{"c"', "}"],
    )


def check_damaged():
    one = run("fsdp", n_params=0)
    for cases in (3, [case(runs=[one], interface=None)], [3], [case(runs=[run("a", bits_per_param="x")])]):
        try:
            tables.markdown(lab("figure1", "bits", cases))
        except LabError as error:
            assert "figure1" in str(error), error
        else:
            raise AssertionError(f"{cases} are accepted")


def check_timeline(folder):
    import json

    names = {0: "compute", 1: "codec", 2: "comm", 3: "comm 2"}
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
        for tid, name in names.items()
    ]
    # Two units of 10 s each; what comes before (and once more in between, as a root does) and behind is
    # outside. Transfers of 6 s, of which 2 s overlap.
    for tid, name, start, end in (
        (0, "backward c", 0, 5),
        (0, "backward b", 5, 8),
        (0, "wait b", 8, 14),
        (0, "backward c", 14, 15),
        (0, "backward a", 15, 19),
        (0, "wait a", 19, 22),
        (0, "backward c", 22, 23),
        (0, "backward a", 23, 24),
        (0, "backward z", 25, 99),
        (1, "select b", 7, 10),
        (1, "wait b", 10, 12),
        (2, "values c", 0, 6),
        (2, "gather a", 6, 12),
        (3, "values b", 10, 16),
        (2, "control b", 24, 30),
        # The next step, of which nothing belongs to the windows of the first.
        (0, "forward b", 100, 101),
        (0, "backward b", 149, 151),
        (2, "values b", 150, 156),
    ):
        events.append(
            {"ph": "X", "name": name, "pid": 0, "tid": tid, "ts": start * 1e6, "dur": (end - start) * 1e6}
        )
    path = f"{folder}/hand.trace.json"
    with open(path, "w") as file:
        json.dump({"traceEvents": events}, file)
    shares = traced.shares(path, ["b", "a"])
    expected = {
        "window_s": 20,
        "n_windows": 1,
        "model": 10 / 20,
        "codec": 3 / 20,
        "computing": 12 / 20,
        "communicating": 12 / 20,
        "gradient_exchange": 7 / 20,
        "gather": 6 / 20,
        "gradient_exchange_with_gaps": 7 / 20,
    }
    for name, value in expected.items():
        assert abs(shares[name] - value) < 1e-9, (name, shares[name], value)
    equal(shares["shown"], ["b", "a"])
    equal(traced.shares(path, ["?", "a"]), shares | {"units": ["?", "a"]})
    for units, said in ((["a", "b"], "nothing matches a and"), (["b", "q*"], "the order is: c, b, a, z")):
        try:
            traced.shares(path, units)
        except LabError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{units} are accepted")


def check_quality():
    # Seeds of dense: 2.00 and 4.00, 66.7 % apart. The other arm is 1 % above and 3 % above: mean 2, deviation
    # sqrt(2).
    def fork(label, seed, loss, gradients, gather):
        sent = legs(values=gradients, gather=gather)
        return run(
            label,
            seed,
            bits_per_param=sent,
            evals=[{"step": 5, "val_loss": 9}, {"step": 9, "val_loss": loss}],
            options=OPTIONS | {"lr": "0.002"},
        )

    runs = [
        fork("dense", 1, 2.0, 32, 64),
        fork("dense", 2, 4.0, 32, 64),
        fork("topk", 1, 2.02, 0.5, 2),
        fork("topk", 2, 4.12, 0.7, 4),
    ]
    one = case(link=None, hosts=1, ranks_per_host=2, runs=runs, base={"n_steps": 70})
    text = tables.markdown(lab("quality-x", "quality", [one]))
    equal(
        row_of(text, "`topk`"),
        ["`topk`", "0.60", "3.00", "3.60", "0.002", "3.0700", "+2.00 % (+1.00 % to +3.00 %)", "1.41 %", "2"],
    )
    equal(row_of(text, "`dense`")[6:], ["-", "-", "2"])
    assert "one state after 70 dense steps" in text and "differs by 66.67 %" in text
    runs[3]["evals"][-1]["val_loss"] = None
    equal(
        row_of(tables.markdown(lab("quality-x", "quality", [one])), "`topk`")[6], "no finite loss in 1 of 2"
    )


def check_torch():
    def torch_arm(name, samples, n_sent, n_needed):
        return summary.arm(
            {
                "name": name,
                "about": "words",
                "n_bytes_sent": n_sent,
                "n_bytes_needed": n_needed,
                "iterations": [{"round": number, "total_s": s} for number, s in enumerate(samples)],
            }
        )

    exchange = {
        "name": "torch reduce_scatter fp32",
        "n_bytes_needed": 1e6,
        "n_bytes_sent": 2e6,
        "total_s": {"median": 0.04},
        "bytes_per_s": 50e6,
    }
    rows = [
        {"choice": "off", "torch": {}, "options": {}, "step_s": 2.5},
        {"choice": "compress", "torch": {}, "options": {"sparsity": 0.9}, "step_s": 7.0},
        {"choice": "compress", "torch": {}, "options": {"sparsity": 0.95}, "step_s": 1.25},
    ]
    found = {
        "model": {"n_params": 4e6},
        "seq_len": 8,
        "compute_s": 0.5,
        "sparsity": 0.95,
        "torch": "2.13.0",
        "exchanges": [exchange],
        "advice": {"wrap": "fsdp2", "rows": rows, "reason": "compress: it is slow"},
        "arms": [
            torch_arm("fsdp2", [2.0, 3.0, 3.0, 3.0, 4.0], 12e6, 10e6),
            torch_arm("fsdp2-tagc", [1.0, 1.0, 1.0, 1.0, 1.0], 1e6, None),
        ],
    }
    result = lab("torch", "torch", [case(torch=found)], pairs=[["fsdp2", "fsdp2-tagc"], ["ddp", "fsdp2"]])
    text = tables.markdown(result)
    equal(row_of(text, "`fsdp2`:"), ["`fsdp2`: words", "3.00 s (2.00 to 4.00)", "2.50 s", "12.00", "10.00"])
    equal(row_of(text, "`fsdp2-tagc`:")[1:], ["1.00 s (1.00 to 1.00)", "1.25 s", "1.00", "-"])
    equal(row_of(text, "`fsdp2-tagc` against")[1:], ["3.00x (2.00 to 4.00)", "faster"])
    # 400 of 950 Mbit/s that plain TCP gets in the slower direction.
    equal(
        row_of(text, "torch reduce_scatter"),
        ["torch reduce_scatter fp32", "40.0 ms", "1.00", "2.00", "400", "42 %"],
    )
    assert "fills 42 % of what plain TCP gets" in text and "sends 2.0 times what it must" in text
    assert "advise(): compress: it is slow." in text
    exchange |= {"n_bytes_sent": 1e6, "bytes_per_s": 110e6}
    assert "Note:" not in tables.markdown(result)


def check_cluster():
    """Bytes of a rank become those of its host; what grows with the ranks of a host is told."""

    def of(name, samples, n_sent, n_needed):
        iterations = [{"round": number, "total_s": s} for number, s in enumerate(samples)]
        about = {"about": "words", "n_bytes_sent": n_sent, "n_bytes_needed": n_needed}
        return summary.arm(
            {
                "name": name,
                "iterations": iterations,
                "rank_memory_bytes": 7e6 if "tagc" in name else None,
                "tagc_memory_bytes": 2.5e6 if "tagc" in name else 0,
            }
            | about
        )

    def place(ranks_per_host, rate, *arms):
        about = {
            "model": {"n_params": 4e6},
            "seq_len": 8,
            "compute_s": 0.5,
            "sparsity": 0.95,
            "torch": "2.13.0",
        }
        link = LINK | {"rate": rate}
        return case(hosts=2, ranks_per_host=ranks_per_host, link=link, torch={"arms": list(arms)} | about)

    cases = [
        place(
            2, "250mbit", of("fsdp2-bf16", [2.0, 3.0], 20e6, 15e6), of("fsdp2-tagc", [1.0, 1.0], 2e6, None)
        ),
        place(
            4, "250mbit", of("fsdp2-bf16", [2.0, 2.0], 10e6, 9e6), of("fsdp2-tagc", [4.0, 4.0], 1.5e6, None)
        ),
        place(4, "1gbit", of("fsdp2-tagc", [1.0, 1.0], 1.5e6, None)),
    ]
    text = tables.markdown(lab("cluster", "cluster", cases))
    first, second, third = (part for part in text.split("**") if "| arm | step" in part)
    equal(
        row_of(first, "`fsdp2-bf16`:")[1:],
        ["2.50 s (2.00 to 3.00)", "1.00x (1.00 to 1.00)", "40.00", "30.00", "0.8x", "-", "-"],
    )
    # 30 MB that torch must send against 4 MB
    equal(row_of(first, "`fsdp2-tagc`:")[2:], ["2.50x (2.00 to 3.00)", "4.00", "-", "7.5x", "7", "2.5"])
    equal(row_of(second, "`fsdp2-tagc`:")[2:], ["0.50x (0.50 to 0.50)", "6.00", "-", "6.0x", "7", "2.5"])
    equal(row_of(third, "`fsdp2-tagc`:")[2:], ["-", "6.00", "-", "-", "7", "2.5"])
    growth = text[text.index("bytes through the card |") :]
    equal(row_of(growth, "`fsdp2-tagc`"), ["`fsdp2-tagc`", "2 to 4, 250 Mbit/s", "+50.0 %"])
    equal(row_of(growth, "`fsdp2-bf16`"), ["`fsdp2-bf16`", "2 to 4, 250 Mbit/s", "+0.0 %"])
    assert "1 Gbit/s |" not in growth


def check_pipeline():
    """The baseline is the fastest without tagc in bf16, also where the first arm is another."""

    def of(name, samples, n_sent, n_needed):
        iterations = [{"round": number, "total_s": s, "codec_s": 0.1} for number, s in enumerate(samples)]
        about = {"about": "words", "n_bytes_sent": n_sent, "n_bytes_needed": n_needed}
        return summary.arm(
            {"name": name, "is_tagc": "tagc" in name, "iterations": iterations, "speedup": 1} | about
        )

    def place(tflops, link, *arms):
        about = {"layers_per_stage": 8, "width": 64, "micro_batches": 4, "batch_size": 2, "seq_len": 16}
        about |= {"tflops": tflops, "compute_s": 0.25, "torch": "2.13.0"}
        return case(hosts=4, ranks_per_host=1, link=link, torch={"arms": list(arms)} | about)

    link = LINK | {"rate": "100mbit", "ways": ["100mbit", "200mbit"]}
    arms = [
        of("1f1b-fp32", [1.0, 1.0], 42e6, 40e6),
        of("1f1b-bf16", [4.0, 8.0], 21e6, 20e6),
        of("gpipe-bf16", [2.0, 6.0], 22e6, 20e6),
        of("1f1b-tagc", [1.0, 2.0], 8e6, None),
    ]
    text = tables.markdown(
        lab("pipeline", "pipeline", [place(150, link, *arms), place(None, None, *arms[:1])])
    )
    shaped, other = (part for part in text.split("**") if "| arm | step" in part)
    assert "times as fast as gpipe-bf16, per round" in shaped
    # 10 MB each way take 0.8 s at 100 Mbit/s
    equal(
        row_of(shaped, "`gpipe-bf16`:")[1:],
        ["4.00 s (2.00 to 6.00)", "1.00x (1.00 to 1.00)", "22.00", "20.00", "20 %"],
    )
    equal(row_of(shaped, "`1f1b-tagc`:")[2:], ["2.50x (2.00 to 3.00)", "8.00", "-", "-"])
    assert "4 micro-batches of 32 tokens" in shaped and "simulated for a GPU of 150 TFLOP/s" in shaped
    equal(row_of(other, "`1f1b-fp32`:")[2:], ["-", "42.00", "40.00", "-"])
    assert "simulated" not in other and "no shaped link, computing on the processor**" in text


def check_link():
    equal(linkcheck.bits_per_s("500mbit"), 500e6)
    equal(linkcheck.bits_per_s("2.5gbit"), 2.5e9)
    equal(linkcheck.shortfall(LINK), None)
    assert "74%" in linkcheck.shortfall(LINK | {"tcp_both_ways_bits_per_s": [0.9e9, 0.74e9]})


check_times()
check_compressed_part()
check_bits()
check_losses()
check_summary()
check_damaged()
with tempfile.TemporaryDirectory() as scratch:
    check_timeline(scratch)
check_quality()
check_torch()
check_cluster()
check_pipeline()


def check_latency():
    equal(
        [delay.seconds(text) for text in ("10ms", "0.5ms", "250us", "1s", "10", "ms", "-1ms", 5, None)],
        [0.01, 0.0005, 0.00025, 1.0, None, None, None, None, None],
    )
    equal([delay.is_latency(text) for text in ("100us", "99us", "1s", "1.1s")], [True, False, True, False])
    equal(delay.queue_ms("1ms"), 50)
    equal(delay.queue_ms("50ms"), 200)
    # 1 Gbit/s and 100 ms there and back: 12.5 MB under way, and four times that; 6 MB where it is less.
    equal(delay.window_bytes(1e9, "50ms"), 50000000)
    equal(delay.window_bytes(1e8, "1ms"), 6 << 20)
    delay.check("10ms", [0.0191, 0.0205, 0.0209])  # 5 % of 20 ms
    delay.check("1ms", [0.0015, 0.0025])  # half a millisecond, where that is more
    for latency, least, said in (
        ("10ms", [0.02, 0.0212], "ping measures 21.2 ms"),
        ("10ms", [0.01], "ping measures 10 ms"),
        ("1ms", [0.0026], "off by more than 0.5 ms"),
    ):
        try:
            delay.check(latency, least)
        except LabError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{least} passes as {latency}")
    far = case(
        link=LINK | {"latency": {"asked": "10ms", "one_way_s": 0.01, "ping_round_trip_s": [0.0202, 0.0204]}}
    )
    equal(cells.case_text(far), "2 ranks, 1 Gbit/s, 10 ms")
    equal(experiment.numbers("0,3-5,4", 6), [0, 3, 4, 5])
    bench = {
        "world_size": 2,
        "arms": [
            arm("fsdp", [[4.0], [2.0], [2.0]], 96),
            arm("zero2", [[2.0], [1.0], [1.0]], 32),
            arm("all-legs", [[1.0], [0.5], [0.5]], 5, compress="all"),
        ],
    }
    many = tables.markdown(lab("wan", "times", [far | {"bench": bench}] * 7))
    equal(many.count("| 2 ranks, 1 Gbit/s, 10 ms |"), 7)
    row = many.splitlines()[2]
    equal(
        [cell.strip() for cell in row.strip("|").split("|")],
        [
            "2 ranks, 1 Gbit/s, 10 ms",
            "2.00 s (2.00 to 4.00)",
            "1.00 s (1.00 to 2.00) (2.00x)",
            "500.0 ms (500.0 to 1000.0) (4.00x, 2.00x as fast)",
            "20.3 ms",
            "0.95 Gbit/s",
        ],
    )


check_link()
check_latency()
try:
    tables.markdown(lab("x", "times", [case()]))
except LabError as error:
    assert '"bench"' in str(error) or "'bench'" in str(error), error
else:
    raise AssertionError("a result without its bench is accepted")
