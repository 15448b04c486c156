"""Each annex can be deleted with its folder, its tests' folder and its page: what is left keeps the rules of
folders, and can be imported. test_annexes_long.py runs tests of the core without each."""

import contextlib
import os
import pathlib
import shutil
import sys
import traceback

import pytest

pytest.importorskip("torch")
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "layout"))
import check_layout

ANNEXES = dict(check_layout.ANNEXES)
# not always there
OTHERS = ("altair", "sglang", "tokenizers", "torchft", "trl", "verl", "vl_convert", "vllm")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what the rules and the tests of the core look at."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("python", "tests/python", "docs", "include"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests" / "unit").mkdir()
    for name in ("README.md", "tests/unit/policy.tsv"):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


@contextlib.contextmanager
def without(annex, folder):
    """Takes an annex out of a copy, and puts it back."""
    paths = (f"python/tagc/{annex}", f"tests/python/{annex}", f"docs/guide/{ANNEXES[annex]}")
    for i, path in enumerate(paths):
        (folder / path).rename(folder / f"{i}")
    try:
        yield
    finally:
        for i, path in enumerate(paths):
            (folder / f"{i}").rename(folder / path)


def modules_of(folder):
    """Returns the names of all modules of a tree."""
    return sorted(
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for path in (folder / "tagc").rglob("*.py")
        if path.name != "__main__.py" and "integrations" not in path.parts  # whose libraries take seconds
    )


def import_all(folder):
    """Imports all modules of a tree, in a fork that has torch and nothing of tagc. Returns what failed."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            sys.dont_write_bytecode = False  # of the copy, for the next one
            for name in [name for name in sys.modules if name.split(".")[0] == "tagc"]:
                del sys.modules[name]
            sys.path.insert(0, str(folder))
            names = modules_of(folder)
            assert len(names) > 50, names
            for name in names:
                try:
                    module = __import__(name, fromlist=["name"])
                    assert module.__file__.startswith(str(folder)), module.__file__
                except ModuleNotFoundError as missing:
                    if missing.name.split(".")[0] not in OTHERS:
                        raise
        except BaseException:
            text = traceback.format_exc()
        finally:
            with open(writes, "w") as told:
                told.write(text or "all is imported")
            os._exit(0)
    os.close(writes)
    with open(reads, errors="replace") as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.parametrize("annex", ANNEXES)
def test_one_is_deleted(tree, monkeypatch, annex):
    with without(annex, tree):
        assert any(f"the annex {annex} has" in line for line in check_layout.check_annexes(tree))
        monkeypatch.delitem(check_layout.ANNEXES, annex)
        assert not check_layout.check_python(tree)[0]
        assert not check_layout.check_annexes(tree)
        assert import_all(tree / "python") == "all is imported"


def test_what_is_planted_is_found(tree):
    """A module of the core that imports an annex by its name alone, of which the rules see nothing."""
    for annex in list(ANNEXES)[:2]:
        path = (
            tree / "python" / "tagc" / "torch" / f"planted_{annex}.py"
        )  # new: no bytecode of before can pass for it
        with without(annex, tree):
            path.write_text(f"import importlib\n\nimportlib.import_module('tagc.{annex}')\n")
            assert f"No module named 'tagc.{annex}'" in import_all(tree / "python")
            path.unlink()
