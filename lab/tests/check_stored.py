#!/usr/bin/env python3
"""The smoke test: the lab can be imported, and stored results give the tables that stand in its pages and in
README. Takes seconds; wants neither torch nor a build."""

import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

try:
    import tomllib  # noqa: F401
except ImportError:
    print("skipped: python3 is older than 3.11")
    sys.exit(77)

LAB = pathlib.Path(__file__).resolve().parents[1]
sys.dont_write_bytecode = True


def said_by(*words):
    done = subprocess.run([sys.executable, "-B", LAB / "lab", *words], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def check_hosts():
    """Every experiment is read, and `lab tables` makes the page of results as it is."""
    listed = said_by("list")
    assert all(f"{path.stem} " in listed for path in (LAB / "experiments").glob("*.toml")), listed
    with tempfile.TemporaryDirectory() as folder:
        page = pathlib.Path(shutil.copy(LAB / "docs" / "results.md", folder))
        old = page.read_text()
        made = said_by("tables", "--into", page, LAB / "results")
        assert "speed" in made and page.read_text() == old, "tables of lab/docs/results.md differ"


def check_wall_clock():
    """The figures of wall_clock.py stand in a row of the page, whatever the row is called there."""
    sys.path.insert(0, str(LAB / "studies"))
    import wall_clock  # and with it what parity/ makes tables of

    losses, times = (
        json.loads((LAB / "results" / name).read_text()) for name in ("parity/cluster.json", "cluster.json")
    )
    page = (LAB / "docs" / "parity.md").read_text().replace("*", "")
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in page.splitlines() if line[:1] == "|"]
    found, _ = wall_clock.made(losses, times)
    made = [line.split(" | ")[1:] for line in wall_clock.table(found).splitlines()[3:] if line]
    assert len(made) == len(wall_clock.ARMS) - 1, made
    for cells in made:
        times, loss = cells[:4], cells[4].removesuffix(" |")
        wanted = [*times, "0" if loss == "+0.00 %" else loss]
        assert any(row[:4] == times and row[-1] == wanted[-1] for row in rows), cells


# Of each row of README's table of speed: a file of results and its case, the arm compared with, and tagc's.
SPEED = (
    ("speed", 0, "fsdp-bf16", "all-legs"),
    ("speed", 0, "zero2-bf16", "all-legs"),
    ("speed", 1, "zero2-bf16", "all-legs"),
    ("torch", 1, "fsdp2-bf16", "fsdp2-tagc-delta4-bf16"),
    ("torch", 1, "ddp-powersgd", "ddp-tagc"),
    ("cluster", 0, "fsdp2-bf16", "fsdp2-tagc-delta4-bf16"),
)


def factor(name, case, slow, fast):
    """How many times as fast, in two digits, by the median of rounds; "-" where it has not been measured."""
    sys.path.insert(0, str(LAB / "hosts"))
    import cells

    measured = json.loads((LAB / "results" / f"{name}.json").read_text())["cases"][case]
    arms = {arm["name"]: arm for arm in (measured.get("bench") or measured["torch"])["arms"]}
    if slow not in arms:
        return "-"
    ratio = statistics.median(cells.ratios(arms[slow], arms[fast]))
    return f"{ratio:.2f}" if ratio < 1.1 else f"{ratio:.1f}"


def rounds(name):
    """Of the arm that has fewest; None where a result has no times of rounds."""
    cases = json.loads((LAB / "results" / f"{name}.json").read_text())["cases"]
    arms = [arm for case in cases for arm in (case.get("bench") or case.get("torch") or {}).get("arms", [])]
    return min((len(arm["round_s"]) for arm in arms if "round_s" in arm), default=None)


def check_readme():
    page = (LAB.parent / "README.md").read_text()
    table = page[page.index("| model, link |") :].split("\n\n")[0].splitlines()[2:]
    found = [tuple(cell.strip() for cell in row.split("|")[3:6]) for row in table]
    accumulated = [factor("speed-accumulate", *row[1:]) if row[0] == "speed" else "-" for row in SPEED]
    counts = [
        min(rounds(name), rounds("speed-accumulate")) if other != "-" else rounds(name)
        for (name, *_), other in zip(SPEED, accumulated)
    ]
    made = list(zip((factor(*row) for row in SPEED), accumulated, map(str, counts), strict=True))
    assert found == made, (found, made)


def check_words_of_pictures():
    """No picture of the lab calls an arm as only the lab does."""
    import arms
    import pictures

    names = ({*pictures.NAMES} | {*arms.BY_NAME}) - {"packed", "direct", "dense", "paper", "tagc"}
    for picture in LAB.rglob("*.svg"):
        texts = re.findall(r">([^<>]+)</text>", picture.read_text())
        odd = [text for text in texts if text.split(",")[0] in names or re.search(r"\w[+=]\w", text)]
        assert texts and not odd, (picture.name, odd)


def check_few_rounds():
    """The page of results says which results have too few rounds for a verdict."""
    import cells

    few = []
    for path in sorted((LAB / "results").glob("*.json")):
        table = json.loads(path.read_text()).get("settings", {}).get("table")
        if table not in (None, "bits") and (n := rounds(path.stem)) is not None and n < cells.LEAST_ROUNDS:
            few.append(f"`{path.stem}` {n}")
    page = " ".join((LAB / "docs" / "results.md").read_text().split())
    said = f"Rounds of these: {', '.join(few)}." if few else "All have five."
    assert said in page, f"lab/docs/results.md does not say: {said}"


def check_pictures():
    """Each picture has its result, and names its arms in words."""
    sys.path.insert(0, str(LAB / "hosts"))
    import pictures

    for picture in (LAB / "results").glob("*.svg"):
        cases = json.loads(picture.with_suffix(".json").read_text())["cases"]
        names = [arm["name"] for case in cases for arm in case.get("bench", {}).get("arms", [])]
        names += [run["label"] for case in cases for run in case.get("runs", [])]
        known = pictures.SHOWN.get(picture.stem, names)
        assert names and set(known) <= set(names), (picture, known)
        for name in names:
            words = pictures.in_words(name)
            assert words != name and "+" not in words and "=" not in words, (picture.stem, name, words)


check_hosts()
check_wall_clock()
check_pictures()
check_words_of_pictures()
check_readme()
check_few_rounds()
print("all well")
