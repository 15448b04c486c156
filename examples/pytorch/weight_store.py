"""A trainer and an engine that generates with its weights, in two processes that know a folder, and not each
other.

    python weight_store.py train policy        # in one shell
    python weight_store.py generate policy     # in another, or in several; before or after

The trainer rewards the letters that it likes. It publishes its weights after every step. The engine has them
as
engines do, with gate and up in one weight, takes the newest version before each text, and prints the reward.
Kill
either and start it again: the trainer goes on with the next version, and the engine takes the newest."""

import argparse
import pathlib
import zlib

import torch
from torch import nn
from torch.nn.functional import silu

from tagc.weights import Follower, Publisher
from tagc.weights.layout import Rank, engine_layout

LETTERS, WIDTH = 32, 64


class Policy(nn.Module):
    """Says from a letter how likely the next ones are."""

    def __init__(self, mlp):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH, dtype=torch.bfloat16)
        self.mlp = mlp
        self.head = nn.Linear(WIDTH, LETTERS, bias=False, dtype=torch.bfloat16)

    def forward(self, letters):
        x = self.embed(letters)
        return self.head(x + self.mlp(x)).float().log_softmax(-1)

    def write(self, n_texts, n_letters, random):
        """Returns texts and the logarithm of each letter's probability."""
        letters, texts, logs = torch.zeros(n_texts, dtype=torch.long), [], []
        for _ in range(n_letters):
            log = self(letters)
            letters = log.detach().exp().multinomial(1, generator=random)[:, 0]
            texts.append(letters)
            logs.append(log.gather(1, letters[:, None])[:, 0])
        return torch.stack(texts, 1), torch.stack(logs, 1)


class TrainedMLP(nn.Module):
    """As a trainer has it."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(3)
        )

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class EnginesMLP(nn.Module):
    """As an engine has it: one product for two."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False, dtype=torch.bfloat16)
        self.down_proj = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(silu(gate) * up)


def reward_of(texts):
    """Returns the share of letters below 8, of each text."""
    return (texts < 8).float().mean(1)


def sum_of(tensors):
    """Returns a number by which two processes can compare their weights."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.detach().contiguous().view(torch.int16).numpy().tobytes(), total)
    return f"{total:08x}"


def train(store, n_steps, rate):
    torch.manual_seed(1)
    policy, random = Policy(TrainedMLP()), torch.Generator().manual_seed(1)
    saved = pathlib.Path(store).with_suffix(".pt")
    if saved.exists():
        policy.load_state_dict(torch.load(saved))
    publisher = Publisher(policy, store)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate)
    for _ in range(n_steps):
        texts, logs = policy.write(64, 24, random)
        reward = reward_of(texts)
        loss = -((reward - reward.mean()) / (reward.std() + 1e-6) * logs.mean(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save(policy.state_dict(), saved)
        publisher.publish()
        last = publisher.last
        mlp = policy.mlp
        weights = (policy.embed.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        print(
            f"trainer  version {last.version:4}  reward {reward.mean():.2f}  {last.n_bytes:6} bytes for "
            f"{last.n_changes} of {last.n_elems} weights  {sum_of(weights)}",
            flush=True,
        )


def generate(store, n_steps, wait_s):
    policy, random = Policy(EnginesMLP()), torch.Generator().manual_seed(2)
    follower = Follower(engine_layout(policy, Rank(0, 1)), store)
    while follower.update(wait_s=wait_s) and follower.version < n_steps:
        with torch.no_grad():
            texts, _ = policy.write(64, 24, random)
        print(f"engine   version {follower.version:4}  reward {reward_of(texts).mean():.2f}", flush=True)
    weights = (policy.embed.weight, *policy.mlp.gate_up_proj.weight.chunk(2), policy.mlp.down_proj.weight)
    print(f"engine   version {follower.version:4}  {sum_of(weights)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", choices=["train", "generate"])
    add("store", help="a folder, which both reach")
    add(
        "--steps",
        type=int,
        default=200,
        help="that the trainer makes, and versions after which the engine ends (200)",
    )
    add("--rate", type=float, default=3e-3, help="of the trainer's optimizer (3e-3)")
    add("--wait", type=float, default=60.0, help="seconds that the engine waits for a version (60)")
    options = parser.parse_args()
    if options.what == "train":
        train(options.store, options.steps, options.rate)
    else:
        generate(options.store, options.steps, options.wait)


if __name__ == "__main__":
    main()
