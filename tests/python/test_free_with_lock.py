"""Exchanges on a device need no lock of Python's: two ranks in this process, whose messages go by libtagc's
own transport."""

import concurrent.futures
import copy
import ctypes

import pytest

torch = pytest.importorskip("torch")

from tagc import _library as lib
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange import staging
from tagc.torch.exchange.model import Levels, Stream, Sum, UnitModel

N_RANKS, N_ELEMS, N_STEPS = 2, 2048, 4


class Comm:
    """One rank's, in place of comm.Comm."""

    world_size, ranks = N_RANKS, (0, 1)

    def __init__(self, group, rank):
        self.rank, self.handle = rank, ctypes.c_void_p()
        lib.call("tagc_comm_create_local", group, rank, None, ctypes.byref(self.handle))


class NoSchedule:
    """Sends a quarter of what is compressed, from the first exchange on."""

    def model_options(self, parameters, _dtype):
        schedule = lib.initialised(lib.ScheduleOptions, "tagc_schedule_options_init")
        schedule.gentle, schedule.sparsity = False, 0.75
        options = lib.initialised(lib.ModelOptions, "tagc_model_options_init")
        options.schedule.options = ctypes.pointer(schedule)
        return options, {parameter.name: parameter.kind for parameter in parameters}, schedule


class Rank:
    """A queue, and a unit in bf16, half of it compressed."""

    def __init__(self, device, comm):
        parameters = [
            layouts.Parameter("a", (N_ELEMS // 2,), "compressed"),
            layouts.Parameter("b", (N_ELEMS // 2,), "dense"),
        ]
        layout = layouts.bucket(parameters, N_RANKS)
        streams, stream = copy.copy(device), ctypes.c_void_p()
        assert device.fake.fake_stream(ctypes.byref(stream)) == 0
        streams._stream = stream.value  # each rank has a caller's stream of its own
        self.staging = staging.Staging(streams)
        wanted = Sum(Levels(None, comm), layout, torch.bfloat16, "avg", self.staging.queue)
        self.model = UnitModel("a", wanted, NoSchedule())
        self.source = torch.zeros(N_ELEMS, dtype=torch.bfloat16)
        self.target = torch.zeros_like(self.source)

    def start(self, step):
        torch.manual_seed(step)
        self.source.copy_(torch.randn(N_ELEMS))  # the same on both ranks, whose mean it then is

        stream = Stream(self.staging.streams.current(), staging.FOR_RESULT)
        self.model.begin(self.source, self.target, step, 1.0, stream)

    def is_over(self):
        done = ctypes.c_int()
        lib.call("tagc_model_test", self.model._handle, 0, ctypes.byref(done))
        return bool(done.value)

    def close(self):
        self.model.close()
        self.staging.close()
        self.staging.free()


def test_free_with_the_lock():
    """While an exchange is under way, a thread frees memory of the device and keeps Python's lock, as torch's
    allocator does where memory is short. The driver waits for the device, and lets no other call in."""
    from fake_device import FakeDevice

    device = FakeDevice(1)
    free = ctypes.PyDLL(device.library).fake_free  # a call that keeps the lock
    free.argtypes = [ctypes.c_void_p]
    device.fake.fake_alloc.restype = ctypes.c_void_p
    device.fake.fake_alloc.argtypes = [ctypes.c_size_t]
    group = ctypes.c_void_p()
    lib.call("tagc_local_group_create", N_RANKS, ctypes.byref(group))
    comms = [Comm(group, rank) for rank in range(N_RANKS)]
    with concurrent.futures.ThreadPoolExecutor(N_RANKS) as pool:  # models are made together
        ranks = list(pool.map(lambda comm: Rank(device, comm), comms))
    device.fake.fake_behave(b"blocking-alloc,late-flags")
    device.fake.fake_limit(60_000)
    n_under_way = 0
    for step in range(1, N_STEPS + 1):
        memory = device.fake.fake_alloc(64)
        for rank in ranks:
            rank.start(step)
        n_under_way += not all(rank.is_over() for rank in ranks)
        free(memory)
        for rank in ranks:
            rank.model.end()
            rank.staging.streams.synchronize()
        half = N_ELEMS // 2
        for rank in ranks:
            assert torch.equal(rank.target, ranks[0].target)
            assert torch.equal(rank.target[half:], rank.source[half:])
            assert 0 < rank.target[:half].count_nonzero() < half
    assert n_under_way > 0, "every exchange was over before the call"
    for rank in ranks:
        rank.close()
    for comm in comms:
        lib.load().tagc_comm_destroy(comm.handle)
    lib.load().tagc_local_group_destroy(group)
    device.check()
