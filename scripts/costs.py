#!/usr/bin/env python3
"""Prints the processor seconds (user and system) that each test of a build folder takes with all of its
processes, and their sum. Unlike seconds of a clock, these depend little on what else runs on the machine.

    scripts/costs.py build                       every test, one after the other
    scripts/costs.py build -LE '^long$' -L cli   those that ctest would choose
    scripts/costs.py --run COMMAND...            runs it, and waits for processes that outlive their parents:
                                                 who waits for this one has their seconds in its own

A file of Python's tests takes about 3 seconds more here than under ctest, where all share one import of
torch."""

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36


def main(folder, *choice):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a test leaves comes to this process
    if folder == "--run":
        code = wait_for(subprocess.Popen(choice))
        return code if code >= 0 else 128 - code
    listed = subprocess.run(
        ["ctest", "--show-only=json-v1", *choice], cwd=folder, check=True, capture_output=True
    )
    costs = []
    for test in json.loads(listed.stdout)["tests"]:
        cost = run(test)
        costs.append(cost)
        print(line(*cost), flush=True)
    print("\nthe dearest first:")
    for cost in sorted(costs, reverse=True):
        print(line(*cost))
    print(line(sum(cost[0] for cost in costs), sum(cost[1] for cost in costs), f"{len(costs)} tests", ""))
    return any(cost[3].startswith("FAILED") for cost in costs)


def run(test):
    """Runs a test of ctest's list. Returns (processor seconds, seconds, name, how it failed or "")."""
    properties = {one["name"]: one["value"] for one in test["properties"]}
    environment = dict(os.environ)
    for setting in properties.get("ENVIRONMENT", []):
        name, _, value = setting.partition("=")
        environment[name] = value
    environment.pop("TAGC_TEST_ORIGIN", None)  # its processes would outlive the test
    before, start = used(), time.monotonic()
    failure = ""
    code = wait_for(
        subprocess.Popen(
            test["command"],
            cwd=properties["WORKING_DIRECTORY"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    )
    if code == properties.get("SKIP_RETURN_CODE"):
        failure = "skipped"
    elif code:
        failure = f"FAILED with {code}"
    return used() - before, time.monotonic() - start, test["name"], failure


def wait_for(process, patience_s=30):
    """Returns the exit code of a process. Meanwhile, orphans are waited for, too: tests ask whether they are
    still there. Those that are left at the end have some time to go."""
    code, end = None, 0
    with contextlib.suppress(ChildProcessError):
        while code is None or time.monotonic() < end:
            pid, status = os.waitpid(-1, 0 if code is None else os.WNOHANG)
            if pid == process.pid:
                code = process.returncode = os.waitstatus_to_exitcode(status)
                end = time.monotonic() + patience_s
            elif pid == 0:
                time.sleep(0.05)
    return code


def used():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def line(processor_s, wall_s, name, failure):
    return f"{processor_s:8.1f} s of processors  {wall_s:8.1f} s  {name}  {failure}".rstrip()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
