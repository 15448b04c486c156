"""A loop with accelerate: accumulation, save_state() and load_state()."""

import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(4)
model = torch.nn.Linear(128, 128, bias=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
first = 0
if sys.argv[2] == "resume":
    accelerator.load_state(sys.argv[1])
    first = 4
for step in range(first, 8):
    for micro in range(2):
        with accelerator.accumulate(model):
            seed = 100 * step + 10 * micro + accelerator.process_index
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
            loss = (model(x) - x.roll(1, 1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        print(f"loss {step} {loss.item()!r}")
    if step == 3 and sys.argv[2] == "save":
        accelerator.save_state(sys.argv[1])
accelerator.end_training()
