"""Every value in few bits, a scale per block, with error feedback on both ways of an all-reduce.

From: LoCo (Xie et al., arXiv 2407.04480), 4-bit gradients with error feedback; ZeRO++ (Wang et al.,
2306.10209), blocks and the two encodings of an all-to-all followed by an all-gather. Their 8-bit error memory
and moving averages are left out: the memory is fp32 here, which can only help them."""

import torch

from peers import Gradients, Sent

BLOCK = 256


def quantize(x, n_bits):
    """What arrives of x (any shape): nearest of 2^n_bits - 1 levels between plus and minus the largest of its
    block."""
    flat = x.flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    top = 2 ** (n_bits - 1) - 1
    scale = (padded.abs().amax(1, keepdim=True) / top).bfloat16().float()
    codes = (padded / scale.clamp_min(1e-38)).round().clamp(-top, top)
    return (codes * scale).flatten()[: flat.numel()].view_as(x)


def n_bits_of(n_elems, n_bits):
    """Of quantize()'s codes and bf16 scales."""
    return n_elems * n_bits + 16 * -(-n_elems // BLOCK)


class Blocks(Gradients):
    def begin(self, n_bits):
        self.n_bits = n_bits
        self.state = {
            "rank": [[torch.zeros_like(p) for p in self.parameters] for _ in range(self.n_ranks)],
            "owner": [torch.zeros_like(p) for p in self.parameters],
        }

    def exchange(self, ranks):
        mean = []
        for i, owner in enumerate(self.state["owner"]):
            arrived = torch.zeros_like(owner)
            for gradients, errors in zip(ranks, self.state["rank"]):
                arrived += self._send(gradients[i], errors[i])
            mean.append(self._send(arrived / self.n_ranks, owner))
        n_bits = sum(n_bits_of(gradient.numel(), self.n_bits) for gradient in mean)
        return mean, Sent(shared=2 * n_bits, latencies=2)

    def _send(self, values, error):
        error += values
        sent = quantize(error, self.n_bits)
        error -= sent
        return sent
