"""What an optimizer makes of compressed gradients, and how the moments of an Adam change for them.

Error feedback sums gradients over exchanges already, and an Adam's first moment delays once more what has
waited in the residual. With beta1 = 0.9 that costs loss. With 0 it costs none in most models and a lot in
some, whose steps are so large that only a mean of gradients keeps them from oscillating; and a model that has
just begun to learn needs all of it. So beta1 becomes short before selection begins, parameter by parameter:
lab/docs/first-try.md has the runs.

Where values are selected, the second moment has a longer memory: include/tagc/schedule.h says why.

It does so inside the optimizer's step() alone, which gets groups that are split. A scheduler, a checkpoint or
a loop that sets learning rates sees the groups that it knows, at any time."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange import internals
from tagc.torch.schedule.options import Settings, constants, defaults

Group = dict[str, Any]  # of an optimizer


# Class names of Adams, the optimizer's own or a base class's: fused, 8-bit and paged ones, too.
_ADAM = re.compile(r"^_?(Paged|Fused|CPU|DeepSpeedCPU)?[NR]?Adam(W|_?Base)?(_?(4|8|32)bit|Fp8)?$")


# Whose momentum goes on with selection at no cost that lab/studies/torch_optimizers.py shows: a sum
# of gradients, or a sign of it.
_KEEPS_PACE = ("SGD", "SGD8bit", "PagedSGD8bit", "Lion", "Lion8bit", "PagedLion8bit")


def inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Returns the torch optimizers behind `optimizer`: a list of several, or a trainer's wrapper around one
    or more."""
    if (
        isinstance(optimizer, (list, tuple))
        or not isinstance(optimizer, torch.optim.Optimizer)
        and hasattr(optimizer, "optimizers")
    ):
        several = getattr(optimizer, "optimizers", optimizer)
        return [one for entry in several for one in inner(entry)]
    for name in ("optimizer", "optimizers"):  # accelerate, Lightning; torchtitan
        wrapped = getattr(optimizer, name, None)
        if isinstance(wrapped, (list, tuple, torch.optim.Optimizer)):
            return inner(wrapped)
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise Error(
            "argument",
            f"optimizer is a {type(optimizer).__name__}, must be a torch.optim.Optimizer, or a list of them",
        )
    return [optimizer]


def stepper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns what steps the parameters on this rank: within a ZeroRedundancyOptimizer, whose groups have
    those of all ranks, an optimizer of the user's class for this rank's share."""
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        return getattr(optimizer, "optim", optimizer)  # made late where it overlaps with DDP
    return optimizer


def name_of(optimizer: torch.optim.Optimizer) -> str:
    stepping, name = type(stepper(optimizer)).__name__, type(optimizer).__name__
    return name if stepping == name else f"{name} of {stepping}"


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether its first moment is what betas[0] says."""
    names = [cls.__name__ for cls in type(stepper(optimizer)).__mro__]
    if any("ScheduleFree" in name for name in names) or not any(_ADAM.match(name) for name in names):
        return False
    return all(_is_pair(group.get("betas")) for group in optimizer.param_groups)


class Memory(NamedTuple):
    """How long the moments of a parameter are, as a plan of the schedule says."""

    moment: float = 1.0  # how much of the user's first moment is left; 0: it is short
    n_selected: int = 0  # updates whose values were selected; 0: the user's beta2

    def betas(self, given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Returns what becomes of betas that the user gave. Those that are tensors remain such."""
        numbers = ctypes.c_double(), ctypes.c_double()
        lib.load().tagc_schedule_betas(
            None, self.moment, self.n_selected, *map(_number, given), *map(ctypes.byref, numbers)
        )
        made = [
            torch.full_like(beta, value.value) if isinstance(beta, torch.Tensor) else value.value
            for beta, value in zip(given, numbers)
        ]
        return made[0], made[1]


SHORT = Memory(0.0)
# id of a tensor on a device -> it, its version, its value
_read: dict[int, tuple[weakref.ref[torch.Tensor], int, float]] = {}


def _number(beta: Any) -> float:
    """Returns a beta as a number. Reading a tensor on a device waits for it, so that happens once."""
    if not isinstance(beta, torch.Tensor) or beta.device.type == "cpu":
        return float(beta)
    known = _read.get(id(beta))
    if known is None or known[0]() is not beta or known[1] != internals.n_changes(beta):
        _read[id(beta)] = known = (weakref.ref(beta), internals.n_changes(beta), float(beta))
    return known[2]


def doubled(n: float) -> int:
    """Returns the largest of 20, 40, 80, ... up to n, or 0: an optimizer then seldom has to take up another
    beta2."""
    first = constants().window
    return first << (int(n) // first).bit_length() - 1 if n >= first else 0


def is_short(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Returns whether steps of that group are of the gradient that comes, or of a mean that is short
    enough."""
    name = type(stepper(optimizer)).__name__
    if name in (*_KEEPS_PACE, "RMSprop"):
        return group.get("momentum") == 0
    if name == "Adafactor":  # torch's has none, transformers' none unless it gets a beta1
        return group.get("beta1") is None
    return name == "Adagrad" or is_adam(optimizer) and group["betas"][0] <= defaults().short_beta1


def _is_pair(betas: object) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(betas, (tuple, list)) and len(betas) == 2


def may_keep_it(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Returns whether selection works with the first moment of that group, if it has one."""
    return type(stepper(optimizer)).__name__ in _KEEPS_PACE or is_short(optimizer, group)


def traits(optimizer: torch.optim.Optimizer, group: Group) -> tuple[bool, bool]:
    """Returns what kinds() looks at."""
    return may_keep_it(optimizer, group), is_adam(optimizer)


def kinds(
    optimizers: Iterable[torch.optim.Optimizer], compressed: Mapping[int, str]
) -> tuple[set[str], set[str]]:
    """Returns ({names of compressed parameters whose first moment can become short}, {names of those that go
    on as they are})."""
    can: set[str] = set()
    none: set[str] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            names = {
                compressed[id(parameter)] for parameter in group["params"] if id(parameter) in compressed
            }
            if may_keep_it(optimizer, group):
                none |= names
            elif is_adam(optimizer):
                can |= names
    return can, none


def stepped(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Returns ids of all parameters that these have."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def check_complete(optimizers: Iterable[torch.optim.Optimizer], compressed: Mapping[int, str]) -> None:
    missing = compressed.keys() - stepped(optimizers)
    if missing:
        name = min(compressed[key] for key in missing)
        if len(missing) == len(compressed):
            raise Error(
                "argument",
                f"the optimizer has none of the parameters that tagc compresses, such as {name}: it has "
                "those of another model, or it was made before wrapping. fully_shard() replaces the "
                "parameters: make the optimizer after it",
            )
        raise Error(
            "argument",
            f"the optimizer lacks {len(missing)} of the {len(compressed)} parameters that tagc compresses, "
            f"such as {name}: give a list of all optimizers that share them, or freeze what none of them "
            "steps (requires_grad_(False)) before compress()",
        )


def words(
    optimizers: Iterable[torch.optim.Optimizer],
    compressed: Mapping[int, str],
    options: Settings,
    shortens: bool = True,
) -> str:
    """Returns what is done about each. shortens: False where beta1 stays, as of attention alone."""
    lines = []
    for optimizer in optimizers:
        can, none = kinds([optimizer], compressed)
        n = sum(id(p) in compressed for group in optimizer.param_groups for p in group["params"])
        name = name_of(optimizer)
        if not n:
            continue
        if can:
            if not shortens:
                lines.append(f"{name}: beta2 is nearer to 1 where values are selected")
                continue
            when = (
                ", once a gradient is mostly noise; beta2 is nearer to 1 where values are selected"
                if options.gentle
                else ""
            )
            lines.append(f"{name}: beta1 is {defaults().short_beta1:g} for what is compressed{when}")
        elif none:
            is_so = is_short(optimizer, optimizer.param_groups[0])
            why = (
                "it has no first moment, or a short one" if is_so else "selection works with its first moment"
            )
            lines.append(f"{name}: tagc leaves it as it is, because {why}")
        else:
            lines.append(
                f"{name}: tagc leaves it as it is"
                + (", and sends every value of its parameters in 4 bits" if options.gentle else "")
            )
    return "\n".join(lines)


class OwnBetas:
    """Of one Adam: its steps update some parameters with betas of their own. All handles whose parameters it
    has share this object. A step runs on a stand-in, which is the optimizer but for its groups: they are
    split, and the user's are not touched. So nothing is to be put back, also when a step fails."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Use of()."""
        self._memories: list[Mapping[int, Memory]] = []  # of each handle, by ids of parameters
        self._groups: list[Group] = []  # of the stand-in, in a step
        # those of the user's that have a part, (theirs, the part, what it was before the step)
        self._parts: list[tuple[Group, Group, Group]] = []
        # id of a parameter -> doubled() of the updates that its moments are known to have seen
        self._counts: dict[int, int] = {}
        kind, itself = type(optimizer), weakref.ref(self)

        def groups(_: torch.optim.Optimizer) -> list[Group]:
            betas = itself()
            return [] if betas is None else betas._groups

        self._stand_in: type[torch.optim.Optimizer] = type(
            kind.__name__, (kind,), {"param_groups": property(groups), "__module__": kind.__module__}
        )
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(lambda optimizer, *_: self._end(optimizer)),
            # what is loaded may have seen fewer updates
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._counts.clear()),
        ]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, memories: Mapping[int, Memory]) -> Callable[[], None]:
        """Steps the parameters whose ids `memories`, which may change, has with betas of their own, until
        what it returns is called."""
        if optimizer not in _own_betas:
            _own_betas[optimizer] = OwnBetas(optimizer)
        itself, betas = weakref.ref(optimizer), _own_betas[optimizer]
        betas._memories.append(memories)

        def remove() -> None:
            betas._memories = [known for known in betas._memories if known is not memories]
            if betas._memories:
                return
            for hook in betas._hooks:
                hook.remove()
            if (optimizer := itself()) is not None and _own_betas.get(optimizer) is betas:
                del _own_betas[optimizer]

        return remove

    def _begin(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if isinstance(optimizer, self._stand_in):  # a step() calls that of a base class
            return None
        self._split(optimizer)
        if not self._parts:
            return None
        stand_in = object.__new__(self._stand_in)
        object.__setattr__(stand_in, "__dict__", optimizer.__dict__)
        return (stand_in, *args[1:]), kwargs

    def _split(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups, self._parts, others = [], [], []
        for group in optimizer.param_groups:
            parts: dict[Memory, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                parts.setdefault(self._memory(optimizer, parameter), []).append(parameter)
            if not parts or parts.keys() == {Memory()}:
                self._groups.append(group)
                continue
            # the first part counts for the group: a tensor may be a counter that a step adds to
            for i, memory in enumerate(sorted(parts)):
                part = group if i == 0 else _copied(group)
                part = {**part, "params": parts[memory], "betas": memory.betas(group["betas"])}
                if i > 0:
                    others.append(part)
                    continue
                self._groups.append(part)
                self._parts.append((group, part, dict(part)))
        self._groups += others

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes over what the step has set in groups."""
        if isinstance(optimizer, self._stand_in):
            return
        for group, part, before in self._parts:
            group.update({key: part[key] for key in part if part[key] is not before.get(key, part)})
        self._groups, self._parts = [], []

    def _memory(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Memory:
        """Returns the memory of a parameter. An exchange is not always an update: micro-batches may be
        exchanged one by one, and a parameter may have had no gradient."""
        key = id(parameter)
        memory = next((memories[key] for memories in self._memories if key in memories), Memory())
        count = self._counts.get(key, 0)
        if count < memory.n_selected:
            step = optimizer.state.get(parameter, {}).get("step", memory.n_selected)
            if isinstance(step, torch.Tensor) and step.is_cuda:  # looking would wait for the device
                return memory
            self._counts[key] = count = doubled(float(step))
        return memory._replace(n_selected=min(memory.n_selected, count))


_own_betas: weakref.WeakKeyDictionary[torch.optim.Optimizer, OwnBetas] = weakref.WeakKeyDictionary()


def _copied(group: Group) -> Group:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}


# ---- groups for an optimizer that is made after compress() ----


def split_groups(
    groups: Iterable[Group],
    compressed: Collection[int],
    betas: tuple[float, float] | None,
    options: Mapping[str, Any],
) -> tuple[list[Group], dict[int, tuple[Any, Any] | None]]:
    """Splits each group with compressed parameters (ids) and others in two, the first with a short first
    moment. Returns (groups, {id of a compressed parameter: the betas that its group has from the user, None:
    none})."""
    split: list[Group] = []
    given: dict[int, tuple[Any, Any] | None] = {}
    for group in _checked_groups(groups):
        group = {**({} if betas is None else {"betas": betas}), **options, **group}
        own_betas = group.get("betas")
        if own_betas is not None and not _is_pair(own_betas):
            raise Error("argument", f"betas is {own_betas!r}, must be two numbers, as in (0.9, 0.999)")
        with_short = [parameter for parameter in group["params"] if id(parameter) in compressed]
        others = [parameter for parameter in group["params"] if id(parameter) not in compressed]
        short = SHORT.betas(own_betas or (defaults().short_beta1, 0.999))
        split += [{**group, "params": with_short, "betas": short}] if with_short else []
        split += [{**group, "params": others}] if others else []
        given |= dict.fromkeys(map(id, with_short), own_betas)
    return split, given


class Awaited:
    """Until the first step of the optimizers that groups of split_groups() went to. An Adam gets its own
    beta2 where the user gave none; one that is not an Adam gets its own betas back, or the user's.
    on_known(optimizer) is called for each."""

    def __init__(
        self,
        given: Mapping[int, tuple[Any, Any] | None],
        kept: Collection[int],
        on_known: Callable[[torch.optim.Optimizer], object],
    ) -> None:
        """kept: ids of parameters whose groups keep their betas."""
        self._given, self._on_known = given, on_known
        self._waiting = {*given, *kept}
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._look(optimizer))

    def remove(self) -> None:
        self._hook.remove()

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        # the hook stays until remove(): torch walks through all models' hooks, and none may go meanwhile
        if not self._waiting:
            return
        is_known = False
        for group in optimizer.param_groups:
            waiting = self._waiting.intersection(map(id, group["params"]))
            if not waiting:
                continue
            is_known = True
            self._waiting -= waiting
            if not (split := waiting & self._given.keys()):
                continue
            betas = self._given[min(split)] or optimizer.defaults.get("betas")
            if betas is None:
                group.pop("betas", None)
            else:
                group["betas"] = SHORT.betas(betas) if is_adam(optimizer) else betas
        if is_known:
            self._on_known(optimizer)


def _checked_groups(groups: Iterable[Any]) -> Iterator[Group]:
    for group in groups:
        if not isinstance(group, dict) or "params" not in group:
            what = list(group) if isinstance(group, dict) else type(group).__name__
            raise Error(
                "argument",
                f"groups: one is {what}, each must be a dict with 'params', as optimizers take them",
            )
        params = group["params"]
        yield {**group, "params": [params] if isinstance(params, torch.Tensor) else list(params)}
