"""What libtagc exchanges by itself needs no lock of Python's: two ranks in this process, whose messages go by
libtagc's own transport."""

import concurrent.futures
import copy
import ctypes
import zlib

import pytest

torch = pytest.importorskip("torch")

from tagc import _library as lib
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.reducer import Reducer
from tagc.torch.exchange.staging import Staging
from tagc.torch.exchange.task import Task
from tagc.torch.exchange.work import Work
from tagc.torch.schedule.samples import Sample

N_RANKS, N_ELEMS, N_STEPS = 2, 2048, 4


class Comm:
    """One rank's, in place of comm.Comm."""

    world_size, ranks = N_RANKS, (0, 1)

    def __init__(self, group, rank):
        self.rank, self.handle = rank, ctypes.c_void_p()
        lib.call("tagc_comm_create_local", group, rank, None, ctypes.byref(self.handle))


class NoSampler:
    def sampling(self, layout):
        return ctypes.c_void_p(), Sample((), (), torch.empty(0, dtype=torch.long))


class Rank:
    """A queue, and a unit of one parameter in bf16, half of it compressed."""

    def __init__(self, device, comm):
        parameters = [
            layouts.Parameter("a", (N_ELEMS // 2,), "compressed"),
            layouts.Parameter("b", (N_ELEMS // 2,), "dense"),
        ]
        layout = layouts.bucket(parameters, N_RANKS)
        options = {"output": lib.OUTPUTS["unit"], "exchange": lib.EXCHANGES["direct"]}
        options |= {"op": lib.OPS["avg"]}
        parts = []
        for part in layout.parts:
            is_whole = part.kind == "dense"
            how = {"sparsity": 0.0, "format": lib.FORMATS["fp32"]} if is_whole else {"sparsity": 0.75}
            reducer = Reducer(comm, part.n_elems, **options, **how)
            parts.append((part, reducer, layout.output_runs(part, comm.rank)))
        self.reducers = [reducer for _, reducer, _ in parts]
        streams, stream = copy.copy(device), ctypes.c_void_p()
        assert device.fake.fake_stream(ctypes.byref(stream)) == 0
        streams._stream = stream.value  # each rank has a caller's stream of its own
        self.staging = Staging(streams)
        what, sizes = "gradients of a", (N_ELEMS, N_ELEMS)
        arguments = (layout, parts, torch.bfloat16, sizes, 1.0, [comm], NoSampler(), Work())
        self.task = Task(self.staging.queue, what, *arguments)
        self.words = [zlib.crc32(what.encode()) << 8, *[0] * 6]
        self.source = torch.zeros(N_ELEMS, dtype=torch.bfloat16)
        self.target = torch.zeros_like(self.source)
        self.n_ended = 0

    def start(self, step):
        torch.manual_seed(step)
        self.source.copy_(torch.randn(N_ELEMS))  # the same on both ranks, whose mean it then is
        self.task.begin(self.words, "elements 2048", step, self.end)
        self.staging.start_task(self.task, self.source, self.target, True)

    def end(self):
        self.task.check()
        self.n_ended += 1

    def close(self):
        self.staging.close()
        self.task.close()
        for reducer in self.reducers:
            reducer.close()
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
    with concurrent.futures.ThreadPoolExecutor(N_RANKS) as pool:  # reducers are made together
        ranks = list(pool.map(lambda comm: Rank(device, comm), comms))
    device.fake.fake_behave(b"blocking-alloc,late-flags")
    device.fake.fake_limit(60_000)
    n_under_way = 0
    for step in range(1, N_STEPS + 1):
        memory = device.fake.fake_alloc(64)
        for rank in ranks:
            rank.start(step)
        n_under_way += not all(rank.task.is_agreed for rank in ranks)
        free(memory)
        for rank in ranks:
            rank.staging.finish()
            rank.staging.streams.synchronize()
        half = N_ELEMS // 2
        for rank in ranks:
            assert torch.equal(rank.target, ranks[0].target)
            assert torch.equal(rank.target[half:], rank.source[half:])
            assert 0 < rank.target[:half].count_nonzero() < half
    assert n_under_way > 0, "every exchange was over before the call"
    assert [rank.n_ended for rank in ranks] == N_RANKS * [N_STEPS]
    for rank in ranks:
        rank.close()
    for comm in comms:
        lib.load().tagc_comm_destroy(comm.handle)
    lib.load().tagc_local_group_destroy(group)
    device.check()
