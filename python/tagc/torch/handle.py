"""Compressed, the handle that compress() returns. It owns the connections, the units and the statistics of one model."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch import state
from tagc.torch.copied import Copied
from tagc.torch.exchange import internals
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.call import FindLayout, Record, Reduction
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.interfaces import Exchanged, ExchangeOptions, Residuals, Wrapped
from tagc.torch.exchange.runner import Runner, Runners
from tagc.torch.exchange.staging import Staging
from tagc.torch.exchange.unit import Stats
from tagc.torch.exchange.unknown import UnknownLayouts
from tagc.torch.schedule.moments import Moments
from tagc.torch.schedule.options import Options
from tagc.torch.schedule.stages import Stages
from tagc.torch.statistics import Recorder

U = TypeVar("U", bound=Residuals)


class Compressed:
    """One model whose gradients tagc exchanges. compress() makes it."""

    is_closed = True  # until it is made

    def __init__(self, model: torch.nn.Module, wrapper: Wrapped, options: Options, table: str, staging: Staging | None = None,
                 is_fresh: bool = False) -> None:
        self.model, self.wrapper, self.options = model, wrapper, options
        self._table, self._verbose = table, False
        self.units: dict[str, Residuals] = {}
        self._unknown = UnknownLayouts()
        self._carriers: dict[str, tuple[list[layouts.Parameter] | None, int, int | None]] = {}  # as add_unit() got them
        self._comms: dict[tuple[int, ...], Comm] = {}  # by ranks
        self._said: set[str] = set()  # messages that are printed once
        self.runners = Runners(staging, options.codec_on(), options.transport == "group", options.timeout_s)
        self._recorder = Recorder()
        self.stages = Stages(wrapper, options, is_fresh)
        self.moments = Moments(model, wrapper, options, self.stages)
        self.frees: list[Callable[[], object]] = [self.moments.close]  # called by close(), and when the handle goes with its model
        self.ends: list[Callable[[], object]] = []  # connections that are not in _comms
        self.undo: list[Callable[[], object]] = []  # called by close() before those, to remove the hooks
        self._scaler: Any = None
        self._scale = 1.0
        self._loss_scale = 1.0  # of the pass whose hooks run; self._scale is that of residuals
        self.lock = threading.RLock()
        self.n_steps = 0  # exchanges of the whole model that have started
        self._step_open = self.is_closed = self._is_outside = False
        self._process = os.getpid()
        self._units_of_step: set[str] = set()  # names
        self.on_step: Callable[[dict[str, Any]], object] | None = None

    # ---- for hooks ----

    def add_unit(self, name: str, make: Callable[[str, ExchangeOptions], U], parameters: list[layouts.Parameter] | None = None,
                 n_chunks: int = 1, place: int | None = None) -> U:
        """make: makes the unit. parameters: the layouts.Parameter of the unit (None: all); their wire order has n_chunks chunks. place: the
        number of the chunk, if residuals are of one chunk only."""
        unit = make(name, lambda part, dtype: self.options.reducer(part.kind, dtype, self._step(), part.stage, part.kept))
        self.units[name], self._carriers[name] = unit, (parameters, n_chunks, place)
        return unit

    def carriers(self) -> list[tuple[Residuals, list[layouts.Parameter], int, int | None]]:
        """[(unit, its parameters, n_chunks, place)]"""
        return [(unit, self.wrapper.parameters() if parameters is None else parameters, n_chunks, place)
                for unit, (parameters, n_chunks, place) in ((self.units[name], c) for name, c in self._carriers.items())]

    def comm(self, group: Any) -> Comm:
        """The connection over that group's ranks. Collective at the first call for a group."""
        if self.wrapper.is_managed and not isinstance(group, dist.ProcessGroup):
            return group.connection()  # a managed.Quorum
        ranks = tuple(dist.get_process_group_ranks(group))
        if (found := self._comms.get(ranks)) is not None:  # without the lock, which an exchange under way has
            return found
        with self.lock:
            if ranks not in self._comms:
                self._comms[ranks] = Comm(group, self.options.timeout_s)
            return self._comms[ranks]

    def disconnect(self) -> None:
        """Ends all reducers and keeps the residuals."""
        with self.lock:
            for unit in [*self.units.values(), *self._unknown.units()]:
                unit.close()
            self._unknown.clear()

    def say(self, text: str) -> None:
        if self._verbose and self.wrapper.speaks:
            print(text, flush=True)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def exchange(self, unit: Exchanged, group: Any, source: torch.Tensor, target: torch.Tensor, op: Any,
                 find_layout: FindLayout, waits: bool = True) -> None:
        """Called by every hook: all ranks agree on the exchange, then run it. Collective. It blocks for tensors in CPU memory. For others
        it returns at once, and failures are raised at the end of the backward pass.

        find_layout() -> the layout of `source`, or None if its parameters are unknown: then this exchange is dense and residuals
        do not change. waits: whether the current stream waits for the result."""
        if self.is_closed:
            raise Error("state", "this tagc handle is closed, but torch still calls its hook: call compress() "
                        "again, or wrap the model anew")
        comm = self.comm(group)
        runner, failure = self.runner_for(source)
        call = Reduction(unit, comm, group, source, target, op, find_layout, self._find_loss_scale(source), self._begin, self.lock, failure, waits)
        try:
            call.opens_step = self._opens_step(unit)
            self._loss_scale = call.loss_scale
            runner.run(call, source, target)
            if not self._step_open or self._is_outside and not self._is_left_open():  # nothing else will end this step
                self.synchronize()
                self.end_step()
        except BaseException:
            self.give_up()
            raise

    def runner_for(self, tensor: torch.Tensor) -> tuple[Runner, Error | None]:
        """Returns what runs exchanges of gradients like that, and why it is not the right one: it then tells the other ranks."""
        try:
            return self.runners.of(tensor), None
        except Error as problem:
            return self.runners.host, problem

    def give_up(self) -> None:
        """The rest of this backward pass, and its end, will not come."""
        with self.lock:
            self._step_open = False
            self._units_of_step.clear()
            self._recorder.drop()
        self.runners.drop()

    def _begin(self, call: Reduction, source: torch.Tensor) -> tuple[Exchanged, layouts.Layout, Record]:
        """After the agreement. Collective."""
        if call.opens_step:
            self._begin_step(call.loss_scale)
        unit, comm, layout = call.unit, call.comm, call.layout
        n_control = comm.agreement_bytes
        if layout is None:
            if self.wrapper.speaks:
                self._unknown.warn(unit)
            unit, layout = self._unknown.dense(unit, source.numel(), comm, all_reduce=call.is_all_reduce)
        else:
            n_control += self.stages.look(comm, layout, source, unit)
        n_bytes_dense = (1 + layout.all_reduce) * source.nbytes * (comm.world_size - 1) // comm.world_size
        name, n_elems = unit.name, source.numel()

        def record(stats: Stats, seconds: float, agree_s: float) -> None:
            self._recorder.add(name, stats, n_bytes_dense, n_elems, comm, seconds, agree_s, n_control, self.options.stages)

        return unit, layout, record

    def synchronize(self) -> None:
        """Waits until all exchanges of device tensors are complete, and raises the first failure. backward() does so at its end. Call it
        after a forward pass without backward if `parameters` are deltas. Local."""
        try:
            self.runners.finish()
        except BaseException:
            self.give_up()
            raise

    def record_gather(self, n_bytes_sent: int, n_bytes_received: int, n_elems: int, comm: Comm, gather_s: float, agree_s: float) -> None:
        self._recorder.add_gather(n_bytes_sent, n_bytes_received, n_elems, comm, gather_s, agree_s)

    # ---- steps: one exchange of the whole model ----

    def _step(self) -> int:
        return max(0, self.n_steps - 1)

    def _opens_step(self, unit: Exchanged) -> bool:
        """Whether this is the first unit of a backward pass. A unit that comes again belongs to a new pass, and the end of the last pass
        was not reported."""
        if self._step_open and unit.name in self._units_of_step:
            self.synchronize()
            self.end_step()
        self._units_of_step.add(unit.name)
        self._is_outside = False
        if self.wrapper.name != "ddp":  # there the last bucket ends the step
            try:
                internals.at_end_of_backward(self._end_backward)
            except RuntimeError:  # the hook was called outside a backward pass
                if not self.wrapper.is_ended_by_hand():  # the next call is a step of its own
                    self._units_of_step.clear()
                    return True
                self._is_outside = True
        was_open, self._step_open = self._step_open, True
        return not was_open

    def _begin_step(self, loss_scale: float) -> None:
        self.n_steps += 1
        self.loss_scale(loss_scale)
        if self._step() <= self.options.sparsity_warmup:
            self._warm_up(self._step())

    def _warm_up(self, step: int) -> None:
        if self.options.sparsity_warmup and self.options.exchange != "dense":
            for unit in self.units.values():
                unit.set_sparsity(self.options.sparsity_at(step))

    def _end_backward(self) -> None:
        """Called for each unit at the end of its pass. Reentrant checkpointing has passes within the pass."""
        if self._step_open and not self.wrapper.is_in_backward() and not self._is_left_open():
            self.synchronize()
            self.end_step()

    def _is_left_open(self) -> bool:
        """Whether this step continues after the backward pass, in FSDP2's finalize_backward(). The last unit then ends it; if one got no
        gradient, the next pass does."""
        return self.wrapper.is_ended_by_hand() and self._units_of_step != set(self.units)

    def end_step(self) -> None:
        """Call it when all units of this backward pass are complete."""
        with self.lock:
            self._step_open = False
            self._units_of_step.clear()
            is_through = self.moments.go_on()
            stats = self._recorder.end(self.n_steps, self._scale)
            for alarm in self.stages.take_alarms():
                if self.wrapper.speaks:
                    warnings.warn(f"tagc: {alarm}", stacklevel=2)
            if is_through and self._verbose and self.wrapper.speaks:
                print(f"tagc: {self.stages} since exchange {self.n_steps}; {stats['mean_bits_per_param']:.3g} bits per element "
                      "until then", flush=True)
        if self.on_step:
            self.on_step(stats)

    # ---- for users ----

    @property
    def codec(self) -> str:
        """The place of selection and encoding: "host", or "device" with kernels."""
        return "host" if self.runners.kernels is None else "device"

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in use by kernels: residuals, spares, bodies and work memory. 0 without kernels."""
        return 0 if self.runners.kernels is None else self.runners.kernels.n_bytes

    def stats(self) -> dict[str, Any]:
        """Statistics of this rank's last backward pass that exchanged gradients: a new dict of numbers, and of dicts of numbers. {}
        before the first. Thread-safe.

        step                 exchanges so far: backward passes that exchanged gradients
        loss_scale           factor by which these gradients were multiplied
        world_size           ranks that exchanged gradients
        n_units              exchanges in this step: modules under FSDP, buckets under DDP
        n_elems              elements of the gradients, with torch's padding
        n_compressed         of these, in the class "compressed"
        n_gentle             of n_elems, those in the gentle start: see "The beginning" in docs/pytorch.md
        sparsity             share of the compressed that this rank did not send
        bytes_sent           by this rank in total: gradients, parameters, and the messages before each exchange by which
                             ranks agree on it
        bytes_received       likewise
        bytes_by_leg         bytes_sent by kind: index, values, leftover, result (the second half of an all-reduce), gather
                             (parameters), control
        bits_per_param       sent per element of the gradients, before the factor (W-1)/W that any exchange has
        mean_bits_per_param  the mean of bits_per_param over all exchanges of this handle
        dense_bytes          bytes that a dense exchange of the same gradients in their own dtype sends: (W-1)/W of their size,
                             all-reduces twice that
        ratio                dense_bytes / bytes_sent for the gradients
        exchange_s           in exchanges of gradients, including waiting for peers
        agree_s              waiting until all ranks had reached an exchange
        gather_s             in gathers of parameters
        time_s               by phase, summed over exchanges even if they overlap: select, index, encode, decode, wait
        n_gathered           elements of gathered parameters
        gather_bits          sent per element of the parameters, before (W-1)/W
        n_nonfinite          units whose gradients were not finite on some rank; nonfinite_units: {name: 1} of each"""
        return self._recorder.last

    def table(self) -> str:
        """The table of compressed and other parameters, as printed at the start."""
        return self._table

    def follow(self, scaler: Any) -> None:
        """Scales residuals with the loss scale of a torch.amp.GradScaler from now on.

        If the scaler skips a step because a gradient is not finite, the residuals of that gradient's module are unchanged. Values
        that other modules have sent in that step are lost."""
        if not callable(getattr(scaler, "get_scale", None)):
            raise Error("argument", f"scaler is a {type(scaler).__name__}, must have get_scale()")
        self._scaler = scaler

    def loss_scale(self, scale: float) -> None:
        """Sets the loss scale of the next gradients, for loops without a scaler. Local; pass the same on all ranks."""
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
            raise Error("argument", f"loss scale is {scale!r}, must be above 0 and finite")
        with self.lock:
            if scale != self._scale:
                for unit in self.units.values():
                    unit.scale_residuals(scale / self._scale)
                self.stages.scale(scale / self._scale)
            self._scale = scale

    def _find_loss_scale(self, source: torch.Tensor) -> Callable[[], float]:
        if self._step_open and self.runners.is_on_device(source):  # reading a scaler on a device would wait for the device
            return lambda: self._loss_scale
        return lambda: self._scale if self._scaler is None else self._scaler.get_scale()

    def reset_parameters(self) -> None:
        """If `parameters` are deltas: makes the next gather send whole values, in bf16. Call it after a change of parameters outside of an
        optimizer's step (the model's load_state_dict() calls it itself): a delta rounds a large change to a few bits. Local; one
        rank is enough."""
        self.wrapper.reset_parameters()

    def adapt(self, optimizer: Any, scheduler: Any = None) -> None:
        """Gives tagc the optimizer: one of torch's, a trainer's wrapper around one, or a list if several share the model. Local; call it on
        every rank, between steps. compress(model, optimizer) calls it.

        For an Adam (Adam, AdamW, NAdam, RAdam, their fused and 8-bit forms), tagc lowers beta1 of a compressed parameter to 0.5, step by
        step, once its gradient is mostly noise; then selection begins. Where values are selected, tagc raises beta2. Both happen inside
        step(): groups, state, learning rates and weight decay are unchanged, and checkpoints are those of a run without tagc. Other
        optimizers are not changed: if one has no first moment, tagc selects values; if it may have one, all values are sent in 4
        bits. Rank 0 prints which.

        scheduler: accepted and not used."""
        self.moments.adapt(optimizer)
        if self._verbose and self.wrapper.speaks:
            print(f"tagc: {self.moments.words}", flush=True)

    def watch(self, loss: float | torch.Tensor) -> None:
        """Hands over the loss of a batch, on each rank, once per backward pass: `handle.watch(loss)`. Where its mean over 20 exchanges and
        all ranks has risen by 2 % and by 4 standard errors, twice in a row, rank 0 warns, and every value travels until gradients
        are noise again, each time for twice as long. Local."""
        if any(group.size() != self.wrapper.n_ranks() for group in self.wrapper.groups()):
            raise Error("unsupported", "torch or `between` sums this model's gradients over replicas as well, and their ranks could "
                        "decide differently from the loss: do not call watch()")
        self.stages.watch_loss(loss)

    def param_groups(self, betas: tuple[float, float] | None = None, groups: Iterable[dict[str, Any]] | None = None,
                     **options: Any) -> list[dict[str, Any]]:
        """Parameter groups for an Adam that is made after compress(): compressed parameters have a beta1 of 0.5, others have `betas` or the
        optimizer's default.

        groups: your own groups, as optimizers take them ({"params": ..., "weight_decay": ...}); each is split in two and keeps its
        options. Default: all trainable parameters. An optimizer that is not an Adam gets its own betas back at its first step, and
        rank 0 prints that."""
        return self.moments.param_groups(betas, groups, options)

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's residuals, for torch.save() or torch.distributed.checkpoint. Each rank has its own. Local; call it between
        backward passes."""
        self.synchronize()
        return state.save(self)

    def load_state_dict(self, saved: Any) -> None:
        """Local. saved: the state_dict() of this rank; if another number of ranks saved, a list of those of all ranks. If it does not fit,
        it raises Error and changes nothing. Residuals are scaled to the next loss scale."""
        self.synchronize()
        state.load(self, saved)

    def save(self, folder: Any) -> None:
        """Writes state_dict() to a file of this rank in that folder, and makes the folder if it is missing. Local; call it on every rank,
        between steps, with the same folder."""
        self.synchronize()
        state.save_files(self, folder)

    def load(self, folder: Any) -> None:
        """Loads what save() wrote, also with another number of ranks. Local. If it does not fit, it raises Error and changes nothing."""
        self.synchronize()
        state.load_files(self, folder)

    def at(self, checkpoint_id: Any, key: str | None = None, storage_reader: Any = None) -> state.Reader:
        """Replaces the handle in a dcp.load() of a checkpoint that another number of ranks saved:

            dcp.load({"model": ..., "tagc": handle.at(path)}, checkpoint_id=path)

        key: the handle's key, if the checkpoint has several. Local; dcp.load() is collective."""
        return state.Reader(self, checkpoint_id, key, storage_reader)

    def resume(self, n_steps: int, loss_scale: float) -> None:
        """Continues after n_steps exchanges, with residuals of gradients times loss_scale."""
        self.n_steps, self._scale = n_steps, float(loss_scale)
        self._warm_up(n_steps)

    @property
    def current_loss_scale(self) -> float:
        """The factor by which residuals are multiplied."""
        return self._scale

    def close(self) -> None:
        """Removes the hooks if torch allows it, and frees the residuals. Local."""
        self.runners.close()  # without the lock: its threads may wait for it
        with self.lock:
            if self.is_closed:
                return
            for undo in self.undo:
                undo()
            self._free()

    def _free(self) -> None:
        self.runners.close()
        for free in self.frees:
            free()
        for unit in [*self.units.values(), *self._unknown.units()]:
            unit.free()
        for comm in self._comms.values():
            comm.close()
        for end in self.ends:
            end()
        self.runners.free()
        self.is_closed = True

    def __del__(self) -> None:
        """Runs when the model, and so its hooks, are gone. Python would not free libtagc's memory and threads. A forked process has copies of
        these objects but not the threads."""
        if not self.is_closed and self._process == os.getpid() and not sys.is_finalizing():
            self._free()

    def __repr__(self) -> str:
        """Local, from any thread, at any time."""
        model = type(self.model).__name__
        if self.is_closed:
            return f"<tagc handle of a {model}, closed; exchanges: {self.n_steps}>"
        now = str(self.stages) or f"compressed: {self.options.travels('compressed')}"
        last = self._recorder.last.get("bits_per_param")
        sent = f", the last one of {last:.3g} bits per element" if last is not None else ""
        return (f"<tagc handle of a {model} ({self.wrapper.name}, {self.wrapper.n_ranks()} ranks): {self._table.splitlines()[-1]}; "
                f"{now}; exchanges so far: {self.n_steps}{sent}>")

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets a model that has its handle as an attribute be saved or copied."""
        warnings.warn("tagc: a copied or pickled handle exchanges nothing and has no residuals: save handle.state_dict(), and call "
                      "compress() on the copied model", stacklevel=2)
        return Copied, ()

    def __enter__(self) -> Compressed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
