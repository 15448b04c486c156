"""A tensor in few bits, as one message whose length follows from its number of elements: tagc/blocks.h."""

from __future__ import annotations

import ctypes

import torch

from tagc import _library as lib

# What a Codec takes, and as what libtagc reads and writes it.
_ELEMENTS = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
_FORMATS = {torch.float32: lib.FORMATS["fp32"], torch.bfloat16: lib.FORMATS["bf16"]}


class Codec:
    """Encodes and decodes tensors with the same options. Tensors may be on a device: they are copied to the
    host and back, which waits for it. For one thread at a time."""

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
        found = ctypes.c_uint64()
        lib.call("tagc_blocks_bytes", ctypes.byref(self._options), n_elems, ctypes.byref(found))
        return found.value

    def encode(self, tensor: torch.Tensor, message: torch.Tensor, seed: int) -> None:
        """Fills `message`, of uint8. seed: of the random numbers, where rounding is stochastic."""
        values = tensor.detach().to("cpu", _ELEMENTS[tensor.dtype]).contiguous()
        on_host = message if message.device.type == "cpu" else torch.empty_like(message, device="cpu")
        self._options.element, self._options.seed = _FORMATS[values.dtype], seed
        self._call("encode", values.data_ptr(), values.numel(), on_host.data_ptr(), on_host.numel())
        if on_host is not message:
            message.copy_(on_host)

    def decode(self, message: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fills `tensor`. Error if the message is damaged, or of other options; the tensor is unchanged
        then."""
        on_host, target = message.cpu(), tensor.detach()
        is_direct = target.device.type == "cpu" and target.dtype in _FORMATS and target.is_contiguous()
        values = target if is_direct else torch.empty(target.shape, dtype=_ELEMENTS[target.dtype])
        self._options.element = _FORMATS[values.dtype]
        self._call("decode", on_host.data_ptr(), on_host.numel(), values.data_ptr(), values.numel())
        if values is not target:
            target.copy_(values)

    def _call(self, what: str, *arguments: int) -> None:
        lib.call(f"tagc_blocks_{what}", ctypes.byref(self._options), *arguments)
