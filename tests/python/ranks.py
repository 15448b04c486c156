"""Runs a function as several gloo ranks, each a process, and brings back what each returned or how it failed.

The processes are forks of one that has imported torch and done nothing with it: a fresh import takes
seconds."""

import functools
import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pathlib
import pickle
import sys
import tempfile
import time
import traceback

TIMEOUT_S = 200

_fresh = multiprocessing.get_context("forkserver")
_fresh.set_forkserver_preload(["preloaded"])


def run(function, world_size, *arguments, timeout_s=TIMEOUT_S):
    """function(rank, world_size, *arguments), a function of a test's own module, in each of world_size
    processes with torch.distributed up. The results in rank order; an AssertionError with the traceback where
    one failed."""
    outcomes = attempt(function, world_size, *arguments, timeout_s=timeout_s)
    failed = [
        f"rank {rank} of {world_size}:\n{trace}"
        for rank, (_, trace) in enumerate(outcomes)
        if trace is not None
    ]
    assert not failed, "\n".join(failed)
    return [result for result, _ in outcomes]


def run_each(checks, world_size, *arguments, timeout_s=TIMEOUT_S):
    """run() of several functions of modules, one after the other in the same processes."""
    names = [(check.__module__, check.__name__) for check in checks]
    run(_each, world_size, names, arguments, timeout_s=timeout_s)


def _each(rank, world_size, names, arguments):
    for module, name in names:
        begin = time.process_time()
        try:
            getattr(importlib.import_module(module), name)(rank, world_size, *arguments)
        except BaseException as failure:
            raise AssertionError(f"in {name}: {failure}") from failure
        if rank == 0:  # pytest -rP shows it
            print(f"{name}: {time.process_time() - begin:.1f} s of this rank's processor", flush=True)


def fork_origin():
    """Makes the process whose forks are the ranks a fork of this one, which has imported torch and has no
    threads yet, instead of a new interpreter."""

    def fork(_, arguments, passed):
        pid = os.fork()
        if pid:
            return pid
        try:
            begin = 3
            for fd in sorted(passed):
                os.closerange(begin, fd)
                begin = fd + 1
            os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
            exec(arguments[-1], {})  # what the new interpreter would have got by -c: forkserver.main()
        finally:
            os._exit(0)

    multiprocessing.resource_tracker.ensure_running()
    spawn, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, fork
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = spawn


@functools.cache
def fresh():
    """The context of multiprocessing whose processes are those forks. Only by PYTHONPATH does their origin
    find preloaded.py."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), before]))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return _fresh


@functools.cache
def _bytecode():
    """A folder for what ranks compile of tagc and of the tests, so that only the first of them does. Goes
    with this process."""
    return tempfile.TemporaryDirectory()


def _store():
    """Outlives ranks that end, as torchrun's does. Not a file: ranks look into that a hundred times a second
    while they wait."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def attempt(function, world_size, *arguments, timeout_s=TIMEOUT_S):
    """As run(), but failures are results, too: (result, traceback or None) of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/job", "wb") as file:
            pickle.dump((sys.modules[function.__module__].__file__, function.__name__, arguments), file)
        open(f"{folder}/output", "x").close()
        store = _store()
        environment = os.environ | {"WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
        ranks = [
            fresh().Process(
                target=_main,
                args=(folder, store.port, _bytecode().name, os.getcwd(), environment | {"RANK": str(rank)}),
            )
            for rank in range(world_size)
        ]
        try:
            for rank in ranks:
                rank.start()
            end = time.monotonic() + timeout_s
            for rank in ranks:
                rank.join(max(0, end - time.monotonic()))
            codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                    rank.join()
        with open(f"{folder}/output", errors="replace") as file:
            print(file.read(), end="", flush=True)
        ended = [path for rank in range(world_size) if os.path.exists(path := f"{folder}/{rank}")]
        if None in codes:  # because of what others have failed with, perhaps
            failures = [str(pickle.loads(pathlib.Path(path).read_bytes())[1]) for path in ended]
            raise AssertionError("\n".join([f"ranks hang: {codes} after {timeout_s} s", *failures]))
        outcomes = []
        for rank, code in enumerate(codes):
            path = f"{folder}/{rank}"
            if os.path.exists(path):
                with open(path, "rb") as file:
                    outcomes.append(pickle.load(file))
            else:
                outcomes.append((None, f"ended with {code}"))
        return outcomes


def _main(folder, port, bytecode, cwd, environment):
    sys.pycache_prefix, sys.dont_write_bytecode = bytecode, False
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with open(f"{folder}/job", "rb") as file:
        path, name, arguments = pickle.load(file)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sys.path.insert(0, os.path.dirname(path))
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, world_size, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        module = __import__(os.path.basename(path)[: -len(".py")])
        outcome = getattr(module, name)(rank, world_size, *arguments), None
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        outcome = None, traceback.format_exc()
    with open(f"{folder}/{rank}.part", "wb") as file:
        pickle.dump(outcome, file)
    os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome[1] is None else 1)  # a failed rank must not wait for its peers in a destructor
