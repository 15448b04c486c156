#!/usr/bin/env python3
"""Reads all #includes of C and imports of Python, and holds them to the order of folders below.

    check_layout.py ROOT             checks the tree at ROOT
    check_layout.py ROOT --planted   checks that what is planted into copies of it is found

A line that breaks a rule is printed; the exit status is 1 then. To add a folder, give it a place in
C_ORDER, PYTHON_ORDER or ANNEXES.
"""

import ast
import functools
import pathlib
import re
import shutil
import sys
import tempfile

# A file includes files of its own folder and of folders in the lines before it, never of another one in the
# same line.
C_ORDER = [
    ["include/tagc"],
    ["lib/core"],
    ["lib/codec", "lib/schedule", "lib/transport"],
    ["lib/exchange"],
    ["lib/unit"],
    ["lib/paper", "lib/gpu"],
    ["lib"],  # lib/fences.c alone
    ["engine/model", "engine/disk", "engine/blas"],
    ["engine/data", "engine/files", "engine/fsdp", "engine/gpt2"],
    ["engine/launch"],
    ["engine/train"],
    ["planning/plan"],
    ["planning/mesh"],
    ["planning/sizes"],
    ["command/options"],
    ["command/bench", "command/cluster"],
    ["command/cli"],
]
# Only the folder itself, lib/fences.c and other products include these public headers.
FENCES = {"lib/paper": ["include/tagc/paper.h"], "lib/gpu": ["include/tagc/device.h"]}
# Includes that name no file of the tree.
ELSEWHERE = {"tagc_commit.h": "made by CMake", "harness.h": "tests/gpu/cuda, in place of CUDA's header"}

# A name with a star is a folder with all that it holds; others are one file.
PYTHON_ORDER = [
    ["tagc._declared"],
    ["tagc._declared_plan", "tagc._library"],
    ["tagc.__init__"],
    ["tagc._planner"],
    ["tagc._annexes"],
    ["tagc.torch.exchange.*"],
    ["tagc.torch.schedule.*"],
    ["tagc.torch.state", "tagc.torch.statistics"],
    ["tagc.torch.log", "tagc.torch.checkpoint", "tagc.torch.memory"],
    ["tagc.torch.passes"],
    ["tagc.torch.handle"],
    ["tagc.torch.hooks.*"],
    ["tagc.torch.advise.*"],
    ["tagc.torch.compress"],
    ["tagc.torch.extension"],
    ["tagc.torch.__init__"],
    ["tagc.run.*"],
    ["tagc.commands.parser"],
    ["tagc.commands.*"],
    ["tagc.__main__"],
]
# An annex is python/tagc/<name>, with its tests in tests/python/<name> and this page in docs/guide. It can be
# deleted with these: nothing else imports it, no annex imports another one, and each uses public names alone.
# tests/python/test_annexes.py deletes each.
ANNEXES = {
    "compiled": "compiled.md",
    "pipeline": "pipeline.md",
    "local": "local.md",
    "quorum": "torchft.md",
    "fsdp1": "fsdp1.md",
    "report": "report.md",
    "integrations": "trainers.md",
    "weights": "weights.md",
    "collectives": "collectives.md",
}
PYTHON_ORDER.append([f"tagc.{name}.*" for name in ANNEXES])
# What annexes may import of the rest: of these modules all names, or the names of __all__.
PUBLIC = {
    "tagc.__init__": "__all__",
    "tagc._library": "",
    "tagc._planner": "",
    "tagc.torch.__init__": "__all__",
    "tagc.torch.extension": "__all__",
    "tagc.torch.hooks.ddp": "__all__",
    "tagc.torch.hooks.fsdp2": "__all__",
    "tagc.commands.parser": "",
}
# The page of a result needs no torch and no libtagc.
ALONE = {"tagc.report.*": ["tagc.commands.parser"]}
# Beside the products; what is here imports and includes nothing of lab/, either.
BESIDE = ["bench", "cmake", "examples", "fuzz", "scripts", "tests"]

HERE = "tests/layout/check_layout.py"
C_SUFFIXES = (".c", ".h", ".cu", ".cuh")
PRODUCTS = ["include", "lib", "engine", "planning", "command"]


def level_of(name, order):
    """Returns the number of the line of `order` that has the name, and the entry."""
    for level, entries in enumerate(order):
        if name in entries:
            return level, name
    return None, None


def circles(arrows):
    """Returns the sets of names that lead to each other."""
    number, low, stack, found = {}, {}, [], []

    def visit(name):
        number[name] = low[name] = len(number)
        stack.append(name)
        for to in arrows.get(name, ()):
            if to not in number:
                visit(to)
            if to in stack:
                low[name] = min(low[name], low[to])
        if low[name] == number[name]:
            together = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(together) > 1:
                found.append(sorted(together))

    for name in arrows:
        if name not in number:
            visit(name)
    return found


# ---- C ----


def folder_of(path):
    """Returns the entry of C_ORDER that a file belongs to."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


@functools.cache  # what is planted changes one file or two, and all are read again
def includes_of(text):
    """Returns (line, name) of all includes in quotes."""
    named = (
        (number, re.match(r'\s*#\s*include\s+"([^"]+)"', line))
        for number, line in enumerate(text.splitlines(), 1)
    )
    return [(number, match[1]) for number, match in named if match]


def check_c(root):
    """Returns the broken rules of C, and how many includes were read."""
    paths = [p for product in PRODUCTS for p in (root / product).rglob("*") if p.suffix in C_SUFFIXES]
    files = sorted(p.relative_to(root).as_posix() for p in paths)
    by_name, broken, arrows, n = {}, [], {}, 0
    for path in files:
        name = path.split("/", 1)[1]
        if name in by_name:
            broken.append(f'{path} and {by_name[name]} are included by one name, "{name}"')
        by_name[name] = path
    for path in files:
        level, folder = level_of(folder_of(path), C_ORDER)
        if level is None:
            broken.append(f"{path}: {folder_of(path)} has no place in C_ORDER of {HERE}")
            continue
        for number, name in includes_of((root / path).read_text()):
            if name in ELSEWHERE:
                continue
            n += 1
            target = by_name.get(name)
            if target is None:
                broken.append(f'{path}:{number}: "{name}" is no file of {", ".join(PRODUCTS)}')
                continue
            arrows.setdefault(path, set()).add(target)
            to_level, to_folder = level_of(folder_of(target), C_ORDER)
            if to_level is not None and folder != to_folder and to_level >= level:
                broken.append(f"{path}:{number}: {folder} includes {target}, from above or beside it")
            for fence, headers in FENCES.items():
                if target in headers and path.startswith("lib/") and folder not in (fence, "lib"):
                    broken.append(f"{path}:{number}: {folder} includes {target}, which belongs to {fence}")
    broken += [f"these include each other in a circle: {', '.join(circle)}" for circle in circles(arrows)]
    return broken, n


# ---- Python ----


def entry_of(module):
    """Returns the entry of PYTHON_ORDER that a module belongs to, or the module itself."""
    for entries in PYTHON_ORDER:
        for entry in entries:
            if entry == module or (entry.endswith(".*") and module.startswith(entry[:-1])):
                return entry
    return module


@functools.cache
def parsed(text):
    """Returns all imports of a file, inside functions and for types, too."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports_of(text, module):
    """Yields (line, dotted name) of all imports."""
    package = module.split(".")[:-1]
    for node in parsed(text):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def check_python(root):
    """Returns the broken rules of Python, and how many imports were read."""
    package = root / "python"
    paths = sorted(package.rglob("*.py"))
    modules = {".".join(p.relative_to(package).with_suffix("").parts): p for p in paths}
    broken, arrows, n = [], {}, 0

    def module_of(name):
        while name:
            for found in (name, f"{name}.__init__"):
                if found in modules:
                    return found
            name = name.rpartition(".")[0]
        return None

    for module, path in modules.items():
        where = path.relative_to(root).as_posix()
        level, entry = level_of(entry_of(module), PYTHON_ORDER)
        if level is None:
            broken.append(f"{where}: {module} has no place in PYTHON_ORDER of {HERE}")
            continue
        for line, name in imports_of(path.read_text(), module):
            target = module_of(name) if name.split(".")[0] == "tagc" else None
            if target is None or target == module:
                continue
            n += 1
            arrows.setdefault(module, set()).add(target)
            to_level, to_entry = level_of(entry_of(target), PYTHON_ORDER)
            if to_level is None or entry == to_entry:
                continue
            if to_level >= level:
                broken.append(f"{where}:{line}: {entry} imports {target}, from above or beside it")
            elif target not in ALONE.get(entry, [target]):
                broken.append(f"{where}:{line}: {entry} imports {target}, and stands alone")
    broken += [f"these import each other in a circle: {', '.join(circle)}" for circle in circles(arrows)]
    return broken, n


# ---- annexes ----


def public_names(text):
    """Returns the names in __all__ of a module."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


@functools.cache
def attributes_of(text):
    """Returns (line, name, attribute) of all name.attribute."""
    return [
        (node.lineno, node.value.id, node.attr)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]


def uses_of(text, module):
    """Yields (line, dotted name) of all imports, and of attributes of what `import a.b as c` has named c."""
    yield from imports_of(text, module)
    named = {
        alias.asname: alias.name
        for node in parsed(text)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    for line, name, attribute in attributes_of(text):
        if name in named:
            yield line, f"{named[name]}.{attribute}"


def check_annexes(root):
    """Returns what annexes use that is not public, who uses them, and what one lacks."""
    public = {}
    for module, which in PUBLIC.items():
        path = root / "python" / f"{module.replace('.', '/')}.py"
        if path.exists():
            public[module.removesuffix(".__init__")] = public_names(path.read_text()) if which else None
    broken = []
    for annex, page in ANNEXES.items():
        for path in (f"python/tagc/{annex}", f"tests/python/{annex}", f"docs/guide/{page}"):
            if not (root / path).exists():
                broken.append(f"{path} is not there: the annex {annex} has a folder, tests and a page")
        for path in sorted((root / "python" / "tagc" / annex).rglob("*.py")):
            module = ".".join(path.relative_to(root / "python").with_suffix("").parts)
            for line, name in uses_of(path.read_text(), module):
                if name.split(".")[0] != "tagc" or name.startswith(f"tagc.{annex}"):
                    continue
                of, _, last = name.rpartition(".")
                if name in public or of in public and (public[of] is None or last in public[of]):
                    continue
                where = path.relative_to(root).as_posix()
                broken.append(f"{where}:{line}: the annex {annex} uses {name}, which is not public")
    tests = root / "tests" / "python"
    for path in sorted(tests.rglob("*.py")):
        of = path.relative_to(tests).parts[0]
        for line, name in imports_of(path.read_text(), path.stem):
            used = name.split(".")[1] if name.startswith("tagc.") else ""
            if used in ANNEXES and used != of:
                where = path.relative_to(root).as_posix()
                broken.append(
                    f"{where}:{line}: imports {name}: what tests an annex is in tests/python/{used}"
                )
    return broken


# ---- the lab ----


def check_lab(root):
    """Returns the includes and imports of files of lab/ by files outside of it. Programs of lab/ import each
    other by the names of their files, and so do headers: these names count, too, unless who names one has a
    neighbour of that name."""
    inside = list((root / "lab").rglob("*"))
    headers = {path.name for path in inside if path.suffix in C_SUFFIXES}
    modules = {"lab"} | {path.stem for path in inside if path.is_dir() or path.suffix == ".py"}
    broken = []
    for path in sorted(p for folder in [*PRODUCTS, "python", *BESIDE] for p in (root / folder).rglob("*.*")):
        if path.suffix == ".py":
            named = [
                (line, name, name.split(".")[0]) for line, name in imports_of(path.read_text(), path.stem)
            ]
            verb, known, suffix = "imports", modules, ".py"
        elif path.suffix in C_SUFFIXES:
            named = [(line, name, name.split("/")[-1]) for line, name in includes_of(path.read_text())]
            verb, known, suffix = "includes", headers, ""
        else:
            continue
        where = path.relative_to(root).as_posix()
        broken += [
            f"{where}:{line}: {verb} {name}, and nothing {verb} what is in lab/"
            for line, name, last in named
            if last in known and not (path.parent / f"{last}{suffix}").exists()
        ]
    return broken


def check(root):
    """Returns the broken rules, and how many lines were read."""
    (c, n_c), (python, n_python) = check_c(root), check_python(root)
    return c + python + check_annexes(root) + check_lab(root), n_c + n_python


# ---- what must be found ----


def planted(root):
    """Yields the lines to plant ({file: line}), and what must then be printed."""
    # a product above, modules above and beside, a header of the command
    yield {"lib/core/status.c": '#include "fsdp/fsdp.h"'}, "lib/core includes engine/fsdp/fsdp.h"
    yield {"lib/core/pool.h": '#include "exchange/step.h"'}, "lib/core includes lib/exchange/step.h"
    yield {"lib/codec/values.c": '#include "transport/comm.h"'}, "lib/codec includes lib/transport/comm.h"
    yield {"engine/train/run.c": '#include "options/options.h"'}, "engine/train includes command/options"
    # fences, by their own headers and by the public ones
    yield {"lib/exchange/step.c": '#include "gpu/kernels.h"'}, "lib/exchange includes lib/gpu/kernels.h"
    yield {"lib/gpu/direct.c": '#include "paper/peel.h"'}, "lib/gpu includes lib/paper/peel.h"
    yield {"lib/exchange/wire.c": '#include "tagc/paper.h"'}, "lib/exchange includes include/tagc/paper.h"
    # what the rules cannot place
    yield {"lib/core/clock.c": '#include "core/calendar.h"'}, '"core/calendar.h" is no file'
    yield {"lib/new/new.c": "int nothing;"}, "lib/new has no place"
    yield {"engine/core/status.h": ""}, 'by one name, "core/status.h"'
    yield {"lib/core/status.h": '#include "core/sized.h"'}, "circle: lib/core/sized.h, lib/core/status.h"
    # Python: from above, inside a function, for a type, from beside, the package, and what stands alone
    low = "python/tagc/torch/exchange/model.py"
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
    yield {low: "from tagc.torch import handle"}, "exchange.* imports tagc.torch.handle"
    yield {low: "def f():\n    from tagc.torch import state"}, "exchange.* imports tagc.torch.state"
    yield {low: types + "import tagc.torch.hooks.ddp"}, "exchange.* imports tagc.torch.hooks.ddp"
    beside = "python/tagc/torch/state.py"
    yield {beside: "from tagc.torch import statistics"}, "tagc.torch.state imports tagc.torch.statistics"
    yield {"python/tagc/torch/handle.py": "import tagc.torch"}, "imports tagc.torch.__init__"
    yield {"python/tagc/report/command.py": "import tagc.torch.handle"}, "tagc.torch.handle, and stands alone"
    # annexes: who imports one, what one imports, by name and as an attribute, and what tests one
    report = "python/tagc/report/command.py"
    yield {low: "def f():\n    from tagc.report import page"}, "exchange.* imports tagc.report.page"
    yield (
        {"python/tagc/commands/main.py": "from tagc.report import page"},
        "imports tagc.report.page, from above",
    )
    yield (
        {report: "from tagc.torch.exchange import model"},
        "annex report uses tagc.torch.exchange.model, which",
    )
    yield (
        {report: "from tagc.torch import handle"},
        "annex report uses tagc.torch.handle, which is not public",
    )
    yield {report: "import tagc.torch as t\nt.handle"}, "annex report uses tagc.torch.handle, which is not"
    yield {"python/tagc/local/steps.py": "import tagc.weights"}, "tagc.local.* imports tagc.weights.__init__"
    yield {"python/tagc/torch/compress.py": "import tagc.local"}, "tagc.torch.compress imports tagc.local"
    yield {"tests/python/new.py": "import tagc.report"}, "imports tagc.report: what tests an annex is in"
    # lab/, by its folders, by its files, and by programs and headers beside the products
    lab = {"lab/hosts/tables.py": "", "lab/hosts/delay_line.h": ""}
    yield {low: "from lab.hosts import tables", **lab}, "imports lab.hosts.tables, and nothing imports"
    yield {"scripts/new.py": "from hosts import tables", **lab}, "imports hosts.tables, and nothing imports"
    yield {low: "def f():\n    import tables", **lab}, "imports tables, and nothing imports"
    yield {"scripts/new.py": "import tables", **lab}, "scripts/new.py:2: imports tables, and nothing imports"
    yield {"tests/python/new.py": "import tables", **lab}, "new.py:2: imports tables, and nothing imports"
    in_c = '#include "delay_line.h"'
    yield {"bench/new.c": in_c, **lab}, "bench/new.c:2: includes delay_line.h, and nothing includes"
    yield {"tests/core/new.c": '#include "../../lab/hosts/delay_line.h"', **lab}, "and nothing includes"
    yield {"lib/core/clock.c": in_c, **lab}, "includes delay_line.h, and nothing includes"
    yield {"python/tagc/new.py": "nothing = None"}, "tagc.new has no place"
    yield (
        {
            "python/tagc/torch/exchange/one.py": "from tagc.torch.exchange import other",
            "python/tagc/torch/exchange/other.py": "from . import one",
        },
        "in a circle: tagc.torch.exchange.one, tagc.torch.exchange.other",
    )


def check_planted(root):
    """Returns the plants that were not found, and how many there were."""
    missed, n = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        copy = pathlib.Path(scratch)
        for folder in [*PRODUCTS, "python", "tests/python", "docs/guide"]:
            for path in (root / folder).rglob("*"):
                if path.suffix in (*C_SUFFIXES, ".py", ".md"):
                    (copy / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copy / path.relative_to(root))
        for n, (lines, expected) in enumerate(planted(copy), 1):
            paths = [copy / name for name in lines]
            before = {path: path.read_text() if path.exists() else None for path in paths}
            for (path, text), line in zip(before.items(), lines.values()):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{text or ''}\n{line}\n")
            look = check_c if paths[0].suffix in C_SUFFIXES else check_python
            if not any(expected in line for line in look(copy)[0] + check_annexes(copy) + check_lab(copy)):
                missed.append(f"planted in {', '.join(lines)}, and not found: {expected}")
            for path, text in before.items():
                path.unlink() if text is None else path.write_text(text)
    return missed, n


def main():
    root = pathlib.Path(sys.argv[1])
    if sys.argv[2:] == ["--planted"]:
        broken, n = check_planted(root)
        print("\n".join(broken) or f"{n} broken rules planted, all found")
    else:
        broken, n = check(root)
        if n < 1000:
            broken.append(f"only {n} includes and imports were found in {root}")
        print("\n".join(broken) or f"{n} includes and imports, no rule broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
