"""Which ranks share a host. Inside a host a byte is nearly free, and what costs is what passes its network
card. So gradients are first added up within each host, by the caller's backend, and each rank exchanges its
part of the sums with the ranks of the same place in the other hosts:

    group of W = H x L ranks     rank h * L + l is at place l of host h
    within                       the L ranks of a host
    between                      the H ranks of a place

Collectives of a process group must come in one order on all of its ranks, and torch checks that nowhere: sums
of two that cross are wrong. So whoever calls one of torch's collectives keeps this rule: a group is used from
one thread, or it is the handle's own. Which group is whose:

    the user's, torch's wrapper's        in the user's thread: in compress(), and in hooks in the place of the
                                         wrapper's own collective. Never in a thread of tagc's
    those of Cluster (within, between)   likewise: several handles have them, which take turns in the user's
                                         thread, or on a device's stream
    Comm, and Comm.collectives()         the handle's own: from its thread, too. All in CPU memory goes by it

compress() asks every rank where it runs (identity()), or takes the user's `hosts=`. Cluster is what it finds
for a whole model, Hosts for one process group of it."""

from __future__ import annotations

import datetime
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange import internals, waits
from tagc.torch.exchange.comm import Comm, share
from tagc.torch.exchange.identity import identity
from tagc.torch.exchange.waits import Collectives

Ranks = tuple[int, ...]
Shared = tuple[Ranks, str]  # a group that may be used again: of these ranks, and this backend


def arrange(hosts: Sequence[object]) -> tuple[int, str]:
    """Returns (ranks per host, "") of ranks on these hosts, in the order of their group; (1, why) where they
    cannot be added up host by host."""
    counts: dict[object, int] = {}
    for host in hosts:
        counts[host] = counts.get(host, 0) + 1
    if len(set(counts.values())) > 1:
        numbers = ", ".join(map(str, counts.values()))
        return 1, f"its ranks are {numbers} on {len(counts)} hosts, which must be equally many on each"
    per_host = len(hosts) // len(counts)
    for at in range(0, len(hosts), per_host):
        if odd := [i for i in range(at, at + per_host) if hosts[i] != hosts[at]]:
            return 1, (
                f"ranks of a host must be next to each other, and numbers {at} and {odd[0]} of its "
                f"{len(hosts)} are on two hosts, with {per_host} ranks on each"
            )
    return per_host, ""


class Hosts:
    """The hosts of one process group. Those of one rank each are flat: then there is nothing to add up
    within them."""

    def __init__(
        self,
        between: dist.ProcessGroup,
        within: dist.ProcessGroup | None,
        rank: int,
        n_hosts: int,
        per_host: int,
        is_on_one_host: bool,
    ) -> None:
        self.between = between  # the ranks of this place: the group itself where hosts are flat
        self.within = within  # the ranks of this host; None where hosts are flat
        self.n_hosts, self.per_host = n_hosts, per_host
        self.host, self.place = divmod(rank, per_host)
        # whether no message of this group passes a network card, if each of its ranks counts as a host, too
        self.is_on_one_host = is_on_one_host

    @staticmethod
    def flat(group: Any, is_on_one_host: bool = False) -> Hosts:
        """Returns those of a group of which each rank counts as a host."""
        rank = group.rank() if isinstance(group, dist.ProcessGroup) else 0  # others have no such number
        return Hosts(group, None, rank, group.size(), 1, is_on_one_host)

    @property
    def is_flat(self) -> bool:
        return self.per_host == 1

    @property
    def is_one(self) -> bool:
        """Whether all ranks are of one host by the user's word, so that nothing is to be compressed."""
        return self.n_hosts == 1 and self.per_host > 1

    @property
    def is_two_level(self) -> bool:
        return self.n_hosts > 1 and self.per_host > 1

    @property
    def rows(self) -> range:
        """The numbers in the group of the ranks of this place: of a gradient (W, row), the rows that they
        own."""
        return range(self.place, self.n_hosts * self.per_host, self.per_host)

    def levels(self) -> list[dist.ProcessGroup]:
        """Returns groups: sums over one after the other are sums over the whole group."""
        return [self.between] if self.within is None else [self.within, self.between]

    def collectives(self, comm: Comm, device: torch.device, what: str, timeout_s: float) -> Collectives:
        """Returns those of the ranks of this host, for tensors on that device. comm: over these ranks."""
        if device.type == "cpu":
            return comm.collectives(what)
        assert self.within is not None  # or there is one rank per host
        return Collectives(self.within, what, timeout_s)

    def backend(self, device: torch.device) -> str:
        """Returns the name of what adds up tensors on that device within a host."""
        if device.type == "cpu" and self.within is not None:
            return "gloo"
        found = internals.backend_of(self.within, device) if self.within is not None else None
        return "nothing" if found is None else str(found.name())


class Cluster:
    """The hosts of the ranks that train one model."""

    def __init__(
        self, ranks: Iterable[int], given: int | None, timeout_s: float, shares: bool = True
    ) -> None:
        """ranks: all that train the model. given: `hosts` of compress(). shares: whether its groups may be
        those of others, with which it then takes turns. Local; Error if it does not fit."""
        self.ranks, self.given, self._timeout_s = sorted(ranks), given, timeout_s
        if given is not None and len(self.ranks) % given:
            raise Error(
                "argument",
                f"hosts is {given}, must divide the {len(self.ranks)} ranks that train the model: each host "
                "has as many ranks, in their order",
            )
        self._of_group: dict[Ranks, Hosts] = {}
        self._made: Made = _made() if shares else {}
        self._known: dict[int, str] = {}  # rank -> its identity()

    @property
    def _is_world(self) -> bool:
        return len(self.ranks) == dist.get_world_size()

    def split(self, groups: Iterable[dist.ProcessGroup], known: Mapping[int, str]) -> None:
        """Makes the Hosts of these groups. known: identity() of the ranks of which this one knows it.
        Collective over the ranks of the model, or of each group, in one order on all ranks."""
        self._known = dict(known)
        own = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
        made = {kind for kind, seconds in self._made if seconds == self._patience(kind[1]).total_seconds()}
        timeout = datetime.timedelta(seconds=self._timeout_s)
        if self._is_world:
            # all ranks of torch.distributed make all groups, also those that they are not in
            world = dist.group.WORLD
            assert world is not None
            backends = {ranks: dist.get_backend_config(group) for ranks, group in own.items()}
            everyone = share(world, (backends, made), timeout)
            reusable: set[Shared] = set.intersection(*(theirs for _, theirs in everyone))
            wanted = {ranks: backend for theirs, _ in everyone for ranks, backend in theirs.items()}
            for ranks in sorted(wanted):
                self._split(ranks, own.get(ranks), wanted[ranks], reusable, is_local=False)
            return
        for ranks, group in own.items():
            # torch names a group that only its ranks make after them and the number of groups so far
            numbers = share(group, (identity(), made, internals.n_groups()), timeout)
            self._known |= {rank: theirs[0] for rank, theirs in zip(ranks, numbers)}
            reusable = set.intersection(*(theirs[1] for theirs in numbers))
            if len({theirs[2] for theirs in numbers}) > 1:
                self._of_group[ranks] = Hosts.flat(group, self._is_on_one_host(ranks))
                self._warn(ranks, "they have made different numbers of process groups")
                continue
            self._split(ranks, group, dist.get_backend_config(group), reusable, is_local=True)

    def of(self, group: Any) -> Hosts:
        """Returns the Hosts of a group of split(). A group that torch.distributed does not know is flat."""
        if not isinstance(group, dist.ProcessGroup):
            return Hosts.flat(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        found = self._of_group.get(ranks)
        if found is None:
            raise Error("state", f"tagc has not looked for the hosts of the ranks {list(ranks)}")
        return found

    def host_of(self, rank: int) -> object:
        """Returns what tells the host of a rank from the others; None where that is not known."""
        if self.given is not None:
            return self.ranks.index(rank) // (len(self.ranks) // self.given)
        return self._known.get(rank)

    def n_hosts(self, ranks: Iterable[int]) -> int:
        """Returns on how many hosts these ranks are."""
        return len({self.host_of(rank) for rank in ranks})

    def words(self, groups: Iterable[dist.ProcessGroup], device: torch.device) -> str:
        """Returns a line on what these groups do for tensors on that device; "" where each rank counts as a
        host because all are on one."""
        all_hosts = [self.of(group) for group in groups]
        if self.given == 1:
            return "1 host: nothing is compressed, and torch adds up all gradients"
        two = next((hosts for hosts in all_hosts if hosts.is_two_level), None)
        if two is None and all(hosts.is_on_one_host for hosts in all_hosts):
            return ""
        counts: dict[object, int] = {}
        for host in map(self.host_of, self.ranks):
            counts[host] = counts.get(host, 0) + 1
        n_hosts, per_host = len(counts), min(counts.values())
        if None in counts or per_host < max(counts.values()):  # unknown, or a warning has said it
            if two is None:
                return ""
            n_hosts, per_host = two.n_hosts, two.per_host
        sums = f"sums within hosts by {two.backend(device)}, " if two is not None else ""
        many = "s" if per_host > 1 else ""
        return f"{n_hosts} hosts x {per_host} rank{many}: {sums}compressed between hosts"

    # ---- private ----

    def _is_on_one_host(self, ranks: Ranks) -> bool:
        return self.n_hosts(ranks) == 1

    def _arrange(self, ranks: Ranks) -> tuple[int, str]:
        """Returns (ranks per host, why they are flat)."""
        if self._is_on_one_host(ranks) and self.given != 1:
            return 1, ""
        if list(ranks) != sorted(ranks):
            return 1, "they are not in the order of their numbers"
        return arrange([self.host_of(rank) for rank in ranks])

    def _split(
        self,
        ranks: Ranks,
        group: dist.ProcessGroup | None,
        backend: str,
        reusable: set[Shared],
        is_local: bool,
    ) -> None:
        """Makes the Hosts of one group. group: None on a rank that is not in it, which only helps."""
        per_host, why = self._arrange(ranks)
        if why:
            self._warn(ranks, why)
        if per_host == 1:
            if group is not None:
                self._of_group[ranks] = Hosts.flat(group, self._is_on_one_host(ranks))
            return
        n_hosts = len(ranks) // per_host
        rows = [ranks[at : at + per_host] for at in range(0, len(ranks), per_host)]
        within, between = None, None
        for members in [*rows, *zip(*rows)] if n_hosts > 1 else []:
            made = self._group(tuple(members), backend, reusable, is_local)
            if group is not None and dist.get_rank() in members:
                within, between = (made, between) if members in rows else (within, made)
        if group is None:
            return
        if n_hosts == 1:
            within, between = group, group
        assert between is not None
        is_on_one_host = n_hosts == 1
        self._of_group[ranks] = Hosts(between, within, group.rank(), n_hosts, per_host, is_on_one_host)

    def _group(
        self, ranks: Ranks, backend: str, reusable: set[Shared], is_local: bool
    ) -> dist.ProcessGroup | None:
        """Returns a process group of the caller's backend; None for one that this rank is not in."""
        patience = self._patience(backend)
        key = (ranks, backend), patience.total_seconds()
        if key[0] not in reusable:
            found: Any = dist.new_group(
                list(ranks),
                timeout=patience,
                backend=backend,
                use_local_synchronization=is_local,
                group_desc="tagc",
            )
            self._made[key] = found if dist.get_rank() in ranks else None
            reusable.add(key[0])
        return self._made[key]

    def _patience(self, backend: str) -> datetime.timedelta:
        return waits.patience_of_group(backend, self._timeout_s)

    def _warn(self, ranks: Ranks, why: str) -> None:
        if dist.get_rank() == ranks[0]:
            shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            warnings.warn(
                f"tagc: gradients of ranks {shown} are not added up within hosts, and each rank sends as if "
                f"it were a host of its own: {why}",
                stacklevel=2,
            )


Made = dict[tuple[Shared, float], Any]  # by the seconds of its time-out, too
_groups: tuple[Any, Made] = (lambda: None, {})


def _made() -> Made:
    """Returns the groups that were made in this torch.distributed so far, for a later compress() to use: each
    may hold memory of a device, and torch has no safe way to end one."""
    global _groups
    world = dist.group.WORLD
    if _groups[0]() is not world:
        _groups = weakref.ref(world), {}
    return _groups[1]
