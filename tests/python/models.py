"""Small models with awkward shapes, and the data they are trained on."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.attn = nn.Linear(n, 3 * n)
        self.mlp = nn.Linear(n, 5)
        self.out = nn.Linear(5, n, bias=False)

    def forward(self, x):
        q, k, v = self.attn(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(torch.tanh(self.mlp(torch.sigmoid(q * k) * v)))


class Odd(nn.Module):
    """First dimensions of 1, 3 and 5, which no world size divides."""

    def __init__(self, n=33):
        super().__init__()
        self.embed = nn.Linear(7, n)
        self.layers = nn.ModuleList([Block(n), Block(n)])
        self.scale = nn.Parameter(torch.ones(1))
        self.mix = nn.Parameter(torch.eye(3, 3))
        self.head = nn.Linear(n, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) @ self.mix * self.scale


class Even(nn.Module):
    """Dimensions that 2 and 4 ranks divide, for sharding along columns."""

    def __init__(self, n=32):
        super().__init__()
        self.embed = nn.Linear(7, n, bias=False)
        self.embed.weight = nn.Parameter(torch.randn(n, 8) * 0.3)
        self.layers = nn.ModuleList([EvenBlock(n), EvenBlock(n)])
        self.head = nn.Linear(n, 4)

    def forward(self, x):
        x = self.embed(nn.functional.pad(x, (0, 1)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[..., :3].clone()


class EvenBlock(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.mlp = nn.Linear(n, 4 * n)
        self.out = nn.Linear(4 * n, n)

    def forward(self, x):
        return x + self.out(torch.tanh(self.mlp(self.norm(x))))


class Tied(nn.Module):
    """One matrix in two places, one module frozen, one never used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, 33)
        self.back = nn.Linear(33, 7, bias=False)
        self.again = nn.Linear(33, 7, bias=False)
        self.again.weight = self.back.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.frozen(self.back(torch.tanh(self.embed(x))) + self.again(self.embed(x))))


def batch_of(rank, step=0, n=6):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, 7, generator=generator), torch.randn(n, 3, generator=generator)


def loss_of(model, batch):
    x, y = batch
    return ((model(x) - y) ** 2).mean()
