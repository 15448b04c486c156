"""What stages of a pipeline send each other: training and evaluation equal, bit for bit, a model in one
process whose tensors are rounded at the same boundaries by a coder of this file's own."""

import contextlib
import io
import math
import re

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from oracles import check_error
from torch import nn

from tagc.pipeline import compress_stage

WIDTH, BATCH, CHUNKS, STEPS = 40, 12, 4, 3
IN_A_V = ("ZBVZeroBubble", "DualPipeV")


# ---- the oracle: rounding ----


def thresholds(seed, n):
    """32 random bits for each of the positions 0 to n - 1, by the generator that include/tagc/blocks.h
    derives from the seed."""

    def mixed(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    start = mixed(mixed(mixed((seed + 0x9E3779B97F4A7C15) % 2**64))) >> 32
    x = (torch.arange(n) // 4 + start) % 2**32
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0x735A2D97 % 2**32
    x = x ^ x >> 15
    turn = torch.arange(n) % 4 * 8 + 8
    return (x >> turn | x << 32 - turn) % 2**32


def arrives(tensor, values, block, seed=None):
    """What is left of it after a message of blocks; seed: of stochastic rounding, None for the nearest."""
    if values == "whole":
        return tensor
    most, n = {"int8": 127, "int4": 7}[values], tensor.numel()
    x = nn.functional.pad(tensor.detach().float().flatten(), (0, -n % block)).view(-1, block)
    scale = x.abs().amax(1, keepdim=True) / most
    if seed is None:
        scale = scale.bfloat16().float()
    else:
        scale = ((scale.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    codes = x * (1 / scale)
    if seed is None:
        codes = codes.round().clamp(-most, most)
    else:
        bits = 8 if values == "int8" else 4
        fixed = (codes.clamp(-most, most) * 2.0 ** (32 - bits)).nan_to_num().long()
        codes = (fixed + (thresholds(seed, x.numel()).view_as(x) >> bits) >> 32 - bits).float()
    codes = torch.where(scale > 0, codes, 0)
    return (codes * scale).flatten()[:n].view(tensor.shape).to(tensor.dtype)


def message_bytes(n, values, block):
    return 64 + 2 * math.ceil(n / block) + math.ceil(n * {"int8": 8, "int4": 4}[values] / 8)


class Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward, block, seed):
        ctx.way = backward, block, seed
        return arrives(x, forward, block).clone()

    @staticmethod
    def backward(ctx, gradient):
        return arrives(gradient, *ctx.way), None, None, None, None


# ---- models ----


class Stage(nn.Module):
    """Passes on activations of that dtype, and beside them what it got of integers."""

    def __init__(self, i, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(i)
        self.one, self.two, self.dtype = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), dtype

    def forward(self, x, mask=None):
        x = x.float()
        x = x + self.two(torch.tanh(self.one(x)))
        if mask is None:
            return x.to(self.dtype)
        return (x * (mask % 3 != 0)).to(self.dtype), mask


def data_of(step, part=0):
    generator = torch.Generator().manual_seed(100 * step + part)
    x, target = torch.randn(2, BATCH, WIDTH, generator=generator)
    return x, target, torch.randint(0, 9, (BATCH, WIDTH), generator=generator)


def loss_of(output, target):
    output = output[0] if isinstance(output, tuple) else output
    return nn.functional.mse_loss(output.float(), target)


def optimizer_of(stages):
    return torch.optim.SGD([p for stage in stages for p in stage.parameters()], 0.3)


def expected(n_stages, between, options, masked=False, dtype=torch.float32):
    """(parameters of each stage, output of an evaluation) of all stages in one process. between: numbers of
    stages whose outputs travel between hosts."""
    stages = [Stage(i, dtype) for i in range(n_stages)]
    optimizer = optimizer_of(stages)

    def run(x, mask, chunk, step):
        for i, stage in enumerate(stages):
            output = stage(x, mask) if masked else stage(x)
            x, mask = output if masked else (output, None)
            if i in between:
                seed = step << 40 | (i + 1) << 24 | chunk << 8
                x = Boundary.apply(
                    x,
                    options.get("forward", "int8"),
                    options.get("backward", "int4"),
                    options.get("block", 64),
                    seed,
                )
        return x

    for step in range(STEPS):
        parts = zip(*(tensor.chunk(CHUNKS) for tensor in data_of(step)))
        for chunk, (x, target, mask) in enumerate(parts):
            loss_of(run(x, mask, chunk, step), target).backward()
        for stage in stages:
            for p in stage.parameters():
                p.grad.div_(CHUNKS)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        x, _, mask = data_of(STEPS)
        output = torch.cat([run(*part, 0, 0) for part in zip(x.chunk(CHUNKS), mask.chunk(CHUNKS))])
    return [[p.detach() for p in stage.parameters()] for stage in stages], output


# ---- pipelines ----


def own_stages(schedule, rank, world_size, n_stages):
    """The numbers of this rank's stages."""
    if schedule in IN_A_V:
        return [rank, n_stages - 1 - rank]
    return list(range(rank, n_stages, world_size))


class Pipe:
    """The stages of this rank, with a schedule over them."""

    def __init__(self, schedule, n_stages, wrap=None, group=None, masked=False, dtype=torch.float32):
        from torch.distributed import pipelining

        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.numbers, self.masked = own_stages(schedule, rank, world_size, n_stages), masked
        self.modules = [Stage(i, dtype) for i in self.numbers]
        if wrap is not None:
            self.modules = [wrap(module) for module in self.modules]
        self.stages = [
            pipelining.PipelineStage(module, i, n_stages, torch.device("cpu"), group=group)
            for i, module in zip(self.numbers, self.modules)
        ]
        made = getattr(pipelining, f"Schedule{schedule}")
        several = self.stages if len(self.stages) > 1 else self.stages[0]
        self.schedule = made(several, n_microbatches=CHUNKS, loss_fn=loss_of)
        self.optimizer = optimizer_of(self.modules)
        self.is_first, self.is_last = 0 in self.numbers, n_stages - 1 in self.numbers
        self.handles = []

    def compress(self, **options):

        self.handles = [compress_stage(stage, **{"verbose": False} | options) for stage in self.stages]
        return self

    def step(self, step, part=0):
        x, target, mask = data_of(step, part)
        arguments = ((x, mask) if self.masked else (x,)) if self.is_first else ()
        self.schedule.step(*arguments, **({"target": target} if self.is_last else {}))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps=range(STEPS), part=0):
        for step in steps:
            self.step(step, part)
        return self

    @torch.no_grad()
    def evaluate(self):
        x, target, mask = data_of(STEPS)
        arguments = ((x, mask) if self.masked else (x,)) if self.is_first else ()
        output = self.schedule.eval(*arguments, **({"target": target} if self.is_last else {}))
        return output[0] if isinstance(output, tuple) else output

    def parameters(self):
        return [[p.detach().clone() for p in module.parameters()] for module in self.modules]

    def close(self):
        for handle in self.handles:
            handle.close()


def same(ours, theirs):
    return all(torch.equal(one, other) for a, b in zip(ours, theirs) for one, other in zip(a, b))


def traffic(pipe, between, options, n_evaluations=1, whole=()):
    """Checks what the handles of a Pipe have counted. between: as of expected(); whole: the same of outputs
    that travel within a host."""
    n, block = BATCH // CHUNKS * WIDTH, options.get("block", 64)
    for i, handle in zip(pipe.numbers, pipe.handles):
        stats, n_train = handle.stats(), STEPS * CHUNKS
        for way, values, count, out, into in (
            ("forward", "int8", n_train + n_evaluations * CHUNKS, i, i - 1),
            ("backward", "int4", n_train, i - 1, i),
        ):
            each, dense = message_bytes(n, options.get(way, values), block), 4 * n
            sent, received = (
                each if boundary in between else dense if boundary in whole else 0 for boundary in (out, into)
            )
            found = {name: value for name, value in stats[way].items() if name != "codec_s"}
            assert found == {
                "bytes_sent": count * sent,
                "bytes_received": count * received,
                "dense_bytes": count * dense if sent else 0,
                "whole_bytes": count * dense if out in whole else 0,
                "messages_sent": count if out in between else 0,
            }, (i, way)
        assert stats["steps"] == STEPS + n_evaluations
        assert stats["bytes_sent"] == stats["forward"]["bytes_sent"] + stats["backward"]["bytes_sent"]


SCHEDULES = [
    ("GPipe", 2, {}),
    ("1F1B", 2, {"block": 16, "forward": "int4"}),
    ("Interleaved1F1B", 4, {"backward": "int8"}),
    ("InterleavedZeroBubble", 4, {"block": 32}),
    ("ZBVZeroBubble", 4, {}),
    ("DualPipeV", 4, {"block": 128}),
]


def schedules_equal_the_oracle(rank, world_size):
    for schedule, n_stages, options in SCHEDULES:
        crosses = [{0, 1, 2} - ({1} if schedule in IN_A_V else set()), {0}][n_stages == 2]
        pipe = Pipe(schedule, n_stages).compress(hosts=2, **options).train()
        parameters, output = expected(n_stages, crosses, options)
        assert same(pipe.parameters(), [parameters[i] for i in pipe.numbers]), schedule
        if schedule not in IN_A_V:  # which cannot evaluate, with or without tagc
            found = pipe.evaluate()
            if pipe.is_last:
                assert torch.equal(found, output), schedule
        traffic(pipe, crosses, options, schedule not in IN_A_V)
        plain = expected(n_stages, set(), {})[0]
        assert not same(pipe.parameters(), [plain[i] for i in pipe.numbers]), "this shows nothing"


def without_compression_equals_torch(rank, world_size):
    """As options ask for it, as all ranks are on one host, and after close()."""
    for schedule, n_stages, _ in SCHEDULES:
        dense = Pipe(schedule, n_stages).train().parameters()
        pipe = Pipe(schedule, n_stages).compress(hosts=2, forward="whole", backward="whole").train()
        assert same(pipe.parameters(), dense), schedule
        assert all(handle.stats().get("ratio", 1) == 1 for handle in pipe.handles)
        pipe = Pipe(schedule, n_stages).compress(hosts=2)
        taken = [set(vars(stage)) for stage in pipe.stages]
        pipe.close()
        pipe.close()
        names = {"get_fwd_send_ops", "get_bwd_recv_ops", "forward_one_chunk", "clear_runtime_states"}
        assert all(names <= before and not names & set(vars(s)) for before, s in zip(taken, pipe.stages))
        assert same(pipe.train().parameters(), dense), schedule
        pipe.compress(hosts=2).train([STEPS])  # and once more
        assert pipe.handles[0].stats()["ratio"] > 2


def on_one_host_nothing_is_compressed(rank, world_size):

    pipe = Pipe("GPipe", 2).compress().train()
    assert same(pipe.parameters(), Pipe("GPipe", 2).train().parameters())
    assert pipe.handles[0].stats()["forward"]["messages_sent"] == 0
    for words, options in (
        ("all 2 ranks of this pipeline are on one host, .*; hosts=2 compresses it", {}),
        (
            "2 stages on 2 ranks and 2 hosts: .*activations .* int8 and .*gradients as int4.* per 64",
            {"hosts": 2},
        ),
        ("travels whole, as you asked", {"forward": "whole", "backward": "whole"}),
    ):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            handle = compress_stage(Pipe("GPipe", 2).stages[0], **options)
        assert re.search(words, handle.table()), handle.table()
        assert said.getvalue() == (f"{handle.table()}\n" if rank == 0 else "")


def a_resumed_run_equals_one_that_went_on(rank, world_size):
    """With an evaluation in between, which rounds nothing at random."""
    import tagc.torch as tagc

    whole = Pipe("Interleaved1F1B", 4).compress(hosts=2).train(range(4))
    begun = Pipe("Interleaved1F1B", 4).compress(hosts=2).train(range(2))
    begun.evaluate()
    saved = [
        (module.state_dict(), handle.state_dict()) for module, handle in zip(begun.modules, begun.handles)
    ]
    for loads in (True, False):
        resumed = Pipe("Interleaved1F1B", 4).compress(hosts=2)
        for module, handle, (parameters, state) in zip(resumed.modules, resumed.handles, saved):
            module.load_state_dict(parameters)
            if loads:
                handle.load_state_dict(state)
        resumed.train(range(2, 4))
        # nobody sends gradients to the last stage, which knows their bits
        assert same(resumed.parameters(), whole.parameters()) == loads
    handle, state = resumed.handles[0], saved[0][1]
    before = handle.state_dict()
    for wrong, words in (
        ({}, "saved must be what state_dict"),
        (None, "saved must be what state_dict"),
        (state | {"version": 2}, "the saved version is 2, and must be 1"),
        (saved[1][1], f"the saved stage is {rank + 2}, and must be {rank}"),
        (state | {"n_stages": 8}, "the saved number of stages is 8, and must be 4"),
        (state | {"n_backward": -1}, "n_backward is -1, must be a whole number from 0 to 16777215"),
        (state | {"n_backward": 1.5}, "n_backward is 1.5"),
    ):
        with pytest.raises(tagc.Error, match=words):
            handle.load_state_dict(wrong)
        assert handle.state_dict() == before


def other_tensors(rank, world_size):
    """Integers travel whole beside activations; these may be bf16."""
    for masked, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        pipe = Pipe("1F1B", 2, masked=masked, dtype=dtype).compress(hosts=2).train()
        parameters, output = expected(2, {0}, {}, masked, dtype)
        assert same(pipe.parameters(), [parameters[i] for i in pipe.numbers]), (masked, dtype)
        found = pipe.evaluate()
        if pipe.is_last:
            assert torch.equal(found, output)
        whole = pipe.handles[0].stats()["forward"]["whole_bytes"]
        assert whole == (8 * (STEPS + 1) * BATCH * WIDTH if masked and rank == 0 else 0)


def what_does_not_fit_is_refused(rank, world_size):
    import tagc.torch as tagc

    stage = Pipe("GPipe", 2).stages[0]
    for options, words in (
        (dict(forward="int3"), "forward is 'int3', must be one of 'int8', 'int4', 'whole'"),
        (dict(backward="fp32"), "backward is 'fp32'"),
        (dict(block=48), "block is 48, must be a power of two from 16 to 4096"),
        (dict(block=8), "block is 8"),
        (dict(hosts=3), "hosts is 3, must be a whole number from 1 to 2"),
        (dict(forward="int4" if rank else "int8"), "forward is 'int8' on rank 0 and 'int4' on rank 1"),
        (dict(block=32 if rank else 64), "block is 64 on rank 0 and 32 on rank 1"),
        (dict(hosts=2 if rank else None), "hosts is None on rank 0 and 2 on rank 1"),
    ):
        check_error(lambda options=options: compress_stage(stage, verbose=False, **options), words)
        assert "get_fwd_send_ops" not in vars(stage)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    check_error(lambda: compress_stage(model), "stage is a DistributedDataParallel, must be a PipelineStage")
    check_error(lambda: tagc.compress(stage), "model is a PipelineStage, must be a torch.nn.Module")
    with pytest.raises(TypeError, match="sparsity"):  # on this rank alone, before anything is collective
        compress_stage(stage, sparsity=0.9)
    handle = compress_stage(stage, verbose=False)
    check_error(lambda: compress_stage(stage, verbose=False), "stage 0 is compressed already")
    handle.close()


def all_stages_or_none(rank, world_size):

    pipe = Pipe("Interleaved1F1B", 4)
    first = compress_stage(pipe.stages[0], hosts=2, verbose=False)
    check_error(lambda: pipe.step(0), "compressed, and stage 2 of its pipeline is not", same=False)
    check_error(
        lambda: compress_stage(pipe.stages[1], hosts=2, block=32, verbose=False),
        "block is 32, and was 64 for stage 0 of the same pipeline",
    )
    other = Pipe("Interleaved1F1B", 4)
    check_error(
        lambda: compress_stage(other.stages[0], hosts=2, verbose=False),
        "stage 0 of this pipeline is compressed twice",
    )
    second = compress_stage(pipe.stages[1], hosts=2, verbose=False)
    pipe.train()
    second.close()
    check_error(lambda: pipe.step(0), "another one of its pipeline is closed", same=False)
    first.close()
    pipe.step(0)


def a_shape_that_changes_is_refused(rank, world_size):
    import tagc.torch as tagc

    pipe = Pipe("GPipe", 2).compress(hosts=2).train()
    if rank == 0:
        with pytest.raises(
            tagc.Error, match=r"stage 0, micro-batch 0: activation 0 has the shape \(2, 40\)"
        ) as raised:
            pipe.schedule.step(torch.randn(8, WIDTH))
        assert "expects (3, 40) and torch.float32" in str(raised.value)
    dist.barrier()


def damage_is_found(rank, world_size):
    """A bit of the last message changes on its way. Rank 0 only sends in an evaluation, and so waits for
    nobody."""
    import tagc.torch as tagc

    pipe = Pipe("GPipe", 2).compress(hosts=2).train()
    handle, stage = pipe.handles[0], pipe.stages[0]
    if rank == 0:
        pipe.evaluate()
        return
    compute = stage.forward_one_chunk

    def flipped(chunk, *arguments, **named):
        for key, message in handle._messages.items():
            if key[:3] == ("receive", "forward", chunk) and chunk == CHUNKS - 1:
                message[70] ^= 4
        return compute(chunk, *arguments, **named)

    stage.forward_one_chunk = flipped
    words = "stage 1, micro-batch 3: activation 0 from rank 0 cannot be decoded: the checksum is wrong"
    with pytest.raises(tagc.Error, match=words) as raised:
        pipe.evaluate()
    assert raised.value.status == "corrupt"


# ---- four ranks ----


def four_stages(rank, world_size):
    """On four hosts, and on two, where only the middle boundary is between them."""
    for hosts, crosses in ((4, {0, 1, 2}), (2, {1})):
        pipe = Pipe("1F1B", 4).compress(hosts=hosts).train()
        parameters, _ = expected(4, crosses, {})
        assert same(pipe.parameters(), [parameters[i] for i in pipe.numbers]), hosts
        traffic(pipe, crosses, {}, 0, {0, 1, 2} - crosses)


def pipelines_beside_each_other_round_otherwise(rank, world_size):
    """Two with the same data and parameters: what one loses, the other one must not lose, too."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = Pipe("1F1B", 2, group=mesh["pp"].get_group()).compress(hosts=2).train([0])
    mine = torch.cat([p.flatten() for p in pipe.parameters()[0]])
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine, group=mesh["dp"].get_group())
    assert torch.equal(*theirs) == pipe.is_last


def beside_compressed_gradients(rank, world_size):
    """Each of two stages is sharded or replicated over two ranks, whose gradients tagc exchanges, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    dp, data = mesh["dp"].get_local_rank(), mesh["dp"]

    def wraps(kind):
        if kind == "fsdp2":
            return lambda module: fully_shard(module, mesh=data)
        return lambda module: nn.parallel.DistributedDataParallel(module, process_group=data.get_group())

    for kind in ("fsdp2", "ddp"):
        found = []
        for values in (None, "fp32", "int4"):
            pipe = Pipe("1F1B", 2, wraps(kind), mesh["pp"].get_group()).compress(hosts=2)
            if values is not None:
                model = pipe.modules[0]
                gradients = tagc.compress(model, sparsity=0, values=values, layers="all", verbose=False)
            pipe.train(part=1 + dp)
            found.append([getattr(p, "to_local", lambda p=p: p)().clone() for p in pipe.parameters()[0]])
            assert pipe.handles[0].stats()["ratio"] > 2
            if values is not None:
                # with DDP, torch's own look at shapes before the first step exchanges gradients, too
                assert gradients.n_steps == STEPS + (kind == "ddp"), (kind, gradients.n_steps)
                gradients.close()
        for ours, theirs, lossy in zip(*found):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            assert not torch.equal(ours, lossy), "this shows nothing"


# ---- one process ----


def test_a_codec_takes_all_floats_and_strides():
    from tagc.pipeline.blocks import Codec

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((7, 33), (1,), (5, 0), (4, 16, 8)):
            tensor = torch.randn(*shape).to(dtype).transpose(0, -1)
            for values, seed in (("int8", None), ("int4", None), ("int4", 3 << 40 | 5)):
                codec = Codec(values, 32, seed is not None)
                message = torch.empty(codec.n_bytes(tensor.numel()), dtype=torch.uint8)
                assert message.numel() == message_bytes(tensor.numel(), values, 32)
                codec.encode(tensor, message, seed or 0)
                back = torch.full_like(tensor, 9)
                assert back.stride() == tensor.stride()
                codec.decode(message, back)
                assert torch.equal(back, arrives(tensor, values, 32, seed)), (dtype, shape, values)
    assert not Codec.takes(torch.float64) and not Codec.takes(torch.bool)


def test_what_is_not_finite_stays_so():
    """A scaler of losses sees it, and other blocks are as they were."""
    from tagc.pipeline.blocks import Codec

    codec, tensor, back = Codec("int4", 16, True), torch.full((48,), 7.0).half(), torch.empty(48).half()
    tensor[20] = math.inf
    message = torch.empty(codec.n_bytes(48), dtype=torch.uint8)
    codec.encode(tensor, message, 1)
    codec.decode(message, back)
    assert back[16:32].isnan().all() and torch.equal(back[:16], tensor[:16]) and back[32:].isfinite().all()


# ---- launches ----


def test_two_ranks():
    ranks.run_each(
        [
            schedules_equal_the_oracle,
            without_compression_equals_torch,
            on_one_host_nothing_is_compressed,
            a_resumed_run_equals_one_that_went_on,
            other_tensors,
            what_does_not_fit_is_refused,
            all_stages_or_none,
            a_shape_that_changes_is_refused,
            damage_is_found,
        ],
        2,
    )


def test_four_ranks():
    ranks.run_each([four_stages, pipelines_beside_each_other_round_otherwise, beside_compressed_gradients], 4)


def test_literals():
    """What a type checker takes is what is checked at run time."""
    from typing import get_args

    from tagc.pipeline import stage

    assert set(get_args(stage.Boundary)) == set(stage.VALUES)
