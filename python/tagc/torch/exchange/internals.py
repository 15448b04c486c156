"""All private attributes of torch that tagc.torch reads or sets. No other module uses one; an annex has an
internals.py of its own.

SEEN lists the versions of torch that have each, found in their source and by running the tests on them. If a
newer torch has moved one, the Error names it and the version; this module is then the place to change."""

from __future__ import annotations

import copy
import datetime
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tagc._library import Error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

OLDEST, NEWEST = (2, 9), (2, 15)  # the tests have run on these
ALL = "2.9 to 2.15"

SEEN = {
    "FSDPModule._get_fsdp_state": ALL,
    "FSDPState._fsdp_param_groups": "2.12 to 2.15",
    "FSDPState._fsdp_param_group": ALL,
    "FSDPState._state_ctx": ALL,
    "FSDPState._root_post_backward_final_callback": "2.9 to 2.14",
    "FSDPStateContext.post_backward_final_callback_queued": ALL,
    "FSDPStateContext.manual_backward_finalization_active": "2.15",
    "FSDPParamGroup.fsdp_params": ALL,
    "FSDPParamGroup.mesh_info": ALL,
    "FSDPParamGroup.post_forward_mesh_info": ALL,
    "FSDPParamGroup.mp_policy": "2.9 to 2.14",
    "FSDPParamGroup.gradient_divide_factor": ALL,
    "FSDPParamGroup.all_reduce_grads": ALL,
    "FSDPParamGroup._reduce_scatter_comm": ALL,
    "FSDPParamGroup._all_gather_comm": ALL,
    "FSDPParamGroup._all_reduce_hook": ALL,
    "FSDPParamGroup._partial_reduce_output": ALL,
    "FSDPParamGroup._reduce_scatter_param_indices": "2.15",
    "FSDPParam.sharded_param": ALL,
    "FSDPParam._unsharded_param": ALL,
    "FSDPParam._orig_size": ALL,
    "FSDPParam.fsdp_placement": ALL,
    "FSDPParam.mp_policy": ALL,
    "FSDPParam.offload_to_cpu": ALL,
    "FSDPMeshInfo.shard_process_group": ALL,
    "FSDPMeshInfo.mesh": ALL,
    "FSDPMeshInfo.shard_mesh_dim": "2.9 to 2.14",
    "DDPMeshInfo.replicate_mesh_dim": "2.9 to 2.14",
    "DDPMeshInfo.replicate_process_group": ALL,
    "DistributedDataParallel._comm_hooks": ALL,
    "Parameter._ddp_ignored": ALL,
    "torch.distributed._composable.replicate.DDP": ALL,
    "torch.autograd.Variable._execution_engine": ALL,
    "torch._C._current_autograd_node": "2.9 to 2.14",
    "torch.distributed.distributed_c10d._get_default_store": ALL,
    "torch.distributed.distributed_c10d._world": ALL,
    "torch.distributed.distributed_c10d._coalescing_manager": ALL,
    "_World.pg_names": ALL,
    "FSDPParamGroup.comm_ctx": "2.9 to 2.14",
    "FSDPCommContext.reduce_scatter_stream": "2.9 to 2.14",
    "ProcessGroup._get_backend": ALL,
    "ProcessGroup.Options._timeout": "2.9 to 2.14",
    "ProcessGroupGloo._allgather_base": "2.9 to 2.14",
    "ProcessGroupGloo._reduce_scatter_base": "2.9 to 2.14",
    "OptimizedModule._orig_mod": ALL,
    "DeviceMesh._get_root_mesh": "2.13 to 2.14",
    "Module._forward_pre_hooks": ALL,
    "Module._forward_hooks": ALL,
    "Module._backward_hooks": ALL,
    "Module._backward_pre_hooks": ALL,
    "Tensor._version": ALL,
    "Tensor._nnz": ALL,
    "Tensor._post_accumulate_grad_hooks": ALL,
}


def version() -> tuple[int, int]:
    """Returns (major, minor) of this torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


Read = Callable[..., Any]


def reader(seen: Mapping[str, str]) -> tuple[Read, Read]:
    """Returns (get, find) of private attributes. seen: {what has it.name: versions of torch}. get(owner,
    name) raises an Error that names both where it is missing; find(owner, name, default) is for those that
    not every version, or not every object, has."""

    def get(owner: Any, name: str) -> Any:
        versions = seen[name]
        try:
            return getattr(owner, name.rpartition(".")[2])
        except AttributeError as missing:
            raise Error(
                "unsupported",
                f"torch {torch.__version__} has no {name}, which tagc needs and which torch {versions} had: "
                "use one of those versions, or a tagc that knows this one",
            ) from missing

    def find(owner: Any, name: str, default: Any = None) -> Any:
        assert name in seen, name
        return getattr(owner, name.rpartition(".")[2], default)

    return get, find


_get, _find = reader(SEEN)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that it was cut from; itself, where torch does not say."""
    find = _find(mesh, "DeviceMesh._get_root_mesh")
    return mesh if find is None else find()


# ---- FSDP2 ----


class FsdpGroup:
    """The parameters that one module with fully_shard() reduces and gathers together: all, or since torch
    2.12 those that shard_placement_fn put on one mesh."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._params = list(_get(group, "FSDPParamGroup.fsdp_params"))
        self._mesh = _get(group, "FSDPParamGroup.mesh_info")

    @property
    def sharded_parameters(self) -> list[Any]:
        """The optimizer's parameters, in FSDP2's order."""
        return [_get(param, "FSDPParam.sharded_param") for param in self._params]

    def ids(self) -> set[int]:
        """Returns ids of these parameters, sharded and whole."""
        return {
            id(found)
            for param in self._params
            for found in (_get(param, "FSDPParam.sharded_param"), _find(param, "FSDPParam._unsharded_param"))
        }

    def shapes(self) -> list[tuple[tuple[int, ...], int]]:
        """Returns (shape of the whole parameter, dimension along which it is sharded) of each."""
        return [
            (tuple(_get(param, "FSDPParam._orig_size")), _get(param, "FSDPParam.fsdp_placement").dim)
            for param in self._params
        ]

    def splits(self) -> list[tuple[str, ...]]:
        """Returns, of each parameter, the dimensions of its mesh that cut it beside those of fully_shard(),
        as tensor and expert parallelism do."""
        own = set(self.data_ranks)
        found = []
        for sharded in self.sharded_parameters:
            mesh = sharded.device_mesh
            found.append(
                tuple(
                    mesh.mesh_dim_names[i] if mesh.mesh_dim_names else str(i)
                    for i, placement in enumerate(sharded.placements)
                    if not placement.is_replicate()
                    and not own.issuperset(dist.get_process_group_ranks(mesh.get_group(i)))
                )
            )
        return found

    @property
    def data_mesh(self) -> DeviceMesh:
        """fully_shard()'s mesh, over which gradients are averaged."""
        mesh: DeviceMesh = _get(self._mesh, "FSDPMeshInfo.mesh")
        return mesh

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks of that mesh."""
        return tuple(self.data_mesh.mesh.flatten().tolist())

    @property
    def reduce_scatter_stream(self) -> Any:
        """torch's stream in which gradients are reduce-scattered. After the first forward pass."""
        return _get(_get(self._group, "FSDPParamGroup.comm_ctx"), "FSDPCommContext.reduce_scatter_stream")

    def reads_sums_at_once(self, dtype: torch.dtype) -> bool:
        """Returns whether torch does more with the sums of a reduce-scatter, of that dtype, than to make them
        the gradients: then they must be there when the hook returns."""
        return (
            self.replica_group is not None
            or _get(self._group, "FSDPParamGroup._all_reduce_hook") is not None
            or any(
                sharded.grad is not None or sharded.dtype != dtype or _get(param, "FSDPParam.offload_to_cpu")
                for param, sharded in zip(self._params, self.sharded_parameters)
            )
        )

    def all_groups(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the ranks of all groups of shards in that mesh, and of all groups of replicas."""
        ranks = self.data_mesh.mesh
        dims = (
            _find(self._mesh, "FSDPMeshInfo.shard_mesh_dim"),
            _find(self._mesh, "DDPMeshInfo.replicate_mesh_dim"),
        )
        shards, replicas = (
            [] if dim is None else ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
            for dim in dims
        )
        return shards, replicas

    def reduced(self) -> list[int]:
        """Returns, for a hook, the places of the trained parameters in the order of a reduction. Torch 2.15
        groups them by the dtype of their gradients."""
        order = _find(self._group, "FSDPParamGroup._reduce_scatter_param_indices") or range(len(self._params))
        used = [_find(param, "FSDPParam._unsharded_param", param.sharded_param) for param in self._params]
        return [i for i in order if used[i].requires_grad]

    def keep_requires_grad(self, registered: Collection[int]) -> None:
        """Keeps what a user has set. Call it before a reshard. registered: ids of the model's parameters.
        After a forward pass without backward, the root's parameters are unsharded. requires_grad that a user
        sets on those would be lost by a reshard."""
        for param in self._params:
            whole, sharded = (
                _find(param, "FSDPParam._unsharded_param"),
                _get(param, "FSDPParam.sharded_param"),
            )
            if id(whole) in registered and whole.requires_grad != sharded.requires_grad:
                sharded.requires_grad_(whole.requires_grad)

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The group of its reduce-scatter; None under replicate()."""
        has_replicas_only = self.replica_group is not None
        return (_find if has_replicas_only else _get)(self._mesh, "FSDPMeshInfo.shard_process_group")

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The group over which replicas are summed; None if there are none."""
        return _find(self._mesh, "DDPMeshInfo.replicate_process_group")

    @property
    def n_gathers(self) -> int:
        """Number of gathers of the parameters in a step."""
        if self.shard_group is None:
            return 0
        return 1 if _get(self._group, "FSDPParamGroup.post_forward_mesh_info") is None else 2

    def gather_dtypes(self) -> list[torch.dtype | None]:
        """Returns the dtype of each parameter in a gather: None where a tensor's own extension chooses. Torch
        sends several as bytes."""
        param_dtype = self.dtypes()[1]
        found: list[torch.dtype | None] = []
        for parameter in self.sharded_parameters:
            local = parameter.to_local()
            casts = param_dtype is not None and local.is_floating_point()
            found.append(
                None if hasattr(local, "fsdp_pre_all_gather") else param_dtype if casts else local.dtype
            )
        return found

    def dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Returns the dtypes of exchanged gradients and parameters in MixedPrecisionPolicy; None for the
        parameters' own."""
        if not self._params:
            return None, None
        policy = _find(self._params[0], "FSDPParam.mp_policy") or _get(
            self._group, "FSDPParamGroup.mp_policy"
        )
        follows = None if version() >= (2, 15) else policy.param_dtype
        return policy.reduce_dtype or follows, policy.param_dtype

    @property
    def sum_op(self) -> Any:
        """For a hook that sums over replicas in torch's place: whether its input is already divided by the
        user's divisor."""
        return (
            dist.ReduceOp.AVG
            if _get(self._group, "FSDPParamGroup.gradient_divide_factor") is None
            else dist.ReduceOp.SUM
        )

    @property
    def comms(self) -> tuple[Any, Any, Any]:
        """(reduce-scatter, all-gather, all-reduce hook) as they are now."""
        return (
            _get(self._group, "FSDPParamGroup._reduce_scatter_comm"),
            _get(self._group, "FSDPParamGroup._all_gather_comm"),
            _get(self._group, "FSDPParamGroup._all_reduce_hook"),
        )

    def replaced(
        self, reduce_scatter: object = None, all_gather: object = None, all_reduce_hook: object = None
    ) -> Iterator[tuple[str, object]]:
        """Yields the user's settings that set_comms() of these would replace: (name, setting)."""
        reduce, gather, hook = self.comms
        if reduce_scatter is not None and not _is_torchs(reduce):
            yield "reduce-scatter", reduce
        if all_gather is not None and not _is_torchs(gather):
            yield "all-gather", gather
        if all_reduce_hook is not None and hook is not None:
            yield "all-reduce hook", hook

    def set_comms(
        self, reduce_scatter: object = None, all_gather: object = None, all_reduce_hook: object = None
    ) -> None:
        """Replaces the ones that are given. FSDPModule's own methods refuse modules with several groups."""
        reduce, gather, hook = self.comms
        self._group._reduce_scatter_comm = reduce_scatter or reduce
        self._group._all_gather_comm = all_gather or gather
        self._group._all_reduce_hook = all_reduce_hook or hook

    def restore_comms(self, comms: tuple[Any, Any, Any], own: tuple[Any, Any, Any]) -> None:
        """Puts `comms` back in the place of `own`, where nobody has set another meanwhile."""
        reduce, gather, hook = (
            before if mine is not None and now is mine else now
            for before, mine, now in zip(comms, own, self.comms)
        )
        self._group._reduce_scatter_comm, self._group._all_gather_comm = reduce, gather
        self._group._all_reduce_hook = hook

    def holds_back(self) -> bool:
        """Returns whether set_requires_all_reduce(False) was called: this pass only accumulates."""
        return not _get(self._group, "FSDPParamGroup.all_reduce_grads")

    def swap_held(self, held: torch.Tensor | None) -> torch.Tensor | None:
        """Replaces what set_requires_all_reduce(False) has made torch collect. Returns what was there."""
        before: torch.Tensor | None = _get(self._group, "FSDPParamGroup._partial_reduce_output")
        self._group._partial_reduce_output = held
        return before

    def leave_replicas_to_the_hook(self) -> Callable[[], None]:
        """Stops torch's own sum over replicas, so that the all-reduce hook gets this rank's gradient, or its
        shard of it. Returns a function that undoes it."""
        group, mesh = self._group, self._mesh
        if self.shard_group is None:
            group.mesh_info = _NoMesh()
        else:  # torch still collects what set_requires_all_reduce(False) holds back
            group.mesh_info = copy.copy(mesh)
            group.mesh_info.replicate_process_group = _Alone()

        ours = group.mesh_info

        def undo() -> None:
            if group.mesh_info is ours:
                group.mesh_info = mesh

        return undo


def _is_torchs(comm: object) -> bool:
    return type(comm).__module__.partition(".")[0] == "torch"


class _NoMesh:
    """For a group that torch neither shards nor replicates: its behaviour for one rank."""


_ProcessGroup: Any = dist.ProcessGroup  # its stubs lack what a group in Python needs


class _Alone(_ProcessGroup):  # type: ignore[misc]
    """A group of this rank, for which torch's sum over replicas does nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allreduce(self, *_: object) -> None:
        """Has nothing to wait for."""


def fsdp_groups(module: FSDPModule) -> list[FsdpGroup]:
    """Returns the FsdpGroups of a module with fully_shard(); none if it has no parameters of its own."""
    state = fsdp_state(module)
    groups = _find(state, "FSDPState._fsdp_param_groups")
    if groups is None:
        only = _get(state, "FSDPState._fsdp_param_group")
        groups = [] if only is None else [only]
    return [FsdpGroup(group) for group in groups]


def fsdp_state(module: FSDPModule) -> Any:
    """Returns the same object for all modules of one list that fully_shard() got."""
    return _get(module, "FSDPModule._get_fsdp_state")()


def can_reduce_unused() -> bool:
    """Returns whether FSDP2 can give zeros for parameters without a gradient:
    set_reduce_scatter_unused_params()."""
    return version() >= (2, 13)


def has_backward_hooks(modules: Iterable[torch.nn.Module], parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Returns whether one of them has a hook of the user's that runs within a backward pass, and so may read
    any gradient."""
    return any(
        _get(module, "Module._backward_hooks") or _get(module, "Module._backward_pre_hooks")
        for module in modules
    ) or any(_get(parameter, "Tensor._post_accumulate_grad_hooks") for parameter in parameters)


def is_in_fsdp_backward(module: FSDPModule) -> bool:
    context = _get(fsdp_state(module), "FSDPState._state_ctx")
    return bool(_get(context, "FSDPStateContext.post_backward_final_callback_queued"))


def is_ended_by_hand(module: FSDPModule) -> bool:
    """Returns whether the user must call finalize_backward() after the backward pass, which reduces
    gradients, too."""
    context = _get(fsdp_state(module), "FSDPState._state_ctx")
    return bool(_find(context, "FSDPStateContext.manual_backward_finalization_active"))


def call_after_reductions(state: Any, function: Callable[[], object]) -> Callable[[], None]:
    """Calls function() each time that FSDP2 has reduced all gradients of a pass, also where a pipeline
    reduces them, outside of any backward pass. state: of fsdp_state(). Returns a function that undoes it."""
    name = "FSDPState._root_post_backward_final_callback"
    own = _find(state, name)
    if own is None:  # then a unit that comes again ends the step before
        return lambda: None

    def call() -> None:
        own()
        function()

    state._root_post_backward_final_callback = call
    return functools.partial(state.__dict__.pop, "_root_post_backward_final_callback", None)


# ---- DDP ----


def ddp_hooks(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Returns (hook, state) of each that a DistributedDataParallel has got: also of one that it refused."""
    return [*_get(model, "DistributedDataParallel._comm_hooks")]


def composable_ddp_within(model: torch.nn.Module) -> torch.nn.Module | None:
    """Returns the first module under torch's older composable replicate(), which hides its DDP; None if there
    is none."""
    maker = sys.modules.get("torch.distributed._composable.replicate")
    if maker is None:
        return None
    kind = _get(maker, "torch.distributed._composable.replicate.DDP")
    return next((module for module in model.modules() if isinstance(module, kind)), None)


def is_ignored_by_ddp(parameter: torch.Tensor) -> bool:
    return bool(_find(parameter, "Parameter._ddp_ignored", False))


# ---- the rest ----

# Renamed in torch 2.13, which warns of the old names.
all_gather: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_gather_rows(target: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gathers each row of (n, row) into that of the target, (n, ranks * row): all of them as one, where the
    backend can."""
    together = _find(dist.distributed_c10d, "torch.distributed.distributed_c10d._coalescing_manager")
    if together is not None and getattr(backend_of(group, rows.device), "supports_coalescing", False):
        with together(group=group):
            for whole, row in zip(target, rows):
                all_gather(whole, row, group=group)
        return
    for whole, row in zip(target, rows):
        all_gather(whole, row, group=group)


def reduce_scatter_rows(
    sums: torch.Tensor, source: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> Any:
    """Reduce-scatters each row of the source, (n, ranks * row), into that of the sums, (n, row): all of them
    as one, where the backend can. Returns what waits for them, or with async_op=False None."""
    backend = backend_of(group, source.device)
    together = _find(dist.distributed_c10d, "torch.distributed.distributed_c10d._coalescing_manager")
    if together is not None and getattr(backend, "supports_coalescing", False):
        with together(group=group, async_ops=async_op) as work:
            for mine, row in zip(sums, source):
                reduce_scatter(mine, row, op=op, group=group, async_op=async_op)
        return work if async_op else None
    for mine, row in zip(sums, source):
        reduce_scatter(mine, row, op=op, group=group)
    return None


def at_end_of_backward(function: Callable[[], object]) -> None:
    """Calls function() at the end of the running backward pass, after what torch does there and queues up to
    then: DDP does so behind its last hook. RuntimeError outside of a pass."""
    queue = _get(torch.autograd.Variable, "torch.autograd.Variable._execution_engine").queue_callback
    queue(lambda: queue(function))


def is_within_a_pass() -> bool:
    """Returns whether the backward pass that ends now is one within another, as reentrant checkpointing has
    them."""
    return _get(torch._C, "torch._C._current_autograd_node")() is not None


def default_store() -> dist.Store:
    return _get(dist.distributed_c10d, "torch.distributed.distributed_c10d._get_default_store")()


def n_groups() -> int:
    """Returns how many process groups this rank is in: part of the name of a group that only its ranks
    make."""
    return len(
        _get(_get(dist.distributed_c10d, "torch.distributed.distributed_c10d._world"), "_World.pg_names")
    )


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Returns the backend of a process group for tensors on that device; None if it has none."""
    find = _get(group, "ProcessGroup._get_backend")
    try:
        return find(device)
    except RuntimeError:
        return None


def gloo_gather(gloo: Any) -> Callable[..., dist.Work]:
    """Returns all_gather() of a gloo group that torch.distributed does not know: (received, sent)."""
    found: Callable[..., dist.Work] = _get(gloo, "ProcessGroupGloo._allgather_base")
    return found


def gloo_reduce_scatter(gloo: Any) -> Callable[..., dist.Work]:
    """Returns the same of reduce_scatter(): (target, source, options)."""
    found: Callable[..., dist.Work] = _get(gloo, "ProcessGroupGloo._reduce_scatter_base")
    return found


def timeout_of(backend: Any) -> datetime.timedelta | None:
    """Returns after which time a backend's collectives give up; None where it does not say."""
    options = getattr(backend, "options", None)
    found = None if options is None else _find(options, "ProcessGroup.Options._timeout")
    return found if isinstance(found, datetime.timedelta) else None


def unwrapped(model: Any) -> Any:
    """Returns the model within the wrappers of torch.compile() and of Lightning's Fabric, which exchange
    nothing."""
    while True:
        kind = type(model).__name__
        if kind == "OptimizedModule":
            model = _get(model, "OptimizedModule._orig_mod")
        elif kind == "_FabricModule":  # Fabric has no public name for what it calls
            model = model._forward_module
        else:
            return model


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Returns what runs before and after a module's forward()."""
    names = ("Module._forward_pre_hooks", "Module._forward_hooks")
    return [hook for name in names for hook in _get(module, name).values()]


def gradient_hooks_of(parameter: torch.Tensor) -> list[Any]:
    """Returns what runs when a parameter has got its gradient."""
    return list((_get(parameter, "Tensor._post_accumulate_grad_hooks") or {}).values())


def n_stored(tensor: torch.Tensor) -> int:
    """Returns how many elements a dense tensor has, or how many a sparse one holds."""
    return _get(tensor, "Tensor._nnz")() * tensor[0].numel() if tensor.is_sparse else tensor.numel()


def n_changes(tensor: torch.Tensor) -> int:
    """Returns how often the values of a tensor have been changed in place."""
    return int(_get(tensor, "Tensor._version"))
