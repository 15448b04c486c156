"""A tensor in few bits, as one message whose length follows from its number of elements: tagc/blocks.h."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.extension import Kernels, Pinned, streams

# What a Codec takes, and as what libtagc reads and writes it.
_ELEMENTS = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
_FORMATS = {torch.float32: lib.FORMATS["fp32"], torch.bfloat16: lib.FORMATS["bf16"]}
_N_WORDS = 5  # of a tagc_blocks_state, the last two being status and number


class Codec:
    """Encodes and decodes tensors in host memory, with the same options. For one thread at a time."""

    def __init__(self, values: str, block: int, is_stochastic: bool) -> None:
        self.values = values
        self._options = lib.initialised(lib.BlocksOptions, "tagc_blocks_options_init")
        self._options.format, self._options.block = lib.FORMATS[values], block
        self._options.rounding = int(is_stochastic)

    @staticmethod
    def takes(dtype: torch.dtype) -> bool:
        return dtype in _ELEMENTS

    def n_bytes(self, n_elems: int) -> int:
        """Returns the length of the message."""
        n = ctypes.c_uint64()
        lib.call("tagc_blocks_bytes", ctypes.byref(self._options), n_elems, ctypes.byref(n))
        return n.value

    def encode(self, tensor: torch.Tensor, message: torch.Tensor, seed: int) -> None:
        """Fills `message`, of uint8. seed: of the random numbers, where rounding is stochastic."""
        values = tensor.detach().to(_ELEMENTS[tensor.dtype]).contiguous()
        self._options.element, self._options.seed = _FORMATS[values.dtype], seed
        self._encode(values, message)

    def decode(self, message: torch.Tensor, tensor: torch.Tensor, number: int = 0) -> None:
        """Fills `tensor`. Error if the message is damaged, or of other options; the tensor is unchanged
        then. number: of the message, for Device.fault()."""
        target = tensor.detach()
        is_direct = target.dtype in _FORMATS and target.is_contiguous()
        values = target
        if not is_direct:
            values = torch.empty(target.shape, dtype=_ELEMENTS[target.dtype], device=target.device)
        self._options.element = _FORMATS[values.dtype]
        self._decode(message, values, number)
        if values is not target:
            target.copy_(values)

    def _encode(self, values: torch.Tensor, message: torch.Tensor) -> None:
        self._call("encode", values.data_ptr(), values.numel(), message.data_ptr(), message.numel())

    def _decode(self, message: torch.Tensor, values: torch.Tensor, number: int) -> None:
        self._call("decode", message.data_ptr(), message.numel(), values.data_ptr(), values.numel())

    def _call(self, what: str, *arguments: int) -> None:
        lib.call(f"tagc_blocks_{what}", ctypes.byref(self._options), *arguments)


class StagedCodec(Codec):
    """The same for tensors and messages on a device: they are copied to pinned host memory and back, and the
    host waits for the current stream."""

    def __init__(self, values: str, block: int, is_stochastic: bool, streams: streams.Cuda) -> None:
        super().__init__(values, block, is_stochastic)
        self._streams, self._pinned = streams, Pinned(streams)

    def _encode(self, values: torch.Tensor, message: torch.Tensor) -> None:
        self._streams.settle()
        here, made = self._pinned.like("values", values), self._pinned.like("message", message)
        here.copy_(values, non_blocking=True)
        self._streams.settle()
        super()._encode(here, made)
        message.copy_(made, non_blocking=True)

    def _decode(self, message: torch.Tensor, values: torch.Tensor, number: int) -> None:
        self._streams.settle()
        here, came = self._pinned.like("values", values), self._pinned.like("message", message)
        came.copy_(message, non_blocking=True)
        self._streams.settle()
        super()._decode(came, here, number)
        values.copy_(here, non_blocking=True)


class Device:
    """libtagc's kernels for messages in the memory of one device, which work in the order of the current
    stream. Error if there are none."""

    def __init__(self, streams: streams.Cuda) -> None:
        self.streams, self._device = streams, ctypes.c_void_p()
        library = streams.library.encode() if streams.library else None
        lib.call(
            "tagc_device_open", streams.maker.encode(), library, streams.ordinal, ctypes.byref(self._device)
        )
        try:
            self._kernels = Kernels(self._device, streams)
        except Error:
            lib.load().tagc_device_close(self._device)
            raise
        self._state = torch.zeros(_N_WORDS, dtype=torch.int64, device=streams.device)
        self._seen = streams.pinned(_N_WORDS)

    @property
    def kernels(self) -> ctypes.c_void_p:
        return self._kernels.handle

    @property
    def state(self) -> int:
        """The address of the state of all messages."""
        return self._state.data_ptr()

    def fault(self) -> tuple[str, int] | None:
        """Returns status and number of the first message that could not be decoded, None if there was none.
        It does not wait for the device, and so may say of a message only at a later call."""
        *_, status, number = self._seen.tolist()
        self._seen.copy_(self._state, non_blocking=True)
        return (lib.STATUSES[status], number) if status else None

    def close(self) -> None:
        """Frees the kernels, once the current stream is through."""
        if self._device:
            with contextlib.suppress(RuntimeError):  # the device failed
                self.streams.settle()
            self._kernels.close()
            lib.load().tagc_device_close(self._device)
            self._device = ctypes.c_void_p()


class DeviceCodec(Codec):
    """The same for tensors and messages on a device, by its kernels. Nothing waits; what is wrong with a
    message, Device.fault() says, and its tensor becomes NaN."""

    def __init__(self, values: str, block: int, is_stochastic: bool, device: Device) -> None:
        super().__init__(values, block, is_stochastic)
        self._device = device

    def _encode(self, values: torch.Tensor, message: torch.Tensor) -> None:
        self._on("encode", values.data_ptr(), values.numel(), message.data_ptr(), message.numel())

    def _decode(self, message: torch.Tensor, values: torch.Tensor, number: int) -> None:
        self._on("decode", message.data_ptr(), message.numel(), values.data_ptr(), values.numel(), number)

    def _on(self, what: str, *arguments: int) -> None:
        device, stream = self._device, self._device.streams.current()
        options = ctypes.byref(self._options)
        lib.call(f"tagc_blocks_{what}_on", device.kernels, options, *arguments, device.state, stream)


def opened(device: torch.device) -> tuple[streams.Cuda | Device | None, str]:
    """Returns what codec_of() takes for tensors there, and why there are no kernels for them ("": there
    are)."""
    on = streams.of(device)
    if on is None:
        return None, "tensors are in host memory"
    try:
        return Device(on), ""
    except Error as missing:
        return on, str(missing)


def codec_of(values: str, block: int, is_stochastic: bool, on: streams.Cuda | Device | None) -> Codec:
    """Returns the Codec of tensors in host memory (None), or on a device, with its kernels or without."""
    if on is None:
        return Codec(values, block, is_stochastic)
    if isinstance(on, Device):
        return DeviceCodec(values, block, is_stochastic, on)
    return StagedCodec(values, block, is_stochastic, on)
