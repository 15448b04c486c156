"""Local steps: every rank trains a replica of its own for H steps of AdamW, then all exchange how far their
parameters moved.

DiLoCo (Douillard et al., arXiv 2311.08105): the mean of the differences, in fp32, goes through SGD with
Nesterov's momentum (outer learning rate 0.7, momentum 0.9). SparseLoCo (Sarfi et al., 2508.15706): the 64
largest of each 4,096 values of a difference travel in 2 bits, the rest is fed back times 0.95, and the outer
step is plain SGD at rate 1."""

import copy

import torch

from peers import Sent

CHUNK, KEPT, FEEDBACK = 4096, 64, 0.95


def sparsify(x):
    """What arrives of x: the KEPT largest of each CHUNK, each as its sign and one of two magnitudes of its
    chunk, and its bits: 12 for a position, 2 for a value, two bf16 magnitudes a chunk."""
    flat, n_bits = x.flatten(), 0
    arrived = torch.zeros_like(flat)
    for begin in range(0, flat.numel(), CHUNK):
        chunk = flat[begin : begin + CHUNK]
        k = -(-KEPT * chunk.numel() // CHUNK)
        where = chunk.abs().topk(k).indices
        values = chunk[where]
        large = values.abs() >= values.abs().mean()
        magnitude = torch.empty_like(values)
        for part in (large, ~large):
            if part.any():
                magnitude[part] = values[part].abs().mean().bfloat16().float()
        arrived[begin + where] = torch.where(values >= 0, magnitude, -magnitude)
        n_bits += k * (12 + 2) + 2 * 16
    return arrived.view_as(x), n_bits


class Local:
    """The model given holds what all ranks agreed on last; replicas are the ranks' own."""

    def __init__(self, model, n_ranks, adamw, every, sparse=False, outer_lr=0.7, momentum=0.9):
        self.model, self.n_ranks, self.every, self.sparse = model, n_ranks, every, sparse
        self.outer_lr, self.momentum = outer_lr, momentum
        self.parameters = list(model.parameters())
        self.replicas = [copy.deepcopy(model) for _ in range(n_ranks)]
        self.optimizers = [adamw(replica) for replica in self.replicas]

        def zeros():
            return [torch.zeros_like(p) for p in self.parameters]

        self.state = {"errors": [zeros() for _ in range(n_ranks)]} if sparse else {"velocity": zeros()}

    def step(self, gradients, lr, step, norm):
        for rank, (replica, optimizer) in enumerate(zip(self.replicas, self.optimizers)):
            own = list(replica.parameters())
            for p, gradient in zip(own, gradients(rank, replica)):
                p.grad = gradient
            torch.nn.utils.clip_grad_norm_(own, norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        return self._meet() if (step + 1) % self.every == 0 else Sent()

    @torch.no_grad()
    def _meet(self):
        sent = Sent(latencies=1 if self.sparse else 2)
        for i, p in enumerate(self.parameters):
            mean = torch.zeros_like(p)
            for rank, replica in enumerate(self.replicas):
                difference = p - list(replica.parameters())[i]
                if self.sparse:
                    error = self.state["errors"][rank][i]
                    error.mul_(FEEDBACK).add_(difference)
                    difference, n_bits = sparsify(error)
                    error -= difference
                    sent.own += n_bits / self.n_ranks
                mean += difference / self.n_ranks
            if self.sparse:
                p.sub_(mean)
            else:
                sent.shared += 2 * 32 * p.numel()
                velocity = self.state["velocity"][i].mul_(self.momentum).add_(mean)
                p.sub_(mean.add(velocity, alpha=self.momentum), alpha=self.outer_lr)
            for replica in self.replicas:
                list(replica.parameters())[i].copy_(p)
        return sent

    def state_dict(self):
        return {
            "state": self.state,
            "replicas": [replica.state_dict() for replica in self.replicas],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state_dict(self, saved):
        self.state = saved["state"]
        for one, other in zip(self.replicas + self.optimizers, saved["replicas"] + saved["optimizers"]):
            one.load_state_dict(other)
