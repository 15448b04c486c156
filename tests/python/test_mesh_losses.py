"""Meshes in docs/guide/meshes.md: those rows that take less time. test_mesh_losses_long.py has the others."""

import re

import pytest

torch = pytest.importorskip("torch")
import mesh_rows
import ranks
import test_docs

QUICK = [name for name, row in mesh_rows.ROWS.items() if row.is_quick]


def failures_of(names):
    """{row: failure or None}; all rows of as many ranks run in the same processes."""
    found = {}
    for n_ranks in sorted({mesh_rows.ROWS[name].n_ranks for name in names}):
        alike = [name for name in names if mesh_rows.ROWS[name].n_ranks == n_ranks]
        for of_rank in ranks.run(mesh_rows.check_rows, n_ranks, alike, timeout_s=500):
            found |= {name: found.get(name) or failure for name, failure in zip(alike, of_rank)}
    return found


@pytest.fixture(scope="module")
def failures():
    return failures_of(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_row(name, failures):
    assert failures[name] is None, failures[name]


def test_the_table_has_all_rows():
    """Each row of the table names one here, and each one here has its row."""
    table = (test_docs.ROOT / "docs/guide/meshes.md").read_text()
    assert re.findall(r"^\| .* \| `(\w+)` \|$", table, re.M) == [*mesh_rows.ROWS]
