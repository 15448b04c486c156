"""Which connections a Comm has: libtagc's own where they are asked for and all ranks can open them, else
gloo's, and rank 0 says why. Which interface they take, and who may use them."""

import contextlib
import os
import resource
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from wrappers import present, printed

from tagc._library import Error
from tagc.torch.exchange import native

THERE = ["lo", "eth0", "eth1", "docker0"]


@pytest.fixture
def interfaces(monkeypatch):
    monkeypatch.setattr(native.socket, "if_nameindex", lambda: list(enumerate(THERE)))
    for variable in (
        *native.VARIABLES,
        *native.FAMILY_VARIABLES,
        native.SOCKETS_VARIABLE,
        native.TLS_VARIABLE,
    ):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch.setenv


def test_interfaces_by_their_variables(interfaces):
    assert native._named_interface() is None
    for text, names in (
        ("eth", "eth0,eth1"),
        ("=eth1,lo", "lo,eth1"),
        ("^docker", "eth0,eth1"),
        ("^=docker0,eth0", "eth1"),
        ("^eth,docker", "lo"),
    ):
        interfaces("NCCL_SOCKET_IFNAME", text)
        assert native._named_interface() == names, text
    interfaces("NCCL_SOCKET_IFNAME", "ib")
    with pytest.raises(Error, match="NCCL_SOCKET_IFNAME is 'ib', and this host has lo, eth0, eth1, docker0"):
        native._named_interface()
    interfaces("GLOO_SOCKET_IFNAME", "wg0,eth0")
    assert native._named_interface() == "wg0,eth0"
    interfaces("TAGC_SOCKET_IFNAME", "eth1")
    assert native._named_interface() == "eth1"


def test_other_variables(interfaces):
    assert native._family() == 0 and [native._n_sockets(n) for n in (2, 4, 5, 16, 17)] == [4, 4, 2, 2, 1]
    interfaces("NCCL_SOCKET_FAMILY", "AF_INET6")
    assert native._family() == 6
    interfaces("TAGC_SOCKET_FAMILY", "AF_INET")
    assert native._family() == 4
    interfaces("TAGC_SOCKET_FAMILY", "4")
    with pytest.raises(Error, match="TAGC_SOCKET_FAMILY is '4', must be 'AF_INET' or 'AF_INET6'"):
        native._family()
    interfaces("TAGC_SOCKETS", "3")
    assert native._n_sockets(100) == 3
    for text in ("0", "17", "two", "-1", "1.5"):
        interfaces("TAGC_SOCKETS", text)
        with pytest.raises(Error, match=f"TAGC_SOCKETS is '{text}', must be a whole number from 1 to 16"):
            native._n_sockets(2)


def test_family_of_its_own_address(interfaces, monkeypatch):
    """What the store's address is does not matter where the environment names the other family."""

    class Store:
        host, port = "::1", 1

    monkeypatch.setattr(native.dist, "TCPStore", Store)
    monkeypatch.setattr(native.internals, "default_store", Store)
    for family, version in (("AF_INET", 4), ("AF_INET6", 6)):
        interfaces("NCCL_SOCKET_FAMILY", family)
        port, why_not = native.open_port(0, (0, 1), may_be_loopback=True)
        if port is None:  # a host without IPv6
            assert version == 6 and "no interface with an address of IPv6" in why_not
            continue
        assert port.address[5] == version, why_not
        port.close()


def connect(secrets, names):
    """Two ranks of this process with these secrets and names of their connection: their failures."""
    ports = [native.Port(rank, (5, 7), "127.0.0.1", 4) for rank in range(2)]
    addresses, failures = [port.address for port in ports], {}

    def run(rank):
        try:
            ports[rank].connect(addresses, secrets[rank], names[rank], 0.5)
        except Error as failure:
            failures[rank] = str(failure)

    with contextlib.suppress(UserWarning):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for port in ports:
        port.close()
    return failures


@pytest.mark.filterwarnings("ignore:tagc. rank 5 refused .* do not know this job's secret")
def test_keys():
    assert connect([b"s" * 32] * 2, ["tagc/1/5,7"] * 2) == {}
    for secrets, names in (
        ([b"s" * 32, b"t" * 32], ["tagc/1/5,7"] * 2),
        ([b"s" * 32] * 2, ["tagc/1/5,7", "tagc/2/5,7"]),
    ):
        failures = connect(secrets, names)
        assert "no connection to rank 7 within 0.5 s: it did not call" in failures[0]
        assert "no connection to rank 5 within 0.5 s: it, or another program at its address" in failures[1]
        assert "another interface: TAGC_SOCKET_IFNAME" in failures[1]


def chosen(rank, world_size):
    """By the word of the user, and by what all ranks can."""
    from tagc.torch.exchange.comm import Comm

    for transport, name in (("host", "native"), ("native", "native"), ("gloo", "gloo")):
        comm, said = printed(Comm, dist.group.WORLD, 60, transport)
        assert comm.transport == name and said == ""
        assert comm.all_gather(bytes([rank])) == [bytes([r]) for r in range(world_size)]
        comm.close()
    if rank == 1:
        os.environ["TAGC_SOCKET_IFNAME"] = "eth99"
    for time in range(2):
        comm, said = printed(Comm, dist.group.WORLD, 60, "host")
        assert comm.transport == "gloo"
        assert comm.all_gather(bytes([rank])) == [bytes([r]) for r in range(world_size)]
        comm.close()
        if rank == 0 and time == 0:
            assert "tagc: messages go by gloo" in said and "rank 1: no interface eth99 " in said
        else:
            assert said == "", "it is said once, by rank 0"
    with pytest.raises(
        Error, match="transport is 'native': rank 1: no interface eth99 .*there are: lo "
    ) as it:
        Comm(dist.group.WORLD, 60, "native")
    assert it.value.status == "unsupported"
    os.environ.pop("TAGC_SOCKET_IFNAME", None)


def loopback_of_several_hosts(rank, world_size):
    """A rank whose own name means 127.0.1.1 takes another interface where other hosts have to reach it."""
    from tagc.torch.exchange import comm as module

    before, module.identity = module.identity, lambda: f"host {rank}"
    try:
        port, _ = native.open_port(rank, range(world_size), may_be_loopback=False)
        has_other = port is not None and not port.is_loopback
        port.close()
        comm = module.Comm(dist.group.WORLD, 60, "host")
        assert comm.transport == "native"
        assert comm._way._port.is_loopback != has_other
        comm.close()
    finally:
        module.identity = before


def no_way_through(rank, world_size):
    """Ranks that cannot reach each other, as behind a firewall, have gloo."""
    from tagc.torch.exchange.comm import Comm

    before = native.Port.connect, native.PATIENCE_S
    native.PATIENCE_S = 0.3
    if rank == 0:  # tells the others a port that nobody listens on

        def connect(self, addresses, *rest):
            raise Error("transport", "no connection to rank 1 within 0.3 s: connection timed out")

        native.Port.connect = connect
    try:
        comm, said = printed(Comm, dist.group.WORLD, 60, "host")
        assert comm.transport == "gloo"
        assert ("rank 0: no connection to rank 1 within" in said) == (rank == 0)
        assert comm.all_gather(bytes([rank])) == [bytes([r]) for r in range(world_size)]
        comm.close()
    finally:
        native.Port.connect, native.PATIENCE_S = before


def same_bits(rank, world_size):
    """Training by gloo's messages and by libtagc's own."""
    from test_staging import check_same, train

    cases = [
        ("fsdp2", {}),
        ("fsdp2", {"sparsity": 0.9, "parameters": "delta4"}),
        ("ddp", {"sparsity": 0.9}),
        ("fsdp1", {"sparsity": 0.9, "layers": "all"}),
    ]
    for kind, options in present(cases):
        by = [train(kind, rank, {**options, "transport": name}, {}, n_steps=4) for name in ("native", "gloo")]
        for _, _, _, stats in by:
            del stats["bytes"]  # only connections with lanes have fronts
        check_same(*by)


def has_tls():
    from tagc.commands import info

    return not info._lacks(has_tls=True)


def test_tls_variable(interfaces, tmp_path):
    assert native.tls_secret() is None
    interfaces("TAGC_NATIVE_TLS", "0")
    assert native.tls_secret() is None
    interfaces("TAGC_NATIVE_TLS", "1")
    assert native.tls_secret() == b""
    path = tmp_path / "job.key"
    interfaces("TAGC_NATIVE_TLS", str(path))
    with pytest.raises(Error, match="TAGC_NATIVE_TLS is '.*job.key', must be 1 or the path .*No such file"):
        native.tls_secret()
    path.write_bytes(b"short")
    with pytest.raises(Error, match="TAGC_NATIVE_TLS: .*job.key has 5 bytes, must have 16 or more"):
        native.tls_secret()
    path.write_bytes(b"x" * 16)
    assert native.tls_secret() == b"x" * 16


@contextlib.contextmanager
def variable(value):
    if value is not None:
        os.environ["TAGC_NATIVE_TLS"] = value
    try:
        yield
    finally:
        os.environ.pop("TAGC_NATIVE_TLS", None)


def encrypted(rank, world_size, folder):
    """With TLS on all ranks there are connections; else there are none, and no gloo instead, which would not
    encrypt."""
    from tagc.torch.exchange.comm import Comm

    one, other = f"{folder}/one.key", f"{folder}/{rank}.key"
    for path, byte in ((one, b"x"), (other, b"%d" % rank)):
        with open(path, "wb") as file:
            file.write(byte * 32)
    dist.barrier()
    for value in ("1", one) if has_tls() else ():
        with variable(value):
            comm = Comm(dist.group.WORLD, 60, "host")
        assert comm.transport == "native" and comm._way._port.has_tls
        assert comm.all_gather(bytes([rank]) * 100000) == [bytes([r]) * 100000 for r in range(world_size)]
        comm.close()
    before, native.PATIENCE_S = native.PATIENCE_S, 1.0
    cases = [
        ("gloo", "1", "TAGC_NATIVE_TLS is set, and gloo would not encrypt: rank 0: its transport is 'gloo'")
    ]
    cases += [
        ("host", ("1", None)[rank], "TAGC_NATIVE_TLS is set on rank 0 and not on rank 1: set it on all")
    ]
    cases += [
        ("host", (None, "1")[rank], "TAGC_NATIVE_TLS is set on rank 1 and not on rank 0: set it on all")
    ]
    cases += [
        ("host", ("1", "/no/file")[rank], "rank 1: TAGC_NATIVE_TLS is '/no/file', must be 1 or the path")
    ]
    if has_tls():
        cases += [("host", other, "gloo would not encrypt: rank 0: no connection to rank 1")]
    else:
        cases += [
            ("host", "1", "gloo would not encrypt: rank 0: this libtagc was built without TLS: install")
        ]
    for transport, value, text in cases:
        with variable(value), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of who was refused
            with pytest.raises(Error) as it:
                Comm(dist.group.WORLD, 60, transport)
        if value == "/no/file" or has_tls() or transport == "gloo" or rank == 0:
            assert text in str(it.value), it.value
    native.PATIENCE_S = before


def same_bits_encrypted(rank, world_size):
    """The same training, with TLS and without."""
    from test_staging import check_same, train

    by = []
    for value in (None, "1"):
        with variable(value):
            by.append(train("fsdp2", rank, {"sparsity": 0.9, "parameters": "delta4"}, {}, n_steps=4))
    check_same(*by)


def few_files(rank, world_size):
    """A rank that may not open files for several connections with each peer: all open one, and rank 0 says
    why."""
    from tagc.torch.exchange.comm import Comm

    before, opened = resource.getrlimit(resource.RLIMIT_NOFILE), []
    if rank == 1:
        most = max(map(int, os.listdir("/proc/self/fd"))) + 50
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(10):  # 4 connections take 12 (OWN_FILES), 1 takes 9
            os.close(opened.pop())
    try:
        comm, said = printed(Comm, dist.group.WORLD, 60, "host")
    finally:
        for file in opened:
            os.close(file)
        with contextlib.suppress(ValueError):  # who is not root cannot raise the hard limit again
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert comm.transport == "native" and comm._way._port.n_sockets == 1
    assert comm.all_gather(bytes([rank])) == [bytes([r]) for r in range(world_size)]
    comm.close()
    line = (
        "tagc: one connection with each peer, instead of several: rank 1: 4 connections with each of 1 other"
    )
    assert said.startswith(line) and said.count("\n") == 1 if rank == 0 else said == ""


def test_same_bits():
    ranks.run(same_bits, 2)


def test_encrypted(tmp_path):
    ranks.run(encrypted, 2, str(tmp_path))
    if has_tls():
        ranks.run(same_bits_encrypted, 2)


def test_few_files():
    ranks.run(few_files, 2)


def test_choice():
    ranks.run_each([chosen, loopback_of_several_hosts, no_way_through], 2)
