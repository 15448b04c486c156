"""Under torchft the ranks of an exchange are the replicas of torchft's quorum, which may change at each step.
Quorum is that connection; Wrapper uses it for DDP, fsdp2.py for FSDP2, exchanges.py for local steps.

torchft chooses the replicas, makes a process group for each quorum, sends parameters and optimizer state to a
replica that joins, and decides after each step whether it counts (should_commit). tagc handles the rest:

    a new quorum           makes new connections and reducers; keeps residuals by parameter
    a replica joins        it gets the schedule of another replica; its residual is empty
    a replica is gone      its residual is lost; every survivor counts and reports the loss
    a step does not count  restores residuals and the schedule from before the step

Gradients are divided by the number of replicas before they are summed, so a residual is a part of the mean
gradient, and remains so when the number changes.

A replica for which a step failed cannot know whether it counted on others. So each replica stores, per
connection, the last step that counted, and replicas exchange these numbers when they connect again. If the
step counted on others, they have applied this replica's values, and its residual after the step is the right
one."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tagc._library import LOST, Error
from tagc.quorum import internals
from tagc.quorum.torchft import is_managed_group
from tagc.torch import Compressed
from tagc.torch.extension import Comm, Gloo, Settings, Way
from tagc.torch.hooks import ddp

TIMEOUT_S = 60.0  # as torchft's Manager
MOST_REMEMBERED = 100  # connections


class _Comm(Comm):
    """A connection over the ranks of a process group that torch.distributed does not know."""

    def _connect(self, group: dist.ProcessGroup, transport: str) -> Way:
        self.rank, self.world_size = group.rank(), group.size()
        self.ranks = tuple(range(self.world_size))
        try:
            return Gloo(
                dist.PrefixStore("tagc", group.get_group_store()), self.rank, self.ranks, self._timeout_s
            )
        except RuntimeError as failure:
            raise Error(
                "transport", f"no connection to all {self.world_size} replicas: {failure}"
            ) from failure

    def share(self, mine: Any) -> list[Any]:
        """Returns an object of every rank that JSON can hold, in rank order. Collective."""
        text = json.dumps(mine).encode()
        lengths = [struct.unpack("<q", length)[0] for length in self.all_gather(struct.pack("<q", len(text)))]
        return [
            json.loads(data[:n]) for data, n in zip(self.all_gather(text.ljust(max(lengths), b" ")), lengths)
        ]


class Holder(Protocol):
    """Residuals by the names of parameters, as of interfaces.Residuals."""

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]: ...

    def names_of_residuals(self) -> set[str]: ...

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None: ...


class Member(Protocol):
    """What exchanges in a quorum."""

    @property
    def n_steps(self) -> int:
        """Exchanges so far."""
        ...

    @property
    def units(self) -> Mapping[str, Holder]: ...

    def takes_part(self) -> bool:
        """Returns whether the state of this replica is not one that torchft sent to it in this quorum."""
        ...

    def about(self) -> dict[str, Any]:
        """Returns what is equal on all replicas."""
        ...

    def restore(self, about: Mapping[str, Any]) -> None:
        """Restores the state. about: of this replica, before a step that did not count."""
        ...

    def follow(self, about: Mapping[str, Any]) -> None:
        """Takes the state over. about: of a replica that takes part."""
        ...

    def disconnect(self) -> None:
        """Ends all reducers and keeps the residuals."""
        ...

    def say(self, text: str) -> None: ...


class _Gradients:
    """The Member for a handle."""

    def __init__(self, handle: Compressed, manager: Any) -> None:
        self._state, self._manager, self.n_steps = handle.state, manager, handle.n_steps
        self.units, self.disconnect, self.say = handle.state.units, handle.passes.disconnect, handle.state.say

    def takes_part(self) -> bool:
        return bool(self._manager.is_participating())

    def about(self) -> dict[str, Any]:
        state = self._state
        return {"step": state.n_steps, "loss_scale": state.loss_scale} | state.schedule.state(
            with_windows=False
        )

    def restore(self, about: Mapping[str, Any]) -> None:
        """Restores the state without unfinished windows."""
        state = self._state
        if about["loss_scale"] != state.loss_scale:
            state.set_loss_scale(about["loss_scale"])
        self.n_steps = state.n_steps = about["step"]
        state.moments.load(about, False)

    follow = restore


class _Attempt:
    """A step that torchft has not decided yet, and the state before it."""

    def __init__(self, member: Member, name: str, step: int) -> None:
        self.name, self.step = name, step  # of the connection; of torchft
        self.has_failed = False
        self._through: set[str] = set()  # names of parameters whose exchange is over
        self.residuals = {name: unit.residuals_on_the_wire() for name, unit in member.units.items()}
        self._about = member.about()

    def goes_on(self, names: Iterable[str]) -> None:
        self._through.update(names)

    def undo(self, member: Member) -> None:
        member.restore(self._about)
        for name, unit in member.units.items():
            unit.set_residuals_on_the_wire(self.residuals[name])

    def keep(self, member: Member) -> int:
        """Keeps what a step did that counted on other replicas. Returns the number of parameters whose
        residual is lost, because their exchange failed here at its end."""
        n_lost = 0
        for unit in member.units.values():
            lost = unit.names_of_residuals() - self._through
            if lost:
                unit.set_residuals_on_the_wire(
                    {
                        name: values
                        for name, values in unit.residuals_on_the_wire().items()
                        if name not in lost
                    }
                )
            n_lost += len(lost)
        return n_lost


# ---- what replicas say of themselves when they connect: "takes part", and "last", the [connection, step]
# that counted last, or None ----


def _makers(everyone: Sequence[Mapping[str, Any]], step: int) -> dict[int, str]:
    """Returns who made that step: rank -> the connection."""
    return {
        rank: theirs["last"][0]
        for rank, theirs in enumerate(everyone)
        if theirs["last"] is not None and theirs["last"][1] == step
    }


def _source(everyone: Sequence[Mapping[str, Any]], last_step: int) -> int:
    """Returns the rank whose schedule the others take over: one that made the last step. A replica that was
    healed in a step that failed takes part, too, but has a schedule of its own."""
    makers = _makers(everyone, last_step)
    taking_part = [rank for rank, theirs in enumerate(everyone) if theirs["takes part"]]
    return next((rank for rank in taking_part if rank in makers), next(iter(taking_part), 0))


def _strays(everyone: Sequence[Mapping[str, Any]], last_step: int) -> list[int]:
    """Returns ranks that made the last step over another connection than most did. If two connections have
    equally many ranks, the one of the lowest rank counts as most. torchft compares numbers of steps, so it
    takes the parameters for the same."""
    makers = _makers(everyone, last_step)
    connections = list(makers.values())
    return [
        rank for rank, connection in makers.items() if connection != max(connections, key=connections.count)
    ]


class Quorum:
    """Replaces the process group in a managed model's handle: it is the connection over the present
    replicas."""

    def __init__(self, manager: Any, timeout_s: float, fingerprint: Mapping[str, str]) -> None:
        from torchft.process_group import ManagedProcessGroup

        self._manager, self._timeout_s, self._fingerprint = manager, timeout_s, fingerprint
        self._managed = ManagedProcessGroup(manager)
        self._group: Any = None  # torch's, of the connection
        self._comm: _Comm | None = None
        self._name = ""  # of the connection
        self._attempt: _Attempt | None = None
        self._counted: dict[str, int] = {}  # name of a connection -> the last step over it that counted
        self._last: tuple[str, int] | None = None  # (connection, step) of the last step that counted here
        self._id, self._members = str(uuid.uuid4()), list[str]()
        self.counts = {"replicas": 0, "changes": 0, "gone": 0, "joined": 0, "undone": 0, "lost": 0}

    def size(self) -> int:
        return 0 if self._comm is None else self._comm.world_size

    def rank(self) -> int:
        return 0 if self._comm is None else self._comm.rank

    def connection(self) -> Comm:
        if self._comm is None:
            raise Error("transport", "this replica is not connected to the others")
        return self._comm

    def attempt(self) -> tuple[str, int] | None:
        """Returns (connection, step) of the step that is not decided."""
        return None if self._attempt is None else (self._attempt.name, self._attempt.step)

    def _torchs(self) -> Any:
        """Returns torch's process group inside torchft's; each quorum has another."""
        group = self._managed
        while is_managed_group(group):
            group = group.parent
        return group

    # ---- a step ----

    def connect(self, member: Member) -> Comm:
        """Connects in each quorum before the first exchange, in the exchanging thread. Collective if the
        quorum has changed."""
        self._manager.wait_quorum()
        self._check()
        group = self._torchs()
        if self._comm is None or group is not self._group:
            self._renew(member, group)
        elif self._attempt is not None and self._attempt.has_failed:
            self._decide(member, self._counted)
        return self.connection()

    def begin(self, member: Member) -> None:
        """Notes the state before a step. After connect(), before the residual changes."""
        step = self._manager.current_step()
        if self.attempt() != (self._name, step):
            self._attempt = _Attempt(member, self._name, step)

    def _check(self) -> None:
        if (said := self._manager.errored()) is not None:
            raise Error(
                "transport", f"torchft has given this step up: {getattr(said, 'original_exception', said)}"
            )

    def prepare(self, source: torch.Tensor) -> None:
        """Turns the bucket into this replica's part of the mean."""
        self._check()
        if self._manager.is_participating():
            source.div_(max(1, self._manager.num_participants()))
        else:  # this replica is being healed; with a gradient of zero its residual is not sent
            source.zero_()

    def goes_on(self, names: Iterable[str]) -> None:
        if self._attempt is not None:
            self._attempt.goes_on(names)

    def decided(self, counts: bool) -> None:
        """Takes the result of should_commit()."""
        if self._attempt is None:
            return
        if counts:
            self._counted[self._attempt.name] = self._attempt.step
            self._last = self._attempt.name, self._attempt.step
            self._attempt = None
        else:
            self._attempt.has_failed = True

    def _decide(self, member: Member, counted: Mapping[str, int]) -> None:
        """Decides on the open attempt. counted: of all replicas."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        if counted.get(attempt.name, -1) >= attempt.step:
            self.counts["lost"] += attempt.keep(member)
        else:
            attempt.undo(member)
            self.counts["undone"] += 1

    def give_up(self, failure: Error) -> None:
        """Makes this step fail, and reports it to the other replicas and to torchft."""
        if self._comm is not None:
            self._comm.abort(str(failure))
        if self._manager.errored() is None:
            self._manager.report_error(failure)

    def close(self) -> None:
        """Closes the connection. Call it after everything made on it is closed."""
        comm, self._comm, self._group = self._comm, None, None
        if comm is not None:
            comm.close()

    def residuals_before(self, unit: str) -> Mapping[str, torch.Tensor] | None:
        """Returns residuals of a unit before a step that did not count here; None if there is no such
        step."""
        return (
            self._attempt.residuals[unit] if self._attempt is not None and self._attempt.has_failed else None
        )

    def forget(self) -> None:
        """Forgets the step that did not count: residuals are new, and none of them is undone."""
        self._attempt = None

    # ---- a quorum ----

    def _renew(self, member: Member, group: Any) -> None:
        member.disconnect()
        self.close()
        comm = _Comm(group, self._timeout_s)
        try:
            self._join(member, comm)
        except BaseException:
            comm.close()
            raise
        self._comm, self._group = comm, group

    def _join(self, member: Member, comm: _Comm) -> None:
        everyone = comm.share(
            {
                "id": self._id,
                "name": str(uuid.uuid4()),
                "fingerprint": self._fingerprint,
                "counted": self._counted,
                "takes part": member.takes_part(),
                "last": self._last,
            }
        )
        last_step = self._manager.current_step() - 1
        source = _source(everyone, last_step)
        self._compare([theirs["fingerprint"] for theirs in everyone], source)
        if strays := _strays(everyone, last_step):
            raise Error(
                "mismatch" if comm.rank in strays else "transport",
                f"replicas do not agree: replica {strays[0]} made step {last_step} "
                "without most of the others, so its parameters differ; start it again, and give torchft's "
                "lighthouse a --min_replicas "
                "above half of all replicas",
            )
        counted: dict[str, int] = {}
        for theirs in everyone:
            for name, step in theirs["counted"].items():
                counted[name] = max(step, counted.get(name, -1))
        self._decide(member, counted)
        self._counted = dict(list(counted.items())[-MOST_REMEMBERED:])
        member.follow(comm.share(member.about() if comm.rank == source else None)[source])
        self._name = everyone[0]["name"]
        self._tell(member, [theirs["id"] for theirs in everyone])

    def _compare(self, fingerprints: Sequence[Mapping[str, str]], source: int) -> None:
        """Raises Error on a replica that differs from the participating ones; these continue without it."""
        for rank, theirs in enumerate(fingerprints):
            for what, value in fingerprints[source].items():
                if theirs.get(what) != value:
                    status = "mismatch" if self._fingerprint != fingerprints[source] else "transport"
                    raise Error(
                        status,
                        (
                            f"replicas do not agree: {what} is {value} on replica {source} and "
                            f"{theirs.get(what)} on replica {rank}"
                        ),
                    )

    def _tell(self, member: Member, members: list[str]) -> None:
        gone, joined = (
            set(self._members) - set(members),
            set(members) - set(self._members) if self._members else set[str](),
        )
        self.counts["changes"] += bool(self._members)
        self.counts["replicas"], self._members = len(members), members
        self.counts["gone"] += len(gone)
        self.counts["joined"] += len(joined)
        words = (
            [f"{len(gone)} gone, and with {'it its residual' if len(gone) == 1 else 'them their residuals'}"]
            if gone
            else []
        )
        words += [f"{len(joined)} joined"] if joined else []
        if words:
            member.say(
                f"tagc: {len(members)} replicas from exchange {member.n_steps + 1} on: {', '.join(words)}"
            )


class Managed:
    """What the wrappers of models under torchft share."""

    is_elastic = True
    sums_within_hosts = False  # replicas are on hosts of their own
    why_no_hosts = "tagc exchanges between torchft's replicas"
    _manager: Any
    _quorum: Quorum | None = None
    _error: Any = None  # torchft's, of the last step that was given up

    def check(self, options: Settings, is_on_device: bool) -> None:
        if options.parameters is not None:
            raise Error("unsupported", f"parameters is {options.parameters!r}: under torchft it must be None")
        if options.transport == "native":
            raise Error(
                "unsupported",
                f"transport is {options.transport!r}: under torchft, whose groups change, tagc takes 'host'",
            )
        if is_on_device:
            raise Error("unsupported", "the model is on a device: under torchft it must be in CPU memory")

    def connect(
        self, handle: Compressed, timeout_s: float | None, fingerprint: Mapping[str, Any], is_on_host: bool
    ) -> None:
        """Makes the quorum: replicas compare options when they connect."""
        self._quorum = Quorum(
            self._manager, timeout_s or TIMEOUT_S, {name: repr(value) for name, value in fingerprint.items()}
        )

    @property
    def quorum(self) -> Quorum:
        assert self._quorum is not None  # start() is called first
        return self._quorum

    def follow_commits(self, handle: Compressed) -> None:
        """Learns whether steps count, until the handle is closed."""
        said = self._manager.should_commit

        def should_commit(*arguments: Any, **options: Any) -> bool:
            counts = False
            try:
                counts = said(*arguments, **options)
            finally:
                self.quorum.decided(counts)
            return counts

        self._manager.should_commit = should_commit
        handle.passes.undo.append(lambda: vars(self._manager).pop("should_commit", None))
        handle.passes.ends.append(self.quorum.close)

    def begin(self, handle: Compressed) -> None:
        member = _Gradients(handle, self._manager)
        self.quorum.connect(member)
        self.quorum.begin(member)

    def prepare(self, source: torch.Tensor) -> None:
        self.quorum.prepare(source)

    def goes_on(self, names: Sequence[str]) -> None:
        self.quorum.goes_on(names)

    def gives_up(self, handle: Compressed | None, failure: BaseException) -> bool:
        """Returns whether torchft, not the caller of backward(), gets this failure."""
        if not isinstance(failure, Error) or failure.status not in LOST:
            return False
        if handle is not None and (self._error is None or self._error is not self._manager.errored()):
            handle.state.say(f"tagc: this step is given up: {failure}")
        self.quorum.give_up(failure)
        self._error = self._manager.errored()
        return True


class Wrapper(Managed, ddp.Wrapper):
    """torchft's DistributedDataParallel, for compress()."""

    speaks = True  # each replica has a log of its own
    op = dist.ReduceOp.SUM

    def __init__(self, model: Any, manager: Any) -> None:
        self._manager = manager
        super().__init__(model)

    def _is_known(self, state: Any) -> bool:
        return state is self._manager

    def groups(self) -> list[Any]:
        return [] if self._quorum is None else [self._quorum]

    def agreeing(self) -> list[Any]:
        return [None]  # replicas are no ranks of one torch.distributed

    def n_ranks(self) -> int:
        return 0 if self._quorum is None else self._quorum.size()

    def install(self, handle: Compressed) -> None:
        if self.hooked() is None:
            internals.renew_ddp_reducer(self._model)  # torchft's hook cannot be removed from the old reducer
        super().install(handle)
        state = self.hooked()
        assert state is not None
        state.partner = self._manager
        self.follow_commits(handle)

    # ---- called by the hook ----

    def begin(self, handle: Compressed) -> None:
        state = self.hooked()
        before = self.quorum.size()
        super().begin(handle)
        if state is not None and self.quorum.size() != before:
            state.forget_layouts()

    def swallows(self, failure: BaseException) -> bool:
        state = self.hooked()
        return self.gives_up(None if state is None else state.handle, failure)
