"""WeightSync: what receivers have is what senders have, bit for bit, however both are sharded; and what
cannot be applied is an error that changes nothing."""

import copy
import datetime
import math
import random
import re
import struct
import sys
import time
import warnings

import pytest

torch = pytest.importorskip("torch")
import launch
import ranks
import torch.distributed as dist
from oracles import lose_a_rank
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from weight_checks import refused

import tagc.torch as tagc
from tagc.weights import WeightSync, frame, tensors
from tagc.weights import sync as sync_module

SPECIAL = torch.tensor([0x7FC0, 0x7FC1, -0x40, 0x7F80, -0x80, -0x8000, 0, 1, -0x7FFF], dtype=torch.int16)


class Model(nn.Module):
    def __init__(self, dtype=torch.bfloat16, width=6):
        super().__init__()
        self.table = nn.Embedding(50, width, dtype=dtype)
        self.head = nn.Linear(width, 50, bias=False, dtype=dtype)
        self.head.weight = self.table.weight
        self.inner = nn.Linear(width, 7, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.register_buffer("count", torch.tensor(2**40 + 7))
        self.register_buffer("mask", torch.ones(9, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def bits(model, buffers=True):
    """Every bit of it."""
    found = dict(model.named_parameters()) | (dict(model.named_buffers()) if buffers else {})
    return {n: t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for n, t in found.items()}


def step(model, generator, share=0.1):
    """Moves some parameters by a bit or two, and makes a few special."""
    with torch.no_grad():
        for p in model.parameters():
            p = p.to_local() if hasattr(p, "to_local") else p
            words = p.reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32}[p.dtype.itemsize])
            moves = torch.randint(-2, 3, words.shape, generator=generator, dtype=words.dtype)
            moves *= torch.rand(words.shape, generator=generator) < share
            words += moves
            if words.dtype == torch.int16 and words.numel() > 20:
                at = torch.randint(words.numel(), (len(SPECIAL),), generator=generator)
                words[at] = SPECIAL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_are_exact(dtype, threads, monkeypatch):
    monkeypatch.setattr(tensors, "PIECE_ELEMS", 100)  # the table takes several messages
    torch.manual_seed(1)
    trainer, generator, random = Model(dtype), Model(dtype), torch.Generator().manual_seed(3)
    here = WeightSync(trainer, buffers=True, check_every=3, threads=threads)
    there = WeightSync(generator, buffers=True, check_every=3, threads=threads)
    n_elems = 50 * 6 + 7 * 6 + 7 + 1 + 1 + 9  # tied once
    for version in range(1, 8):
        before = bits(trainer)
        step(trainer, random)
        trainer.count += 3
        trainer.mask[version] = False
        buffer = here.encode(whole=version == 5)
        assert (here.last.version, here.last.n_elems, here.last.n_bytes) == (version, n_elems, len(buffer))
        assert here.last.is_whole == (version in (1, 5))
        if version not in (1, 5):
            width = {k: (8 if k == "count" else 1 if k == "mask" else dtype.itemsize) for k in before}
            after = bits(trainer)
            n_changed = sum(
                before[k][i : i + w] != after[k][i : i + w]
                for k, w in width.items() if k not in ("scratch",)
                for i in range(0, len(before[k]), w)
            )  # fmt: skip
            assert here.last.n_changes == n_changed
        assert there.apply(buffer) == there.version == version
        trainer.scratch += 0  # not sent
        assert bits(generator) == bits(trainer)


def test_tied_tensors_travel_once():
    torch.manual_seed(1)
    trainer, model, random = Model(), Model(), torch.Generator().manual_seed(3)
    here, there = WeightSync(trainer, buffers=True), WeightSync(model.state_dict())
    again = WeightSync(trainer.state_dict())
    for _ in range(3):
        buffer = here.encode()
        assert there.apply(buffer) and len(again.encode()) == len(buffer)
        assert bits(model) == bits(trainer)
        step(trainer, random)
    w = torch.zeros(6, 4)
    for other in (w[1:3], w.t(), w.view(4, 6), w.view(-1), w.view(torch.int32), w[:, 1::2], w[2:, 2]):
        text = "part and w overlap in memory, and are not the same tensor"
        refused(lambda other=other: WeightSync({"w": w, "part": other}), "argument", text)
    pair = {"left": w[:, :3], "right": w[2:5, 2:]}
    refused(lambda: WeightSync(pair), "argument", "left and right overlap in memory")
    apart = {"left": w[:, :2], "third": w[:, 2], "top": w[:3, 3], "end": w[3:, 3], "none": w[:0], "no": w[:0]}
    whole = {name: torch.randn_like(tensor) for name, tensor in apart.items()}
    here, there = WeightSync(whole), WeightSync(apart)
    there.apply(here.encode())
    assert all(torch.equal(apart[name], whole[name]) for name in whole) and (w != 0).all()


def test_changes_are_of_elements():
    for dtype in (torch.int64, torch.float64, torch.complex64, torch.complex128):
        values = torch.ones(50, 2, dtype=dtype)
        here = WeightSync({"a": values})
        here.encode()
        assert here.last.n_changes == 100
        for n, by in (
            (100, -1),
            (7, 2**40 + 1),
            (0, 0),
        ):  # in one word of 4 bytes, in two where there are more
            values.view(-1)[:n] += by
            here.encode()
            assert here.last.n_changes == n


class Compiled(nn.Module):
    """Has the names of what torch.compile() makes of a module, whose import takes seconds."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


@pytest.mark.parametrize("wrapper", [checkpoint_wrapper, Compiled])
def test_buffers_below_wrappers_travel(wrapper):
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    trainer, model = nn.Sequential(wrapper(inner)), nn.Sequential(copy.deepcopy(inner))
    inner(torch.randn(8, 4))
    here, there = WeightSync(trainer, buffers=True), WeightSync(model, buffers=True)
    there.apply(here.encode())
    assert list(bits(trainer).values()) == list(bits(model).values())
    assert model[0][1].num_batches_tracked == 1


def test_a_late_receiver_gets_the_current_version():
    torch.manual_seed(1)
    trainer, early, late = Model(), Model(), Model()
    random = torch.Generator().manual_seed(3)
    here, first, second = (WeightSync(model, check_every=2) for model in (trainer, early, late))
    refused(here.encode_current, "state", "encode_current() needs a version: call encode() or send() first")
    first.apply(here.encode())
    step(trainer, random)
    first.apply(here.encode())
    sent, last = bits(trainer, buffers=False), here.last
    step(trainer, random)  # which is in no version yet
    current = here.encode_current()
    assert here.version == 2 and here.last == last
    assert second.apply(current) == 2 and bits(late, buffers=False) == sent
    refused(lambda: first.apply(current), "state", "version 2 is not newer than version 2, which is here")
    for _ in range(3):
        buffer = here.encode()
        assert first.apply(buffer) == second.apply(buffer)
        assert bits(early) == bits(trainer) == bits(late)
        step(trainer, random)
    refused(lambda: first.apply(current), "state", "version 2 is not newer than version 5, which is here")


# ---- what can be written ----


def test_targets_of_every_kind_are_written_as_a_whole_or_not_at_all():
    with torch.inference_mode():
        frozen = {"a": torch.zeros(4), "b": torch.zeros(5, 7).t(), "c": torch.zeros(())}
    usual = {"a": torch.zeros(8)[::2], "b": torch.zeros(9, 7, 3)[1:8, :5, 2], "c": torch.zeros(2)[1]}
    for threads in (1, 3):
        values = {"a": torch.randn(4), "b": torch.randn(7, 5), "c": torch.randn(())}
        here = WeightSync(values)
        targets = [(m, WeightSync(m, threads=threads)) for m in (frozen, usual)]
        for _ in range(2):
            buffer = here.encode()
            for model, there in targets:
                there.apply(buffer)
                assert all(torch.equal(model[name], values[name]) for name in values)
            for tensor in values.values():
                tensor += 1
        with torch.inference_mode():
            buffer = here.encode()
            for model, there in targets:
                there.apply(buffer)
                assert all(torch.equal(model[name], values[name]) for name in values)
    for name, bad in (
        ("b", torch.zeros(1, 5).expand(7, 5)),
        ("b", torch.zeros(40).as_strided((7, 5), (4, 1))),
    ):
        model = {name: torch.zeros_like(tensor) for name, tensor in values.items()} | {name: bad}
        there = WeightSync(model)
        refused(
            lambda there=there: there.apply(here.encode(whole=True)), "argument", "b has several elements in"
        )
        assert not any(tensor.any() for tensor in model.values()) and there.version == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_written_in_part_take_only_whole_ones(threads, monkeypatch):
    trainer, model, random = Model(), Model(), torch.Generator().manual_seed(3)
    here, there = WeightSync(trainer), WeightSync(model, threads=threads)
    there.apply(here.encode())
    step(trainer, random)
    buffer = here.encode()
    writes, n_under_way = frame.apply, []

    def write(piece, values):
        if piece.entry == (1 if threads == 1 else 0):
            raise MemoryError("no room")
        n_under_way.append(1)
        time.sleep(0.2)
        writes(piece, values)
        n_under_way.pop()

    monkeypatch.setattr(frame, "apply", write)
    refused(lambda: there.apply(buffer), "state", "in part version 2, and need a whole one now: no room")
    assert not n_under_way
    monkeypatch.undo()
    refused(lambda: there.apply(buffer), "state", "and these weights have none of its versions")
    assert there.apply(here.encode_current()) == 2 and bits(model) == bits(trainer)


def test_a_dtype_that_changed_is_named():
    trainer, model = Model(), Model()
    here, there = WeightSync(trainer), WeightSync(model)
    there.apply(here.encode())
    model.half()
    text = "inner.bias has changed: it was (7,) torch.bfloat16, and is (7,) torch.float16"
    refused(lambda: there.apply(here.encode()), "state", text)
    trainer.float()
    refused(here.encode, "state", "it was (7,) torch.bfloat16, and is (7,) torch.float32")


def test_tensors_that_come_or_go_are_named():
    trainer, model = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    here, there = WeightSync(trainer), WeightSync(dict(model.named_parameters()))
    there.apply(here.encode())
    trainer.append(nn.Linear(3, 3))
    refused(here.encode, "state", "the model has 1.bias, and had it not before: make a new WeightSync")
    del trainer[1:]
    there.apply(here.encode())
    trainer[0].bias = None
    refused(here.encode, "state", "the model has no 0.bias any more")
    there._model["more"] = torch.ones(3)
    refused(lambda: there.apply(b""), "state", "the model has more, and had it not before")


def test_autograd_notices_what_is_written():
    trainer, model = nn.Linear(3, 3), nn.Linear(3, 3)
    here, there = WeightSync(trainer), WeightSync(model)
    loss = model(torch.ones(3, requires_grad=True)).sum()
    there.apply(here.encode())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(torch.ones(3)).sum().backward()


def test_a_gap_is_named_and_never_applied():
    torch.manual_seed(1)
    trainer, random = Model(), torch.Generator().manual_seed(3)
    here, late = WeightSync(trainer, check_every=0), Model()
    there = WeightSync(late)
    buffers = [here.encode()]
    for _ in range(5):
        step(trainer, random)
        buffers.append(here.encode())
    before = bits(late)
    no_version = "the buffer turns version 1 into 2, and these weights have none of its versions"
    refused(lambda: there.apply(buffers[1]), "state", no_version)
    assert there.apply(buffers[0]) == 1
    refused(
        lambda: there.apply(buffers[2]), "state", "these weights are version 1: missing is version 2. Apply"
    )
    refused(lambda: there.apply(buffers[5]), "state", "missing is versions 2 to 5")
    assert there.version == 1
    for version in range(1, 4):
        assert there.apply(buffers[version]) == version + 1
    refused(lambda: there.apply(buffers[3]), "state", "version 4 is not newer than version 4, which is here")
    whole = here.encode(whole=True)
    assert there.apply(whole) == 7 and bits(late) == bits(trainer) != before
    refused(lambda: there.apply(whole), "state", "version 7 is not newer than version 7")
    other = WeightSync(trainer)
    other.encode()
    for _ in range(7):
        another = other.encode()
    for buffer in (another, other.encode(whole=True)):
        text = "of another run of the sender, and these weights are version 7 of theirs: to follow it, make"
        refused(lambda buffer=buffer: there.apply(buffer), "state", text)
    assert WeightSync(late).apply(buffer) == 9
    refused(there.encode, "state", "this WeightSync applies; versions are encoded by another one")
    refused(lambda: here.apply(whole), "state", "this WeightSync encodes")


def test_what_is_damaged_changes_nothing():
    torch.manual_seed(1)
    trainer, random = Model(), torch.Generator().manual_seed(3)
    here, model = WeightSync(trainer), Model()
    there = WeightSync(model)
    there.apply(here.encode())
    step(trainer, random)
    buffer = here.encode()
    before = bits(model)
    for n in [0, 1, 71, 72, 80, *range(100, len(buffer), 97), len(buffer) - 1]:
        refused(lambda n=n: there.apply(buffer[:n]), "corrupt", "the buffer has")
    for at in range(0, len(buffer), 5):
        damaged = bytearray(buffer)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(tagc.Error):
            there.apply(damaged)
    refused(lambda: there.apply(b"x" * 200), "corrupt", "begins with b'xxxx'")
    refused(lambda: there.apply(), "argument", "apply() got no buffer")
    refused(lambda: there.apply(17), "argument", "the buffer is a int, must be bytes")
    refused(lambda: there.apply(torch.zeros(90)), "argument", "torch.float32, must be of torch.uint8")
    refused(lambda: there.apply(buffer, buffer), "argument", "given are [0, 0]: apply() takes all at once")
    assert bits(model) == before and there.version == 1
    assert there.apply(torch.frombuffer(bytearray(buffer), dtype=torch.uint8)) == 2
    assert bits(model) == bits(trainer)


def forged(buffer, change):
    """The buffer with its table and messages changed, and a checksum to match."""
    head, body = bytearray(buffer[:64]), bytearray(buffer[72:])
    n_table = struct.unpack_from("<Q", head, 48)[0]
    head, body = change(head, body)
    head[56:64] = struct.pack("<Q", 72 + len(body))
    total = frame.checksum_of(bytes(head) + bytes(body[:n_table]))
    return bytes(head) + struct.pack("<Q", total) + bytes(body)


def test_forged_tables_are_refused():
    torch.manual_seed(1)
    trainer, model = Model(), Model()
    here, there = WeightSync(trainer), WeightSync(model)
    there.apply(here.encode())
    step(trainer, torch.Generator().manual_seed(3))
    buffer, before = here.encode(), bits(model)

    def put(at, form, value):
        def change(head, body):
            struct.pack_into(form, body, at, value)
            return head, body

        return change

    def in_head(at, form, value):
        def change(head, body):
            struct.pack_into(form, head, at, value)
            return head, body

        return change

    # the first row: inner.bias (7): index, dims, hash, bytes, checksum, offset, size
    assert struct.unpack_from("<IIQQQQQ", buffer, 72)[0:2] == (0, 1)
    cases = [
        (put(0, "<I", 900), "lies in none of this model"),
        (put(4, "<I", 65), "is cut off"),
        (put(4, "<I", 0), None),
        (put(16, "<Q", 2**63), "do not fill it"),
        (put(24, "<Q", 1), "the checksum of a message of the buffer is wrong"),
        (put(32, "<Q", 1), "lies in none of this model"),
        (put(32, "<Q", 2**64 - 1), "lies in none of this model"),
        (put(40, "<Q", 0), "lies in none of this model"),
        (put(40, "<Q", 6), "the message has 7 elements, expected 6"),
        (in_head(12, "<I", 2**32 - 1), "is cut off"),
        (in_head(4, "<B", 1), "the buffer has format 1, this tagc reads 2 and 3"),
        (in_head(5, "<B", 4), "contradicts itself"),
        (in_head(5, "<B", 1), "contradicts itself"),
        (in_head(6, "<H", 3), "contradicts itself"),
        (in_head(32, "<Q", 7), "the buffer goes from version 7 to 2"),
        (in_head(40, "<Q", 7), "the buffer is of other names, shapes or dtypes"),
        (in_head(48, "<Q", 2**62), "is cut off"),
        (lambda head, body: (head, body + b"\0"), "do not fill it"),
    ]
    for change, text in cases:
        with pytest.raises(tagc.Error, match=text):
            there.apply(forged(buffer, change))
    assert bits(model) == before and there.version == 1
    assert there.apply(forged(buffer, lambda head, body: (head, body))) == 2


def test_every_element_comes_once():
    """Boxes that cover a tensor are taken, but not if one moves onto others."""
    from tagc.weights.frame import Frame, Piece, check_parts
    from tagc.weights.tensors import Box, Entry

    shape = (6, 5)
    entries = [Entry("a", shape, torch.bfloat16, False, (), torch.bfloat16)]

    def checked(boxes):
        pieces = [Piece(0, box, 0, None, 0, 0, 0) for box in boxes]
        check_parts([Frame(0, 1, True, False, 1, 1, 0, pieces)], entries)

    generator = random.Random(4)
    for _ in range(60):
        rows, columns = (
            sorted({0, n, *(generator.randrange(1, n) for _ in range(generator.randrange(4)))}) for n in shape
        )
        boxes = [
            Box((a, c), (b - a, d - c)) for a, b in zip(rows, rows[1:]) for c, d in zip(columns, columns[1:])
        ]
        generator.shuffle(boxes)
        checked(boxes)
        moved = generator.randrange(len(boxes))
        box = boxes[moved]
        places = [
            (a, c)
            for a in range(shape[0] - box.sizes[0] + 1)
            for c in range(shape[1] - box.sizes[1] + 1)
            if (a, c) != box.offsets
        ]
        if len(boxes) == 1 or not places:
            continue
        boxes[moved] = Box(generator.choice(places), box.sizes)
        refused(lambda: checked(boxes), "corrupt", "have elements of a [6, 5] bfloat16 twice")


def test_other_models_are_named():
    here = WeightSync(Model())
    whole, changes = here.encode(), here.encode()
    wide = WeightSync(Model(width=5))
    text = "the senders have inner.weight [7, 6] bfloat16, and this model has inner.weight [7, 5] bfloat16"
    refused(lambda: wide.apply(whole), "mismatch", text)
    refused(lambda: wide.apply(changes), "mismatch", "the buffer is of other names, shapes or dtypes")
    with_buffers = WeightSync(Model(), buffers=True)
    refused(lambda: with_buffers.apply(whole), "mismatch", "this model has count [] int64, and the senders")
    fewer = WeightSync({"scale": torch.tensor(1.0, dtype=torch.bfloat16)})
    refused(lambda: fewer.apply(whole), "mismatch", "and this model has no tensor of that name")


def test_arguments_are_named():
    def made(**options):
        return lambda: WeightSync(Model(), **options)

    refused(made(source=1), "argument", "source is 1, must be ranks from 0 to 0")
    refused(made(source=[]), "argument", "source is [], must be one rank or several different ones")
    refused(made(source=[0, 0]), "argument", "source is [0, 0], must be one rank or several")
    refused(made(source=None), "argument", "source is None, must be ranks from 0 to 0")
    refused(made(source=0.0), "argument", "source is 0.0, must be ranks from 0 to 0")
    refused(made(buffers="yes"), "argument", "buffers is 'yes', must be True or False")
    refused(made(group="x"), "argument", "group is 'x', must be a ProcessGroup of torch.distributed or None")
    refused(lambda: WeightSync(None), "argument", "model is None, must be a module or a dict of tensors")
    refused(lambda: WeightSync({1: torch.ones(2)}), "argument", "1 is a Tensor, must be a tensor by name")
    refused(made(dtype=torch.int8), "argument", "dtype is torch.int8, must be a floating-point dtype")
    refused(made(check_every=-1), "argument", "check_every is -1, must be a whole number from 0")
    refused(made(threads=0), "argument", "threads is 0, must be a whole number from 1 to 256")
    refused(made(timeout_s=0), "argument", "timeout_s is 0, must be a number")
    refused(lambda: WeightSync({}), "argument", "the model has no parameters")
    refused(lambda: WeightSync({"a": 3}), "argument", "a is a int, must be a tensor")
    meta = {"a": torch.zeros(3, device="meta")}
    refused(lambda: WeightSync(meta), "unsupported", "a is not a plain tensor in memory")
    two = {"a": TwoTensor(torch.ones(3), torch.ones(3))}
    refused(lambda: WeightSync(two), "unsupported", "a is a TwoTensor, must be a plain tensor")
    refused(lambda: WeightSync(Model()).send(), "state", "send() needs a group")
    refused(lambda: WeightSync(Model()).receive(), "state", "receive() needs a group")
    lazy = {"a": torch.ones(3, dtype=torch.complex64).conj()}
    refused(lambda: WeightSync(lazy), "unsupported", "a is not a plain tensor in memory")
    there = WeightSync(Model(torch.float32), dtype=torch.bfloat16)
    text = "dtype is torch.bfloat16, and inner.bias is of torch.float32 here: receivers have"
    refused(lambda: there.apply(b""), "argument", text)


def test_a_hash_finds_what_something_else_changed():
    torch.manual_seed(1)
    trainer, model, random = Model(), Model(), torch.Generator().manual_seed(3)
    here, there = WeightSync(trainer, check_every=4), WeightSync(model, check_every=4)
    for version in range(1, 4):
        there.apply(here.encode())
        step(trainer, random)
    model.inner.weight.data[3, 2] += 1
    buffer, before = here.encode(), bits(model)
    text = "inner.weight is not what it was in version 3: something else has changed it"
    refused(lambda: there.apply(buffer), "mismatch", text)
    assert bits(model) == before and there.version == 3
    assert there.apply(here.encode(whole=True)) == 5 and bits(model) == bits(trainer)


def test_masters_travel_in_another_dtype():
    """Of what an optimizer moves in fp32, receivers see what shows in bf16."""
    torch.manual_seed(1)
    trainer = nn.Linear(200, 100)
    here = WeightSync(trainer, dtype=torch.bfloat16)
    model = nn.Linear(200, 100, dtype=torch.bfloat16)
    there = WeightSync(model)
    there.apply(here.encode())
    before = trainer.weight.detach().to(torch.bfloat16)
    with torch.no_grad():
        trainer.weight += 1e-5 * torch.randn_like(trainer.weight)
    there.apply(here.encode())
    assert torch.equal(model.weight, trainer.weight.to(torch.bfloat16))
    n = int((before != model.weight).sum())
    assert 0 < n < 0.2 * model.weight.numel() and here.last.n_changes == n


# ---- over a group ----


def over_a_group(rank, world_size):
    torch.manual_seed(rank)
    model, random = Model(), torch.Generator().manual_seed(3)
    sync = WeightSync(model, dist.group.WORLD, source=1, check_every=4)
    seen = []

    def move():
        if rank == 1:
            step(model, random)
            assert sync.send() == sync.version
        else:
            assert sync.receive() == sync.version
        everyone = [None] * world_size
        dist.all_gather_object(everyone, bits(model, buffers=False))
        seen.append((everyone == [everyone[1]] * world_size, sync.last.is_whole if rank == 1 else None))

    move()
    move()  # version 2
    if rank == 2:
        sync._version = 1  # as after a failure
    move()
    if rank == 0:
        model.inner.bias.data[2] += 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        move()  # version 4 has hashes
    named = "inner.bias is not what it was in version 3: something else has changed it; it gets all weights"
    assert [str(one.message) for one in caught] == [f"tagc: {named}"] * (rank == 0)
    move()
    if rank == 1:
        sync.encode()  # which no one gets
    move()
    text = "rank 0: send() on rank 0, which receives: source is [1]"
    refused(sync.receive if rank == 1 else sync.send, "state", text)
    text = "rank 2: send() on rank 2, which receives: source is [1]"
    refused(sync.receive if rank == 0 else sync.send, "state", text)
    move()
    return [is_same for is_same, _ in seen], [whole for _, whole in seen]


def test_receivers_that_missed_a_version_get_all():
    outcomes = ranks.run(over_a_group, 3, timeout_s=100)
    assert [same for same, _ in outcomes] == [[True] * 7] * 3
    assert outcomes[1][1] == [True, False, False, False, False, True, False]


def failures_over_a_group(rank, world_size):
    model, random = Model(), torch.Generator().manual_seed(3)
    sync = WeightSync(model, dist.group.WORLD, timeout_s=60)
    move = sync.receive if rank else sync.send
    move()
    step(model, random) if rank == 0 else None
    kept, before = model.scale, bits(model, buffers=False)
    if rank == 1:
        model.scale = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        before = bits(model, buffers=False)
    refused(move, "state", "rank 1: scale has changed: it was () torch.bfloat16, and is (2,)")
    assert bits(model, buffers=False) == before and sync.version == 1
    model.scale = kept
    for by, what in ((1, torch.float16), (1, torch.float32), (0, torch.float16)):
        if rank == by:
            model.to(what)
        before = bits(model, buffers=False)
        text = f"rank {by}: inner.bias has changed: it was (7,) torch.bfloat16, and is (7,) {what}"
        refused(move, "state", text)
        assert bits(model, buffers=False) == before and sync.version == 1
        model.bfloat16()
    move()
    other = Model(width=5 if rank == 1 else 6)
    text = "inner.weight [7, 6] torch.bfloat16 on rank 0 and inner.weight [7, 5] torch.bfloat16 on rank 1"
    refused(lambda: WeightSync(other, dist.group.WORLD), "mismatch", text)
    return bits(model, buffers=False)


def test_a_failure_is_the_same_on_all_ranks_and_changes_nothing():
    first, second = ranks.run(failures_over_a_group, 2, timeout_s=100)
    assert first == second


def writing_over_a_group(rank, world_size):
    torch.manual_seed(rank)
    values = {"a": torch.randn(4), "b": torch.randn(7, 5), "c": torch.randn(3)}
    if rank == 1:
        values["b"] = torch.zeros(1, 5).expand(7, 5)
    refused(lambda: WeightSync(values, dist.group.WORLD), "argument", "rank 1: b has several elements in")
    if rank == 1:
        with torch.inference_mode():
            values = {name: torch.zeros(tensor.shape[::-1]).t() for name, tensor in values.items()}
    sync = WeightSync(values, dist.group.WORLD, timeout_s=60)
    move = sync.receive if rank else sync.send

    def same():
        everyone = [None] * world_size
        dist.all_gather_object(everyone, [tensor.tolist() for tensor in values.values()])
        return [theirs == everyone[0] for theirs in everyone]

    move()
    assert same() == [True] * 3
    if rank == 0:
        for tensor in values.values():
            tensor += 1
    writes = frame.apply

    def write(piece, target):
        if piece.entry == 1:
            raise RuntimeError("no room")
        writes(piece, target)

    frame.apply = write if rank == 1 else writes
    refused(move, "state", "rank 1: the weights are in part version 2, and need a whole one now: no room")
    assert same() == [True, False, True] and sync.version == (0 if rank == 1 else 2)
    frame.apply = writes
    move()
    assert same() == [True] * 3 and sync.version == 3
    if rank == 0:  # a sender that cannot move its copy on sends all of it next
        assert not sync.last.is_whole
        values["a"] += 1
        frame.apply = write
    refused(move, "argument", "rank 0: no room")
    frame.apply = writes
    assert same() == [True] * 3 and sync.version == 4
    move()
    assert same() == [True] * 3 and sync.version == 5 and (rank > 0 or sync.last.is_whole)


def test_a_receiver_that_failed_while_it_wrote_gets_all():
    ranks.run(writing_over_a_group, 3, timeout_s=100)


def making_over_a_group(rank, world_size):
    group = dist.new_group([1, 2])
    if rank == 0:
        refused(lambda: WeightSync(Model(), group), "argument", "this rank is not in the group")
        return
    made = sync_module.Links

    def late(*arguments):
        links = made(*arguments)
        if rank == 2:
            raise tagc.Error("transport", "it went away")
        return links

    sync_module.Links = late
    refused(lambda: WeightSync(Model(), group), "transport", "rank 1: it went away")


def test_all_ranks_make_it_or_none():
    ranks.run(making_over_a_group, 3, timeout_s=100)


def waiting_over_a_group(rank, world_size, folder):
    """For a step of the trainer that takes longer than timeout_s; and for a rank that ends instead."""
    dist.barrier()
    sync = WeightSync(Model(), dist.group.WORLD, timeout_s=4)
    move = sync.receive if rank else sync.send
    if rank == 0:
        time.sleep(5)
    assert move() == 1
    dist.barrier()  # the group is as before
    lose_a_rank(rank, world_size, folder, True, move)


def test_ranks_wait_for_each_others_calls(tmp_path):
    ranks.attempt(waiting_over_a_group, 3, str(tmp_path))
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        assert re.match(r"transport: rank (\d, )?2 ended or does not answer: ", text), text


# ---- shards ----


def between_shards(rank, world_size):
    """Ranks 0 and 1 train under FSDP2; 2 and 3 hold columns of some tensors and rows of others; each frame
    is also applied to a whole model."""
    random = torch.Generator().manual_seed(5 + rank)
    mesh, theirs = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    torch.manual_seed(0)
    model = Model(width=5)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))  # FSDP2 takes no scalars
    model.frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    whole = copy.deepcopy(model)
    if rank < 2:
        fully_shard(model, mesh=mesh)
        named = model
    else:
        named = {
            "table.weight": distribute_tensor(model.table.weight.data, theirs, [Shard(1)]),
            "inner.weight": distribute_tensor(model.inner.weight.data, theirs, [Shard(0)]),
            "inner.bias": distribute_tensor(model.inner.bias.data, theirs, [Shard(0)]),
            "scale": model.scale.data,
            "frozen": model.frozen.data,
        }
    sync = WeightSync(named, dist.group.WORLD, source=[0, 1], check_every=2)
    for _ in range(4):
        if rank < 2:
            step(model, random)
            sync.send()
        else:
            sync.receive()
        mine = dict(named.named_parameters()) if rank < 2 else named
        full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in mine.items()}
        everyone = [None] * world_size
        raw = {n: t.detach().reshape(-1).view(torch.int16).tolist() for n, t in full.items()}
        dist.all_gather_object(everyone, raw)
        assert everyone[2] == everyone[3] == everyone[0] == everyone[1]
    if rank > 1:
        empty = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
        alone = WeightSync(empty)
        text = f"encode() without a group: this rank holds {6 - rank} of the 7 elements of inner.bias; name"
        refused(alone.encode, "argument", text)
    held = model.state_dict() if rank < 2 else named  # its tied tensors are the same memory
    held = {name: tensor for name, tensor in held.items() if name not in ("count", "mask")}
    WeightSync(held, dist.group.WORLD, source=[0, 1])
    if rank < 2:
        kept = sync._base.copy()
        if rank == 1:
            sync._base.update(dict.fromkeys(kept, "no tensor"))
        refused(sync.encode, "argument", "rank 1: 'str' object has no attribute")
        sync._base.update(kept)
        assert sync.version == 4
    parts = [None] * world_size
    dist.all_gather_object(parts, sync.encode(whole=True) if rank < 2 else None)
    there = WeightSync(whole)
    refused(lambda: there.apply(parts[0]), "argument", "has parts 0 to 1, one of each sender; given are [0]")
    there.apply(parts[1], parts[0])
    if rank > 1:
        alone.apply(*parts[:2])
    dist.all_gather_object(parts, sync.encode_current() if rank < 2 else None)
    refused(lambda: there.apply(*parts[:2]), "state", "version 5 is not newer than version 5")
    everyone = [None] * world_size
    dist.all_gather_object(everyone, bits(whole, buffers=False))
    assert everyone[0] == everyone[1] == everyone[2] == everyone[3]
    got = {n: torch.tensor(v, dtype=torch.uint8).view(torch.int16).tolist() for n, v in everyone[0].items()}
    if rank < 2:
        assert {n: raw[n] for n in got} == got
        step(model, random)
    dist.all_gather_object(parts, sync.encode() if rank < 2 else None)
    there.apply(*parts[:2])
    if rank > 1:  # without a group
        alone.apply(*parts[:2])
        full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in empty.items()}
        assert all(full[n].view(torch.int16).equal(p.view(torch.int16)) for n, p in whole.named_parameters())
    local = TwoTensor(torch.ones(3), torch.ones(3))
    other = {"a": DTensor.from_local(local, mesh if rank < 2 else theirs, [Replicate()])}
    refused(lambda: WeightSync(other), "unsupported", "a is here a TwoTensor, must be a plain tensor")
    text = (
        "source is [1]: these ranks hold 1 of the 3 elements of frozen; name all ranks that hold shards of it"
    )
    refused(lambda: WeightSync(named, dist.group.WORLD, source=[1]), "argument", text)


def test_senders_and_receivers_are_sharded_otherwise():
    ranks.run(between_shards, 4, timeout_s=100)


def seen(rank, world_size):
    """A receiver that holds all gets changes by magnitude, and one that holds some rows by place."""
    shape, rows = (128, 512), slice(20, 100)
    for is_whole in (True, False):
        generator = torch.Generator().manual_seed(1)
        here = {"a": (0.02 * torch.randn(shape, generator=generator)).bfloat16()}
        there = torch.zeros(shape if is_whole else (80, 512)).bfloat16()
        part = tensors.Parts(shape, there.dtype, (tensors.Part(there, (0 if is_whole else 20, 0)),))
        sync, alone = WeightSync(here if rank == 0 else {"a": part}, dist.group.WORLD), WeightSync(here)
        for _ in range(2):
            alone.encode()
            sync.send() if rank == 0 else sync.receive()
            assert rank == 0 or torch.equal(there, here["a"] if is_whole else here["a"][rows])
            here["a"] += (3e-5 * torch.randn(shape, generator=generator)).bfloat16()
        if rank == 0:
            assert (sync.last.n_bytes < 0.95 * alone.last.n_bytes) == is_whole


def test_a_group_sees_who_holds_what():
    ranks.run(seen, 2, timeout_s=100)


# ---- a model that trains ----


def test_bits_of_a_model_that_trains():
    """At rates from 1e-6 to 1e-4, in bf16: what changes is counted apart, and takes little more than the
    entropy of its places and some bits for each value."""
    sys.path.insert(0, str(launch.EXAMPLES))
    import gpt

    torch.manual_seed(1)
    model = gpt.GPT(gpt.Config(n_embd=64, n_layer=2, n_positions=32))
    text = torch.randint(97, 123, (4096,), generator=torch.Generator().manual_seed(1)).repeat(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(2)

    def train(n, rate):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(n):
            at = torch.randint(4096, (4,), generator=random)
            batch = torch.stack([text[i : i + 33] for i in at])
            model(batch[:, :-1], batch[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def flat():
        return torch.cat([p.detach().to(torch.bfloat16).view(-1) for p in model.parameters()]).view(
            torch.int16
        )

    train(30, 1e-3)
    shares = []
    for rate in (1e-6, 1e-5, 1e-4):
        here = WeightSync(model, dtype=torch.bfloat16)
        here.encode()
        train(1, rate)  # whose changes are not counted: the rate has just fallen
        here.encode()
        before = flat()
        train(1, rate)
        here.encode()
        n, n_changed = before.numel(), int((before != flat()).sum())
        assert here.last.n_changes == n_changed
        p = n_changed / n
        entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p
        # without the header and each tensor's row and headers; tables and odd bits of each are 16 bytes or
        # fewer
        sizes = [p.ndim for p in model.parameters()]
        n_bytes = here.last.n_bytes - 72 - sum(24 + 16 * n_dims + 64 + 12 for n_dims in sizes)
        most = n_changed * (1.15 * entropy + 5) + 8 * 16 * len(sizes)
        assert 0.7 * n_changed * entropy < 8 * n_bytes < most, (rate, p, here.last)
        shares.append(p)
    assert 0.001 < shares[0] < 0.05 and shares[0] < shares[1] / 2 < shares[2] / 4


# ---- the example ----


def example(rank, world_size):
    sys.path.insert(0, str(launch.EXAMPLES))
    import weight_sync

    weight_sync.dist.init_process_group = weight_sync.dist.destroy_process_group = lambda *_, **__: None
    model = weight_sync.main(["--steps=3", "--before=5", "--lr=1e-4"])
    return bits(model.bfloat16())


def test_example_generates_with_the_trainers_weights():
    first, *others = ranks.run(example, 3, timeout_s=150)
    assert others == [first] * 2


# ---- time-outs ----


def timeouts(rank, world_size):
    """Unless it is given, the time-out is that of the user's group."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=77))
    for options, wanted_s in (({}, 77), ({"timeout_s": 5}, 5)):
        sync = WeightSync(nn.Linear(8, 8), group, source=0, **options)
        assert sync._links._timeout.total_seconds() == wanted_s


def test_timeouts_are_the_groups():
    ranks.run(timeouts, 2)
