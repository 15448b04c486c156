"""The end of a process. Python ends a thread that wants its lock back after that by force, in the middle of
torch's C++, which aborts the process: "terminate called without an active exception". So before Python ends,
what tagc's threads wait for is given up, and the threads end."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

PATIENCE_S = 5.0  # for all threads together


class Busy(Protocol):
    """What may have a thread in torch's calls."""

    def give_up(self) -> None:
        """Makes these calls end soon."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until no thread is in such a call. Returns whether that is so."""


_busy: weakref.WeakSet[Busy] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(run: Callable[[], object], name: str) -> threading.Thread:
    """Returns a thread that runs it, which the end of the process waits for, if not for ever."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def add(busy: Busy) -> None:
    _busy.add(busy)


def end() -> None:
    """Gives up what is under way, and waits for the threads."""
    until = time.monotonic() + PATIENCE_S
    left = list(_busy)
    for busy in left:
        busy.give_up()
    for busy in left:
        busy.wait(max(0.0, until - time.monotonic()))
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, until - time.monotonic()))


def _end_of(process: int) -> None:
    if os.getpid() == process:  # a fork has none of the threads
        end()


atexit.register(_end_of, os.getpid())
