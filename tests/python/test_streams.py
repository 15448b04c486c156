"""tagc.torch.exchange.streams against a recording stand-in for torch.cuda: which calls it makes, in which
order."""

import contextlib
import pathlib
import types

import pytest

torch = pytest.importorskip("torch")

import tagc.torch as tagc
from tagc.torch.exchange import streams


class Recorder:
    """In place of torch.cuda, torch.futures and torch.version."""

    def __init__(self):
        self.calls = []
        self.cuda = self.futures = self
        self.version = types.SimpleNamespace(cuda="13.0")
        self.device, self.__version__ = torch.device, torch.__version__

    def current_device(self):
        self.calls.append("current_device")
        return 1

    def current_stream(self, device):
        self.calls.append(("current_stream", str(device)))
        return types.SimpleNamespace(cuda_stream=77)

    def ExternalStream(self, handle, device):
        return handle, str(device)

    @contextlib.contextmanager
    def stream(self, stream):
        self.calls.append(("begin", *stream))
        yield
        self.calls.append(("end", *stream))

    def Future(self, devices):
        self.calls.append(("future", str(devices[0])))
        return types.SimpleNamespace(set_result=lambda value: self.calls.append(("set", value)))

    def is_current_stream_capturing(self):
        return "captured" in self.calls

    def synchronize(self, device):
        self.calls.append(("synchronize", str(device)))


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(streams, "torch", found)
    return found


def test_current(recorder):
    one = streams.Cuda(torch.device("cuda", 3))
    assert one.device == torch.device("cuda", 3) and one.ordinal == 3 and one.maker == "cuda"
    assert one.library == "libcudart.so.13"  # torch's own
    assert one.current() == 77
    assert recorder.calls == [("current_stream", "cuda:3")]
    assert streams.Cuda(torch.device("cuda")).ordinal == 1
    assert recorder.calls[1:] == ["current_device"]


def test_future(recorder):
    """Its value is set while the stream with that result is the current one: torch notes an event there, and
    nowhere else."""
    streams.Cuda(torch.device("cuda", 0)).future("sum", 99)
    assert recorder.calls == [
        ("future", "cuda:0"),
        ("begin", 99, "cuda:0"),
        ("set", "sum"),
        ("end", 99, "cuda:0"),
    ]


def test_aside(recorder, monkeypatch):
    """Work of every bucket goes into one stream, after what the current one has so far."""
    made = []

    class Made:
        def __init__(self, device):
            self.cuda_stream = 100 + len(made)
            made.append(self)

        def __iter__(self):  # what Recorder.stream() notes
            return iter([self.cuda_stream])

        def wait_stream(self, other):
            recorder.calls.append(("waits", self.cuda_stream, other.cuda_stream))

    recorder.Stream = Made
    one = streams.Cuda(torch.device("cuda", 0))
    for _ in range(3):
        with one.aside() as handle:
            assert handle == 100
    assert len(made) == 1
    each = [("current_stream", "cuda:0"), ("waits", 100, 77), ("begin", 100), ("end", 100)]
    assert recorder.calls == 3 * each


class Stream:
    """One that tells who waits for whom."""

    def __init__(self, recorder, name):
        self.calls, self.name = recorder.calls, name

    def wait_stream(self, other):
        self.calls.append((self.name, "waits for", other.name))

    def synchronize(self):
        self.calls.append(("host waits for", self.name))


def test_copy_seconds(recorder):
    """Nothing is under way when a copy begins, nor when its time is taken."""

    class Memory:
        def __init__(self, name):
            self.name = name

        def pin_memory(self):
            return Memory("pinned")

        def copy_(self, source, non_blocking):
            assert non_blocking
            recorder.calls.append(("copy", source.name, self.name))

    recorder.uint8 = torch.uint8
    recorder.zeros = lambda n_bytes, dtype, device="cpu": Memory(str(device))
    out_s, back_s = streams.Cuda(torch.device("cuda", 0)).copy_seconds(1 << 20, n_runs=2)
    assert out_s >= 0 and back_s >= 0
    sync = ("synchronize", "cuda:0")
    assert recorder.calls == 3 * [sync, ("copy", "cuda:0", "pinned"), sync] + 3 * [
        sync,
        ("copy", "pinned", "cuda:0"),
        sync,
    ]


def test_keep(recorder):
    """A tensor's memory outlives the current stream's work on it."""

    class Tensor:
        def record_stream(self, stream):
            recorder.calls.append(("kept for", stream.cuda_stream))

    one = streams.Cuda(torch.device("cuda", 2))
    one.keep(Tensor())
    assert recorder.calls == [("current_stream", "cuda:2"), ("kept for", 77)]


def test_mark(recorder):
    """Who waits for it waits for the current stream's work so far."""

    class Event:
        def record(self, stream):
            recorder.calls.append(("recorded", stream.cuda_stream))

    recorder.Event = Event
    assert isinstance(streams.Cuda(torch.device("cuda", 2)).mark(), Event)
    assert recorder.calls == [("current_stream", "cuda:2"), ("recorded", 77)]


class Copies:
    """In place of streams.Cuda: notes what a gather in pinned memory waits for."""

    def __init__(self):
        self.calls = []

    def pinned(self, n):
        self.calls.append("allocates")
        return torch.zeros(n, dtype=torch.int64)

    def settle(self):
        self.calls.append("waits for the copy out")

    def mark(self):
        self.calls.append("copies back")
        return types.SimpleNamespace(synchronize=lambda: self.calls.append("waits for the copy back"))


def test_a_gather_in_pinned_memory(monkeypatch):
    """It reads what has come to the host, and the next one writes to that memory when what was there is back
    on the device. Memory grows to the largest."""
    from tagc.torch.exchange import staging

    copies = Copies()
    own = staging.Staging.__new__(staging.Staging)
    own.streams, own.kernels, own.failure = copies, None, None
    own._pinned, own._copied = streams.Pinned(copies), None
    monkeypatch.setattr(staging.Staging, "_wait", lambda self: None)
    held = []

    def perform(kernels, source, target, failure):
        assert kernels is None and failure is None
        copies.calls.append("gathers")
        held.append((source.data_ptr(), target.data_ptr()))
        target.copy_(source.repeat(2))

    first = ["waits for the copy out", "gathers", "copies back"]
    for n, dtype, before in (
        (4, torch.float32, ["allocates", "allocates"]),
        (3, torch.bfloat16, ["waits for the copy back"]),
        (64, torch.float32, ["waits for the copy back", "allocates", "allocates"]),
    ):
        copies.calls.clear()
        source, target = torch.arange(n).to(dtype), torch.empty(2 * n, dtype=dtype)
        own.run(perform, source, target, None, is_there=True)
        assert own.failure is None and copies.calls == before + first
        assert torch.equal(target, source.repeat(2))
    assert held[0] == held[1] != held[2]
    assert own._pinned.n_bytes == 64 * 4 + 128 * 4


class NcclWork:
    """WorkNCCL.wait() with a time-out polls in the calling thread; without, only the stream waits."""

    def wait(self, timeout=None):
        assert timeout is None, "the host would wait for the device"
        return True


def test_waits_of_two_backends(monkeypatch):
    """In a group "cpu:gloo,cuda:nccl" the tensor's backend decides how long calls are waited for, and what
    they can do."""
    import torch.distributed as dist

    from tagc.torch.exchange import internals, waits

    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    monkeypatch.setattr(internals, "backend_of", lambda _, device: gloo if device.type == "cpu" else object())
    calls = []

    def begun(name):
        return lambda *args, **named: (calls.append((name, named.get("op"))), NcclWork())[1]

    for name in ("all_gather", "reduce_scatter", "all_gather_rows", "reduce_scatter_rows"):
        monkeypatch.setattr(internals, name, begun(name))
    monkeypatch.setattr(dist, "all_to_all_single", begun("all_to_all_single"))
    there, large = (torch.empty(n, device="meta") for n in (2, 4))  # not the processor's
    op = dist._make_nccl_premul_sum(0.5)
    waits.ReduceScatter("a", 5)(there, large, "group", op, async_op=True).wait()
    assert calls[-1] == ("reduce_scatter", op), "NCCL multiplies by itself"
    group = waits.Collectives("group", "a", 5)
    group.gather_rows(large.view(1, 4), there.view(1, 2))
    assert calls[-1][0] == "all_gather_rows"
    group.all_to_all(large, large)
    group.all_gather(large, there)
    group.reduce_scatter_rows(there, large, op)
    assert len(calls) == 5


def test_of(recorder):
    assert streams.of(torch.device("cpu")) is None
    assert streams.of(torch.device("cuda", 2)).ordinal == 2
    with pytest.raises(tagc.Error, match="tensors on meta: must be in CPU memory or on a CUDA device"):
        streams.of(torch.device("meta"))
    recorder.version.cuda = None
    with pytest.raises(tagc.Error, match="has no CUDA runtime"):
        streams.of(torch.device("cuda", 0))


def test_device_of():
    def model(*devices):
        return types.SimpleNamespace(
            parameters=lambda: (types.SimpleNamespace(device=torch.device(d)) for d in devices)
        )

    assert streams.device_of(model("cpu", "meta")) == torch.device("cpu")
    assert streams.device_of(model("cpu", "cuda:1", "cuda:1")) == torch.device("cuda", 1)
    with pytest.raises(tagc.Error, match="parameters on cuda:0 and cuda:1"):
        streams.device_of(model("cuda:0", "cuda:1"))


def test_nowhere_else():
    for path in pathlib.Path(streams.__file__).parent.glob("*.py"):
        if path.name != "streams.py":
            assert "torch.cuda" not in path.read_text(), path


# ---- FSDP2: what each stream waits for, in torch's own foreach_reduce() ----


class Waiting:
    """Its work so far waits for all of `deps`."""

    def __init__(self):
        self.deps = set()

    def wait_stream(self, other):
        self.deps |= other.deps

    def wait_event(self, event):
        self.deps |= event

    def record_event(self):
        return frozenset(self.deps)


class Device:
    """In place of torch.cuda for torch, and of a handle for tagc's hooks: exchanges are those of a queue, of
    which the streams `out` and `back` wait as in lib/gpu/job.c. "flag k" is the network's part."""

    def __init__(self):
        self.compute, self.scatter, self.reduce = Waiting(), Waiting(), Waiting()
        self._current, self._out, self._back = self.compute, Waiting(), Waiting()
        self.encodings = []  # what the encoding of each exchange waited for
        self.passes = self.runners = self.streams = self
        self.wrapper = types.SimpleNamespace(hosts=lambda group: types.SimpleNamespace(is_two_level=False))

    def current_stream(self):
        return self._current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        yield
        self._current = before

    def exchange(self, gradient):
        number = len(self.encodings)
        self._out.deps |= self._current.deps
        self.encodings.append(self._out.record_event())
        self._out.deps.add(f"encode {number}")
        self._back.deps |= self._out.deps | {f"flag {number}"}
        self._current.deps |= {0: set(), 1: self._back.deps, 2: self._out.deps}[gradient.waits]

    def follow(self, result):
        self._current.wait_stream(self._back)

    def behind(self, stream):
        return self.stream(stream)

    def find(self, tensor):
        return self, None


N_UNITS = 4


@pytest.mark.parametrize("kind", ["reduce-scatter", "all-reduce hook"])
def test_a_unit_is_encoded_while_the_one_before_travels(kind, monkeypatch):
    """Neither torch's streams nor compute wait for the network of the unit before; who reads a gradient
    does."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    from tagc.torch.exchange import internals
    from tagc.torch.hooks import fsdp2

    if internals.version() < (2, 13):
        pytest.skip("foreach_reduce() of torch 2.13 and newer")
    device = Device()
    monkeypatch.setattr(collectives, "_get_device_handle", lambda _: device)
    group = types.SimpleNamespace(
        reads_sums_at_once=lambda dtype: True,
        holds_back=lambda: False,
        reduce_scatter_stream=device.scatter,
        comms=[None, None, None],
        shard_group=None,
    )
    module = types.SimpleNamespace(group=group, layout=lambda *_: None, shard_layout=lambda *_: None)
    if kind == "reduce-scatter":
        hook = fsdp2.Arrival(device)
        scatter = fsdp2.ReduceScatter(device, None, module, hook)
    else:
        group.shard_group = object()
        hook = fsdp2.AllReduce(device, None, module, None)
        scatter = types.SimpleNamespace(allocate=fsdp2.waits.FsdpComm().allocate)
        scatter = type("Torchs", (), {"allocate": scatter.allocate, "__call__": lambda *_, **__: None})()
    group.comms[2] = hook
    last = None
    for number in range(N_UNITS):
        if last is not None:  # FSDPParamGroup.post_backward(), with one input buffer
            device.compute.wait_event(last)
        device.compute.deps.add(f"backward {number}")
        assert not any(f"flag {before}" in device.compute.deps for before in range(number)), "compute waits"
        parameter = types.SimpleNamespace(
            fsdp_placement=types.SimpleNamespace(dim=0),
            offload_to_cpu=False,
            sharded_size=torch.Size([2]),
            contiguous_sharded_stride=(1,),
            sharded_param=types.SimpleNamespace(grad=None),
            to_sharded_dtensor=lambda tensor: tensor,
        )
        _, last, _, is_reduced, *_ = collectives.foreach_reduce(
            [parameter],
            [torch.ones(4)],
            types.SimpleNamespace(size=lambda: 2),
            device.scatter,
            scatter,
            torch.float32,
            torch.float32,
            torch.device("cpu"),
            None,
            None,
            device.reduce,
            True,
            None,
            hook,
        )
        assert f"backward {number}" in device.encodings[number]
        assert f"flag {number}" in is_reduced, "the gradient is read before it is there"
        for before in range(number):
            assert f"flag {before}" not in device.encodings[number], f"unit {number} waits for unit {before}"
