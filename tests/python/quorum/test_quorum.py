"""Decisions of replicas, for which no torchft is needed."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")

from tagc import Error
from tagc.quorum import managed
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
