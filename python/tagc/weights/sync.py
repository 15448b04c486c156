"""WeightSync: a trainer's weights for those who generate with them, exact, as what each step changed.

    trainer    encode(): what changed since the last version -> a frame (frame.py) -> send(), or bytes
    generator  receive(), or apply(bytes): the frame is checked as a whole -> weights of the next version

The trainer keeps a copy of what receivers have. It moves on by applying its own messages, so that it is by
construction what they have. A frame names the version that it changes: a receiver without that version takes
whole weights only, and so does one whose weights were written in part."""

from __future__ import annotations

import concurrent.futures
import datetime
import secrets
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.extension import agree_all, number, share, timeout_of
from tagc.weights import frame as frames
from tagc.weights.frame import Frame, Piece, piece_of
from tagc.weights.links import Links, rank_and_size, senders_of
from tagc.weights.tensors import (
    Box,
    Entry,
    Memory,
    Model,
    Parts,
    Tensors,
    entries_of,
    local,
    memories,
    named_tensors,
    product,
)

_T = TypeVar("_T")
_R = TypeVar("_R")


class Sent(NamedTuple):
    """What a sender encoded last: its own part, if there are several senders."""

    version: int
    is_whole: bool
    n_bytes: int
    n_elems: int
    n_changes: int  # elements that differ from the version before; n_elems if that is not known

    @property
    def bits_per_change(self) -> float:
        """Returns the bits of the buffer per changed element."""
        return 8 * self.n_bytes / self.n_changes if self.n_changes else float("nan")


class WeightSync:
    """Sends the weights of a model after every step: exactly, and only what changed.

    model: a module, also under FSDP2 or DDP, a dict of tensors by name, of which some may be Parts of
    others, or a function that returns one. Receivers need the same names, shapes and dtypes, and may be
    sharded otherwise or not at all. Tied tensors travel once, under the first name; no others may overlap in
    memory.
    group: of senders and receivers. source: the rank of it that sends, or the ranks: under FSDP2 all that
    hold shards. None: this process alone, which calls encode() or apply().
    dtype: in which floating-point parameters travel, for senders that train in another, such as
    torch.bfloat16; None: as they are. buffers: those that checkpoints have travel, too.
    by_magnitude: changes are coded by the magnitude of weights, in 17 to 50 % fewer bytes, where every
    receiver holds the whole of what a sender has. None: over a group where this is so. True: also in bytes;
    who holds a part then cannot apply them, which is an Error.
    check_every: before each so many versions, receivers compare the hash of their weights with the senders';
    0: never. threads: that encode and apply.
    timeout_s: within which all ranks make this object, and within which each part of a call ends, such as to
    encode or to move a version. Not given: the group's time-out, as init_process_group() got it. A rank that
    calls send() or receive() waits for the others to call for up to a day, and until one of them ends. All
    that goes over connections of its own: a time-out makes this object useless, and leaves the group as it
    was.

    Collective over the group. Senders keep a copy of what they send, in CPU memory."""

    def __init__(
        self,
        model: Model,
        group: dist.ProcessGroup | None = None,
        source: int | Sequence[int] = 0,
        *,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        by_magnitude: bool | None = None,
        check_every: int = 16,
        threads: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        self._model, self._group, self._buffers = model, group, buffers
        self._check_every = check_every
        self._run, self._version = 0, 0  # of the weights here, for a receiver; of the base, for a sender
        self._entries: list[Entry] = []
        self._base: dict[tuple[int, Box], torch.Tensor] = {}
        self._mine: list[tuple[int, Box]] = []
        self._dtype = dtype
        self.last: Sent | None = None
        failure: Exception | None = None
        senders: list[int] = []
        self._rank, size = rank_and_size(group)
        timeout_s = timeout_of(group) if timeout_s is None else timeout_s
        try:
            senders = senders_of(source, size)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise Error(
                    "argument", f"dtype is {dtype!r}, must be a floating-point dtype of torch or None"
                )
            if not isinstance(buffers, bool):
                raise Error("argument", f"buffers is {buffers!r}, must be True or False")
            if by_magnitude not in (None, False, True):
                raise Error("argument", f"by_magnitude is {by_magnitude!r}, must be True, False or None")
            number("check_every", check_every, 0, 2**31 - 1, int)
            number("threads", threads, 1, 256, int)
            number("timeout_s", timeout_s, 0.001, 1e6)
            self._entries = entries_of(named_tensors(model, buffers), dtype)
            if group is not None and self._rank not in senders:
                self._targets()
        except Exception as problem:
            failure = problem
        self._senders = senders
        self._receivers = [rank for rank in range(size) if rank not in senders]
        about = {
            "versions": {"libtagc": lib.version()},
            "options": {"source": senders, "buffers": buffers, "check_every": check_every}
            | {"by_magnitude": by_magnitude},
            "rows": [(entry.name, f"{list(entry.shape)} {entry.dtype}") for entry in self._entries],
            "boxes": [entry.boxes for entry in self._entries],
            "name": secrets.token_hex(8),
            "run": secrets.randbits(63) | 1,
        }
        everyone = agree_all(group, about, failure, timeout_s, "WeightSync()")
        self._fingerprint = frames.checksum_of(frames.description(self._entries))
        self._pool = concurrent.futures.ThreadPoolExecutor(threads) if threads > 1 else None
        self._lacking = self._divide([everyone[rank]["boxes"] for rank in senders])
        self._by_magnitude = by_magnitude
        self._held_by = [everyone[rank]["boxes"] for rank in self._receivers]
        if group is not None and self._lacking:
            raise Error("argument", self._lacking)
        self._new_run = everyone[senders[0]]["run"]
        self._links = None
        if group is not None:
            try:
                self._links = Links(everyone[0]["name"], self._rank, senders, self._receivers, timeout_s)
            except Exception as problem:
                failure = problem
            # No rank returns, and perhaps drops its connections, while another one is still connecting.
            patience = datetime.timedelta(seconds=timeout_s)
            _checked(share(group, (None, _words(failure)), patience))

    @property
    def version(self) -> int:
        """Returns the version of the weights that this rank has sent or received last; 0: none."""
        return self._version

    @property
    def run(self) -> int:
        """Returns the number of the senders' run of which that version is; 0: none."""
        return self._run

    # ---- bytes ----

    def encode(self, whole: bool = False) -> bytes:
        """Returns the next version of the weights as bytes: what changed since the last one, or if
        `whole`, or in the first call, all of them. Each sender makes its part; a receiver applies the
        parts of all at once. Collective over the senders: if it fails on one, all raise the same Error, and
        there is no new version."""
        return b"".join(self.encode_buffers(whole))

    def encode_buffers(self, whole: bool = False) -> list[Any]:
        """Is encode() without its copy: the bytes are these, one behind the other."""
        self._require("encode", self._is_sender())
        if self._lacking:
            raise Error("argument", self._lacking)
        if self._run not in (0, self._new_run):
            raise Error("state", "this WeightSync applies; versions are encoded by another one")
        made: list[_Made] = []
        self.agreed(lambda: made.append(self._encode(whole or not self.has_base())))
        self._commit(made[0])
        return made[0].frame

    def agreed(self, call: Callable[[], _R]) -> list[_R]:
        """Returns what the call returns on each sender. If it fails on one, all raise the same Error.
        Collective over the senders; what is returned is to be small."""
        result, failure = _attempt(call)
        if self._links is None or len(self._senders) == 1:
            if isinstance(failure, OSError):
                raise Error("transport", str(failure)) from failure
            if failure is not None:
                raise failure
            return [cast(_R, result)]
        told = self._links.tell((result, _words(failure)))
        for rank, (_, words) in zip(self._senders, told):
            if words is not None:
                raise Error(words[0], f"rank {rank}: {words[1]}") from failure
        return [theirs for theirs, _ in told]

    def encode_current(self) -> bytes:
        """Returns all weights of the version that was encoded or sent last, as bytes, for receivers that come
        late: there is no new version, and receivers that have this one do not need them. Local."""
        return b"".join(self.encode_current_buffers())

    def encode_current_buffers(self) -> list[Any]:
        """Is encode_current() without its copy: the bytes are these, one behind the other."""
        self._require("encode_current", self._is_sender())
        if self._version == 0 or not self.has_base():
            raise Error("state", "encode_current() needs a version: call encode() or send() first")
        messages = [frames.encode(None, self._base[place])[0] for place in self._mine]
        return frames.write(
            self._frame(self._version, messages, None, whole=True), self._entries, self._fingerprint
        )

    def apply(self, *buffers: Any) -> int:
        """Turns the weights into the version in these buffers, one of each sender, and returns its number.
        Error if they are damaged, of other tensors or of another run of the sender, or if they change another
        version than these weights have; the weights are as before then. Local."""
        self._require("apply", self._group is None or not self._is_sender())
        if self._base:
            raise Error("state", "this WeightSync encodes; weights are applied by another one")
        self._targets()
        if not buffers:
            raise Error("argument", "apply() got no buffer")
        parts = self._parts_in(buffers)
        self._check_held(parts)
        self._check_version(parts[0])
        altered = self._altered(parts)
        if altered is not None:
            raise Error("mismatch", f"{altered}: apply a whole one, of encode_current()")
        self._apply(parts)
        return self._version

    def go_on(self, versions: Iterable[Sequence[Any]]) -> int:
        """Makes this sender go on behind versions of an earlier one, as if it had sent them, and returns the
        number of the last. versions: the buffers of each as apply() takes them, from one with all weights
        on. Local: all senders are given the same."""
        self._require("go_on", self._is_sender())
        if self._run or self._lacking:
            raise Error("state", self._lacking or "go_on() comes before the first version")
        base = {
            place: torch.empty(place[1].sizes, dtype=self._entries[place[0]].dtype) for place in self._mine
        }
        held: list[list[tuple[Box, torch.Tensor]]] = [[] for _ in self._entries]
        for (index, box), tensor in base.items():
            held[index].append((box, tensor))
        run, version, has_all = 0, 0, False
        for buffers in versions:
            parts = self._parts_in(buffers)
            if not (parts[0].is_whole or (parts[0].run, parts[0].base) == (run, version)):
                raise Error("state", f"version {parts[0].version} does not follow version {version}")
            # an earlier sender may have divided tensors otherwise
            has_all = parts[0].is_whole or (has_all and self._in_part(parts, held) is None)
            if has_all:
                self._map(
                    lambda piece: write(piece, held[piece.entry]),
                    [piece for part in parts for piece in part.pieces],
                )
            run, version = parts[0].run, parts[0].version
        self._run = self._new_run = run or self._new_run
        self._version, self._base = version, base if has_all else {}
        return version

    def begin_behind(self, run: int, version: int) -> None:
        """Makes the next version of this sender one of that run, with a higher number. Local."""
        self._require("begin_behind", self._is_sender())
        if self._run not in (0, run):
            raise Error("state", f"versions here are of run {self._run:016x}, and not of {run:016x}")
        self._run = self._new_run = run
        if version > self._version:
            self._version, self._base = version, {}

    # ---- over the group ----

    def send(self) -> int:
        """Sends the next version of the weights to the receivers of the group, which call receive(), and
        returns its number. Receivers that have not the last version get all weights. Collective; if it
        fails on a rank, all raise the same Error, and no weights change. Should a receiver fail while it
        writes, the others have the version, and it gets all weights in the next one."""
        if self._group is not None and not self._receivers:
            raise Error("state", f"all {len(self._senders)} ranks of the group send: call encode()")
        return self._exchange("send", self._is_sender())

    def receive(self) -> int:
        """Gets the next version of the weights from the senders, which call send(), and returns its
        number."""
        return self._exchange("receive", not self._is_sender())

    def _exchange(self, call: str, is_mine: bool) -> int:
        """is_mine: whether that call is this rank's."""
        if self._links is None:
            raise Error("state", f"{call}() needs a group: WeightSync(model, group)")
        _, failure = _attempt(lambda: self._require(call, is_mine))
        self._links.await_calls()
        states = self._share((self._run, self._version, self.has_base(), _words(failure)))
        base = states[self._senders[0]][:2]
        for rank in self._senders:
            if states[rank][:2] != base:
                raise Error(
                    "state",
                    f"senders are at different versions: rank {self._senders[0]} at {base[1]}, rank {rank} "
                    f"at {states[rank][1]}: all encode() and send() equally often",
                )
        has_base = all(states[rank][2] for rank in self._senders)
        behind = [r for r in self._receivers if not has_base or states[r][:2] != base]
        made: _Made | None = None
        parts: list[Frame] = []
        if len(behind) < len(self._receivers):
            made, parts, altered = self._pass_on(False, [r for r in self._receivers if r not in behind])
            behind += altered
            if self._rank in altered:
                parts = []
        if behind:
            whole, received, _ = self._pass_on(True, sorted(behind))
            made, parts = made or whole, parts or received

        def move_on() -> None:
            if parts:
                self._apply(parts)
            if made is not None:
                self._commit(made)

        _, failure = _attempt(move_on)
        self._share((None, _words(failure)))
        return self._version

    def _pass_on(self, whole: bool, to: list[int]) -> tuple[_Made | None, list[Frame], list[int]]:
        """Moves the next version from all senders to those receivers. Returns what this rank made; on
        receivers what they got, which has been checked; and the receivers that something else has altered.
        Collective; all ranks raise the same Error."""
        assert self._links is not None
        made, failure = _attempt(lambda: self._encode(whole)) if self._is_sender() else (None, None)
        mine_whole = None if made is None else b"".join(made.frame)
        lengths = self._share((len(mine_whole or b""), _words(failure)))
        buffers = []
        for sender in self._senders:
            mine = mine_whole if sender == self._rank else None
            buffers.append(self._links.move(sender, to, mine, lengths[sender][0]))
        parts: list[Frame] = []
        altered = None

        def check() -> str | None:
            parts.extend(self._parts_in(buffers))
            self._check_held(parts)
            return self._altered(parts)

        if self._rank in to:
            altered, failure = _attempt(check)
        found = self._share((altered, _words(failure)))
        if altered is not None:
            warnings.warn(f"tagc: {altered}; it gets all weights", stacklevel=4)
        return made, parts, [rank for rank in to if found[rank][0] is not None]

    def _share(self, said: tuple[Any, ...]) -> list[Any]:
        """Returns what every rank says, if none has failed; the last item of each is its failure."""
        assert self._links is not None
        return _checked(self._links.share(said))

    # ---- a sender ----

    def _is_sender(self) -> bool:
        return self._group is None or self._rank in self._senders

    def _divide(self, boxes: Sequence[Sequence[tuple[Box, ...]]]) -> str:
        """Finds what each sender sends: of a box that several hold, the one that has the least to send yet.
        Returns in words which tensor they do not hold as a whole; "" if there is none. Without a group it may
        yet be a receiver."""
        n_sent = [0] * len(boxes)
        for index, entry in enumerate(self._entries):
            taken: dict[Box, list[int]] = {}  # and which senders hold it
            for part, theirs in enumerate(boxes):
                for box in theirs[index]:
                    if box.numel():
                        taken.setdefault(box, []).append(part)
            for box, parts in taken.items():
                sender = min(parts, key=lambda part: n_sent[part])
                n_sent[sender] += box.numel()
                if self._is_sender() and self._senders[sender] == self._rank:
                    self._mine += [(index, piece) for piece in box.pieces()]
            n_held = sum(box.numel() for box in taken)
            if n_held != product(entry.shape):
                who = f"source is {self._senders}: these ranks hold"
                who = "encode() without a group: this rank holds" if self._group is None else who
                return (
                    f"{who} {n_held} of the {product(entry.shape)} elements of {entry.name}; name all ranks "
                    "that hold shards of it"
                )
        return ""

    def _read(self, index: int, box: Box, tensors: Tensors) -> torch.Tensor | None:
        """Returns that box of the tensor now, contiguous, in CPU memory, as it travels; None if no memory
        here has all of it."""
        entry = self._entries[index]
        for held, tensor in local(entry, tensors[entry.name]):
            if held.common(box) == box:
                return tensor[box.within(held)].to("cpu", entry.dtype).contiguous()
        return None

    def has_base(self) -> bool:
        """Returns whether this rank has a copy of all that receivers have from it."""
        return self._version > 0 and len(self._base) == len(self._mine)

    def _encode(self, whole: bool) -> _Made:
        tensors = self._tensors()
        version = self._version + 1
        is_hashed = not whole and bool(self._check_every) and version % self._check_every == 0

        def encode(place: tuple[int, Box]) -> tuple[bytes, int, int]:
            index, box = place
            after, before = self._read(index, box, tensors), self._base.get(place)
            assert after is not None
            message, n_changes = frames.encode(None if whole else before, after, self._is_by_magnitude(place))
            was = frames.checksum(before.data_ptr(), before.nbytes) if is_hashed and before is not None else 0
            return message, n_changes, was

        made = self._map(encode, self._mine)
        messages = [message for message, _, _ in made]
        frame = self._frame(version, messages, [was for *_, was in made] if is_hashed else None, whole)
        buffers = frames.write(frame, self._entries, self._fingerprint)
        n_bytes, n_elems = sum(map(len, buffers)), sum(box.numel() for _, box in self._mine)
        sent = Sent(version, whole, n_bytes, n_elems, sum(n for _, n, _ in made))
        return _Made(buffers, frame.pieces, sent)

    def _is_by_magnitude(self, place: tuple[int, Box]) -> bool:
        """Returns whether all receivers have all of that box, or nothing."""
        if self._by_magnitude is not None:
            return self._by_magnitude
        index, box = place
        held = [one.common(box) for boxes in self._held_by for one in boxes[index]]
        return bool(self._held_by) and all(common == box or not common.numel() for common in held)

    def _frame(self, version: int, messages: Sequence[bytes], hashes: list[int] | None, whole: bool) -> Frame:
        """Returns this sender's part of a version. hashes: of what each piece was, if receivers compare."""
        pieces = [
            piece_of(index, box, was, message)
            for (index, box), was, message in zip(self._mine, hashes or [0] * len(self._mine), messages)
        ]
        return Frame(
            self._senders.index(self._rank),
            len(self._senders),
            whole,
            hashes is not None,
            self._run or self._new_run,
            version,
            0 if whole else self._version,
            pieces,
        )

    def _commit(self, made: _Made) -> None:
        """Moves the base on by the messages themselves. If that fails, the next version is whole."""

        def move(piece: Piece) -> None:
            index, box = piece.entry, piece.box
            if (index, box) not in self._base:
                self._base[index, box] = torch.empty(box.sizes, dtype=self._entries[index].dtype)
            frames.apply(piece, self._base[index, box])

        self._run, self._version, self.last = self._run or self._new_run, made.sent.version, made.sent
        try:
            self._map(move, made.pieces)
        except BaseException:
            self._base.clear()
            raise

    # ---- a receiver ----

    def _targets(self) -> list[list[tuple[Box, torch.Tensor]]]:
        """Returns what a receiver writes to, of each entry. Error if that cannot be done."""
        tensors, targets = self._tensors(), []
        for entry in self._entries:
            targets.append(local(entry, tensors[entry.name]))
            for _, target in targets[-1]:
                self._check_target(entry, target)
        return targets

    def _check_target(self, entry: Entry, target: torch.Tensor) -> None:
        if target.dtype != entry.dtype:
            raise Error(
                "argument",
                f"dtype is {self._dtype}, and {entry.name} is of {target.dtype} here: receivers have "
                "the dtype in which weights travel",
            )
        memory = Memory.of(target)
        if memory is not None and memory.shares_elements():
            raise Error(
                "argument",
                f"{entry.name} has several elements in the same memory (strides {target.stride()}): "
                "receivers must be able to write each",
            )

    def _parts_in(self, buffers: Sequence[Any]) -> list[Frame]:
        """Returns the frames in the buffers of one version, one of each sender, after all checks of them."""
        parts = [frames.read(buffer, self._entries, self._fingerprint) for buffer in buffers]
        frames.check_parts(parts, self._entries)
        return parts

    def _in_part(
        self, parts: Sequence[Frame], held: Sequence[Sequence[tuple[Box, torch.Tensor]]]
    ) -> str | None:
        """Returns a tensor whose changes are by magnitude, and of a box of which a part is here."""
        for piece in (piece for part in parts for piece in part.pieces if piece.by_magnitude):
            commons = [box.common(piece.box) for box, _ in held[piece.entry]]
            if any(common != piece.box and common.numel() for common in commons):
                return self._entries[piece.entry].name
        return None

    def _check_held(self, parts: Sequence[Frame]) -> None:
        """Raises an Error unless this rank can write what it holds."""
        name = self._in_part(parts, self._targets())
        if name is not None:
            raise Error(
                "unsupported",
                f"{name}: a part of it is here, and its changes are by magnitude, for receivers that hold "
                "all of it: make the sender with by_magnitude=False",
            )

    def _check_version(self, part: Frame) -> None:
        """Raises an Error that names the gap, unless the frame fits the weights here."""
        if part.run == self._run and part.version <= self._version:
            raise Error(
                "state", f"version {part.version} is not newer than version {self._version}, which is here"
            )
        if self._version and part.run != self._run:
            raise Error(
                "state",
                f"the buffer is version {part.version} of another run of the sender, and these weights are "
                f"version {self._version} of theirs: to follow it, make a new WeightSync",
            )
        if part.is_whole or (part.run == self._run and part.base == self._version):
            return
        if self._version == 0:
            here = "these weights have none of its versions"
        else:
            missing = range(self._version + 1, part.version)
            here = f"these weights are version {self._version}: missing is " + (
                f"version {missing[0]}" if len(missing) == 1 else f"versions {missing[0]} to {missing[-1]}"
            )
        raise Error(
            "state",
            f"the buffer turns version {part.base} into {part.version}, and {here}. Apply what is missing "
            "first, or a whole one, of encode_current()",
        )

    def _altered(self, parts: Sequence[Frame]) -> str | None:
        """Returns in words which tensor is not what the senders' hashes say that it was; None if there are no
        hashes, or if all agree. Pieces that this rank holds only in part are not compared."""
        tensors = self._tensors()

        def differs(piece: Piece) -> bool:
            values = self._read(piece.entry, piece.box, tensors)
            return values is not None and frames.checksum(values.data_ptr(), values.nbytes) != piece.hash

        pieces = [piece for part in parts if part.is_hashed for piece in part.pieces]
        for piece, is_other in zip(pieces, self._map(differs, pieces)):
            if is_other:
                name = self._entries[piece.entry].name
                return f"{name} is not what it was in version {parts[0].base}: something else has changed it"
        return None

    def _apply(self, parts: Sequence[Frame]) -> None:
        """Applies frames that have been checked. If that fails part way, these weights are no version: only
        whole ones are taken then."""
        targets, tensors = self._targets(), self._tensors()

        def change(piece: Piece) -> None:
            write(piece, targets[piece.entry])

        # what is written by address is to fail a backward pass under way, too
        written = (tensors[entry.name] for entry in self._entries)
        torch.autograd.graph.increment_version(
            [held for one in written for held in ([one] if isinstance(one, torch.Tensor) else memories(one))]
        )
        self._run, self._version = 0, 0
        try:
            self._map(change, [piece for part in parts for piece in part.pieces])
        except Exception as problem:
            status = problem.status if isinstance(problem, Error) else "state"
            raise Error(
                status,
                f"the weights are in part version {parts[0].version}, and need a whole one now: {problem}",
            ) from problem
        self._run, self._version = parts[0].run, parts[0].version

    # ---- both ----

    def _tensors(self) -> dict[str, torch.Tensor | Parts]:
        named = named_tensors(self._model, self._buffers)
        for entry in self._entries:
            if entry.name not in named:
                raise Error("state", f"the model has no {entry.name} any more")
        if len(named) > len(self._entries):
            new = min(named.keys() - {entry.name for entry in self._entries})
            raise Error("state", f"the model has {new}, and had it not before: make a new WeightSync")
        return named

    def _map(self, function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
        """Returns what the function returns of each. When one fails, no other is still under way."""
        if self._pool is None:
            return list(map(function, items))
        futures = [self._pool.submit(function, item) for item in items]
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def _require(self, call: str, holds: bool) -> None:
        if holds:
            return
        role = "sends" if self._is_sender() else "receives"
        raise Error("state", f"{call}() on rank {self._rank}, which {role}: source is {self._senders}")


def write(piece: Piece, targets: Sequence[tuple[Box, torch.Tensor]]) -> None:
    """Writes what a piece has of these boxes into the memory that holds each."""
    views = []
    for box, target in targets:
        common = box.common(piece.box)
        if common.numel():
            views.append((common, target, common.within(box)))
    if not views:
        return
    # torch writes to tensors of inference mode within it only, and each thread has a mode of its own
    with torch.inference_mode(any(target.is_inference() for _, target, _ in views)):
        common, target, place = views[0]
        view = target[place]
        if len(views) == 1 and common == piece.box and view.is_contiguous() and view.device.type == "cpu":
            frames.apply(piece, view)
            return
        # Elements that this rank does not hold come out as anything, and are dropped.
        room = torch.zeros(piece.box.sizes, dtype=target.dtype)
        for common, target, place in views:
            room[common.within(piece.box)] = target[place].cpu()
        frames.apply(piece, room)
        for common, target, place in views:
            target[place].copy_(room[common.within(piece.box)])


class _Made(NamedTuple):
    frame: list[Any]  # of buffers
    pieces: list[Piece]
    sent: Sent


def _attempt(call: Callable[[], _R]) -> tuple[_R | None, Exception | None]:
    """Returns what the call returns, and why it did not."""
    try:
        return call(), None
    except Exception as problem:
        return None, problem


def _checked(everyone: list[Any]) -> list[Any]:
    for rank, said in enumerate(everyone):
        if isinstance(said[-1], tuple):
            status, text = said[-1]
            raise Error(status, f"rank {rank}: {text}")
    return everyone


def _words(failure: Exception | None) -> tuple[str, str] | None:
    if failure is None:
        return None
    status = "transport" if isinstance(failure, OSError) else "argument"
    return (failure.status if isinstance(failure, Error) else status, str(failure))
