"""What goes wrong is one clear Error on every rank, soon, and never a hang."""

import contextlib
import dataclasses
import functools
import inspect
import io
import logging
import os
import re
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from models import Even, Odd, batch_of, loss_of
from oracles import check_error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from wrappers import wrapped


def refused(words, model, status=None, **options):
    """compress() fails here and on all other ranks alike."""
    import tagc.torch as tagc

    begin = time.monotonic()
    with pytest.raises(tagc.Error, match=words) as raised:
        tagc.compress(model, verbose=False, **tagc.grouped(options))
    assert time.monotonic() - begin < 100  # and not the time-out
    assert status is None or raised.value.status == status
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, str(raised.value))
    assert len(set(everyone)) == 1, everyone


# ---- compress() ----


def bad_values(rank, world_size):
    model = wrapped("fsdp2")
    cases = [
        (dict(sparsity=1.0), "sparsity is 1.0, at which nothing would ever be sent"),
        (dict(mild_sparsity=1), "mild_sparsity is 1, at which nothing would ever be sent"),
        (dict(sparsity=1.5), "sparsity is 1.5, must be a number from 0 to 1"),
        (dict(sparsity="0.9"), "sparsity is '0.9'"),
        (dict(sparsity=float("nan")), "sparsity is nan"),
        (dict(sparsity=True), "sparsity is True"),
        (dict(values="int3"), "values is 'int3', must be one of 'fp32'"),
        (dict(values=["int2"]), "values is"),
        (dict(exchange="ring"), "exchange is 'ring', must be one of 'dense'"),
        (
            dict(exchange="packed", values="int4"),
            "values is 'int4', which is for exchange 'direct'; this one is 'packed'",
        ),
        (dict(mild="int"), "mild is 'int', must be one of 'dense'"),
        (dict(mild_sparsity=-1), "mild_sparsity is -1"),
        (dict(mild="dense", mild_sparsity=0.5), "mild_sparsity is 0.5, and mild is 'dense'"),
        (dict(layers="linear"), "layers is 'linear'"),
        (dict(rules={"nothing.*": "dense"}), "matches no parameter"),
        (dict(rules=3), "rules"),
        (dict(layers=lambda name, parameter: "big"), "'big'"),
        (dict(transport="group"), "transport is 'group', must be one of 'host', 'gloo', 'native'"),
        (dict(parameters="delta3"), "parameters is 'delta3', must be one of None"),
        (dict(threads=0), "threads is 0"),
        (dict(threads=1.5), "threads is 1.5, must be a whole number"),
        (dict(threads=2.0), "threads is 2.0, must be a whole number"),
        (dict(timeout_s=0), "timeout_s is 0"),
        (dict(timeout_s="1"), "timeout_s is '1'"),
        (dict(on_step=3), "on_step is 3"),
        (dict(between=3), "between is 3"),
    ]
    for options, words in cases:
        refused(words, model, "argument", **options)
    refused("model is a Even, not wrapped: it must be fully_shard", Even(), "argument")
    refused("model is a int, must be a torch.nn.Module", 3, "argument")
    refused("between is for fully_shard", wrapped("ddp"), "argument", between=dist.group.WORLD)
    refused(
        "parameters is 'int8', which is for fully_shard", wrapped("ddp"), "unsupported", parameters="int8"
    )
    from torch.distributed._composable.replicate import replicate  # the older one

    model_of_its_own = nn.Sequential(replicate(Even()))
    refused("has the replicate.*use DistributedDataParallel", model_of_its_own, "unsupported")
    with torch.device("meta"):
        empty = Even()
    refused(
        "embed.weight is on the meta device.*before wrapping",
        nn.parallel.DistributedDataParallel(empty, init_sync=False),
        "argument",
    )
    with torch.device("meta"):
        sharded = wrapped("fsdp2")
    refused("weight is on the meta device.*to_empty.*before compress", sharded, "argument")
    sharded.to_empty(device="cpu")
    works(sharded)
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("host", "local"))
    inside = wrapped("fsdp2", mesh=mesh["local"])
    if torch.__version__ >= "2.13":  # else a mesh does not know what it was cut from
        refused(
            "between is 'hosts', must be a dimension of the mesh .*: 'host'$",
            inside,
            "argument",
            between="hosts",
        )
    refused("between is 7, must be a process group .*, its mesh of one dim", inside, "argument", between=7)
    works(model)


class Trainer:
    """Knows its model, which cannot be copied."""

    def __init__(self, model):
        self.model = model

    def layers(self, name, parameter):
        return "compressed"


def function_of_an_object(rank, world_size):
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    with tagc.compress(model, layers=Trainer(model).layers, verbose=False) as handle:
        assert {parameter.kind for parameter in handle.wrapper.parameters()} == {"compressed"}


def works(model):
    import tagc.torch as tagc

    with tagc.compress(model, sparsity=0.9, verbose=False):
        model.zero_grad()
        loss_of(model, batch_of(dist.get_rank())).backward()


def optimizer_of_one_rank(rank, world_size):
    """An optimizer that is wrong on one rank is an Error on all of them."""
    import tagc.torch as tagc

    model, other = wrapped("ddp"), Odd()
    adam = torch.optim.AdamW((other if rank else model).parameters())
    check_error(lambda: tagc.compress(model, adam, verbose=False), "rank 1: the optimizer has none of")
    with tagc.compress(model, torch.optim.AdamW(model.parameters()), verbose=False) as handle:
        loss_of(model, batch_of(rank)).backward()
        assert handle.n_steps == 1


def after_close(rank, world_size):
    """A closed handle says so, and changes no optimizer."""
    import tagc.torch as tagc

    model = wrapped("ddp")
    handle = tagc.compress(model, verbose=False)
    handle.close()
    adam = torch.optim.AdamW(model.parameters())
    for call in (
        lambda: handle.adapt(adam),
        lambda: handle.param_groups(),
        lambda: handle.watch(1.0),
        lambda: handle.record("never.jsonl"),
        lambda: handle.follow(torch.amp.GradScaler("cpu")),
        lambda: handle.loss_scale(2.0),
        lambda: handle.reset_parameters(),
        lambda: handle.state_dict(),
        lambda: handle.save("never"),
        lambda: handle.load("never"),
    ):
        with pytest.raises(tagc.Error, match="this tagc handle is closed") as raised:
            call()
        assert raised.value.status == "state"
    handle.close()
    assert not os.path.exists("never.jsonl") and not os.path.exists("never")


def raw_mistakes(rank, world_size):
    """Of methods: Errors that name the argument, and not what Python finds somewhere within."""
    import tagc.torch as tagc

    model = wrapped("ddp")
    with pytest.raises(tagc.Error, match="model is a Even, not wrapped.*before advise"):
        tagc.advise(Even())
    with tagc.compress(model, verbose=False) as handle:
        for call, words in (
            (lambda: handle.watch("x"), "loss is 'x', must be a number or a tensor"),
            (lambda: handle.watch(None), "loss is None, must be a number or a tensor"),
            (lambda: handle.follow(3), "scaler is a int, must have get_scale"),
            (lambda: handle.loss_scale("1"), "loss scale is '1', must be above 0"),
            (lambda: handle.adapt("adam"), "optimizer is a str, must be a torch.optim.Optimizer"),
            (lambda: handle.save(None), "folder is None, must be a path"),
            (lambda: handle.load(3), "folder is 3, must be a path"),
            (lambda: handle.at(None), "checkpoint_id is None, must be a path"),
            (lambda: handle.load_state_dict(3), "is a int, must be what state_dict"),
        ):
            with pytest.raises(tagc.Error, match=words) as raised:
                call()
            assert raised.value.status == "argument"
        handle.watch(0.5)
        handle.watch(torch.tensor(0.5))
        handle.watch(1)


def completion(rank, world_size):
    """What users call is offered, and not what tagc's own modules share."""
    import tagc.torch as tagc

    def offered(handle):
        return {name for name in dir(handle) if not name.startswith("_")}

    with tagc.compress(wrapped("ddp"), verbose=False) as handle:
        assert not {"state", "passes", "wrapper"} & offered(handle)
        words = set(re.findall(r"(\w+)\(|, (n_steps)", type(handle).__doc__))
        assert 12 <= len(words) and {one or other for one, other in words} - {"compress"} <= offered(handle)


def one_rank_differs(rank, world_size):
    """Each rank's own mistake is told to all."""
    import tagc.torch as tagc

    model, is_one = wrapped("fsdp2"), rank == 1
    refused(
        "ranks do not agree: sparsity is 0.9 on rank 0 and 0.8 on rank 1",
        model,
        "mismatch",
        sparsity=0.8 if is_one else 0.9,
    )
    refused(
        "ranks do not agree: layers is 'all' on rank 0 and 'none' on rank 1",
        model,
        "mismatch",
        layers="none" if is_one else "all",
    )
    refused(
        "do not agree on parameters: .*head.weight.*, compressed.*rank 0.*, dense.*rank 1",
        model,
        "mismatch",
        layers=lambda name, p: "dense" if is_one and name == "head.weight" else "compressed",
    )
    refused("rank 1: sparsity is 2", model, "argument", sparsity=2 if is_one else 0.9)
    refused("rank 1: model is a Even, not wrapped", Even() if is_one else model, "argument")
    real = torch.__version__
    try:
        torch.__version__ = "2.8.1" if is_one else real
        refused("rank 1: torch is 2.8.1, must be 2.9 or newer", model, "unsupported")
        torch.__version__ = "2.8.1"
        refused("^torch is 2.8.1, must be 2.9 or newer", model, "unsupported")
        torch.__version__ = "2.99.0" if is_one else real
        refused(f"torch is '{real}' on rank 0 and '2.99.0' on rank 1".replace("+", "."), model, "mismatch")
    finally:
        torch.__version__ = real
    handle = tagc.compress(
        model, verbose=False, timeout_s=60 + rank, options=tagc.Options(threads=1 + is_one)
    )  # need not be alike
    refused("compressed already", model, "state")
    handle.close()
    works(model)


def no_library(rank, world_size):
    """First on all ranks, then on one, which must not have loaded it before."""
    model, real = wrapped("fsdp2"), os.environ.get("TAGC_LIBRARY")
    broken = f"{os.path.dirname(os.path.abspath(__file__))}/ranks.py"
    for where, words in (
        ("/nowhere/libtagc.so", "libtagc is not at /nowhere/libtagc.so: install"),
        (broken, "cannot be used"),
    ):
        os.environ["TAGC_LIBRARY"] = where
        refused("^libtagc.*" + words.replace("libtagc is ", ""), model, "io")
    if rank != 1:
        os.environ.pop("TAGC_LIBRARY") if real is None else os.environ.update(TAGC_LIBRARY=real)
    refused("rank 1: libtagc at .*ranks.py cannot be used", model, "io")
    os.environ.pop("TAGC_LIBRARY", None) if real is None else os.environ.update(TAGC_LIBRARY=real)
    works(model)


# ---- hooks ----


def hook_of(handle):
    module = handle.wrapper.modules[0]
    return module.module._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm, module


def bad_calls(rank, world_size):
    """Of the hook itself: it fails on all ranks, and the next proper call works."""
    import tagc.torch as tagc

    model = wrapped("fsdp2", make=Odd)
    with tagc.compress(model, sparsity=0.9, layers="all", verbose=False) as handle:
        hook, module = hook_of(handle)
        n = sum(parameter.numel for parameter in module.parameters)
        loss_of(model, batch_of(rank)).backward()
        (layout,) = module._layouts.values()
        n = layout.n_elems

        def call(n=n, dtype=torch.float32, op=dist.ReduceOp.AVG, n_out=None):
            hook(
                torch.empty(n_out or n // world_size, dtype=dtype),
                torch.ones(n, dtype=dtype),
                dist.group.WORLD,
                op,
            )

        is_one = rank == 1
        cases = [
            (dict(op=dist.ReduceOp.MAX), "reduce op.*MAX.*has AVG, SUM and PREMUL_SUM", "unsupported"),
            (dict(dtype=torch.float64), "float64: must be fp32, bf16 or fp16", "unsupported"),
            (dict(dtype=torch.int32), "int32: must be fp32", "unsupported"),
            (dict(n=n + world_size * 1000), "all of this module's parameters have", "mismatch"),
            (
                dict(dtype=torch.bfloat16 if is_one else torch.float32),
                "do not agree: rank 0 has .*float32.*rank 1 .*bfloat16",
                "mismatch",
            ),
            (
                dict(op=dist.ReduceOp.SUM if is_one else dist.ReduceOp.AVG),
                "ranks do not agree.*factor",
                "mismatch",
            ),
            (dict(op=dist.ReduceOp.MIN if is_one else dist.ReduceOp.AVG), "rank 1: reduce op", "unsupported"),
            (dict(n=n - 2 * world_size if is_one else n), "elements", "mismatch"),
            (dict(n_out=n), "output", "mismatch"),
        ]
        for arguments, words, status in cases:
            begin = time.monotonic()
            with pytest.raises(tagc.Error, match=words) as raised:
                call(**arguments)
            assert raised.value.status == status and time.monotonic() - begin < 100, (
                arguments,
                raised.value.status,
            )
            assert module.name in str(raised.value)
        call()
    with pytest.raises(tagc.Error, match="closed"):
        call()
    loss_of(model, batch_of(rank)).backward()  # torch's own again

    model = wrapped("fsdp2").double()
    with tagc.compress(model, layers="all", verbose=False) as handle:
        assert "float64" in handle.table() and "(0.0 %)" in handle.table(), handle.table()
        x, y = batch_of(rank)
        loss_of(model, (x.double(), y.double())).backward()
        ours = [p.grad.full_tensor() for p in model.parameters()]
        assert handle.n_steps == 1 and handle.stats()["bits_per_param"] == 64
    model.zero_grad()
    loss_of(model, (x.double(), y.double())).backward()
    for mine, p in zip(ours, model.parameters()):
        torch.testing.assert_close(mine, p.grad.full_tensor())


def within_backward(rank, world_size):
    """One rank's gradient lacks a parameter: all ranks hear of it in backward()."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    with tagc.compress(model, sparsity=0.9, layers="all", verbose=False):
        if rank == 1:
            model.head.bias.requires_grad_(False)
        begin = time.monotonic()
        with pytest.raises(
            tagc.Error, match="gradients of .*ranks do not agree: rank 0 has elements .*rank 1 has elements"
        ) as it:
            loss_of(model, batch_of(rank)).backward()
        assert it.value.status == "mismatch" and time.monotonic() - begin < 100


def one_rank_cannot_begin(rank, world_size):
    """What fails on one rank after all have agreed on an exchange, for want of memory or by a mistake, is an
    Error of the same status on all ranks, soon, and the connection stays."""
    import tagc.torch as tagc
    from tagc.torch.exchange import gatherer, model
    from tagc.torch.hooks import replicas

    def raises(problem):
        def raise_it(*_, **__):
            raise problem

        return raise_it

    memory = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
    bad = ValueError("gradient must be contiguous")
    models = ((model.Spans, "at", MemoryError("pieces"), "memory"), (model.Spans, "at", bad, "argument"))
    whole = ((replicas.Gathers, "_run_whole", memory, "memory"), (gatherer, "_array", bad, "argument"))
    deltas = ((replicas.Gathers, "_run", memory, "memory"), (gatherer, "_array", bad, "argument"))
    options = dict(sparsity=0.9, layers="all", verbose=False)
    for kind, parameters, places in (
        ("ddp", None, models),
        ("fsdp2", None, models),
        ("fsdp2", "bf16", whole),
        ("fsdp2", "delta4", deltas),
    ):
        for at, name, problem, status in places:
            wrapper, about, said = wrapped(kind), (kind, parameters, name), None
            with tagc.compress(wrapper, parameters=parameters, **tagc.grouped(options)) as handle:
                for _ in range(2 if kind == "ddp" else 1):  # DDP rebuilds its buckets
                    loss_of(wrapper, batch_of(rank)).backward()
                handle.reset_parameters()  # so that deltas have something to gather
                before, begin = vars(at)[name], time.monotonic()
                if rank == 1:
                    setattr(at, name, raises(problem))
                try:
                    loss_of(wrapper, batch_of(rank)).backward()
                except tagc.Error as error:
                    said = error
                setattr(at, name, before)
                assert said is not None and said.status == status, (*about, said)
                assert time.monotonic() - begin < 30, about
                if kind == "ddp":  # torch's FSDP2 does not go on after a failed pass
                    loss_of(wrapper, batch_of(rank)).backward()
                    assert handle.n_steps == 4


def one_rank_cannot_open_a_step(rank, world_size):
    """Where it is not known yet which exchange it is, the connection ends on all ranks, soon."""
    import tagc.torch as tagc
    from tagc.torch.passes import Passes

    model = wrapped("ddp")
    with tagc.compress(model, sparsity=0.9, layers="all", verbose=False, timeout_s=300):
        loss_of(model, batch_of(rank)).backward()
        begin = time.monotonic()
        if rank == 1:
            Passes._find, before = (lambda *_: 1 / 0), Passes._find
        try:
            with pytest.raises((tagc.Error, ZeroDivisionError)) as it:
                loss_of(model, batch_of(rank)).backward()
        finally:
            if rank == 1:
                Passes._find = before
        assert rank == 1 or "rank 1 gave up: " in str(it.value) and "division by zero" in str(it.value)
        assert time.monotonic() - begin < 30


class Experts(nn.Module):
    def __init__(self, n=3):
        super().__init__()
        self.embed = nn.Linear(7, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(n))

    def forward(self, x, which):
        x = self.embed(x)
        return x + sum(self.experts[i](x) for i in which)


def different_units(rank, world_size):
    """An expert of its own unit that runs on one rank only: torch itself pairs its gathers with those of
    another one. The message names both. With `parameters`, tagc sees it in the gather."""
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    for options, words in (
        ({}, "rank 0 comes with gradients of experts.1, and rank 1 with gradients of experts.2: every"),
        (
            {"parameters": "bf16"},
            "rank 0 comes with parameters of experts.1, and rank 1 with parameters of experts.2: every",
        ),
    ):
        model = Experts()
        for expert in model.experts:
            fully_shard(expert)
        fully_shard(model)
        with tagc.compress(model, verbose=False, timeout_s=20, **tagc.grouped(options)):
            x, _ = batch_of(rank)
            model(x, [0, 1, 2]).square().mean().backward()
            with pytest.raises(tagc.Error, match=words) as raised:
                model(x, [0, 1 + rank]).square().mean().backward()
            assert raised.value.status == "mismatch"


CHECKS = [
    no_library,
    bad_values,
    function_of_an_object,
    raw_mistakes,
    optimizer_of_one_rank,
    after_close,
    completion,
    one_rank_differs,
    bad_calls,
    within_backward,
    one_rank_cannot_begin,
    one_rank_cannot_open_a_step,
    different_units,
]


def test_two_ranks():
    ranks.run_each(CHECKS, 2)


def closed_at_once(rank, world_size):
    """A rank that closes while another is still connecting is no failure there."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    for _ in range(60):
        with tagc.compress(model, verbose=False):
            pass


def test_closed_at_once():
    ranks.run(closed_at_once, 4)


def test_signatures():
    """What compress() takes by name, with its Options, is what Settings has, with the same defaults, at most
    14 in all; ddp_state() takes what means something there."""
    import tagc.torch as tagc
    from tagc.torch.schedule.options import Settings

    def named(function):
        return {
            p.name: p.default
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }

    def defaults(fields):
        return {field.name: field.default for field in dataclasses.fields(fields)}

    others = {"between": None, "on_step": None, "verbose": True}
    inner, outer = defaults(tagc.Options), named(tagc.compress)
    assert outer.pop("options") is None and not outer.keys() & inner.keys() and len(outer) + 3 <= 14
    assert outer | inner == defaults(Settings) | others
    not_of_ddp = {"between", "parameters"}
    assert named(tagc.ddp_state) == {
        name: value for name, value in named(tagc.compress).items() if name not in not_of_ddp
    }


def test_options_that_moved():
    """A name that compress() had is a TypeError that says where it is now, and one of a stage, too; all of
    them together are grouped. Nobody waits for other ranks."""
    import tagc.torch as tagc

    model = torch.nn.Linear(4, 4)
    for function in (functools.partial(tagc.compress, model), functools.partial(tagc.ddp_state, model)):
        for name in (field.name for field in dataclasses.fields(tagc.Options)):
            with pytest.raises(TypeError, match=f"options=tagc.Options\\({name}=...\\)"):
                function(**{name: None})
        for name in ("forward", "backward", "block"):
            with pytest.raises(TypeError, match=f"'{name}' is an option of compress_stage\\(\\)"):
                function(**{name: "int8"})
        with pytest.raises(TypeError, match="options is {}, must be a tagc.torch.Options"):
            function(options={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        tagc.Options().threads = 2
    words = {"sparsity": 0.9, "threads": 2, "exchange": "packed"}
    options = tagc.grouped(words)
    assert options == {"sparsity": 0.9, "options": tagc.Options(threads=2, exchange="packed")}
    tagc.check_options(**options)
    with pytest.raises(tagc.Error, match="threads is 0"):
        tagc.check_options(**tagc.grouped({"threads": 0}))
    assert tagc.grouped({"hosts": 2}) == {"hosts": 2}


def test_literals():
    """What a type checker takes is what is checked at run time."""
    from typing import get_args

    from tagc import _library as lib
    from tagc.torch.schedule import options, policy

    for literal, allowed in (
        (options.Values, lib.FORMATS),
        (options.Exchange, {"dense", *lib.EXCHANGES}),
        (options.Parameters, lib.GATHERS),
        (options.Class, policy.CLASSES),
        (get_args(options.Layers)[0], policy.LAYERS),
    ):
        assert set(get_args(literal)) == set(allowed)


@pytest.mark.parametrize("name, words", [("torch", "needs PyTorch"), ("numpy", "needs NumPy")])
def test_without_what_it_needs(name, words):
    script = (
        f"import sys; sys.modules['{name}'] = None\ntry: import tagc.torch\nexcept ModuleNotFoundError "
        "as missing: print(missing, missing.name)"
    )
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    assert words in said and f'pip install "tagc-train[torch]" {name}' in said, said


def test_without_torch_distributed():
    import tagc.torch as tagc

    with pytest.raises(tagc.Error, match="not initialised: call init_process_group"):
        tagc.compress(nn.Linear(3, 3))


def test_an_unknown_option_is_a_type_error():
    """Of the rank that gives it, before anything is collective: no group is needed to hear of it."""
    import tagc.torch as tagc

    model = nn.Linear(3, 3)
    for function in (tagc.compress, tagc.ddp_state, tagc.advise):
        with pytest.raises(
            TypeError, match=rf"^{function.__name__}\(\) has no option 'timeout': did you mean"
        ):
            function(model, timeout=3)
    for options, words in (
        (dict(sparsity_warmup=3), "no option 'sparsity_warmup'"),
        (dict(sparcity=0.9), "did you mean 'sparsity'.* It has sparsity, values, "),
        (dict(sparsety=0.9), "did you mean 'sparsity'"),
        (dict(zzz=3), "no option 'zzz'; it has sparsity, values"),
    ):
        for function in (functools.partial(tagc.compress, model), tagc.check_options):
            with pytest.raises(TypeError, match=words):
                function(**options)


# ---- words ----


def words_of(rank, world_size, handlers, level):
    """What compress() says: on the terminal, and to a program's own handlers."""
    import tagc.torch as tagc

    class Handler(logging.Handler):
        def emit(self, record):
            heard.append((record.name, record.levelname, record.getMessage()))

    heard, said = [], io.StringIO()
    for name in handlers:
        logging.getLogger(name).addHandler(Handler())
    if level is not None:
        logging.getLogger("tagc").setLevel(level)
    with contextlib.redirect_stdout(said):
        tagc.compress(wrapped("ddp")).close()
        tagc.compress(wrapped("ddp"), verbose=False).close()
    return said.getvalue(), heard


@pytest.mark.parametrize("handlers, level", [((), None), ((None,), None), (("tagc",), None), ((), "WARNING")])
def test_words_go_by_a_logger(handlers, level):
    (said, heard), other = ranks.run(words_of, 2, handlers, level)
    assert other == ("", [])  # rank 0 speaks
    table = "elements compressed ("
    assert (table in said) == (
        handlers != (None,) and level is None
    )  # a program's root handler gets it instead
    texts = [text for name, kind, text in heard if (name, kind) == ("tagc", "INFO")]
    assert texts == [text for _, _, text in heard] and len(texts) == len(handlers)
    assert all(table in text for text in texts)
