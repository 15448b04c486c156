"""Stores of fixed weights, made once and committed (golden/), which later versions must read:

    bash scripts/python.sh run tests/python/weights/golden.py golden/4

makes those of the format that this tagc writes. They are in a folder named by the format: a new format gets a
folder of its own beside those of before. golden/2 was made by the commit before format 3, with this script.

place       of two senders, changes by place, and some of whole tensors
magnitude   of one sender, changes by magnitude, with hashes of what was there before"""

import pathlib
import shutil
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1])]

FOLDER = pathlib.Path(__file__).parent / "golden"
VERSIONS = 3
SHAPES = {
    "all": ((9, 5), torch.float32),  # all of it changes
    "bf16": ((96, 32), torch.bfloat16),
    "fp32": ((33, 7), torch.float32),
    "fp8": ((40, 40), torch.float8_e4m3fn),
    "int64": ((21,), torch.int64),
    "one": ((), torch.int32),
    "same": ((50,), torch.float16),  # none of it changes
    "shard": ((24, 10), torch.bfloat16),  # of which two senders have columns each
}


def words_of(name, version):
    """Returns the elements of a tensor as integers of as many bytes. What has a small exponent changes more
    often, most by a unit up or down, some to anything."""
    shape, dtype = SHAPES[name]
    width, i = 8 * dtype.itemsize, torch.arange(torch.Size(shape).numel()) + sum(map(ord, name))
    least = {8: 0x08, 16: 0x3000, 32: 0x30000000, 64: 3}[width]  # its exponents go up from here in 12 steps
    grade = i * 5 % 12
    words = least + (grade << {8: 3, 16: 7, 32: 23, 64: 9}[width]) + i * 37 % (1 << min(width, 23) // 8 * 2)
    words |= (i % 3 == 0).long() << (min(width, 63) - 1)
    for v in range(2, version + 1):
        if name == "all":
            words = (words * 0x9E3779B1 + v) & 0xFFFFFFFF
        elif name != "same":
            is_moved = (i * 31 + v * 17) % (3 + grade * grade) == 0
            words = words + torch.where(is_moved, 1 - 2 * ((i + v) % 2), 0)
            words = torch.where((i * 7 + v) % 101 == 0, words ^ (0x55 << (width // 8)), words)
    kind = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    return words.to(kind).view(shape)


def weights(version):
    return {name: words_of(name, version).view(dtype) for name, (_, dtype) in SHAPES.items()}


def sender(rank, world_size, folder):
    from tagc.weights import Part, Parts, Publisher

    held = weights(1)
    half = held["shard"][:, 5 * rank :][:, :5]
    model = held | {"shard": Parts((24, 10), torch.bfloat16, (Part(half, (0, 5 * rank)),))}
    group = torch.distributed.group.WORLD if world_size > 1 else None
    state = {"run": 0x0123456789ABCDEF, "version": 0}
    is_one = world_size == 1
    publisher = Publisher(
        held if is_one else model, folder, group, state=state, by_magnitude=is_one, check_every=2 * is_one
    )
    for version in range(1, VERSIONS + 1):
        for name, tensor in weights(version).items():
            held[name].copy_(tensor)
        publisher.publish()


def make(folder):
    import ranks

    shutil.rmtree(folder, ignore_errors=True)
    ranks.run(sender, 2, str(folder / "place"), timeout_s=60)
    sender(0, 1, str(folder / "magnitude"))


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent))
    import golden  # by its name, for the ranks

    golden.make(FOLDER.parent / sys.argv[1])
