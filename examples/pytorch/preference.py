"""Trains a policy on preferences by DPO's loss against a frozen reference, with a term of supervised tuning.

    torchrun --standalone --nproc-per-node 2 preference.py [--lora] [--ddp] [--torch]
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        preference.py --device cuda     # on both hosts; HOST is one of them

With --lora only adapters are trained and exchanged, and the reference is the same model without them.
Otherwise the reference is a frozen copy, which FSDP2 shards, too, and tagc does not see. --torch leaves tagc
out."""

import argparse
import copy

import torch
import torch.distributed as dist
from device import add_device, start_on
from gpt import GPT, Config
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BETA, SFT = 0.5, 0.2  # strength of preferences, weight of the second term


class Policy(GPT):
    def forward(self, tokens, answer):
        """Returns (rows,): the log-probability of each row's tokens from position `answer` on."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))[:, answer - 1 : -1]
        return -F.cross_entropy(logits.mT, tokens[:, answer:], reduction="none").sum(1)


class Lora(nn.Module):
    """A linear layer, and beside it two small matrices that are trained."""

    is_on = True

    def __init__(self, base, rank=32):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x)) if Lora.is_on else self.base(x)


def with_adapters(model):
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn, block.mlp.c_fc = Lora(block.attn.c_attn), Lora(block.mlp.c_fc)
    return model


def pairs(n, n_rows=4, answer=4):
    """Beginnings of sequences that count, each with an answer that goes on counting and one that does not."""
    for step in range(n):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        first = torch.randint(64, (n_rows, 1), generator=generator, device="cpu")
        chosen = (first + torch.arange(16, device="cpu")) % 64
        rejected = chosen.clone()
        rejected[:, answer:] = torch.randint(64, (n_rows, 16 - answer), generator=generator, device="cpu")
        yield torch.cat([chosen, rejected]).to(torch.get_default_device()), answer


def loss_of(policy, reference, tokens, answer):
    """reference: gives log-probabilities that the policy's are compared with."""
    with torch.no_grad():
        before = reference(tokens, answer)
    now = policy(tokens, answer)
    chosen, rejected = (now - before).chunk(2)
    sft = -now.chunk(2)[0].mean() / (tokens.shape[1] - answer)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean() + SFT * sft


def main(argv=None, **options):
    """Returns this rank's losses. options: of compress()."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel instead of fully_shard()")
    parser.add_argument("--torch", action="store_true", help="without tagc")
    parser.add_argument("--steps", type=int, default=20)
    add_device(parser)
    arguments = parser.parse_args(argv)
    start_on(arguments.device)
    torch.manual_seed(0)
    model = Policy(Config(n_vocab=64, n_positions=16, n_embd=64, n_head=2, n_layer=2))
    reference = None if arguments.lora else copy.deepcopy(model).requires_grad_(False)
    model = with_adapters(model) if arguments.lora else model
    if arguments.ddp:
        model = DistributedDataParallel(model)
    else:
        for one in filter(None, (model, reference)):
            for block in one.transformer.h:
                fully_shard(block)
            fully_shard(one)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=3e-3), []
    if not arguments.torch:
        import tagc.torch as tagc

        tagc.compress(model, optimizer, **options)

    def without_adapters(*inputs):
        Lora.is_on = False
        try:
            return model(*inputs)
        finally:
            Lora.is_on = True

    for tokens, answer in pairs(arguments.steps):
        optimizer.zero_grad()
        loss = loss_of(model, reference or without_adapters, tokens, answer)
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
