"""A device of the fake CUDA runtime (tests/gpu/fake_runtime.h) whose memory is the processor's, so that whole
training runs go the way of a GPU's tensors: streams that run at random times, flags that are seen late,
pinned memory that is checked.

Torch's own work on tensors is done when its call returns. So where a hook has the current stream wait, the
host waits: at once, or in a lazy device at the end of the backward pass, as long as no thread reads results
before."""

import contextlib
import ctypes
import os
import pathlib
import threading
import weakref

import torch

from tagc.torch.exchange import gloo, model, staging, streams

LIBRARY = pathlib.Path(os.environ["TAGC_LIBRARY"]).parent / "tests" / "gpu" / "libcudart.so.13"
# executed on the processor, in the order of the fake device's streams
KERNELS = LIBRARY.parent / "cuda" / "libtagc-cuda-harness.so"


class FakeDevice:
    """In place of streams.Cuda."""

    maker, ordinal, device = "cuda", 0, torch.device("cpu")
    library = str(LIBRARY)

    def __init__(self, seed, lazy=False):
        self.fake, self.lazy = ctypes.CDLL(self.library), lazy
        self.fake.fake_mistake.restype = ctypes.c_char_p
        # eager: at random times; one thread for host functions
        self.fake.fake_reset(ctypes.c_uint64(seed), 1, 1, 1)
        self.fake.fake_take_host_as_device()
        stream = ctypes.c_void_p()
        assert self.fake.fake_stream(ctypes.byref(stream)) == 0
        self._stream, self.n_futures, self.n_current, self._threads = stream.value, 0, 0, []
        self.n_kept, self._followed = 0, None
        self.tasks = []  # what libtagc ran by itself: weak references to the sources
        # A device's allocator frees in the order of streams; the processor's at once. So memory stays here.
        self.memory = []

    def current(self):
        self.n_current += 1
        return self._stream

    def future(self, value, stream):
        self.n_futures += 1
        future = torch.futures.Future()

        def run():
            self._synchronize(stream)
            future.set_result(value)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return future

    def behind(self, stream):
        return contextlib.nullcontext()

    def follow(self, stream):
        if self.lazy:
            self._followed = stream
        else:
            self._synchronize(stream)

    def pinned(self, n):
        return torch.zeros(n, dtype=torch.int64)

    def mark(self):
        return self

    def join(self):
        """Before a reset: no thread may be in the runtime then."""
        for thread in self._threads:
            thread.join()

    def _synchronize(self, stream):
        code = self.fake.cudaStreamSynchronize(ctypes.c_void_p(stream))
        assert code == 0 or self.is_broken, code

    def aside(self):
        self.n_current += 1
        return contextlib.nullcontext(self._stream)

    def keep(self, tensor):
        self.n_kept += 1

    def settle(self):
        """Torch's own work is done when its call returns."""
        self.n_current += 1

    is_broken = False

    def synchronize(self):
        self._synchronize(self._stream)
        if self._followed is not None:
            self._synchronize(self._followed)
            self._followed = None

    def copy_seconds(self, n_bytes):
        return 1e-9 * n_bytes, 2e-9 * n_bytes

    def fail(self, function, n, code):
        self.fake.fake_fail(function.encode(), n, code)

    def break_down(self, code):
        self.is_broken = True
        self.fake.fake_break(0, code)

    def check(self):
        n = self.fake.fake_n_mistakes()
        assert n == 0, f"{n} mistakes, the first: {self.fake.fake_mistake(0).decode()}"


class Installed:
    """with Installed(seed) as device: all tensors of this process are on it. begins: what to wait for before
    each message. kernels: whether it has any."""

    n_waited = 0  # calls that had to wait until the device was idle, of all of them

    def __init__(self, seed, lazy=False, begins=None, kernels=False):
        self.device, self._begins = FakeDevice(seed, lazy), begins
        self._kernels = str(KERNELS) if kernels else "no-kernels.so"

    def __enter__(self):
        device, begins = self.device, self._begins
        os.environ["TAGC_CUDA_LIBRARY"] = self._kernels
        self._before = streams.of, staging.Staging.run, staging.Staging.finish, model.UnitModel.begin
        of, run, finish, begin = self._before
        self._move = move = gloo.Gloo._move
        streams.of = lambda _: device

        def run_and_wait(self, *arguments):  # a gather
            run(self, *arguments)
            device.synchronize()

        def finish_and_wait(self):
            try:
                finish(self)
            finally:
                device.synchronize()
                device.memory.clear()

        def begin_and_count(self, source, target, step, factor, stream=None):
            if stream is not None:
                device.tasks.append(weakref.ref(source))
                device.memory += [tensor.untyped_storage() for tensor in (source, target)]
            begin(self, source, target, step, factor, stream)
            if stream is not None and stream.waits and not device.lazy:
                device.synchronize()

        def move_late(self, transfer):  # the first message of an exchange is its agreement
            if begins is not None:
                begins()
            return move(self, transfer)

        staging.Staging.run, staging.Staging.finish = run_and_wait, finish_and_wait
        model.UnitModel.begin, gloo.Gloo._move = begin_and_count, move_late
        return device

    def __exit__(self, *_):
        self.device.join()
        Installed.n_waited += self.device.fake.fake_n_waited()
        del os.environ["TAGC_CUDA_LIBRARY"]
        streams.of, staging.Staging.run, staging.Staging.finish, model.UnitModel.begin = self._before
        gloo.Gloo._move = self._move
