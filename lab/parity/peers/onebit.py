"""1-bit Adam (Tang et al., arXiv 2102.02888): dense Adam at first, then the second moment is frozen and the
momentum travels as signs, with error feedback at the ranks and at the owner of each part.

A scale is the mean magnitude of a parameter's tensor (the paper's is one of the whole buffer, and coarser).
`refresh` is 0/1 Adam's idea (Lu et al., 2202.06009): the second moment is not frozen for good, but renewed
from a dense gradient at steps that become rarer by the factor `refresh`; its local steps are left out."""

import torch

from peers import Sent, clip

BETAS, EPS = (0.9, 0.99), 1e-8


def sign(x):
    """What arrives of x: one bit a value, and one scale."""
    return torch.where(x >= 0, x.abs().mean(), -x.abs().mean())


def n_bits_of(parameters):
    return sum(p.numel() + 32 for p in parameters)


class OneBitAdam:
    def __init__(self, model, n_ranks, adamw, warmup, refresh=None):
        self.parameters, self.n_ranks, self.warmup, self.refresh = (
            list(model.parameters()),
            n_ranks,
            warmup,
            refresh,
        )

        def zeros():
            return [torch.zeros_like(p) for p in self.parameters]

        self.state = {
            "m": zeros(),
            "v": zeros(),
            "rank": [zeros() for _ in range(n_ranks)],
            "owner": zeros(),
            "n_v": 0,
            "next": warmup,
        }
        self.decay = {
            id(p): group["weight_decay"] for group in adamw(model).param_groups for p in group["params"]
        }

    def step(self, gradients, lr, step, norm):
        state, ranks = self.state, [gradients(rank) for rank in range(self.n_ranks)]
        n_elems = sum(p.numel() for p in self.parameters)
        if step < self.warmup or (self.refresh and step >= state["next"]):
            mean = clip([sum(parts) / self.n_ranks for parts in zip(*ranks)], norm)
            self._moments(mean)
            if step >= self.warmup:
                state["next"] = max(step + 2, int(step * self.refresh))
            sent = Sent(shared=2 * 32 * n_elems, latencies=2)
        else:
            self._compressed([clip(own, norm) for own in ranks])
            sent = Sent(shared=2 * n_bits_of(self.parameters), latencies=2)
        state["n_m"] = step + 1
        with torch.no_grad():
            for p, m, v in zip(self.parameters, state["m"], state["v"]):
                p.mul_(1 - lr * self.decay[id(p)])
                rate = lr / (1 - BETAS[0] ** (step + 1))
                p.addcdiv_(m, (v / (1 - BETAS[1] ** state["n_v"])).sqrt_().add_(EPS), value=-rate)
        return sent

    def _moments(self, mean):
        self.state["n_v"] += 1
        for m, v, g in zip(self.state["m"], self.state["v"], mean):
            m.lerp_(g, 1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])

    def _compressed(self, ranks):
        """The new momentum of every rank, averaged in signs."""
        state = self.state
        for i, m in enumerate(state["m"]):
            arrived = torch.zeros_like(m)
            for own, errors in zip(ranks, state["rank"]):
                arrived += self._send(torch.lerp(m, own[i], 1 - BETAS[0]), errors[i])
            m.copy_(self._send(arrived / self.n_ranks, state["owner"][i]))

    @staticmethod
    def _send(values, error):
        error += values
        sent = sign(error)
        error -= sent
        return sent

    def state_dict(self):
        return self.state

    def load_state_dict(self, saved):
        self.state = saved
