"""The cases of test_staging under each of the bad manners that a driver may have (tests/gpu/fake_runtime.h),
and under all at once: the same bits, failures at the same places, and hooks that wait for nothing. What may
wait for ever does not return: the fake runtime says who waits for whom, and check() fails."""

import pytest

torch = pytest.importorskip("torch")

from test_staging import CHECKS, HOSTS_CHECKS, KERNEL_CHECKS, between_hosts, need_kernels, run_under

# An exchange with kernels needs more places in a launch queue than test_manners's 8; CUDA's has 1,024.
MANNERS = (
    "blocking-alloc",
    "lazy-loading",
    "late-flags",
    "connections=1",
    "connections=2",
    "connections=8",
    "depth=128",
    "all,depth=128",
)


@pytest.mark.parametrize("manners", MANNERS)
def test_staging(manners):
    run_under(manners, CHECKS)


@pytest.mark.parametrize("manners", ["", *MANNERS])
def test_kernels(manners):
    need_kernels()
    run_under(manners, KERNEL_CHECKS)


def test_between_hosts():
    run_under(MANNERS[-1], [between_hosts, *HOSTS_CHECKS], 4)
