"""Which ranks share a host: what compress() finds, and what the user says instead."""

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from wrappers import heard


def test_an_identity_is_of_a_host(tmp_path):
    """The same for processes of one host, another after a reboot or in another network."""
    from tagc.torch.exchange.hosts import identity

    def proc(name, boot, network):
        root = tmp_path / name
        (root / "sys/kernel/random").mkdir(parents=True)
        (root / "sys/kernel/random/boot_id").write_text(boot + "\n")
        (root / "self/ns").mkdir(parents=True)
        (root / "self/ns/net").symlink_to(network)
        return root

    networks = [tmp_path / "net0", tmp_path / "net1"]
    for network in networks:
        network.touch()
    found = [
        identity(proc(name, boot, network))
        for name, boot, network in (
            ("a", "one", networks[0]),
            ("b", "two", networks[0]),
            ("c", "one", networks[1]),
        )
    ]
    assert len(set(found)) == 3, found
    assert identity(proc("d", "one", networks[0])) == found[0]
    assert identity() == identity() != identity(tmp_path / "none") == identity(tmp_path / "none")


def of_rank(host, cores, granted=None):
    return {"host": host, "cores": tuple(cores), "granted": granted}


def test_a_rank_takes_half_of_its_share_of_the_cores(tmp_path):
    """As the planner computes it, too. Bound ranks have cores of their own, and a container fewer than it
    shows."""
    import plan_parts

    from tagc.torch.exchange import cores

    for n_cores, n_ranks in ((16, 1), (16, 8), (2, 2), (64, 1), (96, 8), (1, 1), (7, 1), (4, 8)):
        host = [of_rank("a", range(n_cores))] * n_ranks
        wanted = max(1, min(8, n_cores // n_ranks // 2))
        assert cores.threads(host[0], [*host, of_rank("b", range(n_cores))]) == wanted, (n_cores, n_ranks)
        assert plan_parts.threads_of(n_cores, n_ranks) == wanted
    bound = [of_rank("a", range(8 * rank, 8 * rank + 8)) for rank in range(4)]
    assert cores.threads(bound[1], bound) == 4
    assert cores.threads(of_rank("a", range(64), 8.0), [of_rank("a", range(64), 8.0)] * 2) == 2
    own = cores.about(tmp_path)
    assert own["granted"] is None and len(own["cores"]) >= 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cores.about(tmp_path)["granted"] == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores.about(tmp_path) == own


def trained(rank, n_threads):
    """Losses and parameters with the default threads of a host with that many cores for each rank."""
    from models import batch_of, loss_of
    from test_staging import wrapped

    import tagc.torch as tagc
    from tagc.torch.exchange import cores

    about, cores.about = (cores.about, lambda: {"cores": tuple(range(4 * n_threads)), "granted": None})
    model = wrapped("ddp")
    handle = tagc.compress(model, sparsity=0.9, layers="all", verbose=False)
    cores.about = about
    assert handle.state.options.threads == n_threads
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(3):
        loss = loss_of(model, batch_of(rank, step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def threads_change_nothing(rank, world_size):
    one, four = trained(rank, 1), trained(rank, 4)
    assert one[0] == four[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], four[1]))


def test_results_do_not_depend_on_threads():
    ranks.run(threads_change_nothing, 2)


def test_nccl_waits_longer_than_tagc(monkeypatch):
    """Its watchdog ends the process: groups that tagc makes get a multiple of timeout_s, at least NCCL's own
    default. tagc's waits on gloo are tagc's own."""
    from tagc.torch.exchange.hosts import Cluster

    found = []

    def new_group(ranks, timeout, backend, **_):
        found.append((backend, timeout.total_seconds()))

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for timeout_s in (5.0, 300.0, 5e5):
        for backend in ("cpu:gloo,cuda:nccl", "nccl", "cpu:gloo,cuda:gloo"):
            Cluster(range(4), 2, timeout_s, shares=False)._group((0, 1), backend, set(), False)
    mixed, nccl, gloo = found[::3], found[1::3], found[2::3]
    assert [s for _, s in mixed] == [s for _, s in nccl] == [600.0, 1200.0, 1e6], found
    assert [s for _, s in gloo] == [5.0, 300.0, 5e5], found


def test_only_equal_contiguous_hosts_are_added_up():
    from tagc.torch.exchange.hosts import arrange

    for hosts, expected in (("aabb", 2), ("abcd", 1), ("aaaa", 4), ("aaabbb", 3), ("a", 1), ("bbaacc", 2)):
        assert arrange(hosts) == (expected, ""), hosts
    per_host, why = arrange("aaab")
    assert per_host == 1 and "3, 1 on 2 hosts" in why, why
    per_host, why = arrange("abab")
    assert per_host == 1 and "numbers 0 and 1 of its 4" in why, why
    per_host, why = arrange("aabccb")
    assert per_host == 1 and "numbers 2 and 3 of its 6" in why, why


def cluster_of(groups, identities, given=None, model=None, timeout_s=60.0):
    from tagc.torch.exchange.hosts import Cluster

    cluster = Cluster(range(dist.get_world_size()) if model is None else model, given, timeout_s)
    cluster.split(groups, dict(enumerate(identities)))
    return cluster


def members(group):
    return None if group is None else dist.get_process_group_ranks(group)


def sum_of(group):
    values = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(values, group=group)
    return values.item()


def two_by_two(rank, world_size):
    world, cpu = dist.group.WORLD, torch.device("cpu")
    for cluster in (cluster_of([world], "aabb"), cluster_of([world], "zzzz", given=2)):
        hosts = cluster.of(world)
        assert (hosts.n_hosts, hosts.per_host, hosts.host, hosts.place) == (2, 2, rank // 2, rank % 2)
        assert members(hosts.within) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert members(hosts.between) == [rank % 2, rank % 2 + 2]
        assert list(hosts.rows) == [rank % 2, rank % 2 + 2]
        assert hosts.is_two_level and not hosts.is_flat and not hosts.is_one and not hosts.is_on_one_host
        assert sum_of(hosts.within) == (1100.0 if rank > 1 else 11.0)
        assert sum_of(hosts.between) == (1010.0 if rank % 2 else 101.0)
        assert cluster.words([world], cpu) == (
            "2 hosts x 2 ranks: sums within hosts by gloo, compressed between hosts"
        )
        groups = hosts.within, hosts.between
    again = cluster_of([world], "aabb").of(world)
    assert (again.within, again.between) == groups, "torch keeps each group's memory: they must be the same"
    from tagc.torch.exchange import waits

    for seconds in (7.0, 7.0 + rank):  # ranks may differ
        later = cluster_of([world], "aabb", timeout_s=seconds).of(world)
        for group, before in zip((later.within, later.between), groups):
            assert group is not before and waits.timeout_of(group) == seconds, (seconds, group)
    again = cluster_of([world], "aabb", timeout_s=7.0 + rank).of(world)
    assert (again.within, again.between) == (later.within, later.between)


def flat_ones(rank, world_size):
    world, cpu = dist.group.WORLD, torch.device("cpu")
    for identities, given, words, says in (
        ("aaaa", None, "", None),
        ("abcd", None, "4 hosts x 1 rank: compressed between hosts", None),
        ("aaaa", 4, "4 hosts x 1 rank: compressed between hosts", None),
        ("aaab", None, "", "its ranks are 3, 1 on 2 hosts"),
        ("abab", None, "2 hosts x 2 ranks: compressed between hosts", "numbers 0 and 1 of its 4"),
    ):
        with heard("") as said:
            cluster = cluster_of([world], identities, given)
        hosts = cluster.of(world)
        assert hosts.is_flat and hosts.within is None and hosts.between is world, identities
        assert (hosts.n_hosts, hosts.host, hosts.place) == (4, rank, 0)
        assert list(hosts.rows) == [0, 1, 2, 3] and hosts.levels() == [world]
        assert hosts.is_on_one_host == (identities == "aaaa" and given is None)
        assert cluster.words([world], cpu) == words, (identities, cluster.words([world], cpu))
        if rank == 0 and says:
            assert len(said) == 1 and says in said[0] and "ranks 0, 1, 2, 3" in said[0], said
        else:
            assert not said, said


def one_host_by_word(rank, world_size):
    world = dist.group.WORLD
    cluster = cluster_of([world], "abcd", given=1)
    hosts = cluster.of(world)
    assert hosts.is_one and not hosts.is_two_level and not hosts.is_flat and hosts.within is world
    assert (hosts.n_hosts, hosts.per_host, hosts.host, hosts.place) == (1, 4, 0, rank)
    assert cluster.words([world], torch.device("cpu")).startswith("1 host: nothing is compressed")


def groups_of_a_mesh(rank, world_size):
    """Of tensor parallelism over ranks of a host: the data dimension has hosts of its own. Ranks are in
    different groups, and all of them make all."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh["data"].get_group(), mesh["tensor"].get_group()
    cluster = cluster_of([data, tensor], "aaaabbbb")
    hosts, inner = cluster.of(data), cluster.of(tensor)
    base, odd = rank // 4 * 4, rank % 2
    assert (hosts.n_hosts, hosts.per_host) == (2, 2) and (hosts.host, hosts.place) == divmod(rank // 2, 2)
    assert members(hosts.within) == [base + odd, base + odd + 2]
    assert members(hosts.between) == [rank % 4, rank % 4 + 4]
    assert sum_of(hosts.between) == 10.0 ** (rank % 4) + 10.0 ** (rank % 4 + 4)
    assert inner.is_flat and inner.is_on_one_host
    assert cluster.words([data], torch.device("cpu")).startswith("2 hosts x 4 ranks: sums within hosts")
    crossing = cluster_of([data, tensor], "abababab").of(tensor)
    assert crossing.is_flat and not crossing.is_on_one_host and crossing.n_hosts == 2


def part_of_the_world(rank, world_size):
    """As of a stage of a pipeline, the other ranks of which know nothing of it."""
    from tagc.torch.exchange import hosts as module

    stages = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    stage = stages[rank // 4]
    identities, module.identity = module.identity, lambda: "aabbccdd"[rank]
    try:
        ours = range(rank // 4 * 4, rank // 4 * 4 + 4)
        with heard(""):
            hosts = cluster_of([stage], "", model=ours).of(stage)
        assert hosts.is_two_level and members(hosts.within) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert members(hosts.between) == [rank // 4 * 4 + rank % 2, rank // 4 * 4 + rank % 2 + 2]
        assert sum_of(hosts.within) == sum(10.0**other for other in members(hosts.within))
        # a group that some ranks have alone: torch would give theirs another name, and wait for ever
        dist.new_group([0, 4])
        module._groups = (lambda: None, {})
        with heard("") as said:
            hosts = cluster_of([stage], "", model=ours).of(stage)
        assert hosts.is_flat and hosts.n_hosts == 4
        assert (rank % 4 == 0) == bool(said), said
        assert not said or "different numbers of process groups" in said[0]
    finally:
        module.identity = identities


def checks_before_messages(rank, world_size):
    from tagc import Error
    from tagc.torch.exchange.hosts import Cluster

    with pytest.raises(Error, match="hosts is 3, must divide the 4 ranks that train the model"):
        Cluster(range(4), 3, 60.0)
    with pytest.raises(Error, match="hosts is 8, must divide"):
        Cluster(range(4), 8, 60.0)
    with pytest.raises(Error, match="has not looked for the hosts"):
        Cluster(range(4), 2, 60.0).of(dist.group.WORLD)


def rows_by_the_backend(rank, world_size):
    """As NCCL does it, all rows as one, and one by one: each rank gets its part of each row's sum."""
    from tagc.torch.exchange import internals

    torch.manual_seed(rank)
    source, own = torch.randn(3, world_size * 5), internals.backend_of
    everyone = [torch.empty_like(source) for _ in range(world_size)]
    dist.all_gather(everyone, source)
    expected = sum(everyone).view(3, world_size, 5)[:, rank]
    for together in (False, True):
        backend = type("Backend", (), {"supports_coalescing": together})()
        internals.backend_of = lambda *_, backend=backend: backend
        try:
            sums = torch.empty(3, 5)
            internals.reduce_scatter_rows(sums, source, dist.ReduceOp.SUM, dist.group.WORLD, False)
        finally:
            internals.backend_of = own
        torch.testing.assert_close(sums, expected, msg=f"together: {together}")


def test_four_ranks():
    ranks.run_each([rows_by_the_backend, two_by_two, flat_ones, one_host_by_word, checks_before_messages], 4)


def test_eight_ranks():
    ranks.run_each([groups_of_a_mesh, part_of_the_world], 8)
