"""Decisions of replicas, for which no torchft is needed."""

import concurrent.futures
import copy
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch")

from tagc import Error
from tagc.quorum import Sites, managed
from tagc.quorum.exchanges import Exchanges
from tagc.torch import compress
from tagc.torch.extension import kinds_of


def test_whose_stages_replicas_of_a_new_quorum_follow():
    """ "x" and "y" are connections; step 7 is the last one."""

    def everyone(*found):
        return [{"takes part": takes_part, "last": last} for takes_part, last in found]

    fresh, healed, old, new = (False, None), (True, None), (True, ["x", 5]), (True, ["x", 7])
    apart = (True, ["y", 7])
    for found, source, strays in [
        ([new, new], 0, []),
        ([fresh, new], 1, []),
        ([healed, new], 1, []),
        ([old, healed, new], 2, []),
        ([healed, old], 0, []),
        ([fresh, fresh], 0, []),
        ([fresh, healed], 1, []),
        ([apart, new, new], 0, [0]),
        ([new, apart], 0, [1]),
        ([apart, fresh, new, old], 0, [2]),
    ]:
        assert (
            managed._source(everyone(*found), 7) == source and managed._strays(everyone(*found), 7) == strays
        ), found


def test_synchronize_goes_on_behind_what_others_exchange():
    """A site that failed alone exchanges fragment 0 while the others are at fragment 1."""

    def run_all(outcomes):
        """outcomes: of each run(), (whether it counts, the fragment that was exchanged or None). Returns the
        fragments that were asked for."""
        asked, left = [], list(outcomes)
        site = types.SimpleNamespace(_handle=types.SimpleNamespace(fragments=[0, 1, 2]), _exchanged=None)

        def run(fragment):
            asked.append(fragment)
            counts, site._exchanged = left.pop(0)
            return counts

        site.run = run
        Exchanges.run_all(site)
        assert not left
        return asked

    assert run_all([(True, 0), (True, 1), (True, 2)]) == [0, 1, 2]
    assert run_all([(True, 1), (True, 2)]) == [0, 2]
    assert run_all([(True, None)] * 3) == [0, 1, 2]  # no replica contributed
    with pytest.raises(Error, match="fragment 1 does not count"):
        run_all([(True, 0), (False, None)])


def test_torchfts_groups_are_refused(monkeypatch):
    """Also where torchft itself is not installed: a kind of models that goes before all others."""

    class Group:
        pass

    monkeypatch.setitem(sys.modules, "torchft.process_group", types.SimpleNamespace(ProcessGroup=Group))
    model, group = torch.nn.Linear(3, 3), Group()
    (kind,) = kinds_of(model, group)
    assert kind.name == "torchft" and not kinds_of(model, None)
    with pytest.raises(Error, match="or fully_shard.. with between=manager"):
        kind.wrapper(model, group)
    with pytest.raises(Error, match="or fully_shard.. with between=manager"):  # without torch.distributed
        compress(model, between=group)


class Meeting:
    """A quorum of n sites. fails: another site of it is gone."""

    def __init__(self, n, fails=False):
        self.n, self.fails, self.managers, self.votes = n, fails, {}, []
        self.store, self._barrier = torch.distributed.HashStore(), threading.Barrier(n)

    def wait(self):
        self._barrier.wait(60)


class FakeManager:
    """What tagc asks torchft's Manager, for sites that are threads and meet as the test wants it."""

    _use_async_quorum = False

    def __init__(self, rank, meetings):
        self._rank, self._meetings, self._step, self._n_healed = rank, iter(meetings), 0, 0

    def register_state_dict_fn(self, key, load, state):
        self._load, self._state = load, state

    def start_quorum(self):
        meeting = self._meeting = next(self._meetings)
        meeting.managers[self] = self._step
        meeting.wait()
        source = max(meeting.managers, key=meeting.managers.get)
        if meeting.managers[source] > self._step:
            self._load(copy.deepcopy(source._state()))
            self._step, self._n_healed = meeting.managers[source], self._n_healed + 1
        meeting.wait()
        self.group = types.SimpleNamespace(
            rank=lambda: self._rank, size=lambda: meeting.n, get_group_store=lambda: meeting.store
        )
        self._failure = RuntimeError("a site is gone") if meeting.fails else None

    def should_commit(self):
        self._meeting.votes.append(self._failure is None)
        self._meeting.wait()
        counts = all(self._meeting.votes)
        self._step += counts
        return counts

    def wait_quorum(self):
        pass

    def errored(self):
        return self._failure

    def report_error(self, failure):
        self._failure = failure

    def current_step(self):
        return self._step

    def is_participating(self):
        return True


@pytest.fixture
def fake_torchft(monkeypatch):
    class ProcessGroup:
        pass

    class ManagedProcessGroup(ProcessGroup):
        def __init__(self, manager):
            self._manager = manager

        @property
        def parent(self):
            return self._manager.group

    class Optimizer:
        pass

    groups = types.SimpleNamespace(ProcessGroup=ProcessGroup, ManagedProcessGroup=ManagedProcessGroup)
    monkeypatch.setitem(
        sys.modules, "torchft", types.SimpleNamespace(Manager=FakeManager, Optimizer=Optimizer)
    )
    monkeypatch.setitem(sys.modules, "torchft.process_group", groups)


def run_sites(meetings, train, **options):
    """Runs train(rank, handle, step) of each site in a thread; step() is a step of training. meetings: of
    each site. Checks that they end alike; returns their steps, exchanges and how often they got a state."""
    local = pytest.importorskip("tagc.local")
    managers = [FakeManager(rank, mine) for rank, mine in enumerate(meetings)]
    models, handles, steps = [], [], []
    for manager in managers:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = local.LocalSteps(
            model,
            optimizer,
            manager=Sites(manager),
            layers="all",
            values="fp32",
            timeout_s=60,
            verbose=False,
            **options,
        )

        def step(model=model, optimizer=optimizer, rank=len(models)):
            optimizer.zero_grad()
            model(torch.full((4, 8), 1.0 + rank)).square().mean().backward()
            optimizer.step()

        models.append(model)
        handles.append(handle)
        steps.append(step)
    with concurrent.futures.ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(train, range(len(models)), handles, steps))  # raises what they raise
    kept = [[fragment.kept() for fragment in handle.fragments] for handle in handles]
    for handle, one in zip(handles, kept):
        for mine, first in zip(one, kept[0]):
            assert all(torch.equal(values, first["anchor"][name]) for name, values in mine["anchor"].items())
        handle.close()
    return [
        (handle.n_steps, handle.n_exchanges, manager._n_healed) for handle, manager in zip(handles, managers)
    ]


def test_a_site_joins_in_an_exchange_that_fails(fake_torchft):
    """torchft gives it no state again, and the other one has trained on, up to its other fragment."""

    def train(rank, handle, step):
        for _ in range([3, 1][rank]):
            step()

    meetings = [Meeting(1), Meeting(2, fails=True), Meeting(2), Meeting(2)]
    assert run_sites([meetings, meetings[1:]], train, every=2, fragments=2) == [(3, 2, 0), (3, 2, 1)]


def test_a_site_with_fewer_batches_goes_on_at_the_steps_of_the_others(fake_torchft):
    def train(rank, handle, step):
        for _ in range([4, 3][rank]):
            step()
        if rank == 1:
            handle.synchronize()

    meetings = [Meeting(2), Meeting(2)]
    assert run_sites([meetings, meetings], train, every=4) == [(4, 1, 0), (4, 1, 0)]
