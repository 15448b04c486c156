"""Collectives: reduce-scatter, all-reduce, all-gather and all-to-all of tensors, as torch has them, but
compressed, the first three with error feedback by key. For loops and optimizers that communicate by
themselves.

A call goes the same way as a hook's: Passes.exchange() for reductions, gathers.AllGather for gathers; Tokens
is for all-to-alls. With tensors in CPU memory it waits for its turn in the runner's thread, so that it
returns at once and all run in the order in which they were made. What goes by the caller's own group runs in
the caller, who knows the order of its collectives."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tagc import _library
from tagc._library import Error
from tagc.collectives import operators
from tagc.collectives.calls import Call, Reader, Work, check, check_complete, copy, flat, keys_of
from tagc.collectives.keys import Keys, Reduced, Saved, Use
from tagc.collectives.tokens import BOUNDARIES, Boundary, TokenCall, Tokens, check_tokens
from tagc.torch.extension import (
    AllGather,
    Class,
    Cluster,
    Exchange,
    Future,
    Gradient,
    Held,
    Layers,
    Memory,
    Mild,
    Parameters,
    Passes,
    ReduceOp,
    Residual,
    Runners,
    Settings,
    State,
    Values,
    about_host,
    agree_all,
    all_ranks,
    check_known,
    checkpoint,
    choice,
    cores,
    count,
    look_fresh,
    scale_of,
    timeout_of,
    versions,
)


class Collectives:
    """torch's collectives, compressed. Collective to make, over the ranks of the group.

        comm = Collectives()
        comm.all_reduce(gradient, key=parameter, op=dist.ReduceOp.AVG)
        work = comm.reduce_scatter(output, input, key=parameter, async_op=True)
        work.wait()

    group: a process group, or a mesh of one dimension; default: all ranks.
    names: a model, or pairs of (name, parameter): classes of parameters follow these names, as in
        compress(), and errors and checkpoints have them. Other keys are compressed from 4096 elements on,
        and smaller ones are sent whole. Without names, a parameter is "0", "1" and so on, in the order of
        first use.
    values, sparsity: by default every value is sent in 4 bits. With a sparsity, that share is not sent but
        added to the next call with that key.
    gentle: True follows the schedule of compress(), for each key of names: first every value is sent, and a
        key goes on to `sparsity` when its tensors are mostly noise. values, sparsity and mild are then by
        default those of compress(). optimizer: of the parameters in names, as for compress(). Without it,
        or if it may have a long first moment, all keys stay at 4 bits.
    parameters: of all_gather(). forward, backward: of all_to_all(), formats of what it sends, rounded to the
        nearest, and of gradients on their way back, rounded at random without bias: "int8", "int4" or
        "whole". Without a residual rounding costs loss, 0.2 to 0.5 % by default in the lab's three runs. All
        other options are those of compress(). With sparsity 0, `mild` is `values` by default; `codec` is
        "host".

    A key is a parameter, another tensor that you keep, or a string. It names the residual: what a call has
    rounded off or not sent is added to the next one with that key. p.data and p.grad are new tensors each
    time, which is an Error. Calls with one key have one size, dtype and collective; all_gather() may use the
    key of a reduction, too. Give names, or strings as keys, if you save the state: the numbers of other keys
    may change from run to run.
    Without a key there is no residual, and values are rounded at random, so that their mean is right: those
    of reductions from 4096 elements on in `values`, with selection or fewer than 4 bits in 4 bits; what
    all_reduce() sends back in 8 bits. Nothing is rounded if values is "fp32" or "bf16".

    All ranks make the same calls in the same order, from any thread. Many may be under way. Another order,
    or a wrong argument on one rank, is an Error of that call on all ranks. For tensors on GPUs it may come by
    the time-out, and this object is of no use after it."""

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        names: torch.nn.Module | Iterable[tuple[str, torch.Tensor]] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        values: Values | None = None,
        sparsity: float | None = None,
        gentle: bool = False,
        layers: Layers = "non-attention-linear",
        rules: Mapping[str, Class] | None = None,
        mild: Mild | None = None,
        mild_sparsity: float | None = None,
        exchange: Exchange = "direct",
        residual: Residual | None = None,
        parameters: Parameters | None = None,
        forward: Boundary = "int8",
        backward: Boundary = "int8",
        hosts: int | None = None,
        codec: Literal["host", "device"] | None = "host",
        transport: Literal["host", "gloo", "native"] = "host",
        threads: int | None = None,
        timeout_s: float | None = None,
        **unknown: NoReturn,
    ) -> None:
        check_known(Collectives, unknown)
        boundaries = {"forward": forward, "backward": backward}
        if gentle is not True:
            sparsity = 0.0 if sparsity is None else sparsity
            if exchange == "direct":
                values = values or "int4"
                mild = values if mild is None and sparsity == 0 else mild
        given = dict(locals())
        given = {field.name: given[field.name] for field in dataclasses.fields(Settings)}
        self._process = os.getpid()
        self._group, options, self._keys, is_fresh = _prepared(group, names, optimizer, given, boundaries)
        self._forward, self._backward = forward, backward
        self._state = State(torch.nn.Module(), self._keys, options, is_fresh)
        self._state.is_verbose = True
        self._passes = Passes(self._state, Runners(None, options.codec_on()))
        self._passes.frees.append(self._keys.free)
        self._hosts = self._keys.own_hosts()
        self._tokens = Tokens(self._passes, self._group, self._hosts)
        self._passes.frees.append(self._tokens.close)
        self._exchanges: dict[
            Any, operators.Exchange
        ] = {}  # kept here, since a graph only knows their numbers
        # such calls use groups in which the caller may have collectives of its own
        self._is_in_caller = self._hosts.is_one
        self._order = threading.RLock()  # held while a call takes its place
        self._last: Future | None = None  # of the last call in the runner's thread
        self._failed: list[Work] = []  # whose failures nobody has raised yet
        self._passes.connect(is_on_host=True)
        if optimizer is not None:
            try:
                self.adapt(optimizer)
            except BaseException:
                self.close()
                raise

    # ---- collectives ----

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        key: torch.Tensor | str | None = None,
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Sums `input` (W * n,) over ranks; rank r gets row r as `output` (n,). Shapes count as flat. op: SUM
        (default, as torch's), AVG or a PREMUL_SUM. async_op: as torch's: True returns a Work at once, and
        both tensors are to be left alone until its wait(); without it the result is there, for tensors on a
        device on the current stream."""
        return self._submit("reduce_scatter", key, input, output, op, async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        key: torch.Tensor | str | None = None,
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Sums `tensor` over ranks, in place. op, async_op: as of reduce_scatter()."""
        return self._submit("all_reduce", key, tensor, tensor, op, async_op)

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        key: torch.Tensor | str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Gathers `input` (n,) of all ranks into `output` (W * n,), in the format `parameters`: None sends
        whole values. With deltas what travels is the change since what all ranks have of that key, in which
        rounding errors come again: keep `input` exact, in fp32, and do not compute the next one from
        `output`. Without a key, "int8" and deltas are values in 8 bits, rounded at random. A NaN or Inf makes
        its block NaN in 8 bits, and all of `input` as a delta; the next finite one is right again. async_op:
        as of reduce_scatter()."""
        return self._submit("all_gather", key, input, output, None, async_op)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        key: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Sends a part of the rows of `input` to each rank, and receives rows of `output` from each, as
        torch's all_to_all_single(): split sizes count rows for each rank, and from each; None: equally many.
        Autograd goes through it. Between hosts floats go in the format `forward`, gradients in `backward`;
        messages below 4096 elements, integers, float64 and what stays in a host go whole. A block of 64
        values that holds NaN or Inf becomes NaN. key: names the place in the model, for messages and for
        the random numbers of gradients, which are others in each backward pass; no residual. async_op: as of
        reduce_scatter(). For tensors on a device the host waits for the result in any case."""
        if torch.is_grad_enabled() and getattr(input, "requires_grad", False):
            begun: list[Work] = []
            operators.in_place(output, input, self, output_split_sizes, input_split_sizes, key, begun)
            work = begun[0]
        else:
            work = self._begin_tokens(output, input, output_split_sizes, input_split_sizes, key, False)
        if async_op:
            return work
        work.wait()
        return None

    def tokens(self, key: str | None = None) -> operators.Exchange:
        """Returns all_to_all() with that key as a function that returns the output:

            output = exchange(input, output_split_sizes, input_split_sizes)

        For models, also in torch.compile(), which sees it as one node. It needs this object to be there.
        Local."""
        if key not in self._exchanges:
            self._exchanges[key] = operators.Exchange(self, key, self._tokens.n_ranks)
        return self._exchanges[key]

    def synchronize(self) -> None:
        """Waits until all calls so far are complete, and raises the first failure that no wait() has raised.
        For tensors on a device the current stream waits for results. Local."""
        with self._order:
            self._drain()
            failed = self._failed.copy()
            self._failed.clear()
            self._passes.synchronize()
            if (staging := self._passes.runners.staging) is not None:  # results may be on their way
                staging.streams.follow(staging.stream)
        for work in failed:
            work.wait()

    def forget(self, key: torch.Tensor | str) -> None:
        """Drops what calls with that key have rounded off or not sent. Local; call it on every rank."""
        self.change_residual(key, torch.zeros_like)

    def change_residual(
        self, key: torch.Tensor | str, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Puts change(of it) where it was, (n,), in CPU memory. Where ranks of a host share it out, it is
        dropped. For Turned. Local; call it on every rank."""
        with self._order:
            self.synchronize()
            reduced = self._keys.reduced.get(self._keys.name_of(key))
            if reduced is not None:
                held = {} if self._hosts.is_two_level else reduced.unit.residuals_on_the_wire()
                changed = {name: change(values.float()) for name, values in held.items()}
                reduced.unit.set_residuals_on_the_wire(changed)

    def reset_parameters(self) -> None:
        """Makes the next gathers send whole values, in bf16, if `parameters` are deltas. Call it after a
        change of parameters that is none of an optimizer's steps: a delta rounds a large change to a few
        bits. Local; one rank is enough."""
        self.synchronize()
        self._keys.reset_parameters()

    def adapt(self, optimizer: Any) -> None:
        """Gives tagc the optimizer of the parameters in names, as Compressed.adapt() does. Local; call it on
        every rank, between steps."""
        self.synchronize()
        self._state.moments.adapt(optimizer)
        self._state.say(f"tagc: {self._state.moments.words}")

    def watch(self, loss: float | torch.Tensor) -> None:
        """Hands over the loss of a batch, on each rank, once per step: with gentle=True it guards the run as
        Compressed.watch() does. Local."""
        self._state.schedule.watch_loss(loss)

    # ---- what users look at ----

    @property
    def is_closed(self) -> bool:
        return self._state.is_closed

    @property
    def ranks(self) -> list[int]:
        """Those of the group, as torch.distributed numbers them."""
        return dist.get_process_group_ranks(self._group)

    def look_up(self, key: torch.Tensor | str, tensor: torch.Tensor) -> tuple[str, bool]:
        """Returns a name of a key that all ranks know, "" if it has none, and whether a reduction of this
        tensor is compressed. Local."""
        name = self._keys.name_of(key)
        like = key if isinstance(key, torch.Tensor) else tensor
        is_alone = self._hosts.is_one or self._keys.n_ranks() == 1
        is_compressed = not is_alone and self._keys.kind_of(name, like) != "dense"
        return name if isinstance(key, str) or name in self._keys.kinds else "", is_compressed

    @property
    def sparsity(self) -> float:
        """Which share of the values is not sent at once; the last one, with gentle=True."""
        return self._state.options.sparsity

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of this rank's last step, or of the step under way: keys as of
        Compressed.stats(). A step ends when a key of a reduction comes again. n_units: its reductions.
        {} before the first call. Waits for calls under way. Local."""
        with self._order:
            self.synchronize()
            return self._passes.recorder.so_far(self._state.n_steps)

    def memory(self) -> Memory:
        """Returns what tagc holds for this object, as Compressed.memory() does. Local."""
        if self.is_closed:
            return Memory(Held(), Held())
        with self._order:
            self._drain()
            return count(self._passes.comms(), self._keys.replica_tensors(), self._passes.runners)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of this rank's residuals, and with deltas of its rows of what all ranks have. Each
        rank saves its own. Keys must have names: strings, or names=. Local; call it between steps."""
        self._keys.check_names()
        self.synchronize()
        return checkpoint.save(self._state)

    def load_state_dict(self, saved: Any) -> None:
        """Loads what state_dict() returned. Local; call it before the first call, or with the same keys.
        saved: of this rank; if another number of ranks saved, a list of those of all ranks. Deltas go on from
        what was saved, so load the parameters with them; with another number of ranks the next gathers send
        whole values. If it does not fit, it raises Error and changes nothing."""
        self._load(saved)

    def save(self, folder: Any) -> None:
        """Writes state_dict() to a file of this rank in that folder, and makes the folder if it is missing.
        Local; call it on every rank, between steps. Each Collectives has a folder of its own."""
        self._keys.check_names()
        self.synchronize()
        checkpoint.save_files(self._state, folder)

    def load(self, folder: Any) -> None:
        """Loads what save() wrote, also with another number of ranks: as load_state_dict(). Local."""
        self._load(checkpoint.read_files(self._state, folder))

    def at(self, checkpoint_id: Any, key: str | None = None, storage_reader: Any = None) -> Reader:
        """Replaces this object in a dcp.load(), which reads only keys that have been used:

            dcp.save({"model": ..., "comm": comm}, checkpoint_id=path)
            dcp.load({"model": ..., "comm": comm.at(path)}, checkpoint_id=path)

        Any number of ranks may have saved it. key: this object's, if the checkpoint has several. Local;
        dcp.load() is collective."""
        return Reader(self._load, self._state, checkpoint_id, key, storage_reader)

    def close(self) -> None:
        """Waits for calls under way, and frees residuals and connections. Then it raises the first failure
        that nobody has raised yet, unless an exception is under way. Local."""
        with self._order:
            try:
                if self.is_closed or sys.exc_info()[0] is not None:
                    self._drain()
                else:
                    self.synchronize()
            finally:
                self._passes.close()

    # ---- a call ----

    def _submit(self, what: str, key: Any, source: Any, target: Any, op: Any, is_async: bool) -> Work | None:
        work = self.begin(what, key, source, target, op)
        if is_async:
            return work
        work.wait()  # without the order's lock, so that other threads' calls follow meanwhile
        return None

    def begin(
        self, what: str, key: Any, source: Any, target: Any, op: Any, failure: Error | None = None
    ) -> Work:
        """Begins a call, for this class and for Turned. failure: why this rank only tells the others."""
        # what inference mode makes would not do for later calls
        with self._order, torch.inference_mode(False):
            self._check_open(what)
            call = self._call(what, key, source, target, op, failure)
            work = Work(target, self._failed)
            is_alone = self._keys.n_ranks() == 1
            runners = self._passes.runners
            staging, _ = runners.find(call.source)
            is_on_host = staging is None
            if runners.staging is not None and (why := runners.staging.why_host) is not None:
                self._state.say_once(f"tagc: compressed on the host: {why}")

            def exchange() -> None:
                if is_alone:
                    self._name_of(call)
                    copy(call)
                else:
                    self._run(call)
                    if self._is_in_caller and is_on_host:
                        self._passes.synchronize()

            run = self._task(work, exchange, call.target)
            if is_on_host or is_alone:
                return self._start(work, run, not self._is_in_caller and not is_alone)
            self._drain()
            is_awaited = not self._hosts.is_flat or what == "all_gather" or call.key is None
            work.future = runners.future(run, call.source, is_awaited)
            return work

    def _task(self, work: Work, run: Callable[[], None], target: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Returns a call with its end, whether it fails or not."""

        def task() -> torch.Tensor:
            with torch.no_grad():
                try:
                    run()
                except BaseException as failure:
                    self._passes.give_up()  # the step, as all ranks do
                    work.fail(failure)
            work.over.set()
            return target

        return task

    def _start(self, work: Work, run: Callable[[], torch.Tensor], is_in_thread: bool) -> Work:
        """Runs a call in the runner's thread, in its turn, or here."""
        if is_in_thread:
            self._last = work.future = self._passes.runners.host.future(run)
            return work
        self._drain()
        work.future = Future()
        work.future.set_result(run())
        return work

    def _check_open(self, what: str) -> None:
        if self.is_closed:
            raise Error("state", f"{what}(): this Collectives is closed")
        try:
            dist.get_process_group_ranks(self._group)
        except (KeyError, ValueError) as gone:
            text = "the process group of this Collectives was destroyed: make another one"
            raise Error("state", f"{what}(): {text}") from gone

    def _begin_tokens(
        self,
        output: Any,
        input: Any,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        key: Any,
        is_backward: bool,
    ) -> Work:
        with self._order, torch.inference_mode(False):
            self._check_open("all_to_all")
            call = self._token_call(output, input, output_splits, input_splits, key, is_backward)
            work = Work(output, self._failed)
            run = self._task(work, functools.partial(self._tokens.run, call), call.output)
            return self._start(work, run, call.input.device.type == "cpu" and self._tokens.n_ranks > 1)

    def _token_call(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, key: Any, is_backward: bool
    ) -> TokenCall:
        """Returns the call, checked as far as this rank can."""
        values = self._backward if is_backward else self._forward
        name, failure = "None", None
        source = target = torch.empty(0, device="cpu")
        sends: list[int] = []
        receives: list[int] = []
        try:
            name = self._keys.name_of_tokens(key)
            sends, receives = check_tokens(output, input, output_splits, input_splits, self._tokens.n_ranks)
            source, target = flat(input), flat(output)
        except Error as problem:
            failure = problem
        seed = self._keys.seed_of_tokens(name) if is_backward else None
        return TokenCall(name, source, target, sends, receives, values, seed, failure)

    def _drain(self) -> None:
        """Waits for the calls in the runner's thread."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def _call(self, what: str, key: Any, source: Any, target: Any, op: Any, failure: Error | None) -> Call:
        """Returns the call, checked as far as this rank can."""
        try:
            if failure is not None:
                raise failure
            n_ranks = self._keys.n_ranks()
            check(what, source, target, n_ranks)
            if what != "all_gather":
                scale_of(op, n_ranks)
            values = flat(source)
            into = values if target is source else flat(target)
            return Call(Use.of(what, source), key, values, into, op, None)
        except Error as problem:
            nothing = torch.zeros(1)
            return Call(Use(what, 1, "float32"), None, nothing, nothing.clone(), ReduceOp.SUM, problem)

    def _name_of(self, call: Call) -> str | None:
        return None if call.key is None else self._keys.name_of(call.key)

    def _run(self, call: Call) -> None:
        """Runs a call, in its turn. Collective."""
        keys, what = self._keys, call.use.collective
        keys.n_calls += 1
        try:
            if call.failure is not None:
                raise call.failure
            name = self._name_of(call)
            if what == "all_gather":
                begin = functools.partial(self._gather, call, name, keys.find_gather(name, call.use))
            else:
                source = call.key if isinstance(call.key, torch.Tensor) else call.source
                reduced = keys.find(name, call.use, source, self._state.schedule)
                begin = functools.partial(self._reduce, call, name, reduced)
        except Error as failure:  # the other ranks are about to run it
            self._passes.runners.wait()
            if self._passes.runners.staging is not None:  # or run it, since they agree in the exchange itself
                for level in keys.levels():
                    self._passes.comm(level).abort(f"{what}(): {failure}")
                raise
            keys.agree(self._passes.comm, f"{what}()", {}, failure)
            return
        if self._hosts.is_one or keys.is_new(call.key):  # torch's collectives compare nothing
            self._passes.runners.wait()
            op = None if call.op is None else scale_of(call.op, keys.n_ranks())
            numbers = {"elements": call.use.n_elems, "dtype": call.use.dtype, "factor of op": op}
            about = "without a key" if name is None else f"of key {name}"
            keys.agree(self._passes.comm, f"{what} {about}", numbers)
            if name is not None and keys.is_new(call.key):
                keys.know(call.key, name)
        begin()

    def _exchange(self, call: Call, name: str | None, reduced: Reduced) -> None:
        # in CPU memory sums within hosts take the place of gradients
        is_taken = call.source.device.type == "cpu" and self._hosts.is_two_level
        source = call.source.clone() if is_taken and call.source is not call.target else call.source
        waits = name is None or self._hosts.is_two_level  # where slices come together after the exchange
        number = self._keys.n_calls if name is None else None
        what = reduced.unit, self._group, source, call.target, call.op, lambda: reduced.layout
        self._passes.exchange(Gradient(*what, waits, recurs=name is not None, number=number, agrees=True))

    def _reduce(self, call: Call, name: str | None, reduced: Reduced) -> None:
        try:
            self._exchange(call, name, reduced)
        except BaseException:
            if name is not None and name not in self._keys.reduced:
                reduced.unit.free()
            raise
        self._add(name, reduced)

    def _add(self, name: str | None, reduced: Reduced) -> None:
        if name is None or name in self._keys.reduced:
            return
        with self._state.lock:
            self._keys.reduced[name] = reduced
            self._state.add_unit(reduced.unit.name, lambda *_: reduced.unit, [reduced.parameter])

    def _gather(self, call: Call, name: str | None, known: AllGather | None) -> None:
        use = call.use
        gather = self._gather_of(name, use) if known is None else known
        try:
            gather(call.target, call.source, self._group)
        except BaseException:
            if known is None:
                gather.close()
            raise
        if name is None:
            gather.close()
        else:
            self._keys.gathered[name] = use, gather

    def _gather_of(self, name: str | None, use: Use) -> AllGather:
        wire, seed = self._state.options.parameters, None
        if name is None:  # whole, or rounded at random, on each rank of a host in another way
            is_whole = wire in (None, "fp32", "bf16", "lossless")
            number = f"{self._keys.n_calls} {self._hosts.place}"
            wire, seed = (None, None) if is_whole else ("int8", zlib.crc32(number.encode()))
        wire = wire or ("bf16" if use.dtype == "bfloat16" else "fp32")
        words = name or f"a tensor of {use.n_elems} {use.dtype} without a key"
        owned = self._group, use.n_elems, list[torch.Tensor]
        tag = zlib.crc32(f"gather {name}".encode())
        return AllGather(self._passes, words, owned, wire, tag, may_run_beside=False, seed=seed)

    # ---- checkpoints ----

    def _load(self, saved: Any, is_selected: bool = False) -> None:
        """is_selected: as of checkpoint.load()."""
        self.synchronize()
        with self._order, self._state.lock:
            keys, abouts = self._keys, checkpoint.abouts(saved)
            reduced, gathered, strings = set(keys.reduced), set(keys.gathered), keys.strings.copy()
            try:
                if not is_selected:  # or all of these were read
                    check_complete(saved, abouts)
                saved_keys = self._add_saved(abouts)
                checkpoint.load(self._state, saved, is_selected)
            except BaseException:
                for name in keys.reduced.keys() - reduced:
                    self._state.remove_unit(keys.reduced.pop(name).unit.name)
                for name in keys.gathered.keys() - gathered:
                    keys.gathered.pop(name)[1].close()
                keys.strings = strings
                raise
            keys.n_calls, keys.n_backward = saved_keys.n_calls, saved_keys.n_backward

    def _add_saved(self, abouts: Mapping[int, Mapping[str, Any]]) -> Saved:
        """Adds the keys of a checkpoint that have not come yet, and returns them."""
        about = abouts.get(dist.get_rank()) or abouts[min(abouts)]
        saved_keys = keys_of(about)
        self._keys.check_saved(saved_keys)
        for name, use in saved_keys.reduced.items():
            if name not in self._keys.reduced:
                kind = self._keys.kinds.get(name, saved_keys.kinds[name])
                self._add(name, self._keys.made(name, kind, use, self._state.schedule))
        # a gather's size is that of one rank
        for name, use in saved_keys.gathered.items() if about["world_size"] == dist.get_world_size() else ():
            if name not in self._keys.gathered:
                self._keys.gathered[name] = use, self._gather_of(name, use)
        return saved_keys

    # ---- the end ----

    def __enter__(self) -> Collectives:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Frees libtagc's memory and threads, which Python would not. Calls under way keep this object."""
        passes = vars(self).get("_passes")  # not there if it could not be made
        if passes is not None and self._process == os.getpid() and not sys.is_finalizing():
            if not self.is_closed:
                passes.free()

    def __repr__(self) -> str:
        if self.is_closed:
            return "<tagc Collectives, closed>"
        travels = self._state.options.travels("compressed")
        n_ranks, n_keys = self._keys.n_ranks(), len(self._keys.reduced)
        return f"<tagc Collectives over {n_ranks} ranks, keys of reductions: {n_keys}; {travels}>"


def _prepared(
    group: Any, names: Any, optimizer: Any, given: dict[str, Any], boundaries: Mapping[str, str]
) -> tuple[dist.ProcessGroup, Settings, Keys, bool]:
    """Makes all ranks agree. Returns (the group, the options, the keys with their hosts, whether the weights
    look fresh). Collective; all ranks raise the same Error."""
    process_group = dist.group.WORLD if dist.is_initialized() else None
    if group is dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(group, DeviceMesh) and group.get_coordinate() is None
    ):  # its ranks do not wait for this one
        why = "this rank is not in the group: only the ranks of a group make Collectives over it"
        raise Error("argument", why)
    about: dict[str, Any] = {"rows": []}
    failure: Exception | None = None
    keys: Keys | None = None
    try:
        process_group = _group_of(group) or all_ranks()
        _library.load()
        if given["timeout_s"] is None:
            given["timeout_s"] = timeout_of(process_group)
        options = Settings(**given)
        for way, values in boundaries.items():
            choice(way, values, BOUNDARIES)
        keys = Keys(process_group, options, names)
        if optimizer is not None and not keys.parameters():
            raise Error(
                "argument",
                "optimizer is given, and no key is selected: it is for names, with gentle=True or a sparsity",
            )
        ranks = dist.get_process_group_ranks(process_group)
        keys.cluster = Cluster(ranks, options.hosts, options.timeout_s, shares=False)
        about["versions"] = versions()
        about |= {"options": options.fingerprint(), "rows": keys.rows}
        about["options"] |= {"an optimizer was given": optimizer is not None, **boundaries}
        about["fresh"] = look_fresh(keys.rows, keys.named_parameters())
    except Exception as problem:
        failure = problem
    about["about host"] = about_host()
    everyone = agree_all(process_group, about, failure, given["timeout_s"], "Collectives()")
    assert process_group is not None and keys is not None and keys.cluster is not None  # or that has raised
    ranks = dist.get_process_group_ranks(process_group)
    if options.threads is None:
        options.threads = cores.threads(about["about host"], (theirs["about host"] for theirs in everyone))
    known = {rank: theirs["about host"]["host"] for rank, theirs in zip(ranks, everyone)}
    keys.cluster.split([process_group], known)
    fresh = [theirs["fresh"] for theirs in everyone if theirs["fresh"] is not None]
    return process_group, options, keys, bool(fresh) and all(fresh)


def _group_of(group: Any) -> dist.ProcessGroup | None:
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        return group.get_group()
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    raise Error(
        "argument",
        f"group is {group!r}, must be a process group, a mesh of one dimension, or None for all ranks",
    )
