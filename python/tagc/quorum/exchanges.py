"""LocalSteps under torchft: sites are replicas, and each exchange has a quorum of its own.

    torchft: start_quorum()      a replica that is behind gets the state of another one: the user's, and
                                 state() from here
    tagc                         new connections if the quorum changed; the replicas agree on n, the number of
                                 those that contribute (base - parameter) / n and the residual travel; nothing
                                 has changed yet
    torchft: should_commit()     yes: the outer step. No: nothing changes, the site trains on, and its next
                                 pseudo-gradient contains these steps

The sum over replicas is the mean pseudo-gradient, so a residual is a part of that mean, and remains so when
the number of sites changes. A replica that torchft has just given the state of another one contributes
nothing, because these steps are the other's.

A new replica asks for a quorum before its first step. The others come to it when they exchange next, and then
all go on together."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from tagc import _library as lib
from tagc._library import LOST, Error
from tagc.quorum import internals, managed
from tagc.torch.extension import Comm

KEY = "tagc.LocalSteps"  # of the state that torchft sends to a replica that joins
MOST_FRAGMENTS = 2**20


class Sites:
    """Sites that join and leave, as torchft's Manager knows them: LocalSteps(model, optimizer,
    manager=Sites(manager))."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def check(self, optimizer: Any, between: Any, delay: Any) -> None:
        """Raises Error if LocalSteps cannot work with these. Local."""
        manager = self._manager
        try:
            from torchft import Manager, Optimizer
        except ImportError as failure:
            raise Error(
                "argument",
                f"manager is a {type(manager).__name__}, must be torchft's Manager, and torchft is not "
                "installed",
            ) from failure
        if not isinstance(manager, Manager):
            raise Error("argument", f"manager is a {type(manager).__name__}, must be torchft's Manager")
        if internals.has_async_quorum(manager):
            raise Error(
                "unsupported",
                "this Manager has use_async_quorum=True: LocalSteps needs False, because a replica that "
                "joins must have its state before an exchange begins",
            )
        if isinstance(optimizer, Optimizer):
            raise Error(
                "argument",
                "optimizer is torchft's, which asks for a quorum at every step: give LocalSteps torch's own "
                "optimizer",
            )
        if between is not None:
            raise Error(
                "argument",
                f"between is {between!r}, must be None where a manager is given: torchft knows the other "
                "sites",
            )
        if delay:
            raise Error(
                "unsupported",
                f"delay is {delay!r}: under torchft it must be 0, because a replica that joins gets the "
                "state of another one during an exchange, which must not change meanwhile",
            )

    def join(self, handle: Any, fingerprint: Mapping[str, Any]) -> Exchanges:
        """Returns the exchanges of these LocalSteps. fingerprint: what all sites must have alike, by name."""
        return Exchanges(handle, self._manager, fingerprint)


_registered: weakref.WeakKeyDictionary[Any, list[weakref.ref[Exchanges]]] = weakref.WeakKeyDictionary()


def _register(manager: Any, exchanges: Exchanges) -> None:
    """Registers functions for a manager once, because torchft has no way to take one back."""
    if manager in _registered:
        before = _registered[manager][0]()
        if before is not None and not before.is_closed:
            raise Error("state", "this Manager has LocalSteps already: close() them first")
        _registered[manager][0] = weakref.ref(exchanges)
        return
    current = _registered[manager] = [weakref.ref(exchanges)]

    def state() -> dict[str, Any]:
        found = current[0]()
        return {} if found is None else found.state()

    def load(state: dict[str, Any]) -> None:
        if (found := current[0]()) is not None:
            found.load(state)

    manager.register_state_dict_fn(KEY, load, state)


class Exchanges:
    """The exchanges of LocalSteps in the quorums of a Manager."""

    def __init__(self, handle: Any, manager: Any, fingerprint: Mapping[str, Any]) -> None:
        self._handle, self._manager, self.is_closed = handle, manager, False
        self.quorum = managed.Quorum(
            manager, handle.settings.timeout_s, {name: repr(value) for name, value in fingerprint.items()}
        )
        self._is_healed = False  # in this quorum
        # the fragment of the last run(); None: no replica contributed, or it does not count
        self._exchanged: int | None = None
        self._refused: Error | None = None
        self._connected: Any = None  # the connection of the fragments
        _register(manager, self)

    # ---- an exchange ----

    def run(self, fragment: Any) -> bool:
        """Makes an exchange of a fragment, or None: of the one that others exchange now, to which this
        replica contributes nothing. Returns whether it counts. Collective over the replicas that torchft has
        in its quorum."""
        begin = time.perf_counter()
        self._is_healed, self._refused, self._exchanged = False, None, None
        self._manager.start_quorum()
        if self._is_healed:
            for one in self._handle.fragments:
                one.restore()
            if fragment is None:  # between backward() and step(): gradients are of the parameters before
                for trained in self._handle.site.trained:
                    trained.parameter.grad = None
        flight: Any = None
        stats: list[tuple[Any, lib.ReducerStats]] = []
        is_now, failure = True, None
        try:
            flight, is_now = self._prepare(fragment)
            if flight is not None:
                stats = self._exchange(flight)
        except Error as problem:
            failure = problem
            self.quorum.give_up(problem)
        waited, counts = time.perf_counter(), False
        try:
            counts = bool(self._manager.should_commit())
        finally:
            self.quorum.decided(counts)
        if failure is not None:
            if failure.status not in LOST:
                raise failure
            self.say(f"tagc: this exchange is given up: {failure}")
        if counts and flight is not None:
            self._exchanged = flight.fragment.index
            # A site that got its state for an exchange that failed does not get it again, but the others
            # have trained on: they do not exchange the next fragment together unless it counts as they do.
            self._handle.n_steps = flight.step
            number, agree_s = self._handle.n_exchanges + 1, time.perf_counter() - waited
            self._handle.land(flight, is_now, stats, number, wait_s=waited - begin, agree_s=agree_s)
        return counts

    def run_all(self) -> None:
        """Makes an exchange of each fragment. A site that failed alone before goes on behind the fragment
        that others exchange now."""
        fragments, at = self._handle.fragments, 0
        while at < len(fragments):
            if not self.run(fragments[at]):
                raise Error(
                    "transport",
                    f"the exchange of fragment {at} does not count, and changed nothing: synchronize() again",
                )
            at = (at if self._exchanged is None else self._exchanged) + 1

    def _prepare(self, fragment: Any) -> tuple[Any, bool]:
        """Returns (what this replica sends, whether its parameters are to be the base afterwards); None: no
        replica contributes."""
        handle = self._handle
        comm = self.quorum.connect(self)
        if self._refused is not None:
            raise self._refused
        if self._connected is not comm:
            handle.connect(comm)
            self._connected = comm
        contributes = fragment is not None and self._manager.is_participating() and not self._is_healed
        failure = None
        flight = handle.free_flights[0]
        if fragment is not None and contributes:
            flight.begin(handle.fragments[fragment.index], handle.n_steps)
            try:
                handle.site.check_trained()
                if not flight.is_finite():
                    raise Error(
                        "state",
                        f"what fragment {fragment.index} of this site came to is not finite; nothing was "
                        "changed",
                    )
            except Error as problem:
                failure = problem
        try:
            votes = comm.agree(
                "exchange between sites",
                {"exchanges": handle.n_exchanges},
                failure,
                vote=handle.n_steps * MOST_FRAGMENTS + fragment.index + 1 if contributes else 0,
            )
        except Error as problem:
            if failure is None and problem.status != "mismatch":  # another site's, which raises it
                raise Error("transport", str(problem)) from problem
            raise
        # (steps, fragment) of those that contribute
        calls = [divmod(vote - 1, MOST_FRAGMENTS) if vote else None for vote in votes]
        made = [call for call in calls if call is not None]
        if len({index for _, index in made}) > 1:
            raise Error(
                "mismatch",
                f"sites do not exchange the same fragment: {[call and call[1] for call in calls]} by site "
                "(None: contributes nothing); all must have the same every and fragments, and the same "
                "number of steps",
            )
        if not made:
            return None, True
        step, index = max(made)
        is_now = True
        if contributes:
            flight.divide(len(made))
            flight.step = step
        else:
            flight.begin(handle.fragments[index], step)
            is_now = self._is_healed or fragment is not None or not flight.delta.any()
            flight.delta.zero_()
        return flight, is_now

    def _exchange(self, flight: Any) -> list[tuple[Any, lib.ReducerStats]]:
        self.quorum.begin(self)
        self.quorum.goes_on(
            place.trained.name
            for one in self._handle.fragments
            if one is not flight.fragment
            for place in one.places
        )
        flight.launch(self._handle.n_exchanges + 1)
        stats = flight.end()
        self.quorum.goes_on(place.trained.name for place in flight.fragment.places)
        if sum(one.nonfinite for _, one in stats):
            raise Error(
                "state",
                (
                    f"what fragment {flight.fragment.index} of some site came to is not finite; nothing was "
                    "changed"
                ),
            )
        return stats

    # ---- the state that torchft sends to a replica that joins ----

    def state(self) -> dict[str, Any]:
        """Returns the state for another site. Called in a thread of torchft's, while run() waits for it."""
        return self._handle.shared()

    def load(self, state: dict[str, Any]) -> None:
        self._is_healed = True
        try:
            self._handle.load_shared(state)
        except Error as problem:  # raised when the others know why
            self._refused = problem

    # ---- managed.Member ----

    @property
    def n_steps(self) -> int:
        return self._handle.n_exchanges

    @property
    def units(self) -> dict[str, Any]:
        return {str(fragment.index): fragment for fragment in self._handle.fragments}

    def takes_part(self) -> bool:
        return bool(self._manager.is_participating()) and not self._is_healed

    def about(self) -> dict[str, Any]:
        return {
            "exchanges": self._handle.n_exchanges,
            "checksums": [fragment.checksum() for fragment in self._handle.fragments],
        }

    def restore(self, about: Mapping[str, Any]) -> None:
        """Does nothing: nothing but residuals changes before a step counts."""

    def follow(self, about: Mapping[str, Any]) -> None:
        if self._refused is None and about != self.about():
            raise Error(
                "mismatch",
                f"what sites begin with must be the same: another one has {dict(about)}, this one "
                f"{self.about()}. Load one "
                "checkpoint on all of them, seed them alike, or make the Manager with init_sync=True",
            )

    def disconnect(self) -> None:
        for fragment in self._handle.fragments:
            fragment.disconnect()

    def say(self, text: str) -> None:
        self._handle.say(text)

    # ---- what LocalSteps and its checkpoints ask ----

    def connection(self) -> Comm:
        return self.quorum.connection()

    def residuals_before(self, fragment: Any) -> Mapping[str, torch.Tensor] | None:
        return self.quorum.residuals_before(str(fragment.index))

    def forget(self) -> None:
        self.quorum.forget()

    def close(self) -> None:
        """Closes the connection, after the fragments."""
        self.is_closed = True
        self.quorum.close()
