"""The schedule of one model: what each parameter may send now, and how long its Adam's moments are to be.

libtagc decides (include/tagc/schedule.h explains the rules). This file hands it samples of gradients and
losses, adds sums over ranks, and turns names into numbers and back."""

from __future__ import annotations

import base64
import binascii
import ctypes
import itertools
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.interfaces import Wrapped
from tagc.torch.exchange.layout import Parameter
from tagc.torch.schedule.adapt import Memory
from tagc.torch.schedule.options import Settings, constants

FRESH, EVERY, LARGEST, LAST = (lib.LEVELS[level] for level in ("fresh", "every", "largest", "last"))
# what the optimizer has of a first moment
STAYS, SHORTENS, NONE = (lib.MOMENTS[moment] for moment in ("stays", "shortens", "none"))
_FORMATS = {number: name for name, number in lib.FORMATS.items()}


class Plan(NamedTuple):
    """What a parameter may send, and how long its moments are to be: tagc_schedule_plan."""

    level: int
    values: str
    block: int
    sparsity: float
    moment: float
    n_selected: int


class Schedule:
    """Of one model. All its ranks decide alike, because they decide from sums over all of them: in meet(),
    where every exchange is over all ranks, else in pool(). (Without a way to add up over all ranks, those
    that exchange a parameter decide on it.)"""

    def __init__(self, wrapper: Wrapped, options: Settings, is_fresh: bool = False) -> None:
        """is_fresh: whether the model has random weights; the same on all ranks."""
        self._wrapper, self._options, self._is_fresh = wrapper, options, is_fresh
        self._has_levels = {p.name: options.has_levels(p.kind) for p in wrapper.parameters()}
        self._kinds = {
            p.name: p.kind for p in wrapper.parameters() if p.numel and options.is_scheduled(p.kind)
        }
        self._names = list(self._kinds)
        self._numbers = {name: i for i, name in enumerate(self._names)}
        self._groups: dict[tuple[int, ...], int] = {}  # ranks -> their number
        self.pools = bool(wrapper.deciders())  # whether pool() is to be called
        self._seen: dict[int, lib.ScheduleSums] = {}  # number of a parameter -> sums that wait for pool()
        self._noted: list[tuple[Comm, dict[int, lib.ScheduleSums]]] = []  # likewise, for meet()
        self.moments = dict.fromkeys(self._kinds, STAYS)
        self.epoch = 0  # counts what may change a plan
        # of this rank, not handed over yet: reading one may wait for a device
        self._losses: list[torch.Tensor] = []
        sizes = {p.name: p.n_whole or p.numel for p in wrapper.parameters()}
        self._handle = _made(self._kinds, sizes, options, is_fresh)
        self._put()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            lib.load().tagc_schedule_destroy(self._handle)

    # ---- what was decided ----

    def plan(self, weights: Mapping[str, int]) -> Plan:
        """Returns the plan of parameters that are exchanged as one. weights: name -> elements in this
        exchange."""
        n, plan = len(weights), lib.SchedulePlan()
        lib.call(
            "tagc_schedule_get_plan",
            self._handle,
            (ctypes.c_uint32 * n)(*(self._numbers[name] for name in weights)),
            (ctypes.c_uint64 * n)(*weights.values()),
            n,
            ctypes.byref(plan),
        )
        return Plan(
            plan.level, _FORMATS[plan.format], plan.block, plan.sparsity, plan.moment, plan.n_selected
        )

    def levels(self) -> dict[str, int]:
        """Returns name -> level, of all parameters that have levels."""
        return {name: self.plan({name: 1}).level for name in self._names if self._has_levels[name]}

    def model_options(
        self, parameters: Sequence[Parameter], dtype: torch.dtype
    ) -> tuple[lib.ModelOptions, dict[str, str], object]:
        """Returns what model.Follower says."""
        options = lib.initialised(lib.ModelOptions, "tagc_model_options_init")
        fields = _fields_of(self._options, self._is_fresh)
        options.schedule.options = ctypes.pointer(fields)
        options.exchange, options.n_threads = (
            lib.EXCHANGES.get(self._options.exchange, lib.EXCHANGES["direct"]),  # of dense, nothing is
            self._options.threads or 1,
        )
        if dtype == torch.bfloat16:
            options.formats.dense = lib.FORMATS["bf16"]
        options.formats.residual = self._options.stored().get("residual", -1)
        numbers = (ctypes.c_uint32 * len(parameters))(*(self._numbers.get(p.name, 0) for p in parameters))
        kinds = {p.name: p.kind if self._options.is_scheduled(p.kind) else "dense" for p in parameters}
        # keys without names have no levels, and are none of its parameters
        if all(kinds[p.name] == "dense" or p.name in self._numbers for p in parameters):
            options.schedule.follows, options.schedule.numbers = self._handle, numbers
        return options, kinds, (fields, numbers)

    def memories(self) -> dict[str, Memory]:
        """Returns how long moments are to be, of every parameter whose Adam should have betas of its own."""
        plans = {name: self.plan({name: 1}) for name in self._names}
        memories = {name: Memory(plan.moment, plan.n_selected) for name, plan in plans.items()}
        return {name: memory for name, memory in memories.items() if memory != Memory()}

    def take_alarms(self) -> list[str]:
        """Returns a message for each reason for which parameters have begun anew since the last call."""
        alarms, n, text = (
            (lib.Alarm * lib.N_ALARM_KINDS)(),
            ctypes.c_size_t(),
            ctypes.create_string_buffer(1024),
        )
        lib.load().tagc_schedule_take_alarms(self._handle, alarms, ctypes.byref(n))
        said = []
        for alarm in alarms[: n.value]:
            lib.load().tagc_schedule_alarm_text(self._handle, ctypes.byref(alarm), text, len(text))
            said.append(text.value.decode(errors="replace"))
        return said

    def __str__(self) -> str:
        named = [name for name in self._names if self._has_levels[name]]
        trained = {name for name, tensor in self._wrapper.named_parameters() if tensor.requires_grad}
        shares: dict[tuple[str, str], list[float]] = {}  # (class, how) -> sparsities
        for name in [name for name in named if name in trained] or named:
            plan = self.plan({name: 1})
            how = f"zero, {plan.values}" if plan.sparsity else f"every value in {plan.values}"
            shares.setdefault((self._kinds[name], how), []).append(plan.sparsity)
        return ", ".join(
            f"{kind}: {_percent(sparsities) + how if max(sparsities) else how}"
            for (kind, how), sparsities in sorted(shares.items())
        )

    def words(self, deciding: Collection[str], is_known: bool) -> str:
        """Returns how training begins, for the table. deciding: names of those by whose moment it goes on.
        is_known: whether tagc knows the optimizer."""
        names = [name for name in deciding if self._has_levels[name]]
        if not names:
            return ""
        first = "every value travels in 4 bits"
        if any(self.plan({name: 1}).level == FRESH for name in names):
            n = constants().window * constants().fresh_windows
            first = f"every value travels in 8 bits for {n} exchanges, then in 4 bits"
        if {self.moments[name] for name in names} == {STAYS}:
            if is_known:
                return f"\nat first {first}; it stays so with this optimizer"
            return (
                f"\nat first {first}; it stays so until tagc knows the optimizer, since selection costs loss "
                "where the optimizer keeps a long mean of gradients.\nWith compress(model, optimizer), a "
                "parameter goes on to the above when its gradient is mostly noise"
            )
        return f"\nat first {first}; a parameter goes on to the above when its gradient is mostly noise"

    # ---- what it decides from ----

    def set_moments(self, can_shorten: Iterable[str], never_long: Iterable[str]) -> None:
        """Names: whose first moment tagc can shorten, and which has none or a short one. The others keep
        theirs."""
        can, none = set(can_shorten), set(never_long)
        self.moments = {
            name: NONE if name in none else SHORTENS if name in can else STAYS for name in self.moments
        }
        for name, moment in self.moments.items():
            lib.call("tagc_schedule_set_moment", self._handle, self._numbers[name], moment)
        self.epoch += 1

    def watch_loss(self, loss: float | torch.Tensor) -> None:
        if not isinstance(loss, (int, float, torch.Tensor)) or isinstance(loss, bool):
            raise Error("argument", f"loss is {loss!r}, must be a number or a tensor")
        if self._kinds:
            self._losses.append(torch.as_tensor(loss).detach().float().mean())

    def keep(self, comm: Comm, sums: dict[int, lib.ScheduleSums]) -> None:
        """Keeps this rank's sums of windows that are full, until meet() or pool(). comm: over which the
        exchange is."""
        if self.pools:
            self._seen |= sums
        else:
            self._noted.append((comm, sums))

    def is_met(self, n_steps: int) -> bool:
        """Returns whether the end of that step has sums over ranks."""
        return bool(self._noted) or self.pools and n_steps % constants().window == 0

    def meet(self) -> int:
        """Adds up over ranks what was noted since the last call, where pool() is not to be called.
        Collective: call it at the end of a step. Returns the bytes that this rank sent."""
        noted, self._noted, n_bytes = self._noted, [], 0
        for comm, sums in noted:
            losses = self._take_losses()
            pooled = _pooled(comm, [losses.sum, losses.squares, losses.n, *_numbers(sums.values())])
            group = self._groups.setdefault(tuple(comm.ranks), len(self._groups))
            self._see(list(sums), pooled, group)
            n_bytes += 8 * len(pooled) * (comm.world_size - 1)
        return n_bytes

    def drop(self) -> None:
        """Drops what was noted in a pass that failed."""
        self._noted = []

    def pool(self, comms: Sequence[Comm]) -> int:
        """Adds up what all ranks have seen since the last call. comms: of the deciders. Collective: call it
        after the same exchanges on all ranks. Returns the bytes that this rank sent."""
        if not self._names:
            return 0
        losses, share = self._take_losses(), self._wrapper.n_batches() / self._wrapper.n_ranks()
        pooled = [share * losses.sum, share * losses.squares, share * losses.n]
        for number in range(len(self._names)):
            seen = self._seen.get(number)
            pooled += [0.0 if seen is None else 1.0, *_numbers([seen or lib.ScheduleSums()])]
        self._seen, n_bytes = {}, 0
        for comm in comms:
            pooled = _pooled(comm, pooled)
            n_bytes += 8 * len(pooled) * (comm.world_size - 1)
        n = 1 + len(lib.ScheduleSums._fields_)
        rows = [pooled[at : at + n] for at in range(3, len(pooled), n)]
        full = [number for number, row in enumerate(rows) if row[0]]
        self._see(full, pooled[:3] + [value for number in full for value in rows[number][1:]], 0)
        return n_bytes

    def _take_losses(self) -> lib.ScheduleLosses:
        losses, self._losses = self._losses, []
        for loss in losses:
            lib.load().tagc_schedule_add_loss(self._handle, loss.item())
        taken = lib.ScheduleLosses()
        lib.load().tagc_schedule_take_losses(self._handle, ctypes.byref(taken))
        return taken

    def _see(self, full: list[int], pooled: list[float], group: int) -> None:
        losses = lib.ScheduleLosses(*pooled[:3])
        lib.call("tagc_schedule_see_losses", self._handle, ctypes.byref(losses))
        n_fields = len(lib.ScheduleSums._fields_)
        sums = (lib.ScheduleSums * len(full))(
            *(lib.ScheduleSums(*pooled[at : at + n_fields]) for at in range(3, len(pooled), n_fields))
        )
        lib.call(
            "tagc_schedule_see", self._handle, (ctypes.c_uint32 * len(full))(*full), len(full), sums, group
        )
        self.epoch += 1

    def step(self) -> bool:
        """Ends an exchange of the whole model. Returns whether all parameters have just come to their last
        level."""
        changed, is_through = ctypes.c_int(), ctypes.c_int()
        lib.call("tagc_schedule_step", self._handle, ctypes.byref(changed), ctypes.byref(is_through))
        if changed.value:
            self._put()
        return bool(is_through.value)

    def scale(self, factor: float) -> None:
        """Multiplies what is known of gradients, which are multiplied with that from now on."""
        lib.call("tagc_schedule_scale", self._handle, factor)
        for sums in itertools.chain(self._seen.values(), *(own.values() for _, own in self._noted)):
            for field in ("square", "residual", "gradient"):
                setattr(sums, field, getattr(sums, field) * factor**2)

    def _put(self) -> None:
        """Gives every parameter its level, and its sparsity, by which ranks notice that they differ."""
        plans = {name: self.plan({name: 1}) for name in self._names if self._has_levels[name]}
        self._wrapper.set_kinds(
            {
                p.name: {"level": plans[p.name].level, "sparsity": plans[p.name].sparsity}
                if p.name in plans
                else {"level": LAST, "sparsity": 0.0}
                for p in self._wrapper.parameters()
            }
        )

    # ---- in checkpoints ----

    def state(self, with_windows: bool = True) -> dict[str, Any]:
        """Returns {"schedule": the state as text, "pending": {name: sums of a full window that wait for
        pool()}}, or {} without levels. with_windows: False where another rank takes it over."""
        if not any(self._has_levels.values()):
            return {}
        for loss in self._losses:
            lib.load().tagc_schedule_add_loss(self._handle, loss.item())
        self._losses, n = [], ctypes.c_size_t()
        lib.call("tagc_schedule_save", self._handle, with_windows, None, 0, ctypes.byref(n))
        text = ctypes.create_string_buffer(n.value)
        lib.call("tagc_schedule_save", self._handle, with_windows, text, n, ctypes.byref(n))
        pending = {self._names[number]: _numbers([sums]) for number, sums in self._seen.items()}
        return {"schedule": base64.b64encode(text.raw).decode()} | (
            {"pending": pending} if pending and with_windows else {}
        )

    def load(self, about: Mapping[str, Any], with_windows: bool) -> tuple[str, int]:
        """Loads a schedule. about: of a checkpoint; one without is of a run without levels. Returns (name of
        the first, number) of the parameters whose first moment was short, and is not known to be so here:
        these begin anew, and with them all that is not compressed."""
        if not any(self._has_levels.values()):
            return "", 0
        saved = base64.b64decode(about["schedule"]) if "schedule" in about else _empty(self._options)
        n, first = ctypes.c_size_t(), ctypes.c_size_t()
        lib.call(
            "tagc_schedule_load",
            self._handle,
            saved,
            len(saved),
            with_windows,
            ctypes.byref(n),
            ctypes.byref(first),
        )
        self._losses, self._seen, self._noted = [], {}, []
        if with_windows and self.pools:
            self._seen = {
                self._numbers[name]: lib.ScheduleSums(*numbers)
                for name, numbers in about.get("pending", {}).items()
                if name in self._numbers
            }
        self.epoch += 1
        self._put()
        return (self._names[first.value], n.value) if n.value else ("", 0)


def fits(about: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint's schedule, if it has one, is one."""
    if "schedule" not in about:
        return True
    schedule = None
    try:
        saved = base64.b64decode(about["schedule"], validate=True)
        schedule = _made({}, {}, Settings())
        lib.call("tagc_schedule_load", schedule, saved, len(saved), True, None, None)
        for numbers in about.get("pending", {}).values():
            lib.ScheduleSums(*numbers)
            if len(numbers) != len(lib.ScheduleSums._fields_):
                return False
        return True
    except (AttributeError, Error, TypeError, ValueError, binascii.Error):
        return False
    finally:
        if schedule is not None:
            lib.load().tagc_schedule_destroy(schedule)


def _made(
    kinds: Mapping[str, str], sizes: Mapping[str, int], options: Settings, is_fresh: bool = False
) -> ctypes.c_void_p:
    """Returns a new tagc_schedule. kinds: name -> class."""
    fields = _fields_of(options, is_fresh)
    parameters = (lib.ScheduleParameter * len(kinds))(
        *(lib.ScheduleParameter(name.encode(), sizes[name], kind == "mild") for name, kind in kinds.items())
    )
    handle = ctypes.c_void_p()
    lib.call("tagc_schedule_create", ctypes.byref(fields), parameters, len(kinds), ctypes.byref(handle))
    return handle


def _fields_of(options: Settings, is_fresh: bool) -> lib.ScheduleOptions:
    fields = lib.initialised(lib.ScheduleOptions, "tagc_schedule_options_init")
    fields.gentle, fields.fresh = options.gentle, is_fresh
    fields.sparsity, fields.format = options.sparsity, lib.FORMATS[options.values]
    fields.mild_sparsity, fields.mild_format = options.mild_levels()
    return fields


def _empty(options: Settings) -> bytes:
    """Returns the state of a schedule without parameters: what it lacks is at its last level."""
    schedule, n, text = _made({}, {}, options), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    lib.call("tagc_schedule_save", schedule, False, text, len(text), ctypes.byref(n))
    lib.load().tagc_schedule_destroy(schedule)
    return text.raw[: n.value]


def _percent(shares: Collection[float]) -> str:
    """Returns "95 % ", or where they differ "80 to 99 % "."""
    least, most = (f"{100 * share:.3g}" for share in (min(shares), max(shares)))
    return f"{least} % " if least == most else f"{least} to {most} % "


def _numbers(sums: Iterable[lib.ScheduleSums]) -> list[float]:
    return [getattr(one, name) for one in sums for name, *_ in lib.ScheduleSums._fields_]


def _pooled(comm: Comm, numbers: Sequence[float]) -> list[float]:
    """Returns the sums over ranks of numbers, of which every rank has as many. Collective."""
    layout = f"={len(numbers)}d"
    everyone = [struct.unpack(layout, data) for data in comm.all_gather(struct.pack(layout, *numbers))]
    return [sum(values) for values in zip(*everyone)]
