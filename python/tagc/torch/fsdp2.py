"""FSDP2: a reduce-scatter and an all-gather of our own for each fully_shard()-ed module, or an all-reduce after it.

The reduce-scatter's input is (W, row): row r is the r-th chunk of each parameter that got a gradient, one after the
other, padded. Which parameters those are it does not say; _Module finds out."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tagc._library import Error
from tagc.torch import layout as layouts
from tagc.torch import policy


class _Module:
    """One fully_shard()-ed module: its parameters in FSDP2's order."""

    def __init__(self, module, name):
        self.module, self.name = module, name
        try:
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # one, where torch knows no more than that
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            if len(groups) > 1:
                raise Error("unsupported", f"{name} has {len(groups)} parameter groups: tagc, like set_custom_reduce_scatter,"
                            " takes modules with one mesh only")
            self._sharded = list(groups[0].fsdp_params) if groups else []
            self.parameters = [layouts.Parameter("", tuple(p._orig_size), "dense", p.fsdp_placement.dim)
                               for p in self._sharded]
        except AttributeError as missing:
            raise Error("unsupported", f"torch {torch.__version__} keeps FSDP2's parameters where tagc does not find them: "
                        f"{missing}") from missing
        self._layouts = {}

    def name_parameters(self, names):
        """names: id of a parameter of the model -> its name."""
        self.parameters = [parameter._replace(name=policy.clean_name(names[id(p.sharded_param)]))
                           for parameter, p in zip(self.parameters, self._sharded)]

    def group(self):
        """Over which gradients are reduce-scattered: the last dimension of the mesh."""
        mesh = self._sharded[0].sharded_param.device_mesh
        return mesh.get_group(mesh.ndim - 1)

    def set_kinds(self, kinds):
        self.parameters = [parameter._replace(kind=kinds[parameter.name]) for parameter in self.parameters]

    def trainable(self):
        return [parameter for parameter, p in zip(self.parameters, self._sharded) if p.sharded_param.requires_grad]

    def layout(self, n_elems, world_size):
        """Of an input of n_elems; None where more than one choice of parameters would fit."""
        present = _those_that_fit(self.trainable(), n_elems, world_size)
        if present is None:
            return None
        key = tuple(parameter.name for parameter in present), world_size
        if key not in self._layouts:
            self._layouts[key] = layouts.chunked(present, world_size)
        return self._layouts[key]


def _those_that_fit(parameters, n_elems, world_size):
    """The only subset of parameters that takes n_elems of an input, in order. None where there are several; Error where
    there is none. A parameter without a gradient is not in the input."""
    sizes = [layouts.chunked_elems(parameter, world_size) for parameter in parameters]
    missing = sum(sizes) - n_elems
    if missing == 0:
        return parameters
    ways = {0: (1, ())}  # elements left out -> (ways to do so, up to 2; one of them)
    for i, size in enumerate(sizes):
        for total, (n, chosen) in list(ways.items()):
            if 0 < size and total + size <= missing:
                seen, other = ways.get(total + size, (0, ()))
                ways[total + size] = min(2, seen + n), other or (*chosen, i)
        if len(ways) > 100_000:
            return None
    n, left_out = ways.get(missing, (0, ()))
    if n == 0:
        raise Error("mismatch", f"the gradient has {n_elems} elements, and no choice of this module's parameters has as many "
                    f"(all of them: {sum(sizes)} over {world_size} ranks)")
    return None if n > 1 else [parameter for i, parameter in enumerate(parameters) if i not in left_out]


class ReduceScatter:
    """For set_custom_reduce_scatter(): one per module. Complete when it returns."""

    def __init__(self, handle, unit, module):
        self._handle, self._unit, self._module = handle, unit, module

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        world_size = dist.get_world_size(group)
        self._handle.exchange(self._unit, group, input_tensor, output_tensor, op,
                              lambda: self._module.layout(input_tensor.numel(), world_size))


class Wrapper:
    """All fully_shard()-ed modules of a model, for compress()."""

    name = "fsdp2"

    def __init__(self, model, between=None):
        self.between = between
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.modules = []
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                module = _Module(module, name or "the root module")
                if module.parameters:
                    module.name_parameters(names)
                    self.modules.append(module)

    def groups(self):
        """Of ranks that exchange gradients, in an order that is the same on all of them."""
        return [module.group() for module in self.modules]

    def parameters(self):
        return [parameter for module in self.modules for parameter in module.parameters]

    def set_kinds(self, kinds):
        for module in self.modules:
            module.set_kinds(kinds)

    def install(self, handle):
        for module in self.modules:
            unit = handle.add_unit(module.name)
            module.module.set_custom_reduce_scatter(ReduceScatter(handle, unit, module))
            handle.undo.append(lambda module=module: module.module.set_custom_reduce_scatter(_DefaultReduceScatter()))


class _DefaultReduceScatter:
    """What FSDP2 does by itself; back in its place when a handle is closed."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
