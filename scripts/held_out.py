#!/usr/bin/env python3
"""PyTorch's own FSDP2 and DDP tests, an independent check of tagc: they run as they are, and with every model
that they wrap passed through compress(sparsity=0), which sends all values. Prints which pass with and
without.

    scripts/held_out.py <pytorch>/test/distributed/_composable/fsdp/test_fully_shard_training.py -k
    accumulation scripts/held_out.py <folder of test files>

The files come from a clone of pytorch at the tag of the installed torch (torch itself brings what they
import). What wants more GPUs than there are is skipped by the tests themselves. Where there is no GPU at all,
the answer to their question how many there are is two, so that those which take their device from torch run
on two processes and gloo; others fail, with and without. They want the packages pytest, expecttest and
hypothesis. Arguments after the paths go to pytest; TAGC_LIBRARY names libtagc, as for any script."""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parents[1]

# In every Python process that the tests start, before anything else. A root's first forward pass is where all
# its fully_shard() calls are known to be over.
CUSTOMIZE = '''
import os, sys

def _run_on_processors():
    """Makes torch report two processors where the tests count GPUs."""
    import torch
    torch.cpu.device_count = torch.accelerator.device_count = lambda: 2
    from torch.testing._internal import common_distributed
    common_distributed.skip_if_lt_x_gpu = lambda *arguments, **options: lambda test: test
    from torch.testing._internal import common_fsdp
    common_fsdp.DEVICE_COUNT = common_fsdp.FSDPTestContinuous.world_size = 2

def _compressed(model, log):
    import torch.distributed as dist
    import tagc.torch as tagc
    try:
        options = dict(sparsity=0, values="fp32", mild="fp32", mild_sparsity=0, layers="all", verbose=False)
        model._tagc_held_out = tagc.compress(model, **options)
        what = "compressed"
    except tagc.Error as error:
        what = f"refused: {error}"
    with open(log, "a") as file:
        file.write(what.splitlines()[0] + "\\n")

def _patch(log):
    import functools
    import torch
    import torch.nn.parallel.distributed as ddp
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    lazy_init, wrap = _fsdp_state.FSDPState._lazy_init, ddp.DistributedDataParallel.__init__

    @functools.wraps(lazy_init)
    def first_forward(self):
        if self._is_root is None and not getattr(self, "_tagc_seen", False):
            self._tagc_seen = True
            _compressed(self._modules[0], log)
        return lazy_init(self)

    @functools.wraps(wrap)
    def wrapped(self, *arguments, **options):
        wrap(self, *arguments, **options)
        _compressed(self, log)

    _fsdp_state.FSDPState._lazy_init = first_forward
    ddp.DistributedDataParallel.__init__ = wrapped

if "torch" not in sys.modules:
    import torch.distributed
    if not torch.accelerator.is_available():
        _run_on_processors()
    if os.environ.get("TAGC_HELD_OUT"):
        _patch(os.environ["TAGC_HELD_OUT"])
'''


def run(paths, arguments, folder, compresses):
    """{test: "passed", "failed: why" or "skipped"}"""
    report, log = folder / f"{compresses}.xml", folder / f"{compresses}.log"
    (folder / "sitecustomize.py").write_text(CUSTOMIZE)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    }
    if compresses:
        environment["TAGC_HELD_OUT"] = str(log)
        log.touch()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *arguments,
        *map(str, paths),
    ]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not report.exists():
        sys.exit(f"held_out.py: pytest ended with {done.returncode} and no report:\n{done.stdout[-3000:]}")
    found = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag: child for child in case}
        bad = kinds.get("failure", kinds.get("error"))
        if bad is not None:
            text = f"{bad.get('message') or ''}\n{bad.text or ''}"
            lines = [line.strip() for line in text.splitlines() if "Error" in line and line.strip()]
            outcome = f"failed: {(lines or ['?'])[-1][:160]}"
        else:
            outcome = "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found, log.read_text().splitlines() if compresses else []


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="%(prog)s <test files or folders> [pytest's arguments]"
    )
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    args, rest = parser.parse_known_args()
    for path in args.paths:
        if not path.exists():
            parser.error(f"{path} does not exist: must be a test file of PyTorch's, or a folder of them")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        without, _ = run(args.paths, rest, folder, False)
        with_tagc, log = run(args.paths, rest, folder, True)
    counts = collections.Counter()
    if not any(outcome == "passed" for outcome in without.values()):
        why = next(
            (outcome for outcome in without.values() if outcome != "skipped"),
            "all are skipped, or there are none",
        )
        sys.exit(f"held_out.py: no test passes even without tagc: {why}")
    for test in sorted(without.keys() | with_tagc.keys()):
        pair = [outcomes.get(test, "not run").partition(":")[0] for outcomes in (without, with_tagc)]
        counts[tuple(pair)] += 1
        if pair[0] != pair[1]:
            print(
                f"{test}\n    without: {without.get(test, 'not run')}\n    with:    "
                f"{with_tagc.get(test, 'not run')}"
            )
    print(f"{'without tagc':14} {'with tagc':14} tests")
    for (before, after), n in sorted(counts.items()):
        print(f"{before:14} {after:14} {n}")
    refused = collections.Counter(line for line in log if line.startswith("refused"))
    print(
        f"models wrapped, on all ranks: {len(log)}, of which {sum(refused.values())} were refused by "
        "compress() and went on uncompressed"
    )
    for line, n in refused.most_common(5):
        print(f"    {n} x {line[:200]}")
    broken = sum(n for (before, after), n in counts.items() if before == "passed" and after != "passed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
