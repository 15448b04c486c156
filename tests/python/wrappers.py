"""Models in the kinds of wrappers that there are, and what they have then: whole gradients, residuals.
Without the annex of a kind, its cases are left out."""

import contextlib
import io
import warnings

import torch
import torch.distributed as dist
from models import Even

from tagc.torch.hooks.kinds import kinds

KINDS = [kind.name for kind in kinds()]
HAS_FSDP1 = "fsdp1" in KINDS


def present(cases, of=lambda case: case if isinstance(case, str) else case[0]):
    """Returns the cases whose kind there is. of(case): its kind."""
    return [case for case in cases if of(case) in KINDS]


def wrapped(kind, make=Even, **options):
    """make(), from the same random numbers on all ranks, in a wrapper of that kind."""
    torch.manual_seed(0)
    return wrap(kind, make(), **options)


def wrap(kind, model, layers=None, columns=False, **options):
    """Puts each of the model's layers and the model into wrappers. columns: matrices are cut along their
    second dimension. options: of the wrappers."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.tensor import Shard

    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, **options)
    layers = getattr(model, "layers", ()) if layers is None else layers
    if kind == "fsdp1":
        options = {"use_orig_params": True, "device_id": torch.device("cpu")} | options
        if isinstance(strategy := options.get("sharding_strategy"), str):
            options["sharding_strategy"] = ShardingStrategy[strategy]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i, layer in enumerate(layers):
                layers[i] = FullyShardedDataParallel(layer, **options)
            return FullyShardedDataParallel(model, **options)
    if columns:
        options["shard_placement_fn"] = lambda parameter: Shard(1) if parameter.ndim == 2 else Shard(0)
    put = replicate if kind == "replicate" else fully_shard
    for layer in layers:
        put(layer, **options)
    put(model, **options)
    return model


def local(tensor):
    """What this rank has of it."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model):
    """{name in the plain model: its gradient of all ranks}, where there is one. Collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from tagc.torch.schedule.policy import clean_name

    if not isinstance(model, FullyShardedDataParallel):
        inner = getattr(model, "module", model)
        return {name: whole(p.grad) for name, p in inner.named_parameters() if p.grad is not None}
    if not model._use_orig_params:
        return _flat_gradients(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {clean_name(name): gradient for name, gradient in found.items()}


def _flat_gradients(model):
    """Where FSDP1 keeps no parameters: the flat gradient of each instance, all ranks' rows, cut by torch's
    own metadata."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from tagc.torch.schedule.policy import clean_name

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat = module._handle.flat_param
            rows = [torch.empty_like(flat.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, flat.grad)
            values = rows[0] if module._handle._sharding_strategy.name == "NO_SHARD" else torch.cat(rows)
            values = values[: sum(flat._numels_with_padding)]
            for fqn, shape, part in zip(flat._fqns, flat._shapes, values.split(flat._numels)):
                found[clean_name(f"{name}.{fqn}" if name else fqn)] = part.view(shape)
    return found


def residuals_of(saved):
    """{name: values} of this rank. saved: a handle, or what its state_dict() gave."""
    saved = saved if isinstance(saved, dict) else saved.state_dict()
    return next(iter(saved.values()))["residuals"]


def mean_residuals(handle):
    """{name: the mean of all ranks' residuals, fp64}. Collective."""
    means = {}
    for name, values in residuals_of(handle).items():
        dist.all_reduce(mean := values.double())
        means[name] = mean / dist.get_world_size()
    return means


@contextlib.contextmanager
def heard(words="tagc: "):
    """Gives a list that has, afterwards, the warnings with these words that came within."""
    texts = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield texts
    texts += [text for text in (str(one.message) for one in said) if words in text]


def printed(function, *arguments, **options):
    """Returns (what the function returns, what it prints)."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        result = function(*arguments, **options)
    return result, said.getvalue()
