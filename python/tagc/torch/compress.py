"""compress(), ddp_state() and param_groups(): they look at the model, agree with the other ranks on what to
do, and install hooks. check_options() and hosts_of() are for who calls compress() in another's script."""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tagc import _library
from tagc._library import Error
from tagc.torch.advise import first_words
from tagc.torch.exchange import cores, internals, streams, waits
from tagc.torch.exchange.agreement import agree_all
from tagc.torch.exchange.hosts import Cluster
from tagc.torch.exchange.interfaces import ALONE
from tagc.torch.exchange.staging import Staging
from tagc.torch.handle import Compressed
from tagc.torch.hooks import ddp, torchft
from tagc.torch.hooks.kinds import kind_of
from tagc.torch.hooks.wrapper import Wrapper
from tagc.torch.local.sites import BETWEEN, group_of
from tagc.torch.pipeline import OF_STAGES, Boundary, agree_on_stage, misplaced_option
from tagc.torch.quorum import managed
from tagc.torch.schedule import adapt, policy
from tagc.torch.schedule.options import (
    Class,
    Exchange,
    Layers,
    Mild,
    Options,
    Parameters,
    Residual,
    Values,
    unknown_option,
)


def compress(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    sparsity: float | None = None,
    gentle: bool | None = None,
    values: Values | None = None,
    layers: Layers = "non-attention-linear",
    rules: Mapping[str, Class] | None = None,
    mild: Mild | None = None,
    mild_sparsity: float | None = None,
    exchange: Exchange = "direct",
    residual: Residual | None = None,
    parameters: Parameters | None = None,
    hosts: int | None = None,
    between: dist.ProcessGroup | DeviceMesh | str | Any = None,
    codec: Literal["host", "device"] | None = None,
    transport: Literal["host", "gloo", "native"] = "host",
    threads: int | None = None,
    timeout_s: float | None = None,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    verbose: bool = True,
    forward: Boundary | None = None,
    backward: Boundary | None = None,
    block: int | None = None,
    **unknown: NoReturn,
) -> Compressed:
    """Makes tagc exchange the gradients of `model` from now on. Collective over the ranks that train it; call
    it between two backward passes, best before the first, on all ranks at the same place.

    model: with fully_shard() (FSDP2), DistributedDataParallel or FullyShardedDataParallel (FSDP1). Or a
        PipelineStage, see below.
    optimizer: of the model's parameters, or a list if several share them. An Adam then updates compressed
        parameters with a beta1 of 0.5; other optimizers are unchanged: Compressed.adapt(). Without it tagc
        sends more values, as a first moment requires.
    sparsity: at least this share of each compressed gradient is not sent but added to the next one (the
        residual); [0, 1); 0 sends every value. Not given: 0.95, with a gentle start.
    gentle: the gentle start: first every value is sent in 4 bits, of random weights in 8 for 60 exchanges. A
        parameter changes to `sparsity` or `mild_sparsity` when its gradients are mostly noise. Default: if
        sparsity is not given. If Adam keeps a long first moment, or compress() does not get the optimizer,
        all parameters then stay at 4 bits.
    values: format of a sent value, "fp32", "bf16", "int8", "int4" or "int2"; default "int2", "fp32"
        at sparsity 0.
    layers: the compressed parameters: "non-attention-linear" (default), "all", "none", or a function (name,
        parameter) -> "compressed", "mild" or "dense". rules: {pattern of names: class}, tried first.
    mild, mild_sparsity: format and sparsity of attention and positions: "dense" or one of `values`; default
        "int4" at 0.85.
    exchange: "direct" (default), "packed", "sketch" (the paper's) or "dense".
    residual: how exchange "direct" stores what was not sent between steps: "int8" (default), "int4" or
        "fp32", in 1, 0.5 or 4 bytes per value. Rounding is stochastic: what it loses is zero on
        average.
    parameters: FSDP2: format of gathers, between hosts of several ranks: None (torch's own), "fp32", "bf16",
        "lossless" (bf16, bit for bit, in about 11 bits), "int8", or changes since the last gather: "delta8",
        "delta4", "delta2" (these take 2 bytes per parameter on every rank, on hosts of L ranks 2/L).
    hosts: on how many hosts the ranks of the model are, as many ranks on each, in the order of ranks. Not
        given: tagc finds that. Gradients are added up within each host by the model's own group, and
        compressed between hosts. If all ranks are on one host, each of them counts as a host; 1 leaves
        everything to torch, uncompressed.
    between: FSDP2 on a mesh inside each host: the process group of ranks with the same place in their hosts,
        its mesh of one dimension, or that dimension's name; tagc sums gradients over it, compressed, after
        torch's own reduce-scatter. Or torchft's Manager, where replicas of such a mesh join and leave.
    codec: for gradients on a GPU: "device" (libtagc-cuda.so selects and encodes there, and only encoded bytes
        are copied), "host" (they are copied to the host and back), or None (default): "device" if possible,
        else rank 0 prints why not. Ranks may differ.
    transport: by what encoded gradients travel. "host": libtagc's own TCP connections, where many messages
        are under way at once, if every rank can; else a gloo group of tagc's own, and rank 0 prints why.
        "native" and "gloo": that one.
    threads: of the codec on the host. Not given: half of this rank's share of the cores of its host, at most
        8. Results do not depend on it. timeout_s: after this time a silent peer is an error. Not given: the
        time-out of the model's process group, as init_process_group() got it.
    on_step: called with a dict of statistics after each backward pass. verbose: rank 0 prints what is
        compressed.

    A PipelineStage of torch.distributed.pipelining, as for compress_stage(): what it sends stages on other
    hosts travels in few bits. Collective over the stage's group, on each rank once per stage, before the
    first step. It takes hosts (of the group's ranks; not given: tagc finds them, and within a host tensors
    travel whole), timeout_s, verbose and:
    forward, backward: formats of activations, rounded to the nearest, and of their gradients, rounded at
        random without bias: "int8", "int4" or "whole"; default "int8" and "int4". Integers, booleans and
        float64 travel whole.
    block: values that share a scale, a power of two from 16 to 4096; default 64.

    Returns a Compressed; of a stage, a CompressedStage. On failure it raises the same Error on every rank and
    changes nothing. An unknown option is such an Error, too."""
    given = dict(locals())
    wrong = unknown_option(compress, unknown) or misplaced_option(given, inspect.signature(compress))
    if internals.is_pipeline_stage(model):
        made: Any = agree_on_stage(model, wrong, forward, backward, block, hosts, timeout_s, verbose)
        return made  # for type checkers there is compress_stage()
    options = {field.name: given[field.name] for field in dataclasses.fields(Options)}
    handle, wrapper = _prepare(model, between, on_step, verbose, options, wrong, optimizer=optimizer)
    try:
        wrapper.install(handle)
        handle.passes.prepare()
    except BaseException:
        handle.close()
        raise
    return handle


def ddp_state(model: torch.nn.parallel.DistributedDataParallel, **options: Any) -> ddp.State:
    """Returns the state for loops that register DDP's hooks themselves, with or without one of torch's
    wrappers around them:

        state = tagc.ddp_state(model)
        model.register_comm_hook(state, tagc.ddp_hook)

    Takes the options of compress(). The handle is state.handle; pass an optimizer to state.handle.adapt()."""
    unknown = unknown_option(ddp_state, options.keys() - _OF_DDP.keys())
    given = {name: options.get(name, option.default) for name, option in _OF_DDP.items()}
    on_step, verbose = given.pop("on_step"), given.pop("verbose")
    return ddp.State.of(_prepare(model, None, on_step, verbose, given, unknown, only="ddp")[0])


_OF_DDP = {
    name: option
    for name, option in inspect.signature(compress).parameters.items()
    if option.kind is option.KEYWORD_ONLY and name not in ("parameters", "between", *OF_STAGES)
}
# what help() and unknown_option() show
ddp_state.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD), *_OF_DDP.values()]
)


def param_groups(
    model: torch.nn.Module,
    betas: tuple[float, float] | None = None,
    groups: Iterable[dict[str, Any]] | None = None,
    *,
    layers: Layers = "non-attention-linear",
    rules: Mapping[str, str] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Returns Compressed.param_groups() of a model that is not wrapped yet, for an Adam that is made before
    DDP or compress(). layers, rules: as for compress(). Pass that optimizer to compress(). Local; does not
    need torch.distributed.

    For DDP, which keeps the model's parameters. fully_shard() replaces them: call this on the sharded
    model."""
    named = list(policy.named_parameters(internals.unwrapped(model)))
    classes = {row.name: row.class_ for row in policy.classify(named, layers, rules)}
    compressed = {id(p): name for name, p in named if classes[name] == "compressed" and p.requires_grad}
    if groups is None:
        groups = [{"params": [parameter for _, parameter in named if parameter.requires_grad]}]
    return adapt.split_groups(groups, compressed, betas, options)[0]


def check_options(**options: Any) -> None:
    """Raises the Error that compress() raises for these options with any model. Local."""
    if (
        unknown := unknown_option(compress, options.keys() - inspect.signature(compress).parameters)
    ) is not None:
        raise Error("argument", unknown)
    fields = {field.name for field in dataclasses.fields(Options)}
    Options(**{name: value for name, value in options.items() if name in fields})


def hosts_of(model: torch.nn.Module) -> dict[int, str]:
    """Returns, for each rank that trains `model`, what is the same for ranks of one host only. Changes
    nothing. Collective over these ranks; if compress() would not take the model, it raises that Error, whose
    status is "state" if the model is compressed already or has a communication hook of its own."""
    model, failure = internals.unwrapped(model), None
    groups: list[dist.ProcessGroup | None] = [dist.group.WORLD]
    try:
        groups = _all_of(_wrapper(model, None, None))
    except Exception as problem:
        failure = problem
    mine: dict[str, Any] = {"versions": {}, "options": {}, "rows": [], "fresh": None}
    mine["about host"] = first_words.about_host()
    hosts = _agree(groups, mine, failure, None, "hosts_of()")[1]
    return {rank: about["host"] for rank, about in hosts.items()}


def _prepare(
    model: Any,
    between: Any,
    on_step: Callable[[dict[str, Any]], object] | None,
    verbose: bool,
    options: dict[str, Any],
    unknown: str | None,
    only: str | None = None,
    optimizer: Any = None,
) -> tuple[Compressed, Wrapper]:
    """Returns a Compressed without its hooks, and the wrapper that has them. unknown: the error text on an
    unknown option, or None. Collective."""
    model = internals.unwrapped(model)
    staging: Staging | None = None
    groups: list[dist.ProcessGroup | None] = [dist.group.WORLD if dist.is_initialized() else None]
    wrapper: Wrapper | None = None
    failure: Exception | None = None
    cluster: Cluster | None = None
    mine: dict[str, Any] = {}
    given_s = options.get("timeout_s")
    try:
        manager = torchft.manager_of(model)
        if torchft.is_manager(between):
            if manager is not None:
                raise Error(
                    "argument",
                    "between is a Manager, and torchft, which wraps the model, has one: leave between out",
                )
            manager, between = between, None
        if groups == [None] and manager is None:
            raise Error("state", "torch.distributed is not initialised: call init_process_group() first")
        if on_step is not None and not callable(on_step):
            raise Error("argument", f"on_step is {on_step!r}, must be a function of a dict")
        between = group_of(model, between)
        if between is not None and not isinstance(between, dist.ProcessGroup):
            raise Error("argument", f"between is {between!r}, must be {BETWEEN}")
        if unknown is not None:
            raise Error("argument", unknown)
        if torchft.is_managed_group(between):
            raise Error(
                "unsupported",
                "between is one of torchft's process groups: under torchft, tagc takes "
                "torchft.DistributedDataParallel, or fully_shard() with between=manager",
            )
        wrapper = _wrapper(model, between, only) if manager is None else _managed_wrapper(model, manager)
        groups = [None] if isinstance(wrapper, managed.Wrapper) else _all_of(wrapper)
        if options["timeout_s"] is None:
            of_model = None if isinstance(wrapper, managed.Wrapper) else wrapper.groups()[0]
            options["timeout_s"] = waits.timeout_of(of_model if between is None else between)
        mine = _describe(model, wrapper, options)
        mine["options"]["an optimizer was given to compress()"] = optimizer is not None
        mine["fresh"] = first_words.look_fresh(mine["rows"], policy.named_parameters(model))
        settings = Options(**options)
        cluster = _cluster(wrapper, settings)
        if wrapper.is_managed and settings.parameters is not None:
            raise Error(
                "unsupported", f"parameters is {settings.parameters!r}: under torchft it must be None"
            )
        if wrapper.is_managed and settings.transport == "native":
            raise Error(
                "unsupported",
                f"transport is {settings.transport!r}: under torchft, whose groups change, tagc takes 'host'",
            )
        if (found := streams.of(streams.device_of(model))) is not None:
            if wrapper.is_managed:
                raise Error(
                    "unsupported",
                    f"the model is on {streams.device_of(model)}: under torchft it must be in CPU memory",
                )
            staging = Staging(found, settings.codec_on())
        elif settings.codec == "device":
            raise Error("unsupported", "codec is 'device', and the model is in CPU memory")
    except Exception as problem:
        failure = problem
    try:
        why_host = "" if staging is None or staging.why_host is None else str(staging.why_host)
        mine["about host"] = first_words.about_host() | {
            "is staged": staging is not None,
            "why host": why_host,
        }
        call = f"{'ddp_state' if only else 'compress'}()"
        is_fresh, abouts = _agree(groups, mine, failure, options.get("timeout_s"), call)
        if cluster is not None and wrapper is not None:
            own = [*wrapper.groups(), *(wrapper.deciders() or ())]
            cluster.split(own, {rank: about["host"] for rank, about in abouts.items()})
            wrapper.cluster = cluster
        if wrapper is not None:
            _warn_of_slow_sums(wrapper, {rank: about["host"] for rank, about in abouts.items()})
    except BaseException:
        if staging is not None:
            staging.close()
            staging.free()
        raise
    assert wrapper is not None  # or agree_all() has raised
    if options["threads"] is None:
        options["threads"] = cores.threads(mine["about host"], abouts.values())
    settings, rows = Options(**options), mine["rows"] + mine["rows of one rank"]
    wrapper.set_kinds({row.name: {"kind": row.class_} for row in rows})
    named = list(policy.named_parameters(model))
    table = _table(rows, settings, {name for name, parameter in named if not parameter.requires_grad})
    handle = Compressed(model, wrapper, settings, table, staging, is_fresh)
    handle.passes.on_step = on_step
    handle.passes.are_all_staged = all(about["is staged"] for about in abouts.values())
    handle.passes.groups = {row.name: row.reason for row in rows}
    if isinstance(wrapper, managed.Managed):  # replicas compare options when they connect
        wrapper.start(
            given_s, mine["versions"] | mine["options"] | {"classes": zlib.crc32(repr(rows).encode())}
        )
    else:
        handle.passes.connect(is_on_host=staging is None)
    if optimizer is not None:
        try:
            try:
                handle.adapt(optimizer)
            except Exception as problem:
                failure = problem
            nothing: dict[str, Any] = {
                "versions": {},
                "options": {},
                "rows": [],
                "fresh": None,
                "about host": None,
            }
            _agree(groups, nothing, failure, settings.timeout_s, "")
        except BaseException:
            handle.close()
            raise
    handle.state.is_verbose = verbose
    if wrapper.speaks and internals.version() > internals.NEWEST:
        newest = ".".join(map(str, internals.NEWEST))
        warnings.warn(
            f"tagc: torch is {torch.__version__}; the newest that tagc was tested with is {newest}",
            stacklevel=3,
        )
    if verbose and wrapper.speaks:
        words = handle.state.moments.words
        where = _where(abouts)
        gloo = (
            "where a GPU's memory is short, an exchange may stop: its messages travel by gloo, which "
            "needs Python's lock; transport='native' needs none"
            if staging is not None and any(comm.needs_python for comm in handle.passes.comms())
            else ""
        )
        queues = (
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: then all streams share one queue, and the model's work stands "
            "still behind each exchange; 32 lets them go on"
            if staging is not None and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
            else ""
        )
        nothing_is = _nothing(rows, settings, {name for name, p in named if p.requires_grad})
        expect = (
            ""
            if wrapper.is_managed or settings.hosts == 1
            else first_words.line(
                [about for rank, about in abouts.items() if rank in wrapper.exchanging()],
                is_fresh and not nothing_is,
                settings.gentle,
                settings.hosts,
            )
        )
        split = "" if cluster is None else cluster.words(wrapper.groups(), streams.device_of(model))
        print(
            table,
            handle.state.schedule.words(handle.state.moments.deciding(), bool(words)),
            *(f"\n{text}" for text in (nothing_is, words, split, where, gloo, queues, expect) if text),
            sep="",
            flush=True,
        )
    return handle, wrapper


def _wrapper(model: Any, between: dist.ProcessGroup | None, only: str | None) -> Wrapper:
    kind = kind_of(model, between, only)
    if kind == "fsdp2":
        from tagc.torch.hooks import fsdp2

        return fsdp2.Wrapper(model, between)
    if kind == "ddp":
        return ddp.Wrapper(model)
    if kind == "simple_fsdp":
        from tagc.torch.compiled import wrapper

        return wrapper.Wrapper(model)
    from tagc.torch.hooks import fsdp1

    return fsdp1.Wrapper(model)


def _managed_wrapper(model: Any, manager: Any) -> Wrapper:
    """Returns the wrapper of a model under torchft."""
    if torchft.manager_of(model) is not None:
        return managed.Wrapper(model, manager)
    if kind_of(model, None) != "fsdp2":
        raise Error(
            "argument",
            f"between is a Manager, and this model is {kind_of(model, None)}: with a Manager tagc takes "
            "fully_shard()-ed models; wrap others in torchft.DistributedDataParallel",
        )
    from tagc.torch.quorum import fsdp2 as managed_fsdp2

    return managed_fsdp2.Wrapper(model, manager)


def _cluster(wrapper: Wrapper, settings: Options) -> Cluster | None:
    """Returns the hosts to look for; None where tagc's exchanges are between hosts anyway. Local."""
    if settings.hosts is not None and not wrapper.sums_within_hosts:
        why = (
            "tagc exchanges between torchft's replicas"
            if wrapper.is_managed
            else "between says which ranks are on other hosts"
            if wrapper.between is not None
            else f"this model is {wrapper.name}, whose gradients are not added up within hosts"
        )
        raise Error("unsupported", f"hosts is {settings.hosts}, and {why}: leave hosts out")
    if not wrapper.sums_within_hosts:
        return None
    return Cluster(wrapper.ranks(), settings.hosts, settings.timeout_s, wrapper.shares_groups)


def _warn_of_slow_sums(wrapper: Wrapper, hosts: Mapping[int, str]) -> None:
    """Warns of sums that torch makes between hosts, uncompressed. hosts: identities of ranks, where they are
    known. Local."""
    for group in wrapper.inner():
        ranks = dist.get_process_group_ranks(group)
        n_hosts = len({hosts[rank] for rank in ranks if rank in hosts})
        if n_hosts > 1 and wrapper.speaks:
            warnings.warn(
                f"tagc: torch sums gradients over {len(ranks)} ranks on {n_hosts} hosts, such as ranks "
                f"{ranks[0]} and {ranks[-1]}, uncompressed, before tagc exchanges the sums: use "
                "fully_shard() over a mesh inside each host, or over all ranks without between=",
                stacklevel=4,
            )
            return


def _describe(model: torch.nn.Module, wrapper: Wrapper, options: dict[str, Any]) -> dict[str, Any]:
    """Returns settings that must be equal on all ranks."""
    _library.load()
    settings = Options(**options)
    if settings.parameters is not None and not wrapper.gathers:
        raise Error(
            "unsupported",
            f"parameters is {settings.parameters!r}, which is for fully_shard()-ed models; this one "
            f"{'has replicate()' if wrapper.name == 'fsdp2' else f'is {wrapper.name}'}: must be None",
        )
    rows = policy.classify(_named(model, wrapper), settings.layers, settings.rules)
    why = wrapper.left_to_torch()
    if settings.hosts == 1:
        why |= {row.name: "within the host" for row in rows if row.class_ != "dense" and row.name not in why}
    rows = [row._replace(class_="dense", reason=why[row.name]) if row.name in why else row for row in rows]
    return {
        "versions": {"libtagc": _library.version(), "torch": torch.__version__},
        "options": wrapper.fingerprint() | settings.fingerprint(),
        "rows": [row for row in rows if row.reason != ALONE],
        "rows of one rank": [row for row in rows if row.reason == ALONE],  # which others need not have
    }


def _named(model: torch.nn.Module, wrapper: Wrapper) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, parameter) of all parameters, of their whole shapes. FSDP1 only has pieces; meta tensors
    of the shape that its units have replace them."""
    real: dict[str, torch.Tensor] = dict(policy.named_parameters(model))
    for parameter in wrapper.parameters():
        whole = real.get(parameter.name)
        if whole is None or not parameter.n_whole and tuple(whole.shape) != parameter.shape:
            whole = torch.empty(parameter.shape, device="meta")
        yield parameter.name, whole


def _all_of(wrapper: Wrapper) -> list[dist.ProcessGroup | None]:
    """Returns groups over which, one after the other, all ranks of the model agree. If these are all ranks,
    the world, because a rank with a wrong model does not know another group."""
    groups = wrapper.groups()
    if not groups:
        raise Error("argument", "this model has no parameters")
    world = dist.group.WORLD
    if world is not None and wrapper.n_ranks() == dist.get_world_size():
        return [world]
    return [*(wrapper.deciders() or groups[:1])]


def _agree(
    groups: list[dist.ProcessGroup | None],
    mine: dict[str, Any],
    failure: Exception | None,
    timeout_s: Any,
    call: str,
) -> tuple[bool, dict[int, Any]]:
    """Makes all ranks agree. Returns (whether the weights look fresh on all of them, {rank: what it says of
    its host}). No rank leaves before the last group has met, because others wait there. Collective."""
    hosts: dict[int, Any] = {}
    raised: Exception | None = None
    for group in groups:
        try:
            everyone = agree_all(group, mine, failure, timeout_s, call)
        except Error as problem:
            raised, failure = raised or problem, failure or problem
            continue
        known = [theirs["fresh"] for theirs in everyone if theirs["fresh"] is not None]
        mine["fresh"] = all(known) if known else None
        of_group = [0] if group is None else dist.get_process_group_ranks(group)
        hosts |= {rank: theirs["about host"] for rank, theirs in zip(of_group, everyone)}
    if raised is not None:
        raise raised
    return bool(mine["fresh"]), hosts


def _where(abouts: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns a line for each reason for which ranks with a GPU compress on the host; "" where there is none.
    abouts: what each rank says of its host."""
    reasons: dict[str, list[int]] = {}
    for rank, about in sorted(abouts.items()):
        if about["why host"]:
            reasons.setdefault(about["why host"], []).append(rank)
    lines = []
    for why, ranks in reasons.items():
        named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        who = "" if len(ranks) == len(abouts) else f" by rank{'s' if len(ranks) > 1 else ''} {named}"
        lines.append(f"compressed on the host{who}: {why}")
    return "\n".join(lines)


def _nothing(rows: list[policy.Row], settings: Options, trained: Set[str]) -> str:
    """Returns a line on a model of which nothing is compressed, and why; "" of another. trained: names."""
    own = [row for row in rows if row.name in trained]
    if settings.hosts == 1 or any(settings.is_scheduled(row.class_) for row in own):
        return ""
    if not own:
        return "tagc: no parameter of this model is trained, so there is nothing to exchange"
    small = [row for row in own if row.reason == "small matrix"]
    why = (
        f": {len(small)} matrices, such as {small[0].name}, have fewer than {policy.MIN_ELEMS:,} elements "
        "each; rules={pattern: 'compressed'} compresses them nevertheless"
        if small
        else ""
    )
    return f"tagc: nothing of this model is compressed, every gradient travels as without tagc{why}"


def _table(rows: list[policy.Row], settings: Options, frozen: Set[str]) -> str:
    """Returns the table of what is trained. frozen: names of what is not."""
    trained = [row for row in rows if row.name not in frozen]
    table = policy.table(trained, {kind: (settings.travels(kind), None) for kind in policy.CLASSES})
    n_frozen = sum(row.n_elems for row in rows if row.name in frozen)
    return f"frozen, not exchanged: {n_frozen:,} elements\n{table}" if n_frozen else table
