"""LocalSteps in the cells of the two matrices (test_two_at_once.py, test_one_rank_differs.py): beside another
one, and where one site is different. By torch alone, sites take the mean of their parameters after as many
steps. A site is one rank, or, of four, two ranks with DistributedDataParallel."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
import matrix_cells as cells
import ranks
import test_one_rank_differs as differs
import test_two_at_once as at_once
import torch.distributed as dist
from matrix_cells import EXACT, SHAPES

KIND = "local"
EVERY = 2  # steps, of N_STEPS


class Local(cells.Trained):
    def wrap(self):
        n = dist.get_world_size()
        if n == 2:
            return self.plain
        whole = cells.mesh((2, n // 2), ("hosts", "within"))
        return torch.nn.parallel.DistributedDataParallel(
            self.plain, process_group=whole["within"].get_group(), init_sync=False
        )

    def compress(self, optimizer, options):
        from tagc.local import LocalSteps

        n, own = dist.get_world_size(), {"every": EVERY, "layers": "all", "verbose": False}
        if n > 2:
            own["between"] = cells.mesh((2, n // 2), ("hosts", "within"))["hosts"]
        elif self.group is not None:
            own["between"] = self.group
        own["timeout_s"] = cells.TIMEOUT_S
        self.handle = LocalSteps(self.model, optimizer, **own | options)

    def exchanges(self, yes):
        return contextlib.nullcontext() if yes or self.model is self.plain else self.model.no_sync()

    n_steps = 0

    def step(self):
        """Notes the parameters, since gradients are a site's own."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.n_steps += 1
        for parameter in self.plain.parameters():
            if self.handle is None and self.n_steps % EVERY == 0:
                dist.all_reduce(parameter.detach(), group=self.group)
                parameter.detach().div_(dist.get_world_size())
            self.gradients.append(parameter.detach().clone())

    def note(self):
        pass


cells.OF_ANNEXES[KIND] = Local
differs.TAGCS_ALONE.add(KIND)

# torch sums nothing in between, and an optimizer has parameters of one model
AT_ONCE = [job for job in at_once.JOBS if job.__name__ not in ("closed_and_compressed_anew", "one_optimizer")]
SAME = ["late to compress()", *(f"late: {at}" for at in ("pass", "forward", "backward", "step"))]


def another_dtype(kind):
    """Of a site."""
    is_in_last = dist.get_rank() >= dist.get_world_size() // 2
    one = cells.training(kind, EXACT, dtype=torch.bfloat16 if is_in_last else torch.float32)
    one.backward(0)
    one.step()


FAILS = {"another option": differs.FAILS["another option"][0], "another dtype": another_dtype}
FAILS |= {"a wrong argument": differs.FAILS["a wrong argument"][0]}


def cells_at_once(shape):
    for job in AT_ONCE:
        if shape == "1x2" or job.__name__ not in ("two_groups", "two_threads"):  # the groups are all ranks'
            yield job.__name__, KIND, "exact"
            if at_once.JOBS[job][1]:
                yield job.__name__, KIND, "default"


def run_all(rank, world_size, chosen):
    cells.run_each(rank, at_once.run_cell, chosen)
    cells.run_each(rank, differs.check_same, [(name, KIND) for name in SAME])


def run_fails(rank, world_size):
    return [differs.outcome_of(job, KIND) for job in FAILS.values()]


def run_leaves(rank, world_size, cell):
    differs.run_leaves(rank, world_size, cell)


# ---- tests ----


def test_sites_of_one():
    ranks.run(run_all, 2, [*cells_at_once("1x2")])


def test_sites_of_two():
    ranks.run(run_all, 4, cells.sample(cells_at_once("2x2"), 0)[::2])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_error(shape):
    for name, *found in zip(FAILS, *ranks.run(run_fails, SHAPES[shape])):
        assert all(one["kind"] == "Error" for one in found), (name, found)
        assert len({one["status"] for one in found}) == 1, (name, found)


def test_all_end():
    """A site's program ends, or its handle does, and the others say which one it was."""
    for name in ("ends: step", "closes its handle"):
        differs.check_leaves("1x2", (name, KIND), run_leaves)
