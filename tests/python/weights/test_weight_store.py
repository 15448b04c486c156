"""Publisher and Follower: whatever dies when, a receiver has the bits of one version, which an oracle knows
without any of this."""

import ctypes
import hashlib
import json
import os
import pathlib
import random
import signal
import struct
import sys
import time
import warnings

import pytest

torch = pytest.importorskip("torch")
import launch
import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate
from weight_checks import refused
from wire_reader import read_frame

import tagc.torch as tagc
from tagc.weights import Follower, Layout, Publisher, Target, store


class Weights:
    """Tensors whose bits in every version are known by a formula: element i moves on in versions that are
    equal to i modulo 7."""

    SHAPES = {"a": (300, 40), "b": (5000,), "c": (3, 7, 11), "d": ()}

    def __init__(self):
        self.tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in self.SHAPES.items()}

    @classmethod
    def words(cls, name, version):
        n = torch.Size(cls.SHAPES[name]).numel()
        at = torch.arange(n) + len(name) + ord(name[0])
        return ((at * 37 + (version + at % 7) // 7) % 30000).to(torch.int16)

    def set(self, version):
        for name, tensor in self.tensors.items():
            tensor.view(-1).view(torch.int16)[:] = self.words(name, version)

    @classmethod
    def right(cls, version):
        return cls.digest({name: cls.words(name, version) for name in cls.SHAPES})

    @staticmethod
    def digest(tensors):
        return hashlib.sha256(
            b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for _, t in sorted(tensors.items()))
        ).hexdigest()


def pair(folder, **options):
    here, there = Weights(), Weights()
    return here, Publisher(here.tensors, folder, **options), there, Follower(there.tensors, folder)


def publish(weights, publisher):
    weights.set(publisher.version + 1)
    return publisher.publish()


# ---- one process ----


@pytest.mark.parametrize("address", ["{}/policy", "file://{}/policy", "memory://{}"])
def test_receivers_take_what_changed_or_all(address, tmp_path):
    folder = address.format(tmp_path)
    if "memory" in address:
        pytest.importorskip("fsspec")
    here, sender, there, receiver = pair(folder, keep=4)
    refused(receiver.update, "state", "the store has no version yet")
    late = Weights()
    sizes = []
    for version in range(1, 30):
        assert publish(here, sender) == version
        sizes.append((sender.last.is_whole, sender.last.n_bytes))
        if version in (1, 2, 3, 6, 7, 20, 29):  # the last two are further apart than what is kept
            assert receiver.update() == version == receiver.version
            assert Weights.digest(there.tensors) == Weights.right(version)
            assert receiver.update() == version
            assert Follower(late.tensors, folder).update() == version
            assert Weights.digest(late.tensors) == Weights.right(version)
    assert sizes[0][0] and not any(whole for whole, _ in sizes[1:])
    assert max(n for _, n in sizes[1:]) < sizes[0][1] / 4
    names = store.open_store(folder).names()
    manifests = [name for name in names if name.startswith("manifest")]
    assert sorted(manifests) == ["manifest-0000000028.json", "manifest-0000000029.json"]
    newest = store.newest(store.open_store(folder))
    assert newest.files() == set(names) - set(manifests) and len(newest.whole) == 1
    since = range(min(26, newest.whole[0].version + 1), 30)
    assert [one.version for one in newest.changes] == list(since)
    text = "version 28 is older than version 29, which is here"
    refused(lambda: receiver.update(28), "state", text)
    refused(lambda: receiver.update(30), "state", "the store has version 29 yet, and not 30")


def test_a_version_is_asked_for_by_number(tmp_path):
    here, sender, there, receiver = pair(tmp_path)
    for version in range(1, 6):
        publish(here, sender)
    assert receiver.update(3) == 3 and Weights.digest(there.tensors) == Weights.right(3)
    assert receiver.update(4) == 4 and Weights.digest(there.tensors) == Weights.right(4)


def test_a_sender_that_starts_again_goes_on(tmp_path):
    here, sender, there, receiver = pair(tmp_path)
    for version in range(1, 4):
        publish(here, sender)
    receiver.update()
    state = sender.state_dict()
    again = Publisher(here.tensors, tmp_path, state=state)
    assert again.version == 3 and publish(here, again) == 4 and not again.last.is_whole
    assert receiver.update() == 4 and Weights.digest(there.tensors) == Weights.right(4)
    here.set(99)
    refused(sender.publish, "state", "another sender has published version 4 in this store")
    refused(sender.publish, "state", "another sender has taken this store over")
    assert publish(here, again) == 5 and receiver.update() == 5
    assert set(os.listdir(tmp_path)) == store.newest(store.open_store(tmp_path)).files() | {
        "manifest-0000000004.json",
        "manifest-0000000005.json",
    }
    other = Weights()
    elsewhere = Publisher(other.tensors, tmp_path / "new", state=again.state_dict())
    assert publish(other, elsewhere) == 6 and elsewhere.last.is_whole
    text = "versions here are of run"
    refused(lambda: Publisher(other.tensors, tmp_path / "new", state={"run": 5, "version": 2}), "state", text)
    refused(lambda: Publisher({"a": torch.ones(3)}, tmp_path), "mismatch", "the senders have a [300, 40]")


def test_of_two_senders_to_an_object_store_one_is_refused(tmp_path):
    """By a put that fails where there is such an object."""
    pytest.importorskip("fsspec")
    here, sender, there, receiver = pair(f"memory://{tmp_path}")
    publish(here, sender)
    again = Publisher(here.tensors, f"memory://{tmp_path}")
    assert publish(here, again) == 2
    here.set(99)
    refused(sender.publish, "state", "another sender has published version 2 in this store")
    refused(sender.publish, "state", "another sender has taken this store over")
    assert receiver.update() == 2 and Weights.digest(there.tensors) == Weights.right(2)


def test_changes_by_magnitude_are_for_those_who_hold_all(tmp_path):
    """As a step moves weights, by which small ones change most: who holds a part is right by place, and is
    told where that cannot be."""
    generator = torch.Generator().manual_seed(4)
    here = {"a": (0.02 * torch.randn(256, 512, generator=generator)).bfloat16()}
    senders = {kind: Publisher(here, tmp_path / str(kind), by_magnitude=kind) for kind in (False, True)}
    sizes, rows = {}, slice(30, 200)
    there = {kind: torch.zeros(170, 512).bfloat16() for kind in senders}
    parts = {
        kind: Follower(Layout(lambda kind=kind: {"a": there[kind]}, lambda *_: [
            Target("a", (slice(None),), (30, 0))
        ]), tmp_path / str(kind)) for kind in senders
    }  # fmt: skip
    whole = {"a": torch.zeros(256, 512).bfloat16()}
    for version in range(1, 4):
        for kind, sender in senders.items():
            sender.publish()
            sizes[kind] = sender.last.n_bytes
        Follower(whole, tmp_path / "True").update()
        assert torch.equal(whole["a"], here["a"])
        assert parts[False].update() == version and torch.equal(there[False], here["a"][rows])
        if version == 1:
            parts[True].update()
        else:
            before = there[True].clone()
            refused(parts[True].update, "unsupported", "a: a part of it is here, and its changes are by")
            assert torch.equal(there[True], before) and parts[True].version == 1
        here["a"] += (3e-5 * torch.randn(256, 512, generator=generator)).bfloat16()
    assert sizes[True] < 0.9 * sizes[False]


def test_files_that_no_manifest_names_go_once_their_version_is_there(tmp_path):
    """Those of a sender that died, and not those that another one may be writing for the next version."""
    here, sender, there, receiver = pair(tmp_path)
    for _ in range(3):
        publish(here, sender)
    dead, next_one, mine = (f"{kind}-{n:010d}-0-of-1-00000000" for kind, n in (
        ("changes", 2), ("whole", 5), ("notes", 1)
    ))  # fmt: skip
    for name in (dead, next_one, mine):
        (tmp_path / name).write_bytes(b"")
    publish(here, sender)
    assert {next_one, mine} <= set(os.listdir(tmp_path)) and not (tmp_path / dead).exists()
    publish(here, sender)
    assert (tmp_path / mine).exists() and not (tmp_path / next_one).exists()
    assert receiver.update() == 5 and Weights.digest(there.tensors) == Weights.right(5)


def test_a_store_of_another_run_is_read_as_a_whole(tmp_path):
    here, sender, there, receiver = pair(tmp_path)
    for _ in range(3):
        publish(here, sender)
    receiver.update()
    for name in os.listdir(tmp_path):
        os.unlink(tmp_path / name)
    other = Publisher(here.tensors, tmp_path)
    assert publish(here, other) == 1 and receiver.update() == 1
    assert Weights.digest(there.tensors) == Weights.right(1)


def test_what_is_damaged_or_altered_is_never_taken(tmp_path):
    here, sender, there, receiver = pair(tmp_path, check_every=4)
    publish(here, sender)
    receiver.update()
    for version in (2, 3):
        publish(here, sender)
    name = store.newest(store.open_store(tmp_path)).changes[-1].files[0][0]
    data = (tmp_path / name).read_bytes()
    for at in range(0, len(data), 41):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(tagc.Error, match="version 3: "):
            receiver.update()
        assert receiver.version == 2 and Weights.digest(there.tensors) == Weights.right(2)
    (tmp_path / name).write_bytes(data[:-1])
    refused(receiver.update, "corrupt", f"{name} has {len(data) - 1} bytes, and {len(data)} in the manifest")
    (tmp_path / name).write_bytes(data)
    assert receiver.update() == 3
    there.tensors["a"][5, 5] = 1e3
    publish(here, sender)  # with hashes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert receiver.update() == 4
    assert "a is not what it was in version 3" in str(caught[0].message)
    assert Weights.digest(there.tensors) == Weights.right(4)
    manifest = sorted(name for name in os.listdir(tmp_path) if name.startswith("manifest"))[-1]
    fields = json.loads((tmp_path / manifest).read_text())
    for change, text in (
        ({"format": 2}, "has format 2, this tagc reads 1"),
        ({"run": 3}, "is no manifest of weights"),
        ({"whole": [{"version": 1, "files": [["../a", 3]]}]}, "names files outside of its folder"),
    ):
        (tmp_path / manifest).write_text(json.dumps(fields | change))
        with pytest.raises(tagc.Error, match=text):
            Follower(there.tensors, tmp_path).update()


def test_changes_of_other_weights_are_noticed_without_hashes(tmp_path):
    """What changed are small weights, of which an altered model has none."""
    here, there = ({"a": torch.cat([torch.ones(3000), torch.full((3000,), 1e-3)])} for _ in range(2))
    sender, receiver = Publisher(here, tmp_path, check_every=0, by_magnitude=True), Follower(there, tmp_path)
    sender.publish(), receiver.update()
    here["a"][3000::2] *= 1.001
    there["a"].fill_(1)
    sender.publish()
    with pytest.warns(UserWarning, match="the array is not what the sender had before"):
        assert receiver.update() == 2
    assert torch.equal(there["a"], here["a"])


def test_weights_that_moved_are_written_as_a_whole(tmp_path):
    model, there = nn.Linear(9, 5), nn.Linear(9, 5)
    sender, receiver = Publisher(model, tmp_path), Follower(there, tmp_path)
    sender.publish(), receiver.update()
    there.weight.data = torch.zeros(5, 9)  # as an engine does that wakes up
    assert receiver.update() == 1 and torch.equal(there.weight, model.weight)


# ---- what fails ----


class Failing:
    """A store that ends, or fails, at its n-th act."""

    def __init__(self, inner, n, end):
        self._inner, self._left, self._end = inner, n, end

    def _act(self, call, *arguments):
        self._left -= 1
        if self._left == 0:
            self._end()
        result = call(*arguments)
        self._left -= 1
        if self._left == 0:
            self._end()
        return result

    def names(self):
        return self._inner.names()

    def read(self, name):
        return self._inner.read(name)

    def chunks(self, name):
        yield from self._inner.chunks(name)

    def write(self, name, buffers):
        def counted():
            for buffer in buffers:
                self._act(lambda: None)
                yield buffer

        self._act(self._inner.write, name, counted())

    def create(self, name, data):
        self._act(self._inner.create, name, data)

    def remove(self, name):
        self._act(self._inner.remove, name)


def no_room():
    raise OSError(28, "No space left on device")


def test_a_sender_that_fails_anywhere_leaves_a_version(tmp_path):
    """At each act in turn of some versions, of which one also writes all weights anew."""
    n, is_through = 0, False
    while not is_through:
        n += 1
        folder = tmp_path / str(n)
        here, sender, there, receiver = pair(folder, keep=1)
        sender._store = Failing(sender._store, n, no_room)
        failed = 0
        for _ in range(3):
            here.set(sender.version + 1)
            try:
                sender.publish()
            except tagc.Error as problem:
                assert problem.status == "transport" and "No space left" in str(problem)
                failed += 1
            if sender.version > failed:
                version = receiver.update()
                assert version in (sender.version, sender.version - failed)
                assert Weights.digest(there.tensors) == Weights.right(version)
        is_through = sender._store._left > 0
        sender._store = sender._store._inner
        assert publish(here, sender) == receiver.update() == 4
        assert Weights.digest(there.tensors) == Weights.right(4)
    assert n > 20


def child(function, *arguments):
    """Starts a process that is a copy of this one, and ends with the function."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function(*arguments)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def send_on(folder, n):
    here = Weights()
    sender = Publisher(here.tensors, folder, keep=3)
    if n:
        sender._store = Failing(sender._store, n, lambda: os.kill(os.getpid(), signal.SIGKILL))
    while sender.version < 10**6:
        publish(here, sender)


def receive_on(folder, log):
    there = Weights()
    receiver = Follower(there.tensors, folder, folder=str(folder.parent))
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        try:
            version = receiver.update(wait_s=0.05)
        except tagc.Error as problem:
            if "no version yet" not in str(problem):
                raise
            continue
        os.write(file, f"{version} {Weights.digest(there.tensors)}\n".encode())


def test_a_sender_that_dies_at_each_act_leaves_a_version(tmp_path):
    for n in range(1, 30):
        assert os.waitpid(child(send_on, tmp_path / "store", n), 0)[1] == signal.SIGKILL
        if store.newest(store.open_store(tmp_path / "store")) is None:
            continue
        there = Weights()
        version = Follower(there.tensors, tmp_path / "store").update()
        assert Weights.digest(there.tensors) == Weights.right(version)
    assert version > 7


def killed(n_kills, folder):
    """Kills senders and receivers at random instants. Returns the versions that receivers have had."""
    generator = random.Random(5)
    where, log = folder / "store", folder / "log"
    makers = [lambda: child(send_on, where, 0), *[lambda: child(receive_on, where, log)] * 2]
    running = [make() for make in makers]
    for _ in range(n_kills):
        time.sleep(generator.uniform(0, 0.3))
        i = generator.randrange(3)
        os.kill(running[i], signal.SIGKILL)
        assert os.waitpid(running[i], 0)[1] == signal.SIGKILL, "it had ended by itself"
        running[i] = makers[i]()
    newest = store.newest(store.open_store(where)).version
    end = time.monotonic() + 60
    while not (log.exists() and int(log.read_text().splitlines()[-1].split()[0]) > newest):
        assert time.monotonic() < end
        time.sleep(0.05)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lines = [line.split() for line in log.read_text().splitlines()]
    right = {version: Weights.right(int(version)) for version, _ in lines}
    assert [line for line in lines if line[1] != right[line[0]]] == []
    there = Weights()
    version = Follower(there.tensors, where).update()
    assert Weights.digest(there.tensors) == Weights.right(version)
    return sorted(set(map(int, right)))


def test_kills_at_random_instants_leave_right_bits(tmp_path):
    """test_weight_store_long does this a hundred times."""
    assert len(killed(8, tmp_path)) > 5


# ---- memory ----


def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def resident_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def publish_large(folder, shapes):
    """Two versions of fp32; the second one changes every element by a lot, so that its messages are large."""
    here = {name: torch.full(shape, 2.0) for name, shape in shapes.items()}
    sender = Publisher(here, folder)
    sender.publish()
    for tensor in here.values():
        tensor += torch.arange(tensor.numel()).view(tensor.shape) % 9_999_991
    sender.publish()
    assert not sender.last.is_whole and sender.last.n_bytes > 3.5 * sum(t.numel() for t in here.values())


def memory_of_a_receiver(folder, shapes, written):
    """Tells how much more memory each version takes than there is before, where it cannot be written in
    place."""
    there = {name: torch.ones(shape[::-1]).t() for name, shape in shapes.items()}
    receiver = Follower(there, folder, folder=str(folder.parent))
    peaks = []
    for version in (1, 2):
        ctypes.CDLL(None).malloc_trim(0)  # else memory that was freed is used again, and not seen
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")  # the peak begins anew
        before = resident_kib()
        assert receiver.update(version) == version
        peaks.append(peak_kib() - before)
    values = [float(there["t0"][row, 3]) for row in (2, 1)]
    os.write(written, " ".join(map(str, peaks + values)).encode())


def test_a_receiver_holds_one_tensor_more(tmp_path):
    """Beyond its weights of 96 MB at most the largest tensor, here 8 MB, and 64 MiB: of all weights, and of
    what changed, which is over 84 MB."""
    shapes = {f"t{i}": (1000, 2000) for i in range(12)}
    assert os.waitpid(child(publish_large, tmp_path / "store", shapes), 0)[1] == 0
    reading, writing = os.pipe()
    assert os.waitpid(child(memory_of_a_receiver, tmp_path / "store", shapes, writing), 0)[1] == 0
    whole_kib, changes_kib, *values = map(float, os.read(reading, 200).split())
    assert values == [2 + 4003, 2 + 2003]
    assert 1000 < whole_kib < (8e6 + 64 * 2**20) / 1024
    assert 1000 < changes_kib < (8e6 + 64 * 2**20) / 1024


# ---- several senders ----


def sharded(rank, world_size, folder):
    torch.manual_seed(0)
    model, there = (nn.Sequential(nn.Linear(33, 21), nn.Linear(21, 5)).bfloat16() for _ in range(2))
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1, 2]))
    receiver = Follower(there, folder)
    for version in range(1, 7):
        if version in (1, 4):
            group = torch.distributed.group.WORLD
            sender = Publisher(model, folder, group, keep=2, timeout_s=60)
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().add_(0.125 * (rank + version))
        if version == 5 and rank == 1:  # one rank alone cannot write
            sender._store = Failing(sender._store, 1, no_room)
            refused(sender.publish, "transport", "rank 1: [Errno 28] No space left")
        elif version == 5:
            refused(sender.publish, "transport", "rank 1: [Errno 28] No space left")
        else:
            assert sender.publish() == version
            assert sender.last.is_whole == (version in (1, 6))
        full = [p.full_tensor() for p in model.parameters()]
        if version != 5:
            assert receiver.update() == version
            assert all(torch.equal(a, b) for a, b in zip(full, there.parameters()))
        torch.distributed.barrier()
    if rank == 0:  # another sender was faster
        (pathlib.Path(folder) / "manifest-0000000007.json").write_text("{}")
    torch.distributed.barrier()
    refused(sender.publish, "state", "rank 0: another sender has published version 7 in this store")
    refused(sender.publish, "state", "rank 0: another sender has taken this store over")


def test_ranks_of_fsdp2_write_what_they_own(tmp_path):
    ranks.run(sharded, 3, str(tmp_path), timeout_s=100)


def replicated(rank, world_size, folder):
    """Two replicas of two shards: each rank writes a quarter, and not only those of the first replica."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))).bfloat16()
    there = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))).bfloat16()
    fully_shard(model, mesh=DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replica", "shard")))
    sender = Publisher(model, folder, torch.distributed.group.WORLD, timeout_s=60)
    receiver = Follower(there, folder)
    for version in (1, 2):
        assert sender.publish() == version == receiver.update()
        assert sender.last.n_elems == 8 * 16 * 16 // 4
        full = [p.full_tensor() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(full, there.parameters()))
        torch.distributed.barrier()
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().add_(1 + rank % 2)
    sums = DTensor.from_local(torch.ones(3), DeviceMesh("cpu", range(4)), [Partial()])
    text = "must be as Shard or Replicate: redistribute() it first"
    group, other = torch.distributed.group.WORLD, folder + "-sums"
    refused(lambda: Publisher({"a": sums}, other, group, timeout_s=60), "unsupported", text)
    reduced, there = sums.redistribute(placements=[Replicate()]), {"a": torch.zeros(3)}
    Publisher({"a": reduced}, other, group, timeout_s=60).publish()
    assert Follower(there, other).update() == 1 and there["a"].tolist() == [4, 4, 4]


def test_replicas_share_the_work(tmp_path):
    ranks.run(replicated, 4, str(tmp_path / "policy"), timeout_s=100)


def test_arguments_are_named(tmp_path):
    refused(
        lambda: Publisher({"a": torch.ones(2)}, 5), "argument", "store is 5, must be a path or an address"
    )
    refused(lambda: Publisher({"a": torch.ones(2)}, "nosuch://a"), "argument", "store is nosuch://a: ")
    refused(lambda: Publisher({"a": torch.ones(2)}, tmp_path, keep=0), "argument", "keep is 0, must be")
    Publisher({"a": torch.ones(2)}, tmp_path).publish()

    def follow(**tensors):
        return lambda: Follower(tensors, tmp_path).update()

    refused(follow(b=torch.ones(2)), "mismatch", "the store has a [2], and the model has no such tensor")
    refused(follow(a=torch.ones(2), b=torch.ones(2)), "mismatch", "the store has 0 of the 2 elements")
    refused(follow(a=torch.ones(3)), "mismatch", "a is [2] torch.float32 in the store, and a is [3]")
    refused(follow(a=torch.ones(2).half()), "mismatch", "and a is [2] torch.float16 in the model")
    there = {"x": torch.zeros(2)}
    names = {"a": "x"}.get
    assert Follower(there, tmp_path, names=names).update() == 1 and there["x"].tolist() == [1, 1]


# ---- the bytes, as docs/reference/wire-format.md draws them ----


def test_another_program_can_read_a_store(tmp_path):
    here = {"a": torch.arange(12.0).bfloat16().view(3, 4), "b": torch.tensor(3, dtype=torch.int32)}
    sender = Publisher(here, tmp_path)
    sender.publish()
    here["a"][1, 2] = -1
    sender.publish()
    manifest = json.loads((tmp_path / "manifest-0000000002.json").read_text())
    assert manifest["format"] == 1 and manifest["version"] == 2 and len(manifest["run"]) == 16
    assert [one["version"] for one in manifest["whole"]] == [1]  # all is not due yet
    for kind, base, flag in (("whole", 0, 1), ("changes", 1, 0)):
        ((name, n_bytes),) = manifest[kind][-1]["files"]
        data = (tmp_path / name).read_bytes()
        assert len(data) == n_bytes
        head, rows, text = read_frame(data)
        assert (head["format"], head["part"], head["parts"], head["flags"] & 1) == (3, 0, 1, flag)
        expected = (int(manifest["run"], 16), manifest[kind][-1]["version"], base)
        assert (head["run"], head["version"], head["base"]) == expected
        assert text == (b"a [3, 4] bfloat16\nb [] int32" if flag else b"")
        assert [(number, box) for number, box, *_ in rows] == [(0, [(0, 3), (0, 4)]), (1, [])]
        if flag:  # 64 bytes of a header, 8 of a segment, then the elements
            values = torch.frombuffer(bytearray(rows[0][3][72:]), dtype=torch.bfloat16)
            assert values.tolist() == list(range(12)) and rows[1][3][72:] == struct.pack("<i", 3)


# ---- the example ----


def told(call, *arguments, file):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.stdout = os.fdopen(1, "w")
    call(*arguments)


def test_the_example_runs_in_two_processes(tmp_path):
    """The trainer is killed on the way, and started again."""
    sys.path.insert(0, str(launch.EXAMPLES))
    import weight_store

    folder, said, again, texts = (str(tmp_path / name) for name in ("policy", "first", "again", "texts"))
    pid = child(lambda: told(weight_store.train, folder, 10**6, 1e-3, file=said))
    end = time.monotonic() + 60
    while not os.path.exists(said) or "version    4" not in open(said).read():
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    newest = store.newest(store.open_store(folder)).version
    engine = child(lambda: told(weight_store.generate, folder, newest + 3, 60, file=texts))
    trainer = child(lambda: told(weight_store.train, folder, 5, 1e-3, file=again))
    assert os.waitpid(trainer, 0)[1] == os.waitpid(engine, 0)[1] == 0
    sums = {int(line.split()[2]): line.split()[-1] for line in open(again)}
    assert min(sums) == newest + 1
    last = open(texts).read().splitlines()[-1].split()
    assert int(last[2]) > newest and sums[int(last[2])] == last[3]
