"""What happens beside the script: torch's two global hooks see the first training pass of each wrapped model,
and the first step of each optimizer.

    forward pre-hook           a wrapped model trains: hosts_of(), advise(), compress(), handle.adapt() with
                               the optimizers that it has by then, residuals taken up again
    optimizer step pre-hook    another optimizer steps with a model's parameters: handle.adapt(). If step()
                               calls the first pass itself, as Lightning's, the model is compressed now

The order of models, and so everything collective, is the script's: the same on all ranks."""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tagc.torch as tagc
from tagc.run.checkpoints import Checkpoints, is_training

WRAPPERS = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)


def say(text: str) -> None:
    """Prints a line, on the first rank. Local; also before torch.distributed is initialised."""
    if os.environ.get("RANK", "0") == "0":
        print(f"tagc run: {text}", flush=True)


@dataclasses.dataclass
class Settings:
    """What the command line says."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of compress()
    is_off: bool = False
    asks_advice: bool = False
    counts_ranks: bool = False  # as hosts, where all are on one
    record: str | None = None


class Model:
    """One compressed model. It keeps neither the model nor its handle alive."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = weakref.ref(root)
        self.name = type(getattr(root, "module", root)).__name__
        self.adapted: set[int] = set()  # groups of optimizers that have been looked at, by identity
        self.n_exchanges = self.n_bytes_sent = self.n_bytes_dense = 0
        self._handle: weakref.ref[tagc.Compressed] | None = None

    def compress(self, root: torch.nn.Module, options: dict[str, Any]) -> tagc.Compressed:
        handle = tagc.compress(root, on_step=self._count, **tagc.grouped(options))
        self._handle = weakref.ref(handle)
        return handle

    @property
    def handle(self) -> tagc.Compressed | None:
        handle = None if self._handle is None else self._handle()
        return None if handle is None or handle.is_closed else handle

    def _count(self, stats: dict[str, Any]) -> None:
        self.n_exchanges += 1
        self.n_bytes_sent += stats["bytes_sent"]
        self.n_bytes_dense += stats["dense_bytes"]

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        root = self.root()
        given = set(_ids(optimizer))
        return root is not None and any(id(parameter) in given for parameter in root.parameters())

    def adapt(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        handle = self.handle
        if handle is None or not optimizers:
            return
        try:
            handle.adapt([*optimizers])
        except tagc.Error as failure:  # gradients are right without it
            say(f"{self.name}: its optimizer is left as it is, and all values travel: {failure}")
        scalers = [scaler for scaler in _alive(torch.amp.GradScaler) if scaler.is_enabled()]
        if len(scalers) == 1:
            handle.follow(scalers[0])

    def __str__(self) -> str:
        if not self.n_bytes_dense:
            return f"{self.name}: exchanges: {self.n_exchanges}"
        return (
            f"{self.name}: exchanges: {self.n_exchanges}; this rank sent {self.n_bytes_sent / 1e6:.4g} MB, "
            f"{100 * self.n_bytes_sent / self.n_bytes_dense:.3g} % of what gradients take uncompressed"
        )


def roots_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the outermost wrapped modules. If only parts of a module are sharded, they are one model: the
    module."""

    def outermost(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if isinstance(module, WRAPPERS):
            yield module
        else:
            for child in module.children():
                yield from outermost(child)

    roots = [*outermost(module)]
    return [module] if len(roots) > 1 and all(isinstance(root, FSDPModule) for root in roots) else roots


class Training:
    """The hooks, for as long as the script runs."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._models: list[Model] = []
        # what has been looked at. fully_shard() changes a module's class, so that it is looked at anew
        self._seen: weakref.WeakKeyDictionary[torch.nn.Module, type] = weakref.WeakKeyDictionary()
        self._stepped: set[int] = set()  # groups of optimizers, by identity
        self._checkpoints = Checkpoints(say)
        self._has_spoken = self._is_busy = False

    def __enter__(self) -> Training:
        self._hooks = [
            register_module_forward_pre_hook(self._on_forward),
            register_optimizer_step_pre_hook(self._on_step),
        ]
        if self._settings.is_off:
            say("off: nothing is compressed")
        else:
            self._checkpoints.observe()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None or kind is SystemExit:
            self._checkpoints.end()
            for model in self._models:
                say(str(model))
            if not (self._models or self._has_spoken or self._settings.is_off):
                say("nothing was compressed: no model under DDP, FSDP2 or FSDP1 has trained")
        self._checkpoints.unobserve()

    # ---- models ----

    def _on_forward(self, module: torch.nn.Module, _: Any) -> None:
        # compiled code calls this for each module that it has in it
        if torch.compiler.is_compiling() or self._seen.get(module) is type(module):
            return
        if self._is_busy or not is_training(module):
            return
        roots = roots_in(module)
        trained = [root for root in roots if any(p.requires_grad for p in root.parameters())]
        if roots and not trained:
            return  # frozen so far
        self._take(module, trained)

    def _take(self, module: torch.nn.Module, roots: Sequence[torch.nn.Module]) -> None:
        """Begins with the wrapped models in a module, once."""
        self._is_busy = True
        try:
            for root in roots:
                self._begin(root)
        finally:
            self._is_busy = False
        self._seen.update((inner, type(inner)) for inner in module.modules())

    def _begin(self, root: torch.nn.Module) -> None:
        """Compresses a model that is about to train, if it should be. Collective over its ranks."""
        settings, model = self._settings, Model(root)
        if settings.is_off:
            return
        try:
            hosts = tagc.hosts_of(root)
        except tagc.Error as failure:
            if failure.status != "state":
                raise
            self._leave(f"{model.name} is left as the script has it: {failure}")
            return
        is_asked = settings.counts_ranks or settings.options.keys() & {"hosts", "between"}
        if len(set(hosts.values())) == 1 and not is_asked:
            self._leave(
                f"{model.name} is not compressed: its {len(hosts)} ranks are on one host, and nothing "
                "passes a network (--even-on-one-host compresses all the same)"
            )
            return
        options = dict(settings.options)
        if settings.asks_advice:
            common = {name: options[name] for name in ("hosts", "threads", "timeout_s") if name in options}
            advice = tagc.advise(root, **common)
            if advice["choice"] != "compress":
                self._leave(f"{model.name} is not compressed, as advised")
                return
            options = advice["options"] | options
        handle = model.compress(root, options)
        self._models.append(model)
        self._adapt_at_once(model)
        self._checkpoints.add(root, handle, sorted(hosts))
        if settings.record is not None:
            path, n = pathlib.Path(settings.record), len(self._models)
            handle.record(path if n == 1 else path.with_suffix(f".{n}{path.suffix}"))

    def _leave(self, why: str) -> None:
        self._has_spoken = True
        say(why)

    # ---- optimizers ----

    def _adapt_at_once(self, model: Model) -> None:
        """Adapts the optimizers that are there, so that the first exchange knows of them as all others do.
        Where several have a parameter, it is seen at their steps which of them trains it."""
        owners = {id(one.param_groups): one for one in _alive(torch.optim.Optimizer) if model.owns(one)}
        given = [id_ for one in owners.values() for id_ in _ids(one)]
        if len(set(given)) == len(given):
            model.adapt([*owners.values()])
            model.adapted |= owners.keys()

    def _look_for_model(self, optimizer: torch.optim.Optimizer) -> None:
        """Compresses the wrapped model of an optimizer whose first pass no hook has seen. Where there are
        several, which of them comes first is known at their passes alone."""
        wrapped = [one for kind in WRAPPERS for one in _alive(kind) if self._seen.get(one) is not type(one)]
        owners = [root for root in wrapped if Model(root).owns(optimizer)]
        inner = {id(module) for root in owners for module in [*root.modules()][1:]}
        outermost = [root for root in owners if id(root) not in inner]
        if len(outermost) == 1:
            self._take(outermost[0], outermost)

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if id(optimizer.param_groups) not in self._stepped:
            self._stepped.add(id(optimizer.param_groups))
            self._look_for_model(optimizer)
        for model in self._models:
            if id(optimizer.param_groups) not in model.adapted:
                model.adapted.add(id(optimizer.param_groups))
                if model.owns(optimizer):
                    model.adapt([optimizer])


def _ids(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Yields the parameters of an optimizer, by identity; a wrapper around one may have none yet."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from map(id, group["params"])


def _alive(kind: type) -> list[Any]:
    """Returns the objects of that kind, of which torch keeps no list. Only their types are looked at, because
    other objects may do something when they are asked what they are."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]
