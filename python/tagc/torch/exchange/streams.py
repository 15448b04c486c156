"""All calls of torch's streams. libtagc uses the streams' handles for everything else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from tagc._library import Error


class Cuda:
    """Of one device of this process."""

    maker = "cuda"

    def __init__(self, device: torch.device) -> None:
        if torch.version.cuda is None:
            raise Error(
                "unsupported",
                f"tensors on {device}: this torch ({torch.__version__}) has no CUDA runtime, which "
                "tagc needs; ROCm is not supported yet",
            )
        self.ordinal = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.ordinal)
        self.library = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
        self._aside: torch.cuda.Stream | None = None

    def current(self) -> int:
        """Returns the handle of this thread's current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def future(self, value: Any, stream: int) -> torch.futures.Future[Any]:
        """Returns a future that has its value at once. A stream that waits for it waits for all work so far
        of the stream with this handle."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self.device])
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device)):
            future.set_result(value)
        return future

    @contextlib.contextmanager
    def aside(self) -> Iterator[int]:
        """Returns a context that enqueues this thread's work in another stream, after the current stream's
        work so far, which does not wait for it. Yields its handle. It is always the same stream: one for
        each bucket of DDP would take as many hardware queues, which the waiting ones hold up, and save no
        time, since NCCL puts all collectives of a host into one stream of its own."""
        if self._aside is None:
            self._aside = torch.cuda.Stream(self.device)
        here, there = torch.cuda.current_stream(self.device), self._aside
        there.wait_stream(here)
        with torch.cuda.stream(there):
            yield int(there.cuda_stream)

    def behind(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which a stream of torch's is the current one."""
        return torch.cuda.stream(stream)

    def follow(self, stream: int) -> None:
        """Makes the current stream wait for all work so far of the stream with this handle."""
        there = torch.cuda.ExternalStream(stream, device=self.device)
        torch.cuda.current_stream(self.device).wait_stream(there)

    def pinned(self, n: int) -> torch.Tensor:
        """Returns integers in pinned host memory, so that copies to it do not block the host."""
        return torch.zeros(n, dtype=torch.int64, device="cpu").pin_memory()

    def mark(self) -> Any:
        """Returns what has a synchronize() that waits for this thread's stream's work so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def keep(self, tensor: torch.Tensor) -> None:
        """Makes torch keep a tensor's memory, once the tensor is gone, until the current stream's work so far
        is done. Torch itself only waits for the stream in which the tensor was made."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def settle(self) -> None:
        """Waits for this thread's stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def copy_seconds(self, n_bytes: int, n_runs: int = 5) -> tuple[float, float]:
        """Returns the median seconds of a copy to pinned memory and of one back."""
        there = torch.zeros(n_bytes, dtype=torch.uint8, device=self.device)
        here = torch.zeros(n_bytes, dtype=torch.uint8, device="cpu").pin_memory()
        found = []
        for source, target in ((there, here), (here, there)):
            samples = []
            for _ in range(1 + n_runs):
                self.synchronize()
                begin = time.perf_counter()
                target.copy_(source, non_blocking=True)
                self.synchronize()
                samples.append(time.perf_counter() - begin)
            found.append(sorted(samples[1:])[n_runs // 2])
        return found[0], found[1]


class Pinned:
    """Pinned memory for copies of tensors, by name, which grows to the largest."""

    def __init__(self, streams: Cuda) -> None:
        self._streams = streams
        self._memory: dict[str, torch.Tensor] = {}

    @property
    def n_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def reserve(self, name: str, n_bytes: int) -> torch.Tensor:
        """Returns at least so many bytes. What was copied from them before has arrived."""
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < n_bytes:
            memory = self._memory[name] = self._streams.pinned(-(-n_bytes // 8))
        return memory.view(torch.uint8)

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory for that tensor, of its type and shape, as reserve()."""
        memory = self.reserve(name, tensor.nbytes)[: tensor.nbytes]
        return memory.view(tensor.dtype).view(tensor.shape)


def of(device: torch.device) -> Cuda | None:
    """Returns the Streams of a torch.device; None for CPU memory."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return Cuda(device)
    raise Error("unsupported", f"tensors on {device}: must be in CPU memory or on a CUDA device")


def device_of(model: torch.nn.Module) -> torch.device:
    """Returns the device of a model's parameters on this rank."""
    devices = {parameter.device for parameter in model.parameters()} - {
        torch.device("cpu"),
        torch.device("meta"),
    }
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise Error("unsupported", f"parameters on {found}: those of a rank must be on one device")
    return devices.pop() if devices else torch.device("cpu")
