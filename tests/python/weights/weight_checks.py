"""What tests of weights share: an error's words, and bits of tensors."""

import pytest
import torch

import tagc.torch as tagc


def refused(function, status, text):
    with pytest.raises(tagc.Error) as error:
        function()
    assert error.value.status == status and text in str(error.value), error.value


def bits(model):
    """Every bit of its parameters, or of a dict of tensors: {name: (dtype, shape, bytes)}."""
    named = model if isinstance(model, dict) else dict(model.named_parameters())
    return {
        name: (p.dtype, p.shape, p.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, p in named.items()
    }


def step(tensors, generator):
    """Moves some elements."""
    for tensor in tensors.values():
        tensor += 0.5 * (torch.rand(tensor.shape, generator=generator) < 0.05)
