"""A hundred kills of senders and receivers of a store: test_weight_store, longer."""

import pytest

pytest.importorskip("torch")
from test_weight_store import killed


def test_a_hundred_kills_leave_right_bits(tmp_path):
    assert len(killed(100, tmp_path)) > 50
