"""What the programs in lab/studies refuse, by name, before they train; and that one trains."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
import launch
import ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]


def refused(*words):
    """What a program prints that ends with the exit code of a wrong command line."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_all_find_what_they_import():
    """In one process: torch is imported once. Programs of lab/ import each other by their names."""
    paths = sorted(map(str, (ROOT / "lab" / "studies").glob("*.py")))
    assert len(paths) > 5
    script = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path)"
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_torch_bench_skips_exchanges_or_not():
    program = "lab/studies/torch_bench.py"
    said = refused(program, "--skip-exchanges=ture")
    assert all(word in said for word in ("--skip-exchanges", "'ture'", "true", "false")), said
    assert "the ranks are missing" in refused(
        program, "--skip-exchanges", "--skip-exchanges=true", "--skip-exchanges=false"
    )


def test_torch_chaos_leaves_an_older_run_alone(tmp_path):
    (tmp_path / "text").write_text("an older run's")
    said = refused("lab/studies/torch_chaos.py", "--out", tmp_path)
    assert "--out" in said and str(tmp_path) in said and "not empty" in said, said
    assert (tmp_path / "text").read_text() == "an older run's"
    assert "not empty" in refused("lab/studies/torch_chaos.py", "--out", tmp_path / "text")


def test_torch_gpu_judges_memory():
    """A step may allocate what it does without tagc, and two of the largest unit."""
    path = ROOT / "lab" / "studies" / "torch_gpu.py"
    script = f"""if True:
        import runpy
        judge = runpy.run_path({str(path)!r})["too_much_memory"]
        def said(**peaks):
            arms = [{{"name": name.replace("_", "-"), "peak_bytes": n}} for name, n in peaks.items()]
            return judge({{"largest_unit_bytes": 5 << 20, "arms": arms}})
        assert said(alone=1, ddp=100 << 20, ddp_tagc=110 << 20, ddp_tagc_device=110 << 20) == []
        assert said(alone=None, ddp=None, ddp_tagc=None) == []
        wrong, = said(alone=1, ddp=100 << 20, ddp_tagc=111 << 20)
        assert wrong.startswith("ddp-tagc: a step allocates 111 MiB, allowed are 100 without"), wrong
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_other_optimizers_train(tmp_path):
    program, rows = ROOT / "lab" / "studies" / "torch_optimizers.py", tmp_path / "rows.json"
    words = ["--steps", 2, "--optimizers", "muon", "--arms", "dense", "4 bits"]
    ranks.run(launch.as_main, 2, program, *words, "--json", rows)
    assert [row["arm"] for row in json.loads(rows.read_text())] == ["dense", "4 bits"]
