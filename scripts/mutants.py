#!/usr/bin/env python3
"""Do the tests find bugs? Makes small ones in lib/ and engine/ by universalmutator's rules for C, compiles
each alone, links it before the libraries of the tests that execute its line, and runs these until one fails:
first those that find most bugs of the file per second.

    pip install universalmutator
    make test-build && scripts/mutants.py --out build/mutants --mutants 300   # repeat to go on where it was
                                                                              stopped

It first runs each test once, linked with libraries that count with gcov which lines the test executes. A
mutant then is

    killed        a test fails, and again when it is repeated
    hung          killed: a test took ten times its processor time, or slept for 12 s longer than without the
                  mutant
    same code     gcc -O2 makes the same object: no test can see it
    not executed  no test executes the line
    survived      an equivalent program, or a hole in the tests

The C tests count, the MPI ones among them, but not those in Python and those that drive the command. Nothing
changes in the sources and build/. One run at a time may use a folder. As root, tests run as the user with
number 65534: a mutant may write anywhere.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import hashlib
import io
import itertools
import json
import os
import pathlib
import queue
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import threading
import time

try:
    from universalmutator import mutator
except ImportError:
    sys.exit("mutants: universalmutator is missing: pip install universalmutator")

MODULES = (
    "lib/codec",
    "lib/exchange",
    "lib/paper",
    "lib/schedule",
    "lib/unit",
    "engine/fsdp",
    "lib/transport",
    "lib/core",
)
ROOT = pathlib.Path(__file__).resolve().parent.parent
DECLARATION = re.compile(r"[^\s=][^=]*$|\s+(?!\s|return\b|goto\b)[\w ]+ [*\w, \[\]]+;$")
POLL_S, POLLS_A_LOOK, IDLE_LOOKS = 0.5, 8, 3
LIBC = ctypes.CDLL(None)


def lines_of(path: str):
    """The lines of a file that have code, as (path, number)."""
    in_comment, lines = False, []
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        text = line.strip()
        if not in_comment and len(text) > 2 and not text.startswith(("/*", "//", "#", "static_assert")):
            lines.append((path, number))
        in_comment = (in_comment or "/*" in line) and "*/" not in line
    return lines


def mutants_of(path: str, number: int, seed: int):
    """What rules make of the line, in an order chosen by the seed."""
    line = (ROOT / path).read_text().splitlines(keepends=True)[number - 1]
    if DECLARATION.match(line):  # the rules make hardly any C of one
        return []
    with contextlib.redirect_stdout(io.StringIO()):
        made = mutator.mutants_regexp(
            [line], ["universal.rules", "c_like.rules", "c.rules"], ignorePatterns=[], ignoreStringOnly=True
        )
    # The rules put break and continue behind every line, which is C in few places.
    texts = [text for _, text, *_ in made if not text.rstrip().endswith(("continue;", "break;"))]
    random.Random(f"{seed} {path} {number}").shuffle(texts)
    return texts[:6]


def write_json(path: pathlib.Path, value):
    """The file is the old one or the whole new one, also where the run is stopped here."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value))
    new.replace(path)


class Test:
    """A test of ctest, and its program in the build folder: None if it is a script's."""

    def __init__(self, listed: dict, build: pathlib.Path):
        properties = {p["name"]: p["value"] for p in listed["properties"]}
        self.name, self.words = listed["name"], listed.get("command", [])
        self.environment = dict(pair.split("=", 1) for pair in properties.get("ENVIRONMENT", []))
        is_script = bool(set(properties.get("LABELS", [])) & {"cli", "lab", "python", "abi"})
        programs = [
            os.path.isfile(word) and os.access(word, os.X_OK) and word.startswith(f"{build}/")
            for word in self.words
        ]
        self.place = max((i for i, is_program in enumerate(programs) if is_program), default=None)
        self.program = None if is_script or self.place is None else self.words[self.place]

    def command(self, program: pathlib.Path):
        """Runs another program in place of the test's own."""
        return self.words[: self.place] + [str(program)] + self.words[self.place + 1 :]


class Build:
    """How the build folder compiles a file and links a test."""

    def __init__(self, build: pathlib.Path, out: pathlib.Path):
        self.build, self.out, self.linked, self.originals, self.exported = build, out, {}, {}, {}
        commands = json.loads((build / "compile_commands.json").read_text())
        self.compile = {}  # of path: the library's name, and the command
        for entry in commands:
            library = entry["command"].partition(" -o ")[2].partition(".dir/")[0].rpartition("/")[2]
            path = os.path.relpath(entry["file"], ROOT)
            if path.startswith(tuple(f"{m}/" for m in MODULES)) and library.startswith(
                ("module_", "tagc_mpi")
            ):
                self.compile[path] = (f"lib{library.replace('tagc_mpi', 'tagc-mpi')}.a", entry)
        listed = json.loads(subprocess.check_output(["ctest", "--test-dir", build, "--show-only=json-v1"]))[
            "tests"
        ]
        self.tests = [test for test in (Test(t, build) for t in listed) if test.program]

    def object(self, path: str, text: str, target: pathlib.Path, options: list):
        """Compiles `text` instead of the file at path. False if it is not valid C."""
        _, entry = self.compile[path]
        words = [
            w for w in shlex.split(entry["command"]) if not w.startswith(("-O", "-g")) and "ccache" not in w
        ]
        words = words[: words.index("-o")] + [*options, "-Wno-error", "-o", str(target)]
        words += [
            f"-Werror={what}"
            for what in ("int-conversion", "incompatible-pointer-types", "implicit-function-declaration")
        ]
        words += ["-iquote", str((ROOT / path).parent), "-x", "c", "-c", "-"]
        try:
            done = subprocess.run(
                words, input=text.encode(), cwd=entry["directory"], capture_output=True, timeout=600
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def is_original(self, path: str, text: str, slot: int):
        """Whether the compiler makes the same of the text as of the file."""
        mutant = self.out / f"fast{slot}.o"
        if path not in self.originals:
            assert self.object(path, (ROOT / path).read_text(), mutant, ["-O2"]), f"{path} does not compile"
            self.originals[path] = mutant.read_bytes()
        return self.object(path, text, mutant, ["-O2"]) and mutant.read_bytes() == self.originals[path]

    def exports_all(self, path: str, obj: pathlib.Path):
        """Whether a mutant still defines what the file does: the linker would take the rest from the library,
        which has no mutant."""

        def names(of):
            return {
                line.split()[0]
                for line in subprocess.check_output(
                    ["nm", "-gP", "--defined-only", of], text=True
                ).splitlines()
            }

        exported = names(obj)
        if path not in self.exported:
            original = obj.with_suffix(".original.o")
            assert self.object(path, (ROOT / path).read_text(), original, ["-O1"]), f"{path} does not compile"
            self.exported[path] = names(original)
        return self.exported[path] <= exported

    def link_words(self, test: Test):
        name = os.path.relpath(test.program, self.build)
        if name not in self.linked:
            lines = subprocess.check_output(
                ["ninja", "-C", self.build, "-t", "commands", name], text=True
            ).splitlines()
            self.linked[name] = shlex.split(lines[-1].removeprefix(": && ").removesuffix(" && :"))
        return self.linked[name]

    def link(
        self,
        test: Test,
        target: pathlib.Path,
        obj: pathlib.Path | None = None,
        libraries: pathlib.Path | None = None,
    ):
        """Links a test's program with obj before its libraries, or with those of a folder. False where a
        symbol is missing."""
        words = [w for w in self.link_words(test) if w != "-g"] + ["-Wl,-S"]
        words[words.index("-o") + 1] = str(target)
        if obj:
            words.insert(words.index("-o"), str(obj))
        if libraries:
            words = [str(libraries / w) if (libraries / w).exists() else w for w in words]
            words += ["--coverage", str(libraries / "leave.o"), "-Wl,--wrap=_exit"]
        return subprocess.run(words, cwd=self.build, capture_output=True).returncode == 0


def members_of(session: int):
    """The processes of a session: number, state, processor seconds with those of children that ended."""
    members = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            if int(words[3]) == session:
                members.append(
                    (int(path.parent.name), words[0], sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK"))
                )
    return members


def execute(
    command: list,
    environment: dict,
    home: pathlib.Path,
    most_cpu_s: float,
    idle_looks: int,
    stop_early: bool = True,
):
    """'passed', 'killed' or 'hung', processor seconds, and how many looks in a row found all of its processes
    asleep."""

    def limits():
        resource.setrlimit(resource.RLIMIT_CPU, (int(most_cpu_s) + 1, int(most_cpu_s) + 2))
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        LIBC.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: the test ends with this run

    log = home / "output"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home,
            preexec_fn=limits,
            env={**os.environ, "TMPDIR": str(home), **environment},
            start_new_session=True,
            **({"user": 65534, "group": 65534} if os.getuid() == 0 else {}),
        )
    used = last = 0.0
    idle, most_idle, n_polls, verdict, ended = 0, 0, 0, None, 0
    while not ended and verdict is None:
        time.sleep(min(0.02 * 2 ** min(n_polls, 9), POLL_S))
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        n_polls += 1
        if ended:
            process.returncode, used = (
                os.waitstatus_to_exitcode(status),
                max(used, usage.ru_utime + usage.ru_stime),
            )
        elif stop_early and b"FAILED" in log.read_bytes():
            verdict = "killed"
        elif n_polls % POLLS_A_LOOK == 0:
            members = members_of(process.pid)
            used = max(used, sum(m[2] for m in members))
            idle = 0 if used != last or any(m[1] in "RDT" for m in members) else idle + 1
            last, most_idle = used, max(idle, most_idle)
            # looks, not seconds: a stop of this whole run is no sleep of the test
            if idle > idle_looks or used > most_cpu_s:
                verdict = "hung"
    for pid, *_ in members_of(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    code = process.wait()
    verdict = verdict or (
        "passed" if code == 0 else "skipped" if code == 77 else "hung" if code in (-24, -9) else "killed"
    )
    return verdict, max(used, 0.01), most_idle


class Coverage:
    """Which lines each test executes, and what it takes: kept in coverage.json for as long as the test's
    program is the same."""

    def __init__(self, build: Build, tests: list, out: pathlib.Path):
        self.build, self.tests, self.folder, self.path = build, tests, out / "coverage", out / "coverage.json"
        self.known = (
            json.loads(self.path.read_text())
            if self.path.exists()
            else {"tests": {}, "files": {}, "sources": None}
        )
        programs = {t.program for t in self.tests}
        self.keys = {p: hashlib.sha256(pathlib.Path(p).read_bytes()).hexdigest() for p in programs}

    def is_known(self, test: Test):
        entry = self.known["tests"].get(test.name, {"verdict": "new"})
        return (
            entry["verdict"] in ("passed", "skipped", "of other modules")
            and entry["key"] == self.keys[test.program]
        )

    def compile(self, pool):
        """The libraries once more, such that they count; those of the last run, if the sources are the
        same."""
        texts = [
            path.read_bytes()
            for product in ("lib", "engine")
            for path in sorted((ROOT / product).rglob("*.[ch]"))
        ]
        sources = hashlib.sha256(b"".join(texts)).hexdigest()
        if self.known["sources"] == sources:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.folder.chmod(0o777)
        made = collections.defaultdict(list)
        for path, (library, _) in self.build.compile.items():
            made[library].append((path, self.folder / (path.replace("/", "-").removesuffix(".c") + ".o")))
        jobs = [job for jobs in made.values() for job in jobs]
        assert all(
            pool.map(
                lambda job: self.build.object(
                    job[0], (ROOT / job[0]).read_text(), job[1], ["-O1", "--coverage"]
                ),
                jobs,
            )
        )
        for library, objects in made.items():
            subprocess.check_call(["ar", "rcs", self.folder / library, *[obj for _, obj in objects]])
        # A forked process that calls _exit writes its counts, too.
        text = (
            "void __gcov_dump(void); void __real__exit(int); void __wrap__exit(int c) { __gcov_dump(); "
            "__real__exit(c); }"
        )
        subprocess.run(
            ["cc", "-x", "c", "-c", "-o", self.folder / "leave.o", "-"], input=text.encode(), check=True
        )
        self.known["sources"] = sources

    def measure(self, test: Test, home: pathlib.Path):
        """What a test executes, as {file: lines} and what else is kept of it, and the lines and functions of
        these files."""
        counts, program = home / "counts", home / "program"
        shutil.rmtree(counts, ignore_errors=True)
        counts.mkdir()
        counts.chmod(0o777)
        entry, files = {"key": self.keys[test.program], "verdict": "of other modules", "lines": {}}, {}
        if {library for library, _ in self.build.compile.values()} & set(self.build.link_words(test)):
            strip = str(len(self.folder.parts) - 1)
            environment = {**test.environment, "GCOV_PREFIX": str(counts), "GCOV_PREFIX_STRIP": strip}
            is_linked = self.build.link(test, program, None, self.folder)
            entry["verdict"], entry["cpu_s"], entry["idle_looks"] = (
                execute(test.command(program), environment, home, 200, 1000, False)
                if is_linked
                else ("no link", 0, 0)
            )
        data = sorted(counts.glob("*.gcda"))
        for path in data:
            (counts / f"{path.stem}.gcno").symlink_to(self.folder / f"{path.stem}.gcno")
        said = subprocess.run(
            ["gcov", "--json-format", "--stdout", *data], cwd=counts, capture_output=True, text=True
        ).stdout
        for counted, path in zip(map(json.loads, said.splitlines()), data):
            source = path.stem.replace("-", "/") + ".c"
            mine = [f for f in counted["files"] if f["file"] == "<stdin>"][0]
            files[source] = {
                "lines": sorted({line["line_number"] for line in mine["lines"]}),
                "functions": [[f["start_line"], f["end_line"]] for f in mine["functions"]],
            }
            entry["lines"][source] = sorted({line["line_number"] for line in mine["lines"] if line["count"]})
        return entry, files

    def keep(self, test: Test, entry: dict, files: dict):
        self.known["tests"][test.name] = entry
        self.known["files"].update(files)
        write_json(self.path, self.known)
        if entry["verdict"] not in ("passed", "skipped", "of other modules"):  # it must pass as it is
            print(f"note: {test.name} is left out: {entry['verdict']}", flush=True)

    def of(self, path: str, number: int):
        """The tests that execute a line. A line without code counts as the one before it in its function, and
        as the whole file outside of functions (tables)."""
        known = self.known["files"].get(path, {"lines": [], "functions": []})
        bounds = next((f for f in known["functions"] if f[0] <= number <= f[1]), None)
        line = max((n for n in known["lines"] if bounds and bounds[0] <= n <= number), default=None)
        tests = []
        for test in self.tests:
            entry = self.known["tests"][test.name]
            lines = entry["lines"].get(path, ())
            if entry["verdict"] == "passed" and (line in lines if line else lines):
                tests.append(test)
        return tests


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--build", type=pathlib.Path, default=ROOT / "build", help="a folder that is built. Default: build"
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="where results and programs go")
    parser.add_argument(
        "--mutants", type=int, default=300, help="how many, old results included. Default: 300"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--most-cpu",
        type=float,
        default=3,
        help="seconds; a longer test runs where its name has the file's in it, "
        "or no shorter one executes the line. Default: 3",
    )
    parser.add_argument("--only", type=re.compile, default="", help="a regular expression of paths")
    parser.add_argument("--leave-out", default="^$", help="a regular expression of tests")
    parser.add_argument(
        "--retry", action="store_true", help="judge again what survived or was not executed, and nothing else"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mutants at a time. Default: one per processor"
    )
    options = parser.parse_args()
    out = options.out.resolve()
    slots = queue.SimpleQueue()  # a mutant's files and folder
    for slot in range(options.jobs):
        (out / f"home{slot}").mkdir(parents=True, exist_ok=True)
        (out / f"home{slot}").chmod(0o777)
        slots.put(slot)
    build = Build(options.build.resolve(), out)
    left_out = re.compile(options.leave_out)
    coverage = Coverage(build, [t for t in build.tests if not left_out.search(t.name)], out)
    results_path = out / "results.jsonl"
    results = (
        {r["id"]: r for r in map(json.loads, results_path.read_text().splitlines())}
        if results_path.exists()
        else {}
    )
    kills = collections.Counter((r["file"], r.get("test")) for r in results.values())
    pool = concurrent.futures.ThreadPoolExecutor(options.jobs)

    @contextlib.contextmanager
    def a_slot():
        slot = slots.get()
        try:
            yield slot
        finally:
            slots.put(slot)

    writing = threading.Lock()

    def measure(test):
        with a_slot() as slot:
            entry = coverage.measure(test, out / f"home{slot}")
        with writing:
            coverage.keep(test, *entry)

    unknown = [test for test in coverage.tests if not coverage.is_known(test)]
    if unknown:
        print(f"{len(unknown)} tests: which lines do they execute?", flush=True)
        coverage.compile(pool)
        list(pool.map(measure, unknown))

    def judge(path, number, text, slot):
        lines = (ROOT / path).read_text().splitlines(keepends=True)
        mutated = "".join(lines[: number - 1]) + text + "".join(lines[number:])
        obj = out / f"mutant{slot}.o"
        if not build.object(path, mutated, obj, ["-O1"]) or not build.exports_all(path, obj):
            return {"verdict": "no C"}
        module, stem = path.split("/")[1], pathlib.Path(path).stem.partition("_")[0]
        tests = coverage.of(path, number)
        if not tests:
            return {"verdict": "same code" if build.is_original(path, mutated, slot) else "not executed"}
        cost_s = {test: coverage.known["tests"][test.name]["cpu_s"] for test in tests}
        short = [t for t in tests if cost_s[t] <= options.most_cpu or (stem in t.name and cost_s[t] <= 60)]
        chance = {
            t: kills[path, t.name] + 0.3 * (stem in t.name) + 0.1 * (f"_{module}_" in t.name) + 0.02
            for t in tests
        }
        tried = 0
        for test in sorted(short or tests, key=lambda t: (cost_s[t] + 0.1) / chance[t]):
            if tried == 2 and build.is_original(path, mutated, slot):
                return {"verdict": "same code"}
            program, home = out / f"changed{slot}", out / f"home{slot}"
            if not build.link(test, program, obj):
                return {"verdict": "no C"}
            idle_looks = coverage.known["tests"][test.name]["idle_looks"] * 2 + IDLE_LOOKS

            def failure():
                verdict, *_ = execute(
                    test.command(program), test.environment, home, 2 + 10 * cost_s[test], idle_looks
                )
                return verdict if verdict != "passed" else None

            # Twice: a busy machine may make a test time out.
            verdict = failure()
            if verdict == "hung" or (verdict and (verdict := failure())):
                return {"verdict": verdict, "test": test.name}
            tried += 1
        if tried <= 2 and build.is_original(path, mutated, slot):
            return {"verdict": "same code"}
        return {"verdict": "survived", "tests": tried}

    def keep(result, line):
        results[result["id"]] = result
        kills[result["file"], result.get("test")] += 1
        with open(results_path, "a") as log:
            log.write(json.dumps(result) + "\n")
        print(f"{result['file']}:{result['line']} {result['verdict']} {result.get('test', '')}", flush=True)
        if result["verdict"] in ("survived", "not executed"):
            print(f"-{line}\n+{result['text'].rstrip()}", flush=True)
        return result

    def mutant(path, number, texts):
        """The result of a line, an old one or a new one: of the first of its texts that is other C."""
        line = (ROOT / path).read_text().splitlines()[number - 1]
        key = hashlib.sha256(f"{options.seed} {path} {number} {line}".encode()).hexdigest()[:12]
        if key in results:
            return results[key]
        with a_slot() as slot:
            for text in texts:
                judged = judge(path, number, text, slot)
                if judged["verdict"] not in ("no C", "same code"):
                    break
        return keep({"id": key, "file": path, "line": number, "original": line, "text": text, **judged}, line)

    def again(result):
        """Judges a mutant once more, on the line that has its text today."""
        lines = (ROOT / result["file"]).read_text().splitlines()
        numbers = [n for n, line in enumerate(lines, 1) if line == result["original"]]
        if not numbers:
            return keep({**result, "verdict": "line is gone"}, result["original"])
        number = min(numbers, key=lambda n: abs(n - result["line"]))
        with a_slot() as slot:
            judged = judge(result["file"], number, result["text"], slot)
        return keep({**result, "line": number, **judged}, result["original"])

    if options.retry:
        kept = [
            r
            for r in results.values()
            if r["verdict"] in ("survived", "not executed") and options.only.search(r["file"])
        ]
        list(pool.map(again, kept))
    else:
        every: list = []
        for module in MODULES:
            files = sorted(p for p in build.compile if p.startswith(f"{module}/") and options.only.search(p))
            every.append([line for f in files for line in lines_of(f)])
            random.Random(f"{options.seed} {module}").shuffle(every[-1])
        places, n_run = [place for turn in itertools.zip_longest(*every) for place in turn if place], 0
        while places and n_run < options.mutants:
            n_now = options.mutants - n_run
            now, places = places[:n_now], places[n_now:]
            texts = [(*place, mutants_of(*place, options.seed)) for place in now]
            judged = pool.map(lambda changed: mutant(*changed), [changed for changed in texts if changed[2]])
            n_run += sum(1 for r in judged if r["verdict"] not in ("no C", "same code", "not executed"))
    counted = collections.Counter((r["file"].split("/")[1], r["verdict"]) for r in results.values())
    print("\n".join(f"{module} {verdict}: {n}" for (module, verdict), n in sorted(counted.items())))


if __name__ == "__main__":
    main()
