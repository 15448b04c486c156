"""Lightning: a callback that compresses the model when fit() begins, under DDPStrategy or ModelParallelStrategy (FSDP2).

Lightning passes a ddp_comm_hook on to CUDA models alone; this callback works on CPUs, too."""

import torch.distributed as dist

import tagc.torch as tagc

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class TagcCallback(Callback):
    """Trainer(callbacks=[TagcCallback()]), with the options of tagc.compress(). `handle` is there from the beginning of fit().

    Residuals of all ranks and stages go into Lightning's checkpoints, by way of rank 0, whose memory has to hold them: 4 bytes
    per compressed parameter and rank. Statistics are logged as tagc/<name>."""

    def __init__(self, **options):
        self._options, self._loaded = options, None
        self.handle = None

    def on_fit_start(self, trainer, pl_module):
        if self.handle is not None:  # of an earlier fit(), after which its checkpoint could still be saved
            self.handle.close()
        self.handle = tagc.compress(trainer.strategy.model, list(trainer.optimizers), **self._options)
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            self.handle.follow(scaler)
        self._restore()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        stats = {key: value for key, value in self.handle.stats().items() if not isinstance(value, dict)}
        self.log_dict({key: float(value) for key, value in tagc.flat(stats).items()})

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if self.handle is None:
            return
        mine, everyone = self.handle.state_dict(), [None] * dist.get_world_size()
        dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            checkpoint["tagc"] = everyone

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self._loaded = checkpoint.get("tagc")
        if self.handle is not None:  # ModelParallelStrategy loads after fit() has begun, DDPStrategy before
            self._restore()

    def _restore(self):
        if self._loaded is not None:
            self.handle.load_state_dict(self._loaded)
            self._loaded = None
