"""Lightning: a callback that compresses the model when fit() begins, under DDPStrategy or
ModelParallelStrategy (FSDP2).

Lightning uses a ddp_comm_hook only for CUDA models; this callback works on CPUs, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import tagc.torch as tagc
from tagc.integrations import _common

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class TagcCallback(Callback):  # type: ignore[misc]  # Lightning may not be there, and is not looked into
    """Trainer(callbacks=[TagcCallback()]), with the options of tagc.compress(). `handle` exists from the
    start of fit().

    Rank 0 puts the residuals of all ranks and the schedule into Lightning's checkpoints. Its memory must hold
    them: 4 bytes per compressed parameter and rank. A few statistics are logged as tagc/<name>;
    handle.stats() has all."""

    def __init__(self, **options: Any) -> None:
        self._options, self._loaded = options, None
        self.handle: tagc.Compressed | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before anything is loaded. Until now the checkpoint of an earlier fit() could still be saved."""
        if stage == "fit":
            if self.handle is not None:
                self.handle.close()
            self.handle = self._loaded = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _common.check_started('give the Trainer strategy="ddp"')
        self.handle = tagc.compress(trainer.strategy.model, list(trainer.optimizers), **self._options)
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            self.handle.follow(scaler)
        self._restore(self.handle)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.handle is not None  # since on_fit_start()
        self.log_dict(_common.logged(self.handle))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.handle is None:
            return
        mine = self.handle.state_dict()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            checkpoint["tagc"] = everyone

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":  # test() and predict() need the weights alone
            return
        self._loaded = checkpoint.get("tagc")
        if self.handle is not None:  # ModelParallelStrategy loads after fit() has begun, DDPStrategy before
            self._restore(self.handle)

    def _restore(self, handle: tagc.Compressed) -> None:
        if self._loaded is not None:
            handle.load_state_dict(self._loaded)
            self._loaded = None
