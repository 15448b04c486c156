"""The cells of test_one_rank_differs.py that its sample leaves out."""

import pytest

torch = pytest.importorskip("torch")
import ranks
from cells import SHAPES
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

TIMEOUT_S = 500


def rest(table, shape):
    return [cell for cell in cells_of(table) if cell not in sample(table, shape)]


@pytest.mark.parametrize("shape", SHAPES)
def test_as_torch_does(shape):
    ranks.run(run_same, SHAPES[shape], rest(SAME, shape), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_error(shape):
    for chosen in together(rest(FAILS, shape)):
        check_fails(shape, chosen)


LEAVING = [(shape, cell) for shape in SHAPES for cell in rest(LEAVES, shape)]


@pytest.mark.parametrize(("shape", "cell"), LEAVING, ids=str)
def test_all_end(shape, cell):
    check_leaves(shape, cell)
