"""Hosts as network namespaces, joined by links that are shaped in each direction.

Two hosts share a veth pair. More hosts share a bridge in a namespace of its own, so that nothing of this is
visible outside. With latency, delay.py's wires replace the veth pairs. All names begin with tagc-lab-PID. If
the process PID is gone, any other process may remove them."""

import json
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time

import delay
import wireguard
from common import LabError, bits_per_s, call, need_program

SUBNET = "10.77.0.0/24"
TAP_QUEUE_FRAMES = 10000  # between a shaper and the program that reads the device
PREFIX = "tagc-lab-"
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "iperf3": "iperf3",
    "mpirun": "openmpi-bin",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}


def address(host):
    return f"10.77.0.{host}"


def check_allowed():
    """Raises if this process may not make hosts or lacks the programs for it."""
    if os.geteuid() != 0:
        raise LabError(
            "hosts are network namespaces, and those need root: run this with sudo, or as root in a "
            "container that has CAP_SYS_ADMIN and CAP_NET_ADMIN. Nothing else in the project needs root"
        )
    for name, package in PACKAGES.items():
        need_program(name, package)


class Network:
    """`with Network(case) as network`: the hosts exist inside the block, and are removed at its end, also
    after a failure."""

    def __init__(self, case, tagc):
        """tagc: the program to run; the program for latency is in the same folder."""
        self.case, self.tagc = case, tagc
        self.delay = self.tcp = self.lost_before = self.tunnel = None
        self.prefix = f"{PREFIX}{os.getpid()}"
        self.switch = f"{self.prefix}-switch"
        self.hosts = range(1, case.hosts + 1)

    def namespace(self, host):
        return f"{self.prefix}-h{host}"

    def __enter__(self):
        try:
            if self.case.wireguard:
                wireguard.check_programs()
            if self.case.latency:
                need_program("ping", "iputils-ping")
                program = delay.find_program(self.tagc)
        except LabError:
            remove_own()
            raise
        try:
            self._make(program if self.case.latency else None)
        except LabError as error:
            self._end()
            raise LabError(
                "hosts and links cannot be made here, which takes CAP_SYS_ADMIN, CAP_NET_ADMIN, and veth, "
                f"bridge and tbf in the kernel; containers often lack them: {error}"
            ) from None
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_):
        self._end()

    def _end(self):
        if self.delay:
            self.delay.kill()
        remove_own()

    def check(self):
        """Raises if the links are gone."""
        if self.delay:
            self.delay.check()

    def end_delay(self):
        """Ends the links with latency and returns their report, or None if there are none. Raises if frames
        were lost."""
        if not self.delay:
            return None
        self.check()
        lost = {
            name: n - self.lost_before[name]
            for name, n in self._dropped().items()
            if n > self.lost_before[name]
        }
        report, self.delay = self.delay.stop(), None
        if lost:
            raise LabError(
                "TAP devices dropped frames ("
                + ", ".join(f"{name}: {n}" for name, n in lost.items())
                + "): the "
                "processor was too busy for this rate, and the times are of no worth"
            )
        return report

    def _devices(self):
        hosts = [(self.namespace(host), "eth0") for host in self.hosts]
        return hosts + ([(self.switch, f"port{host}") for host in self.hosts] if len(self.hosts) > 2 else [])

    def _dropped(self):
        """Frames that each device dropped because its queue was full, without a shaper's own drops, which TCP
        handles."""
        return {
            f"{name} {device}": json.loads(call("ip", "-n", name, "-s", "-j", "link", "show", "dev", device))[
                0
            ]["stats64"]["tx"]["dropped"]
            for name, device in self._devices()
        }

    def _make(self, latency_program):
        for host in self.hosts:
            call("ip", "netns", "add", self.namespace(host))
        if len(self.hosts) > 2:
            call("ip", "netns", "add", self.switch)
        if latency_program:
            self._make_wires(latency_program)
        if len(self.hosts) > 2:
            self._make_bridge()
        elif not latency_program:
            self._make_veth(self.namespace(1), "eth0", self.namespace(2))
        for host in self.hosts:
            name = self.namespace(host)
            own = wireguard.outer_address(host) if self.case.wireguard else address(host)
            call("ip", "-n", name, "addr", "add", f"{own}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                call("ip", "-n", name, "link", "set", device, "up")
            self._shape(
                name, "eth0", self.case.way(host, 3 - host) if len(self.hosts) == 2 else self.case.up(host)
            )
            if self.case.latency:
                self.tcp = delay.set_tcp(
                    self, host, delay.window_bytes(bits_per_s(self.case.fastest()), self.case.latency)
                )
        if self.case.wireguard:
            self.tunnel = wireguard.join(
                {host: self.namespace(host) for host in self.hosts}, address, self.case.mtu
            )
        self.lost_before = self._dropped()  # a frame that waited when a shaper came in

    def _make_veth(self, namespace, device, other):
        """Joins a device of one namespace with eth0 of another."""
        mtu = ("mtu", self.case.mtu)
        end = ("peer", "name", "eth0", *mtu, "netns", other)
        call("ip", "-n", namespace, "link", "add", device, *mtu, "type", "veth", *end)

    def _make_wires(self, program):
        """A frame passes one wire between two hosts, and two when there is a switch between them."""
        devices, n = self._devices(), len(self.hosts)
        wires = [(devices[0], devices[1])] if n == 2 else list(zip(devices[:n], devices[n:]))
        one_way_s = delay.seconds(self.case.latency) / (1 if n == 2 else 2)
        self.delay = delay.Delay(program, one_way_s, bits_per_s(self.case.fastest()), wires)
        for name, device in devices:
            call(
                "ip", "-n", name, "link", "set", device, "mtu", self.case.mtu, "txqueuelen", TAP_QUEUE_FRAMES
            )

    def _make_bridge(self):
        switch = self.switch
        call("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        call("ip", "-n", switch, "link", "set", "bridge0", "up")
        for host in self.hosts:
            if not self.case.latency:
                self._make_veth(switch, f"port{host}", self.namespace(host))
            call("ip", "-n", switch, "link", "set", f"port{host}", "master", "bridge0", "up")
            self._shape(switch, f"port{host}", self.case.down(host))

    def _shape(self, namespace, device, rate):
        """What a host sends is shaped where it leaves the host; what it receives, at the switch's port, or
        with two hosts where it leaves the other one."""
        call(
            "tc",
            "-n",
            namespace,
            "qdisc",
            "add",
            "dev",
            device,
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            self.case.burst,
            "latency",
            self.case.queue_text(),
        )

    def inside(self, host, *words):
        """The words of a command that runs inside a host and sees that host's name."""
        return [
            "nsenter",
            f"--net=/run/netns/{self.namespace(host)}",
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname h{host} && exec "$@"',
            "sh",
            *map(str, words),
        ]

    def counters(self):
        """Bytes since the hosts were made, one number per host: what their interfaces sent and received, and
        what left through the shaper, where each segment's headers count (interfaces count those of large
        sends once)."""
        sent, received, shaped = [], [], []
        self.check()
        for host in self.hosts:
            name = self.namespace(host)
            stats = json.loads(call("ip", "-n", name, "-s", "-j", "link", "show", "dev", "eth0"))[0][
                "stats64"
            ]
            sent.append(stats["tx"]["bytes"])
            received.append(stats["rx"]["bytes"])
            shaped.append(
                json.loads(call("tc", "-n", name, "-s", "-j", "qdisc", "show", "dev", "eth0"))[0]["bytes"]
            )
        return {"sent_bytes": sent, "received_bytes": received, "shaped_bytes": shaped}


def _namespaces():
    """(name, pid of its lab) of all hosts and switches on this machine."""
    found = []
    for line in call("ip", "netns", "list").splitlines():
        match = re.match(rf"({PREFIX}(\d+)-\S+)", line)
        if match:
            found.append((match[1], int(match[2])))
    return found


def is_lab(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"lab" in file.read()
    except OSError:
        return False


def _processes(names):
    found = set()
    for name in names:
        found |= {int(pid) for pid in call("ip", "netns", "pids", name, check=False).split()}
    return found


def _end_processes(names):
    """Ends all programs in the namespaces; kills those that do not end within a second."""
    for attempt in range(100):
        processes = _processes(names)
        if not processes:
            return
        if attempt in (0, 20) or attempt > 40:
            for pid in processes:
                try:
                    os.kill(pid, signal.SIGTERM if attempt < 20 else signal.SIGKILL)
                except ProcessLookupError:
                    pass
        time.sleep(0.05)
    raise LabError(f"processes {sorted(_processes(names))} in the lab's hosts do not end")


def _remove(names):
    _end_processes(names)
    for name in names:
        call("ip", "netns", "del", name)


def remove_own():
    """Blocks signals until the end of the block, so that it is not interrupted half-way."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        _remove([name for name, pid in _namespaces() if pid == os.getpid()])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def remove_stale():
    """Removes the hosts of labs that have ended, and returns their names."""

    def is_stale(pid):
        return pid != os.getpid() and not is_lab(pid)

    stale = [name for name, pid in _namespaces() if is_stale(pid)]
    _remove(stale)
    for path in pathlib.Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        match = re.match(rf"{PREFIX}(\d+)-", path.name)
        if match and is_stale(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
            stale.append(str(path))
    return stale
