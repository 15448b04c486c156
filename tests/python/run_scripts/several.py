"""A generator and a discriminator with an optimizer each, LoRA on a frozen base whose two matrices have an
optimizer each, a frozen teacher, and a wrapper that nobody calls."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Lora(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(128, 128).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(128, 64, bias=False), torch.nn.Linear(64, 128, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Generator(torch.nn.Linear):
    pass


class Discriminator(torch.nn.Linear):
    pass


dist.init_process_group("gloo")
torch.manual_seed(3)
generator, discriminator, lora = DDP(Generator(128, 128)), DDP(Discriminator(128, 128)), DDP(Lora())
unused, teacher = DDP(torch.nn.Linear(128, 128)), torch.nn.Linear(128, 128).requires_grad_(False)
with torch.no_grad():  # evaluation first
    unused(torch.ones(1, 128))
optimizers = [
    torch.optim.AdamW(generator.parameters()),
    torch.optim.SGD(discriminator.parameters(), lr=0.1),
    torch.optim.AdamW(lora.module.down.parameters()),
    torch.optim.AdamW(lora.module.up.parameters()),
]
for step in range(3):
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss = discriminator(generator(x)).square().mean() + (lora(x) - teacher(x)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {step} {loss.item()!r}")
