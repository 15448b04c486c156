"""Plans on a mesh beside torch: what its modules keep and send, in which order its pipelines run, and what
the stages send each other. Nothing here shares code with planning/mesh/."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_mesh import BASE, GPIPE, INTERLEAVED, ONE_F_ONE_B, TORCH, ZERO_BUBBLE, activations, ask, message
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Attention(nn.Module):
    def __init__(self, width, n_head):
        super().__init__()
        self.size = width // n_head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width, ffn, is_gated):
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.gate = nn.Linear(width, ffn) if is_gated else None

    def forward(self, x):
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, is_gated):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(256), nn.LayerNorm(256)
        self.attn, self.mlp = Attention(256, 8), FeedForward(256, 1024, is_gated)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Sent(TorchDispatchMode):
    """Counts what a rank of `n` sends in collectives, as rings send it."""

    def __init__(self, n):
        super().__init__()
        self.n, self.n_bytes = n, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, n = func._schema.name.removeprefix("_c10d_functional::"), self.n
        part = {
            "all_reduce": 2 * (n - 1) / n,
            "reduce_scatter_tensor": (n - 1) / n,
            "all_gather_into_tensor": n - 1,
            "all_to_all_single": 1,
        }.get(name)
        if part is not None:
            self.n_bytes += part * args[0].numel() * args[0].element_size()
        return out


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def saved(run, parameters):
    """Returns (bytes that autograd saves, without parameters, what run() returned)."""
    found, alive = {}, []
    known = {local(parameter).untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor):
        storage = local(tensor).untyped_storage()
        alive.append(storage)
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    return sum(found.values()), out


def split(block, mesh, is_gated, is_sequence):
    """Splits a block as torchtitan does."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    along = Shard(1) if is_sequence else Replicate()
    gather = tp.PrepareModuleInput(input_layouts=along, desired_input_layouts=Replicate())
    how = {"attn": gather, "mlp": gather}
    columns = ["attn.q", "attn.k", "attn.v", "mlp.up"] + ["mlp.gate"] * is_gated
    how |= {name: tp.ColwiseParallel() for name in columns}
    how |= {name: tp.RowwiseParallel(output_layouts=along) for name in ("attn.o", "mlp.down")}
    how |= {name: tp.SequenceParallel() for name in ("n1", "n2")} if is_sequence else {}
    tp.parallelize_module(block, mesh, how)


@pytest.fixture
def four_ranks():
    """A mesh of four ranks, of which this process is the first; the others send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield dist.device_mesh.init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("sequence", [None, 0, TORCH])
@pytest.mark.parametrize("is_gated", [0, 1])
def test_torch_keeps_and_sends_as_planned(four_ranks, is_gated, sequence):
    """Of a real model split by torch: parameters, what autograd saves, and the bytes of its collectives.
    None: not split at all. A plan leaves out means and deviations of norms, 16 bytes per token."""
    n_tensor, is_sequence = 1 if sequence is None else 4, sequence == TORCH
    shape = dict(BASE, is_gated=is_gated, n_tensor=n_tensor, world_size=n_tensor, sequence=sequence or 0)
    layers = nn.Sequential(*[Block(is_gated) for _ in range(3)]).bfloat16()
    for block in layers if n_tensor > 1 else ():
        split(block, four_ranks, is_gated, is_sequence)
    x = torch.randn(2, 128 // (4 if is_sequence else 1), 256, dtype=torch.bfloat16, requires_grad=True)
    with Sent(4) as sent:
        n_saved, out = saved(lambda: layers(x), layers.parameters())
        local(out).sum().backward()
    planned = [
        ask(**shape | dict(n_layer=n)) for n in (3, 6)
    ]  # what three layers more take, without the ends

    def more(get):
        return get(planned[1]) - get(planned[0])

    assert 1 <= n_saved / more(lambda plan: plan["device"]["activations"]) < 1.003
    assert sent.n_bytes == more(lambda plan: plan["legs"]["tensor"]["rank"])
    n_params = sum(local(parameter).numel() for parameter in layers.parameters())
    bias_of_gates = 3 * 1024 // n_tensor if is_gated else 0  # SwiGLU with biases is no published model
    assert 4 * (n_params - bias_of_gates) == more(lambda plan: plan["device"]["parameters"])


def test_ring_attention_sends_as_planned(four_ranks):
    """torch's own ring, forward and back: keys and values twice, their gradients in fp32 once around."""
    ring = pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._attention",
        reason="this torch has its ring attention elsewhere",
    )
    aten, group = torch.ops.aten, dist.group.WORLD
    q, k, v = (torch.randn(2, 8, 32, 32, dtype=torch.bfloat16) for _ in range(3))

    def back(query, key, value, out, logsumexp, grad_out, is_causal):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, is_causal
        )

    with Sent(4) as sent:
        out, logsumexp, *_ = ring._templated_ring_attention(
            group, 2, aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=True
        )
        ring._templated_ring_attention_backward(
            group,
            2,
            back,
            grad_out=out,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=logsumexp,
            is_causal=True,
        )
    planned = [ask(n_layer=n, n_context=4, world_size=4)["legs"]["context"]["rank"] for n in (3, 4)]
    assert sent.n_bytes == planned[1] - planned[0]


# ---- pipelines ----


def run_schedule(name, n_ranks, n_micro_batches, n_stages_per_rank):
    """Returns (bubble, chunks in flight of each rank) of torch's own schedule, where a forward pass, a
    backward pass to the input and one to the weights take a unit of time each."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    orders = [
        [action for action in order if action is not None]
        for order in get_schedule_ops(name, n_ranks, n_micro_batches, n_stages_per_rank)
    ]
    last = n_ranks * n_stages_per_rank - 1
    clock, at, most = [0] * n_ranks, [0] * n_ranks, [0] * n_ranks
    live, done, busy = [0] * n_ranks, {}, [0] * n_ranks

    def needs(kind, stage, batch):
        if kind == "FORWARD":
            return [("F", stage - 1, batch)] if stage > 0 else []
        if kind == "BACKWARD_WEIGHT":
            return []
        return [("B", stage + 1, batch)] if stage < last else [("F", stage, batch)]

    while any(at[rank] < len(orders[rank]) for rank in range(n_ranks)):
        before = list(at)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                kind, stage, batch = action.computation_type.name, action.stage_index, action.microbatch_index
                found = [done.get(one) for one in needs(kind, stage, batch)]
                if None in found:
                    break
                takes = 2 if kind == "FULL_BACKWARD" else 1
                clock[rank] = max([clock[rank], *found]) + takes
                busy[rank] += takes
                live[rank] += {"FORWARD": 1, "BACKWARD_INPUT": 0}.get(kind, -1)
                most[rank] = max(most[rank], live[rank])
                if kind != "BACKWARD_WEIGHT":
                    done["F" if kind == "FORWARD" else "B", stage, batch] = clock[rank]
                at[rank] += 1
        assert at != before, "a schedule that waits for itself"
    return (max(clock) - busy[0]) / busy[0], most


def in_flight(**numbers):
    """Returns the chunks that a rank holds, from its activations. A small vocabulary leaves the head out."""
    shape = dict(n_layer=24, n_vocab=1, n_ffn=1024) | numbers
    per_chunk = activations(n_layer=24 // (numbers["n_pipeline"] * numbers["n_stages_per_rank"]), n_vocab=1)
    per_chunk -= activations(n_layer=1, n_vocab=1) - (
        activations(n_layer=2, n_vocab=1) - activations(n_layer=1, n_vocab=1)
    )
    return round(activations(**shape) / per_chunk, 2)


def test_schedules_are_those_of_torch():
    """Bubbles of torch's own schedules, and how many chunks the rank that holds most has in flight."""
    names = {INTERLEAVED: "Interleaved1F1B", ZERO_BUBBLE: "InterleavedZeroBubble"}
    for schedule, (p, m), v in itertools.product(names, ((2, 4), (4, 4), (4, 8), (4, 16)), (2, 3)):
        bubble, chunks = run_schedule(names[schedule], p, m, v)
        how = dict(n_pipeline=p, n_micro_batches=m, n_stages_per_rank=v, schedule=schedule, world_size=p)
        found = ask(n_layer=24, **how)
        assert found["bubble"] == pytest.approx(bubble), (schedule, p, m, v)
        assert found["in_flight"] * v == max(chunks), (schedule, p, m, v)
        assert in_flight(**how) == pytest.approx(max(chunks), rel=0.01)


def test_schedules_are_those_that_are_published():
    """GPipe and 1F1B idle for (p - 1) / m, zero bubble (ZB-H1) for a third of that; 1F1B holds p batches."""
    for p, m in ((2, 4), (4, 2), (4, 16), (8, 64)):
        for schedule, bubble, held in (
            (GPIPE, (p - 1) / m, m),
            (ONE_F_ONE_B, (p - 1) / m, min(p, m)),
            (ZERO_BUBBLE, (p - 1) / m / 3, min(p, m)),
        ):
            how = dict(n_pipeline=p, n_micro_batches=m, n_stages_per_rank=1, schedule=schedule, world_size=p)
            found = ask(**how, n_layer=24, n_vocab=1)
            assert found["bubble"] == pytest.approx(bubble) and found["in_flight"] == held
            assert in_flight(**how) == pytest.approx(held, rel=0.05)


def test_stages_send_what_torch_sends():
    """The sends of torch's own schedules, whole within a host and as messages of blocks between hosts."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    n, p, m = 2 * 128 * 256, 4, 8
    for v, per_host in itertools.product((2, 3), (1, 2, 4)):
        orders = get_schedule_ops("Interleaved1F1B", p, m, v, with_comms=True)
        for values in (("bf16", "bf16"), ("int8", "int4"), ("int4", "int8")):
            of_rank, of_host = [0] * p, [0] * (p // per_host)
            for rank, order in enumerate(orders):
                for action in order:
                    kind = action.computation_type.name
                    if not kind.startswith("SEND"):
                        continue
                    peer = (rank + (1 if kind == "SEND_F" else -1)) % p
                    is_far = peer // per_host != rank // per_host
                    bits = {"bf16": 16, "int8": 8, "int4": 4}[values[kind == "SEND_B"]]
                    n_bytes = message(n, bits, 64) if is_far and bits < 16 else 2 * n
                    of_rank[rank] += n_bytes
                    of_host[rank // per_host] += n_bytes if is_far else 0
            found = ask(
                forward=values[0],
                backward=values[1],
                n_layer=24,
                n_pipeline=p,
                n_micro_batches=m,
                n_stages_per_rank=v,
                schedule=INTERLEAVED,
                world_size=p,
                ranks_per_host=per_host,
            )["legs"]["pipeline"]
            expected = dict(rank=max(of_rank), all=sum(of_rank), host=max(of_host), between=sum(of_host))
            assert found == expected, (v, per_host, values)
