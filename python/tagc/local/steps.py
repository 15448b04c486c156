"""LocalSteps: sites train by themselves for some steps, and then exchange how far their parameters moved.

    step, step, step, ...   each site's own; its ranks exchange gradients among themselves as they do without
                            tagc
    a fragment is due       sites meet; Flight.begin(): base - parameter; the reducers of libtagc start, and
                            run on threads of their own
    `delay` steps later     sites meet; the reducers end; all ranks agree that all have it; the outer step;
                            parameters change

Each site counts its own steps. Sites meet before an exchange and say what they have come for: a fragment that
is due, or synchronize(). One in synchronize() takes part in what is due elsewhere until all sites are in it.
So a site may have fewer batches, or a step that its loss scaler skipped.

Whatever fails is agreed upon before anything changes, so that all sites raise at the same exchange. The
agreement has connections of its own: over that of the reducers it would wait for fragments under way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tagc import _library as lib
from tagc._library import LOST, Error
from tagc.local import state as local_state
from tagc.local.fragments import Flight, Fragment, Stats, cut, zeros
from tagc.local.options import Settings
from tagc.local.sites import Exchanges, Others, Site
from tagc.local.statistics import Recorder
from tagc.torch.extension import (
    Class,
    Comm,
    Held,
    Layers,
    Memory,
    Values,
    agree_all,
    all_ranks,
    check_known,
    count,
    group_of,
    inner,
    policy,
    say,
    timeout_of,
    unwrapped,
    versions,
)

BEGINS, LANDS, SYNCHRONIZES = range(3)  # what a site comes for
# what users call; other names without an underscore are for those who know sites that join and leave
_FOR_USERS = "close is_closed load_state_dict memory model n_exchanges n_steps on_exchange state_dict stats"
_FOR_USERS += " synchronize table"
_made: weakref.WeakSet[LocalSteps] = weakref.WeakSet()
_DOES = ("begins fragment {}", "applies fragment {}", "synchronizes")


class Call(NamedTuple):
    """What a site has come for. step: that it has taken; of LANDS, when the fragment began."""

    kind: int
    step: int
    fragment: int = 0

    def vote(self) -> int:
        return (self.step << 21 | self.fragment) << 2 | self.kind

    @staticmethod
    def of(vote: int) -> Call:
        return Call(vote & 3, vote >> 23, vote >> 2 & 2**21 - 1)

    def __str__(self) -> str:
        return f"{_DOES[self.kind].format(self.fragment)} of step {self.step}"


class LocalSteps:
    """Sites that each train `model` by themselves, and exchange how far their parameters moved every `every`
    steps:

        handle = LocalSteps(model, optimizer, every=30)

    The loop stays as it is: optimizer.step() does the rest. Collective over the ranks of all sites, after
    wrapping. Sites begin with the same parameters. Each counts the steps that its optimizer takes: one that a
    loss scaler skips does not count. A site that has no more batches calls synchronize().

    model: plain (each process is a site), DistributedDataParallel over the ranks of a site, or
        fully_shard()-ed over them.
    optimizer: of the model's parameters, or a list where several share them, stepped in that order. What they
        do not step is left alone, and so are buffers: each site has its own.
    between: the group of the ranks that have the same place in their sites, its mesh of one dimension, or
        that dimension's name, as "site"; all ranks where the model is plain.
    manager: where sites join and leave, who knows them: tagc.quorum.Sites(torchft's Manager); then between
        and delay are left out.
    every: steps between two exchanges of a parameter, from 1 on.
    fragments: parts of the model, [1, every]; one is exchanged every every / fragments steps.
    delay: steps, [0, every - 1], after which what was exchanged is applied; training goes on meanwhile.
    outer_lr, outer_momentum: of the outer step, SGD with Nesterov's momentum, (0, 10] and [0, 1). 1 and 0 put
        the mean of all sites' parameters in place; DiLoCo has 0.7 and 0.9.
    residual_decay: what residuals are multiplied with after each exchange, [0, 1]; SparseLoCo has 0.95.
    sparsity, values, layers, rules: what is sent, as of compress(); by default every value in 4 bits.
        Attention and positions ("mild") travel as all that is compressed does. sparsity=0, values="fp32"
        sends everything and leaves no residual. With a sparsity above 0 a site keeps in its parameters what
        it does not send, so sites differ between exchanges, until synchronize() sends every value. With a
        residual_decay below 1, a gate or a manager that waits in the residual, and sites are alike.
    gate: "bf16" holds back, in the residual, what is below half a unit in the last place of its weight in
        bf16, because alone it would change no weight. The rest is sent, with a sparsity its largest values.
        PULSELoCo's rule, for small learning rates: the fewer weights change, the fewer bytes travel.
    threads: of the codec. timeout_s: after which a silent site is an error. Not given: the time-out of the
        group between sites, as init_process_group() got it; 300 with a manager.
    on_exchange: called with stats() after each exchange. verbose: rank 0 prints what is compressed.

    Raises the same Error on every rank. A name that is none of these is a TypeError, on the rank that gives
    it."""

    is_closed = True  # until it is made

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        every: int = 30,
        fragments: int = 1,
        delay: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        residual_decay: float = 1.0,
        sparsity: float = 0.0,
        values: Values = "int4",
        gate: Literal["bf16"] | None = None,
        layers: Layers = "non-attention-linear",
        rules: Mapping[str, Class] | None = None,
        between: dist.ProcessGroup | DeviceMesh | str | None = None,
        manager: Others | None = None,
        threads: int = 1,
        timeout_s: float | None = None,
        on_exchange: Callable[[dict[str, Any]], object] | None = None,
        verbose: bool = True,
        **unknown: NoReturn,
    ) -> None:
        given = dict(locals())
        chosen = {field.name: given[field.name] for field in dataclasses.fields(Settings)}
        check_known(LocalSteps, unknown)
        self.model: torch.nn.Module = unwrapped(model)
        self.on_exchange, self._verbose = on_exchange, verbose
        self.n_steps = self.n_exchanges = 0  # of the optimizer; exchanges of a fragment
        self._n_own_steps = 0  # since this handle was made
        self.lock = threading.RLock()
        self.is_open = False  # whether there is an anchor, and all sites have the same
        self.has_anchor = False
        # whether a backward pass went before the optimizers' next step; whether that is one that counts
        self._has_gradients = self._counts = False
        self._failure: Exception | None = None
        self._n_control, self._meet_s = 0, 0.0  # bytes of agreements, and waits, since the last exchange
        self._process = os.getpid()
        self.flying: list[Flight] = []  # in the order in which they began
        # of fragments; then those over which sites, and the ranks of a site, agree
        self._comms: list[Comm] = []
        self.managed: Exchanges | None = None  # where sites join and leave
        self.fragments: list[Fragment] = []
        agreed = self._prepare(optimizer, between, manager, chosen)
        rows, self._due = agreed["rows"], self.settings.due()
        self.table = policy.table(rows, {"compressed": self.settings.travels(), "dense": "dense"})
        kinds, trained = {row.name: row.class_ for row in rows}, self.site.trained
        for i, members in enumerate(cut([one.parameter.numel() for one in trained], fragments)):
            parameters = trained[members.start : members.stop]
            self.fragments.append(Fragment(i, parameters, kinds, self.site, self.settings))
        n_elems = max(fragment.n_elems for fragment in self.fragments)
        is_delayed = delay > 0 or manager is not None  # a site that joins may be further than the others
        self.free_flights = [Flight(n_elems, is_delayed) for _ in range(self.settings.n_flights())]
        self._recorder = Recorder(sum(fragment.n_real for fragment in self.fragments))
        try:
            if manager is None:
                within = [group for group in self.site.inner if group.size() > 1]
                for group in (self.site.between, self.site.between, *within):
                    self._comms.append(Comm(group, self.settings.timeout_s))
                self.connect(self._comms[0])
            else:
                about = {"classes": zlib.crc32(repr(rows).encode())}
                self.managed = manager.join(self, agreed["versions"] | agreed["options"] | about)
        except BaseException:
            self._free()
            raise
        self.is_closed = False
        _made.add(self)
        optimizers = self.site.optimizers
        self._hooks = [one.register_step_pre_hook(self._before_one) for one in optimizers]
        self._hooks.append(optimizers[-1].register_step_post_hook(lambda *_: self._after_one()))
        self._hooks += [
            one.parameter.register_post_accumulate_grad_hook(self._see_gradient) for one in trained
        ]
        self.say(f"{self.table}\ntagc: {self._words()}")

    # ---- making it ----

    def _prepare(
        self, optimizer: Any, between: Any, manager: Others | None, chosen: dict[str, Any]
    ) -> dict[str, Any]:
        """Sets self.settings and self.site; Error on all ranks where one of them cannot, or has others.
        Returns what they agree on."""
        failure: Exception | None = None
        groups: list[Any] = [dist.group.WORLD if dist.is_initialized() else None]
        agreed: dict[str, Any] = {}
        try:
            if manager is not None and not isinstance(manager, Others):
                raise Error(
                    "argument",
                    f"manager is a {type(manager).__name__}, must have check() and join(), as "
                    "tagc.quorum.Sites(manager)",
                )
            if manager is not None:
                manager.check(optimizer, between, chosen["delay"])
            else:
                all_ranks()  # or that raises
            between = group_of(self.model, between)
            if self.on_exchange is not None and not callable(self.on_exchange):
                raise Error("argument", f"on_exchange is {self.on_exchange!r}, must be a function of a dict")
            lib.load()
            if chosen["timeout_s"] is None:
                chosen["timeout_s"] = timeout_of(between or (groups[0] if manager is None else None))
            self.settings = Settings(**chosen)
            site = self.site = Site(self.model, inner(optimizer), between, manager is not None)
            at_work = [other for other in list(_made) if not other.is_closed and other._failure is None]
            taken = {id(one.parameter) for other in at_work for one in other.site.trained}
            if any(id(one.parameter) in taken for one in site.trained):
                raise Error("state", "this model has LocalSteps already: close() them first")
            if manager is not None:
                groups = site.inner or [None]
            elif site.n_sites * site.n_inner != dist.get_world_size():
                groups = [site.between, *site.inner]
            named = ((one.name, one.parameter) for one in site.trained)
            rows = [
                row._replace(class_="compressed") if row.class_ == "mild" else row
                for row in policy.classify(named, self.settings.layers, self.settings.rules)
            ]
            if self.settings.fragments > len(rows):
                raise Error(
                    "argument",
                    f"fragments is {self.settings.fragments}, and the model has {len(rows)} parameters: must "
                    "be at most as many",
                )
            where = {"kind of model": site.kind, "sites": site.n_sites, "ranks of a site": site.n_inner}
            agreed = {"versions": versions(), "rows": rows, "options": self.settings.fingerprint() | where}
        except Exception as problem:
            failure = problem
        for group in groups:
            try:
                agree_all(group, agreed, failure, chosen["timeout_s"], "LocalSteps()")
            except Exception as problem:
                failure = problem
        if failure is not None:
            raise failure
        return agreed

    def connect(self, comm: Comm) -> None:
        """Makes the exchanges of fragments; again for each set of sites, where these join and leave. comm: to
        the other sites. Collective."""
        within = self._comms[2] if self.site.n_slices > 1 else None
        for fragment in self.fragments:
            fragment.connect(comm, within, "avg" if self.managed is None else "sum")
        self.site.n_sites, self.site.site = comm.world_size, comm.rank

    # ---- what the optimizer's hooks call ----

    def _see_gradient(self, parameter: torch.Tensor) -> None:
        self._has_gradients = True

    def _before_one(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """A step without a backward pass and with gradients of zeros is none of training: torch's
        get_optimizer_state_dict() makes an optimizer's state by one."""
        self._counts = self._has_gradients or any(
            bool(parameter.grad.any())
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
        if self._counts:
            self._before_step()

    def _after_one(self) -> None:
        if self._counts:
            self._has_gradients = False
            self._after_step()

    def _before_step(self) -> None:
        if not self.is_open:
            with self.lock:
                self._open()

    def _after_step(self) -> None:
        with self.lock:
            self._check_usable()
            self.n_steps += 1
            self._n_own_steps += 1
            step = self.n_steps  # an exchange may change it to that of other sites
            self._land()
            for fragment, due in zip(self.fragments, self._due):
                if step % self.settings.every != due:
                    continue
                if self.managed is not None:
                    self.managed.run(fragment)
                else:
                    self._meet(Call(BEGINS, self.n_steps, fragment.index))
                    self._begin(fragment)
            self._land()

    def _land(self) -> None:
        """Applies what is due. Where it began some steps ago, sites meet for it."""
        while self.flying and self.flying[0].step + self.settings.delay <= self.n_steps:
            flight = self.flying[0]
            if self.settings.delay:
                self._meet(Call(LANDS, flight.step, flight.fragment.index))
            self._finish()

    @torch.no_grad()
    def _open(self) -> None:
        """Makes sure that all sites have the same anchor, before the first step and the first one after
        load_state_dict()."""
        self._check_usable()
        if not self.has_anchor:
            for fragment in self.fragments:
                fragment.take_anchor()
        if self.managed is not None:
            self.has_anchor = True
            while not self.managed.run(None):
                pass
            self.is_open = True
            return
        numbers = {
            "checksums": [fragment.checksum() for fragment in self.fragments],
            "exchanges": self.n_exchanges,
            "under way": [(flight.fragment.index, self.n_steps - flight.step) for flight in self.flying],
        }
        what = (
            "what sites begin with, which must be the same: load one checkpoint on all of them, or seed them "
            "alike"
        )
        self._agree(what, numbers)
        self.is_open = self.has_anchor = True
        self._n_control = 0
        for i, flight in enumerate(self.flying):
            self._launch(flight, self.n_exchanges - len(self.flying) + i + 1)

    # ---- an exchange ----

    def _meet(self, mine: Call) -> list[Call]:
        """Returns what each site has come for. Error if two have come for different fragments."""
        begin = time.perf_counter()
        what = f"exchange {self.n_exchanges - len(self.flying) + 1} between sites"
        with self._giving_up():
            votes = self._agree(what, {}, vote=mine.vote())
        self._meet_s += time.perf_counter() - begin
        calls = [Call.of(vote) for vote in votes]
        due = [(site, call) for site, call in enumerate(calls) if call.kind != SYNCHRONIZES]
        for site, call in due:
            if call != due[0][1]:
                raise Error(
                    "mismatch",
                    f"{what}: site {due[0][0]} {due[0][1]}, and site {site} {call}: load one checkpoint on "
                    "all sites",
                )
        return calls

    @torch.no_grad()
    def _begin(self, fragment: Fragment, is_whole: bool = False) -> None:
        """Begins an exchange, for which sites have met."""
        flight = self.free_flights.pop()
        flight.begin(fragment, self.n_steps)
        self.flying.append(flight)
        self.n_exchanges += 1
        self._launch(flight, self.n_exchanges, is_whole)

    def _launch(self, flight: Flight, number: int, is_whole: bool = False) -> None:
        """Launches a flight. The other sites hear of a failure when it is applied."""
        try:
            self.site.check_trained()
        except Error as problem:
            flight.failure = problem
        try:
            flight.fragment.send(is_whole)
            flight.launch(number)
        except Error as problem:
            self._comms[0].abort(str(problem))
            flight.failure = problem

    @torch.no_grad()
    def _finish(self) -> None:
        """Waits for the exchange that began first, and applies it on all ranks or on none."""
        begin = time.perf_counter()
        flight = self.flying.pop(0)
        index, number = flight.fragment.index, self.n_exchanges - len(self.flying)
        meet_s, self._meet_s = self._meet_s, 0.0
        try:
            with self._giving_up():
                stats = self._outcome(flight)
                waited = time.perf_counter()
                self._agree(f"exchange {number} between sites", {"fragment": index}, flight.failure)
        except BaseException:
            flight.undo()
            raise
        finally:
            self.free_flights.append(flight)
        agree_s = time.perf_counter() - waited
        is_now = flight.step == self.n_steps
        self.land(flight, is_now, stats, number, wait_s=waited - begin + meet_s, agree_s=agree_s)

    def _outcome(self, flight: Flight) -> Stats:
        """Waits for an exchange. What went wrong, if anything did, is its failure. Collective."""
        stats: Stats = []
        try:
            stats = flight.end()
        except Error as problem:
            flight.failure = flight.failure or problem
        if any(part.nonfinite for _, part in stats):  # on all sites; who caused it fails alone, by name
            is_mine = not flight.is_finite()
            is_of_one = any(map(any, self._comms[1].all_gather(bytes([is_mine]))))
            if flight.failure is None and (is_mine or not is_of_one):
                whose = "what this site adds to" if is_mine else "the mean of"
                text = f"{whose} fragment {flight.fragment.index} is not finite; nothing was changed"
                flight.failure = Error("state", text)
        return stats

    @torch.no_grad()
    def land(self, flight: Flight, is_now: bool, stats: Stats, number: int, **seconds: float) -> None:
        """Takes the outer step, after exchange `number`, which counts on all sites."""
        fragment = flight.fragment
        fragment.decay_residual()
        fragment.apply(flight, is_now)
        n_control, self._n_control = self._n_control, 0
        if self.managed is not None:
            self.n_exchanges, n_control = number, self.managed.connection().agreement_bytes
        said = self._recorder.add(
            stats,
            self.site.n_sites,
            self._n_own_steps,
            n_control,
            exchanges=number,
            fragment=fragment.index,
            step=self.n_steps,
            begun=flight.step,
            n_elems=fragment.n_real,
            **seconds,
        )
        if self.on_exchange is not None:
            self.on_exchange(said)

    def _agree(
        self, what: str, numbers: Mapping[str, Any], failure: Exception | None = None, vote: int = 0
    ) -> list[int]:
        """Returns the vote of each site. Raises on all ranks where one has a failure, or other numbers than
        its peers. Collective over all ranks."""
        votes: list[int] = []
        comms = self._comms[1:]
        self._n_control += sum(comm.agreement_bytes for comm in comms)
        for i, comm in enumerate(comms):
            if (
                isinstance(failure, Error) and failure.status in LOST
            ):  # for whom it waited, these need not, too
                comm.abort(str(failure))
                continue
            try:
                if i == 0:
                    votes = comm.agree(what, numbers, failure, vote)
                else:
                    comm.agree("within this site", {"call": vote}, failure)
            except Error as problem:
                failure = problem
        if failure is not None:
            raise failure
        return votes

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Gives up where what it contains fails other than by an agreement: there are no connections any
        more. What is under way has failed, too."""
        try:
            yield
        except BaseException as problem:
            if not isinstance(problem, Error) or problem.status in LOST:
                name = type(problem).__name__
                self._failure = problem if isinstance(problem, Exception) else Error("state", name)
                self._comms[0].abort(str(problem))
                self.drop_flights()
            raise

    def _check_usable(self) -> None:
        if self.is_closed:
            raise Error("state", "these local steps are closed")
        if self._failure is not None:
            raise Error(
                "state",
                f"an exchange failed ({self._failure}): make LocalSteps anew; state_dict() of this one has "
                "what was not sent yet",
            )

    # ---- what users use ----

    def synchronize(self) -> None:
        """Exchanges everything now: waits for what is under way, then exchanges all fragments; where sites
        keep what they do not send, every value, in 8 bits at least. Parameters have the same bits on all
        sites afterwards. Collective; at the end of training, or before an evaluation or checkpoint of the
        common model. Until the last site has called it, this one takes part in the
        exchanges that are due there, and awaits each for timeout_s. n_steps becomes that of the site with the
        most steps."""
        self._before_step()
        with self.lock:
            self._check_usable()
            if self.managed is not None:
                self.managed.run_all()
                return
            steps = self._take_part()
            while self.flying:
                self._finish()
            for fragment in self.fragments:
                self._begin(fragment, is_whole=True)
                self._finish()
            self.n_steps = steps

    def _take_part(self) -> int:
        """Takes part in exchanges that are due on other sites, until all sites are in synchronize(). Returns
        the steps of the site with the most."""
        while True:
            calls = self._meet(Call(SYNCHRONIZES, self.n_steps))
            due = next((call for call in calls if call.kind != SYNCHRONIZES), None)
            if due is None:
                return max(call.step for call in calls)
            if due.kind == BEGINS:
                self._begin(self.fragments[due.fragment])
            if due.kind == LANDS or not self.settings.delay:
                self._finish()

    def stats(self) -> dict[str, Any]:
        """Returns numbers of the last exchange that was applied, on this rank: a new dict, with dicts in it.
        {} before the first one.

        exchanges                so far, each of one fragment
        fragment                 which one this was, from 0 on
        step, begun              steps of the optimizer so far; and when it began
        world_size               sites
        n_elems, n_compressed    parameters that this rank exchanged; of these, compressed
        sparsity                 share of the compressed that this rank held back
        bytes_sent               by this rank in this exchange, messages by which ranks agree included
        bytes_received           likewise
        bytes_by_leg             bytes_sent by what they were: index, values, leftover, result, gather,
                                 control
        bits_per_param           sent per parameter that was exchanged, before the factor (W-1)/W that any
                                 exchange has
        bits_per_param_and_step  mean since this handle was made: of all exchanges, per parameter of the model
                                 and step
        exchange_s               that the exchange took in the background, of its longest reducer
        wait_s                   that training waited for it
        agree_s                  for the agreement, the outer step, and gathering within the site
        time_s                   of libtagc by phase, reducers that overlap counted each"""
        return self._recorder.last()

    def memory(self) -> Memory:
        """Returns what these local steps hold on this rank, in bytes, as it is allocated: residual, replicas
        (anchors and outer momentum), buffers, and what is transient. Printed, it is a table. Local."""
        if self.is_closed:
            return Memory(Held(), Held())
        comms = list(self._comms)
        if self.managed is not None:
            with contextlib.suppress(Error):  # there was no quorum yet
                comms.append(self.managed.connection())
        held = [tensor for fragment in self.fragments for tensor in fragment.tensors()]
        flights = [*self.free_flights, *self.flying]
        return count(comms, held, transient=[tensor for flight in flights for tensor in flight.tensors()])

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of this rank's state for torch.save() or torch.distributed.checkpoint: anchor,
        residuals, outer momentum, counters, and what is under way. Local, between steps. The model's and the
        optimizer's own state are saved beside it, by every site."""
        with self.lock:
            self._check_open()
            under_way = {flight.fragment.index: flight for flight in self.flying}
            kinds = local_state.kinds_of(self.settings)
            tensors: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds}
            for fragment in self.fragments:
                flight = under_way.get(fragment.index)
                before = None if self.managed is None else self.managed.residuals_before(fragment)
                if flight is not None:
                    before = flight.residuals()
                sources: dict[str, Mapping[str, torch.Tensor]] = {
                    "residual": fragment.residuals_on_the_wire() if before is None else before,
                    "delta": {} if flight is None else fragment.views(flight.delta),
                    **fragment.kept(),
                }
                for kind, named in tensors.items():
                    for name, n in fragment.sizes(kind).items():
                        values = sources[kind].get(name)
                        named[name] = zeros(n) if values is None else values.clone()
            about = {
                "version": local_state.VERSION,
                "sites": self.site.n_sites,
                "site": self.site.site,
                "steps": self.n_steps,
                "exchanges": self.n_exchanges,
                "open": int(self.has_anchor),
                "fragments": self.settings.fragments,
                "delay": self.settings.delay,
                "begun": {str(index): flight.step for index, flight in under_way.items()},
                "managed": int(self.managed is not None),
            }
            return {f"rank{self.site.rank}": {"about": json.dumps(about), **tensors}}

    def load_state_dict(self, saved: Mapping[str, Any], residuals: bool = True) -> None:
        """Loads what state_dict() gave on this rank; a run that goes on with it goes on bit for bit, where
        all sites do. residuals=False: of another site, whose residuals stay there, for a site that joins.
        With another number of sites residuals are multiplied, so that each adds as much to the mean as it
        would have; what a site that left held back is lost. Local, between steps; Error, and nothing is
        changed, where it does not fit."""
        with self.lock:
            self._check_open()
            about, entry = local_state.entry_of(saved, self.site.rank, residuals)
            if bool(about["managed"]) != (self.managed is not None):
                raise local_state.bad(
                    f"was {'' if about['managed'] else 'not '}saved where sites join and leave, and "
                    f"residuals are parts of the mean: load it {'there' if about['managed'] else 'elsewhere'}"
                )
            begun, mine = about["begun"], self.settings
            if begun and (about["fragments"], about["delay"]) != (mine.fragments, mine.delay):
                raise local_state.bad(
                    f"has exchanges under way of {about['fragments']} fragments with a delay of "
                    f"{about['delay']}; here it is {mine.fragments} with {mine.delay}"
                )
            self._check_saved(entry, [k for k in local_state.kinds_of(mine) if k != "delta" or begun])
            factor = float(residuals)
            if self.managed is not None:
                self.managed.forget()
            else:
                factor *= self.site.n_sites / about["sites"]
            self.drop_flights()
            for fragment in self.fragments:
                fragment.load(entry)
                names = fragment.sizes("residual")
                fragment.set_residuals_on_the_wire({name: entry["residual"][name] * factor for name in names})
            for index, step in sorted(begun.items(), key=lambda one: one[1]):
                flight = self.free_flights.pop()
                flight.begin(self.fragments[index], step, entry["delta"])  # launched before the next step
                self.flying.append(flight)
            self.n_steps, self.n_exchanges = about["steps"], about["exchanges"]
            self.has_anchor, self.is_open = bool(about["open"]), False

    def _check_saved(self, entry: Mapping[str, Any], kinds: Sequence[str]) -> None:
        for kind in kinds:
            sizes = [fragment.sizes(kind) for fragment in self.fragments]
            local_state.check(
                entry.get(kind, {}), kind, {name: n for one in sizes for name, n in one.items()}
            )

    def _check_open(self) -> None:
        if self.is_closed:
            raise Error("state", "these local steps are closed, and their residuals are gone")

    def shared(self) -> dict[str, Any]:
        """Returns what a site that joins gets of another one: as state_dict(), without the residual and what
        there is only with a delay."""
        state: dict[str, Any] = {"steps": self.n_steps, "exchanges": self.n_exchanges}
        for fragment in self.fragments:
            for kind, named in fragment.kept().items():
                state.setdefault(kind, {}).update({name: values.clone() for name, values in named.items()})
        return state

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Loads what shared() of another site returned. Local; Error where it does not fit."""
        self._check_saved(state, list(self.fragments[0].kept()))
        for fragment in self.fragments:
            fragment.load(state)
        self.n_steps, self.n_exchanges = int(state["steps"]), int(state["exchanges"])

    def drop_flights(self) -> None:
        """Drops what is under way: nothing of it is applied, and residuals are as they were before."""
        for flight in self.flying:
            flight.drop()
        self.free_flights += self.flying
        self.flying = []

    def say(self, text: str) -> None:
        """Prints it on rank 0; where sites join and leave, on rank 0 of each site."""
        if self._verbose and self.site.rank == 0:
            say(text)

    def close(self) -> None:
        """Takes the hooks out, ends what is under way without applying it, and frees the residuals. Local."""
        with self.lock:
            if not self.is_closed:
                for hook in self._hooks:
                    hook.remove()
                self._free()

    def _free(self) -> None:
        self.is_closed = True
        for fragment in self.fragments:
            fragment.close()
        for comm in self._comms:
            comm.close()
        if self.managed is not None:
            self.managed.close()

    def _words(self) -> str:
        chosen, site = self.settings, self.site
        parts = f" in {chosen.fragments} fragments" if chosen.fragments > 1 else ""
        later = f", applied {chosen.delay} steps later" if chosen.delay else ""
        outer = (
            "the mean of all sites"
            if (chosen.outer_lr, chosen.outer_momentum) == (1, 0)
            else f"outer lr {chosen.outer_lr:g}, momentum {chosen.outer_momentum:g}"
        )
        ranks = f" of {site.n_inner} ranks" if site.n_inner > 1 else ""
        sites = f"{site.n_sites} sites{ranks}" if self.managed is None else f"the sites{ranks} of a quorum"
        return f"{sites}, every {chosen.every} steps{parts}{later}; {chosen.travels()}; {outer}"

    def __repr__(self) -> str:
        """Returns a line on what is exchanged. Local, from any thread, at any time."""
        model = type(self.model).__name__
        if self.is_closed:
            return f"<tagc local steps of a {model}, closed>"
        last = self._recorder.last().get("bits_per_param_and_step")
        sent = f", {last:.3g} bits per parameter and step" if last is not None else ""
        broken = ", failed" if self._failure is not None else ""
        return (
            f"<tagc local steps of a {model} ({self.site.kind}): {self._words()}; steps: {self.n_steps}, "
            f"exchanges: {self.n_exchanges}{sent}{broken}>"
        )

    def __dir__(self) -> list[str]:
        """Returns what users call, for completion: not what tagc's own modules share."""
        return [name for name in super().__dir__() if name.startswith("_") or name in _FOR_USERS.split()]

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Frees libtagc's memory and threads, which Python would not. A forked process has no part in
        them."""
        if not self.is_closed and self._process == os.getpid() and not sys.is_finalizing():
            self._free()
