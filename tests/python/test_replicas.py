"""A replica of deltas without a copy of what was given last: its fingerprint must not miss a change."""

import random

import pytest
import torch

from tagc.torch.hooks import replicas

KINDS = {"here": "", "device": "device"}  # what fingerprint() is told to be like


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_bit_of_any_value_counts(kind, dtype):
    draw = random.Random(3)
    for n in (1, 255, 65_536, 65_537, 200_003):
        values = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        first = replicas.fingerprint(values, KINDS[kind])
        assert first == replicas.fingerprint(values.clone(), KINDS[kind])
        assert first.startswith("device") == (kind == "device")
        words = values.view(torch.int32 if dtype == torch.float32 else torch.int16)
        for _ in range(12):
            at, bit = draw.randrange(n), draw.randrange(8 * dtype.itemsize)
            flip = 1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit)
            words[at] ^= flip
            assert replicas.fingerprint(values, KINDS[kind]) != first, (n, at, bit)
            words[at] ^= flip


@pytest.mark.parametrize("kind", KINDS)
def test_two_changes_do_not_cancel(kind):
    values = torch.randn(150_000)
    first = replicas.fingerprint(values, KINDS[kind])
    draw = random.Random(5)
    for _ in range(30):  # signs, which are one bit, the highest: in one row, in one column, anywhere
        a = draw.randrange(len(values))
        for b in (a ^ 1, (a + 65_536) % len(values), draw.randrange(len(values))):
            if values[a] == values[b]:
                continue
            changed = values.clone()
            changed[[a, b]] *= -1
            assert replicas.fingerprint(changed, KINDS[kind]) != first
            changed = values.clone()
            changed[[a, b]] = values[[b, a]]
            assert replicas.fingerprint(changed, KINDS[kind]) != first


def test_kinds_do_not_mix():
    values = torch.randn(100)
    here = replicas.fingerprint(values)
    assert here == replicas.fingerprint(values, here) != replicas.fingerprint(values, "device0123")
    for n in range(64):  # some begin with d, as hexadecimal numbers do
        here = replicas.fingerprint(values[:n])
        assert here == replicas.fingerprint(values[:n], here), here
    assert replicas.fingerprint(values[:99], "device") != replicas.fingerprint(values, "device")
    assert replicas.fingerprint(torch.zeros(9), "device") != replicas.fingerprint(torch.zeros(10), "device")
