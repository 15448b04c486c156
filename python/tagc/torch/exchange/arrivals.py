"""All ranks of a group must have called compress(), or whatever it is, before any of them begins a collective
for it: that collective would meet what a rank without the call does instead, such as FSDP2's gathers. So
ranks first meet in torch's store, which knows who is missing.

    tagc/met/<ranks>/round            the number of the meeting that is open
    tagc/met/<ranks>/<round>/<rank>   the rank has come to it
    tagc/met/<ranks>/<round>/why      why it was given up

Whoever leaves a meeting, complete or not, opens the next one, so a rank that comes too late waits in the next
one for the others to call again."""

from __future__ import annotations

import contextlib
import time
import warnings

import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange import internals
from tagc.torch.exchange.waits import soon

PATIENCE_S = 30.0  # before a warning that a rank is missing
_LONGEST_PAUSE_S = 0.5  # between two looks


def meet(group: dist.ProcessGroup, call: str, timeout_s: float) -> None:
    """Waits until every rank of the group calls this. Error that names those that do not in time. call: what
    users call, for messages."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return
    where = f"tagc/met/{','.join(map(str, ranks))}"
    store = dist.PrefixStore(where, internals.default_store())
    try:
        number = int(store.compare_set("round", "", "0"))
        store.set(f"{number}/{dist.get_rank()}", call)
    except RuntimeError as failure:
        raise _unreachable(f"{failure}") from failure
    try:
        _await_all(dist.PrefixStore(str(number), store), ranks, call, timeout_s)
    finally:
        with contextlib.suppress(RuntimeError):  # where the store is gone, that is on its way to the user
            store.compare_set("round", str(number), str(number + 1))


def _await_all(store: dist.Store, ranks: list[int], call: str, timeout_s: float) -> None:
    begin, pause_s, has_warned = time.monotonic(), 0.001, False
    while True:
        waited_s = time.monotonic() - begin
        known = soon(_Look(store, ranks, call, timeout_s, waited_s >= timeout_s))
        if known is None:
            if waited_s >= timeout_s:
                raise _unreachable(f"{call} waited {timeout_s:g} s for it")
        elif isinstance(known, RuntimeError):
            raise _unreachable(f"{known}") from known
        else:
            missing, why = known
            if not missing:
                return
            if why:
                raise Error("transport", why)
            if waited_s >= PATIENCE_S and not has_warned:
                has_warned = True
                if min(set(ranks) - set(missing)) == dist.get_rank():
                    _warn(missing, call, timeout_s)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


class _Look:
    """Asks the store. A pause between looks, and not its own wait(), which reports each time-out on
    stderr."""

    def __init__(
        self, store: dist.Store, ranks: list[int], call: str, timeout_s: float, gives_up: bool
    ) -> None:
        self._store, self._ranks, self._call = store, ranks, call
        self._timeout_s, self._gives_up = timeout_s, gives_up

    def __call__(self) -> tuple[list[int], str] | RuntimeError:
        """Returns (ranks that have not come, why the meeting was given up, or ""), or why the store fails."""
        try:
            return self._ask(self._store)
        except RuntimeError as failure:
            return failure

    def _ask(self, store: dist.Store) -> tuple[list[int], str]:
        if store.check([str(rank) for rank in self._ranks]):
            return [], ""
        missing = [rank for rank in self._ranks if not store.check([str(rank)])]
        if missing and self._gives_up:
            why = (
                f"{_listed(missing)} not called {self._call} within {self._timeout_s:g} s: every rank that "
                "trains the model must call it"
            )
            return missing, store.compare_set("why", "", why).decode(errors="replace")  # the first one's
        return missing, store.get("why").decode(errors="replace") if store.check(["why"]) else ""


def _warn(missing: list[int], call: str, timeout_s: float) -> None:
    warnings.warn(
        f"tagc: {_listed(missing)} not called {call} yet; this rank waits for up to {timeout_s:g} s",
        stacklevel=8,
    )


def _unreachable(why: str) -> Error:
    return Error("transport", f"torch's store, by which ranks find each other, does not answer: {why}")


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} have" if len(ranks) > 1 else f"rank {shown} has"
