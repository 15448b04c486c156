"""FSDP1: a communication hook in place of the reduce-scatter of each flat parameter (NO_SHARD: of the all-reduce).

A flat parameter holds its module's parameters one after the other, with padding between them where use_orig_params aligns
addresses, and is cut into as many rows as there are ranks wherever that falls. torch hands the same state to the hook of
every flat parameter, and nothing that says which it is; so each gets a state of its own after it is registered."""

import torch
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from tagc._library import Error
from tagc.torch import layout as layouts
from tagc.torch import internals, policy

_SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


class _Flat:
    """One FullyShardedDataParallel instance and its flat parameter."""

    def __init__(self, module, name, flat):
        """flat: its internals.FlatParameter."""
        self.module = module
        self.name = policy.clean_name(name) if name else "the root module"
        self.is_sharded = module.sharding_strategy in _SHARDED
        if not self.is_sharded and module.sharding_strategy != ShardingStrategy.NO_SHARD:
            raise Error("unsupported", f"{self.name} has {module.sharding_strategy}, for which FSDP1 takes no communication hook: "
                        "must be FULL_SHARD, SHARD_GRAD_OP or NO_SHARD. fully_shard() (FSDP2) over a mesh of two dimensions does")
        if (hook := internals.fsdp1_hook(module)) is not None:
            raise Error("state", "this model is compressed already: close() its tagc handle first" if hook is _hook
                        else f"{self.name} has a communication hook already, and FSDP1 takes only one")
        self._flat = flat
        prefix = f"{name}." if name else ""
        self.parameters = [layouts.Parameter(policy.clean_name(prefix + fqn), shape, "dense") for fqn, shape in flat.shapes()]
        self._starts, self._n_elems = flat.starts()
        self._layouts = {}

    def set_kinds(self, kinds):
        self.parameters = [parameter._replace(**kinds[parameter.name]) for parameter in self.parameters]
        self._layouts.clear()

    def layout(self, n_elems, world_size):
        trainable = self._flat.trained()
        if n_elems - self._n_elems not in range(world_size if self.is_sharded else 1):  # padded to whole rows
            raise Error("mismatch", f"the gradient has {n_elems} elements, the flat parameter {self._n_elems}, over {world_size} "
                        "ranks")
        key = tuple(trainable), n_elems, world_size
        if key not in self._layouts:
            parameters = [parameter for parameter, is_there in zip(self.parameters, trainable) if is_there]
            starts = [start for start, is_there in zip(self._starts, trainable) if is_there]
            if self.is_sharded:
                self._layouts[key] = layouts.cut(parameters, starts, n_elems, world_size)
            else:
                self._layouts[key] = layouts.bucket(parameters, world_size, starts, n_elems)
        return self._layouts[key]


class _State:
    """What the hook of one flat parameter gets."""

    def __init__(self, handle, unit, flat):
        self.handle, self.unit, self.flat = handle, unit, flat

    def exchange(self, gradient, output):
        group = self.flat.module.process_group
        self.handle.exchange(self.unit, group, gradient, output, ReduceOp.AVG,
                             lambda: self.flat.layout(gradient.numel(), group.size()))


def _hook(state, gradient, output=None):
    """gradient: of the whole flat parameter, on this rank. output: of this rank's row; None where it is not sharded."""
    state.exchange(gradient, gradient if output is None else output)


class Wrapper:
    """A FullyShardedDataParallel model, for compress()."""

    name = "fsdp1"
    gathers = False  # parameters through tagc
    has_several_meshes = False

    def __init__(self, model):
        self._model = model
        self._flats = [_Flat(module, name, flat) for name, module in model.named_modules()
                       if isinstance(module, FullyShardedDataParallel) and (flat := internals.flat_of(module)) is not None]
        if not self._flats:
            raise Error("argument", "this FullyShardedDataParallel model has no parameters")

    def groups(self):
        """Of ranks that exchange, in an order that is the same on all of them."""
        return [flat.module.process_group for flat in self._flats]

    def n_ranks(self):
        return self.groups()[0].size()

    def fingerprint(self):
        return {"model": "fsdp1"}

    def parameters(self):
        return [parameter for flat in self._flats for parameter in flat.parameters]

    def set_kinds(self, kinds):
        for flat in self._flats:
            flat.set_kinds(kinds)

    def is_in_backward(self):
        return internals.is_in_fsdp1_backward(self._model)

    def is_ended_by_hand(self):
        return False

    def install(self, handle):
        try:
            self._model.register_comm_hook(None, _hook)
        except AssertionError as failure:
            raise Error("state", f"FSDP1 does not take a communication hook: {failure}") from failure
        handle.undo.append(self._remove)
        for flat in self._flats:
            if internals.fsdp1_hook(flat.module) is not _hook:
                raise Error("unsupported", f"torch {torch.__version__} did not take the communication hook of {flat.name}")
            unit = handle.add_unit(flat.name, parameters=flat.parameters)
            internals.set_fsdp1_hook_state(flat.module, _State(handle, unit, flat))

    def _remove(self):
        for module in FullyShardedDataParallel.fsdp_modules(self._model):
            internals.remove_fsdp1_hook(module)
