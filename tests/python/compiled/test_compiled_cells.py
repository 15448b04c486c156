"""Models of data_parallel() in the cells of the two matrices (test_two_at_once.py, test_one_rank_differs.py):
beside another one, and where one rank is different. What torch alone does with them is what its FSDP2 does
with the same modules. The usual check runs a sample, without a compiler; test_compiled_long.py runs the rest,
and graphs."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
import matrix_cells as cells
import ranks
import test_one_rank_differs as differs
import test_two_at_once as at_once
import torch.distributed as dist

EAGER, IN_A_GRAPH = "compiled", "compiled, in a graph"


class Compiled(cells.Trained):
    def wrap(self):
        from torch.distributed.device_mesh import DeviceMesh

        from tagc.compiled import data_parallel

        if self.group is None:
            over = cells.mesh((dist.get_world_size(),), ("all",))
        else:
            over = DeviceMesh.from_group(self.group, "cpu")
        units = [*self.plain.layers, *filter(None, [self.plain.spare])]
        return data_parallel(self.plain, over, modules=units)

    def exchanges(self, yes):
        return contextlib.nullcontext()  # each of its passes does


class InAGraph(Compiled):
    def wrap(self):
        model = super().wrap()
        model.compile(backend="aot_eager")
        return model


cells.OF_ANNEXES |= {EAGER: Compiled, IN_A_GRAPH: InAGraph}
cells.ALONE |= dict.fromkeys((EAGER, IN_A_GRAPH), "fsdp2")
cells.GATHERING |= {EAGER, IN_A_GRAPH}

# torch alone takes one thread
AT_ONCE = [job for job in at_once.JOBS if job.__name__ != "two_threads"]
SAME = [name for name, (_, kinds) in differs.SAME.items() if "fsdp2" in kinds]
# not "another dtype": torch distributes parameters before compress(), and gloo ends the process
FAILS = ["without a parameter", "another loss scale", "older residuals", "another option", "a wrong argument"]
LEAVES = [name for name in differs.LEAVES if name.startswith(("ends", "goes on", "no memory"))]
LEAVES += ["closes its handle", "a pass less", "another order", "without a gradient"]


def cells_at_once(kind):
    for job in AT_ONCE:
        if kind == IN_A_GRAPH and job.__name__ == "in_hooks_of_modules":
            continue  # torch.compile() leaves out those of a backward pass
        yield job.__name__, kind, "exact"
        if at_once.JOBS[job][1]:
            yield job.__name__, kind, "default"


def cells_of(names, kind):
    return [(name, kind) for name in names]


def run_at_once(rank, world_size, chosen):
    cells.run_each(rank, at_once.run_cell, chosen)


def run_same(rank, world_size, chosen):
    cells.run_each(rank, differs.check_same, chosen)


def run_fails(rank, world_size, chosen):
    return differs.run_fails(rank, world_size, chosen)


def run_leaves(rank, world_size, cell):
    differs.run_leaves(rank, world_size, cell)


def check_fails(shape, chosen):
    for together in differs.together(chosen):
        differs.check_fails(shape, together, run_fails)


# ---- tests: a sample ----


def test_two_at_once():
    ranks.run(run_at_once, 2, cells.sample(cells_at_once(EAGER), 0))


def test_as_torch_does():
    ranks.run(run_same, 4, cells_of(SAME, EAGER)[::2])


def test_the_same_error():
    check_fails("1x2", cells_of(FAILS, EAGER))


def test_all_end():
    differs.check_leaves("1x2", ("ends: backward", EAGER), run_leaves)
