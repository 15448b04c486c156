"""Stores that earlier versions have written (golden.py) are read bit for bit: by tagc, and by a reader that
follows docs/reference/wire-format.md. What a later version might write is refused by its number."""

import itertools
import json
import math
import shutil
import struct

import pytest

torch = pytest.importorskip("torch")
import golden
from weight_checks import refused
from wire_reader import apply_message, hash_of, read_frame

from tagc.weights import Follower, frame

STORES = [(form, kind) for form in (2, 3) for kind in ("place", "magnitude")]


def test_each_format_that_is_read_has_stores():
    assert sorted(path.name for path in golden.FOLDER.iterdir()) == [str(form) for form in frame._READ]


def of_bits(tensors):
    return {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("form, kind", STORES)
def test_tagc_reads_them(form, kind):
    there = {name: torch.zeros_like(tensor) for name, tensor in golden.weights(1).items()}
    receiver = Follower(there, golden.FOLDER / str(form) / kind)
    for version in range(1, golden.VERSIONS + 1):
        assert receiver.update(version) == version
        assert of_bits(there) == of_bits(golden.weights(version))


def flat(box, shape):
    """Returns the numbers of a box's elements in an array of that shape."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    ranges = [range(begin, begin + n) for begin, n in box]
    return [sum(i * step for i, step in zip(at, strides)) for at in itertools.product(*ranges)]


@pytest.mark.parametrize("form, kind", STORES)
def test_another_reader_reads_them(form, kind):
    """Each kind of message is in some store."""
    folder, kinds, tensors = golden.FOLDER / str(form) / kind, set(), []
    manifest = json.loads((folder / f"manifest-{golden.VERSIONS:010d}.json").read_text())
    assert manifest["format"] == 1 and manifest["run"] == "0123456789abcdef"
    for one in [*manifest["whole"], *manifest["changes"]]:
        for part, (name, n_bytes) in enumerate(one["files"]):
            data = (folder / name).read_bytes()
            head, rows, text = read_frame(data)
            assert len(data) == n_bytes and head["run"] == int(manifest["run"], 16)
            assert (head["format"], head["version"], head["part"]) == (form, one["version"], part)
            if part == 0 and text:
                tensors = []
                for line in text.decode().split("\n"):
                    shape, dtype = golden.SHAPES[line.split()[0]]
                    assert line == f"{line.split()[0]} {list(shape)} {str(dtype)[6:]}"
                    width = min(dtype.itemsize, 4)
                    tensors.append((shape, width, [0] * (math.prod(shape) * dtype.itemsize // width)))
            for number, box, before, message in rows:
                shape, width, words = tensors[number]
                n = len(words) // math.prod(shape)  # words of an element
                at = [n * i + word for i in flat(box, shape) for word in range(n)]
                held = [words[i] for i in at]
                was = b"".join(word.to_bytes(width, "little") for word in held)
                assert before == (hash_of(was) if head["flags"] & 2 else 0)
                kinds.add((apply_message(message, held, width), bool(message[6])))
                for i, word in zip(at, held):
                    words[i] = word
        expected = [
            golden.weights(one["version"])[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            for name in sorted(golden.SHAPES)
        ]
        got = [b"".join(w.to_bytes(width, "little") for w in words) for _, width, words in tensors]
        assert got == expected
    of_changes = {"whole", "none", "place"} | ({"magnitude"} if kind == "magnitude" else set())
    assert kinds == {("whole", False)} | {(one, True) for one in of_changes}


def test_later_formats_are_refused(tmp_path):
    """Of a buffer, and of a message in it."""
    shutil.copytree(golden.FOLDER / "3" / "magnitude", tmp_path / "store")
    (path,) = (tmp_path / "store").glob("whole-*")
    data = path.read_bytes()
    there = {name: torch.zeros_like(tensor) for name, tensor in golden.weights(1).items()}

    def later(at):
        """Returns the buffer with that byte one higher, and sums to match."""
        changed = bytearray(data)
        changed[at] += 1
        (n_table,) = struct.unpack_from("<Q", changed, 48)
        (n,) = struct.unpack_from("<Q", changed, 72 + 16)
        struct.pack_into("<Q", changed, 72 + 24, hash_of(changed[72 + n_table :][:n]))
        struct.pack_into("<Q", changed, 64, hash_of(changed[:64] + changed[72 : 72 + n_table]))
        return bytes(changed), 72 + n_table

    path.write_bytes(later(4)[0])
    text = "the buffer has format 4, this tagc reads 2 and 3"
    refused(lambda: Follower(there, path.parent).update(1), "unsupported", text)
    path.write_bytes(later(later(4)[1] + 4)[0])
    refused(lambda: Follower(there, path.parent).update(1), "corrupt", "version is 4, this library reads 3")
    path.write_bytes(data)
    assert Follower(there, path.parent).update(1) == 1
