"""compress(), ddp_state() and param_groups(): they look at the model, agree with the other ranks on what to
do, and install hooks. check_options() and hosts_of() are for who calls compress() in another's script."""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tagc import _library
from tagc._library import Error
from tagc.torch.advise import first_words
from tagc.torch.exchange import cores, internals, streams, waits
from tagc.torch.exchange.agreement import agree_all, all_ranks, versions
from tagc.torch.exchange.hosts import Cluster
from tagc.torch.exchange.interfaces import ALONE
from tagc.torch.exchange.said import say
from tagc.torch.exchange.staging import Staging
from tagc.torch.handle import Compressed
from tagc.torch.hooks import ddp
from tagc.torch.hooks.kinds import kind_of, kinds_of
from tagc.torch.hooks.wrapper import Wrapper
from tagc.torch.schedule import adapt, policy
from tagc.torch.schedule.options import (
    Class,
    Layers,
    Options,
    Parameters,
    Settings,
    Values,
    check_known,
    spread,
)


def compress(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    sparsity: float | None = None,
    values: Values | None = None,
    gentle: bool | None = None,
    layers: Layers = "non-attention-linear",
    rules: Mapping[str, Class] | None = None,
    parameters: Parameters | None = None,
    hosts: int | None = None,
    between: dist.ProcessGroup | DeviceMesh | str | Any = None,
    timeout_s: float | None = None,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    verbose: bool = True,
    options: Options | None = None,
    **unknown: NoReturn,
) -> Compressed:
    """Makes tagc exchange the gradients of `model` from now on. Collective over the ranks that train it; call
    it between two backward passes, best before the first, on all ranks at the same place.

    Args:
        model: with fully_shard() (FSDP2), DistributedDataParallel or FullyShardedDataParallel (FSDP1).
        optimizer: of the model's parameters, or a list if several share them. An Adam then updates
            compressed parameters with a beta1 of 0.5; other optimizers are unchanged: Compressed.adapt().
            Without it tagc sends more values, as a first moment requires.
        sparsity: at least this share of each compressed gradient is not sent but added to the next one (the
            residual); [0, 1); 0 sends every value. Default: 0.95, with a gentle start. The larger, the more
            it costs in loss; given without the gentle start it costs most.
        values: format of a sent value: "fp32", "bf16", "int8", "int4" or "int2"; default "int2", "fp32" at
            sparsity 0. What rounding loses is added to the next gradient; fewer bits cost some loss.
        gentle: the gentle start: first every value is sent in 4 bits, of random weights in 8 for 60
            exchanges. A parameter changes to `sparsity` when its gradients are mostly noise. Default: if
            sparsity is not given. Without it the loss jumps at the beginning. If Adam keeps a long first
            moment, or compress() does not get the optimizer, all parameters then stay at 4 bits.
        layers: the compressed parameters: "non-attention-linear" (default), "all", "none", or a function
            (name, parameter) -> "compressed", "mild" or "dense". "all" costs more loss, by attention and
            vectors.
        rules: {pattern of names: class}, tried before `layers`.
        parameters: FSDP2: format of gathers, between hosts of several ranks: None (torch's own), "fp32",
            "bf16", "lossless" (bf16, bit for bit, in about 11 bits), "int8", or changes since the last
            gather: "delta8", "delta4", "delta2" (these take 2 bytes per parameter on every rank, on hosts of
            L ranks 2/L). "int8" rounds the weights that are computed with, and deltas of few bits lag behind
            them: both cost some loss.
        hosts: on how many hosts the ranks of the model are, as many ranks on each, in the order of ranks.
            Default: tagc finds that. Gradients are added up within each host by the model's own group, and
            compressed between hosts. If all ranks are on one host, each of them counts as a host; 1 leaves
            everything to torch, uncompressed.
        between: FSDP2 on a mesh inside each host: the process group of ranks with the same place in their
            hosts, its mesh of one dimension, or that dimension's name; tagc sums gradients over it,
            compressed, after torch's own reduce-scatter. Or torchft's Manager, where replicas of such a mesh
            join and leave.
        timeout_s: after this time a silent peer is an error. Default: the time-out of the model's process
            group, as init_process_group() got it.
        on_step: called with a dict of statistics after each backward pass.
        verbose: rank 0 says what is compressed, by the logger "tagc", which is on the terminal unless your
            program routes it.
        options: tagc.Options, with what experiments need, and what tagc else finds out by itself.

    Returns a Compressed. On failure it raises the same Error on every rank and changes nothing. An
    unknown option is a TypeError, on the rank that gives it."""
    given = dict(locals())
    check_known(compress, unknown)
    handle, wrapper = _prepare(model, between, on_step, verbose, _fields_of(given), optimizer=optimizer)
    try:
        wrapper.install(handle)
        handle.passes.prepare()
    except BaseException:
        handle.close()
        raise
    return handle


def _fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of Settings, from the options of compress()."""
    words = spread(given)
    return {field.name: words[field.name] for field in dataclasses.fields(Settings) if field.name in words}


def ddp_state(model: torch.nn.parallel.DistributedDataParallel, **options: Any) -> ddp.State:
    """Returns the state for loops that register DDP's hooks themselves, with or without one of torch's
    wrappers around them:

        state = tagc.ddp_state(model)
        model.register_comm_hook(state, tagc.ddp_hook)

    Takes the options of compress(). The handle is state.handle; pass an optimizer to state.handle.adapt()."""
    check_known(ddp_state, options.keys() - _OF_DDP.keys())
    given = {name: options.get(name, option.default) for name, option in _OF_DDP.items()}
    on_step, verbose = given.pop("on_step"), given.pop("verbose")
    return ddp.State.of(_prepare(model, None, on_step, verbose, _fields_of(given), only="ddp")[0])


_OF_DDP = {
    name: option
    for name, option in inspect.signature(compress).parameters.items()
    if option.kind is option.KEYWORD_ONLY and name not in ("parameters", "between")
}
# what help() and check_known() show
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
    """Raises what compress() raises for these options with any model. Local."""
    check_known(compress, options.keys() - inspect.signature(compress).parameters)
    Settings(**_fields_of(options))


def hosts_of(model: torch.nn.Module) -> dict[int, str]:
    """Returns, for each rank that trains `model`, what is the same for ranks of one host only. Changes
    nothing. Collective over these ranks; if compress() would not take the model, it raises that Error, whose
    status is "state" if the model is compressed already or has a communication hook of its own."""
    model, failure = internals.unwrapped(model), None
    groups: list[dist.ProcessGroup | None] = [dist.group.WORLD]
    try:
        groups = kind_of(model, None).wrapper(model, None).agreeing()
    except Exception as problem:
        failure = problem
    about = {"fresh": None, "about host": first_words.about_host()}
    hosts = _agree(groups, about, failure, None, "hosts_of()")[1]
    return {rank: about["host"] for rank, about in hosts.items()}


@dataclasses.dataclass
class _Seen:
    """What a rank sees of its model, and makes for it, before all ranks agree."""

    groups: list[dist.ProcessGroup | None]  # whose ranks are to agree
    about: dict[str, Any] = dataclasses.field(default_factory=dict)  # what all of them hear
    failure: Exception | None = None  # of this rank, of which the others have to hear, too
    wrapper: Wrapper | None = None
    cluster: Cluster | None = None
    staging: Staging | None = None

    @property
    def rows(self) -> list[policy.Row]:
        return [*self.about["rows"], *self.about["rows of one rank"]]


def _look(
    model: torch.nn.Module, between: Any, options: dict[str, Any], on_step: Any, only: str | None
) -> _Seen:
    """Returns what this rank sees. options: gets the time-out of the model's group, if it has none. Local: a
    failure is kept, not raised."""
    seen = _Seen([dist.group.WORLD if dist.is_initialized() else None])
    try:
        if seen.groups == [None] and all(kind.needs_init for kind in kinds_of(model, between)):
            all_ranks()  # raises
        if on_step is not None and not callable(on_step):
            raise Error("argument", f"on_step is {on_step!r}, must be a function of a dict")
        seen.wrapper = wrapper = kind_of(model, between, only).wrapper(model, between)
        seen.groups = wrapper.agreeing()
        if options["timeout_s"] is None:
            of_model = next(iter(wrapper.groups()), None)
            options["timeout_s"] = waits.timeout_of(of_model if wrapper.between is None else wrapper.between)
        seen.about = _describe(model, wrapper, options)
        seen.about["fresh"] = first_words.look_fresh(seen.about["rows"], policy.named_parameters(model))
        settings = Settings(**options)
        seen.cluster = _cluster(wrapper, settings)
        device = streams.of(streams.device_of(model))
        wrapper.check(settings, device is not None)
        if device is not None:
            seen.staging = Staging(device, settings.codec_on())
        elif settings.codec == "device":
            raise Error("unsupported", "codec is 'device', and the model is in CPU memory")
    except Exception as problem:
        seen.failure = problem
    return seen


def _meet(seen: _Seen, timeout_s: Any, call: str) -> tuple[bool, dict[int, Any]]:
    """Makes all ranks agree on what they see, and splits them by hosts. Returns what _agree() returns.
    Collective."""
    staging = seen.staging
    try:
        seen.about["about host"] = first_words.about_host() | {
            "is staged": staging is not None,
            "why host": "" if staging is None or staging.why_host is None else str(staging.why_host),
        }
        is_fresh, abouts = _agree(seen.groups, seen.about, seen.failure, timeout_s, call)
        wrapper, hosts = seen.wrapper, {rank: about["host"] for rank, about in abouts.items()}
        assert wrapper is not None  # or _agree() has raised
        if seen.cluster is not None:
            seen.cluster.split([*wrapper.groups(), *(wrapper.deciders() or ())], hosts)
            wrapper.cluster = seen.cluster
        _warn_of_slow_sums(wrapper, hosts)
    except BaseException:
        if staging is not None:
            staging.close()
            staging.free()
        raise
    return is_fresh, abouts


def _prepare(
    model: Any,
    between: Any,
    on_step: Callable[[dict[str, Any]], object] | None,
    verbose: bool,
    options: dict[str, Any],
    only: str | None = None,
    optimizer: Any = None,
) -> tuple[Compressed, Wrapper]:
    """Returns a Compressed without its hooks, and the wrapper that has them. Collective."""
    model = internals.unwrapped(model)
    given_s = options.get("timeout_s")
    seen = _look(model, between, options, on_step, only)
    seen.about.setdefault("options", {})["an optimizer was given to compress()"] = optimizer is not None
    call = f"{'ddp_state' if only else 'compress'}()"
    is_fresh, abouts = _meet(seen, options.get("timeout_s"), call)
    wrapper, rows = seen.wrapper, seen.rows
    assert wrapper is not None
    if options["threads"] is None:
        options["threads"] = cores.threads(seen.about["about host"], abouts.values())
    settings = Settings(**options)
    wrapper.set_kinds({row.name: {"kind": row.class_} for row in rows})
    frozen = {name for name, parameter in policy.named_parameters(model) if not parameter.requires_grad}
    handle = Compressed(model, wrapper, settings, _table(rows, settings, frozen), seen.staging, is_fresh)
    handle.passes.on_step = on_step
    handle.passes.are_all_staged = all(about["is staged"] for about in abouts.values())
    handle.passes.groups = {row.name: row.reason for row in rows}
    agreed = seen.about["versions"] | seen.about["options"] | {"classes": zlib.crc32(repr(rows).encode())}
    wrapper.connect(handle, given_s, agreed, seen.staging is None)
    if optimizer is not None:
        _adapt_together(handle, optimizer, seen.groups)
    handle.state.is_verbose = verbose
    if wrapper.speaks and internals.version() > internals.NEWEST:
        newest = ".".join(map(str, internals.NEWEST))
        warnings.warn(
            f"tagc: torch is {torch.__version__}; the newest that tagc was tested with is {newest}",
            stacklevel=3,
        )
    if verbose and wrapper.speaks:
        say(_introduction(handle, seen, abouts, is_fresh))
    return handle, wrapper


def _adapt_together(handle: Compressed, optimizer: Any, groups: list[dist.ProcessGroup | None]) -> None:
    """Adapts the optimizer, or closes the handle on all ranks if one of them cannot. Collective."""
    failure: Exception | None = None
    nothing: dict[str, Any] = {"fresh": None, "about host": None}
    try:
        try:
            handle.adapt(optimizer)
        except Exception as problem:
            failure = problem
        _agree(groups, nothing, failure, handle.state.options.timeout_s, "")
    except BaseException:
        handle.close()
        raise


def _introduction(handle: Compressed, seen: _Seen, abouts: Mapping[int, Any], is_fresh: bool) -> str:
    """Returns what compress() says: the table, when a parameter will send less, and what else there is to
    know. abouts: what each rank says of its host."""
    settings, words = handle.state.options, handle.state.moments.words
    wrapper, staging = handle.state.wrapper, seen.staging
    schedule = handle.state.schedule.words(handle.state.moments.deciding(), bool(words))
    trained = {name for name, parameter in policy.named_parameters(handle.model) if parameter.requires_grad}
    nothing = _nothing(seen.rows, settings, trained)
    lines = [nothing, words]
    if seen.cluster is not None:
        lines.append(seen.cluster.words(wrapper.groups(), streams.device_of(handle.model)))
    lines.append(_where(abouts))
    if staging is not None and any(comm.needs_python for comm in handle.passes.comms()):
        lines.append(
            "where a GPU's memory is short, an exchange may stop: its messages travel by gloo, which needs "
            "Python's lock; transport='native' needs none"
        )
    if staging is not None and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        lines.append(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: then all streams share one queue, and the model's work stands "
            "still behind each exchange; 32 lets them go on"
        )
    if not wrapper.is_elastic and settings.hosts != 1:
        exchanging = wrapper.exchanging()
        exchanging_hosts = [about for rank, about in abouts.items() if rank in exchanging]
        lines.append(
            first_words.line(exchanging_hosts, is_fresh and not nothing, settings.gentle, settings.hosts)
        )
    return "\n".join([f"{handle.table()}{schedule}", *filter(None, lines)])


def _cluster(wrapper: Wrapper, settings: Settings) -> Cluster | None:
    """Returns the hosts to look for; None where tagc's exchanges are between hosts anyway. Local."""
    if settings.hosts is not None and not wrapper.sums_within_hosts:
        raise Error("unsupported", f"hosts is {settings.hosts}, and {wrapper.why_no_hosts}: leave hosts out")
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
                stacklevel=5,  # who called compress()
            )
            return


def _describe(model: torch.nn.Module, wrapper: Wrapper, options: dict[str, Any]) -> dict[str, Any]:
    """Returns settings that must be equal on all ranks."""
    _library.load()
    settings = Settings(**options)
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
    # torch's gathers of another dtype would end the process
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    return {
        "versions": versions(),
        "options": wrapper.fingerprint()
        | settings.fingerprint()
        | {"dtype of parameters": ", ".join(dtypes)},
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


def _agree(
    groups: list[dist.ProcessGroup | None],
    about: dict[str, Any],
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
            everyone = agree_all(group, about, failure, timeout_s, call)
        except Error as problem:
            raised, failure = raised or problem, failure or problem
            continue
        known = [theirs["fresh"] for theirs in everyone if theirs["fresh"] is not None]
        about["fresh"] = all(known) if known else None
        of_group = [0] if group is None else dist.get_process_group_ranks(group)
        hosts |= {rank: theirs["about host"] for rank, theirs in zip(of_group, everyone)}
    if raised is not None:
        raise raised
    return bool(about["fresh"]), hosts


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


def _nothing(rows: list[policy.Row], settings: Settings, trained: Set[str]) -> str:
    """Returns a line on a model of which nothing is compressed, and why; "" of another. trained: names."""
    of_trained = [row for row in rows if row.name in trained]
    if settings.hosts == 1 or any(settings.is_scheduled(row.class_) for row in of_trained):
        return ""
    if not of_trained:
        return "tagc: no parameter of this model is trained, so there is nothing to exchange"
    small = [row for row in of_trained if row.reason == "small matrix"]
    why = (
        f": {len(small)} matrices, such as {small[0].name}, have fewer than {policy.MIN_ELEMS:,} elements "
        "each; rules={pattern: 'compressed'} compresses them nevertheless"
        if small
        else ""
    )
    return f"tagc: nothing of this model is compressed, every gradient travels as without tagc{why}"


def _table(rows: list[policy.Row], settings: Settings, frozen: Set[str]) -> str:
    """Returns the table of what is trained. frozen: names of what is not."""
    trained = [row for row in rows if row.name not in frozen]
    table = policy.table(trained, {kind: settings.travels(kind) for kind in policy.CLASSES})
    n_frozen = sum(row.n_elems for row in rows if row.name in frozen)
    return f"frozen, not exchanged: {n_frozen:,} elements\n{table}" if n_frozen else table
