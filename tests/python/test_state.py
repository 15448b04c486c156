"""Residuals in checkpoints: a resumed run is the uninterrupted one, bit for bit, and no residual gets lost
when the number of ranks changes."""

import copy
import functools
import gc
import json
import os
import tempfile
import time

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Even, Odd, batch_of, loss_of
from oracles import check_error
from wrappers import local, present, residuals_of, wrapped

OPTIONS = dict(sparsity=0.9, values="int2", layers="all", verbose=False)


class Run:
    """A training run of few steps."""

    def __init__(self, kind="fsdp2", between=None, options=OPTIONS, **shape):
        import tagc.torch as tagc

        self.model = wrapped(kind, **shape)
        self.sent = []  # bytes of each step, by leg
        self.handle = tagc.compress(
            self.model,
            between=between,
            on_step=lambda stats: self.sent.append(stats["bytes_by_leg"]),
            **tagc.grouped(options),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def steps(self, *steps):
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, batch_of(dist.get_rank(), step)).backward()
            self.optimizer.step()
        return self

    def bits(self):
        return [local(p).clone() for p in self.model.parameters()]

    def states(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def set_states(self, states):
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.model, self.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
        return self


def shared_folder():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- the same number of ranks ----


def plain_resume(rank, world_size, kind):
    folder = shared_folder()
    first = Run(kind).steps(0, 1, 2)
    saved = first.handle.state_dict()
    states = copy.deepcopy(first.states())
    torch.save(saved, f"{folder}/{rank}")
    first.steps(3, 4, 5)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(residuals_of(saved).values(), residuals_of(first.handle).values())
    ), "not copies"
    loaded = torch.load(f"{folder}/{rank}", weights_only=True)
    assert set(residuals_of(loaded)) == {name for name, _ in Even().named_parameters()}
    assert all(values.abs().sum() > 0 for values in residuals_of(loaded).values())
    for options in ("before", "after", "without"):
        second = Run(kind)
        if options == "after":  # reducers are made already, and hold something else
            second.steps(7, 8)
        second.set_states(copy.deepcopy(states))
        if options != "without":
            second.handle.load_state_dict(loaded)
            assert second.handle.n_steps == 3
            again = residuals_of(second.handle)
            assert all(torch.equal(again[name], values) for name, values in residuals_of(loaded).items())
        second.steps(3, 4, 5)
        if kind == "ddp" and options == "before":
            continue  # its first step has other buckets, in other blocks
        assert same(first.bits(), second.bits()) == (options != "without"), (kind, options)
        assert same(residuals_of(first.handle).values(), residuals_of(second.handle).values()) == (
            options != "without"
        ), (kind, options)


def dcp_resume(rank, world_size):
    folder = shared_folder()
    first = Run(columns=True).steps(0, 1, 2)
    writing = dcp.async_save(
        {**first.states(), "tagc": first.handle},
        checkpoint_id=f"{folder}/async",
        process_group=dist.new_group(backend="gloo"),
    )  # its own: it works while training goes on
    first.steps(3)
    writing.result()
    first.steps(4, 5)
    second = Run(columns=True)
    states = second.states()
    dcp.load({**states, "tagc": second.handle}, checkpoint_id=f"{folder}/async")
    second.set_states(states).steps(3, 4, 5)
    assert same(first.bits(), second.bits())
    files(rank, world_size)


def files(rank, world_size):
    """handle.save(folder) and handle.load(folder): exact with as many ranks; a folder that lacks one, or a
    file that is cut off, is named, and nothing is changed."""
    import tagc.torch as tagc

    folder = shared_folder()
    before = Run().steps(0, 1, 2)
    before.handle.save(folder)
    saved = residuals_of(before.handle)
    dist.barrier()
    after = Run().steps(0)
    after.handle.load(folder)
    assert same(residuals_of(after.handle).values(), saved.values()) and after.handle.n_steps == 3
    dist.barrier()
    path = os.path.join(folder, f"rank{rank}.pt")
    with open(path, "rb") as file:
        whole = file.read()
    for broken in (whole[: len(whole) // 2], b""):
        with open(path, "wb") as file:
            file.write(broken)
        with pytest.raises(tagc.Error, match=rf"rank{rank}.pt cannot be read"):
            after.handle.load(folder)
    os.remove(path)
    dist.barrier()
    with pytest.raises(tagc.Error, match="rank0.pt cannot be read"):
        after.handle.load(folder)
    assert same(residuals_of(after.handle).values(), saved.values())
    alone = [before.handle.state_dict()]  # as in the one file that rank 0 writes of the model
    dist.broadcast_object_list(alone)
    if rank == 0:
        after.handle.load_state_dict(alone[0])
    else:
        with pytest.raises(tagc.Error, match=r"each rank has its own.*handle.save\(folder\).*on every rank"):
            after.handle.load_state_dict(alone[0])
    assert same(residuals_of(after.handle).values(), saved.values())


def other_moments(rank, world_size):
    """Files of two moments, as a save that not all ranks came to leaves them, are one Error on all ranks at
    the next exchange; a save deletes the files of ranks that are no more; twins do not share a folder."""
    import tagc.torch as tagc

    folder = shared_folder()
    torn = Run(kind="ddp").steps(0)
    torn.handle.save(folder)
    torn.steps(1)
    if rank == 0:
        torn.handle.save(folder)
        torch.save({}, f"{folder}/rank{world_size}.pt")
        torch.save({}, f"{folder}/rank_of_mine.pt")
    dist.barrier()
    after = Run(kind="ddp")
    after.handle.load(folder)
    check_error(
        lambda: after.steps(1), "agree: rank 0 has loaded at exchange 2; rank 1 has loaded at exchange 1$"
    )
    dist.barrier()
    torn.handle.save(folder)
    dist.barrier()
    assert set(os.listdir(folder)) == {"rank0.pt", "rank1.pt", "rank_of_mine.pt"}
    again = Run(kind="ddp")
    again.handle.load(folder)
    again.steps(2)
    assert again.handle.n_steps == 3
    again.handle.save(folder)  # a run that goes on in the process of the one before, whose handle is open
    for call in torn.handle.save, torn.handle.load:
        with pytest.raises(tagc.Error, match="was saved by another open handle.*a folder of its own"):
            call(folder)
    again.handle.close()
    torn.handle.save(folder)


def trained_later(rank, world_size):
    """What was frozen when a checkpoint was saved begins at zero."""
    import tagc.torch as tagc

    def start(is_frozen):
        model = Even()
        model.layers[0].requires_grad_(not is_frozen)
        return tagc.compress(
            torch.nn.parallel.DistributedDataParallel(model), **tagc.grouped(OPTIONS | {"residual": "fp32"})
        )

    with start(True) as first:
        loss_of(first.model, batch_of(rank)).backward()
        saved = first.state_dict()
    with start(False) as second:
        loss_of(second.model, batch_of(rank)).backward()
        second.load_state_dict(saved)
        found, old = residuals_of(second), residuals_of(saved)
        assert old and set(old) < set(found)
        for name, values in found.items():
            assert torch.equal(values, old.get(name, torch.zeros_like(values))), name
        loss_of(second.model, batch_of(rank)).backward()


def without_deltas(rank, world_size):
    """A checkpoint with replicas goes to a handle that has none, by all ways."""
    folder = shared_folder()
    saved = Run(options=OPTIONS | {"parameters": "delta4"}).steps(0, 1)
    saved.handle.save(f"{folder}/files")
    dcp.save({"tagc": saved.handle}, checkpoint_id=f"{folder}/dcp")
    residuals = residuals_of(saved.handle)
    for load in (
        lambda handle: handle.load(f"{folder}/files"),
        lambda handle: dcp.load({"tagc": handle}, checkpoint_id=f"{folder}/dcp"),
        lambda handle: dcp.load({"tagc": handle.at(f"{folder}/dcp")}, checkpoint_id=f"{folder}/dcp"),
    ):
        run = Run()
        load(run.handle)
        assert same(residuals_of(run.handle).values(), residuals.values())
        run.steps(2)


def check_sent(run, sent, is_resumed):
    """The same bytes of every leg in every step. A reducer learns from its last exchange how long the next
    messages should be, and a new one has to guess: so the first of a resumed run pads them by another
    length."""
    padded = {"values", "result"}
    assert run.sent[is_resumed:] == sent[is_resumed:], (run.sent, sent)
    for one, other in zip(run.sent[:is_resumed], sent):
        assert all(one[leg] == other[leg] for leg in one.keys() - padded), (one, other)
        assert all((one[leg] > 0) == (other[leg] > 0) for leg in padded), (one, other)


def goes_on_alike(options, n_steps, save, other_saves=(), **shape):
    """A run of n_steps, and one that is saved in the middle, loaded anew and goes on: the same bits and the
    same bytes. Returns the run."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if shape.pop("is_mixed", False):
        shape["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half, steps = n_steps // 2, range(n_steps)
    first = Run(options=options, **shape).steps(*steps)
    before = Run(options=options, **shape).steps(*steps[:half])
    for leave in other_saves:  # which changes nothing
        leave(before)
    load = save(before)
    before.steps(*steps[half:])
    after = Run(options=options, **shape)
    load(after)
    after.steps(*steps[half:])
    check_sent(before, first.sent, False)
    check_sent(after, first.sent[half:], True)
    for run in (before, after):
        assert same(run.bits(), first.bits()) and run.handle.n_steps == n_steps
        ours, theirs = run.handle.state_dict(), first.handle.state_dict()
        assert str(ours) == str(theirs) and all(
            same(ours[name][kind].values(), theirs[name][kind].values())
            for name in ours
            for kind in ours[name]
            if isinstance(ours[name][kind], dict)
        )
        one, other = run.states()["optimizer"]["state"], first.states()["optimizer"]["state"]
        assert str(one) == str(other)
    return first


def saved_plain(run):
    folder = shared_folder()
    torch.save([run.handle.state_dict(), run.states()], f"{folder}/{dist.get_rank()}")

    def load(other):
        saved, states = torch.load(f"{folder}/{dist.get_rank()}", weights_only=False)
        other.handle.load_state_dict(saved)
        other.set_states(states)  # after tagc's, and it must not undo that

    return load


def saved_dcp(run, at=False):
    folder = shared_folder()
    dcp.save({**run.states(), "tagc": run.handle}, checkpoint_id=folder)

    def load(other):
        states = other.states()
        dcp.load({**states, "tagc": other.handle.at(folder) if at else other.handle}, checkpoint_id=folder)
        other.set_states(states)

    return load


def deltas_resume(rank, world_size):
    """Where parameters travel as deltas, a run that is saved and resumed is the one that goes on: bits, and
    bytes of every step."""

    options = OPTIONS | {"parameters": "delta4"}
    run = goes_on_alike(options, 10, saved_plain, [lambda run: run.handle.state_dict()], make=Odd)
    assert sum(sent["gather"] for sent in run.sent[1:]) / 9 < 0.5 * run.sent[0]["gather"], "no deltas"
    goes_on_alike(options | {"parameters": "delta2"}, 8, saved_dcp, columns=True, is_mixed=True)
    goes_on_alike(
        options | {"parameters": "delta8"},
        8,
        functools.partial(saved_dcp, at=True),
        reshard_after_forward=False,
    )
    evaluated(rank, options)
    # What was saved is not what the parameters are now: they travel whole, as they do for a user who asks for
    # it, and without replicas.
    states, saved = copy.deepcopy(run.states()), run.handle.state_dict()
    whole = run.sent[0]["gather"]

    def first_gather(change=lambda other: None, saved=saved):
        other = Run(options=options, make=Odd)
        other.set_states(copy.deepcopy(states))
        other.handle.load_state_dict(copy.deepcopy(saved))
        change(other)
        return other.steps(10).sent[0]["gather"]

    def changed(other):
        with torch.no_grad():
            other.model.embed.weight.to_local().view(-1)[:rank].add_(1)  # on rank 1 alone

    small = first_gather()
    assert small < 0.5 * whole
    assert small < first_gather(changed) < whole  # this module alone
    assert first_gather(lambda other: other.handle.reset_parameters()) == whole
    without = {
        name: {key: value for key, value in entry.items() if not key.startswith("replicas")}
        for name, entry in saved.items()
    }
    for entry in without.values():
        about_key = next(key for key in entry if key != "residuals")
        about = json.loads(entry[about_key])
        del about["gathered"]
        entry[about_key] = json.dumps(about)
    assert first_gather(saved=without) == whole
    refused_replicas(run, saved)
    with pytest.raises(BaseException, match="tagc.rank0.replicas"):  # a checkpoint without them
        saved_dcp(Run(options=OPTIONS, make=Odd).steps(0))(Run(options=options, make=Odd))
    saved_dcp(Run(options=OPTIONS, make=Odd).steps(0), at=True)(other := Run(options=options, make=Odd))
    assert other.steps(1).sent[0]["gather"] == whole


def evaluated(rank, options):
    """Saved after a gather of the same parameters, an evaluation's: the next gather sends nothing, in a
    resumed run too."""
    first = Run(options=options, make=Odd).steps(0, 1)
    with torch.no_grad():
        loss_of(first.model, batch_of(rank, 1))
    second = Run(options=options, make=Odd)
    saved_plain(first)(second)
    assert second.steps(2).sent[-1]["gather"] == 0
    assert same(first.steps(2).bits(), second.bits())


def refused_replicas(run, saved):
    import tagc.torch as tagc

    ((name, entry),) = saved.items()
    about_key, rows_key = (
        next(key for key in entry if key.startswith(start)) for start in ("about", "replicas")
    )
    about, rows = json.loads(entry[about_key]), entry[rows_key]
    module = next(iter(rows))
    spoilt = rows[module].clone()
    spoilt[0] = float("inf")
    n = rows[module].numel()
    before = run.handle.state_dict()
    for change, counts, words in (
        (rows[module].float(), None, "must be torch.bfloat16"), (rows[module][1:], None,
            rf"must be torch.bfloat16 \({n},\)"),
        (spoilt, None, "not finite"), ([1], None, "is list"), (rows[module], [-1, "", ""], "count"),
        (rows[module], 7, "count"),
        (rows[module], [1, 2, ""], "count"), (rows[module], [2**60, "", ""], "count"),
    ):  # fmt: skip
        gathered = about["gathered"] | ({} if counts is None else {module: counts})
        bad = {
            name: entry
            | {about_key: json.dumps(about | {"gathered": gathered}), rows_key: rows | {module: change}}
        }
        with pytest.raises(tagc.Error, match=words):
            run.handle.load_state_dict(bad)
    with pytest.raises(tagc.Error, match="gathered"):
        run.handle.load_state_dict({name: entry | {rows_key: {}}})
    assert str(run.handle.state_dict()) == str(before)


def refusals(rank, world_size):
    import tagc.torch as tagc

    run = Run().steps(0)
    good = run.handle.state_dict()
    ((name, entry),) = good.items()
    about_key = next(key for key in entry if key != "residuals")
    about = json.loads(entry[about_key])
    parameter = "layers.1.mlp.weight"

    def changed(about=about, names={}, **residuals):
        kept = {names.get(key, key): value for key, value in entry["residuals"].items()}
        return {name: {about_key: json.dumps(about), "residuals": {**kept, **residuals}}}

    spoilt = entry["residuals"][parameter].clone()
    spoilt.view(-1)[3] = float("nan")
    cases = [
        (None, "NoneType"),
        (7, "int"),
        ([], "has no rank"),
        ({}, "is empty"),
        ({"model": {}}, "'model'"),
        ([3], "int"),
        ({name: {"residuals": {}}}, name),
        ({name: {about_key: "{}", "residuals": {}}}, "'{}'"),
        ({name: {about_key: entry[about_key], "residuals": [1]}}, "list"),
        ({"rank7": entry}, "rank7"),
        ([good, good], "twice"),
        (changed(names={parameter: "layers.1.mlp.else"}), "residual of layers.1.mlp.else"),
        (changed(**{"layers.1.mlp.else": spoilt}), "layers.1.mlp.else"),
        (changed(**{parameter: torch.zeros(3, 2)}), r"\(3, 2\)"),
        (changed(**{parameter: [1.0]}), "list"),
        (changed(**{parameter: torch.zeros(5, dtype=torch.int32)}), "int32"),
        (changed(**{parameter: spoilt}), "not finite"),
        (changed(about | {"rank": 1 - rank}), "says that it is rank"),
        (changed(about | {"loss_scale": 0}), "about"),
        (changed(about | {"loss_scale": "1"}), "about"),
        (changed(about | {"step": -1}), "about"),
        (changed(about | {"world_size": 4, "replicas": 4}), "4 ranks, and there are 2 now.*handle.at"),
        (
            [
                changed(about | {"world_size": 4, "replicas": 4}),
                {
                    f"rank{rank + 2}": {
                        about_key: json.dumps(
                            about
                            | {
                                "world_size": 4,
                                "replicas": 4,
                                "rank": rank + 2,
                                "replica": rank + 2,
                                "step": 9,
                            }
                        ),
                        "residuals": entry["residuals"],
                    }
                },
            ],
            "step is 1 of rank",
        ),
    ]
    for bad, words in cases:
        with pytest.raises(tagc.Error, match=words) as raised:
            run.handle.load_state_dict(bad)
        assert raised.value.status == "argument"
    assert same(residuals_of(good).values(), residuals_of(run.handle).values()), (
        "a refused one changed something"
    )
    assert run.handle.n_steps == 1
    with pytest.raises(tagc.Error, match="nowhere"):
        run.handle.at("/nowhere")
    run.steps(1)  # goes on on all ranks


def dense_has_no_residuals(rank, world_size):
    """Its state is saved and loaded all the same."""
    import tagc.torch as tagc

    with tagc.compress(
        wrapped("fsdp2"), layers="all", verbose=False, options=tagc.Options(exchange="dense")
    ) as handle:
        loss_of(handle.model, batch_of(rank)).backward()
        loss_of(handle.model, batch_of(rank)).backward()
        assert residuals_of(handle) == {}
        handle.load_state_dict(handle.state_dict())
        folder = shared_folder()
        dcp.save({"tagc": handle}, checkpoint_id=folder)  # DCP writes no empty dict
        dcp.load({"tagc": handle}, checkpoint_id=folder)
        assert handle.n_steps == 2


def kinds(rank, world_size):
    for kind in present(("fsdp2", "ddp", "fsdp1")):
        plain_resume(rank, world_size, kind)


def default_dtype(rank, world_size):
    """A saved residual has the dtype that holds it without loss, whatever torch makes by default."""
    torch.set_default_dtype(torch.bfloat16)
    for kind, stored in present([("fsdp2", "fp32"), ("ddp", "int8"), ("fsdp1", "fp32"), ("fsdp2", "int4")]):
        options = OPTIONS | {"residual": stored}
        first, folder = Run(kind, options=options).steps(0, 1, 2), shared_folder()
        saved = first.handle.state_dict()
        residuals = residuals_of(saved)
        dtype = torch.float32 if stored == "fp32" else torch.bfloat16
        assert all(values.dtype == dtype for values in residuals.values())
        if stored == "fp32":
            assert any(not torch.equal(values, values.bfloat16()) for values in residuals.values())
        dcp.save({"tagc": first.handle}, checkpoint_id=folder)
        second = Run(kind, options=options).steps(7, 8)
        second.handle.load_state_dict(saved)
        assert same(residuals.values(), residuals_of(second.handle).values())
        second.steps(9)
        dcp.load({"tagc": second.handle.at(folder)}, checkpoint_id=folder)
        assert same(residuals.values(), residuals_of(second.handle).values())


def with_tensor_parallelism(rank, world_size):
    """The mesh has a dimension within tensors behind the one that shards; a residual has its parameter's own
    order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import tagc.torch as tagc

    mesh, saved = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("shard", "tensor")), []
    for plan in (None, {"embed": ColwiseParallel(), "layers.*.mlp": ColwiseParallel()}):
        torch.manual_seed(0)
        model = Even()
        model = parallelize_module(model, mesh["tensor"], plan) if plan else model
        model = wrapped("fsdp2", lambda model=model: model, mesh=mesh["shard"], columns=True)
        with tagc.compress(model, **tagc.grouped(OPTIONS)) as handle:
            loss_of(model, batch_of(rank)).backward()
            saved.append(residuals_of(handle))
    assert set(saved[0]) == set(saved[1]) and all(
        torch.equal(saved[0][name], saved[1][name]) for name in saved[0]
    )


def end_of_life(rank, world_size):
    """close() frees the residuals. Who drops model and handle without it keeps neither memory nor threads of
    libtagc's."""
    import tagc.torch as tagc

    def n_threads():
        gc.collect()
        return len(os.listdir("/proc/self/task"))

    gc.freeze()  # torch's own objects, of which there are so many that a collection takes a third of a second
    for kind in present(("fsdp2", "fsdp1", "ddp")):
        counts = []
        for is_closed in (True, False, False, False):
            handle = tagc.compress(
                wrapped(kind), parameters="delta4" if kind == "fsdp2" else None, **tagc.grouped(OPTIONS)
            )
            for step in range(2):
                loss_of(handle.model, batch_of(rank, step)).backward()
            assert any(unit.residuals_on_the_wire() for unit in handle.state.units.values())
            if is_closed:
                handle.close()
                assert not any(unit.residuals_on_the_wire() for unit in handle.state.units.values())
                for function in (handle.state_dict, lambda: handle.load_state_dict({})):  # noqa: F821 (it is deleted below)
                    with pytest.raises(tagc.Error, match="closed"):
                        function()
            del handle
            # DDP's thread may still be putting its last bucket away
            end = time.monotonic() + (20 if counts else 1)
            while n_threads() > min(counts, default=0) and time.monotonic() < end:
                time.sleep(0.01)
            counts.append(n_threads())
        assert counts[-1] <= counts[0], (kind, counts)


def saved_without_a_handle(rank, world_size):
    """A checkpoint from before tagc: DCP names a key that is not there, and handle.at() says why."""
    import tagc.torch as tagc

    folder = shared_folder()
    run = Run().steps(0)
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=folder)
    with pytest.raises(BaseException, match="tagc.rank0.about"):
        dcp.load({"tagc": run.handle}, checkpoint_id=folder)
    with pytest.raises(
        tagc.Error, match="saved without a tagc handle: leave the handle out of dcp.load.*begin at zero"
    ):
        run.handle.at(folder)


def other_versions(rank, world_size):
    """A state of another version, or of none, is refused: the Error names both, and nothing changes."""
    import tagc.torch as tagc
    from tagc.torch import checkpoint

    run = Run().steps(0)
    saved = run.handle.state_dict()
    run.steps(1)
    before = residuals_of(run.handle)
    for version in (None, 0, 3, "1"):
        other = {}
        for name, entry in saved.items():
            about = json.loads(entry[checkpoint.ABOUT])
            assert about.pop("version") == 2
            other[name] = {
                **entry,
                checkpoint.ABOUT: json.dumps(about if version is None else {"version": version, **about}),
            }
        with pytest.raises(
            tagc.Error, match=f"rank{rank} is of version {version!r}, this tagc reads versions 1 and 2"
        ):
            run.handle.load_state_dict(other)
    assert same(before.values(), residuals_of(run.handle).values())
    run.handle.load_state_dict(saved)
    assert same(residuals_of(run.handle).values(), residuals_of(saved).values())


OF_VERSION_1 = {  # as they stood in files
    "about": "about (not there: where another number of ranks saved, load handle.at(path); where no tagc "
    "handle was saved, leave it out)",
    "replicas": "replicas (not there: saved without deltas, or by ranks that are others now: load "
    "handle.at(path))",
}


def as_version_1(saved):
    return {
        rank: {
            OF_VERSION_1.get(key, key): json.dumps(json.loads(value) | {"version": 1})
            if key == "about"
            else value
            for key, value in entry.items()
        }
        for rank, entry in saved.items()
    }


def keys_are_words(rank, world_size):
    """Keys of what is saved are words. Version 1 had sentences; its states load as those of today, from a
    state_dict, a folder and a checkpoint of DCP, with replicas."""
    run = Run(options=OPTIONS | {"parameters": "delta8"}).steps(0, 1)
    saved = run.handle.state_dict()
    (entry,) = saved.values()
    assert entry.keys() == {"about", "residuals", "replicas"} and entry["replicas"]
    old, (folder, checkpoint_id) = as_version_1(saved), (shared_folder(), shared_folder())
    torch.save(old, f"{folder}/rank{rank}.pt")
    dcp.save({"tagc": old}, checkpoint_id=checkpoint_id)
    dist.barrier()
    for load in (
        lambda handle: handle.load_state_dict(old),
        lambda handle: handle.load(folder),
        lambda handle: dcp.load({"tagc": handle.at(checkpoint_id)}, checkpoint_id=checkpoint_id),
    ):
        run.steps(2)
        load(run.handle)
        now = run.handle.state_dict()
        assert same(residuals_of(now).values(), residuals_of(saved).values())
        (rows,) = (entry["replicas"] for entry in now.values())
        assert same(rows.values(), next(iter(saved.values()))["replicas"].values())


def mixed_folders(rank, world_size):
    """A folder with files of two saves: the Error names the first number that differs, and both values, also
    where the other save had more ranks, whose files are not all there."""
    import tagc.torch as tagc
    from tagc.torch import checkpoint

    def change(path, n_ranks, step):
        (name, entry), *_ = torch.load(path, weights_only=True).items()
        about = json.loads(entry[checkpoint.ABOUT]) | {
            "world_size": n_ranks,
            "replicas": n_ranks,
            "step": step,
        }
        torch.save({name: {**entry, checkpoint.ABOUT: json.dumps(about)}}, path)

    run = Run(kind="ddp").steps(0)
    for key, n_ranks, steps in (
        ("world_size", (3, 2), (1, 1)),
        ("world_size", (2, 3), (1, 1)),
        ("step", (3, 3), (7, 4)),
    ):
        folder = shared_folder()
        run.handle.save(folder)
        dist.barrier()
        change(f"{folder}/rank{rank}.pt", n_ranks[rank], steps[rank])
        dist.barrier()
        if n_ranks[rank] == 3:  # it reads all files; a file that fits is all that a rank reads
            values = n_ranks if key == "world_size" else steps
            with pytest.raises(tagc.Error) as it:
                run.handle.load(folder)
            said = f"{key} is {values[rank]} of rank {rank} and {values[1 - rank]} of rank {1 - rank}: they "
            assert said in str(it.value), it.value
        dist.barrier()


def test_two_ranks():
    ranks.run_each(
        (
            kinds,
            deltas_resume,
            dcp_resume,
            other_moments,
            mixed_folders,
            trained_later,
            without_deltas,
            refusals,
            dense_has_no_residuals,
            with_tensor_parallelism,
            saved_without_a_handle,
            other_versions,
            keys_are_words,
        ),
        2,
        timeout_s=400,
    )


@pytest.mark.parametrize("check", [default_dtype, end_of_life])
def test_two_ranks_of_their_own(check):
    ranks.run(check, 2)


# ---- another number of ranks ----


def pending(handle, n_replicas):
    """name -> 1/W times the sum of residuals, of this rank's place."""
    return {name: values.double() / n_replicas for name, values in residuals_of(handle).items()}


# the largest error of a code, as a share of the largest value near it
ROUNDING = {"fp32": 0, "int8": 1 / 63, "int4": 1 / 3}


def is_close(one, other, stored):
    """Returns whether residuals are the same but for one rounding, in blocks that parameters share."""
    largest = max(a.abs().max().item() for a in one)
    return all(
        ((a.double() - b.double()).abs() <= ROUNDING[stored] * largest).all()
        for a, b in zip(one, other, strict=True)
    )


def save_changed(rank, world_size, folder, kind, stored, shape):
    run = Run(kind, options=OPTIONS | {"residual": stored}, **shape).steps(0, 1, 2)
    saved = run.handle.state_dict()
    torch.save(saved, f"{folder}/plain{rank}")
    run.handle.save(f"{folder}/files/of/tagc")
    dcp.save({"model": run.states()["model"], "tagc": run.handle}, checkpoint_id=f"{folder}/dcp")
    return saved


def load_changed(rank, world_size, old_size, folder, kind, stored, shape):
    import tagc.torch as tagc

    options = OPTIONS | {"residual": stored}
    run = Run(kind, options=options, **shape)
    every = [torch.load(f"{folder}/plain{old}", weights_only=True) for old in range(old_size)]
    with pytest.raises(tagc.Error, match=f"{old_size} ranks, and there are {world_size} now.*handle.at"):
        run.handle.load_state_dict(every[rank % old_size])
    run.handle.load_state_dict(every)
    plain = run.handle.state_dict()
    second = Run(kind, options=options, **shape)
    model = second.states()["model"]
    # DCP's own is no Exception
    with pytest.raises(BaseException, match="Missing key.*tagc.rank|handle.at") as raised:
        dcp.load({"tagc": second.handle}, checkpoint_id=f"{folder}/dcp")
    assert isinstance(raised.value, tagc.Error) == (old_size > world_size)
    dcp.load({"model": model, "tagc": second.handle.at(f"{folder}/dcp")}, checkpoint_id=f"{folder}/dcp")
    assert same(residuals_of(plain).values(), residuals_of(second.handle).values())
    assert second.handle.n_steps == 3
    second.steps(4)
    second.handle.load(f"{folder}/files/of/tagc")
    held = residuals_of(second.handle).values()  # in reducers now
    assert is_close(residuals_of(plain).values(), held, stored)
    run.steps(3)
    assert run.handle.n_steps == 4 and run.handle.stats()["n_nonfinite"] == 0
    return plain


def mean_of(states, world_size):
    names = residuals_of(states[0]).keys()
    return {name: sum(residuals_of(state)[name].double() for state in states) / world_size for name in names}


@pytest.mark.parametrize("old, new, kind, stored, now, shape", present([
    (2, 4, "fsdp2", "int8", "fp32", dict(make=Odd)), (3, 2, "ddp", "int8", "int8", {}),
    (4, 2, "fsdp2", "fp32", "int8", dict(columns=True)), (2, 3, "fsdp1", "int4", "int8", {}),
], lambda case: case[2]))  # fmt: skip
def test_another_number_of_ranks(old, new, kind, stored, now, shape, tmp_path):
    """Which may also store residuals in another format."""
    before = ranks.run(save_changed, old, str(tmp_path), kind, stored, shape)
    after = ranks.run(load_changed, new, old, str(tmp_path), kind, now, shape)
    for (name, was), (other, is_now) in zip(
        mean_of(before, old).items(), mean_of(after, new).items(), strict=True
    ):
        assert name == other and was.abs().sum() > 0
        torch.testing.assert_close(is_now, was, rtol=1e-6, atol=1e-7 * was.abs().max().item(), msg=name)


# ---- between sites ----


def between(rank, world_size, folder, n_hosts, is_first):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (n_hosts, world_size // n_hosts), mesh_dim_names=("host", "local"))
    if is_first:
        goes_on_alike(
            OPTIONS | {"parameters": "delta4"},
            6,
            saved_dcp,
            between=mesh["host"],  # by its name from torch 2.13 on
            mesh=mesh["local"],
            make=Odd,
        )
    run = Run(between=mesh["host"].get_group(), mesh=mesh["local"], make=Odd)
    if is_first:
        run.steps(0, 1)
        dcp.save({"tagc": run.handle}, checkpoint_id=folder)
    else:
        dcp.load({"tagc": run.handle.at(folder)}, checkpoint_id=folder)
    saved = run.handle.state_dict()
    run.steps(2)
    return saved


def whole(states, shapes, n_hosts, n_local):
    """name -> what is still to be applied, of the parameter's own shape."""
    hosts = {}
    for name, shape in shapes.items():
        chunks = [
            torch.cat([residuals_of(states[h * n_local + place])[name].double() for place in range(n_local)])
            for h in range(n_hosts)
        ]
        hosts[name] = sum(chunk[: shape.numel()].reshape(shape) for chunk in chunks) / n_hosts
    return hosts


def test_between_sites_of_other_sizes(tmp_path):
    before = ranks.run(between, 4, str(tmp_path), 2, True)
    again = ranks.run(between, 4, str(tmp_path), 2, False)
    for one, other in zip(before, again):
        assert same(residuals_of(one).values(), residuals_of(other).values())
    after = ranks.run(between, 4, str(tmp_path), 4, False)
    shapes = {name: p.shape for name, p in Odd().named_parameters()}
    old, new = whole(before, shapes, 2, 2), whole(after, shapes, 4, 1)
    for name, was in old.items():
        assert was.abs().sum() > 0 or was.numel() < 20, name
        torch.testing.assert_close(new[name], was, rtol=1e-6, atol=1e-9)
