"""DDP: a communication hook. It asks a runner for a future of each bucket's average, so that backward
continues.

DDP rebuilds its buckets after the first iteration, with other parameters in each. All buckets are one unit
for the handle, and residuals are held by parameter. A hook of DDP's reducer cannot be removed: close() leaves
it in place, and a later compress() takes it over."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tagc._library import Error
from tagc.torch.exchange import internals, staging
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.interfaces import Expected, Kinds, Place, place_of
from tagc.torch.exchange.model import DTYPES, Follower, Unit, stowable
from tagc.torch.exchange.model_exchanges import Gradient
from tagc.torch.handle import Compressed
from tagc.torch.hooks.wrapper import Wrapper as AnyWrapper
from tagc.torch.schedule import policy

__all__ = ["State", "Wrapper"]  # for annexes that extend it

UNIT = "buckets"


class Buckets:
    """Units of buckets, which share no parameter."""

    def __init__(self, name: str, follower: Follower) -> None:
        self.name, self.follower = name, follower
        self._units: dict[tuple[str, ...], Unit] = {}  # by names of a bucket's parameters, in order
        self._stowed: dict[str, torch.Tensor] = {}  # residuals of parameters in no unit, in wire order

    def find(self, layout: layouts.Layout) -> Unit | None:
        """Returns the one of a bucket with that layout, if there is one."""
        return self._units.get(_names_of(layout))

    def unit(self, name: str, layout: layouts.Layout) -> Unit:
        """Returns the one of a bucket with that name and layout. It ends all that share a parameter with a
        new one."""
        if (found := self.find(layout)) is not None:
            return found
        names = _names_of(layout)
        for old in [old for old in self._units if not set(old).isdisjoint(names)]:
            unit = self._units.pop(old)
            unit.close()
            self._stowed |= unit.residuals_on_the_wire()
        new = self._units[names] = Unit(name, self.follower)
        new.set_residuals_on_the_wire(
            {name: self._stowed.pop(name) for name in names if name in self._stowed}
        )
        return new

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]:
        found = {name: values.clone() for name, values in self._stowed.items()}
        for unit in self._units.values():
            found |= unit.residuals_on_the_wire()
        return found

    def names_of_residuals(self) -> set[str]:
        return set(self._stowed).union(*(unit.names_of_residuals() for unit in self._units.values()))

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None:
        values = dict(values)
        for names, unit in self._units.items():
            unit.set_residuals_on_the_wire({name: values.pop(name) for name in names if name in values})
        self._stowed = {name: stowable(tensor) for name, tensor in values.items()}

    def scale_residuals(self, factor: float) -> None:
        for unit in self._units.values():
            unit.scale_residuals(factor)
        for values in self._stowed.values():
            values.mul_(factor)

    def close(self) -> None:
        """Keeps the residuals for the models that later exchanges make."""
        with contextlib.ExitStack() as all_of_them:
            for unit in self._units.values():
                all_of_them.callback(unit.close)

    def free(self) -> None:
        for unit in self._units.values():
            unit.free()
        self._stowed = {}


class _Bucket:
    """The handle's view of one bucket."""

    def __init__(self, buckets: Buckets, index: int, layout: layouts.Layout, rests: bool) -> None:
        first, n = layout.parameters[0].name, len(layout.parameters) - 1
        self.name = f"bucket {index} ({first}{f' and {n} more' if n else ''})"
        self.follower, self.layout, self.rests = buckets.follower, layout, rests
        self._buckets = buckets

    def find_unit(self) -> Unit | None:
        return self._buckets.find(self.layout)

    def make_unit(self) -> Unit:
        return self._buckets.unit(self.name, self.layout)

    def names_of_residuals(self) -> set[str]:
        return self._buckets.names_of_residuals()


class _Backward:
    """One backward pass. The first failure of its buckets waits until DDP has copied the last one. (DDP would
    turn a failed future into a failed cast, and a hook that raises would leave its reducer in the middle of a
    pass.)"""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.is_open = True  # whether torch runs a pass: not in join(), for a rank without data
        self.is_given_up = False  # on all ranks, so that no bucket is exchanged any more
        self.is_whole = False  # whether its last bucket has come

    def fail(self, failure: BaseException) -> None:
        self.failure = self.failure or failure

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def goes_on(self) -> bool:
        """Returns whether it does where one of torch's passes ends. Reentrant checkpointing has passes within
        the pass: DDP copies the buckets at the end of the one in which the last bucket comes, while the first
        one may have come in another. A user may call backward() for some parameters, and then for others."""
        is_last = self.failure is not None and self.is_open and not internals.is_within_a_pass()
        return not self.is_whole and not is_last


class _Owned:
    """Keeps a handle alive as long as its model. A copy of the model has none."""

    def __init__(self, handle: Compressed | None = None) -> None:
        self.handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _Owned, ()


class State:
    """The state that DDP passes to ddp_hook(); see ddp_state(). It does not keep the model alive: DDP's
    reducer holds it, and Python's garbage collector does not look into that."""

    def __init__(self) -> None:
        self._handle: Callable[[], Compressed | None] = lambda: None
        self._model: Callable[[], torch.nn.Module | None] = lambda: None
        self._layouts: dict[tuple[str, ...], layouts.Layout] = {}
        self.backward: _Backward | None = None
        self.partner: Any = None  # who exchanges without a handle, so that DDP must not
        self._group: dist.ProcessGroup | None = None  # of DDP, for after close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Gives a copy of the model an empty state, because its reducer has no hook."""
        return State, ()

    def is_of(self, model: DistributedDataParallel) -> bool:
        return self._model() is model

    def leave(self) -> None:
        """Notes that the model's reducer has refused it, though DDP's list of hooks has it."""
        self._handle = self._model = lambda: None

    def forget_layouts(self, names: Set[str] | None = None) -> None:
        """Drops the layouts of these parameters, None: all, because they change to another class or level.
        Reducers of other buckets stay."""
        self._layouts = {
            key: layout
            for key, layout in self._layouts.items()
            if names is not None and names.isdisjoint(key)
        }

    @staticmethod
    def of(handle: Compressed) -> State:
        """Returns the state of an earlier handle of this model, or a new one."""
        state = _wrapper_of(handle).hooked() or State()
        model: Any = handle.model
        state._handle, state._model = weakref.ref(handle), weakref.ref(model)
        state._layouts, state._group = {}, getattr(model, "process_group", None)
        model._tagc = _Owned(handle)
        if UNIT not in handle.state.units:
            hosts, n_chunks, held = _wrapper_of(handle).own_hosts(), 1, None
            if hosts.is_two_level:
                n_chunks, held = hosts.per_host, range(hosts.place, hosts.per_host, hosts.per_host)
            handle.state.add_unit(UNIT, Buckets, n_chunks=n_chunks, held=held)
        return state

    @property
    def handle(self) -> Compressed:
        """The handle that compress() returned."""
        handle = self._handle()
        if handle is None:
            raise Error("state", "this tagc handle is gone, but its hook is still called")
        return handle

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Returns a future of the bucket's average. It is the hook."""
        handle = self._handle()
        if self.partner is None and (handle is None or handle.is_closed):  # DDP keeps its hook
            return default_hooks.allreduce_hook(self._group, bucket)  # type: ignore[arg-type]
        handle, backward = self.handle, self._backward_of(bucket)
        backward.is_open = handle.passes.await_end()
        future = self._begin(handle, backward, bucket) or self._work(handle, backward, bucket)
        if not backward.is_open:  # join(): a rank without data calls the hook outside a backward pass
            future.wait()
            handle.passes.end_backward()
        return future

    def _work(
        self, handle: Compressed, backward: _Backward, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Begins an exchange that needs Python, and returns a future of its result."""
        index, tensors, source = bucket.index(), bucket.parameters(), bucket.buffer()
        wrapper = _wrapper_of(handle)

        def work() -> torch.Tensor:
            try:
                backward.check()  # the first failure is the one for all
                if index == 0:
                    wrapper.begin(handle)
                wrapper.prepare(source)
                result = source.clone() if source.is_sparse else source  # a second one would cost memory
                exchanged = self._find(handle, index, tensors)
                gradient = _gradient(handle, exchanged, source, result)
                handle.passes.exchange(gradient._replace(waits=staging.FOR_NOTHING, agrees=True))
                wrapper.goes_on([parameter.name for parameter in exchanged.layout.parameters])
                return result
            except BaseException as failure:
                backward.fail(failure)
                return _spoilt(source)

        # within a host slices come together after the exchange
        is_awaited = wrapper.own_hosts().is_two_level
        return handle.passes.runners.future(work, source, is_awaited)

    def _begin(
        self, handle: Compressed, backward: _Backward, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor] | None:
        """Begins an exchange that goes on without Python, and returns a future of its result; None: it cannot
        be one."""
        if handle.wrapper.is_elastic:  # its ranks come and go
            return None
        passes, group, source = handle.passes, handle.wrapper.groups()[0], bucket.buffer()
        try:
            exchanged = self._find(handle, bucket.index(), bucket.parameters())
            if passes.is_torchs(group, source):
                return None
            if backward.is_given_up:
                return _done(_spoilt(source))
            gradient = _gradient(handle, exchanged, source, source)
            device, _ = passes.runners.find(source)
            if device is not None and _wrapper_of(handle).own_hosts().is_two_level:
                # after the exchange the host's ranks have work of their own
                with device.streams.aside() as stream:
                    end = passes.begin(gradient)
                passes.model_exchanges.leave_on_device(end)
                return device.streams.future(source, stream)
            end = passes.begin(gradient._replace(waits=staging.FOR_NOTHING))
            if device is not None:
                passes.model_exchanges.leave_on_device(end)
                return device.streams.future(source, device.stream)
        except BaseException as failure:
            backward.is_given_up = True
            backward.fail(failure)
            return _done(_spoilt(source))

        def result() -> torch.Tensor:
            try:
                end()
                return source
            except BaseException:  # synchronize() raises it
                return _spoilt(source)

        return passes.runners.host.await_end(result)

    def expected(self, index: int, tensors: Sequence[torch.Tensor]) -> Expected:
        """Returns the exchange of a bucket of these parameters."""
        bucket = self._find(self.handle, index, tensors)
        group, layout = _wrapper_of(self.handle).groups()[0], bucket.layout
        return Expected(bucket, group, layout.n_elems, tensors[0].dtype, lambda: layout)

    def _backward_of(self, bucket: dist.GradBucket) -> _Backward:
        if bucket.index() == 0 or self.backward is None:
            self.backward = _Backward()
        self.backward.is_whole = bucket.is_last()
        return self.backward

    def _find(self, handle: Compressed, index: int, tensors: Sequence[torch.Tensor]) -> _Bucket:
        """Returns the exchange of a bucket of these parameters."""
        parameters = [_wrapper_of(handle).parameter(tensor) for tensor in tensors]
        key = tuple(parameter.name for parameter in parameters)
        if key not in self._layouts:
            self._layouts[key] = layouts.bucket(parameters, _wrapper_of(handle).groups()[0].size())
        # DDP drops the result for a parameter that no rank has used. Its gradient is zero, so its residual
        # must not be sent.
        rests = _wrapper_of(handle).finds_unused
        buckets = handle.state.units[UNIT]
        assert isinstance(buckets, Buckets)
        return _Bucket(buckets, index, self._layouts[key], rests)


def _wrapper_of(handle: Compressed) -> Wrapper:
    assert isinstance(handle.wrapper, Wrapper)
    return handle.wrapper


def _gradient(handle: Compressed, bucket: _Bucket, source: torch.Tensor, result: torch.Tensor) -> Gradient:
    group, op = handle.wrapper.groups()[0], _wrapper_of(handle).op
    find_layout = functools.partial(_fitting, bucket.layout, source)
    return Gradient(bucket, group, source, result, op, find_layout)


def _fitting(layout: layouts.Layout, source: torch.Tensor) -> layouts.Layout:
    if layout.n_elems != source.numel():
        raise Error(
            "unsupported", f"the bucket has {source.numel()} elements, its parameters {layout.n_elems}"
        )
    return layout


def _names_of(layout: layouts.Layout) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in layout.parameters)


def _done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def _spoilt(source: torch.Tensor) -> torch.Tensor:
    """Returns source, which is not used for training. Nothing here may fail, or DDP waits forever."""
    if source.layout == torch.strided:
        with contextlib.suppress(RuntimeError):  # its device failed
            source.fill_(float("nan"))
    return source


def ddp_hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Returns a future of a bucket's average, for DistributedDataParallel.register_comm_hook(). state: from
    ddp_state()."""
    if not isinstance(state, State):
        raise Error(
            "argument", f"the hook's state is a {type(state).__name__}, must be what ddp_state() returns"
        )
    if not isinstance(bucket, torch.distributed.GradBucket):
        raise Error(
            "unsupported",
            "DDP's Python reducer (compiled autograd) has no buckets: tagc takes DDP's own reducer",
        )
    return state.send(bucket)


# DDP compares annotations with types; postponed annotations would be strings.
ddp_hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


class Wrapper(AnyWrapper):
    """A DistributedDataParallel model, for compress()."""

    name = "ddp"
    op: Any = ReduceOp.AVG
    sums_within_hosts = True
    works_in_thread = True

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        hooks = [
            (hook, state)
            for hook, state in internals.ddp_hooks(model)
            if not (self._is_known(state) or isinstance(state, State) and not state.is_of(model))
        ]
        if (state := self.hooked()) is not None:
            if (handle := state._handle()) is not None and not handle.is_closed:
                raise Error("state", "this model is compressed already: close() its tagc handle first")
        elif hooks:
            raise Error(
                "state",
                f"this DDP model has a communication hook already ({hooks[0][0].__qualname__}), and DDP "
                "takes only one"
                + (
                    ", which its mixed_precision needs: use torch.autocast instead"
                    if getattr(model, "mixed_precision", None) is not None
                    else ": wrap the model anew, without it"
                ),
            )
        self._parameters: dict[int, layouts.Parameter] = {}  # by id of the model's
        for name, parameter in policy.named_parameters(model):
            if not internals.is_ignored_by_ddp(parameter):
                # DDP's buckets have a complex number as two real ones
                shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
                self._parameters[id(parameter)] = layouts.Parameter(name, shape, "dense")

    def _is_known(self, _state: Any) -> bool:
        """Returns whether that is the state of a hook that tagc replaces."""
        return False

    def begin(self, handle: Compressed) -> None:
        """Does what comes before the first bucket of a backward pass, in the thread that exchanges them.
        Collective."""

    def prepare(self, source: torch.Tensor) -> None:
        """Changes each bucket to the tensor to send."""

    def goes_on(self, names: Sequence[str]) -> None:
        """Does what comes after each bucket, of those parameters."""

    def hooked(self) -> State | None:
        """Returns the State that is registered as this model's hook."""
        return next(
            (
                state
                for _, state in internals.ddp_hooks(self._model)
                if isinstance(state, State) and state.is_of(self._model)
            ),
            None,
        )

    def groups(self) -> list[dist.ProcessGroup]:
        return [self._model.process_group]

    def left_to_torch(self) -> dict[str, str]:
        sparse = {
            id(module.weight)
            for module in self._model.modules()
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
        }
        found = {}
        for name, parameter in policy.named_parameters(self._model):
            if id(parameter) in sparse:
                found[name] = "sparse gradient"
            elif parameter.dtype not in DTYPES:
                found[name] = str(parameter.dtype).removeprefix("torch.")
        return found

    def exchanged(self) -> set[int]:
        ignored = {id(p) for p in self._model.parameters() if internals.is_ignored_by_ddp(p)}
        return ignored | self._parameters.keys()

    def own_hosts(self) -> Hosts:
        """Returns the hosts of the model's ranks."""
        return self.hosts(self.groups()[0])

    def place(self) -> Place:
        group, hosts = self._model.process_group, self.own_hosts()
        place = place_of(dist.get_process_group_ranks(group), getattr(self._model, "device_mesh", None))
        return place._replace(replica=hosts.host, replicas=hosts.n_hosts) if hosts.is_two_level else place

    def parameters(self) -> list[layouts.Parameter]:
        return list(self._parameters.values())

    @property
    def finds_unused(self) -> bool:
        """Whether DDP searches for parameters that a pass did not use."""
        return bool(self._model.find_unused_parameters)

    def is_in_backward(self) -> bool:
        backward = self._backward()
        return backward is not None and backward.goes_on()

    def failure_of_pass(self) -> BaseException | None:
        if (backward := self._backward()) is None:
            return None
        failure, backward.failure = backward.failure, None
        return failure

    def _backward(self) -> _Backward | None:
        state = self.hooked()
        return None if state is None else state.backward

    def expected(self) -> list[Expected]:
        """Returns the exchanges of the first backward pass: DDP has a bucket of all gradients of a dtype
        then, unless it searches for unused parameters."""
        state = self.hooked()
        if state is None or self.finds_unused or self.is_elastic:
            return []
        tensors: dict[torch.dtype, list[torch.Tensor]] = {}
        left = self.left_to_torch()
        for name, tensor in policy.named_parameters(self._model):
            if tensor.requires_grad and id(tensor) in self._parameters and name not in left:
                tensors.setdefault(tensor.dtype, []).append(tensor)
        return [state.expected(index, each) for index, each in enumerate(tensors.values())]

    def parameter(self, tensor: torch.Tensor) -> layouts.Parameter:
        """Returns the layouts.Parameter of one of the model's."""
        found = self._parameters.get(id(tensor))
        if found is None:
            raise Error("state", f"a parameter of shape {tuple(tensor.shape)} came after compress()")
        return found

    def set_kinds(self, kinds: Kinds) -> None:
        before, self._parameters = (
            self._parameters,
            {key: p._replace(**kinds[p.name]) for key, p in self._parameters.items()},
        )
        changed = {p.name for key, p in self._parameters.items() if p != before[key]}
        if changed and (state := self.hooked()) is not None:
            state.forget_layouts(changed)

    def install(self, handle: Compressed) -> None:
        is_new = self.hooked() is None
        state = State.of(handle)
        if is_new:
            try:
                self._model.register_comm_hook(state, ddp_hook)
            except RuntimeError as failure:  # a builtin hook, known only to DDP's reducer
                state.leave()
                raise Error("state", f"DDP does not take a communication hook: {failure}") from failure
