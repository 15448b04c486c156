"""A script that has tagc's line."""

import torch
import torch.distributed as dist

import tagc.torch as tagc

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 128))
optimizer = torch.optim.AdamW(model.parameters())
handle = tagc.compress(model, optimizer, verbose=False)
for _ in range(2):
    model(torch.ones(2, 128)).square().mean().backward()
    optimizer.step()
print("exchanges by its own handle:", handle.n_steps)
