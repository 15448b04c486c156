"""Meshes in docs/guide/meshes.md: the rows that take more time, of 8 ranks and of other wrappers."""

import pytest

torch = pytest.importorskip("torch")
import mesh_rows
from test_mesh_losses import QUICK, failures_of

LONG = [name for name in mesh_rows.ROWS if name not in QUICK]


@pytest.fixture(scope="module")
def failures():
    return failures_of(LONG)


@pytest.mark.parametrize("name", LONG)
def test_row(name, failures):
    assert failures[name] is None, failures[name]
