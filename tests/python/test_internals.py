"""What torch has not promised stands in one module, and where it has moved, an Error says what and where."""

import ast
import importlib
import pathlib
import types

import pytest

torch = pytest.importorskip("torch")

FOLDER = pathlib.Path(__file__).parents[2] / "python" / "tagc"


def private(name):
    return name.startswith("_") and not name.startswith("__")


def made_here(trees):
    """Private names that tagc itself gives to what it makes: methods, functions, attributes of self, names,
    arguments."""
    found = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            found.add(node.attr)
    # of namedtuple and ctypes; what DDP models get from tagc
    return found | {"_make", "_replace", "_asdict", "_fields", "_fields_", "_tagc"}


def trees_of(folder):
    return {
        str(path.relative_to(folder)): ast.parse(path.read_text()) for path in sorted(folder.glob("**/*.py"))
    }


def strays(trees):
    """(file, line, attribute) of every private attribute that is neither tagc's own nor read in an
    internals.py."""
    own = made_here({name: tree for name, tree in trees.items() if not name.endswith("internals.py")})
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree) if not name.endswith("internals.py") else ():
            if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
                found.append((name, node.lineno, node.attr))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "getattr",
                "hasattr",
                "setattr",
            ):
                words = [word.value for word in node.args[1:2] if isinstance(word, ast.Constant)]
                found += [(name, node.lineno, word) for word in words if private(word) and word not in own]
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
                found += [
                    (name, node.lineno, f"{node.module}.{alias.name}")
                    for alias in node.names
                    if private(alias.name) or any(map(private, node.module.split(".")))
                ]
    return found


def test_torchs_private_attributes_stand_in_modules_of_their_own():
    torchs = {
        name: tree
        for name, tree in trees_of(FOLDER).items()
        if name.split("/")[0] not in ("commands", "integrations", "report", "run")
        and name != "weights/layout.py"  # it has one of vLLM's
    }
    assert strays(torchs) == []
    planted = ast.parse(
        "def f(model, group):\n    model._get_fsdp_state()\n    getattr(group, '_fsdp_params', 0)\n"
        "    from torch.distributed._composable import replicate\n"
    )
    assert sorted(stray[1] for stray in strays({"new.py": planted})) == [2, 3, 4]


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("internals.py")), ids=lambda path: path.parent.name)
def test_each_is_named_with_its_versions(path):
    from tagc.torch.exchange.internals import NEWEST, OLDEST

    name = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    internals, text = importlib.import_module(name), path.read_text()
    for name, versions in internals.SEEN.items():
        first, _, last = versions.partition(" to ")
        for word in (first, last or first):
            assert OLDEST <= tuple(map(int, word.split("."))) <= NEWEST, name
        assert text.count(f'"{name}"') > 1, f"{name} is read nowhere"


def test_what_has_moved_is_named():
    from tagc.torch import Error
    from tagc.torch.exchange import internals

    module = types.SimpleNamespace(
        _get_fsdp_state=lambda: types.SimpleNamespace(_fsdp_param_groups=[types.SimpleNamespace()])
    )
    with pytest.raises(Error) as raised:
        internals.fsdp_groups(module)
    assert raised.value.status == "unsupported"
    text = str(raised.value)
    assert torch.__version__ in text and "FSDPParamGroup.fsdp_params" in text and "2.9 to 2.15" in text
    for function, name in (
        (internals.fsdp_state, "FSDPModule._get_fsdp_state"),
        (internals.ddp_hooks, "_comm_hooks"),
    ):
        with pytest.raises(Error, match=name):
            function(types.SimpleNamespace())
