#!/usr/bin/env python3
"""Do the tests find bugs? Makes many small ones in src/ by universalmutator's rules for C, compiles each alone, links it before
the libraries of the tests of its module, and runs these, cheapest first, until one fails.

    pip install universalmutator
    scripts/mutants.py --out build/mutants --mutants 300        # builds nothing in build/, changes nothing in src/
    scripts/mutants.py --out build/mutants --mutants 300 --run  # as above, and runs; repeat to go on where it was stopped

A mutant is killed (a test fails), hung (killed since a test took ten times its processor time, or slept for 10 s), the same code
(gcc -O2 makes the same object: no test can see it), or a survivor: an equivalent program, or a hole in the tests. Survivors are
printed with their diff. As root, tests run as nobody: a mutant may write anywhere.
"""
import argparse
import collections
import contextlib
import difflib
import hashlib
import io
import json
import os
import pathlib
import random
import resource
import shlex
import subprocess
import sys
import time

try:
    from universalmutator import mutator
except ImportError:
    sys.exit("mutants: universalmutator is missing: pip install universalmutator")

# The labels of the tests of a module's files.
COVER = {"codec": ("codec", "exchange", "cuda"), "exchange": ("exchange", "cuda", "fsdp"), "fsdp": ("fsdp", "plan")}
ROOT = pathlib.Path(__file__).resolve().parent.parent


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
    with contextlib.redirect_stdout(io.StringIO()):
        made = mutator.mutants_regexp([line], ["universal.rules", "c_like.rules", "c.rules"], ignorePatterns=[], ignoreStringOnly=True)
    # The rules put break and continue behind every line, which is C in few places.
    texts = [text for _, text, *_ in made if not text.rstrip().endswith(("continue;", "break;"))]
    random.Random(f"{seed} {path} {number}").shuffle(texts)
    return texts[:6]


class Build:
    """How the build folder compiles a file and links a test."""

    def __init__(self, build: pathlib.Path, out: pathlib.Path):
        self.build, self.out, self.linked, self.originals, self.seen = build, out, {}, {}, {}
        commands = json.loads((build / "compile_commands.json").read_text())
        self.compile = {c["file"]: c for c in commands if f"{os.sep}module_" in c.get("output", c["command"])}
        listed = json.loads(subprocess.check_output(["ctest", "--test-dir", build, "--show-only=json-v1"]))["tests"]
        self.tests = []
        for test in listed:
            labels = next((p["value"] for p in test["properties"] if p["name"] == "LABELS"), [])
            if len(test.get("command", [])) == 1:
                self.tests.append((test["name"], test["command"][0], labels))

    def object(self, path: str, text: str, name: str, level: str):
        """Compiles `text` instead of the file at path. None if it is not valid C."""
        entry = self.compile[str(ROOT / path)]
        words = [w for w in shlex.split(entry["command"]) if not w.startswith(("-O", "-g")) and "ccache" not in w]
        words = words[: words.index("-o")] + [level, "-Wno-error", "-o", str(self.out / name)]
        words += [f"-Werror={what}" for what in ("int-conversion", "incompatible-pointer-types", "implicit-function-declaration")]
        words += ["-iquote", str((ROOT / path).parent), "-x", "c", "-c", "-"]
        done = subprocess.run(words, input=text.encode(), cwd=entry["directory"], capture_output=True, timeout=120)
        return self.out / name if done.returncode == 0 else None

    def original(self, path: str, level: str):
        if (path, level) not in self.originals:
            self.originals[path, level] = self.object(path, (ROOT / path).read_text(), "original.o", level).read_bytes()
        return self.originals[path, level]

    def link(self, program: str, obj: pathlib.Path | None, name: str):
        """Links a test's program with obj before its libraries. False where obj lacks a function that others call."""
        target = os.path.relpath(program, self.build)
        if target not in self.linked:
            lines = subprocess.check_output(["ninja", "-C", self.build, "-t", "commands", target], text=True).splitlines()
            self.linked[target] = shlex.split(lines[-1].removeprefix(": && ").removesuffix(" && :"))
        words = list(self.linked[target])
        words[words.index("-o") + 1] = str(self.out / name)
        words = [w for w in words if w != "-g"] + ["-Wl,-S"]
        if obj:
            words.insert(words.index("-o"), str(obj))
        return subprocess.run(words, cwd=self.build, capture_output=True).returncode == 0

    def symbols(self, path):
        """The functions and tables that an object has for others, or that a program has: hidden ones are its own."""
        is_object = str(path).endswith(".o")
        if path not in self.seen or is_object:
            words = subprocess.check_output(["nm", "--defined-only", *["-g"] * is_object, path], text=True).split()
            self.seen[path] = set(words[2::3])
        return self.seen[path]


def cpu_s(pid: int):
    """Processor seconds of a process so far, and whether all of its threads sleep."""
    used, states = 0.0, set()
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            used += (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
            states.add(words[0])
    return used, states == {"S"}


def execute(program: pathlib.Path, home: pathlib.Path, most_cpu_s: float):
    """'passed', 'killed' or 'hung', and processor seconds."""
    def limits():
        resource.setrlimit(resource.RLIMIT_CPU, (int(most_cpu_s) + 1, int(most_cpu_s) + 2))
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = home / "output"
    with open(log, "wb") as output:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen([program], stdout=output, stderr=output, cwd=home, env=environment, preexec_fn=limits,
                                   start_new_session=True, **({"user": 65534, "group": 65534} if os.getuid() == 0 else {}))
    used = last = 0.0
    idle_since, verdict = time.monotonic(), None
    while process.poll() is None and verdict is None:
        time.sleep(0.05)
        used, sleeps = cpu_s(process.pid)
        if used != last or not sleeps:
            last, idle_since = used, time.monotonic()
        if time.monotonic() - idle_since > 10:
            verdict = "hung"
        elif b"FAILED" in log.read_bytes():
            verdict = "killed"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    code = process.wait()
    return verdict or ("passed" if code == 0 else "hung" if code in (-24, -9) else "killed"), max(used, 0.01)


def diff(path: str, number: int, text: str):
    old = (ROOT / path).read_text().splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, old[: number - 1] + text.splitlines(keepends=True) + old[number:], path, path, n=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="a built folder. Default: build")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="where results and programs go")
    parser.add_argument("--mutants", type=int, default=300, help="how many. Default: 300")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-cpu", type=float, default=3,
                        help="tests of more processor seconds are left out, but for those with the file's name. Default: 3")
    parser.add_argument("--only", default="", help="files whose path has this text in it")
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args()
    out = options.out.resolve()
    (out / "home").mkdir(parents=True, exist_ok=True)
    (out / "home").chmod(0o777)
    build = Build(options.build.resolve(), out)

    files = sorted(str(p.relative_to(ROOT)) for module in COVER for p in (ROOT / "src" / module).rglob("*.c"))
    files = [f for f in files if str(ROOT / f) in build.compile and options.only in f]
    every = [line for f in files for line in lines_of(f)]
    random.Random(options.seed).shuffle(every)
    results_path, costs_path = out / "results.jsonl", out / "costs.json"
    results = {r["id"]: r for r in map(json.loads, results_path.read_text().splitlines())} if results_path.exists() else {}
    costs = json.loads(costs_path.read_text()) if costs_path.exists() else {}
    kills = collections.Counter((r["file"], r.get("test")) for r in results.values())
    strangers = collections.defaultdict(set)

    def judge(path, number, texts):
        """The first of the texts that is C, and what the tests say to it."""
        for text in texts:
            verdict = judge_one(path, number, text)
            if verdict["verdict"] not in ("no C", "same code"):
                break
        return {"text": text, **verdict}

    def judge_one(path, number, text):
        lines = (ROOT / path).read_text().splitlines(keepends=True)
        mutated = "".join(lines[: number - 1]) + text + "".join(lines[number:])
        obj = build.object(path, mutated, "mutant.o", "-O1")
        if not obj:
            return {"verdict": "no C"}
        if obj.read_bytes() == build.original(path, "-O1"):
            return {"verdict": "same code"}
        tests = [t for t in build.tests if set(t[2]) & set(COVER[path.split("/")[1]])]
        stem = pathlib.Path(path).stem.partition("_")[0]
        tests.sort(key=lambda t: (-kills[(path, t[0])], stem not in t[0], costs.get(t[0], 0)))
        tried = 0
        for name, program, _ in tests:
            if name not in costs:  # must pass as it is
                if not build.link(program, None, "plain"):
                    sys.exit(f"mutants: {name} does not link: build {options.build} first")
                verdict, costs[name] = execute(out / "plain", out / "home", 60)
                if verdict != "passed":
                    print(f"note: {name} is left out: {verdict}", flush=True)
                    costs[name] = 1e9
                costs_path.write_text(json.dumps(costs))
            if costs[name] > (60 if stem in name else options.most_cpu) or name in strangers[path]:
                continue
            if not build.symbols(obj) & build.symbols(program):
                strangers[path].add(name)
                continue
            if not build.link(program, obj, "changed"):
                return {"verdict": "no C"}
            tried += 1
            verdict, _ = execute(out / "changed", out / "home", 2 + 10 * costs[name])
            if verdict != "passed":
                return {"verdict": verdict, "test": name}
        obj = build.object(path, mutated, "mutant.o", "-O2")
        return {"verdict": "same code" if obj.read_bytes() == build.original(path, "-O2") else "survived", "tests": tried}

    n_run = 0
    for path, number in every:
        if n_run >= options.mutants:
            break
        texts = mutants_of(path, number, options.seed)
        if not texts:
            continue
        line = (ROOT / path).read_text().splitlines()[number - 1]
        key = hashlib.sha256(f"{options.seed} {path} {number} {line}".encode()).hexdigest()[:12]
        if key not in results:
            if not options.run:
                n_run += 1
                continue
            result = {"id": key, "file": path, "line": number, **judge(path, number, texts)}
            results[key] = result
            kills[(path, result.get("test"))] += 1
            with open(results_path, "a") as log:
                log.write(json.dumps(result) + "\n")
            print(f"{n_run + 1} {path}:{number} {result['verdict']} {result.get('test', '')}", flush=True)
        n_run += results[key]["verdict"] not in ("no C", "same code")
    for result in results.values():
        if result["verdict"] == "survived":
            print(f"\nsurvivor {result['id']}, {result['tests']} tests\n{diff(result['file'], result['line'], result['text'])}")
    print(dict(collections.Counter(r["verdict"] for r in results.values())), f"; {len(every)} lines of code")


if __name__ == "__main__":
    main()
