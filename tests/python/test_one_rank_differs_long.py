"""The cells of test_one_rank_differs.py that its sample leaves out."""

import pytest

torch = pytest.importorskip("torch")
import ranks
from matrix_cells import KINDS, SHAPES
from test_one_rank_differs import (
    FAILS,
    LEAVES,
    SAME,
    cells_of,
    check_fails,
    check_leaves,
    run_same,
    sample,
    together,
)


def rest(table, shape):
    return [cell for cell in cells_of(table) if cell not in sample(table, shape)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_torch_does(shape, kind):
    ranks.run(run_same, SHAPES[shape], [cell for cell in rest(SAME, shape) if cell[1] == kind])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_error(shape):
    for chosen in together(rest(FAILS, shape)):
        check_fails(shape, chosen)


LEAVING = [(shape, cell) for shape in SHAPES for cell in rest(LEAVES, shape)]


@pytest.mark.parametrize(("shape", "cell"), LEAVING, ids=str)
def test_all_end(shape, cell):
    check_leaves(shape, cell)
