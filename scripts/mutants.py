#!/usr/bin/env python3
"""Do the tests find bugs? Makes small ones in src/ by universalmutator's rules for C, compiles each alone, links it before the
libraries of the tests of its module, and runs these until one fails: first those that find most bugs of the file per second.

    pip install universalmutator
    scripts/mutants.py --out build/mutants --mutants 300        # repeat to go on where it was stopped

A mutant is killed (a test fails), hung (killed since a test took ten times its processor time, or slept for 10 s), the same code
(gcc -O2 makes the same object: no test can see it), or a survivor: an equivalent program, or a hole in the tests. It changes
nothing in src/ and build/. One run at a time may use a folder. As root, tests run as nobody: a mutant may write anywhere.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import hashlib
import io
import itertools
import json
import os
import pathlib
import queue
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

    def is_original(self, obj: pathlib.Path, path: str, level: str):
        if (path, level) not in self.originals:
            self.originals[path, level] = self.object(path, (ROOT / path).read_text(), f"original-{obj.name}", level).read_bytes()
        return obj.read_bytes() == self.originals[path, level]

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
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="a built folder. Default: build")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="where results and programs go")
    parser.add_argument("--mutants", type=int, default=300, help="how many. Default: 300")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-cpu", type=float, default=3, help="seconds; longer tests are for files of their name. Default: 3")
    parser.add_argument("--only", default="", help="files whose path has this text in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time. Default: one per processor")
    options = parser.parse_args()
    out = options.out.resolve()
    slots = queue.SimpleQueue()  # a mutant's files and folder
    for slot in range(options.jobs):
        (out / f"home{slot}").mkdir(parents=True, exist_ok=True)
        (out / f"home{slot}").chmod(0o777)
        slots.put(slot)
    build = Build(options.build.resolve(), out)
    every: list = []
    for module in COVER:
        files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "src" / module).rglob("*.c"))
        every.append([line for f in files if str(ROOT / f) in build.compile and options.only in f for line in lines_of(f)])
        random.Random(f"{options.seed} {module}").shuffle(every[-1])
    results_path, costs_path = out / "results.jsonl", out / "costs.json"
    results = {r["id"]: r for r in map(json.loads, results_path.read_text().splitlines())} if results_path.exists() else {}
    costs = json.loads(costs_path.read_text()) if costs_path.exists() else {}
    kills = collections.Counter((r["file"], r.get("test")) for r in results.values())

    def cost_of(name, program, slot):
        """Processor seconds of a test, which must pass as it is."""
        if name not in costs:
            is_linked = build.link(program, None, f"plain{slot}")
            verdict, cost_s = execute(out / f"plain{slot}", out / f"home{slot}", 60) if is_linked else ("does not link", 0)
            costs[name] = cost_s if verdict == "passed" else 1e9
            if verdict != "passed":
                print(f"note: {name} is left out: {verdict}", flush=True)
            costs_path.write_text(json.dumps(costs))
        return costs[name]

    def judge(path, number, text, slot):
        lines = (ROOT / path).read_text().splitlines(keepends=True)
        mutated = "".join(lines[: number - 1]) + text + "".join(lines[number:])
        obj = build.object(path, mutated, f"mutant{slot}.o", "-O1")
        if not obj:
            return {"verdict": "no C"}
        if build.is_original(obj, path, "-O1"):
            return {"verdict": "same code"}
        module, stem, symbols, tried = path.split("/")[1], pathlib.Path(path).stem.partition("_")[0], build.symbols(obj), 0
        chances = {t[0]: kills[path, t[0]] + 0.3 * (stem in t[0]) + 0.1 * (module in t[2]) + 0.02 for t in build.tests}
        for name, program, labels in sorted(build.tests, key=lambda test: (costs.get(test[0], 0) + 0.1) / chances[test[0]]):
            if not set(labels) & set(COVER[module]) or not symbols & build.symbols(program):
                continue
            if cost_of(name, program, slot) > (60 if stem in name else options.most_cpu):
                continue
            if tried == 2 and build.is_original(build.object(path, mutated, f"fast{slot}.o", "-O2"), path, "-O2"):
                return {"verdict": "same code"}
            if not build.link(program, obj, f"changed{slot}"):
                return {"verdict": "no C"}
            verdict, _ = execute(out / f"changed{slot}", out / f"home{slot}", 2 + 10 * costs[name])
            if verdict != "passed":
                return {"verdict": verdict, "test": name}
            tried += 1
        return {"verdict": "survived", "tests": tried}

    def mutant(path, number, texts):
        """The result of a line, an old one or a new one: of the first of its texts that is other C."""
        line = (ROOT / path).read_text().splitlines()[number - 1]
        key = hashlib.sha256(f"{options.seed} {path} {number} {line}".encode()).hexdigest()[:12]
        if key in results:
            return results[key]
        slot = slots.get()
        for text in texts:
            judged = judge(path, number, text, slot)
            if judged["verdict"] not in ("no C", "same code"):
                break
        slots.put(slot)
        results[key] = result = {"id": key, "file": path, "line": number, "text": text, **judged}
        kills[path, result.get("test")] += 1
        with open(results_path, "a") as log:
            log.write(json.dumps(result) + "\n")
        print(f"{path}:{number} {result['verdict']} {result.get('test', '')}", flush=True)
        if result["verdict"] == "survived":
            print(f"-{line}\n+{text}", flush=True)
        return result

    places, n_run = [place for turn in itertools.zip_longest(*every) for place in turn if place], 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        while places and n_run < options.mutants:
            now, places = places[: 4 * options.jobs], places[4 * options.jobs :]
            texts = [(*place, mutants_of(*place, options.seed)) for place in now]
            judged = pool.map(lambda changed: mutant(*changed), [changed for changed in texts if changed[2]])
            n_run += sum(1 for r in judged if r["verdict"] not in ("no C", "same code"))
    counted = collections.Counter((r["file"].split("/")[1], r["verdict"]) for r in results.values())
    print("\n".join(f"{module} {verdict}: {n}" for (module, verdict), n in sorted(counted.items())))


if __name__ == "__main__":
    main()
