"""What Collectives knows of its keys. A key names a residual, or what was gathered last; the first call with
it says which collective, size and dtype it has.

Keys is to Passes what a wrapped model is to the hooks', but it learns of its parameters as they come."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.extension import (
    AllGather,
    Comm,
    Follower,
    Hosts,
    Kinds,
    Place,
    Settings,
    Unit,
    Wrapped,
    agree_in_turn,
    layouts,
    place_of,
    policy,
)

BY_NAME = "non-attention-linear"  # the default of layers=
# what libtagc rounds at random where no residual takes what a format rounds off
AT_RANDOM = ("int8", "int4")


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


class Saved(NamedTuple):
    """The keys of a checkpoint. kinds: classes of those of reductions. named: those of names. n_calls: from
    which the rounding of calls without a key derives. n_backward: from which that of gradients of all-to-alls
    does, by key."""

    reduced: dict[str, Use]
    gathered: dict[str, Use]
    kinds: dict[str, str]
    named: list[str]
    n_calls: int
    n_backward: dict[str, int]


class Reduced:
    """A key of reductions, or all tensors of one size that come without a key."""

    def __init__(self, parameter: layouts.Parameter, use: Use, hosts: Hosts, follower: Follower) -> None:
        self.use, self._hosts = use, hosts
        self._lay_out(parameter)
        # messages name the collective, so that ranks notice where they come with different ones
        self.unit = Unit(f"{parameter.name} ({use.collective})", follower, self._own())

    def _lay_out(self, parameter: layouts.Parameter) -> None:
        self.parameter, n_ranks = parameter, self._hosts.n_hosts * self._hosts.per_host
        if self.use.collective == "reduce_scatter":
            self.layout = layouts.cut([parameter], [0], self.use.n_elems, n_ranks)
        else:
            self.layout = layouts.bucket([parameter], n_ranks)

    def _own(self) -> layouts.Layout:
        """Returns the layout of what the ranks of this rank's place exchange between hosts."""
        hosts, layout = self._hosts, self.layout
        if layout.all_reduce:
            return layouts.part(layout, hosts.per_host, hosts.place)
        n_ranks, rows = layout.world_size, hosts.rows if hosts.is_two_level else None
        return layouts.cut(layout.parameters, [0], layout.n_elems, n_ranks, rows)

    def change(self, fields: Mapping[str, Any]) -> None:
        """Changes fields of the parameter, as its level."""
        if (changed := self.parameter._replace(**fields)) != self.parameter:
            self._lay_out(changed)


class _Once:
    """How tensors without a key are sent: every value, rounded at random, and nothing stays behind. It is a
    Follower."""

    def __init__(self, values: str, is_all_reduce: bool, options: Settings) -> None:
        self._values, self._options = values, options
        # each of the sums that come back stands for the values of all ranks
        self._result_format = lib.FORMATS["int8"] if is_all_reduce else -1

    def model_options(
        self, parameters: Sequence[layouts.Parameter], _dtype: torch.dtype
    ) -> tuple[lib.ModelOptions, dict[str, str], object]:
        schedule = lib.initialised(lib.ScheduleOptions, "tagc_schedule_options_init")
        schedule.gentle = schedule.fresh = False
        schedule.sparsity, schedule.format = 0.0, lib.FORMATS[self._values]
        options = lib.initialised(lib.ModelOptions, "tagc_model_options_init")
        options.schedule.options = ctypes.pointer(schedule)
        options.n_threads = self._options.threads or 1
        options.formats.residual, options.formats.result = lib.RESIDUAL_NONE, self._result_format
        return options, {parameter.name: parameter.kind for parameter in parameters}, schedule


class Keys(Wrapped):
    """Of one Collectives. names: a model, or pairs of (name, parameter), or None."""

    name = "collectives"
    sums_within_hosts = True
    ends_with_backward = False
    shares_folder = False

    def __init__(self, group: dist.ProcessGroup, options: Settings, names: Any) -> None:
        self._group, self._options = group, options
        self.reduced: dict[str, Reduced] = {}
        self.gathered: dict[str, tuple[Use, AllGather]] = {}
        self._once: dict[Use, Reduced] = {}  # without a key
        named = _named(names)
        if options.rules is not None and named is None:
            raise Error(
                "argument", f"rules is {options.rules!r}, and names is None: give names, as of a model"
            )
        if options.gentle and named is None:
            raise Error("argument", f"gentle is True, and names is None: {_SCHEDULED}")
        if options.gentle and not options.sparsity:
            raise Error(
                "argument", "gentle is True, and sparsity is 0: every value is sent from the first call on"
            )
        self.rows = policy.classify(named or [], options.layers, options.rules)
        self.kinds = {row.name: row.class_ for row in self.rows}
        self._named, self._is_named = named or [], named is not None
        # what the schedule follows
        self._parameters = {
            row.name: layouts.Parameter(row.name, row.shape, row.class_)
            for row in self.rows
            if row.n_elems and options.sparsity > 0
        }
        # all calls, since these are as many on all ranks: the rounding of those without a key derives from it
        self.n_calls = 0
        self.n_backward: dict[str, int] = {}  # passes of all-to-alls; a recomputed forward is none
        # id of a tensor -> (the parameter, so that no other gets this id, or a reference to a tensor; name)
        self._names: dict[int, tuple[Any, str]] = {
            id(p): (p, row.name) for (_, p), row in zip(named or [], self.rows)
        }
        self._numbers: set[str] = set()  # names of tensors that came without one
        self._gone: list[str] = []  # those of which there is no more
        self.strings: set[str] = set()  # names that came as such

    # ---- names ----

    def name_of(self, key: Any) -> str:
        """Returns the name of a key; of a new one, that which it gets if all ranks agree. Local."""
        if isinstance(key, torch.Tensor):
            return self._name_of_tensor(key)
        if not isinstance(key, str) or not key:
            raise Error("argument", f"key is {key!r}, must be a parameter, a name or None")
        if not self._is_named and key not in self.strings and key in self._numbers:
            raise Error(
                "argument", f"key is {key!r}, which is the name of a parameter that came before: {_GIVE}"
            )
        if self._options.gentle and key not in self.kinds:
            raise Error(
                "argument", f"key is {key!r}, which names does not have, and gentle is True: {_SCHEDULED}"
            )
        return key

    def is_new(self, key: Any) -> bool:
        """Returns whether ranks must agree on the name of this key. With names, they have."""
        is_known = id(key) in self._names or isinstance(key, str) and key in self.strings
        return key is not None and not self._is_named and not is_known

    def know(self, key: Any, name: str) -> None:
        """Notes a new key. Call it when all ranks have agreed on it: the number of one that failed on a rank
        would be the number of another key there."""
        if isinstance(key, str):
            self.strings.add(name)
            return
        names, gone, number = self._names, self._gone, id(key)

        def forget(_: Any) -> None:
            del names[number]
            gone.append(name)

        held = key if isinstance(key, torch.nn.Parameter) else weakref.ref(key, forget)
        names[number] = held, name
        self._numbers.add(name)

    def _name_of_tensor(self, key: torch.Tensor) -> str:
        if id(key) not in self._names:
            shape = tuple(key.shape)
            if self._is_named:
                raise Error(
                    "argument", f"key is a tensor of shape {shape}, which names does not have: {_GIVE}"
                )
            if self._gone and not isinstance(key, torch.nn.Parameter):  # it cannot come again
                raise Error(
                    "argument",
                    f"key is a new tensor, of shape {shape}, and that of key {self._gone[0]} is gone, with "
                    "what it had not sent. Keep tensors that are keys; p.data and p.grad are new each time: "
                    "give the parameter p itself, or a string",
                )
            name = str(len(self._numbers))
            if name in self.strings:
                raise Error(
                    "argument",
                    f"key is a tensor of shape {shape}, number {name}, and {name!r} is a name that came "
                    f"before: {_GIVE}",
                )
            return name
        return self._names[id(key)][1]

    def kind_of(self, name: str, tensor: torch.Tensor) -> str:
        """Returns the class of a key: that of the parameter with that name. Others are compressed, unless
        they are too small for that to pay."""
        if name in self.kinds:
            return self.kinds[name]
        if self._options.layers == BY_NAME:
            return "compressed" if tensor.numel() >= policy.MIN_ELEMS else "dense"
        return policy.classify([(name, tensor)], self._options.layers)[0].class_

    # ---- all-to-alls, which keep nothing by key ----

    def name_of_tokens(self, key: Any) -> str:
        """Returns what messages and seeds call a key of all_to_all(). Local."""
        if key is None:
            return "None"
        if isinstance(key, str) and key:
            return key
        if isinstance(key, torch.Tensor) and self._is_named and id(key) in self._names:
            return self._names[id(key)][1]
        raise Error("argument", f"key of all_to_all() is {key!r}, must be a name, or None")

    def seed_of_tokens(self, name: str) -> int:
        """Returns that of the next gradient with this key: another in each pass, and on each rank of a host,
        since equal errors would not average out. Local."""
        self.n_backward[name] = n = self.n_backward.get(name, 0) + 1
        return token_seed(name, n, self.own_hosts().place)

    # ---- uses ----

    def find(self, name: str | None, use: Use, tensor: torch.Tensor, follower: Follower) -> Reduced:
        """Returns what reduces with that key; None: without one. Error if the key is for something else. A
        new one is not known before Collectives adds it."""
        if name is None:
            if use not in self._once:
                self._once[use] = self._made_once(use, follower)
            return self._once[use]
        if (reduced := self.reduced.get(name)) is not None:
            _check_use(name, reduced.use, use)
            return reduced
        return self.made(name, self.kind_of(name, tensor), use, follower)

    def find_gather(self, name: str | None, use: Use) -> AllGather | None:
        """Returns what gathers with that key; None: this is the first time, or there is no key. Error as
        find()."""
        if name is None or name not in self.gathered:
            return None
        known, gather = self.gathered[name]
        _check_use(name, known, use)
        return gather

    def _made_once(self, use: Use, follower: Follower) -> Reduced:
        words = f"a tensor of {use.n_elems} {use.dtype} without a key"
        kind, values = "dense", self._options.values
        is_coded = self._options.exchange == "direct" and values not in ("fp32", "bf16")
        if is_coded and use.n_elems >= policy.MIN_ELEMS:
            # there is no selection either: what is not sent would be lost
            kind, values = "compressed", values if values in AT_RANDOM else "int4"
            follower = _Once(values, use.collective == "all_reduce", self._options)
        parameter = layouts.Parameter(words, (use.n_elems,), kind)
        return Reduced(parameter, use, self.own_hosts(), follower)

    def made(self, name: str, kind: str, use: Use, follower: Follower) -> Reduced:
        known = self._parameters.get(name, layouts.Parameter(name, (), kind))
        parameter = known._replace(shape=(use.n_elems,))
        return Reduced(parameter, use, self.own_hosts(), follower)

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

    def levels(self) -> list[Any]:
        return super().levels() or self.groups()  # within one host ranks agree before torch's collectives

    def deciders(self) -> list[dist.ProcessGroup] | None:
        return super().deciders() if self._options.gentle else []

    def before_meeting(self, comm: Callable[[Any], Comm], step: int) -> None:
        """Makes ranks agree that they end a step, which the caller's own calls do."""
        self.agree(comm, f"the end of step {step}", {})

    def agree(
        self, comm: Callable[[Any], Comm], what: str, numbers: Mapping[str, Any], failure: Error | None = None
    ) -> None:
        """Does what Comm.agree() does, over all ranks. comm(group) -> tagc's connection. Collective."""
        agree_in_turn([comm(level) for level in self.levels()], what, numbers, failure)

    def place(self) -> Place:
        hosts, place = self.own_hosts(), place_of(dist.get_process_group_ranks(self._group))
        if not hosts.is_two_level:
            return place
        return Place(hosts.host, hosts.n_hosts, place.where, hosts.place, hosts.per_host, self.name)

    def parameters(self) -> list[layouts.Parameter]:
        return list(self._parameters.values())

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [(row.name, tensor) for row, (_, tensor) in zip(self.rows, self._named)]

    def set_kinds(self, kinds: Kinds) -> None:
        for name, fields in kinds.items():
            self._parameters[name] = self._parameters[name]._replace(**fields)
            if name in self.reduced:
                self.reduced[name].change(fields)

    def about(self) -> dict[str, Any]:
        reduced = {name: dataclasses.astuple(one.use) for name, one in self.reduced.items()}
        gathered = {name: dataclasses.astuple(use) for name, (use, _) in self.gathered.items()}
        kinds = {name: one.parameter.kind for name, one in self.reduced.items()}
        named = [name for name in {**reduced, **gathered} if name in self.kinds]
        kept = [name for name, kind in kinds.items() if self._options.feeds_back(kind)]
        keys = {"reduced": reduced, "gathered": gathered, "kinds": kinds, "named": named, "kept": kept}
        return {"keys": keys | {"without": self.n_calls, "backward": dict(self.n_backward)}}

    def check_names(self) -> None:
        """Raises Error unless a resumed run calls each key by the name that it has here. Local."""
        if self._numbers:
            raise Error(
                "state",
                "state_dict(): there are keys that are tensors without names: their numbers follow the order "
                f"of first use, which may be another in a resumed run: give names=model, or {_GIVE}",
            )

    def check_saved(self, saved: Saved) -> None:
        """Raises Error unless these keys of a checkpoint fit. Local."""
        for name in saved.named:
            if name not in self.kinds:
                raise Error(
                    "argument",
                    f"tagc state: key {name} was of names, "
                    + ("which does not have it here" if self._is_named else "and names is None here")
                    + ": give the names that saved it",
                )
        known = {name: one.use for name, one in self.reduced.items()}
        for name, use in saved.reduced.items():
            if (first_use := known.get(name, use)) != use:
                raise Error("argument", f"tagc state: key {name}: {use}; its first call here was {first_use}")
        self.strings |= {self.name_of(name) for name in {**saved.reduced, **saved.gathered}}

    def deltas(self) -> dict[str, AllGather]:
        return {name: gather for name, (_, gather) in self.gathered.items() if gather.is_delta}


_GIVE = "give it a name of its own, a string"
_SCHEDULED = "the schedule follows the keys that names has, such as names=model"


def token_seed(name: str, n: int, place: int) -> int:
    """Returns that of the gradient of the n-th backward pass with this key, on a rank of that place."""
    return zlib.crc32(name.encode()) << 32 | zlib.crc32(f"{n} {place}".encode())


def _check_use(name: str, known: Use, use: Use) -> None:
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
