"""torch's example of DDP: a loop with a checkpoint that the first rank writes."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, args):
        self.rank, self.args, self.first = int(os.environ["RANK"]), args, 0
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(128, 128, bias=False), torch.nn.Tanh())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if args.resume:
            snapshot = torch.load(args.snapshot)
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.first = snapshot["steps"]
        self.model = DDP(self.model)

    def batch(self, step):
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(10 * step + self.rank))
        return x, x.roll(1, 1).tanh()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            x, y = self.batch(1000)
            loss = F.mse_loss(self.model(x), y)
        self.model.train()
        return loss.item()

    def train(self):
        self.evaluate()
        for step in range(self.first, self.args.steps):
            x, y = self.batch(step)
            loss = F.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.rank == 0:
                print(f"loss {step} {loss.item()!r}")
                if step + 1 == self.args.save_at:
                    state = {
                        "model": self.model.module.state_dict(),
                        "optimizer": self.optimizer.state_dict(),
                        "steps": step + 1,
                    }
                    torch.save(state, self.args.snapshot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--snapshot", default="snapshot.pt")
    parser.add_argument("--resume", action="store_true")
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).train()
    dist.destroy_process_group()
