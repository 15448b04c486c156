"""all_to_all() of Collectives, against torch's all_to_all_single(): what goes whole is the same bits, what is
rounded is within half a step of its block. Then its gradients, what it does for models with experts and for
attention over ranks, and what becomes of calls that differ between ranks."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
import plan_parts
import ranks
import torch.distributed as dist
import torch.nn.functional as F
from oracles import check_alike, check_error
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import checkpoint

WIDTH = 128  # of a token: two blocks


def collectives(**options):
    from tagc.collectives import Collectives

    return Collectives(**{"timeout_s": 60} | options)


def splits_of(rank, world_size, step, least=0):
    """What goes to each rank, and what comes from each. Many are 0."""
    torch.manual_seed(1000 + step)
    counts = (torch.rand(world_size, world_size) * 140).long()
    counts[torch.rand(world_size, world_size) < 0.25] = 0
    counts += least
    return counts[rank].tolist(), counts[:, rank].tolist()


def given(rank, step, n, dtype=torch.float32):
    values = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(31 * step + rank)) ** 3
    return (values * 20).to(dtype)


def torchs(input, sends, receives):
    """torch's own, of bytes: gloo moves few dtypes."""
    n_bytes = WIDTH * input.element_size()
    raw = input.contiguous().view(torch.uint8).view(len(input), n_bytes)
    output = torch.empty(sum(receives), n_bytes, dtype=torch.uint8)
    dist.all_to_all_single(output, raw, receives, sends)
    return output.view(input.dtype).view(-1, WIDTH)


def check_rounded(found, exact, is_whole, bits, what):
    """is_whole: rows that are the same bits. Others are within half a step of their block."""
    assert found[is_whole].view(torch.uint8).equal(exact[is_whole].view(torch.uint8)), what
    found, exact = found[~is_whole].float(), exact[~is_whole].float()
    if not len(exact):
        return
    step = exact.view(-1, 64).abs().amax(1, keepdim=True) / (127 if bits == 8 else 7)
    error = (found - exact).view(-1, 64).abs()
    assert (error <= 0.52 * step + 2**-8 * exact.view(-1, 64).abs()).all(), what
    assert error.any(), f"{what}: nothing was rounded"


def whole_rows(rank, world_size, receives, hosts):
    """Rows of the output that travel whole: from the own host, and in small messages."""
    per_host = world_size // (hosts or world_size)
    rows = []
    for host in range(world_size // per_host):
        own = receives[host * per_host : (host + 1) * per_host]
        is_whole = hosts == 1 or host == rank // per_host or sum(own) * WIDTH < 4096
        rows += [is_whole] * sum(own)
    return torch.tensor(rows, dtype=torch.bool)


def rows_arrive(rank, world_size, hosts=None):
    for forward in ("int8", "int4", "whole"):
        with collectives(forward=forward, hosts=hosts) as comm:
            for step, dtype in enumerate(
                (
                    torch.float32,
                    torch.bfloat16,
                    torch.float16,
                    torch.int64,
                    torch.float64,
                    torch.bool,
                    torch.uint8,
                )
            ):
                sends, receives = splits_of(rank, world_size, step)
                input = given(rank, step, sum(sends), dtype)
                exact, output = torchs(input, sends, receives), torch.empty(sum(receives), WIDTH, dtype=dtype)
                before = input.clone()
                assert comm.all_to_all(output, input, receives, sends, key="a") is None
                is_whole = whole_rows(rank, world_size, receives, hosts)
                if forward == "whole" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
                    is_whole[:] = True
                check_rounded(output, exact, is_whole, 4 if forward == "int4" else 8, (forward, dtype, hosts))
                assert input.equal(before)
            many = [splits_of(rank, world_size, step) for step in range(4)]
            inputs = [given(rank, step, sum(sends)) for step, (sends, _) in enumerate(many)]
            outputs = [torch.empty(sum(receives), WIDTH) for _, receives in many]
            works = [
                comm.all_to_all(output, input, receives, sends, async_op=True)
                for output, input, (sends, receives) in zip(outputs, inputs, many)
            ]
            assert all(work.wait() and work.is_success() for work in works)
            for output, input, (sends, receives) in zip(outputs, inputs, many):
                is_whole = whole_rows(rank, world_size, receives, hosts)
                if forward == "whole":
                    is_whole[:] = True
                exact = torchs(input, sends, receives)
                check_rounded(output, exact, is_whole, 4 if forward == "int4" else 8, (forward, hosts))
            even, output = given(rank, 9, 8 * world_size), torch.empty(8 * world_size, WIDTH)
            comm.all_to_all(output, even, output_split_sizes=None, input_split_sizes=None)  # equally many
            assert output.equal(torchs(even, [8] * world_size, [8] * world_size))
            spoilt = torch.zeros(world_size * 64, WIDTH)
            spoilt[::64, 5] = float("nan")
            output = torch.empty_like(spoilt)
            comm.all_to_all(output, spoilt)
            is_nan = output.isnan().view(-1, 64)
            assert is_nan.any(1).sum() == world_size and not output.nan_to_num().any()


def gradients_are_right_in_the_mean(rank, world_size, hosts=None):
    sends, receives = splits_of(rank, world_size, 1, least=40)
    weight = given(rank, 2, sum(receives))
    exact = torchs(weight, receives, sends)
    is_whole = whole_rows(rank, world_size, sends, hosts)
    for backward in ("int8", "int4", "whole"):
        with collectives(backward=backward, hosts=hosts) as comm:
            total, first = torch.zeros_like(exact), None
            for _ in range(24):
                input = given(rank, 1, sum(sends)).requires_grad_()
                output = torch.empty(sum(receives), WIDTH)
                comm.all_to_all(output, input * 1, receives, sends, key="a")
                (output * weight).sum().backward()
                first = input.grad if first is None else first
                total += input.grad
            assert first[is_whole].equal(exact[is_whole])
            if backward == "whole" or is_whole.all():
                assert first.equal(exact)
                continue
            step = exact.view(-1, 64).abs().amax(1, keepdim=True) / (127 if backward == "int8" else 7) * 1.01
            one, mean = ((each - exact).view(-1, 64).abs() / step for each in (first, total / 24))
            one, mean = one[step[:, 0] > 0], mean[step[:, 0] > 0]
            assert one.max() <= 1.0 and one.max() > 0.6, (backward, one.max())
            assert mean.square().mean().sqrt() < 0.3 * one.square().mean().sqrt(), "equal errors"


# ---- models ----


class Experts(nn.Module):
    """As the guide's: tokens sorted by expert, one or more experts on each rank."""

    def __init__(self, comm, n_experts, key, top_k=2):
        super().__init__()
        torch.manual_seed(5)
        self.router = nn.Linear(WIDTH, n_experts)
        everything = [nn.Linear(WIDTH, WIDTH) for _ in range(n_experts)]
        self.n_ranks, self.top_k = dist.get_world_size(), top_k
        self.per_rank = n_experts // self.n_ranks
        first = dist.get_rank() * self.per_rank
        self.experts = nn.ModuleList(everything[first : first + self.per_rank])
        self.dispatch, self.combine = comm.tokens(f"{key} dispatch"), comm.tokens(f"{key} combine")

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        counts = chosen.flatten().bincount(minlength=self.per_rank * self.n_ranks)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sends = counts.view(self.n_ranks, -1).sum(1).tolist()
        receives = theirs.view(self.n_ranks, -1).sum(1).tolist()
        came = self.dispatch(x[token], receives, sends)
        which = torch.arange(self.per_rank).repeat(self.n_ranks).repeat_interleave(theirs)
        out = torch.zeros_like(came)
        for i, expert in enumerate(self.experts):
            out = out.index_copy(0, (at := (which == i).nonzero()[:, 0]), expert(came[at]).tanh())
        back = self.combine(out, sends, receives)
        return torch.zeros_like(x).index_add(0, token, back * weights.flatten()[order, None])


def alone(n_experts, x, top_k=2):
    """The same in one process, token by token."""
    torch.manual_seed(5)
    router, experts = nn.Linear(WIDTH, n_experts), [nn.Linear(WIDTH, WIDTH) for _ in range(n_experts)]
    weights, chosen = router(x).softmax(-1).topk(top_k)
    rows = [
        sum(w * experts[e](row).tanh() for w, e in zip(ws, es.tolist()))
        for row, ws, es in zip(x, weights, chosen)
    ]
    return torch.stack(rows) if rows else x * 0


def tokens_of(rank, step, n=96):
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(77 * step + rank))


def models_with_experts(rank, world_size, hosts=None):
    n_experts = 2 * world_size
    for forward, worst in ("whole", 1e-5), ("int8", 0.03):
        with collectives(forward=forward, backward=forward, hosts=hosts) as comm:
            model = Experts(comm, n_experts, "moe")
            x, same = (tokens_of(rank, 0).requires_grad_() for _ in range(2))
            out, exact = model(x), alone(n_experts, same)
            out.square().sum().backward(), exact.square().sum().backward()
            for found, wanted in (out, exact), (x.grad, same.grad):
                assert (found - wanted).norm() <= worst * wanted.norm(), (forward, hosts)
            model(tokens_of(rank, 1, 0 if rank else 33).requires_grad_()).sum().backward()  # the last batch
            model.eval()
            with torch.no_grad():
                check = model(tokens_of(rank, 2))
            with torch.inference_mode():
                assert model(tokens_of(rank, 2)).equal(check)


def bytes_are_fewer(rank, world_size):
    """Than torch's bf16, by at least what the guide says."""
    n = 512 * world_size
    for backward, least in ("int8", 1.9), ("int4", 2.4):
        with collectives(backward=backward) as comm:
            connection = comm._passes.comm(comm._group)
            before = sum(connection.bytes_sent().values())
            input, output = (
                tokens_of(rank, 0, n).bfloat16().requires_grad_(),
                torch.empty(n, WIDTH).bfloat16(),
            )
            comm.all_to_all(output, input * 1)
            output.sum().backward()
            sent = sum(connection.bytes_sent().values()) - before
            dense = 2 * 2 * 512 * WIDTH * (world_size - 1)
            assert dense / sent >= least, (backward, dense / sent)


def bytes_are_those_of_the_plan(rank, world_size, hosts=None):
    """tagc plan and advise ask the same forecast: experts over all ranks, spread evenly."""
    n_tokens, per_host = 64 * world_size, world_size // (hosts or world_size)
    for forward, backward in ("int8", "int8"), ("int8", "int4"), ("int4", "int4"):
        with collectives(forward=forward, backward=backward, hosts=hosts) as comm:
            there, back = comm.tokens("there"), comm.tokens("back")
            connection = comm._passes.comm(comm._hosts.between)
            there(tokens_of(rank, 0, world_size))  # which makes the object, over all ranks
            before = sum(connection.bytes_sent().values())
            for _ in range(3):  # layers
                x = tokens_of(rank, 0, 2 * n_tokens).bfloat16().requires_grad_()
                back(there(x)).sum().backward()
            sent = sum(connection.bytes_sent().values()) - before
            forecast = plan_parts.ask_tokens(
                forward,
                backward,
                world_size=world_size,
                ranks_per_host=per_host,
                n_experts=2 * world_size,
                n_active=2,
                n_tokens=n_tokens,
                width=WIDTH,
                element_bytes=2,
                n_forward=6,
                n_backward=6,
                bytes_per_s=1e9,
            )
            rows = 12 * n_tokens * 2 * (world_size - per_host) / world_size
            due = [per_host * rows * WIDTH * 2, per_host * sent]
            assert list(forecast.host_bytes) == due, (list(forecast.host_bytes), due)


def recomputation_gives_the_same_bits(rank, world_size, hosts=None):
    found = []
    for is_recomputed in (False, True):
        with collectives(backward="int4", hosts=hosts) as comm:
            layers = [Experts(comm, 2 * world_size, f"layer {i}") for i in range(2)]
            grads = []
            for step in range(2):
                for micro in range(2):  # gradients add up
                    x = y = tokens_of(rank, 2 * step + micro).requires_grad_()
                    for layer in layers:
                        y = y + (checkpoint(layer, y, use_reentrant=False) if is_recomputed else layer(y))
                    y.square().sum().backward()
                    grads += [y.detach(), x.grad]
                grads += [
                    p.grad.clone() for layer in layers for p in layer.parameters() if p.grad is not None
                ]
            found.append(grads)
    assert len(found[0]) == len(found[1]) and all(a.equal(b) for a, b in zip(*found))


def a_run_goes_on(rank, world_size):
    def gradient(comm):
        x = tokens_of(rank, 0).requires_grad_()
        layer = Experts(comm, world_size, "moe")
        layer(x).square().sum().backward()
        return x.grad

    with collectives(backward="int4") as comm:
        first, saved, second = gradient(comm), comm.state_dict(), gradient(comm)
        assert not first.equal(second)
    with collectives(backward="int4") as comm:
        comm.load_state_dict(saved)
        assert gradient(comm).equal(second)


def compilers_see_one_node(rank, world_size):
    def step(exchange, x, receives, sends):
        return exchange(x * 2, receives, sends) * 3

    found = {}
    for is_compiled in (False, True):
        with collectives() as comm:
            exchange = comm.tokens("a")
            run = torch.compile(step, backend="aot_eager", fullgraph=True) if is_compiled else step
            for batch in range(3):
                sends, receives = splits_of(rank, world_size, batch, least=40)
                x = given(rank, batch, sum(sends)).requires_grad_()
                y = run(exchange, x, receives, sends)
                y.square().sum().backward()
                found[is_compiled, batch] = y.detach(), x.grad
    for batch in range(3):
        assert all(a.equal(b) for a, b in zip(found[True, batch], found[False, batch])), batch


def heads_are_spread(rank, world_size):
    """Context parallelism by all-to-all: between layers each rank has a part of the sequence, in attention a
    part of the heads."""
    n, n_heads, size = 64 * world_size, 4 * world_size, 32

    def spread(exchange, x):  # (n / W, heads, size) -> (n, heads / W, size)
        x = x.unflatten(1, (world_size, -1)).transpose(0, 1).contiguous()
        return exchange(x.flatten(0, 1)).view(-1, *x.shape[2:])

    def collect(exchange, x):  # back
        parts = exchange(x).view(world_size, -1, *x.shape[1:])
        return parts.transpose(0, 1).flatten(1, 2)

    def attend(q, k, v):
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    torch.manual_seed(3)
    whole = [torch.randn(n, n_heads, size) for _ in range(3)]
    own = slice(rank * n // world_size, (rank + 1) * n // world_size)
    exact_inputs = [each.clone().requires_grad_() for each in whole]
    exact = attend(*exact_inputs)
    exact.square().sum().backward()
    for values, worst in ("whole", 1e-5), ("int8", 0.03):
        with collectives(forward=values, backward=values) as comm:
            inputs = [each[own].clone().requires_grad_() for each in whole]
            exchanges = [comm.tokens(name) for name in ("q", "k", "v", "out")]
            out = collect(exchanges[3], attend(*map(spread, exchanges, inputs)))
            out.square().sum().backward()
            pairs = [(out, exact[own]), *((a.grad, b.grad[own]) for a, b in zip(inputs, exact_inputs))]
            for found, wanted in pairs:
                assert (found - wanted).norm() <= worst * wanted.norm(), values


# ---- a style of experts ----


class Titan(ParallelStyle):
    """Moves tokens as torchtitan's ExpertParallel does, whose experts get them in the order of ranks here."""

    def _token_dispatch(self, mod, inputs, device_mesh):
        routed, counts = inputs
        group, n = device_mesh.get_group(), device_mesh.shape[0]
        with torch.no_grad():
            theirs = torch.ops._c10d_functional.wait_tensor(
                all_to_all_single(counts, None, None, group=group)
            )
            self.sends = counts.view(n, -1).sum(1).tolist()
            self.receives = theirs.view(n, -1).sum(1).tolist()
        return all_to_all_single_autograd(routed, self.receives, self.sends, group), theirs

    def _token_combine(self, mod, routed, device_mesh):
        return all_to_all_single_autograd(routed, self.sends, self.receives, device_mesh.get_group())

    def _apply(self, module, device_mesh):
        from torch.distributed.tensor import distribute_module

        return distribute_module(
            module, device_mesh, None, input_fn=self._token_dispatch, output_fn=self._token_combine
        )


class Tensors(Titan):
    """As torchtitan's ExpertTensorParallel: its methods go on to those of its base."""

    def _token_dispatch(self, mod, inputs, device_mesh):
        routed, counts = inputs
        return super()._token_dispatch(mod, (routed * 1.5, counts), device_mesh)


class Direct(Titan):
    """Also moves the numbers of rows: integers stay as they are."""

    def _token_combine(self, mod, routed, device_mesh):
        group, numbers = device_mesh.get_group(), torch.arange(len(routed))
        numbers = all_to_all_single(numbers, self.sends, self.receives, group)
        assert numbers.max() < len(routed)
        return super()._token_combine(mod, routed, device_mesh)


class Idle(Titan):
    """Hooks that move no tokens over the mesh, only how many there are."""

    def _token_dispatch(self, mod, inputs, device_mesh):
        tokens, counts = inputs
        return tokens * 1.5, all_to_all_single(counts, None, None, group=device_mesh.get_group())

    def _token_combine(self, mod, routed, device_mesh):
        return routed * 2


class Halfway(Titan):
    """Sends what comes back in a way of its own, as styles for one kind of network do."""

    def _token_combine(self, mod, routed, device_mesh):
        back = torch.empty(sum(self.sends), WIDTH)
        dist.all_to_all_single(back, routed.detach(), self.sends, self.receives, device_mesh.get_group())
        return back


class Other(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, tokens, counts):
        return (tokens * self.factor.to_local()).tanh()


def a_style_goes_by_it(rank, world_size):
    from tagc.collectives import CompressedExperts

    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))

    def run(style):
        module = style._apply(Scaled(), mesh)
        x = tokens_of(rank, 0, 80 * world_size).requires_grad_()
        sends = torch.full((world_size,), 80)
        out = module(x, sends)
        out.square().sum().backward()
        return out.detach(), x.grad, module.factor.grad.to_local()

    for style in (Titan, Tensors, Direct):
        exact = run(style())
        with collectives(group=mesh, forward="whole", backward="whole") as comm:
            assert all(a.equal(b) for a, b in zip(run(CompressedExperts(style(), comm)), exact)), style
        with collectives(group=mesh) as comm:
            found = run(CompressedExperts(style(), comm))
            for a, b in zip(found, exact):
                assert not a.equal(b) and (a - b).norm() < 0.02 * b.norm(), style
            check_error(
                lambda: CompressedExperts(Other(), comm)._apply(Scaled(), mesh), "Other adds no hooks, by"
            )
            check_error(lambda: CompressedExperts(Scaled(), comm), "style is a Scaled, must be")
            check_error(lambda: CompressedExperts(Titan(), 3), "comm is a int, must be")


def compiled_styles_go_by_it(rank, world_size):
    """As torchtitan compiles a layer: dispatch and combine are in its graph."""
    from tagc.collectives import CompressedExperts

    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    found = []
    for is_compiled in (False, True):
        with collectives(group=mesh) as comm:
            module = CompressedExperts(Titan(), comm)._apply(Scaled(), mesh)
            run = torch.compile(module, backend="aot_eager") if is_compiled else module
            for step in range(2):
                x = tokens_of(rank, step, 80 * world_size).requires_grad_()
                out = run(x, torch.full((world_size,), 80))
                out.square().sum().backward()
                found.append((out.detach(), x.grad))
    for eager, compiled in zip(found[:2], found[2:]):
        assert all(a.equal(b) for a, b in zip(eager, compiled))


def styles_that_move_nothing_are_errors(rank, world_size):
    """On all ranks, in the first forward, eager and compiled; also where a rank has no tokens."""
    from tagc.collectives import CompressedExperts

    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    for style, what in (Idle, "dispatch"), (Halfway, "combine"):
        for is_compiled in (False, True)[: 1 + (style is Idle)]:  # compilers make Halfway's a functional one
            with collectives(group=mesh) as comm:
                module = CompressedExperts(style(), comm)._apply(Scaled(), mesh)
                run = torch.compile(module, backend="aot_eager") if is_compiled else module
                sends = torch.full((world_size,), 80)
                words = (
                    rf"CompressedExperts\({style.__name__}\): the {what} of {style.__name__} moves no tokens"
                )
                for _ in range(2):  # no later one slips through
                    check_error(lambda: run(tokens_of(rank, 0, 80 * world_size), sends), words)
    with collectives(group=mesh) as comm:
        module = CompressedExperts(Titan(), comm)._apply(Scaled(), mesh)
        n = 0 if rank else 80
        out = module(tokens_of(rank, 0, n * world_size), torch.full((world_size,), n))
        assert out.shape == (n * world_size, WIDTH) and out.isfinite().all()


def beside_compress(rank, world_size):
    """Dense parameters by DDP and compress(), experts each on its rank."""
    from tagc.torch import compress

    with collectives() as comm:
        experts = Experts(comm, world_size, "moe")
        torch.manual_seed(1)
        dense = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH))
        )
        with compress(dense, verbose=False):
            for step in range(3):
                experts(dense(tokens_of(rank, step))).square().sum().backward()
                for name, parameter in dense.named_parameters():
                    assert parameter.grad.isfinite().all() and parameter.grad.any()
                    check_alike(parameter.grad, name)
                dense.zero_grad(), experts.zero_grad()


# ---- calls that differ ----


def wrong_calls_are_errors_on_all_ranks(rank, world_size):
    last, n = rank == world_size - 1, 8 * world_size
    input, output = given(rank, 0, n), torch.empty(n, WIDTH)
    for options in ({}, {"hosts": 1}) if world_size == 2 else [{"hosts": world_size // 2}]:
        with collectives(**options) as comm:

            def right():
                comm.all_to_all(output, input, key="a")
                assert output.equal(torchs(input, [8] * world_size, [8] * world_size))

            more, longer = [9] + [8] * (world_size - 1), torch.full((n + 1, WIDTH), 7.0)
            bad = {
                "input is a list": lambda: comm.all_to_all(output, [1.0], key="a"),
                "output is a int": lambda: comm.all_to_all(3, input, key="a"),
                "must be contiguous": lambda: comm.all_to_all(output, input.T, key="a"),
                "of torch.float32 on cpu, output of torch.int64": lambda: comm.all_to_all(
                    output.long(), input
                ),
                "rows of input have": lambda: comm.all_to_all(output.view(n, 2, -1), input),
                "add up to the": lambda: comm.all_to_all(output, input, None, [1] * world_size),
                "must be numbers": lambda: comm.all_to_all(output, input, None, ["x"] * world_size),
                "no multiple of": lambda: comm.all_to_all(output, input[: n - 1].clone()),
                "key of all_to_all": lambda: comm.all_to_all(output, input, key=3),
            }
            for text, call in bad.items():
                with pytest.raises(RuntimeError, match=text if last else None) as failure:
                    call() if last else comm.all_to_all(output, input, key="a")
                assert failure.value.status == "argument", (text, failure.value)
                right()
            for call in (
                lambda: comm.all_to_all(output, longer, None, more, key="a"),
                lambda: comm.all_to_all(longer, input, more, None, key="a"),
                lambda: comm.all_to_all(output, input, key="b"),
                lambda: comm.all_to_all(output.int(), input.int(), key="a"),
            ):
                output.fill_(7)
                with pytest.raises(RuntimeError) as failure:
                    call() if last else comm.all_to_all(output, input, key="a")
                assert failure.value.status == "mismatch", (options, failure.value)
                assert (output == 7).all()
                right()
            work = comm.all_to_all(output, input, key=3 if last else "a", async_op=True)
            check_error(work.wait, "", same=False)
            right()
    for wrong, text in {"forward": "forward is 'int3'", "backward": "backward is 'int3'"}.items():
        check_error(lambda: collectives(**{wrong: "int3"}), text)
    check_error(lambda: collectives(forward="int4" if last else "int8"), "do not agree: forward is 'int8'")


TWO = (
    rows_arrive,
    gradients_are_right_in_the_mean,
    models_with_experts,
    bytes_are_fewer,
    bytes_are_those_of_the_plan,
    recomputation_gives_the_same_bits,
    a_run_goes_on,
    compilers_see_one_node,
    heads_are_spread,
    a_style_goes_by_it,
    compiled_styles_go_by_it,
    styles_that_move_nothing_are_errors,
    beside_compress,
    wrong_calls_are_errors_on_all_ranks,
)


def on_one_host(rank, world_size):
    rows_arrive(rank, world_size, hosts=1)


def on_two_hosts(rank, world_size):
    rows_arrive(rank, world_size, hosts=world_size // 2)
    gradients_are_right_in_the_mean(rank, world_size, hosts=world_size // 2)
    models_with_experts(rank, world_size, hosts=world_size // 2)
    bytes_are_those_of_the_plan(rank, world_size, hosts=world_size // 2)
    recomputation_gives_the_same_bits(rank, world_size, hosts=world_size // 2)


def of_one_rank(rank, world_size):
    group = dist.new_group([rank], use_local_synchronization=True)
    with collectives(group=group) as comm:
        x = tokens_of(rank, 0).requires_grad_()
        y = comm.tokens("a")(x)
        y.sum().backward()
        assert y.equal(x) and (x.grad == 1).all()
        with contextlib.suppress(RuntimeError):
            comm.all_to_all(torch.empty(1, WIDTH), x)
            raise AssertionError("other rows")


def test_two_ranks():
    ranks.run_each([*TWO, of_one_rank], 2)


def test_four_ranks():
    ranks.run_each([on_one_host, on_two_hosts, wrong_calls_are_errors_on_all_ranks], 4)
