"""Frames over a link with latency: none early, none lost, in order and whole; and what is said when some are
lost or the program is killed. check_latency.py LAB TAGC"""

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import delay
import experiment
import hosts
from common import LabError, call

TAGC = sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)


def enter(path):
    with open(path) as space:
        assert libc.setns(space.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())


def socket_in(namespace):
    """A socket belongs to the namespace that it was made in."""
    with open("/proc/self/ns/net") as home:
        enter(f"/run/netns/{namespace}")
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        assert libc.setns(home.fileno(), 0x40000000) == 0
    made.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
    made.setsockopt(socket.SOL_SOCKET, 32, 64 << 20)  # SO_SNDBUFFORCE
    return made


def payload(number, n):
    return random.Random(number).randbytes(n)


def receive(into, n, found):
    into.settimeout(10)
    try:
        while len(found) < n:
            data = into.recv(65536)
            found.append((time.monotonic(), data))
    except TimeoutError:
        pass


def case(**given):
    return experiment.Case(
        **experiment.DEFAULTS | {"hosts": 2, "arms": [], "rate": "5gbit", "queue": "2000ms"} | given
    )


def check_frames(n_hosts, n_frames):
    with hosts.Network(case(hosts=n_hosts, latency="20ms"), TAGC) as network:
        sender, receiver = socket_in(network.namespace(1)), socket_in(network.namespace(n_hosts))
        receiver.bind(("", 5000))
        rng, sent_at, found = random.Random(5), [], []
        thread = threading.Thread(target=receive, args=(receiver, n_frames + 1, found))
        thread.start()
        sender.sendto(b"first", (hosts.address(n_hosts), 5000))  # waits for ARP
        while not found and thread.is_alive():
            time.sleep(0.01)
        sizes = [rng.choice((0, 1, rng.randrange(100), rng.randrange(8900))) for _ in range(n_frames)]
        for number, size in enumerate(sizes):
            if rng.random() < 0.1:
                time.sleep(rng.random() / 1000)
            sent_at.append(time.monotonic())
            sender.sendto(payload(number, size), (hosts.address(n_hosts), 5000))
        thread.join()
        report = network.end_delay()
    assert len(found) == n_frames + 1, f"{len(found)} of {n_frames + 1} frames"
    for number, (at, data) in enumerate(found[1:]):
        assert data == payload(number, sizes[number]), f"frame {number} is another, or damaged"
        assert at - sent_at[number] >= 0.02, f"frame {number} came after {at - sent_at[number]} s"
    wires = 1 if n_hosts == 2 else 2
    assert report["frames"] >= wires * n_frames and report["dropped_frames"] == 0, report


def check_full_queue():
    """With room for two large frames and a second to wait, most of what is sent at once is lost, and
    counted."""
    names = [f"{hosts.PREFIX}{os.getpid()}-h{host}" for host in (1, 2)]
    for name in names:
        call("ip", "netns", "add", name)
    try:
        program = subprocess.Popen(
            [
                delay.find_program(TAGC),
                "--one-way-us=1000000",
                "--queue-bytes=1",
                f"{names[0]}:eth0={names[1]}:eth0",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdout.readline() == "ready\n"
        for host, name in enumerate(names, 1):
            call(
                "ip",
                "-n",
                name,
                "link",
                "set",
                "eth0",
                "mtu",
                9000,
                "address",
                f"02:00:00:00:00:0{host}",
                "txqueuelen",
                10000,
            )
            call("ip", "-n", name, "addr", "add", f"{hosts.address(host)}/24", "dev", "eth0")
            call("ip", "-n", name, "link", "set", "eth0", "up")
        call(
            "ip",
            "-n",
            names[0],
            "neigh",
            "add",
            hosts.address(2),
            "lladdr",
            "02:00:00:00:00:02",
            "dev",
            "eth0",
        )
        sender, receiver, found = socket_in(names[0]), socket_in(names[1]), []
        receiver.bind(("", 5000))
        for _ in range(100):
            sender.sendto(bytes(8000), (hosts.address(2), 5000))
        receive(receiver, 100, found)
        program.send_signal(signal.SIGTERM)
        report = json.loads(program.communicate(timeout=10)[0])
    finally:
        hosts.remove_own()
    n_lost = 100 - len(found)
    assert 8 <= len(found) <= 40, len(found)
    # neighbour discovery sends some, too
    assert n_lost <= report["dropped_frames"] <= n_lost + 20, (n_lost, report)


def check_killed():
    with hosts.Network(case(latency="1ms"), TAGC) as network:
        network.check()
        os.kill(network.delay.process.pid, signal.SIGKILL)
        network.delay.process.wait()
        for asked in (network.check, network.end_delay):
            try:
                asked()
            except LabError as error:
                assert "was ended by signal 9 while its links were in use" in str(error), error
            else:
                raise AssertionError("a link that is gone is not missed")


check_frames(2, 1500)
check_frames(3, 500)
check_full_queue()
check_killed()
