"""What Collectives knows of its keys. A key names a residual, or what was gathered last; the first call with
it says which collective, size and dtype it has.

Keys is to Passes what a wrapped model is to the hooks', but it learns of its parameters as they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.interfaces import ExchangeOptions, Kinds, Place, Replica, Wrapped, place_of
from tagc.torch.exchange.unit import Unit
from tagc.torch.hooks.gathers import AllGather
from tagc.torch.schedule import policy
from tagc.torch.schedule.options import Options

BY_NAME = "non-attention-linear"  # the default of layers=


@dataclasses.dataclass(frozen=True)
class Use:
    """What a key is for: a collective of tensors with so many elements, of a gather those of one rank."""

    collective: str
    n_elems: int
    dtype: str

    @staticmethod
    def of(collective: str, source: torch.Tensor) -> Use:
        return Use(collective, source.numel(), str(source.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.collective} of {self.n_elems} elements of {self.dtype}"


class Reduced:
    """A key of reductions, or all tensors of one size that come without a key."""

    def __init__(
        self, name: str, parameter: layouts.Parameter, use: Use, hosts: Hosts, options: ExchangeOptions
    ) -> None:
        self.parameter, self.use = parameter, use
        n_ranks = hosts.n_hosts * hosts.per_host
        if use.collective == "reduce_scatter":
            rows = hosts.rows if hosts.is_two_level else None
            self.layout = layouts.cut([parameter], [0], use.n_elems, n_ranks, rows)
        else:
            self.layout = layouts.bucket([parameter], n_ranks)
            if hosts.is_two_level:
                self.layout = layouts.part(self.layout, hosts.n_hosts, hosts.per_host, hosts.place)
        # messages name the collective, so that ranks notice where they come with different ones
        self.unit = Unit(f"{name} ({use.collective})", options, own=self.layout)


class Keys(Wrapped):
    """Of one Collectives. names: a model, or pairs of (name, parameter), or None."""

    name = "collectives"
    sums_within_hosts = True
    ends_with_backward = False

    def __init__(self, group: dist.ProcessGroup, options: Options, names: Any) -> None:
        self._group, self._options = group, options
        self.reduced: dict[str, Reduced] = {}
        self.gathered: dict[str, tuple[Use, AllGather]] = {}
        self._once: dict[Use, Reduced] = {}  # without a key
        named = _named(names)
        if options.rules is not None and named is None:
            raise Error(
                "argument", f"rules is {options.rules!r}, and names is None: give names, as of a model"
            )
        self.rows = policy.classify(named or [], options.layers, options.rules)
        self.kinds = {row.name: row.class_ for row in self.rows}
        self._is_named = named is not None
        # id of a parameter -> (it, so that no other gets this id; its name)
        self._names = {id(p): (p, row.name) for (_, p), row in zip(named or [], self.rows)}
        self._strings: set[str] = set()  # names that came as such

    # ---- names ----

    def name_of(self, key: Any) -> str:
        """Returns the name of a key. Local."""
        if isinstance(key, torch.Tensor):
            return self._name_of_tensor(key)
        if not isinstance(key, str) or not key:
            raise Error("argument", f"key is {key!r}, must be a parameter, a name or None")
        if not self._is_named and key not in self._strings and any(key == n for _, n in self._names.values()):
            raise Error(
                "argument", f"key is {key!r}, which is the name of a parameter that came before: {_GIVE}"
            )
        self._strings.add(key)
        return key

    def _name_of_tensor(self, key: torch.Tensor) -> str:
        if id(key) not in self._names:
            shape = tuple(key.shape)
            if self._is_named:
                raise Error(
                    "argument", f"key is a tensor of shape {shape}, which names does not have: {_GIVE}"
                )
            name = str(len(self._names))
            if name in self._strings:
                raise Error(
                    "argument",
                    f"key is a tensor of shape {shape}, number {name}, and {name!r} is a name that came "
                    f"before: {_GIVE}",
                )
            self._names[id(key)] = key, name
        return self._names[id(key)][1]

    def kind_of(self, name: str, tensor: torch.Tensor) -> str:
        """Returns the class of a key: that of the parameter with that name. Others are compressed, unless
        they are too small for that to pay."""
        if name in self.kinds:
            return self.kinds[name]
        if self._options.layers == BY_NAME:
            return "compressed" if tensor.numel() >= policy.MIN_ELEMS else "dense"
        return policy.classify([(name, tensor)], self._options.layers)[0].class_

    # ---- uses ----

    def find(self, name: str | None, use: Use, tensor: torch.Tensor, options: ExchangeOptions) -> Reduced:
        """Returns what reduces with that key; None: without one, which is dense. Error if the key is for
        something else. A new one is not known before add()."""
        if name is None:
            if use not in self._once:
                words = f"a tensor of {use.n_elems} {use.dtype} without a key"
                self._once[use] = self.made(words, "dense", use, options)
            return self._once[use]
        if (found := self.reduced.get(name)) is not None:
            check_use(name, found.use, use)
            return found
        return self.made(name, self.kind_of(name, tensor), use, options)

    def made(self, name: str, kind: str, use: Use, options: ExchangeOptions) -> Reduced:
        return Reduced(name, layouts.Parameter(name, (use.n_elems,), kind), use, self.own_hosts(), options)

    def free(self) -> None:
        """Frees what is no unit of the state."""
        for reduced in self._once.values():
            reduced.unit.free()
        for _, gather in self.gathered.values():
            gather.close()

    # ---- as Passes and checkpoints ask ----

    def own_hosts(self) -> Hosts:
        return self.hosts(self._group)

    def groups(self) -> list[dist.ProcessGroup]:
        return [self._group]

    def deciders(self) -> list[dist.ProcessGroup]:
        return []

    def place(self) -> Place:
        hosts, place = self.own_hosts(), place_of(dist.get_process_group_ranks(self._group))
        if not hosts.is_two_level:
            return place
        return Place(hosts.host, hosts.n_hosts, place.where, hosts.place, hosts.per_host, self.name)

    def parameters(self) -> list[layouts.Parameter]:
        return []  # that the schedule follows

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return []

    def set_kinds(self, kinds: Kinds) -> None:
        """Does nothing: without a schedule, a key keeps its class."""

    def about(self) -> dict[str, Any]:
        reduced = {name: dataclasses.astuple(one.use) for name, one in self.reduced.items()}
        gathered = {name: dataclasses.astuple(use) for name, (use, _) in self.gathered.items()}
        kinds = {name: one.parameter.kind for name, one in self.reduced.items()}
        return {"keys": {"reduced": reduced, "gathered": gathered, "kinds": kinds}}

    def _deltas(self) -> dict[str, AllGather]:
        return {name: gather for name, (_, gather) in self.gathered.items() if gather.is_delta}

    def reset_parameters(self) -> None:
        for gather in self._deltas().values():
            gather.reset()

    def replica_tensors(self) -> list[torch.Tensor]:
        return [replica for gather in self._deltas().values() for replica in gather.replica_tensors()]

    def replicas(self) -> dict[str, Replica]:
        return {name: gather.replica() for name, gather in self._deltas().items()}

    def replica_sizes(self) -> dict[str, int]:
        return {name: gather.n_shard for name, gather in self._deltas().items()}

    def set_replicas(self, replicas: Mapping[str, Replica]) -> None:
        for name, gather in self._deltas().items():
            gather.set_replica(replicas.get(name))


_GIVE = "give it a name of its own, a string"


def check_use(name: str, known: Use, use: Use) -> None:
    if use != known:
        raise Error("mismatch", f"key {name}: {use}; its first call was {known}: give it a key of its own")


def _named(names: Any) -> list[tuple[str, torch.Tensor]] | None:
    if names is None:
        return None
    if isinstance(names, torch.nn.Module):
        return list(policy.named_parameters(names))
    pairs = list(names) if isinstance(names, Iterable) and not isinstance(names, (str, bytes)) else [names]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise Error(
                "argument", f"names has {pair!r}, must be a model, or pairs of a name and a parameter"
            )
    return pairs
