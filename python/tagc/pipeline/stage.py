"""What the stages of a pipeline send each other, in few bits: activations to the next stage, their gradients
to the one before.

A schedule of torch.distributed.pipelining asks a stage for its sends and receives, starts them, and waits
before it runs the stage. So a CompressedStage replaces the tensors of these by messages, whose length follows
from the tensor's shape, and decodes what arrived when the schedule calls the stage to compute with it:

    get_fwd_send_ops, get_bwd_send_ops       encode
    get_fwd_recv_ops, get_bwd_recv_ops       receive a message in place of the tensor
    forward_one_chunk, backward_one_chunk    decode first
    clear_runtime_states                     a step begins

Only these methods of the one stage change, so all of torch's schedules work."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.pipeline import internals
from tagc.pipeline.blocks import Codec, Device, codec_of, opened
from tagc.torch.extension import agree_all, all_ranks, identity, number, say, streams, versions

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

Boundary = Literal["int8", "int4", "whole"]  # what users write
VALUES = ("int8", "int4", "whole")

_MISSING = object()


class Pipeline:
    """What all stages over one process group have alike. Every rank calls compress_stage() for its stages,
    one after the other; each call tells all ranks which stages have joined."""

    def __init__(
        self, group: dist.ProcessGroup, options: dict[str, Any], hosts: list[Any], has_kernels: bool
    ) -> None:
        """hosts: what tells the host of each rank of the group from others, in the order of the group.
        has_kernels: all ranks have their stages on devices, and kernels for them."""
        self.options, self.n_stages = options, int(options["num_stages"])
        self.has_kernels = has_kernels
        self.joined: set[int] = set()
        self.is_closed = False  # a stage of this rank's no longer takes part
        ranks = dist.get_process_group_ranks(group)
        self._host_of = dict(zip(ranks, hosts))
        self.first_rank = min(ranks)  # which tells pipelines beside each other apart
        self.n_ranks, self.n_hosts = len(ranks), len(set(hosts))

    def is_between_hosts(self, peer: int) -> bool:
        """Returns whether messages between this rank and that one pass a network card."""
        return self._host_of[peer] != self._host_of[dist.get_rank()]

    def words(self) -> str:
        """Returns a line on what travels how."""
        formats = (self.options["forward"], self.options["backward"])
        if formats == ("whole", "whole"):
            return "tagc: what the stages of this pipeline send each other travels whole, as you asked"
        if self.n_hosts == 1:
            return (
                f"tagc: all {self.n_ranks} ranks of this pipeline are on one host, where what they send each "
                f"other travels whole; hosts={self.n_ranks} compresses it, as for a trial"
            )
        return (
            f"tagc: a pipeline of {self.n_stages} stages on {self.n_ranks} ranks and {self.n_hosts} hosts: "
            f"between hosts, activations travel as {formats[0]} and their gradients as {formats[1]}, with a "
            f"scale per {self.options['block']} values; within a host, whole"
        )


# The pipeline of a group that some of its stages have not joined yet.
_forming: weakref.WeakKeyDictionary[Any, Pipeline] = weakref.WeakKeyDictionary()
_compressed: weakref.WeakKeyDictionary[Any, Pipeline] = weakref.WeakKeyDictionary()  # by stage


def hosts_of(stage: Any) -> int | None:
    """Returns the `hosts` with which compress_stage() was called; None without that."""
    pipeline = _compressed.get(stage)
    return None if pipeline is None else pipeline.options["hosts"]


class Traffic:
    """What one stage has sent or received, one way."""

    def __init__(self) -> None:
        self.n_messages = self.n_bytes = self.n_whole_bytes = self.n_dense_bytes = 0
        self.codec_s = 0.0


class CompressedStage:
    """One stage of a pipeline, whose tensors to and from stages on other hosts tagc encodes.
    compress_stage() makes it.

    state_dict(), load_state_dict()     for checkpoints
    stats(), table()                    what was sent; how it travels
    close()                             ends it; `with` does so, too

    close() is local: call it for all stages, between two steps."""

    def __init__(self, stage: Any, pipeline: Pipeline, on: streams.Cuda | Device | None) -> None:
        """on: the stage's device, where it is not in host memory, or the kernels for it."""
        self.stage, self.pipeline, self.n_steps = stage, pipeline, 0
        self._device = on if isinstance(on, Device) else None
        block = pipeline.options["block"]
        self._codecs = {
            direction: None if values == "whole" else codec_of(values, block, is_stochastic, on)
            for direction, values, is_stochastic in (
                ("forward", pipeline.options["forward"], False),
                ("backward", pipeline.options["backward"], True),
            )
        }
        self._sent = {direction: Traffic() for direction in self._codecs}
        self._received = {direction: Traffic() for direction in self._codecs}
        self._messages: dict[tuple[Any, ...], torch.Tensor] = {}
        # (way, micro-batch) -> [(number, who sends it, message, its tensor)] that the schedule waits for
        self._due: dict[tuple[str, int], list[tuple[int, int, torch.Tensor, torch.Tensor]]] = {}
        self._n_backward, self._is_backward = 0, False  # steps that have sent gradients; whether this one has
        self._replaced: dict[str, Any] = {}
        for direction, short in (("forward", "fwd"), ("backward", "bwd")):
            self._replace(f"get_{short}_send_ops", functools.partial(self._send, direction))
            self._replace(f"get_{short}_recv_ops", functools.partial(self._receive, direction))
            self._replace(f"{direction}_one_chunk", functools.partial(self._compute, direction))
        self._replace("clear_runtime_states", self._begin)
        _compressed[stage] = pipeline

    @property
    def is_closed(self) -> bool:
        return not self._replaced

    def stats(self) -> dict[str, Any]:
        """Returns what this stage has sent and received since compress_stage(), in evaluation, too: a dict.

        steps                 of the schedule, that have begun
        bytes_sent            to other stages
        bytes_received        from other stages
        dense_bytes           what bytes_sent would be without tagc
        ratio                 dense_bytes / bytes_sent
        forward, backward     the same of activations and of gradients, each a dict of:
            bytes_sent, bytes_received, dense_bytes
            whole_bytes       of bytes_sent, tensors as they are: within a host, and integers and booleans
            messages_sent     those that were encoded
            codec_s           in encoding and decoding; with kernels, in enqueuing them
        message_bytes         memory of messages on this rank"""
        by_direction = {}
        for direction, sent in self._sent.items():
            received = self._received[direction]
            by_direction[direction] = {
                "bytes_sent": sent.n_bytes,
                "bytes_received": received.n_bytes,
                "dense_bytes": sent.n_dense_bytes,
                "whole_bytes": sent.n_whole_bytes,
                "messages_sent": sent.n_messages,
                "codec_s": sent.codec_s + received.codec_s,
            }
        sums = {
            name: sum(numbers[name] for numbers in by_direction.values())
            for name in ("bytes_sent", "bytes_received", "dense_bytes")
        }
        ratio = {"ratio": sums["dense_bytes"] / sums["bytes_sent"]} if sums["bytes_sent"] else {}
        memory = sum(message.numel() for message in self._messages.values())
        return {"steps": self.n_steps, **sums, **ratio, **by_direction, "message_bytes": memory}

    def table(self) -> str:
        """Returns a line on how tensors travel, as printed at the start."""
        return self.pipeline.words()

    def state_dict(self) -> dict[str, Any]:
        """Returns what the random numbers of the next step's rounding derive from: save it with the stage's
        parameters, and a run that loads both goes on as if it had never ended. Local; call it between
        steps."""
        return {
            "version": 1,
            "stage": self.stage.stage_index,
            "n_stages": self.pipeline.n_stages,
            "n_backward": self._n_backward,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads what state_dict() of the same stage returned. If it does not fit, it raises Error and changes
        nothing. Local; call it between steps."""
        state_now = self.state_dict()
        if not isinstance(saved, Mapping) or set(saved) != set(state_now):
            raise Error("argument", "saved must be what state_dict() of a stage's handle returned")
        for name, what in (("version", "version"), ("n_stages", "number of stages"), ("stage", "stage")):
            if saved[name] != state_now[name]:
                raise Error("mismatch", f"the saved {what} is {saved[name]!r}, and must be {state_now[name]}")
        number("n_backward", saved["n_backward"], 0, 2**24 - 1, int)
        self._n_backward, self._is_backward = saved["n_backward"], False

    def close(self) -> None:
        """Gives the stage its own methods back. Local; call it for all stages of the pipeline, between two
        steps."""
        for name, original in self._replaced.items():
            if original is _MISSING:
                delattr(self.stage, name)
            else:
                setattr(self.stage, name, original)
        if self._replaced:
            self.pipeline.is_closed = True
            _compressed.pop(self.stage, None)
            if self._device is not None:
                self._device.close()
        self._replaced.clear()
        self._messages.clear()
        self._due.clear()

    def __enter__(self) -> CompressedStage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.is_closed else ""
        return (
            f"<tagc handle of stage {self.stage.stage_index} of {self.pipeline.n_stages}{closed}: steps: "
            f"{self.n_steps}>"
        )

    # ---- private ----

    def _replace(self, name: str, around: Callable[..., Any]) -> None:
        """Puts around(the stage's own method, its arguments) in the method's place."""
        self._replaced[name] = vars(self.stage).get(name, _MISSING)
        setattr(self.stage, name, functools.partial(around, getattr(self.stage, name)))

    def _begin(self, original: Callable[[], Any]) -> Any:
        missing = sorted(set(range(self.pipeline.n_stages)) - self.pipeline.joined)
        if missing or self.pipeline.is_closed:
            others = (
                f"stage {missing[0]} of its pipeline is not"
                if missing
                else "another one of its pipeline is closed"
            )
            raise Error(
                "state",
                f"stage {self.stage.stage_index} is compressed, and {others}: call compress_stage() on every "
                "stage before a step, and close() all handles or none",
            )
        self._raise_fault()
        self._due.clear()
        self.n_steps, self._is_backward = self.n_steps + 1, False
        return original()

    def _raise_fault(self) -> None:
        """Raises an Error if the device has found a message that it could not decode."""
        fault = None if self._device is None else self._device.fault()
        if fault is None:
            return
        status, number = fault
        i, chunk, peer = number & 0xFFFF, number >> 16 & 0xFFFFFF, number >> 40 & 0x3FFFFF
        direction = "backward" if number >> 62 else "forward"
        raise Error(
            status,
            f"stage {self.stage.stage_index}, micro-batch {chunk} of an earlier step: "
            f"{self._name(direction, i)} from rank {peer} could not be decoded and became NaN: the message "
            "was damaged, or of other options",
        )

    def _codec_of(self, direction: str, op: dist.P2POp) -> Codec | None:
        """Returns what encodes the tensor of this op; None if it travels whole. The same on both ends."""
        codec = self._codecs[direction] if self.pipeline.is_between_hosts(op.peer) else None
        return codec if codec is not None and codec.takes(op.tensor.dtype) else None

    def _message(self, codec: Codec, tensor: torch.Tensor, *place: Any) -> torch.Tensor:
        """Returns the memory of the message that always has this place: torch, too, has a tensor for each
        micro-batch, and a step ends when all that it sent has arrived."""
        n_bytes, message = codec.n_bytes(tensor.numel()), self._messages.get(place)
        if message is None or message.numel() != n_bytes or message.device != tensor.device:
            message = self._messages[place] = torch.empty(n_bytes, dtype=torch.uint8, device=tensor.device)
        return message

    def _send(
        self, direction: str, original: Callable[[int], list[dist.P2POp]], chunk: int
    ) -> list[dist.P2POp]:
        ops, traffic = original(chunk), self._sent[direction]
        is_coded = self._codecs[direction] is not None
        expected = internals.stage_sends(self.stage, direction == "forward") if is_coded else None
        for i, op in enumerate(ops):
            tensor, codec = op.tensor, self._codec_of(direction, op)
            if expected is not None and len(expected) == len(ops):
                self._check_shape(direction, chunk, i, tensor, expected[i])
            traffic.n_dense_bytes += tensor.nbytes
            if codec is None:
                traffic.n_whole_bytes += tensor.nbytes
                traffic.n_bytes += tensor.nbytes
                continue
            message = self._message(codec, tensor, "send", direction, chunk, i)
            begin = time.perf_counter()
            codec.encode(tensor, message, self._seed(chunk, i) if direction == "backward" else 0)
            traffic.codec_s += time.perf_counter() - begin
            traffic.n_messages += 1
            traffic.n_bytes += message.numel()
            ops[i] = dist.P2POp(op.op, message, op.peer, op.group, op.tag)
        return ops

    def _check_shape(self, direction: str, chunk: int, i: int, tensor: torch.Tensor, expected: Any) -> None:
        if tensor.shape == expected.shape and tensor.dtype == expected.dtype:
            return
        raise Error(
            "argument",
            f"stage {self.stage.stage_index}, micro-batch {chunk}: {self._name(direction, i)} has the shape "
            f"{tuple(tensor.shape)} and {tensor.dtype}, and the stage that gets it expects "
            f"{tuple(expected.shape)} and {expected.dtype}: what a stage sends must keep both while a "
            "schedule is in use",
        )

    def _seed(self, chunk: int, i: int) -> int:
        """Returns another seed for each message that is rounded at random: by the step, the stage, the
        micro-batch and the number of the gradient. It is the same under each schedule. Pipelines whose
        gradients are averaged with these have others, since equal errors would not average out."""
        if not self._is_backward:
            self._n_backward, self._is_backward = self._n_backward + 1, True
        at = (
            (self._n_backward - 1) << 40
            | (self.stage.stage_index & 0xFFFF) << 24
            | (chunk & 0xFFFF) << 8
            | i & 0xFF
        )
        return (at ^ self.pipeline.first_rank * 0x9E3779B97F4A7C15) & 2**64 - 1

    def _receive(
        self, direction: str, original: Callable[[int], list[dist.P2POp]], chunk: int
    ) -> list[dist.P2POp]:
        ops, traffic = original(chunk), self._received[direction]
        for i, op in enumerate(ops):
            codec = self._codec_of(direction, op)
            if codec is None:
                traffic.n_bytes += op.tensor.nbytes
                continue
            message = self._message(codec, op.tensor, "receive", direction, chunk, i)
            traffic.n_bytes += message.numel()
            self._due.setdefault((direction, chunk), []).append((i, op.peer, message, op.tensor))
            ops[i] = dist.P2POp(op.op, message, op.peer, op.group, op.tag)
        return ops

    def _compute(
        self, direction: str, original: Callable[..., Any], chunk: int, *arguments: Any, **named: Any
    ) -> Any:
        """Decodes what the schedule has waited for, then runs the stage."""
        codec, begin = self._codecs[direction], time.perf_counter()
        for i, peer, message, tensor in self._due.pop((direction, chunk), ()):
            assert codec is not None
            try:
                codec.decode(message, tensor, self._number(direction, chunk, i, peer))
            except Error as damage:
                raise Error(
                    damage.status,
                    f"stage {self.stage.stage_index}, micro-batch {chunk}: {self._name(direction, i)} from "
                    f"rank {peer} cannot be decoded: {damage}",
                ) from damage
        self._received[direction].codec_s += time.perf_counter() - begin
        return original(chunk, *arguments, **named)

    @staticmethod
    def _number(direction: str, chunk: int, i: int, peer: int) -> int:
        """Returns the number of a message, from which _raise_fault() knows it."""
        is_back = direction == "backward"
        return is_back << 62 | (peer & 0x3FFFFF) << 40 | (chunk & 0xFFFFFF) << 16 | i & 0xFFFF

    @staticmethod
    def _name(direction: str, i: int) -> str:
        return f"activation {i}" if direction == "forward" else f"gradient {i}"


def compress_stage(
    stage: PipelineStage,
    *,
    forward: Boundary = "int8",
    backward: Boundary = "int4",
    block: int = 64,
    hosts: int | None = None,
    timeout_s: float | None = None,
    verbose: bool = True,
) -> CompressedStage:
    """Makes what this stage sends stages on other hosts travel in few bits. Collective over the stage's
    group, on each rank once per stage, before the first step.

    forward, backward: formats of activations, rounded to the nearest, and of their gradients, rounded at
        random without bias: "int8", "int4" or "whole". Integers, booleans and float64 travel whole.
    block: values that share a scale, a power of two from 16 to 4096.
    hosts: of the group's ranks. Not given: tagc finds them, and within a host tensors travel whole.
    timeout_s: after this time a silent peer is an error. verbose: rank 0 prints how tensors travel.

    On failure it raises the same Error on every rank and changes nothing."""
    if not internals.is_pipeline_stage(stage):
        raise Error("argument", f"stage is a {type(stage).__name__}, must be a PipelineStage")
    world = all_ranks()
    options: dict[str, Any] = {"forward": forward, "backward": backward, "block": block}
    options |= {"hosts": hosts, "num_stages": stage.num_stages}
    group = world if stage.group is None else stage.group
    pipeline = _forming.get(group)
    if pipeline is not None and pipeline.is_closed:
        pipeline = None
    failure: Exception | None = None
    own_versions = {}
    on: streams.Cuda | Device | None = None
    why_host = ""
    try:
        _check(stage, group, options, hosts, timeout_s)
        on, why_host = opened(torch.device(stage.device))
        own_versions = versions()
    except Exception as problem:
        failure = problem
    about = {
        "versions": own_versions,
        "options": {**options, "the list of stages so far": sorted(pipeline.joined) if pipeline else []},
        "rows": [],
        "stage": stage.stage_index,
        "host": identity(),
        "why_host": why_host,
    }
    try:
        everyone = agree_all(group, about, failure, timeout_s, "compress_stage()")
        return _join(stage, group, options, everyone, on, verbose)
    except BaseException:
        if isinstance(on, Device):
            on.close()
        raise


def _join(
    stage: Any,
    group: dist.ProcessGroup,
    options: dict[str, Any],
    everyone: list[dict[str, Any]],
    on: streams.Cuda | Device | None,
    verbose: bool,
) -> CompressedStage:
    """Returns the handle of a stage, now that all ranks know the same. everyone: what each rank has said.
    Local."""
    pipeline, hosts = _forming.get(group), options["hosts"]
    if pipeline is not None and pipeline.is_closed:
        pipeline = None
    why_host = next((theirs["why_host"] for theirs in everyone if theirs["why_host"]), "")
    is_new = pipeline is None
    if pipeline is None:
        of_hosts = [
            i * hosts // len(everyone) if hosts else theirs["host"] for i, theirs in enumerate(everyone)
        ]
        pipeline = Pipeline(group, options, of_hosts, not why_host)
    if pipeline.has_kernels and why_host:
        raise Error("unsupported", f"earlier stages of this pipeline have kernels: {why_host}")
    if isinstance(on, Device) and not pipeline.has_kernels:
        on.close()
        on = on.streams
    for name, value in options.items():
        if value != pipeline.options[name]:
            raise Error(
                "mismatch",
                f"{name} is {value!r}, and was {pipeline.options[name]!r} for stage {min(pipeline.joined)} "
                "of the same pipeline: it must be the same for all stages",
            )
    joining = [theirs["stage"] for theirs in everyone]
    for at in joining:
        if at in pipeline.joined or joining.count(at) > 1:
            raise Error(
                "argument",
                f"stage {at} of this pipeline is compressed twice: call compress_stage() once per stage",
            )
    pipeline.joined.update(joining)
    _forming[group] = pipeline
    if len(pipeline.joined) == pipeline.n_stages:
        del _forming[group]
    if is_new and verbose and dist.get_rank() == 0:
        say(pipeline.words())
        if on is not None and pipeline.n_hosts > 1:
            where = (
                "by kernels there"
                if pipeline.has_kernels
                else f"on the host, through pinned memory, which waits for the device: {why_host}"
            )
            say(f"tagc: the stages are on {stage.device}, and their tensors are encoded {where}")
    return CompressedStage(stage, pipeline, on)


def check_hosts(hosts: Any, n_ranks: int) -> None:
    """Raises an Error unless so many ranks can be on that many hosts. Local."""
    if hosts is not None:
        number("hosts", hosts, 1, n_ranks, int)
        if n_ranks % hosts:
            raise Error(
                "argument",
                f"hosts is {hosts}, must divide the {n_ranks} ranks of the stage's group: each host has as "
                "many, in their order",
            )


def _check(stage: Any, group: Any, options: dict[str, Any], hosts: Any, timeout_s: Any) -> None:
    """Raises an Error that names the option, unless all fit. Local."""
    for direction in ("forward", "backward"):
        if options[direction] not in VALUES:
            raise Error(
                "argument",
                f"{direction} is {options[direction]!r}, must be one of {', '.join(map(repr, VALUES))}",
            )
    number("block", options["block"], 16, 4096, int)
    if options["block"] & (options["block"] - 1):
        raise Error("argument", f"block is {options['block']}, must be a power of two from 16 to 4096")
    check_hosts(hosts, dist.get_world_size(group))
    if timeout_s is not None:
        number("timeout_s", timeout_s, 0.001, 1e6)
    if stage in _compressed:
        raise Error("state", f"stage {stage.stage_index} is compressed already: close() its handle first")
