"""What hooks call: the exchanges of one model's backward passes, and its steps. A step is one exchange of the
whole model."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange import internals, waits
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.comm import Comm, Disagreement, agree_in_turn
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.interfaces import Expected
from tagc.torch.exchange.layout import Layout
from tagc.torch.exchange.model import DTYPES, Levels, LocalFailure, Sum, Unit, kind_of
from tagc.torch.exchange.model_exchanges import (
    MOST_BYTES_OF_HOSTS,
    Contents,
    FindLayout,
    Gradient,
    ModelExchanges,
    Reduction,
    Start,
)
from tagc.torch.exchange.runner import Runners
from tagc.torch.exchange.staging import Staging
from tagc.torch.exchange.unknown import UnknownLayouts
from tagc.torch.exchange.within import HostSums
from tagc.torch.schedule.options import constants
from tagc.torch.state import State
from tagc.torch.statistics import Recorder, beside_dense


class Passes:
    """Of one handle. It keeps the connections, and says when a step begins and ends."""

    def __init__(self, state: State, runners: Runners) -> None:
        self.state, self.runners, self.recorder = state, runners, Recorder()
        self.settles: list[Callable[[], object]] = []  # called by close() first, without the lock
        self.undo: list[Callable[[], object]] = []  # called by close() then, to remove hooks
        self.frees: list[Callable[[], object]] = [state.moments.close]  # called by free()
        # called by free() at last, for connections that are not in _comms
        self.ends: list[Callable[[], object]] = []
        self.scaler: Any = None  # torch's, which knows the loss scale
        self.on_step: Callable[[dict[str, Any]], object] | None = None
        self.recorded: Callable[[dict[str, Any]], object] | None = None  # by handle.record()
        self.groups: dict[str, str] = {}  # name of a parameter -> why it is in its class
        self.are_all_staged = False  # whether all ranks' parameters are on devices
        self._unknown = UnknownLayouts()
        record = functools.partial(self.recorder.add, gentle=state.options.has_levels)
        waits_for = runners.host.wait_for_jobs, runners.wait
        self.model_exchanges = ModelExchanges(state.schedule, record, *waits_for)
        self._comms: dict[tuple[int, ...], Comm] = {}  # by ranks
        self._gather_comms: dict[tuple[int, ...], Comm] = {}
        self._more_work_bytes: int | None = None  # of _comms
        self._loss_scale = 1.0  # of the pass whose hooks run; state.loss_scale is that of residuals
        self._step_open = self._is_outside = False
        self._last_summed: Staging | None = None  # where the last exchange over hosts of several ranks was
        self._units_of_step: set[str] = set()  # names

    def comm(self, group: Any) -> Comm:
        """Returns the connection over that group's ranks. Collective at the first call for a group."""
        if not isinstance(group, dist.ProcessGroup):
            return group.connection()  # ranks that torch.distributed does not know
        return self._comm(self._comms, group, self._more_work_bytes)

    def gather_comm(self, group: dist.ProcessGroup) -> Comm:
        """Returns another connection over them, for gathers while an exchange of gradients goes on: ranks
        come to the two in different orders. Its gathers come one after the other."""
        return self._comm(self._gather_comms, group, 0)

    def _comm(
        self, comms: dict[tuple[int, ...], Comm], group: dist.ProcessGroup, more_work_bytes: int | None
    ) -> Comm:
        ranks = tuple(dist.get_process_group_ranks(group))
        if (found := comms.get(ranks)) is not None:  # without the lock, which an exchange under way has
            return found
        with self.state.lock:
            if ranks not in comms:
                options = self.state.options
                # groups of ranks that leave may end, and others be made in their place
                transport = "gloo" if self.state.wrapper.is_elastic else options.transport
                comms[ranks] = Comm(group, options.timeout_s, transport, more_work_bytes)
            return comms[ranks]

    def connect(self, is_on_host: bool) -> None:
        """Makes the connections of the exchanges that compress() expects, of a model in CPU memory or on a
        device. Collective."""
        wrapper = self.state.wrapper
        if is_on_host and wrapper.shares_hosts():
            self._more_work_bytes = MOST_BYTES_OF_HOSTS
        is_one, in_thread = self.state.options.hosts == 1, is_on_host and wrapper.works_in_thread
        # what is left to torch is not exchanged in two levels
        is_left = in_thread if is_one else bool(wrapper.left_to_torch())
        whole = wrapper.groups() if is_left else []
        for group in [*wrapper.levels(), *(wrapper.deciders() or ()), *whole]:
            self.comm(group)
        within = [hosts.within for hosts in map(wrapper.hosts, wrapper.groups()) if hosts.is_two_level]
        for group in [*within, *(whole if in_thread else [])] if is_on_host else []:
            self.comm(group).collectives("compress()")

    def comms(self) -> list[Comm]:
        """Returns all connections so far."""
        return [*self._comms.values(), *self._gather_comms.values()]

    def disconnect(self) -> None:
        """Ends all reducers and keeps the residuals."""
        with self.state.lock:
            for unit in [*self.state.units.values(), *self._unknown.units()]:
                unit.close()
            self._unknown.clear()

    def prepare(self) -> None:
        """Takes the memory of exchanges of gradients on a device, and of gathers of parameters, before the
        first one, as far as it is known what they will be. Collective."""
        staging = self.runners.staging
        if staging is None or not self.are_all_staged:
            return
        found = [what for what in self.state.wrapper.expected() if what.dtype in DTYPES]
        with self.state.lock:
            for what in found:
                self._prepare(what, staging)
            for take_memory in self.state.wrapper.gathers_ahead():
                take_memory(staging)

    def _prepare(self, what: Expected, staging: Staging) -> None:
        """Prepares one exchange."""
        hosts = self.state.wrapper.hosts(what.group)
        if hosts.is_one:
            return
        layout, failure = _found(what.layout)
        within = self.comm(hosts.within) if hosts.is_two_level else None
        levels = Levels(within, self.comm(hosts.between))
        name = f"memory for gradients of {what.unit.name}"
        agree_in_turn(levels, name, {"elements": what.n_elems, "dtype": what.dtype}, failure)
        if layout is None:
            return
        kind = kind_of(dist.ReduceOp.AVG, levels.between.world_size)[0]
        wanted = Sum(levels, layout, what.dtype, kind, staging.queue)
        model = what.unit.make_unit().model_of(wanted, what.unit.rests)
        try:
            model.prepare(is_in_place=layout.all_reduce)
        except Error as problem:
            failure = problem
        agree_in_turn(levels, name, {}, failure)

    # ---- exchanges ----

    def exchange(self, gradient: Gradient) -> None:
        """Exchanges a gradient. Every hook calls it, but where the result is a future (begin()). Collective.
        It blocks for tensors in CPU memory, unless the exchange may last. For others it returns at once, and
        the target is there in the order of streams. Failures that show later are raised by the next exchange
        or at the end of the backward pass."""
        self._check_open()
        if self.is_torchs(gradient.group, gradient.source):
            with self._giving_up():
                self.model_exchanges.settle()
                self._leave_to_torch(gradient)
        elif self.runners.find(gradient.source)[0] is not None:
            self.model_exchanges.leave_on_device(self.begin(gradient))
        else:
            self._wait_for(self.begin(gradient), gradient)
        self._end_outside()

    def _wait_for(self, end: Callable[[], None], gradient: Gradient) -> None:
        """Waits for an exchange in CPU memory. A failure is raised at the end of the pass, since other ranks
        may be further, unless all have agreed on this exchange."""
        if gradient.agrees:
            with self._giving_up():
                end()
            return
        self.model_exchanges.leave(end, gradient.source, gradient.target)
        if not gradient.may_last or self._is_outside:
            self.model_exchanges.settle()
        if self._is_outside:
            self.synchronize()

    def _end_outside(self) -> None:
        """After the last unit of finalize_backward() nothing else ends this step."""
        if self._is_outside and self.state.wrapper.is_ended_by_hand():
            self.end_backward()

    def _check_open(self) -> None:
        if self.state.is_closed:
            raise Error(
                "state",
                "this tagc handle is closed, but torch still calls its hook: call compress() "
                "again, or wrap the model anew",
            )

    def is_torchs(self, group: Any, source: torch.Tensor) -> bool:
        """Returns whether torch adds that gradient up: it stays within a host, or tagc does not take it."""
        is_left = self.state.is_left_to_torch(source) and isinstance(group, dist.ProcessGroup)
        return self.state.wrapper.hosts(group).is_one or is_left

    def begin(self, gradient: Gradient) -> Callable[[], None]:
        """Starts an exchange as exchange() does, and returns what waits for its end, once, in any thread. If
        it fails, that raises, and synchronize() on all ranks; so all begin what is left of the pass, too. An
        Error of this call itself is one on all ranks. Collective."""
        self._check_open()
        unit, group, source, target = gradient[:4]
        host, hosts = self.runners.host, self.state.wrapper.hosts(group)
        with self._giving_up():
            opens_step, comm = self._opens_step(gradient), self.comm(hosts.between)
            within = self.comm(hosts.within) if hosts.is_two_level else None
            staging, why_not = self.runners.find(source)
            failure: BaseException | None = why_not
            if staging is not None:  # what is left of a failed pass only tells the others
                failure = staging.failure or self.model_exchanges.told
            find_scale = self._find_loss_scale(staging is not None, opens_step)
            loaded = None if self.state.wrapper.is_elastic else self.state.loaded
            agrees = gradient.agrees and staging is None
            levels = Levels(within, comm)
            call = Reduction(gradient, levels, find_scale, failure, loaded, opens_step, agrees)
            self._loss_scale = call.loss_scale
            if within is not None and staging is not self._last_summed:  # ends over a host have one order
                self.model_exchanges.settle()
                self.runners.wait()
                self._last_summed = staging
            if within is not None and (comm.needs_python or within.needs_python):
                host.wait_for_jobs()  # all messages have one order, and there an end sends some, too
            elif comm.needs_python:
                host.wait_for_work()
            own = unit.find_unit()
            if agrees or own is None or own.model is None:
                self.model_exchanges.settle()
                self.runners.wait()
                self._agree(call)
            if agrees and within is not None:
                call.n_within = within.agreement_bytes
            if staging is None:
                self.make_room(source.nbytes, group)
        is_told = False
        try:
            own = unit.make_unit()
            is_told = True
            start = Start(call, own, self._find(call, own), source, target, staging)
            if staging is None or within is None or not call.n_elems:
                return self.model_exchanges.begin(start)
            return self._begin_summed(start, hosts)
        except Exception as problem:
            is_told = is_told and isinstance(problem, Error) and not isinstance(problem, LocalFailure)
            if not is_told:  # the others wait for this rank's messages
                for each in (comm, within):
                    if each is not None:
                        each.abort(f"{unit.name}: {problem}")
            self.give_up()
            raise

    def _begin_summed(self, start: Start, hosts: Hosts) -> Callable[[], None]:
        """Begins an exchange on a device of what the ranks of this host have added up, as begin()."""
        call, layout, contents = start.call, None, start.contents
        if contents is not None:
            layout = contents.layout
        elif start.own.model is not None:  # as those of the others
            layout = start.own.model.layout
        within = call.levels.within
        assert within is not None  # or nobody adds up
        slices = None
        if call.is_all_reduce:
            is_known = layout is not None and layout.n_elems == call.n_elems
            slices = layout.slices_of(hosts.per_host) if layout is not None and is_known else None
            slices = slices or layouts.slices_of_one(call.n_elems, hosts.per_host)
        name, timeout_s = start.own.name, self.state.options.timeout_s
        sums = HostSums(hosts, within, start.source, call.op, slices, name, timeout_s)
        try:
            sums.add_up()
        except Exception as problem:
            call.failure, contents = call.failure or problem, None
        call.n_within = sums.n_bytes
        target = start.target if slices is None else sums.sums
        end = self.model_exchanges.begin(start._replace(contents=contents, source=sums.sums, target=target))
        if slices is None:
            return end
        try:
            sums.spread(start.target)
        except BaseException:
            self.model_exchanges.leave_on_device(end)
            raise
        return end

    def make_room(self, n_bytes: int, group: Any) -> None:
        """Ends the oldest exchanges, so that a gradient in CPU memory has room beside those that are under
        way. group: over which it is summed. Collective in effect."""
        self.model_exchanges.make_room(n_bytes, self.state.wrapper.hosts(group).is_two_level)

    def _find(self, call: Reduction, own: Unit) -> Contents | None:
        """Opens a step, if need be, and returns what is exchanged; None: this rank has a failure. Unless
        ranks have agreed on it, the step may be taken back."""
        with self.state.lock:
            if call.failure is not None:
                self.state.n_steps += call.opens_step  # as on the others
                return None
            if call.opens_step:
                self.state.begin_step(call.loss_scale)
            call.step = self.state.n_steps if call.number is None else call.number
            if call.layout is not None:
                return Contents(own, call.layout)
            if self.state.wrapper.speaks:
                self._unknown.warn(call.unit)
            dense = self._unknown.dense(call.unit, call.n_elems, call.levels, call.is_all_reduce)
            return Contents(*dense)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Gives the pass up if what it contains fails."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    def _agree(self, call: Reduction) -> None:
        """Makes all ranks agree on an exchange, after those with which other ranks have come instead."""
        while True:
            try:
                call.agree()
                return
            except Disagreement as problem:
                if not self.state.wrapper.joins(problem.whats):
                    raise

    def _leave_to_torch(self, gradient: Gradient) -> None:
        """Exchanges a gradient of a dtype that tagc does not know, or a sparse one, or one that stays within
        a host. Collective."""
        unit, group, source, target, op = gradient[:5]
        begin, hosts = time.perf_counter(), self.state.wrapper.hosts(group)
        if self._opens_step(gradient):
            self.state.begin_step(self._find_loss_scale(False, True)())
        if not hosts.is_one:
            self.runners.wait()
            numbers = {"dtype": source.dtype, "sparse": source.layout != torch.strided}
            self.comm(group).agree(f"gradients of {unit.name}", numbers)
        n_elems = internals.n_stored(source)
        is_all_reduce = source.is_sparse or source.numel() == target.numel()
        n_ranks, what = group.size(), f"gradients of {unit.name}"
        waits.add_up(source, target, op, self.torchs(group, source.device, what), n_ranks)
        n_bytes = (1 + is_all_reduce) * n_elems * source.element_size() * (n_ranks - 1) // n_ranks
        self.recorder.add_torchs(n_bytes, n_elems, n_ranks, time.perf_counter() - begin, hosts.is_one)

    def torchs(self, group: dist.ProcessGroup, device: torch.device, what: str) -> waits.Collectives:
        """Returns torch's collectives over a group of the user's, for tensors on that device: in a thread,
        where DDP and the user's code may use the group meanwhile, by a group of the handle's own."""
        if device.type == "cpu" and self.state.wrapper.works_in_thread:
            return self.comm(group).collectives(what)
        return waits.Collectives(group, what, self.state.options.timeout_s)

    def _find_loss_scale(self, is_on_device: bool, opens_step: bool) -> Callable[[], float]:
        # reading a scaler on a device would wait for the device
        if not opens_step and is_on_device:
            return lambda: self._loss_scale
        return lambda: self.state.loss_scale if self.scaler is None else self.scaler.get_scale()

    def _take_back(self) -> None:
        """Takes a step back that _find() has opened, because the ranks did not agree on it."""
        self.state.n_steps -= 1

    def synchronize(self) -> None:
        """Waits until all exchanges of device tensors are complete, and raises the first failure. Local."""
        with self._giving_up():
            try:
                self.model_exchanges.finish(self._take_back)
            finally:
                self.runners.finish()

    def give_up(self) -> None:
        """Gives this backward pass up: the rest of it, and its end, will not come."""
        self.runners.drop()
        self.model_exchanges.drop()
        with self.state.lock:
            self._step_open = False
            self._units_of_step.clear()
            self.recorder.drop()
            self.state.schedule.drop()

    # ---- steps ----

    def _opens_step(self, gradient: Gradient) -> bool:
        """Returns whether this is the first unit of a backward pass. A unit that comes again belongs to a new
        pass, and the end of the last pass was not reported."""
        wrapper, unit = self.state.wrapper, gradient.unit
        if self._step_open and unit.name in self._units_of_step:
            self.synchronize()
            self.end_step()
        if gradient.recurs:
            self._units_of_step.add(unit.name)
        # outside as in a pipeline
        self._is_outside = wrapper.ends_with_backward and not self.await_end()
        was_open, self._step_open = self._step_open, True
        return not was_open

    def await_end(self) -> bool:
        """Makes the end of the running backward pass call end_backward(). Returns whether one is running."""
        try:
            internals.at_end_of_backward(self.end_backward)
        except RuntimeError:
            return False
        return True

    def end_backward(self) -> None:
        """Ends a backward pass, and with it the step. Whoever knows that a pass ends calls it, also more than
        once. Reentrant checkpointing has passes within the pass. A failure is raised here if it is not raised
        within the pass. Collective."""
        wrapper = self.state.wrapper
        if wrapper.is_in_backward() or self._is_left_open():
            return
        failure = _failure_of(self._finish_pass)
        failure = wrapper.failure_of_pass() or failure
        if failure is not None:
            self.give_up()
        elif self._step_open:
            failure = _failure_of(self.end_step)
        try:
            if failure is not None and not wrapper.swallows(failure):
                raise failure
        finally:
            del failure  # whose traceback keeps this frame, and the model

    def _finish_pass(self) -> None:
        self.state.wrapper.finish_pass()
        if self._step_open:
            self.synchronize()

    def _is_left_open(self) -> bool:
        """Returns whether this step continues after the backward pass, in FSDP2's finalize_backward(). The
        last unit then ends it; if one got no gradient, the next pass does."""
        return self.state.wrapper.is_ended_by_hand() and self._units_of_step != set(self.state.units)

    def end_step(self) -> None:
        """Ends the step, when all its units are complete."""
        state = self.state
        with state.lock:
            self._step_open = False
            self._units_of_step.clear()
            if state.schedule.is_met(state.n_steps):
                state.wrapper.before_meeting(self.comm, state.n_steps)
            if state.schedule.pools and state.n_steps % constants().window == 0:
                comms = [self.comm(group) for group in state.wrapper.deciders() or ()]
                self.recorder.add_control(state.schedule.pool(comms))
            if n_bytes := state.schedule.meet():
                self.recorder.add_control(n_bytes, is_of_gradients=True)
            is_through = state.moments.go_on()
            stats = self.recorder.end(state.n_steps, state.loss_scale)
            if state.moments.awaits_step(not stats["n_nonfinite"]):
                state.say_once(
                    "tagc: two backward passes have exchanged gradients, and the optimizer made no step "
                    "between. To accumulate, exchange in the last pass only: no_sync(), or "
                    "set_requires_gradient_sync(False). If you throw gradients away, a part of them comes "
                    "with later ones: help(handle.discard) says what to do"
                )
            if stats["n_nonfinite"] and self.scaler is None and not state.knows_scale:
                state.warn_once(
                    "tagc: gradients are not finite. Where a GradScaler skips this step and lowers its "
                    "scale, residuals keep the old one, and count too much: handle.follow(scaler), or "
                    "handle.loss_scale(scale)"
                )
            for alarm in state.schedule.take_alarms():
                if state.wrapper.speaks:
                    warnings.warn(f"tagc: {alarm}", stacklevel=2)
            if is_through:
                state.say(
                    f"tagc: {state.schedule} since exchange {state.n_steps}; "
                    f"{stats['mean_bits_per_param']:.3g} bits per element until then ({beside_dense(stats)})"
                )
        if self.recorded:
            self.recorded(stats)
        if self.on_step:
            self.on_step(stats)

    # ---- the end ----

    def close(self) -> None:
        """Removes the hooks if torch allows it, and frees the residuals. Local."""
        for settle in self.settles:
            settle()
        self.model_exchanges.drop()
        self.runners.close()  # without the lock: its threads may wait for it
        with self.state.lock:
            if not self.state.is_closed:
                for undo in self.undo:
                    undo()
                self.free()

    def free(self) -> None:
        self.runners.close()
        for free in self.frees:
            free()
        for unit in [*self.state.units.values(), *self._unknown.units()]:
            unit.free()
        for comm in [*self._comms.values(), *self._gather_comms.values()]:
            comm.close()
        for end in self.ends:
            end()
        self.runners.free()
        self.state.is_closed = True


def _failure_of(function: Callable[[], object]) -> BaseException | None:
    try:
        function()
    except BaseException as failure:
        return failure
    return None


def _found(find_layout: FindLayout) -> tuple[Layout | None, Error | None]:
    """Returns what that finds, and why it found nothing."""
    try:
        return find_layout(), None
    except Error as problem:
        return None, problem
