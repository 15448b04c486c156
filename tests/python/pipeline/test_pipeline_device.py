"""Stages whose tensors are on a device: kernels give the bits of the processor's codec, and without kernels
tensors pass through pinned memory, in the order of the stream."""

import collections

import pytest

torch = pytest.importorskip("torch")
import fake_device
import ranks
import torch.distributed as dist
from test_pipeline import CHUNKS, STEPS, Pipe, arrives, expected, same, traffic

import tagc.torch as tagc
from tagc.pipeline import blocks


class Installed(fake_device.Installed):
    """All stages of this process are on a fake device, whose kernels work at random times. gloo reads
    messages, and torch tensors, as soon as a call returns; a device's stream would wait."""

    def __enter__(self):
        device, self._on = super().__enter__(), blocks.DeviceCodec._on

        def on_and_wait(codec, what, *arguments):
            self._on(codec, what, *arguments)
            device.synchronize()

        blocks.DeviceCodec._on = on_and_wait
        return device

    def __exit__(self, *problem):
        blocks.DeviceCodec._on = self._on
        super().__exit__(*problem)


def stages_on_a_device_equal_the_oracle(rank, world_size):
    for kernels, dtype, options in (
        (True, torch.float32, {}),
        (True, torch.bfloat16, {"forward": "int4", "block": 16}),
        (True, torch.float16, {"backward": "int8", "block": 128}),
        (False, torch.bfloat16, {}),
    ):
        with Installed(7 + rank, kernels=kernels) as device:
            pipe = Pipe("1F1B", 2, dtype=dtype).compress(hosts=2, **options).train()
            kind = type(pipe.handles[0]._codecs["forward"])
            assert kind is (blocks.DeviceCodec if kernels else blocks.StagedCodec)
            parameters, _ = expected(2, {0}, options, dtype=dtype)
            assert same(pipe.parameters(), [parameters[i] for i in pipe.numbers]), (kernels, dtype)
            if dtype == torch.float32:
                traffic(pipe, {0}, options, 0)
            pipe.close()
            device.check()
        dist.barrier()


def one_rank_without_kernels_is_enough(rank, world_size):
    with Installed(rank, kernels=rank == 0):
        pipe = Pipe("GPipe", 2).compress(hosts=2).train()
        assert type(pipe.handles[0]._codecs["backward"]) is blocks.StagedCodec
        parameters, _ = expected(2, {0}, {})
        assert same(pipe.parameters(), [parameters[i] for i in pipe.numbers])
        pipe.close()
    dist.barrier()


def damage_is_told_later(rank, world_size):
    """The step goes on with NaN, as a device cannot stop it."""
    with Installed(rank, kernels=True):
        pipe = Pipe("GPipe", 2).compress(hosts=2).train()
        handle, stage = pipe.handles[0], pipe.stages[0]
        if rank == 1:
            compute = stage.forward_one_chunk

            def flipped(chunk, *arguments, **named):
                if chunk == CHUNKS - 1 and handle.n_steps == STEPS + 1:
                    handle._messages["receive", "forward", chunk, 0][70] ^= 4
                return compute(chunk, *arguments, **named)

            stage.forward_one_chunk = flipped
        found = pipe.evaluate()
        if rank == 1:
            n = len(found) // CHUNKS
            assert found[-n:].isnan().all() and found[:-n].isfinite().all()
            words = "stage 1, micro-batch 3 of an earlier step: activation 0 from rank 0 could not be decoded"
            handle._begin(lambda: None)  # whose copy of the state the next one looks at
            with pytest.raises(tagc.Error, match=words) as raised:
                handle._begin(lambda: None)
            assert raised.value.status == "corrupt"
        pipe.close()
    dist.barrier()


class LateStreams:
    """A stream that does nothing before somebody waits for it."""

    def __init__(self):
        self.todo, self.n_pinned = collections.deque(), 0

    def pinned(self, n):
        self.n_pinned += 1
        return torch.full((n,), -1, dtype=torch.int64)

    def settle(self):
        while self.todo:
            copy, to, source = self.todo.popleft()
            copy(to, source)


def test_copies_to_pinned_memory_are_waited_for(monkeypatch):
    late, copy = LateStreams(), torch.Tensor.copy_

    def copy_late(to, source, non_blocking=False):
        if not non_blocking:
            return copy(to, source)
        late.todo.append((copy, to, source))
        return to

    monkeypatch.setattr(torch.Tensor, "copy_", copy_late)
    codec = blocks.StagedCodec("int4", 32, True, late)
    torch.manual_seed(0)
    for n, dtype in ((100, torch.float32), (1000, torch.bfloat16), (40, torch.bfloat16)):
        tensor, back = torch.randn(n).to(dtype), torch.empty(n, dtype=dtype)
        message = torch.empty(codec.n_bytes(n), dtype=torch.uint8)
        codec.encode(tensor, message, 5)
        codec.decode(message, back)
        late.settle()
        assert torch.equal(back, arrives(tensor, "int4", 32, 5)), (n, dtype)
    assert late.n_pinned == 4  # two pieces, which have grown once


def test_two_ranks():
    if not fake_device.KERNELS.exists():
        pytest.skip("no C++ compiler: the kernels were not built for the processor")
    ranks.run_each(
        [stages_on_a_device_equal_the_oracle, one_rank_without_kernels_is_enough, damage_is_told_later], 2
    )
