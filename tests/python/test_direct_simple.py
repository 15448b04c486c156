"""examples/direct_simple.py, which explains the exchange `direct` in plain torch, against libtagc: the same
bytes, residuals and sums, and the same losses of a training run, bit for bit."""

import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
import by_parts
import ranks
import torch.distributed as dist

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "direct_simple.py"
FORMATS = {8: "int8", 4: "int4", 2: "int2"}


def example():
    """Returns the example as a module."""
    if "direct_simple" not in sys.modules:
        spec = importlib.util.spec_from_file_location("direct_simple", EXAMPLE)
        sys.modules["direct_simple"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["direct_simple"])
    return sys.modules["direct_simple"]


class Library:
    """reduce_scatter of the example by reducers of libtagc, one for each level."""

    def __init__(self, n_elems):
        from tagc.torch.exchange.comm import Comm

        self.n_elems, self.comm, self._reducers = n_elems, Comm(dist.group.WORLD, 60), {}
        self._by_gloo = Comm(dist.group.WORLD, 60, "gloo")

    def options(self, level):
        from tagc import _library as lib

        return {
            "exchange": lib.EXCHANGES["direct"],
            "sparsity": 1 - 1 / level.one_in,
            "block": level.block,
            "format": lib.FORMATS[FORMATS[level.bits]],
            "residual": lib.FORMATS["fp32"],
            "output": lib.OUTPUTS["shard"],
        }

    def reducer(self, level):
        if level not in self._reducers:
            self._reducers[level] = by_parts.Reducer(self.comm, self.n_elems, self.options(level))
        return self._reducers[level]

    def reduce(self, gradient, residual, level):
        reducer, output = self.reducer(level), torch.empty(gradient.shape[1])
        reducer.set_residual(residual.flatten())
        reducer.begin(gradient.flatten(), output)
        reducer.end()
        residual.copy_(reducer.residual().view_as(residual))
        return output, 0

    def bodies(self, gradient, residual, level):
        """Returns {rank: the body that libtagc sends to it}, taken from what gloo carries."""
        from tagc.torch.exchange.gloo import Gloo, bytes_at

        reducer = by_parts.Reducer(self._by_gloo, self.n_elems, self.options(level))
        output = torch.empty(gradient.shape[1])  # there until the end
        sent, move = {}, Gloo._move

        def listen(gloo, transfer):
            for part in transfer.sends[: transfer.n_sends]:
                if part.n_bytes:
                    message = bytes_at(transfer.send + part.offset, part.n_bytes).clone()
                    sent.setdefault(part.peer, []).append(message)
            move(gloo, transfer)

        Gloo._move = listen
        try:
            reducer.set_residual(residual.flatten())
            reducer.begin(gradient.flatten(), output)
            reducer.end()
        finally:
            Gloo._move = move
            reducer.close()
        found = {}
        for rank, messages in sent.items():  # docs/reference/wire-format.md, "Header"; no fronts by gloo
            stream = torch.cat(messages)
            assert bytes(stream[:6].tolist()) == b"TAGC\x02\x06", "the first message is no fragment"
            length = stream[40:48].clone().view(torch.int64).item()
            found[rank] = stream[64 : 64 + length]
        return found

    def close(self):
        for reducer in self._reducers.values():
            reducer.close()
        self.comm.close()
        self._by_gloo.close()


def gradients(rank, n_elems, n_shard, n_steps):
    """Yields normal values of many sizes. Some are equal and some are zero: all of a block, or here and
    there. In the first step most are zero, and all of the last row."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(n_steps):
        values = torch.randn(n_elems, generator=generator) * torch.randn(n_elems, generator=generator).exp()
        values[torch.rand(n_elems, generator=generator) < 0.1] = 0.0
        values[n_elems // 3 : n_elems // 2] = values[n_elems // 3 : n_elems // 2].sign()
        values[step * 128 : (step + 3) * 128] = 0.0
        if step == 0:
            values[torch.rand(n_elems, generator=generator) < 0.99] = 0.0
            values[-n_shard:] = 0.0
        yield values


# ---- what all ranks do ----


def same_bits(rank, world_size, n_shard):
    """Checks bytes, residuals and sums of every level, over several steps with error feedback."""
    simple, library = example(), Library(world_size * n_shard)
    for level in simple.LEVELS:
        mine, its = torch.zeros(world_size, n_shard), torch.zeros(world_size, n_shard)
        for step, flat in enumerate(gradients(rank, world_size * n_shard, n_shard, 4)):
            where, gradient = f"{level} of {n_shard} values, step {step}", flat.view(world_size, n_shard)
            bodies = [simple.encode(row, level) for row in gradient + mine]
            sent = library.bodies(gradient, its, level)
            assert sorted([rank, *sent]) == list(range(world_size)), where
            for own, other in ((bodies[peer], body) for peer, body in sent.items()):
                if step == 0 and level.one_in > 1:  # of a few positions, several widths take as many bytes
                    assert len(own) == len(other), f"bodies: {where}"
                else:
                    assert torch.equal(own, other), f"bodies: {where}"
            mean, n_bytes = simple.reduce_scatter(gradient, mine, level)
            expected, _ = library.reduce(gradient, its, level)
            assert n_bytes == sum(map(len, bodies))
            assert torch.equal(mine, its), f"residuals: {where}"
            assert torch.equal(mean, expected), f"sums: {where}"
    library.close()


def same_losses(rank, world_size):
    """Returns the mean of the last losses with `direct`, and with gradients in fp32."""
    simple = example()
    _, rows = simple.make_model(int(simple.make_text().max()) + 1, world_size)
    library = Library(rows.numel())
    losses, plans = simple.train(280)
    expected, _ = simple.train(280, library.reduce)
    dense, _ = simple.train(280, lambda gradient, residual, level: (dense_mean(gradient)[rank], 0))
    library.close()
    levels = [plan.level for plan in plans]
    assert levels == sorted(levels) and set(levels) == {0, 1, 2}
    assert losses == expected
    return [sum(run[-40:]) / 40 for run in (losses, dense)]


def dense_mean(gradient):
    mean = gradient / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


# ---- tests ----


@pytest.mark.parametrize("world_size, n_shard", [(2, 1000), (2, 70001), (3, 5555)])
def test_bytes_residuals_and_sums_are_the_librarys(world_size, n_shard):
    """70001 values have several chunks. No shard ends on a whole block."""
    ranks.run(same_bits, world_size, n_shard)


def test_losses_are_the_librarys_and_near_those_of_dense():
    losses, dense = torch.tensor(ranks.run(same_losses, 2, timeout_s=500)).mean(0).tolist()
    assert abs(losses / dense - 1) < 0.05, f"{losses} with direct, {dense} with gradients in fp32"


LINE = re.compile(r"level \d, ([0-9.]+) bits per parameter")


def started(launcher):
    """Returns the example as a process of its own, without tagc on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *launcher, str(EXAMPLE)]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_runs_as_it_says():
    """It does so alone, and under torchrun it begins with the same line."""
    alone = started([])
    try:
        said, wrong = alone.communicate(timeout=500)
        assert alone.returncode == 0, wrong
    finally:
        ended(alone)
    bits = [float(found) for found in LINE.findall(said)]
    assert len(bits) == 18 and bits[0] == 8.13 and 4.5 in bits and bits[-1] < 0.5, said
    torchrun = started(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    watch = threading.Timer(200, ended, [torchrun])
    watch.start()
    try:
        first = torchrun.stdout.readline()
    finally:
        watch.cancel()
        ended(torchrun)
    assert first == said.splitlines(keepends=True)[0], first or torchrun.stderr.read()
