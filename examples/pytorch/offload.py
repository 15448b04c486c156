"""Trains with FSDP2 and less memory on the GPU, in three ways that can be combined.

    torchrun --standalone --nproc-per-node 2 offload.py [--parameters] [--optimizer] [--activations] [--torch]
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        offload.py --device cuda     # on both hosts; HOST is one of them

--parameters: FSDP2's CPUOffloadPolicy keeps parameters, gradients and optimizer state in host memory.
--optimizer: the optimizer has copies of the parameters in host memory, in fp32, and its state is there.
--activations: what the backward pass needs waits for it in host memory.
--torch leaves tagc out. Without a GPU, as here, all of this is host memory."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from device import add_device, start_on
from patterns import batches, gpt, shard
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy


class OnCPU:
    """An optimizer of copies in host memory: gradients go there, new values come back."""

    def __init__(self, parameters, make):
        self.parameters = list(parameters)
        self.copies = [self.local(parameter).detach().float().cpu().clone() for parameter in self.parameters]
        self.optimizer = make(self.copies)

    @staticmethod
    def local(values):
        return values.to_local() if hasattr(values, "to_local") else values

    @torch.no_grad()
    def step(self):
        for parameter, mine in zip(self.parameters, self.copies):
            mine.grad = None if parameter.grad is None else self.local(parameter.grad).float().cpu()
        self.optimizer.step()
        for parameter, mine in zip(self.parameters, self.copies):
            self.local(parameter).copy_(mine)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def main(argv=None, **options):
    """Returns this rank's losses. options: of compress()."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for what in ("parameters", "optimizer", "activations", "torch"):
        parser.add_argument(f"--{what}", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    add_device(parser)
    arguments = parser.parse_args(argv)
    start_on(arguments.device)
    has_gpu = arguments.device == "cuda"
    policy = CPUOffloadPolicy(pin_memory=has_gpu) if arguments.parameters else OffloadPolicy()
    model, losses = shard(gpt(), offload_policy=policy), []
    make = lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)
    optimizer = OnCPU(model.parameters(), make) if arguments.optimizer else make(model.parameters())
    if not arguments.torch:
        import tagc.torch as tagc

        # the copies are not the model's parameters: then compress() without the optimizer, in 4 bits
        tagc.compress(model, None if arguments.optimizer else optimizer, **options)
    for x, y in batches(arguments.steps):
        optimizer.zero_grad()
        with save_on_cpu(pin_memory=has_gpu) if arguments.activations else contextlib.nullcontext():
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
