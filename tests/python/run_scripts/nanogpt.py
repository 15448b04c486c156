"""nanoGPT's loop: globals, require_backward_grad_sync, evaluation first, one file of checkpoints."""

import os
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir, init_from, compile = sys.argv[1], sys.argv[2], len(sys.argv) > 3
gradient_accumulation_steps, max_iters, eval_interval, grad_clip = 4, 8, 3, 1.0
init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], 2, 32).transpose(1, 2) for part in self.c_attn(x).split(64, 2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(64), Attention(), nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(128, 64), nn.Embedding(16, 64)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 128, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, nn.functional.cross_entropy(logits.view(-1, 128), targets.reshape(-1))


n_batches = 0


def get_batch():
    global n_batches
    n_batches += 1
    x = torch.randint(128, (4, 17), generator=torch.Generator().manual_seed(10 * n_batches + ddp_rank))
    return x[:, :-1], x[:, 1:]


model, iter_num, best_val_loss = GPT(), 0, 1e9
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, checkpoint = checkpoint["iter_num"], None
scaler = torch.amp.GradScaler("cpu", enabled=False)
if compile:
    model = torch.compile(model, backend="eager", fullgraph=True)
model = DDP(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    loss = model(*get_batch())[1].item()
    model.train()
    return loss


X, Y = get_batch()
raw_model = model.module
while True:
    if iter_num % eval_interval == 0 and master_process:
        estimate_loss()
        if iter_num > 0:
            checkpoint = {
                "model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num
            }  # fmt: skip
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with nullcontext():
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"loss {iter_num} {loss.item() * gradient_accumulation_steps!r}")
    iter_num += 1
    if iter_num > max_iters:
        break
destroy_process_group()
