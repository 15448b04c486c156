"""Joins small neighbouring modules into one unit, so that they share a message. FSDP calls it wrapping,
SimpleFSDP bucketing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from tagc._library import Error


def buckets(modules: Iterable[nn.Module], elems: int) -> list[list[nn.Module]]:
    """Lists of neighbouring modules, each for one fully_shard():

        for bucket in tagc.buckets(model.layers, 1_000_000):
            fully_shard(bucket)
        fully_shard(model)

    modules: in the order in which they run, before any is sharded. elems: a list gets the next module until
        its parameters have so many elements; advise() recommends a number for this link. If the last list
        stays too small, it is joined with the one before. A parameter that two modules share counts once, in
        the first.

    FSDP2 gathers the parameters of a whole list when its first module runs, and reduces all its gradients
    together, so they are in memory at the same time. Raises Error if an argument is wrong."""
    modules = list(modules)
    if not isinstance(elems, int) or isinstance(elems, bool) or elems < 1:
        raise Error("argument", f"elems is {elems!r}, must be a whole number of at least 1")
    for i, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise Error("argument", f"modules[{i}] is {type(module).__name__}, must be a module of torch.nn")
    seen: set[int] = set()
    found: list[list[nn.Module]] = []
    sizes: list[int] = []
    for module in modules:
        fresh = {
            id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in seen
        }
        seen.update(fresh)
        if not found or sizes[-1] >= elems:
            found.append([])
            sizes.append(0)
        found[-1].append(module)
        sizes[-1] += sum(fresh.values())
    if len(found) > 1 and sizes[-1] < elems:
        found[-2:] = [found[-2] + found[-1]]
    return found
