"""From files to arms: seeds taken together, gaps per seed, medians, shares of time, and errors that name what
is wrong."""

import json
import math
import random

import pytest
import report_inputs as files

from tagc.report import inputs, pareto, reading, results, summary, tables, traces, units
from tagc.report.model import Report, spread_of
from tagc.report.reading import Node, ReportError


def near(got, expected):
    assert math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-9), (got, expected)


def refused(path, *words):
    with pytest.raises(ReportError) as caught:
        inputs.add(Report(), str(path))
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_seeds_are_one_arm(tmp_path):
    """Worked out by hand."""
    paths = [files.a_run(tmp_path / "fsdp-s1", "dense", 1, 1.0, 2.0), files.a_run(tmp_path / "fsdp-s2",
        "dense", 2, 1.0, 2.2),
             files.a_run(tmp_path / "packed-seed1", "packed", 1, 0.8, 2.1),
             files.a_run(tmp_path / "packed-seed2", "packed", 2, 0.8, 2.2),
             files.a_run(tmp_path / "odd", "sketch", 7, 0.9, 2.31)]  # fmt: skip
    report = inputs.read_report(paths)
    (arms,) = report.sets
    assert [result.name for result in arms.results] == ["fsdp", "packed", "odd"]
    fsdp, packed, odd = arms.results
    near(fsdp.loss.middle, 2.1)
    near(fsdp.loss.least, 2.0)
    assert (packed.gap.n, packed.gap.least) == (2, 0)  # per seed: 2.1 / 2.0 and 2.2 / 2.2
    near(packed.gap.middle, 0.025)
    near(packed.gap.most, 0.05)
    near(odd.gap.middle, 2.31 / 2.1 - 1)  # no fsdp run has seed 7: against the mean
    near(fsdp.total_s.middle, 1.0075)  # steps 3 to 12 of two runs: the median is between 1.007 and 1.008
    near(fsdp.part_s[0], 0.5)
    near(fsdp.part_s[4], 1.0075 - 0.85)
    near(packed.speedup.middle, 1.0075 / 0.8075)
    near(fsdp.exposed_s.middle, 0.3)
    assert fsdp.bits == [2, 4, 0, 0, 16, 0]  # before the factor (W-1)/W


def test_names(tmp_path):
    other = tmp_path / "other"
    paths = [
        files.a_run(tmp_path / "a", "dense", 1, 1.0, 2.0),
        files.a_run(other / "a", "packed", 1, 1.0, 2.0),
        str(other),
    ]
    report = inputs.read_report([*paths, str(tmp_path / "a" / "metrics.jsonl"), f"{tmp_path}/./a"])
    assert [group.name for group in report.groups] == ["a", "a (2)"]  # what is named twice is one run
    assert len(report.runs) == 2 and report.notes == [f"{other} holds no metrics.jsonl and is left out"]


def test_torch_files_of_one_name_are_different_arms(tmp_path):
    places = "dense/log.jsonl", "tagc/log.jsonl", "two/tagc/log.jsonl", "other.jsonl"
    report = inputs.read_report([files.log(tmp_path / place, files.statistics(1)) for place in places])
    assert [group.name for group in report.groups] == ["dense", "tagc", "tagc (2)", "other"]
    (note,) = report.notes
    assert note.startswith("PyTorch runs (dense, tagc, other): ")


def test_a_run_without_steps_is_left_out(tmp_path):
    """One that has just begun does not cost the report of the others."""
    begun = files.run(tmp_path / "begun", [files.head()])
    empty = files.run(tmp_path / "empty", [])
    torch = files.log(tmp_path / "torch.jsonl", {"type": "torch", "format": 1})
    nothing = files.log(tmp_path / "nothing.jsonl")
    torn = files.write(tmp_path / "torn.jsonl", '{"type": "tor')
    paths = [begun, empty, torch, nothing, torn, f"{empty}/metrics.jsonl"]
    report = inputs.read_report([*paths, files.a_run(tmp_path / "whole", "dense", 1, 1.0, 2.0)])
    assert [run.label for run in report.runs] == ["whole"] and len(report.sources) == 1
    assert len(report.notes) == 5 and all("holds no steps and is left out" in note for note in report.notes)
    with pytest.raises(ReportError, match="nothing to report.*begun.* holds no steps"):
        inputs.read_report([begun])


def test_a_log_may_hold_what_is_not_finite_and_blank_lines(tmp_path):
    """json.dumps() writes NaN for a loss that is not finite."""
    lines = [files.statistics(i, loss=loss) for i, loss in enumerate((math.nan, 3.0, math.inf), 1)]
    path = files.log(tmp_path / "log.jsonl", "", lines[0], " ", *lines[1:])
    (run,) = inputs.read_report([path]).runs
    assert [step.step for step in run.steps] == [1, 2, 3]
    assert [math.isfinite(step.loss) for step in run.steps] == [False, True, False]
    refused(files.write(tmp_path / "bench.json", '{"type": "bench", "x": NaN}'), "NaN is no JSON")


def test_torn_and_damaged_metrics(tmp_path):
    whole = [files.head(), files.step(1)]
    torn = tmp_path / "torn"
    files.run(torn, whole)
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"type":"step","step":2,"lo')
    report = inputs.read_report([str(torn)])
    assert len(report.runs[0].steps) == 1 and "incomplete" in report.notes[0]
    with open(torn / "metrics.jsonl", "a") as file:
        file.write("\n" + json.dumps(files.step(3)) + "\n")  # the same line, but others follow
    refused(torn, "metrics.jsonl line 3 is no JSON")
    refused(files.run(tmp_path / "stepless", [{"type": "step", "loss": 1}]), "line 1", 'no number as "step"')


MEMBERS = [
    ({"type": "other"}, '"other", allowed: bench, lab'), ({"a": 1}, "no result"), ([], "empty list"),
    ("", "line 1 is no JSON"),
    ([1], "is no object"), ({"type": "bench", "format": 2}, '"format" is 2, allowed: 1'), ({"type": "bench",
        "format": 1}, 'lacks "arms", a list'),
    (files.bench([{"name": "a"}]), 'arms[0] lacks "total_s", an object'), (files.bench([{"name": "a",
        "total_s": 3}]), '"total_s" is no object'),
    (files.bench([{"name": "a", "total_s": {"median": 1}}]), 'arms[0] total_s lacks "min", a number'),
    (files.bench([], world_size=0), "world_size is 0, must be at least 1"), (files.bench([7]),
        "arms[0] is no object"),
    ({"type": "lab", "format": 1, "cases": [{}]}, '"experiment", a text'),
    ({"type": "lab", "format": 1, "experiment": "x", "cases": [{}]}, 'cases[0] lacks "hosts", a number'),
    ('{"a":\n\n nonsense}', "line 3 is no JSON"),
    ('{"a": NaN}', "NaN is no JSON"),
    ("[" * 200000, "nested too deeply"), ('{"a": ' + "9" * 5000 + "}", "is no JSON"), ({"traceEvents": []},
        "no event"),
    ({"traceEvents": {}}, "traceEvents is not a list"), (files.trace([]), "no event"),
    (files.trace([{"ph": "X", "pid": 0, "tid": 0, "dur": 1}]), 'traceEvents[4] lacks a number as "ts"'),
    (files.trace([{"ph": "X", "pid": 0, "tid": 0, "ts": 1, "dur": -1}]),
     'traceEvents[4] lacks a number as "dur"'),
]  # fmt: skip


@pytest.mark.parametrize("content, words", MEMBERS, ids=range(len(MEMBERS)))
def test_wrong_members_are_named(tmp_path, content, words):
    refused(files.write(tmp_path / "x.json", content), "x.json", words)


def test_wrong_files(tmp_path):
    refused(tmp_path / "nothing", "nothing", "No such file")
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')
    refused(tmp_path / "bytes.json", "bytes.json is no UTF-8 at byte 7")
    inputs.add(Report(), files.write(tmp_path / "m.json", files.bench(None)))  # left out by --only
    with pytest.raises(ReportError, match="nothing to report.*holds no metrics"):
        inputs.read_report([str(tmp_path)])


def test_pair_ratio():
    """Two rounds of two iterations: medians 2 and 4 against 1 and 4."""

    def arm(name, *rounds):
        return {
            "name": name,
            "iterations": [{"round": i, "total_s": s} for i, times in enumerate(rounds) for s in times],
        }

    node = Node({"arms": [arm("a", (1, 3), (4, 4)), arm("b", (1, 1), (3, 5))]}, "x")
    ratio = results.pair_ratio(node, "a", "b")
    assert (ratio.n, ratio.middle, ratio.least, ratio.most) == (2, 1.5, 1, 2)
    assert results.pair_ratio(node, "a", "c").n == 0


def test_spread():
    found = spread_of([3, math.nan, 1, math.inf, 2, 10])
    assert (found.n, found.middle, found.least, found.most) == (4, 2.5, 1, 10)
    assert spread_of([math.nan]).n == 0
    rng = random.Random(1)
    for _ in range(50):
        values = [rng.uniform(-5, 5) for _ in range(rng.randrange(1, 9))]
        ordered = sorted(values)
        near(spread_of(values).middle, (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2)
        near(spread_of(values, is_mean=True).middle, sum(values) / len(values))


# ---- which arms are worth their bits ----


@pytest.mark.parametrize("is_all", [False, True])
def test_pareto(tmp_path, is_all):
    report = inputs.read_report([files.write(tmp_path / "q.json", files.quality())])
    points = {point.result.name: point for point in pareto.find(report, is_all)}
    assert len(points) == 6 and points["dense"].is_first and points["paper"].is_paper
    front = {name for name, point in points.items() if point.is_front}
    # Both of the last two are at 0: the one with fewer bits wins, which depends on what is counted.
    assert front == {"cheap", "fine" if is_all else "free"}
    near(points["cheap"].bits, 4.5 if is_all else 0.5)
    free = points["free"].gap
    near(free.middle, 0)
    near(free.least, -1)
    near(free.most, 1)


# ---- shares of time ----


def test_shares_by_hand():
    events = [files.event(*row) for row in (
        ("forward", 0, 0, 100, "h.0"), ("forward", 0, 100, 200, "h.1"),
        ("backward", 0, 200, 260, "h.1"),  # the window of h.1: 200 to 300
        ("wait", 0, 260, 300, "h.0"), ("backward", 0, 300, 400, "h.0"), ("optimizer", 0, 400, 500, ""),
        ("gather", 2, 210, 230, "h.0"),
        ("index", 3, 220, 240, "h.1"), ("select", 1, 240, 260, "h.1"), ("decode", 1, 285, 295, "h.1"),
        ("wait", 1, 260, 285, "h.1"),
        ("values", 2, 270, 290, "h.1"), ("control", 2, 295, 310, "h.1"))]  # fmt: skip
    trace = traces.read_trace(files.trace(events), "test", "test")
    shares = traces.backward_shares(trace, ["h.1"])
    assert shares.n == 1
    for got, expected in ((shares.length_s, 100e-6), (shares.model, 0.6), (shares.codec, 0.3),
                          (shares.computing, 0.7), (shares.communicating, 0.55),
                          (shares.gradient_exchange, 0.4), (shares.gradient_exchange_with_gaps, 0.7),
                          (shares.overlapped, 0.35),
                          (shares.gather, 0.2)):  # fmt: skip
        near(got, expected)
    whole = traces.step_shares(trace)
    for got, expected in ((whole.length_s, 500e-6), (whole.model, 460 / 500), (whole.computing, 470 / 500)):
        near(got, expected)
    near(traces.backward_shares(trace, ["h"]).length_s, 200e-6)  # both units, one after the other
    for units_ in (["h.2"], ["h.1", "h.2"], ["h.11"], []):
        assert traces.backward_shares(trace, units_).n == 0, units_


def test_a_root_ends_no_window():
    """What is wrapped alone: "root" comes back between the others."""
    events = []
    for start in (0, 1000):
        events.append(files.event("forward", 0, start, start + 100, "root"))
        events += [
            files.event("backward", 0, start + 100 + 10 * i, start + 110 + 10 * i, unit)
            for i, unit in enumerate(("root", "b", "root", "a", "root", "c"))
        ]
    trace = traces.read_trace(
        files.trace([*events, files.event("optimizer", 0, 1160, 1170, "")]), "test", "test"
    )
    shares = traces.backward_shares(trace, ["b", "a"])
    assert shares.n == 2
    near(shares.length_s, 40e-6)  # from b over root, a and root to c
    near(traces.backward_shares(trace, ["a"]).length_s, 20e-6)
    found, shown = traces.pair_shares(trace, ["?", "a"])
    assert (found, shown) == (shares, ["b", "a"])
    with pytest.raises(ReportError, match="the order is: root, b, a, c"):
        traces.pair_shares(trace, ["a", "b"])


def test_shares_of_random_traces():
    """One step without waits between steps; each microsecond is asked for what goes on in it."""
    rng = random.Random(3)
    length = 400
    for _ in range(60):
        computes, communicates, exchanges = ([False] * length for _ in range(3))
        events, at = (
            [files.event("forward", 0, 0, 20, "u"), files.event("optimizer", 0, length - 20, length, "")],
            20,
        )
        computes[:20] = computes[-20:] = [True] * 20
        while at < length - 20:
            end, waits = min(at + rng.randrange(1, 31), length - 20), rng.random() < 0.5
            events.append(files.event("wait" if waits else "backward", 0, at, end, "u"))
            computes[at:end] = [not waits] * (end - at)
            at = end
        for _ in range(20):
            start = rng.randrange(length - 1)
            end, is_exchange = min(length, start + rng.randrange(1, 41)), rng.random() < 0.5
            events.append(
                files.event("values" if is_exchange else "gather", rng.choice((2, 3)), start, end, "u")
            )
            communicates[start:end] = [True] * (end - start)
            if is_exchange:
                exchanges[start:end] = [True] * (end - start)
        rng.shuffle(events)
        shares = traces.step_shares(traces.read_trace(files.trace(events), "test", "test"))
        near(shares.computing, sum(computes) / length)
        near(shares.communicating, sum(communicates) / length)
        near(shares.gradient_exchange, sum(exchanges) / length)
        near(shares.overlapped, sum(a and b for a, b in zip(computes, communicates)) / length)


# ---- words ----


def test_numbers_as_words():
    for got, expected in ((units.time(0.0123), "12.3 ms"), (units.time(0.99999), "1.00 s"), (units.time(0),
        "0 s"), (units.time(125), "125 s"),
                          (units.time(math.nan), "-"), (units.time(math.inf), "-"), (units.n_bytes(1.5e9),
                              "1.50 GB"), (units.n_bytes(999), "999 B"),
                          (units.n_bytes(0), "0 B"), (units.rate(1.95e9), "1.95 Gbit/s"),
                          (units.count(2359296), "2.36 M"), (units.count(4096), "4096"),
                          (units.percent(0.1234), "12.3 %"), (units.change(-0.00151), "-0.15 %"),
                          (units.plural(1, "rank"), "1 rank")):  # fmt: skip
        assert got == expected
    for value in (1e308, -1e308, 5e-324, -0.0):
        assert all(
            len(words(value)) < 20
            for words in (units.time, units.change, units.percent, units.count, lambda x: units.fixed(x, 4))
        )


def test_no_text_becomes_markup_or_a_command_of_a_terminal():
    rng = random.Random(2)
    for _ in range(2000):
        text = "".join(
            chr(rng.choice((rng.randrange(0x110000), rng.randrange(256), ord(rng.choice("<>&\"'\x1b")))))
            for _ in range(20)
        )
        safe = tables.escaped(text)
        safe.encode()  # no half of a pair
        assert not set(safe) & set("<>\"'\x1b\x00\x7f\u202e\n")
        assert all(part.split(";")[0] in ("lt", "gt", "amp", "quot", "#x27") for part in safe.split("&")[1:])
    assert reading.clean("é € \U0001f600\u202ex\ud800") == "é € \U0001f600\ufffdx\ufffd"


def test_mutated_files(tmp_path):
    """Any bytes: an error that names the file, or a report whose words and tables are whole."""
    rng = random.Random(5)
    n_read = 0
    for round_ in range(300):
        content = bytearray(open(rng.choice(files.SEED_FILES), "rb").read())
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(content))
            kind = rng.randrange(5)
            if kind == 0:
                content[at] = rng.randrange(256)
            elif kind == 1:
                del content[at : at + rng.randrange(1, 40)]
            elif kind == 2:
                content[at:at] = rng.choice(
                    (
                        b"1e999",
                        b"null",
                        b"-1",
                        b'"',
                        b"{}",
                        b"[]",
                        b"\\u0000",
                        b"\\ud800",
                        b"</script>",
                        b"9" * 30,
                    )
                )
            elif kind == 3:
                names = [
                    b'"total_s"',
                    b'"step"',
                    b'"ph"',
                    b'"ts"',
                    b'"median"',
                    b'"arms"',
                    b'"iteration_s"',
                    b'"world_size"',
                    b'"hosts"',
                    b'"label"',
                ]
                content = content.replace(
                    rng.choice(names), rng.choice((b'"x"', b'"type"', b'"n":{},"y"')), rng.choice((1, -1))
                )
            else:
                del content[max(at, 1) :]
        path = tmp_path / f"{round_}.json"
        path.write_bytes(content)
        try:
            report = inputs.read_report([str(path)])
        except ReportError as error:
            assert path.name in str(error) or "nothing to report" in str(error), error
            continue
        n_read += 1
        words = summary.text(report, None)
        assert "nan" not in words.lower().split() and reading.clean(words.replace("\n", "")) == words.replace(
            "\n", ""
        )
        markup = "".join(
            [
                tables.shares(report, None),
                tables.link(report),
                tables.lab(report),
                tables.options(report),
                tables.sources(report),
                *(tables.summary_of(report, arms) for arms in report.sets),
            ]
        )
        for tag in ("table", "tr", "td", "th", "div"):
            assert markup.count(f"<{tag}") - (markup.count("<thead") if tag == "th" else 0) == markup.count(
                f"</{tag}>"
            ), tag
    assert 30 < n_read < 270, n_read  # both ways are tried
