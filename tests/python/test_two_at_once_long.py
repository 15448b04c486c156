"""The cells of test_two_at_once.py that its sample leaves out."""

import pytest

torch = pytest.importorskip("torch")
import ranks
from matrix_cells import KINDS, SHAPES
from test_two_at_once import all_cells, run_cells, sample


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_rest(shape, kind):
    rest = [cell for cell in all_cells(shape) if cell[1] == kind and cell not in sample(shape)]
    assert rest
    ranks.run(run_cells, SHAPES[shape], rest)
