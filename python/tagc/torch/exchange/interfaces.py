"""The interfaces of a wrapped model, of a unit, and of its residuals, as the handle uses them. Hooks have the
classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tagc.torch.exchange import internals
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.hosts import Cluster, Hosts
from tagc.torch.exchange.layout import Layout, Parameter
from tagc.torch.exchange.model import Follower, Unit

Kinds = Mapping[str, Mapping[str, Any]]  # name of a parameter -> changed fields of its layout.Parameter


ALONE = "on one rank only"  # why a gradient is left to torch


class Replica(NamedTuple):
    """What a gather of deltas left on every rank: its state for a checkpoint."""

    row: torch.Tensor  # (shard,) bf16, that this rank owns
    n_gathers: int  # so far; 0: there is no replica, and the next gather sends whole parameters
    sent: str  # checksum of what this rank gave to the last gather
    parameters: str  # and of what it owned when the replica was saved


class Expected(NamedTuple):
    """The exchange of a unit's gradient, as far as it is known before the first one."""

    unit: Exchanged
    group: dist.ProcessGroup
    n_elems: int
    dtype: torch.dtype
    layout: Callable[[], Layout | None]


class Place(NamedTuple):
    """Of a rank among those that average gradients, for checkpoints: number `replica` of `replicas`. where:
    what tells it from ranks with other parameters or other pieces of them, {dimension of the mesh: [place,
    size]}. part, parts: of the ranks of one replica, whose residuals are zero but for parts of their own.
    cut: what tells these parts from those of another layout."""

    replica: int
    replicas: int
    where: dict[str, list[int]]
    part: int = 0
    parts: int = 1
    cut: str = ""

    def among(self, hosts: Hosts) -> Place:
        """Returns the place where the ranks of a host are one replica, if there are several."""
        if not hosts.is_two_level:
            return self
        per_host = hosts.per_host
        return self._replace(replica=self.replica // per_host, replicas=self.replicas // per_host)


def place_of(ranks: Sequence[int], mesh: DeviceMesh | None = None, others: Sequence[int] = ()) -> Place:
    """Returns the place of this rank among `ranks`, which average gradients. mesh: that is theirs. others:
    more ranks with the same parameters, as over `between`."""
    replica, replicas = list(ranks).index(dist.get_rank()), len(ranks)
    if len(ranks) == dist.get_world_size():
        return Place(replica, replicas, {})
    root = None if mesh is None else internals.root_mesh(mesh)
    own = root.get_coordinate() if root is not None and root.size() == dist.get_world_size() else None
    if root is None or own is None:  # which ranks have the same is known of this very set of ranks only
        return Place(replica, replicas, {"ranks": list(ranks)})
    alike = {*ranks, *others}
    return Place(
        replica,
        replicas,
        {
            name: [own[i], root.size(i)]
            for i, name in enumerate(root.mesh_dim_names or map(str, range(root.ndim)))
            if not alike.issuperset(dist.get_process_group_ranks(root.get_group(i)))
        },
    )


class Wrapped:
    """What the core asks of a model that FSDP2, DDP or an annex's wrapper splits into units: which
    parameters it exchanges, over which groups, and what it allows. hooks.wrapper.Wrapper adds the hooks."""

    name: str  # "fsdp2", "ddp" or another kind's
    between: dist.ProcessGroup | None = None  # as compress() got it
    # whether its ranks may join and leave: a residual is then a part of the mean, and belongs to no place
    is_elastic = False
    # whether its hooks add gradients up within each host, and exchange the sums between hosts
    sums_within_hosts = False
    shares_folder = True  # whether other handles of a process may save into its folder
    has_flat_parameters = False  # whether the model's own may hold several of parameters()
    shares_groups = True  # whether groups within its hosts may be those of others, with which it takes turns
    # whether exchanges of tensors in CPU memory run in a thread of tagc's from begin to end
    works_in_thread = False
    ends_with_backward = True  # whether the end of a backward pass is that of a step
    cluster: Cluster | None = None  # which compress() finds; None: each rank counts as a host

    def groups(self) -> list[dist.ProcessGroup]:
        """Returns the process groups of exchanges, in the same order on all ranks."""
        raise NotImplementedError

    def n_ranks(self) -> int:
        """Returns the number of ranks that train the model."""
        return self.groups()[0].size()

    def ranks(self) -> list[int]:
        """Returns all ranks that train the model, in ascending order."""
        return sorted(dist.get_process_group_ranks(self.groups()[0]))

    def hosts(self, group: Any) -> Hosts:
        """Returns the hosts of one of groups()."""
        return Hosts.flat(group) if self.cluster is None else self.cluster.of(group)

    def shares_hosts(self) -> bool:
        """Returns whether a host has several ranks of the model, of which not each counts as a host."""
        if self.between is not None:
            return len(self.ranks()) > 1
        return self.cluster is not None and 1 < self.cluster.n_hosts(self.ranks()) < len(self.ranks())

    @property
    def why_no_hosts(self) -> str:
        """Why it does not add gradients up within hosts."""
        if self.between is not None:
            return "between says which ranks are on other hosts"
        return f"this model is {self.name}, whose gradients are not added up within hosts"

    def levels(self) -> list[Any]:
        """Returns the groups of the exchanges of tagc itself, in the same order on all ranks: of groups(), or
        where these have several hosts of several ranks, of their two levels."""
        found = []
        for group in self.groups():
            hosts = self.hosts(group)
            if not hosts.is_one:
                found += hosts.levels()
        return found

    def expected(self) -> list[Expected]:
        """Returns the exchanges of a step whose sizes are known, after install()."""
        return []

    def exchanging(self) -> set[int]:
        """Returns the ranks with which this one exchanges gradients through tagc."""
        groups = self.groups() if self.between is None else [self.between]
        return {rank for group in groups for rank in dist.get_process_group_ranks(group)}

    def n_batches(self) -> int:
        """Returns the number of ranks whose batches differ: not all, where several compute one model."""
        return self.n_ranks()

    def deciders(self) -> list[dist.ProcessGroup] | None:
        """Returns groups: sums over one after the other are sums over all ranks. An empty list if every
        exchange is over all ranks. None if ranks that exchange different parameters have no way to decide
        alike."""
        n_ranks, groups = self.n_ranks(), self.groups()
        if any(group.size() != n_ranks for group in groups):
            return None
        return self.in_levels(groups[:1]) if any(self.hosts(group).is_two_level for group in groups) else []

    def inner(self) -> list[dist.ProcessGroup]:
        """Returns the groups over which torch sums gradients before tagc exchanges the sums."""
        return []

    def in_levels(self, groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
        """Returns groups whose sums, one after the other, are those over `groups`, host by host if these have
        hosts."""
        return [level for group in groups for level in self.hosts(group).levels()]

    def place(self) -> Place:
        """Returns this rank's place among those that average gradients."""
        return place_of(dist.get_process_group_ranks(self.groups()[0]))

    @property
    def speaks(self) -> bool:
        """Whether this rank prints messages that concern all ranks."""
        return dist.get_rank() == 0

    @property
    def has_several_meshes(self) -> bool:
        return False

    @property
    def gathers(self) -> bool:
        """Whether tagc can gather parameters."""
        return False

    def fingerprint(self) -> dict[str, Any]:
        """Returns settings that must be equal on all ranks, by name."""
        return {"model": self.name}

    def parameters(self) -> list[Parameter]:
        """Returns all that are exchanged."""
        raise NotImplementedError

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the names and parameters of the model, as optimizers have them, at any time."""
        raise NotImplementedError

    def left_to_torch(self) -> dict[str, str]:
        """Returns {name of a parameter: why tagc does not exchange its gradient}: torch does that itself, or
        nobody has to."""
        return {}

    def exchanged(self) -> set[int] | None:
        """Returns ids of the model's parameters whose gradients torch hands to a hook, or is told to ignore;
        None if that is not known."""
        return None

    def set_kinds(self, kinds: Kinds) -> None:
        raise NotImplementedError

    def is_in_backward(self) -> bool:
        """Returns whether a backward pass of this model is running, at the end of one that may be within
        it."""
        return False

    def finish_pass(self) -> None:
        """Exchanges what is left of a backward pass, at its end. Collective."""

    def failure_of_pass(self) -> BaseException | None:
        """Returns the first failure of this pass that a hook could not raise, and forgets it."""
        return None

    def swallows(self, failure: BaseException) -> bool:
        """Returns whether to raise nothing at the end of a pass that has failed so."""
        return False

    def is_ended_by_hand(self) -> bool:
        """Returns whether finalize_backward() may exchange more units after the backward pass."""
        return False

    def joins(self, whats: Sequence[str]) -> bool:
        """Does what other ranks come with while this one comes with something else, and returns whether that
        was possible: then all try again. whats: of all ranks, in their order. Collective."""
        return False

    def before_meeting(self, comm: Callable[[Any], Comm], step: int) -> None:
        """Makes ranks agree that a step ends, where they could differ in that. comm(group) -> tagc's
        connection. Collective."""

    def gathers_ahead(self) -> Sequence[Callable[[Any], object]]:
        """Returns what takes the memory of gathers of parameters, given a Staging: of each gather by tagc, in
        the same order on all ranks. Each is collective."""
        return ()

    def deltas(self) -> Mapping[str, Gathered]:
        """Returns the gathers of deltas, by name of what they gather."""
        return {}

    def reset_parameters(self) -> None:
        """Makes the next gather send whole values, if parameters are gathered as deltas."""
        for gather in self.deltas().values():
            gather.reset()

    def replica_tensors(self) -> list[torch.Tensor]:
        """Returns the replicas that gathers of deltas keep."""
        return [replica for gather in self.deltas().values() for replica in gather.replica_tensors()]

    def replicas(self) -> dict[str, Replica]:
        """Returns name -> what a checkpoint has of its replica, where parameters travel as deltas. Local."""
        return {name: gather.replica() for name, gather in self.deltas().items()}

    def replica_sizes(self) -> dict[str, int]:
        """Returns name -> elements of its replica that this rank owns."""
        return {name: gather.n_shard for name, gather in self.deltas().items()}

    def set_replicas(self, replicas: Mapping[str, Replica]) -> None:
        """Replaces the replicas. What is not named is sent whole by the next gather. Local."""
        for name, gather in self.deltas().items():
            gather.set_replica(replicas.get(name))

    def about(self) -> dict[str, Any]:
        """Returns what a checkpoint has of it besides, as JSON has it."""
        return {}


class Gathered(Protocol):
    """A gather of deltas."""

    @property
    def n_shard(self) -> int: ...

    def reset(self) -> None: ...

    def replica_tensors(self) -> list[torch.Tensor]: ...

    def replica(self) -> Replica: ...

    def set_replica(self, replica: Replica | None) -> None: ...


class Exchanged(Protocol):
    """The unit of one call of a hook."""

    name: str
    follower: Follower

    @property
    def rests(self) -> bool:
        """Whether a parameter whose gradient is zero keeps its residual."""
        ...

    def find_unit(self) -> Unit | None:
        """Returns the unit that exchanges it; None: there is none yet."""
        ...

    def make_unit(self) -> Unit:
        """Returns the same, and makes it if there is none. All ranks have agreed on the exchange."""
        ...

    def names_of_residuals(self) -> set[str]: ...


class Residuals(Protocol):
    """Keeps residuals of parameters while the handle is open: a model.Unit, or all of DDP's buckets."""

    name: str

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]: ...

    def names_of_residuals(self) -> set[str]: ...

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None: ...

    def scale_residuals(self, factor: float) -> None: ...

    def close(self) -> None: ...

    def free(self) -> None: ...
