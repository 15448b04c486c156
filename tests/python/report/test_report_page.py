"""Figures, pictures, the page and the command: what they show is what the files hold, whatever the names and
numbers in them."""

import html.parser
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import report_inputs as files

pytest.importorskip("altair", reason="altair is not installed")
pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")

import vl_convert

from tagc.commands import main
from tagc.report import command, figures, figures_bars, groups, inputs, page, pictures, style
from tagc.report.reading import ReportError

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>&\"'`${x}\u202e\x1b[31m"


def draw(report, name, units=None):
    """The data of its one drawing."""
    (drawing,) = figures.find(name).draw(report, units)
    json.dumps(drawing.spec(), allow_nan=False)
    return drawing.datasets


def marks(svg, kind):
    """How many marks of a kind an SVG has, axes and legends not counted."""
    groups = [
        group
        for group in ElementTree.fromstring(svg).iter(f"{SVG}g")
        if group.get("class", "").startswith(f"mark-{kind} role-mark")
    ]
    return sum(len(list(group)) for group in groups)


# ---- what figures show ----


def test_quality(tmp_path):
    """Worked out by hand in report_inputs.QUALITY."""
    report = inputs.read_report([files.write(tmp_path / "q.json", files.quality())])
    data = draw(report, "pareto")
    points = {row["n"]: row for row in data["points"]}
    assert (
        points["paper"]["g"] == "+3.000 % (+3.000 to +3.000)"
        and points["paper"]["b"] == "5"
        and points["paper"]["k"] == "the paper's sketch"
    )
    assert {name for name, row in points.items() if row["k"] == "nothing beats it"} == {"cheap", "free"}
    assert [row["x"] for row in data["edge"]][:2] == [0.5, 1] and data["band"]
    assert draw(report, "pareto-all")["points"][2]["b"] == "4.5"
    figure = figures.find("pareto")
    svg = pictures.render(figure.draw(report, None), figure, False)
    assert marks(svg, "symbol") == 6 and marks(svg, "line") == 1


def test_a_lower_loss_than_dense_is_beaten_by_none(tmp_path):
    """Of two arms below the first, the one with the lower loss is not beaten by the one with fewer bits."""
    paths = [files.a_run(tmp_path / "fsdp", "dense", 1, 1.0, 2.0)]
    for name, bits, loss in (("cheap", 1, 1.99), ("better", 9, 1.98), ("worse", 10, 1.985)):
        lines = [
            files.head(name),
            files.step(1, bits_sent_per_param=files.legs(values=bits)),
            files.evaluation(12, loss),
        ]
        paths.append(files.run(tmp_path / name, lines))
    points = {row["n"]: row["k"] for row in draw(inputs.read_report(paths), "pareto")["points"]}
    assert points == {"fsdp": "the baseline", "cheap": "nothing beats it", "better": "nothing beats it",
                      "worse": "others"}  # fmt: skip


def test_known_arms_keep_their_colours():
    assert groups.colors_of(["b", "all-legs", "a", "fsdp"]) == {"b": 1, "all-legs": 2, "a": 3, "fsdp": 0}
    assert groups.colors_of(["fsdp", "dense"]) == {"fsdp": 0, "dense": 1}  # one colour for one arm
    many = groups.colors_of([*groups.KNOWN, *"abc"])
    assert len(set(many.values())) == len(many)


def test_a_long_name_is_whole(tmp_path):
    name = "fsdp-bf16+prefetch=16+grads-in-flight=8+bucket-elems=524288"
    one = {"total_s": files.spread(1.0), "exposed_s": files.spread(0.5), "speedup": files.spread(1.0),
           "iterations": [], "bits_per_param": files.legs(values=1), "memory_bytes": {}, "n_params": 10,
           "options": {}}  # fmt: skip
    arms = [one | {"name": arm} for arm in ("fsdp", name)]
    bench = files.bench(arms)
    report = inputs.read_report([files.write(tmp_path / "a.json", bench)])
    figure = figures.find("time")
    svg = pictures.render(figure.draw(report, None), figure, False).decode()
    words = "".join(ElementTree.fromstring(svg).itertext())
    assert name in words and "…" not in words


def test_the_edge_ends_at_a_better_first_arm(tmp_path):
    first = files.a_run(tmp_path / "fsdp", "dense", 1, 1.0, 2.0)
    lines = [
        files.head("packed"),
        files.step(1, bits_sent_per_param=files.legs(values=1)),
        files.evaluation(12, 3.0),
    ]
    report = inputs.read_report([first, files.run(tmp_path / "worse", lines)])
    edge = draw(report, "pareto")["edge"]
    assert (
        [row["x"] for row in edge[:2]] == [2, 6] and edge[0]["y"] > 1 and edge[1]["y"] == pytest.approx(0.01)
    )


def test_losses(tmp_path):
    """Two seeds are a line, their mean, in a band; a gap is taken per seed; time and bits are sums over
    steps."""
    paths = [files.a_run(tmp_path / f"{name}-s{seed}", name, seed, 1.0, loss)
             for name, seed, loss in (("dense", 1, 2.0), ("dense", 2, 2.2), ("packed", 1, 2.1), ("packed", 2,
                 2.2))]  # fmt: skip
    report = inputs.read_report(paths)
    last = {row["arm"]: row for row in draw(report, "loss")["validation"] if row["x"] == 12}
    assert last["dense"]["y"] == pytest.approx(2.1) and (last["dense"]["low"], last["dense"]["high"]) == (
        2.0,
        2.2,
    )
    assert "2 seeds" in last["dense"]["tip"]
    gap = {row["arm"]: row for row in draw(report, "gap")["validation"] if row["x"] == 12}
    assert (
        gap["packed"]["y"] == pytest.approx(2.5)
        and gap["packed"]["high"] == pytest.approx(5)
        and gap["dense"]["y"] == pytest.approx(0)
    )
    seconds = sum(9 if i <= 2 else 1 + 0.001 * i for i in range(1, 13))
    assert max(row["x"] for row in draw(report, "loss-time")["validation"]) == pytest.approx(seconds)
    # before (W-1)/W
    assert max(row["x"] for row in draw(report, "loss-bits")["validation"]) == pytest.approx(12 * 2 * 11)


def test_bars(tmp_path):
    def arm(name, scale, memory):
        steps = [
            {
                "round": 0,
                "total_s": scale,
                "compute_s": 0.25 * scale,
                "wait_gather_s": 0.5 * scale,
                "wait_reduce_s": 0.125 * scale,
                "optimizer_s": 0,
            }
        ]
        return {"name": name, "total_s": files.spread(scale, 0.9 * scale, 2 * scale),
                "exposed_s": files.spread(0.6), "speedup": files.spread(1 / scale),
                "iterations": steps, "bits_per_param": files.legs(values=32 * scale, gather=64),
                "memory_bytes": {"parameters": memory}, "n_params": 10,
                "options": {}}  # fmt: skip

    first = files.write(
        tmp_path / "a.json", files.bench([arm("fsdp", 1, 1e6), arm("half", 0.5, 2e6)], world_size=4)
    )
    report = inputs.read_report([first])
    data = draw(report, "time")
    assert [(row["arm"], row["p"], row["v"]) for row in data["parts"]] == [
        ("fsdp", "computes", 0.25), ("fsdp", "waits for parameters", 0.5), ("fsdp", "waits for gradients",
            0.125), ("fsdp", "other", 0.125),
        ("half", "computes", 0.125), ("half", "waits for parameters", 0.25), ("half", "waits for gradients",
            0.0625), ("half", "other", 0.0625)]  # fmt: skip
    assert data["parts"][-1]["e"] == "500 ms, 2.00x" and data["whiskers"][1] == {"r": 2, "a": 0.45, "b": 1.0}
    assert [row["t"].endswith("; 1.00x: fsdp") for row in data["heads"]] == [True]  # whose factors these are
    assert "whiskers least to most" in json.dumps(figures.find("time").draw(report, None)[0].spec())
    assert [row["v"] for row in draw(report, "bits")["parts"]] == [32, 64, 16, 64]
    figure = figures.find("time")
    names = ["an arm whose name is rather long for a picture", "b"]
    wide = inputs.read_report(
        [files.write(tmp_path / "c.json", files.bench([arm(name, 1, 1e6) for name in names], world_size=4))]
    )
    (drawing,) = figure.draw(wide, None)  # in a font that is wider by a sixth, no name is cut, and no heading
    assert drawing.spec()["padding"]["left"] >= style.text_width(names[0], 12) / 6
    (drawing,) = figures.find("timeline").draw(inputs.read_report([files.SEED_FILES[3]]), None)
    labels = [param["value"] for param in drawing.spec()["params"] if param["name"] == "labels"][0]
    longest = max(style.text_width(label, 12) for label in labels)
    assert longest and drawing.spec()["padding"]["left"] >= longest / 6
    assert draw(wide, "time")["heads"] == []
    # and the ends of whiskers
    assert marks(pictures.render(figure.draw(report, None), figure, False), "rect") == 8 + 4
    # Gigabytes beside megabytes are two drawings of one figure, with an axis of their own; equal bits are
    # drawn once.
    second = files.write(
        tmp_path / "b.json", files.bench([arm("fsdp", 1, 1e9), arm("half", 0.5, 2e9)], world_size=4)
    )
    report = inputs.read_report([first, second])
    assert len(figures.find("memory").draw(report, None)) == 2 and len(draw(report, "bits")["parts"]) == 4
    assert (
        ElementTree.fromstring(
            pictures.render(figures_bars.memory(report), figures.find("memory"), False)
        ).tag
        == f"{SVG}svg"
    )


def test_timeline_of_many_spans():
    """What is too narrow is drawn together, and nothing is lost: the drawn spans cover the same time."""
    events = [files.event("forward", 0, 0, 10, "u")]
    events += [files.event("backward", 0, 10 + 2 * i, 11 + 2 * i, "u") for i in range(40000)] + [
        files.event("optimizer", 0, 80010, 80020, "")
    ]
    report = inputs.Report()
    report.traces.append(inputs.read_trace(files.trace(events), "x", "x"))
    spans = draw(report, "timeline", ["u"])["spans"]
    assert len(spans) < 5000
    assert min(span["a"] for span in spans) == 0 and max(span["b"] for span in spans) == pytest.approx(80.02)
    assert {span["k"] for span in spans} == {"forward", "backward", "optimizer"}
    last = max(span["b"] for span in spans if span["k"] == "backward")
    assert last == pytest.approx(80.009, abs=0.05)


def test_every_row_of_a_timeline_has_its_name():
    report = inputs.read_report([files.SEED_FILES[3]])
    (drawing,) = figures.find("timeline").draw(report, None)
    names = [param["value"] for param in drawing.spec()["params"] if param["name"] == "labels"][0]
    svg = pictures.render([drawing], figures.find("timeline"), False)
    shown = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    for name in {name for name in names if name}:
        assert shown.count(name) == names.count(name), name


def test_window_by_name():
    report = inputs.read_report([files.SEED_FILES[3]])
    assert {
        span["u"] for span in draw(report, "window", ["h.1", "h.2"])["spans"] if span["k"] == "backward"
    } <= {"h.1", "h.2"}
    assert not figures.find("window").draw(report, ["h.77"])


def test_forty_arms_differ(tmp_path):
    looks = {(style.line_color(i), tuple(style.dash(i))) for i in range(40)}
    assert len(looks) == 40
    paths = [
        files.run(tmp_path / f"an-arm-of-many-{i:02d}", [files.head(f"v{i}"), files.step(1), files.step(2)])
        for i in range(40)
    ]
    (drawing,) = figures.find("loss").draw(inputs.read_report(paths), None)
    encoding = drawing.spec()["layer"][0]["encoding"]
    pairs = list(
        zip(encoding["color"]["scale"]["range"], map(tuple, encoding["strokeDash"]["scale"]["range"]))
    )
    assert len(set(pairs)) == 40 and len(encoding["color"]["scale"]["domain"]) == 40


def test_long_runs_stay_small(tmp_path):
    lines = [files.head()] + [files.step(i, loss=3 + (i % 2)) for i in range(1, 20001)]
    report = inputs.read_report([files.run(tmp_path / "long", lines)])
    rows = draw(report, "loss")["training"]
    assert len(rows) < 500 and rows[-1]["x"] == 20000
    assert all(abs(row["y"] - 3.5) < 0.01 for row in rows)  # smooth


def test_dark_colours():
    """A colour has one dark counterpart, and each light one that figures use has it."""
    used = {
        *style.FILLS,
        *style.LINES,
        style.PAGE,
        style.INK,
        style.SOFT,
        style.GRID,
        style.FRAME,
        style.IDLE,
        style.PALE_INK,
        style.PANEL,
    }
    assert used == set(style.DARK)
    report = inputs.read_report(files.SEED_FILES)
    for figure in figures.FIGURES:
        for drawing in figure.draw(report, None):
            spec = drawing.spec()
            found = set(
                re.findall(
                    r"#[0-9a-fA-F]{3,8}\b",
                    json.dumps({name: value for name, value in spec.items() if name != "datasets"}),
                )
            )
            assert found <= set(style.DARK), figure.name
            dark = json.dumps(
                {name: value for name, value in style.dark_spec(spec).items() if name != "datasets"}
            )
            assert not found - set(style.DARK.values()) & set(re.findall(r"#[0-9a-f]{6}\b", dark)), (
                figure.name
            )


def test_legends_hide(tmp_path):
    """Each legend is one that clicks reach, and each figure can be zoomed."""
    report = inputs.read_report([*files.SEED_FILES, files.write(tmp_path / "q.json", files.quality())])
    for figure in figures.FIGURES:
        for drawing in figure.draw(report, None):
            vega = vl_convert.vegalite_to_vega(drawing.spec())
            for legend in vega.get("legends", []):
                assert legend["encode"]["labels"]["interactive"], figure.name
            assert "zoom" in [signal["name"] for signal in vega["signals"]], figure.name


# ---- hostile names and numbers ----


class Page(html.parser.HTMLParser):
    """Elements that are all closed, ids that occur once, and no address but those of the page itself."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.scripts, self.text = [], set(), [], ""
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            assert not name.startswith("on") and name not in ("src", "style", "srcset"), (tag, name)
            assert name != "href" or value.startswith("#") or value == "data:,", value
            if name == "id":
                assert value not in self.ids, value
                self.ids.add(value)
        if tag == "script":
            self.scripts.append(dict(attributes))
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self.open[-1:] != ["script"] and self.open[-1:] != ["style"]:
            self.text += data


def specs_of(text):
    return json.loads(
        re.search(r'<script type="application/json" id="specs">(.*?)</script>', text, re.DOTALL)[1]
    )


@pytest.fixture(scope="module")
def seeds_page():
    return page.render(inputs.read_report(files.SEED_FILES), None, f"A {HOSTILE}")


def test_page(seeds_page):
    parsed = Page(seeds_page)
    for wanted in "summary loss time bits timeline memory codec lab origin".split():
        assert wanted in parsed.ids, wanted
    assert [script["type"] for script in parsed.scripts] == ["application/json", "module"]
    assert "products: OpenBLAS 0.3.21, kernel SkylakeX" in seeds_page
    assert "<title>A &lt;script&gt;alert(1)" in seeds_page and "\x1b" not in seeds_page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', seeds_page)[1]
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "http" not in policy
    before_the_library = seeds_page[: seeds_page.index('<script type="module">')]
    assert "http" not in before_the_library.replace("http-equiv", "") and "url(" not in before_the_library
    assert len(specs_of(seeds_page)) == seeds_page.count('class="drawing"') >= 10
    assert len(seeds_page) < 2_500_000


def test_a_page_without_validation_or_bench(tmp_path):
    """One step: sections are there that have something to show."""
    text = page.render(
        inputs.read_report([files.run(tmp_path / "a", [files.head(), files.step(1)])]), None, None
    )
    ids = Page(text).ids
    assert {"summary", "loss", "time", "bits", "origin"} <= ids and not ids & {
        "timeline",
        "memory",
        "codec",
        "lab",
        "figure-gap",
    }


def test_markup_in_names(tmp_path):
    """Names of folders, options, arms and units become neither elements nor code, on the page or in a
    picture."""
    name = HOSTILE.replace("/", "|")
    folders = [files.run(tmp_path / name, [files.head(HOSTILE), files.step(1), files.step(2)]),
               files.run(tmp_path / "b", [files.head("</td><script>x"), files.step(1),
                                          files.step(2)])]  # fmt: skip
    events = [
        files.event("forward", 0, 0, 9, HOSTILE),
        files.event("backward", 0, 9, 99, HOSTILE),
        files.event("optimizer", 0, 99, 120, ""),
    ]
    report = inputs.read_report([*folders, files.write(tmp_path / "t.json", files.trace(events))])
    text = page.render(report, None, None)
    parsed = Page(text)
    assert len(parsed.scripts) == 2 and "<script>alert(1)" in parsed.text and "</td><script>x" in parsed.text
    assert text.count("</script>") == 2 and "\x1b" not in text and "\u202e" not in text
    for figure in ("loss", "time", "window"):
        root = ElementTree.fromstring(
            pictures.render(figures.find(figure).draw(report, None), figures.find(figure), False)
        )
        assert not list(root.iter(f"{SVG}script")) and not [
            value for element in root.iter() for key, value in element.items() if key.startswith("on")
        ]
        assert figure == "window" or any(
            "<script>alert(1)" in (element.text or "") for element in root.iter(f"{SVG}text")
        )
    for spec in specs_of(text):  # names are data: expressions are ours
        for expression in re.findall(
            r'"(?:labelExpr|expr|calculate)":"(.*?)"[,}]', json.dumps(spec, separators=(",", ":"))
        ):
            assert "alert" not in expression


@pytest.mark.parametrize("number", [None, 1e308, -1e308, -5, 1e-320, 0, 10**400])
def test_odd_numbers(tmp_path, number):
    bits = files.legs(values=number, gather=number)
    steps = [
        files.step(i, number, number, compute_s=number, wait_gather_s=number, bits_sent_per_param=bits)
        for i in range(1, 8)
    ]
    lines = [files.head(), *steps, files.evaluation(3, number), files.evaluation(7, number)]
    report = inputs.read_report(
        [files.run(tmp_path / "a", lines), files.run(tmp_path / "b", [*lines, files.step(8, 1, 3)])]
    )
    for figure in figures.FIGURES:
        for drawing in figure.draw(report, None):
            json.dumps(drawing.spec(), allow_nan=False)


# ---- the command ----


def tagc_report(capsys, code, *arguments):
    assert command.main([str(argument) for argument in arguments]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err and (code == 0 or said.err.startswith("tagc-report: "))
    return said.out if code == 0 else said.err


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tagc_report(
        capsys,
        0,
        "--quiet",
        "--svg-dir",
        "svg",
        "--svg",
        "loss=a.svg,time=b.png",
        files.SEED_FILES[0],
        files.SEED_FILES[3],
    )
    said = tagc_report(capsys, 0, "--out", "page.html", *files.SEED_FILES)
    assert said.splitlines()[-1] == "page: page.html" and max(map(len, said.splitlines())) <= 110
    assert not [name for name in os.listdir() if name.endswith(".partial")]
    drawn = {"loss", "loss-time", "loss-bits", "time", "bits", "timeline", "window"}
    assert drawn == {name.removesuffix(".svg") for name in os.listdir("svg")}
    assert len(specs_of(open("page.html").read())) >= 10
    for name in os.listdir("svg"):
        root = ElementTree.parse(f"svg/{name}").getroot()
        assert (
            root.tag == f"{SVG}svg"
            and root[0].tag == f"{SVG}title"
            and root[1].tag == f"{SVG}desc"
            and "http" not in (root[2].text or "")
        ), name
    assert open("a.svg").read() == open("svg/loss.svg").read()  # one specification, one drawing
    assert open("b.png", "rb").read(4) == b"\x89PNG"
    assert (
        tagc_report(capsys, 0, "--quiet", "--svg", "loss=d.svg", "--dark", files.SEED_FILES[0]) == ""
        and style.DARK[style.PAGE] in open("d.svg").read()
    )


def test_the_figures_of_the_help_are_those_there_are():
    assert tuple(command._FIGURES.split(", ")) == figures.NAMES


WRONG = [
    (2, (), "no input"), (1, ("nowhere",), "nowhere: No such file"), (2, ("--svg", "looses=no.svg", "RUN"),
        '"looses" is not a figure, allowed: loss'),
    (2, ("--svg", "loss", "RUN"), "FIGURE=FILE"), (2, ("--svg", "loss=x.gif", "RUN"),
                                                   '"x.gif" ends in neither .svg nor .png'),
    (1, ("--svg", "codec=no.svg", "RUN"), "codec: it needs a bench or lab result"), (2, ("--units", "h.1",
        "RUN"), "--units needs a timeline"),
    (2, ("--units", "h.77", files.SEED_FILES[3]), '"h.77" in a timeline; they hold '), (1, ("--out",
        "no/page.html", "RUN"), "cannot write no/page.html"),
    (1, ("--out", ".", "RUN"), "it is a folder"), (1, (".",), "nothing to report"), (1, ("--svg-dir",
        "RUN/metrics.jsonl/x", "RUN"), "metrics.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize("code, arguments, words", WRONG, ids=range(len(WRONG)))
def test_mistakes_are_named_and_leave_nothing(tmp_path, capsys, monkeypatch, code, arguments, words):
    monkeypatch.chdir(tmp_path)
    run = files.a_run(tmp_path / "runs" / "a", "dense", 1, 1.0, 2.0)
    assert words in tagc_report(capsys, code, *[argument.replace("RUN", run) for argument in arguments])
    assert os.listdir() == ["runs"]


def test_an_old_file_stays_where_writing_fails(tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text("old")
    monkeypatch.setattr(
        os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(ReportError, match="No space left"):
        pictures.write_file(str(tmp_path / "page.html"), b"new")
    assert (tmp_path / "page.html").read_text() == "old" and len(os.listdir(tmp_path)) == 1


def test_without_altair(tmp_path, capsys, monkeypatch):
    """The summary needs nothing; a page says what it needs."""
    run = files.a_run(tmp_path / "a", "dense", 1, 1.0, 2.0)
    monkeypatch.setitem(sys.modules, "altair", None)
    assert "pip install" in tagc_report(capsys, 2, "--out", tmp_path / "page.html", run)
    assert "a step of a takes" in tagc_report(capsys, 0, run)


def test_neither_torch_nor_altair_is_loaded_for_words():
    program = (
        "import sys, tagc.report.command; print([name for name in ('torch', 'numpy', 'altair', "
        "'vl_convert') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.stdout == "[]\n", done


def test_it_is_a_command_of_tagc(capsys):
    assert main.main(["report", "--titel", "x"]) == 2
    assert 'did you mean "--title"?' in capsys.readouterr().err
    assert main.main(["help"]) == 0
    assert "  report   a page and pictures" in capsys.readouterr().out
