"""Each annex can be deleted with its folder, its tests' folder and its page: what is left keeps the rules of
folders, and can be imported."""

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
OTHERS = ("altair", "tokenizers", "torchft", "vl_convert")  # packages that are not always there


def without(annex, folder):
    """Copies what the rules look at, without an annex."""
    for name in ("python", "tests/python", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder / "python" / "tagc" / annex)
    shutil.rmtree(folder / "tests" / "python" / annex)
    (folder / "docs" / "guide" / ANNEXES[annex]).unlink()


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
        code = 1
        try:
            os.dup2(writes, 1)
            os.dup2(writes, 2)
            for name in [name for name in sys.modules if name.split(".")[0] == "tagc"]:
                del sys.modules[name]
            sys.path.insert(0, str(folder))
            for name in modules_of(folder):
                try:
                    module = __import__(name, fromlist=["name"])
                    assert module.__file__.startswith(str(folder)), module.__file__
                except ModuleNotFoundError as missing:
                    if missing.name.split(".")[0] not in OTHERS:
                        raise
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writes)
    with open(reads, errors="replace") as said:
        text = said.read()
    return text if os.waitpid(pid, 0)[1] else ""


@pytest.mark.parametrize("annex", ANNEXES)
def test_one_is_deleted(tmp_path, monkeypatch, annex):
    without(annex, tmp_path)
    assert any(f"the annex {annex} has" in line for line in check_layout.check_annexes(tmp_path))
    monkeypatch.delitem(check_layout.ANNEXES, annex)
    assert not check_layout.check_python(tmp_path)[0]
    assert not check_layout.check_annexes(tmp_path)
    assert not import_all(tmp_path / "python")


def test_what_is_planted_is_found(tmp_path):
    """A module of the core that imports an annex by its name alone, of which the rules see nothing."""
    annex = next(iter(ANNEXES))
    without(annex, tmp_path)
    with open(tmp_path / "python" / "tagc" / "torch" / "compress.py", "a") as file:
        file.write(f"import importlib\n\nimportlib.import_module('tagc.{annex}')\n")
    assert f"No module named 'tagc.{annex}'" in import_all(tmp_path / "python")
