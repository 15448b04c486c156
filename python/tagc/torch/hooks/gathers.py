"""FSDP2's all-gathers through libtagc, and the replicas that gathers of deltas keep.

In two levels a rank gathers the rows of its place from all hosts, compressed, and then all ranks of its host
give each other what came, whole, by the caller's backend. So a replica has the rows of one place.

A replica is what a gather left on every rank: the bf16 values of a module's parameters. The next delta is a
difference to it, so it is part of a checkpoint. Each rank saves the row of it that it owns. The first gather
after loading puts the rows together again, by a gather of whole bf16 values that changes none of them, and
goes on from there."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tagc.torch.exchange import internals, waits
from tagc.torch.exchange.comm import Comm, agree_in_turn
from tagc.torch.exchange.gatherer import Gatherer, as_error
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.interfaces import Replica
from tagc.torch.exchange.model import DTYPES, check_tensors
from tagc.torch.exchange.staging import Failure, Kernels, Staging
from tagc.torch.handle import Compressed
from tagc.torch.hooks.replicas import CHANGED, RESET, Gathers, checksum, fingerprint
from tagc.torch.hooks.wrapper import Wrapper
from tagc.torch.passes import Passes

_LOADED, _FITS, _COUNT = 4, 8, 16  # further bits of a vote; the number of gathers is above them
_LOOKS = 64  # at values of a parameter, to see whether an optimizer left it so

Key = tuple[tuple[int, ...], int]  # ranks, and elements that one of them owns


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


class Gathering(NamedTuple):
    """One all-gather of one module. comm: over which tagc gathers. within: the connection of the ranks of
    this host, in two levels. runs_beside: whether an exchange of gradients may be under way."""

    comm: Comm
    within: Comm | None
    group: dist.ProcessGroup
    runs_beside: bool

    def within_host(self, came: torch.Tensor) -> tuple[int, int]:
        """Returns how many ranks a host has, and the bytes that each sends to the others, which get what came
        from the hosts."""
        if self.within is None:
            return 1, 0
        n_others = self.within.world_size - 1
        return 1 + n_others, n_others * came.nbytes + 2 * self.within.agreement_bytes


def _one_of(votes: Sequence[int]) -> int:
    """Returns one vote for many: loaded replicas fit if those of all ranks do."""
    asked, about_loaded = 0, {vote & ~(CHANGED | RESET) for vote in votes}
    for vote in votes:
        asked |= vote & (CHANGED | RESET)
    if any(vote & _LOADED for vote in about_loaded):
        return asked | (about_loaded.pop() if len(about_loaded) == 1 else _LOADED)
    return asked


class AllGather(waits.FsdpComm):
    """For set_custom_all_gather(): one per module. With deltas every rank keeps a replica of the parameters
    of the module, and a second gather of the same values (backward after forward) sends nothing at all."""

    def __init__(
        self,
        passes: Passes,
        name: str,
        owned: tuple[dist.ProcessGroup, int, Callable[[], list[torch.Tensor]]],
        wire: str,
        tag: int,
        may_run_beside: bool = True,
        seed: int | None = None,
    ) -> None:
        """owned: the ranks over which the module is sharded, how many elements one of them owns, and what
        gives these. may_run_beside: an exchange of gradients. seed: as of a Gatherer."""
        self.name, self.is_delta = name, wire.startswith("delta")
        self._passes, self._wire, self._tag, self._own = passes, wire, tag, owned[2]
        self._may_run_beside, self._seed = may_run_beside, seed
        self._key: Key = _ranks(owned[0]), owned[1]
        self._hosts = passes.state.wrapper.hosts(owned[0])
        self._gathers: dict[Key, Gathers] = {}
        self._loaded: Replica | None = None  # until the next gather
        self._left: list[torch.Tensor] | None = None  # values that the last step of an optimizer left

    @property
    def _wants_kernels(self) -> bool:
        """Whether gathers of deltas work on the device: where the user has asked for that, since replicas
        then take 2 bytes per parameter there."""
        return self._passes.state.options.codec == "device" and self.is_delta

    def prepare(self, staging: Staging, itemsize: int) -> None:
        """Takes the memory of a gather of tensors on a device before the first one: gatherer and replica, or
        pinned memory. itemsize: bytes of an element. Collective."""
        hosts, n_elems = self._hosts, self._key[1]
        failure: BaseException | None = None
        if hosts.is_one or self._key in self._gathers:
            return
        comm = self._passes.comm(hosts.between)
        kernels = staging.kernels if self._wants_kernels else None
        try:
            if kernels is None:
                staging.reserve(itemsize * n_elems, itemsize * n_elems * comm.world_size)
        except RuntimeError as problem:
            failure = as_error(problem)
        comm.agree(f"memory for parameters of {self.name}", {"elements": n_elems}, failure)
        gather = self._gathers[self._key] = Gathers(self.is_delta)
        gather.gatherer = self._make(comm, n_elems * comm.world_size, kernels)
        if kernels is not None:
            gather.reserve(kernels.device)

    def _make(
        self, comm: Comm, n_elems: int, kernels: Kernels | None, keeps_replica: bool = True
    ) -> Gatherer:
        """Returns a new gatherer. keeps_replica: with deltas. Collective."""
        n_threads, wire = self._passes.state.options.threads or 1, self._wire
        if self.is_delta and not keeps_replica:
            wire = "lossless"
        return Gatherer(comm, n_elems, wire, self._tag, n_threads, kernels, self._seed)

    def _keeps_replica(self, ranks: tuple[int, ...]) -> bool:
        """Returns whether gathers over these ranks keep one. What a forward pass has left on a few ranks is
        gathered as it is: as a delta it would lag, and the backward pass compute with other values."""
        return self.is_delta and ranks == self._key[0]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        timeout_s = self._passes.state.options.timeout_s
        hosts = self._hosts_of(group)
        if hosts.is_one:
            return internals.all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        passes, within = self._passes, None
        came = output_tensor
        if hosts.within is not None:
            within = passes.comm(hosts.within)
            came = output_tensor.new_empty(hosts.n_hosts * input_tensor.numel())
        staging, why_not = passes.runners.find(input_tensor)
        failure: BaseException | None = why_not
        try:
            check_tensors(input_tensor, output_tensor, "parameters")
        except Exception as problem:
            failure = failure or problem
        # an exchange of gradients may go on meanwhile, unless it needs the ranks of this host, too
        runs_beside = staging is None and within is None and self._may_run_beside
        comm = passes.gather_comm(hosts.between) if runs_beside else passes.comm(hosts.between)
        perform = functools.partial(self._gather, Gathering(comm, within, group, runs_beside))
        if not runs_beside:
            passes.model_exchanges.settle()
        if staging is not None:
            wants_kernels = self._wants_kernels and self._keeps_replica(_ranks(group))
            staging.run(perform, input_tensor, came, failure, wants_kernels)
        else:
            passes.runners.finish()  # of tensors on a device, if there are any
            perform(None, input_tensor, came, failure)
        if within is not None:
            what = f"parameters of {self.name}"
            rows = output_tensor.view(hosts.n_hosts, -1), came.view(hosts.n_hosts, -1)
            hosts.collectives(within, came.device, what, timeout_s).gather_rows(*rows)
        return None

    def _hosts_of(self, group: dist.ProcessGroup) -> Hosts:
        """Returns the hosts of a group of an all-gather: that of the module, or after a forward pass that
        left parameters in pieces (reshard_after_forward), a smaller one."""
        ranks, cluster = _ranks(group), self._passes.state.wrapper.cluster
        if ranks == self._key[0]:
            return self._hosts
        if cluster is not None and self._hosts.per_host > 1 and cluster.n_hosts(ranks) == 1:
            return Hosts(group, group, group.rank(), 1, group.size(), is_on_one_host=True)
        return Hosts.flat(group)

    def _gather(
        self,
        call: Gathering,
        kernels: Kernels | None,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        failure: Failure,
    ) -> None:
        """Gathers, as staging.Perform says."""
        comm = call.comm
        gather, loaded, vote, found, numbers = None, None, 0, "", {}
        try:
            if failure is None and source is not None:
                key = _ranks(call.group), source.numel()
                gather = self._gathers.setdefault(key, Gathers(self._keeps_replica(key[0])))
                loaded = self._loaded if key == self._key else None
                vote, found = gather.vote(source) if loaded is None else self._vote_loaded(loaded, source)
                numbers = {"elements": source.numel(), "dtype": DTYPES.index(source.dtype)}
                if vote == CHANGED:
                    self._look_for_others()
        except Exception as problem:
            failure = problem
        begin, what = time.perf_counter(), f"parameters of {self.name}"
        # over the ranks of the host, of which one may have failed, and then over those of this place
        vote = agree_in_turn((call.within, comm), what, numbers, failure, vote, _one_of)
        agreed = time.perf_counter()
        assert gather is not None and source is not None and target is not None  # or agree() has raised
        n_begun = 0 if gather.gatherer is None else gather.gatherer.n_begun
        try:
            # that exchange has the lock, and nothing else changes what is needed here
            with contextlib.nullcontext() if call.runs_beside else self._passes.state.lock:
                if gather.gatherer is None:
                    keeps_replica = self._keeps_replica(_ranks(call.group))
                    gather.gatherer = self._make(comm, target.numel(), kernels, keeps_replica)
                asked = self._take_up(gather, kernels, source, vote, found)
                sent, received = comm.bytes_sent()["gather"], comm.bytes_received()["gather"]
                gather.run(source, target, kernels, asked, found)
                n_bytes = comm.bytes_sent()["gather"] - sent, comm.bytes_received()["gather"] - received
                seconds = time.perf_counter() - agreed, agreed - begin
                self._passes.recorder.add_gather(
                    comm, target.numel(), n_bytes, seconds, *call.within_host(target)
                )
        except Exception as problem:
            failure = as_error(problem)
            if gather.gatherer is not None and gather.gatherer.n_begun == n_begun:
                gather.gatherer.fail(failure)  # or the others would wait for its row
        if call.within is not None:  # whose ranks would wait for this one's rows
            call.within.agree(what, {}, failure)
        elif failure is not None:
            raise failure

    def _take_up(
        self, gather: Gathers, kernels: Kernels | None, source: torch.Tensor, vote: int, found: str
    ) -> int:
        """Puts the replica together that was loaded. Collective. Returns what of the vote counts for the
        gather itself."""
        asked = vote & (CHANGED | RESET)
        if vote & _LOADED:
            loaded, self._loaded = self._loaded, None
            if vote & _FITS:
                assert loaded is not None
                gather.restore(loaded, source, kernels)
                gather.sent = found
            else:
                asked |= RESET
                self._passes.state.say_once(
                    "tagc: parameters are not those that were saved with the replicas of deltas, on some "
                    "rank: the next gather sends them whole"
                )
        return asked

    def _vote_loaded(self, loaded: Replica, source: torch.Tensor) -> tuple[int, str]:
        changed = fingerprint(source, loaded.sent) != loaded.sent
        fits = checksum(self._own()) == loaded.parameters
        vote = (CHANGED if changed else 0) | _LOADED | (_FITS if fits else 0) | loaded.n_gathers * _COUNT
        return vote, fingerprint(source)

    def _look(self) -> list[torch.Tensor]:
        return [own.flatten()[:: max(1, own.numel() // _LOOKS)].clone() for own in self._own()]

    def stepped(self, is_watched: bool) -> None:
        """Notes that an optimizer has changed parameters. is_watched: whether to compare what it leaves.
        Local."""
        self._left = self._look() if is_watched and self.is_delta else None

    def _look_for_others(self) -> None:
        """Warns if what is to be gathered as changes is not what an optimizer left."""
        left, self._left = self._left, None
        if left is not None and not all(map(torch.equal, left, self._look())):
            self._passes.state.warn_once(
                "tagc: something other than the optimizer has changed parameters, and deltas of few bits "
                "follow only small changes: all ranks compute with values that are not yet these. Call "
                "handle.reset_parameters() after such a change, as averaged weights for an evaluation are"
            )

    def replica_tensors(self) -> list[torch.Tensor]:
        """Returns the replicas that are kept."""
        return [gather.memory for gather in self._gathers.values() if gather.memory is not None]

    def reset(self) -> None:
        """Makes all parameters travel next time, because they were changed from outside."""
        self._loaded = None
        for gather in self._gathers.values():
            gather.wants_reset = True

    def loaded(self) -> None:
        """Notes that parameters were loaded: whether they are those of a replica that was loaded, or those
        that this rank gave last, the next gather sees."""
        for gather in self._gathers.values() if self._loaded is None else ():
            gather.was_loaded = True

    # ---- for checkpoints ----

    def replica(self) -> Replica:
        """Returns the state for a checkpoint. Local; changes nothing."""
        if self._loaded is not None:
            return self._loaded._replace(row=self._loaded.row.clone())
        gather = self._gathers.get(self._key)
        row, n_gathers = (None, 0) if gather is None else gather.row(self._hosts.host)
        if row is None or gather is None:
            return Replica(torch.zeros(self._key[1], dtype=torch.bfloat16, device="cpu"), 0, "", "")
        return Replica(row, n_gathers, gather.sent, checksum(self._own()))

    def set_replica(self, replica: Replica | None) -> None:
        """Loads a replica for the next gather; None: that sends whole parameters. Local."""
        self.reset()
        if replica is not None and replica.n_gathers:
            self._loaded = replica._replace(row=replica.row.detach().cpu().to(torch.bfloat16).clone())
            if self._key in self._gathers:
                self._gathers[self._key].wants_reset = False

    @property
    def n_shard(self) -> int:
        return self._key[1]

    def close(self) -> None:
        for gather in self._gathers.values():
            gather.close()
        self._gathers, self._loaded = {}, None


class GatheringWrapper(Wrapper):
    """A wrapped model whose parameters tagc may gather."""

    _gathers: list[AllGather]

    def follow_parameters(self, handle: Compressed) -> None:
        """Notes from now on when the model's parameters are loaded, and when an optimizer changes them.
        Local."""
        if self._gathers:
            loaded = self._model.register_load_state_dict_post_hook(lambda *_: self._parameters_loaded())
            handle.passes.undo.append(loaded.remove)
        if self.deltas():
            own = weakref.ref(self)  # torch's list of hooks keeps nothing of a model that is dropped

            def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
                if (wrapper := own()) is not None:
                    wrapper._stepped(optimizer)

            hook = register_optimizer_step_post_hook(stepped)
            weakref.finalize(self, hook.remove)
            handle.passes.undo.append(hook.remove)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Optimizers of few parameters each, as in a backward pass that updates, are too many to look
        after."""
        own = {id(parameter) for parameter in self._model.parameters() if parameter.requires_grad}
        n = sum(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
        for gather in self._gathers if n else ():
            gather.stepped(is_watched=8 * n >= len(own))

    def _parameters_loaded(self) -> None:
        for gather in self._gathers:
            gather.loaded()

    def deltas(self) -> dict[str, AllGather]:
        return {gather.name: gather for gather in self._gathers if gather.is_delta}
