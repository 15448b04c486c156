"""torch's example of FSDP2: blocks and root are sharded, and torch.distributed.checkpoint saves."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(64),
            torch.nn.Linear(64, 256),
            torch.nn.Linear(256, 64),
        )

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main(verb, folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = torch.nn.Sequential(*[Block() for _ in range(2)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if verb == "resume":
        states = get_state_dict(model, optimizer)
        dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        first = 4
    for step in range(first, 8):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            loss = (model(x) - x.roll(1, 1)).square().mean() / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"loss {step} {loss.item()!r}")
        if verb == "save" and step == 1:
            states = get_state_dict(model, optimizer)
            states = {"model": states[0], "optimizer": states[1]}
            group = dist.new_group(backend="gloo")
            dcp.async_save(states, checkpoint_id=f"{folder}-early", process_group=group).result()
        if verb == "save" and step == 3:
            states = get_state_dict(model, optimizer)
            dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    dist.destroy_process_group()


main(*sys.argv[1:])
