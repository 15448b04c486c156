"""examples/pytorch/compiled.py under inductor, which compiles C++, and the cells that the sample of
test_compiled_cells.py leaves out. All else: test_compiled.py."""

import sys

import pytest

torch = pytest.importorskip("torch")
import launch
import ranks
import test_compiled_cells as in_cells
import torch.distributed as dist
from compiled_runs import Checkpointed, Run, check_overlap, closed, made
from matrix_cells import SHAPES


def late_sums(graph):
    """An inductor pass of rank 1 alone: it moves gathers to the front, the last one first, and would move
    each reduce-scatter behind the next, if values did not hold their order."""
    found = list(graph.nodes)
    last = [node for node in found if node.op == "placeholder"][-1]
    for node in reversed(found):
        is_free = all(before.op == "placeholder" for before in node.all_input_nodes)
        if node.target == torch.ops.tagc.all_gather.default and is_free:
            last.append(node)
            last = node
            _MOVED.append(node)
    graph.lint()


_MOVED = []


def example(rank, world_size):
    """(losses with torch's collectives, exact, with other orders on rank 1, by default)."""
    from torch._dynamo.utils import counters

    sys.path.insert(0, str(launch.EXAMPLES))
    import compiled

    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # there is one already
    small = ["--n-embd", "64", "--steps", "12"]
    eager = compiled.main([*small, "--torch", "--backend", "eager"])
    torchs = compiled.main([*small, "--torch"])
    exact = compiled.main([*small, "--sparsity", "0"])
    default = compiled.main([*small, "--parameters", "delta4"])
    assert not counters["graph_break"], counters["graph_break"]
    torch._dynamo.reset()
    if rank == 1:
        torch._inductor.config.post_grad_custom_post_pass = late_sums
    moved = compiled.main([*small, "--sparsity", "0"])
    assert len(_MOVED) > 10 or rank == 0
    return eager, torchs, exact, default, moved


def overlap(rank, world_size):
    run = Run(made(Checkpointed), "inductor", sparsity=0)
    run.steps(1)
    check_overlap(run)
    run.steps(2)
    closed(run)


def test_overlap():
    ranks.run(overlap, 2, timeout_s=900)


def test_example():
    eager, torchs, exact, default, moved = ranks.run(example, 2, timeout_s=1500)[0]
    assert exact == torchs == moved
    assert abs(exact[-1] / eager[-1] - 1) < 1e-4, (exact, eager)
    assert default[-1] < default[0] - 0.5 and default != exact
    assert abs(default[-1] / exact[-1] - 1) < 0.02, (default, exact)


@pytest.mark.parametrize("kind", (in_cells.EAGER, in_cells.IN_A_GRAPH))
@pytest.mark.parametrize("shape", SHAPES)
def test_cells(shape, kind):
    ranks.run(in_cells.run_at_once, SHAPES[shape], [*in_cells.cells_at_once(kind)], timeout_s=1200)
    ranks.run(in_cells.run_same, SHAPES[shape], in_cells.cells_of(in_cells.SAME, kind), timeout_s=600)
    in_cells.check_fails(shape, in_cells.cells_of(in_cells.FAILS, kind))


@pytest.mark.parametrize("name", in_cells.LEAVES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_end(shape, name):
    in_cells.differs.check_leaves(shape, (name, in_cells.EAGER), in_cells.run_leaves)
