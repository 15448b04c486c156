"""The folders of tagc.torch are the rule of what may name what: a file names no file of a folder above its
own, and files name each other in no circle. What is imported inside a function, or for types only, counts
like everything else."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2] / "python" / "tagc"
# From the bottom to the top: folders, and files beside them. Those of one line name none of each other.
LEVELS = (
    ("exchange",),
    ("schedule",),
    ("state", "statistics"),
    ("passes",),
    ("handle",),
    ("hooks",),
    ("local", "advise"),
    ("quorum",),
    ("compress",),
    ("__init__",),
)
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}


def trees_of(folder):
    """Module -> its tree. The __init__ of a folder has the folder's name."""
    found = {}
    for path in sorted(folder.glob("**/*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        found[module if module == "__init__" else module.removesuffix(".__init__")] = ast.parse(
            path.read_text()
        )
    return found


def names_of(tree):
    """What of tagc.torch a module names: (line, module)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports are not read here"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def arrows(trees):
    """Module -> {module of tagc.torch that it names: line}."""
    found = {}
    for module, tree in trees.items():
        targets = found[module] = {}
        for line, name in names_of(tree):
            if name == "tagc.torch" or name.startswith("tagc.torch."):
                short = name[len("tagc.torch.") :]
                target = next((one for one in (short, short.rpartition(".")[0]) if one in trees), "__init__")
                targets.setdefault(target, line)
    return found


def upward(trees):
    """[(module, line, what it must not name)]"""
    found = []
    for module, targets in arrows(trees).items():
        own = module.partition(".")[0]
        for target, line in targets.items():
            theirs = target.partition(".")[0]
            if own != theirs and LEVEL[theirs] >= LEVEL[own]:
                found.append((module, line, target))
    return found


def circle(trees):
    """One circle of modules; empty if there is none."""
    left = {module: set(targets) for module, targets in arrows(trees).items()}
    while True:
        ends = {module for module, targets in left.items() if not targets}
        if not ends:
            return sorted(left)  # and what leads into it
        left = {module: targets - ends for module, targets in left.items() if module not in ends}
        if not left:
            return []


def test_no_file_names_one_above_it_and_there_is_no_circle():
    trees = trees_of(ROOT / "torch")
    assert {module.partition(".")[0] for module in trees} == set(LEVEL)
    assert upward(trees) == [] and circle(trees) == []


def test_nothing_below_torch_or_beside_it_is_named_by_it():
    for module, tree in trees_of(ROOT / "torch").items():
        others = {name for _, name in names_of(tree) if name.startswith(("tagc.integrations", "tagc.report"))}
        assert not others, (module, others)


@pytest.mark.parametrize(
    "module, planted, line",
    [
        ("exchange.unit", "from tagc.torch.handle import Compressed", 1),
        ("exchange.unit", "def f():\n    from tagc.torch import state", 2),
        ("state", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tagc.torch.hooks.ddp", 3),
        ("local.steps", "from tagc.torch.advise.links import plan_sites", 1),
        ("quorum.exchanges", "from tagc.torch import compress", 1),
    ],
)
def test_what_is_planted_is_found(module, planted, line):
    trees = trees_of(ROOT / "torch")
    trees[module] = ast.parse(planted)
    assert [(found, at) for found, at, _ in upward(trees)] == [(module, line)]


def test_a_planted_circle_is_found():
    trees = trees_of(ROOT / "torch")
    trees["exchange.layout"] = ast.parse("from tagc.torch.exchange.unit import Unit")
    assert {"exchange.layout", "exchange.unit"} <= set(circle(trees)) and upward(trees) == []
