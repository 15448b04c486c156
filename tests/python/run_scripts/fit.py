"""Lightning's Trainer."""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.net = torch.nn.Linear(128, 128, bias=False)

    def training_step(self, batch, i):
        loss = (self.net(batch) - batch.roll(1, 1)).square().mean()
        if self.global_rank == 0:
            print(f"loss {self.global_step} {loss.item()!r}")
        return loss

    def validation_step(self, batch, i):
        self.net(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.randn(128, generator=torch.Generator().manual_seed(i))


folder, verb = sys.argv[1:]
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False, default_root_dir=folder,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=True,
    callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)])  # fmt: skip
loader = lambda: torch.utils.data.DataLoader(Numbers(), batch_size=2)
trainer.fit(Module(), loader(), loader(), ckpt_path=f"{folder}/epoch=0.ckpt" if verb == "resume" else None)
