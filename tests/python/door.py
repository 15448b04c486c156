"""The commands of README.md and docs/guide, as a newcomer gives them: in an empty clone, with an empty
virtual environment, so that nothing undeclared helps.

    door.py SOURCE SCRATCH TAGC     SOURCE is the repository, TAGC the built command

The environment gets what `pip install ".[torch]"` asks for. torch itself and what its metadata says that it
needs are linked from this interpreter's environment, because it is large; all else pip fetches. Every line of
a block of commands is run, with what is added here to make it short, or has a reason here for which it is
not."""

import importlib.metadata as metadata
import importlib.util
import os
import pathlib
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs/guide"
FIRST = ("install", "pytorch", "run", "trainers", "command", "does-it-pay")  # as their readers come
OTHERS = sorted({page.stem for page in GUIDE.glob("*.md")} - {*FIRST})
PAGES = ("README.md", *(f"docs/guide/{name}.md" for name in (*FIRST, *OTHERS)))

SMALL = "--steps 2 --n-layer 1 --n-embd 32"
SAVE = (
    "--save saved --record runs/here.jsonl"  # torch's own checkpoints, which the guide uses, need NumPy, too
)
COMPILED = "--steps 2 --n-embd 32 --backend aot_eager"
TINY = "--model tiny --steps 3 --batch-size 2 --seq-len 16 --quiet"
# What a line begins with -> what is added to it.
ADDED = {
    'pip install ".[torch]"': "",
    'pip install ".[report]"': "",
    "python -m tagc": "",
    "build/tagc data": "",
    "build/tagc train": TINY,
    "build/tagc compare": "",
    "tagc bench --model demo": "--quiet --n-layer 1 --rounds 1 --arms fsdp,all-legs --json bench.json",
    "tagc-report bench.json runs/first runs/second": "",
    "torchrun --standalone --nproc-per-node 2 examples/pytorch/train_gpt.py": f"{SMALL} {SAVE}",
    "torchrun --standalone --nproc-per-node 2 examples/pytorch/compiled.py": COMPILED,
    "tagc-report runs/first runs/second --out report.html": "",
    "tagc-report --out here.html runs/here.jsonl": "",
}
# What a line begins with -> why it is not run.
NOT_HERE = {
    "make": "needs packages of the system, and takes minutes; make check runs it all",
    "mpirun": "needs hosts with these names",
    "torchrun --nnodes": "needs several hosts; tests/python/test_elastic.py does it on one",
    "python -m tagc report": "is a name",
    "python -m tagc run": "is a name; tests/python/test_run.py",
    "python -m tagc data": "is a name; tests/python/test_data.py",
    'pip install ".[data]"': "is the package tokenizers; tests/python/test_data.py",
    "torchrun ...": "is a part of a command",
    "torchrun --standalone --nproc-per-node 2": "is a part of a command, whose script is a link",
    "tagc bench": "is a name, or needs minutes; tests/cli/test_cli_bench.sh",
    "tagc ": "is a name, or a part of a command",
    "build/tagc --help": "tests/cli/test_cli_options.sh",
    "examples/supervise.sh": "tests/cli/test_cli_supervise.sh",
    "export": "sets a variable of MPI or torch",
    "sysctl": "changes the kernel",
    "wg ": "changes the network",
    "ip ": "changes the network",
    "pip install torchft": "tests/python/quorum/test_torchft.py",
    "scripts/report.sh": "is tagc-report",
}


def fail(text):
    sys.exit(f"FAILED: {text}")


# ---- the commands ----


def commands_of(page, text):
    """Returns the lines of blocks without a language that begin as commands do, and commands in sentences."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if language:
            continue
        joined = block.replace("\\\n", " ")
        lines = [re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines()]
        if any(line.startswith((*ADDED, *NOT_HERE)) for line in lines):
            found += [line for line in lines if line]
    inline = r"`((?:pip|torchrun|python|tagc-report) [^`\n]*)`"
    found += [line for line in re.findall(inline, text) if " " in line]
    return found


def chosen(table, line):
    """Returns the longest beginning of the line in a table, or None."""
    return max((start for start in table if line.startswith(start)), key=len, default=None)


def split(page, line):
    """Returns the parts of a && b."""
    parts = [part.strip() for part in line.split("&&")]
    for part in parts:
        if chosen(ADDED, part) is None and chosen(NOT_HERE, part) is None:
            fail(f'{page}: "{part}" is in neither ADDED nor NOT_HERE of {__file__}')
    return parts


# ---- the environment ----


def requirements_of(name):
    """Returns the distributions that an installed one needs on this system, itself included."""
    from packaging.requirements import Requirement

    needed, waiting = {}, [name]
    while waiting:
        one = metadata.distribution(waiting.pop())
        if one.metadata["Name"].lower() in needed:
            continue
        needed[one.metadata["Name"].lower()] = one
        for text in one.requires or ():
            asked = Requirement(text)
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                waiting.append(asked.name)
    return list(needed.values())


SCRIPT = """#!{python}
import sys
from {module} import {attribute}
sys.exit({attribute}())
"""


def put(source, target):
    """A link to a file, or a copy, with the time that compiled Python code is checked by."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def link(distribution, site, bin):
    """Puts the files of a distribution into another environment, and makes its scripts there."""
    own = pathlib.Path(sysconfig.get_path("purelib")).resolve()
    for entry in distribution.entry_points:
        if entry.group == "console_scripts":
            script = bin / entry.name
            script.write_text(SCRIPT.format(python=bin / "python", module=entry.module, attribute=entry.attr))
            script.chmod(0o755)
    for file in distribution.files or ():
        source = pathlib.Path(os.path.normpath(distribution.locate_file(file)))
        if not source.is_file() or not source.is_relative_to(own):
            continue
        target = site / source.relative_to(own)
        put(source, target)
        if source.suffix == ".py":  # else each process would compile torch
            compiled = pathlib.Path(importlib.util.cache_from_source(source))
            if compiled.is_file():
                put(compiled, pathlib.Path(importlib.util.cache_from_source(target)))


def make_clone(source, clone):
    """Copies what git has, and nothing that was built."""
    listed = subprocess.run(
        ["git", "-C", source, "ls-files", "-z"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        path = pathlib.Path(source, name)
        if path.is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, clone / name)


def used_s():
    """Returns the processor seconds of all commands so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def ccache_folder():
    """Returns the setting by which another home has the compiler cache of this one."""
    if shutil.which("ccache") is None:
        return {}
    folder = subprocess.run(["ccache", "-k", "cache_dir"], check=True, capture_output=True, text=True).stdout
    return {"CCACHE_DIR": folder.strip()}


class Door:
    def __init__(self, source, scratch, command):
        shutil.rmtree(scratch, ignore_errors=True)
        self.clone, self.env = scratch / "clone", scratch / "env"
        (scratch / "home").mkdir(parents=True)
        make_clone(source, self.clone)
        subprocess.run([sys.executable, "-m", "venv", self.env], check=True)
        passed = ("PIP_", "CCACHE_", "CMAKE_C_COMPILER_LAUNCHER")
        kept = {name: value for name, value in os.environ.items() if name.startswith(passed)}
        # This tests what is declared and not the compiler, which takes longest with all that it can do.
        # test_install.sh makes a wheel with kernels for CUDA.
        self.environment = kept | {
            "PATH": f"{self.env}/bin:{scratch}/path:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(scratch / "home"), "OMP_NUM_THREADS": "1", "SKBUILD_CMAKE_BUILD_TYPE": "None",
            "SKBUILD_CMAKE_DEFINE": "TAGC_GPU=HOST", "CFLAGS": "-O1",
            # With ccache, no pip install compiles what an earlier one did, in this run or in one before.
            "CCACHE_BASEDIR": "/", **ccache_folder(),
            "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1",
        }  # fmt: skip
        (scratch / "path").mkdir()
        (scratch / "path" / "tagc").symlink_to(command)
        (self.clone / "build").mkdir()
        (self.clone / "build" / "tagc").symlink_to(command)

    def run(self, line, limit_s=400):
        start = used_s()
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.clone, env=self.environment, timeout=limit_s, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        print(f"{used_s() - start:5.0f} s of processors  {line}", flush=True)
        if done.returncode:
            print(done.stdout[-4000:])
            fail(f"{line}: exit code {done.returncode}")
        return done.stdout

    def site(self):
        return pathlib.Path(
            self.run("python -c \"import sysconfig; print(sysconfig.get_path('purelib'))\"").strip()
        )


PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
batches = torch.randn(2, 4, 64)
{snippet}
model(torch.randn(4, 64)).square().mean().backward()
bits = [None, None]
dist.all_gather_object(bits, round(handle.stats()["bits_per_param"]))
if dist.get_rank() == 0:
    print("bits of both ranks:", *bits, flush=True)
handle.close()
dist.barrier()
dist.destroy_process_group()
"""


# Forecasts need nothing of the environment that the first one did not need.
PLANS = """
import sys
from tagc.commands.main import main
for line in sys.stdin.read().splitlines():
    assert main(line.split()[3:]) == 0, line
"""


def check_plans(door, lines):
    """Runs commands that begin with "python -m tagc plan", in one process."""
    (door.clone / "plans.py").write_text(PLANS)
    quoted = shlex.quote("\n".join(lines))
    door.run(f"python plans.py <<< {quoted}")


def check_snippet(door):
    """Runs README's loop with the lines that its diff adds."""
    text = (door.clone / "README.md").read_text()
    lines = re.search(r"^```diff\n(.*?)^```$", text, re.M | re.S)[1].splitlines()
    snippet = "\n".join(line[2:] for line in lines)
    (door.clone / "newcomer.py").write_text(PROGRAM.format(snippet=snippet))
    said = door.run("torchrun --standalone --nproc-per-node 2 newcomer.py")
    if not re.search(r"bits of both ranks: [1-9]\d* [1-9]", said):
        fail(f"README's Python: {said}")


def main(source, scratch, command):
    if (
        shutil.which("git") is None
        or subprocess.run(["git", "-C", source, "rev-parse"], capture_output=True).returncode
    ):
        print("skipped: no clone of git")
        return 77
    door = Door(source, pathlib.Path(scratch).resolve(), pathlib.Path(command).resolve())
    site = door.site()
    for distribution in requirements_of("torch"):
        link(distribution, site, door.env / "bin")
    pages = {page: (door.clone / page).read_text() for page in PAGES}
    lines = [part for page in PAGES for line in commands_of(page, pages[page]) for part in split(page, line)]
    missing = [start for start in ADDED if not any(chosen(ADDED, line) == start for line in lines)]
    if missing:
        fail(f"no page has {missing[0]!r} any more: take it out of ADDED")
    shutil.copytree(door.clone / "docs", door.clone / "FOLDER")
    done, plans = set(), []
    for line in lines:
        start, other = chosen(ADDED, line), chosen(NOT_HERE, line)
        if start is None or (other is not None and len(other) > len(start)):
            continue
        if line in done:
            continue
        done.add(line)
        if line.startswith("python -m tagc plan "):
            plans.append(line)
            if len(plans) > 1:
                continue
        prepare(door, start)
        said = door.run(f"{line} {ADDED[start]}")
        if start == 'pip install ".[torch]"':
            check_snippet(door)
        if SAVE in ADDED[start] and "saved" not in said:
            fail(said)
    check_plans(door, plans[1:])
    print(f"{len(done)} commands of {len(PAGES)} pages")
    return 0


def prepare(door, start):
    """Makes the files that a page takes for granted: the reader's own results."""
    clone = door.clone
    if "runs/first runs/second" in start:
        for mine, name in (("fsdp", "first"), ("tagc", "second")):
            shutil.copytree(clone / "runs" / mine, clone / "runs" / name, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
