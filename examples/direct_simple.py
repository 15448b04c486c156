"""tagc's exchange `direct` and its schedule in plain torch, without tagc. Read it from top to bottom.

    python examples/direct_simple.py                                      two processes on this machine
    torchrun --standalone --nproc-per-node 4 examples/direct_simple.py

W ranks train one model of n parameters. Rank d owns fragment d, which is n / W of the parameters, and its
part of the optimizer. In each step, every rank computes a gradient from text of its own and sends each
fragment of it to the owner. The owner adds the W fragments, steps Adam, and sends its new parameters to all
ranks. In fp32, a gradient takes 32 bits per parameter. Here it takes 8.1 bits at first, then 4.5, and in the
end 0.45:

    acc = gradient + residual     the residual is what earlier steps did not send (error feedback)
    select(acc)                   the positions of the largest 5 % of each fragment (at first, of all values)
    encode -> exchange -> decode  positions as gaps, values in 2 bits; the owner adds in rank order
    residual = acc - decoded      small values and rounding errors are not lost: they join the next gradient

The bytes are bodies of fragments as in docs/reference/wire-format.md. tests/python/test_direct_simple.py
compares bytes, residuals, sums and losses with the library's. The library does more: it checks messages,
handles NaN and Inf, exchanges while backward runs, and sends parameters as differences of 4 bits.
"""

import functools
import math
import os
import random
import tempfile
from collections import namedtuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

# One value in `one_in` is sent, each in `bits` bits; every `block` of them share a scale.
Level = namedtuple("Level", "bits block one_in")
LEVELS = [Level(8, 128, one_in=1), Level(4, 32, one_in=1), Level(2, 128, one_in=20)]

CHUNK = 32768  # elements whose positions are encoded together (fewer, if more than 5 % are sent)
WIDTHS = sorted(range(2, 16), key=lambda bits: abs(bits - 6))  # bits for a gap, the likely ones first


# ---- select ----


def select(acc, level):
    """Returns the positions of the k largest magnitudes of acc (n,), ascending. Zeros are never selected."""
    k = max(1, len(acc) // level.one_in)
    largest = acc.abs().sort(descending=True, stable=True).indices[:k]  # of equals, the lowest position wins
    return largest[acc[largest] != 0].sort().values


# ---- encode: positions if not all values are sent, then values ----


def encode(acc, level):
    """Returns what is sent of acc (n,), as bytes."""
    if level.one_in == 1:
        return encode_values(acc, level)
    positions = select(acc, level)
    return torch.cat([encode_positions(positions, len(acc)), encode_values(acc[positions], level)])


def encode_positions(positions, n):
    """Returns positions (k,) below n as bytes: a header, a row of a table for each chunk, and gaps in the
    width that takes the fewest bytes. The library writes a bitmap instead if that is hardly longer."""
    counts = torch.bincount(positions // CHUNK, minlength=math.ceil(n / CHUNK)).tolist()
    chunks = (positions % CHUNK).split(counts)
    widths = {bits: [gaps(chunk, bits) for chunk in chunks] for bits in WIDTHS}
    bits = min(widths, key=lambda bits: sum(math.ceil(len(codes) * bits / 8) for codes in widths[bits]))
    header = torch.tensor([len(positions), bits], dtype=torch.int32)
    table = torch.tensor([[count, len(codes)] for count, codes in zip(counts, widths[bits])]).to(torch.uint16)
    packed = [pack(codes, bits) for codes in widths[bits]]
    return torch.cat([header.view(torch.uint8), table.view(torch.uint8).flatten(), *packed])


def gaps(positions, bits):
    """Returns the codes of positions (k,). Code v means: skip v elements, the next one is sent. The largest
    code, the escape, skips as many as its number and sends none: a wide gap takes several codes."""
    escape = 2**bits - 1
    gap = positions.diff(prepend=torch.tensor([-1])) - 1
    n_codes = gap // escape + 1  # (k,)
    codes = torch.full((int(n_codes.sum()),), escape)
    codes[n_codes.cumsum(0) - 1] = gap % escape
    return codes


def encode_values(values, level):
    """Returns values (m,) as bytes: a scale in bf16 for each block, then a code for each value."""
    blocks = F.pad(values, (0, -len(values) % level.block)).view(-1, level.block)  # (B, block)
    counts = torch.tensor([len(block) for block in values.split(level.block)])  # (B,), the last may be less
    scales = scales_of(blocks, counts, level).to(torch.bfloat16)
    scale = scales.float()[:, None]
    if level.bits == 2:  # a sign, and scale x 1 or scale x 2
        codes = 2 * (blocks < 0) + (blocks.abs() > 1.5 * scale)
    else:  # an integer, times the scale
        top = 2 ** (level.bits - 1) - 1
        codes = (blocks * torch.where(scale > 0, 1 / scale, 0)).clamp(-top, top).round().long()
    return torch.cat([scales.view(torch.uint8), pack(codes.flatten()[: len(values)], level.bits)])


def scales_of(blocks, counts, level):
    """Returns a scale for each of blocks (B, block), with zeros behind the last value. Integers reach the
    largest value. With two bits, x 1 and x 2 lie around the mean: none of the selected values is small."""
    if level.bits > 2:
        scales = blocks.abs().amax(1) / (2 ** (level.bits - 1) - 1)
    else:  # fp32 sums depend on the order of additions; this is the library's
        sums = functools.reduce(torch.add, blocks.abs().unflatten(1, (-1, 16)).unbind(1))  # (B, 16)
        while sums.shape[1] > 1:
            sums = sum(sums.chunk(2, 1))
        scales = 0.9 * (sums[:, 0] * (1 / counts))
    return torch.where(scales < torch.finfo(torch.float32).tiny, 0, scales)


def pack(codes, bits):
    """Returns the lowest `bits` bits of each code (m,), one after the other, in ceil(m * bits / 8) bytes."""
    stream = (codes[:, None] >> torch.arange(bits) & 1).flatten()  # (m * bits,)
    return (F.pad(stream, (0, -len(stream) % 8)).view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8)


# ---- decode: the same backwards ----


def decode(body, n, level):
    """Returns the n values that a body stands for, zero where none was sent."""
    if level.one_in == 1:
        return decode_values(body, n, level)
    positions, n_bytes = decode_positions(body, n)
    fragment = torch.zeros(n)
    fragment[positions] = decode_values(body[n_bytes:], len(positions), level)
    return fragment


def decode_positions(body, n):
    """Returns the positions and the number of bytes that they took."""
    at, bits, found = 8 + 4 * math.ceil(n / CHUNK), int(body[4]), []
    for i, (_, n_codes) in enumerate(body[8:at].clone().view(torch.uint16).view(-1, 2).tolist()):
        codes = unpack(body[at:], bits, n_codes)
        is_sent = codes < 2**bits - 1
        found.append(i * CHUNK + ((codes + is_sent).cumsum(0) - 1)[is_sent])
        at += math.ceil(n_codes * bits / 8)
    return torch.cat(found), at


def decode_values(data, m, level):
    """Returns the m values that encode_values made bytes of."""
    n_blocks = math.ceil(m / level.block)
    scales = data[: 2 * n_blocks].clone().view(torch.bfloat16).float().repeat_interleave(level.block)[:m]
    codes = unpack(data[2 * n_blocks :], level.bits, m)
    if level.bits == 2:
        return scales * (1 + codes % 2) * torch.where(codes < 2, 1, -1)
    half = 2 ** (level.bits - 1)
    return scales * ((codes ^ half) - half)  # two's complement


def unpack(data, bits, m):
    """Returns the m codes that pack made bytes of."""
    stream = (data[: math.ceil(m * bits / 8), None].long() >> torch.arange(8) & 1).flatten()[: m * bits]
    return (stream.view(m, bits) << torch.arange(bits)).sum(1)


# ---- exchange ----


def exchange(bodies):
    """Sends bodies[d] to rank d. Returns the bodies that came, in rank order."""
    lengths = torch.tensor([len(body) for body in bodies])
    expected = torch.empty_like(lengths)
    dist.all_to_all_single(expected, lengths)
    received = torch.empty(int(expected.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(bodies), expected.tolist(), lengths.tolist())
    return received.split(expected.tolist())


def reduce_scatter(gradient, residual, level):
    """Returns this rank's row of the mean over ranks (n / W,), and how many bytes this rank's gradient took.
    Updates the residual. gradient and residual are (W, n / W)."""
    world_size, n = gradient.shape
    bodies = []
    for d in range(world_size):
        acc = gradient[d] + residual[d]
        bodies.append(encode(acc, level))
        residual[d] = acc - decode(bodies[d], n, level)
    mean = torch.zeros(n)
    for body in exchange(bodies):
        mean += decode(body, n, level) * (1 / world_size)
    return mean, sum(map(len, bodies))


# ---- schedule: what may be sent now, and how long Adam's first moment is ----

WINDOW = 20  # steps
FRESH = 3  # windows of level 0
NOISE = 1.3  # gradients of less coherence are mostly noise
FAINT = 0.03  # elements whose gradients are below this times the root mean square do not count
LONG, SHORT, FADING = 0.9, 0.5, 5  # beta1 at first, beta1 in the end, windows in between


Plan = namedtuple("Plan", "level beta1")


def schedule(plan, coherence, n_windows):
    """Returns the plan for the next window. A selected value brings the sum of some 20 gradients. If they
    were noise, 20 steps would have come to that sum, too. If they pointed one way, Adam now makes one step
    instead of 20. So a new model sends every value, in 8 bits and then in 4, until its gradients are noise.
    Then the first moment becomes short, because it would delay once more what has waited in the residual.
    Then 5 % of the values travel.

    The library decides this for each parameter, and sends norms, biases and attention in more bits. Left out
    here: a level between the last two; more values of parameters with large gradients; a longer second
    moment; weaker demands on the last parameters; and the way back, if gradients point one way again, a
    residual grows or the loss rises."""
    if plan.level == 0:
        return Plan(1, LONG) if n_windows >= FRESH else plan
    if plan.level == 2 or coherence >= NOISE:
        return plan
    if plan.beta1 > SHORT:
        return Plan(1, max(SHORT, plan.beta1 - (LONG - SHORT) / FADING))
    return Plan(2, SHORT)


def coherence_of(gradients):
    """Returns the mean of s^2 / q over elements and ranks, with s the sum of an element's gradients in a
    window and q that of their squares: about 1 for noise, WINDOW if gradients never change."""
    s, q = gradients.sum(0), gradients.square().sum(0)  # gradients (WINDOW, W, n / W)
    counts = q > FAINT**2 * q.mean()
    both = torch.stack([(s[counts].square() / q[counts]).sum(), counts.sum()])
    dist.all_reduce(both)  # so that all ranks decide alike
    return float(both[0] / both[1])


# ---- a small model, which guesses the next character from the last 16, and its training ----

CONTEXT = 16
WORDS = ["a the one that", "old red small", "fox house river child", "sees likes follows", "her him them us"]


def make_text():
    """Returns sentences of random words as numbers (characters,)."""
    choose = random.Random(1).choice
    text = "".join(" ".join(choose(words.split()) for words in WORDS) + ". " for _ in range(1500))
    letters = sorted(set(text))
    return torch.tensor([letters.index(letter) for letter in text])


def make_model(n_letters, world_size):
    """Returns the model, and rows (W, n / W): the memory of its parameters, padded."""
    torch.manual_seed(1)  # the same model on all ranks
    model = nn.Sequential(
        nn.Embedding(n_letters, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 64),
        nn.GELU(),
        nn.Linear(64, n_letters),
    )
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    flat = F.pad(flat, (0, -len(flat) % world_size))
    nn.utils.vector_to_parameters(flat, model.parameters())
    return model, flat.view(world_size, -1)


def loss_and_gradient(model, text, rows):
    """Returns the loss of a random batch and its gradient, shaped like rows."""
    starts = torch.randint(len(text) - CONTEXT, (64,))
    batch = text[starts[:, None] + torch.arange(CONTEXT + 1)]  # (64, CONTEXT + 1)
    loss = F.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    flat = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
    return loss.item(), F.pad(flat, (0, rows.numel() - len(flat))).view_as(rows)


def train(n_steps, reduce=reduce_scatter):
    """Returns this rank's losses, and the plan of each step. Prints a line for each window."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = make_text()
    model, rows = make_model(int(text.max()) + 1, world_size)
    mine, residual = rows[rank].clone(), torch.zeros_like(rows)
    adam = torch.optim.Adam([mine], lr=2e-3)
    torch.manual_seed(1000 + rank)  # text of its own for each rank
    plan, plans, losses, gradients = Plan(0, LONG), [], [], []
    for step in range(1, n_steps + 1):
        loss, gradient = loss_and_gradient(model, text, rows)
        mine.grad, n_bytes = reduce(gradient, residual, LEVELS[plan.level])
        adam.param_groups[0]["betas"] = (plan.beta1, 0.95)
        adam.step()
        dist.all_gather(list(rows), mine)
        plans, losses, gradients = [*plans, plan], [*losses, loss], [*gradients, gradient]
        if step % WINDOW == 0:
            coherence = coherence_of(torch.stack(gradients))
            if rank == 0:
                print(
                    f"step {step:3}: loss {sum(losses[-WINDOW:]) / WINDOW:.4f}, level {plan.level}, "
                    f"{8 * n_bytes / rows.numel():.2f} bits per parameter, beta1 {plan.beta1:.2f}, "
                    f"coherence {coherence:.2f}",
                    flush=True,
                )
            plan, gradients = schedule(plan, coherence, step // WINDOW), []
    return losses, plans


def main(rank=-1, world_size=-1, meet="env://"):
    dist.init_process_group("gloo", meet, rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    train(360)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # a process of torchrun
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(main, (2, f"file://{folder}/meet"), nprocs=2)
