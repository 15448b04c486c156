"""Runs the Python tests on each minor version of torch, from the oldest that tagc supports to the newest that
the package index
has: the newest release of each, in an environment that is made for it and deleted afterwards. Some gigabytes
each to download, where the index has builds for CUDA; no GPU is needed. What was found joins that of earlier
calls in lab/results/torch-versions.json, and the table there and in docs/reference/torch-versions.md is
written anew.

    scripts/torch_versions.sh                                          # all tests on all versions: hours
    scripts/torch_versions.sh --versions 2.9,2.15
    scripts/torch_versions.sh --versions 2.10,2.11 --tests fsdp2,fsdp1  # test_<name>.py below tests/python
    scripts/torch_versions.sh --check oldest                            # as ctest does, or "newest"

A check writes no table, and keeps its environment in ~/.cache/tagc. Where none can be made it exits with 77,
which ctest takes for skipped."""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).parents[1]
TESTS = ROOT / "tests" / "python"
FOUND = ROOT / "lab" / "results" / "torch-versions.json"
DOCS = ROOT / "docs" / "reference" / "torch-versions.md"
BEGIN, END = "<!-- scripts/torch_versions.sh writes what follows -->", "<!-- to here -->"
OLDEST = (2, 9)
CHECKED = "ddp,fsdp1,fsdp2,state,compiled,two_at_once,one_rank_differs".split(",")  # by --check
NEEDED = ["numpy", "pytest"]  # by these tests
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tagc"
SKIPPED = 77
FILE_LIMIT_S = 1200


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="torch_versions.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--versions", help="minor versions, as 2.9,2.15; default: all", type=lambda text: text.split(",")
    )
    parser.add_argument(
        "--tests", help="names of tests, as fsdp2,ddp; default: all", type=lambda text: text.split(",")
    )
    parser.add_argument(
        "--library",
        type=pathlib.Path,
        default=ROOT / "build" / "libtagc.so",
        help="default: build/libtagc.so",
    )
    parser.add_argument(
        "--environments",
        type=pathlib.Path,
        help="folder that keeps environments, and has some from before: <folder>/<version>",
    )
    parser.add_argument("--check", choices=("oldest", "newest"), help="runs a few tests on that version")
    parser.add_argument(
        "--table", action="store_true", help="writes the table of what was found before, and runs nothing"
    )
    arguments = parser.parse_args()
    known = names_of_tests()
    for name in arguments.tests or ():
        if name not in known:
            parser.error(f"--tests: {name!r} is not known, must be of {', '.join(known)}")
    if not arguments.table and not arguments.library.is_file():
        parser.error(f'--library: {arguments.library} is missing; "make build" makes it')
    return parser, arguments


def files_of_tests():
    """{name: path}, of annexes, too."""
    found = [*TESTS.glob("test_*.py"), *TESTS.glob("*/test_*.py")]
    return {path.stem.removeprefix("test_"): path for path in sorted(found, key=lambda path: path.stem)}


def names_of_tests():
    return [*files_of_tests()]


def newest_releases():
    """{"2.9": "2.9.1", ...} of what pip's index has."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    ).stdout
    found = {}
    for text in re.search(r"Available versions: (.*)", said).group(1).split(", "):
        if numbers := re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text):
            major, minor, patch = map(int, numbers.groups())
            if (major, minor) >= OLDEST:
                found[major, minor] = max(patch, found.get((major, minor), 0))
    return {f"{major}.{minor}": f"{major}.{minor}.{found[major, minor]}" for major, minor in sorted(found)}


def all_needs():
    """What all tests need besides torch."""
    lines = (TESTS / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not re.match(r"#|torch\b", line)]


def make_environment(folder, release, needs):
    """Its interpreter."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run(
            [
                python,
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
                f"torch=={release}",
                *needs,
            ],
            check=True,
        )
        (folder / "made").touch()
    return python


def run_file(python, library, name, scratch):
    """{"passed", "failed", "skipped", "names" of those that failed, "seconds"} of one file of tests."""
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "TAGC_LIBRARY": str(library.resolve()),
        "PYTHONPATH": str(ROOT / "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    begin = time.monotonic()
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        files_of_tests()[name],
    ]
    with open(scratch / f"{name}.log", "w") as log:
        try:
            subprocess.run(
                command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=FILE_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            print(f"test_{name} did not end in {FILE_LIMIT_S} s", flush=True)
    found = {"passed": 0, "failed": 0, "skipped": 0, "names": [], "seconds": round(time.monotonic() - begin)}
    if not report.exists():
        return found | {"failed": 1, "names": [f"{name}: no report"]}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        found["failed" if bad else "skipped" if case.find("skipped") is not None else "passed"] += 1
        if bad:
            found["names"].append(f"{name}: {case.get('name')}")
    if found["failed"]:
        said = (scratch / f"{name}.log").read_text().splitlines()
        print("\n".join([line for line in said if line.startswith("E  ")][-40:] or said[-20:]), flush=True)
    return found


def run_version(minor, release, arguments, keep):
    """keep(build, {name: what run_file() gives}) is called after each file."""
    kept = arguments.environments
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        folder = (kept or scratch) / minor
        try:
            python = make_environment(folder, release, all_needs())
            build = subprocess.run(
                [python, "-c", "import torch; print(torch.__version__)"],
                check=True,
                text=True,
                stdout=subprocess.PIPE,
            ).stdout.strip()
            for name in arguments.tests or names_of_tests():
                found = run_file(python, arguments.library, name, scratch)
                print(
                    f"torch {build} test_{name}: "
                    + ", ".join(f"{found[what]} {what}" for what in ("passed", "skipped", "failed")),
                    f"({found['seconds']} s)",
                    flush=True,
                )
                keep(build, {name: found})
        finally:
            if kept is None:
                shutil.rmtree(folder, ignore_errors=True)


def check(which, library):
    """Runs the tests of CHECKED on the oldest or the newest release that pip can install."""
    try:
        releases = [*newest_releases().values()]
    except (subprocess.CalledProcessError, AttributeError):  # pip says nothing of torch
        releases = []
    for release in releases[:1] if which == "oldest" else releases[::-1]:
        folder = CACHE / f"torch-{release}"
        try:
            python = make_environment(folder, release, NEEDED)
            break
        except subprocess.CalledProcessError:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"skipped: pip cannot install the {which} of {', '.join(releases) or 'torch'} here")
        return SKIPPED
    n_failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in CHECKED:
            if name not in files_of_tests():  # of an annex that is left out
                continue
            found = run_file(python, library, name, pathlib.Path(scratch))
            print(f"torch {release} test_{name}: {found}", flush=True)
            n_failed += found["failed"] + (not found["passed"])
    return int(n_failed > 0)


def table_of(found):
    lines = ["| torch | tests | passed | skipped | failed |", "|---|---|---:|---:|---|"]
    for minor in sorted(found, key=lambda minor: tuple(map(int, minor.split(".")))):
        files = found[minor]["files"]
        total = {what: sum(one[what] for one in files.values()) for what in ("passed", "skipped")}
        names = [f"`{name}`" for one in files.values() for name in one["names"]]
        ran = "all" if set(files) >= set(names_of_tests()) else ", ".join(files)
        lines.append(
            f"| {found[minor]['build']} | {ran} | {total['passed']} | {total['skipped']} | "
            f"{', '.join(names) or '-'} |"
        )
    return "\n".join(lines)


def write_table(found):
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    DOCS.write_text(f"{before}{BEGIN}\n\n{table_of(found)}\n\n{END}{rest.split(END, 1)[1]}")
    print(table_of(found))


def main():
    parser, arguments = parse_arguments()
    if arguments.check:
        return check(arguments.check, arguments.library)
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    if not arguments.table:
        releases = newest_releases()
        for minor in arguments.versions or releases:
            if minor not in releases:
                parser.error(f"--versions: {minor!r} is not there, must be of {', '.join(releases)}")
        for minor in arguments.versions or releases:

            def keep(build, files, minor=minor):
                before = found.get(minor, {})
                found[minor] = {
                    "build": build,
                    "files": (before["files"] if before.get("build") == build else {}) | files,
                }
                FOUND.write_text(
                    "{\n"
                    + ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
                    + "\n}\n"
                )

            run_version(minor, releases[minor], arguments, keep)
    write_table(found)
    return int(any(one["failed"] for version in found.values() for one in version["files"].values()))


if __name__ == "__main__":
    sys.exit(main())
