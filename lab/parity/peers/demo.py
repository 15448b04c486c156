"""DeMo (Peng, Quesnelle, Kingma, arXiv 2411.19870, and its published optimizer): every rank keeps a momentum
of its own, sends the largest coefficients of its cosine transform, takes them out of the momentum, and all
take a step of the sign of what came.

Chunks are 64 by 64 where 64 divides, else the largest divisor below. A coefficient is sent as a position
within its chunk, in as few bits as that takes, and a bf16 value; the published code sends 64 and 32 bits."""

import functools
import math

import torch

from peers import Sent

CHUNK, DECAY = 64, 0.999


@functools.cache
def dct(n):
    """The orthonormal DCT-II, (n, n): coefficients = dct(n) @ x."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


def side(n):
    return max(d for d in range(1, min(n, CHUNK) + 1) if n % d == 0)


def encode(x):
    """(n_chunks, elements of a chunk) of a vector or matrix; what has more dimensions is a matrix of rows."""
    x = x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)
    a, b = side(x.shape[0]), side(x.shape[1])
    chunks = x.view(x.shape[0] // a, a, x.shape[1] // b, b).transpose(1, 2)
    return (dct(a) @ chunks @ dct(b).T).reshape(-1, a * b)


def decode(coefficients, shape):
    rows, columns = (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (1, shape[0])
    a, b = side(rows), side(columns)
    chunks = dct(a).T @ coefficients.view(rows // a, columns // b, a, b) @ dct(b)
    return chunks.transpose(1, 2).reshape(shape)


def top(coefficients, k):
    """Positions and bf16 values of the k largest of each chunk."""
    where = coefficients.abs().topk(min(k, coefficients.shape[1]), dim=1, sorted=False).indices
    return where, coefficients.gather(1, where).bfloat16().float()


def n_bits_of(where, n_in_chunk):
    return where.numel() * (max(1, math.ceil(math.log2(n_in_chunk))) + 16)


class DeMo:
    def __init__(self, model, n_ranks, adamw, k):
        self.parameters, self.n_ranks, self.k = list(model.parameters()), n_ranks, k
        self.state = {"momentum": [[torch.zeros_like(p) for p in self.parameters] for _ in range(n_ranks)]}
        self.decay = {
            id(p): group["weight_decay"] for group in adamw(model).param_groups for p in group["params"]
        }

    @torch.no_grad()
    def step(self, gradients, lr, step, norm):
        n_bits = 0
        ranks = []
        for rank in range(self.n_ranks):
            with torch.enable_grad():
                ranks.append(gradients(rank))
        for i, p in enumerate(self.parameters):
            sums = counts = 0.0
            for own, momenta in zip(ranks, self.state["momentum"]):
                momentum = momenta[i].mul_(DECAY).add_(own[i], alpha=lr)
                coefficients = encode(momentum)
                where, values = top(coefficients, self.k)
                mine = torch.zeros_like(coefficients).scatter_(1, where, values)
                momentum.sub_(decode(mine, p.shape))
                sums, counts = sums + mine, counts + torch.zeros_like(coefficients).scatter_(1, where, 1.0)
            n_bits += n_bits_of(where, coefficients.shape[1])
            p.mul_(1 - lr * self.decay[id(p)])
            p.add_(decode(sums / counts.clamp_min(1), p.shape).sign_(), alpha=-lr)
        return Sent(own=n_bits, latencies=1)

    def state_dict(self):
        return self.state

    def load_state_dict(self, saved):
        self.state = saved
