"""Other people's ways to send less, each in a file of its own, written from its paper.

A peer is simulated: one process computes what every rank would, and the peer turns the ranks' gradients into
the step that all of them take. What travels is counted as `Sent`, from the arrays that a rank would put on
the wire."""

import dataclasses

import torch


@dataclasses.dataclass
class Sent:
    """What one step sends, in bits. `shared`: payloads cut among the ranks, of which each sends (W-1)/W, as
    in a reduce-scatter or an all-gather of shards; an all-reduce is two of them. `own`: messages of one rank
    that all W-1 others need whole. `latencies`: one after the other."""

    shared: float = 0.0
    own: float = 0.0
    latencies: int = 0

    def bits(self, n_ranks):
        """Of one rank."""
        return self.shared * (n_ranks - 1) / n_ranks + self.own * (n_ranks - 1)


class Gradients:
    """Averages gradients, and leaves the step to AdamW. Subclasses say how: exchange(ranks) -> (mean, Sent),
    where ranks is, for each rank, a list of one tensor per parameter."""

    def __init__(self, model, n_ranks, adamw, **options):
        self.parameters, self.n_ranks = list(model.parameters()), n_ranks
        self.optimizer = adamw(model)
        self.state = {}
        self.begin(**options)

    def begin(self):
        pass

    def step(self, gradients, lr, step, clip):
        """gradients(rank) -> list of tensors. Returns Sent."""
        mean, sent = self.exchange([gradients(rank) for rank in range(self.n_ranks)])
        for parameter, gradient in zip(self.parameters, mean):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(self.parameters, clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return sent

    def state_dict(self):
        return {"state": self.state, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved):
        self.state = saved["state"]
        self.optimizer.load_state_dict(saved["optimizer"])


def clip(gradients, norm):
    """In place, by the norm over all of them."""
    factor = min(1.0, norm / (float(torch.nn.utils.get_total_norm(gradients)) + 1e-6))
    return [gradient.mul_(factor) for gradient in gradients]
