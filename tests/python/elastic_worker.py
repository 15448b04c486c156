"""examples/pytorch/train_gpt.py for test_elastic.py: it writes down residuals wherever it saves and loads
them, and waits, stops or goes where the test wants it to."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import launch
import torch
import torch.distributed as dist

import tagc.torch

sys.path.insert(0, str(launch.EXAMPLES))
import train_gpt

notes = pathlib.Path(sys.argv.pop(1))
KILLED, STOPPED = notes / "killed", notes / "stopped"
TIMEOUT_S = float(os.environ["TIMEOUT_S"])
resume, batch, save = train_gpt.resume, train_gpt.batch, train_gpt.dcp.save


def note(what, step, handle):
    (mine,) = handle.state_dict().values()
    path = notes / f"{what}-{step}-of-{dist.get_world_size()}-rank{dist.get_rank()}"
    torch.save(mine["residuals"], path.with_suffix(".part"))
    path.with_suffix(".part").rename(path.with_suffix(".pt"))


def noted_save(state, checkpoint_id):
    note("saved", int(state["step"]), state["tagc"])
    save(state, checkpoint_id=checkpoint_id)


def noted_resume(path, model, optimizer, handle):
    step = resume(path, model, optimizer, handle)
    note("loaded", step, handle)
    return step


def stop(seconds):
    """This process, until another one wakes it."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def batch_until_something_happens(data, args, step, *key):
    if dist.get_world_size() == 1 and step == 5 and not KILLED.exists():
        time.sleep(1000)  # until torchrun has a second rank
    if step == 6 and "LEAVES" in os.environ:
        stop(1)
    if step == 9 and "LEAVES" in os.environ and not STOPPED.exists():
        STOPPED.touch()
        stop(TIMEOUT_S + 1)
    if step == 10 and "LEAVES" in os.environ:
        KILLED.touch()
        os.kill(os.getppid(), signal.SIGKILL)  # its torchrun: a host that goes
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(data, args, step, *key)


train_gpt.resume, train_gpt.batch, train_gpt.dcp.save = (
    noted_resume,
    batch_until_something_happens,
    noted_save,
)
train_gpt.compress = lambda model, optimizer, args: tagc.torch.compress(
    model, sparsity=args.sparsity, timeout_s=TIMEOUT_S
)
train_gpt.main()
