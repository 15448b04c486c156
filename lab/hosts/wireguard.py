"""WireGuard between the lab's hosts: every host has a tunnel to each other one, and the addresses by which
programs know the hosts are the tunnels'. The kernel's WireGuard where there is one, else wireguard-go, which
ends with its host."""

import os
import subprocess

from common import LabError, call, need_program

OVERHEAD_BYTES = 80  # of a packet: outer IPv6 and UDP headers, WireGuard's own, its tag
PORT = 51820


def outer_address(host):
    return f"10.78.0.{host}"


def check_programs():
    need_program("wg", "wireguard-tools")


def _key(*words, given=None):
    return subprocess.run(
        ["wg", *words], input=given, capture_output=True, text=True, check=True
    ).stdout.strip()


def join(namespaces, address, mtu):
    """namespaces: host -> name. What carries the tunnels, in words."""
    private = {host: _key("genkey") for host in namespaces}
    public = {host: _key("pubkey", given=key) for host, key in private.items()}
    kind = "the kernel's WireGuard"
    for host, name in namespaces.items():
        # wireguard-go's sockets lie in one folder for all namespaces
        device = f"wg{os.getpid() % 10**7}h{host}"
        try:
            call("ip", "-n", name, "link", "add", device, "type", "wireguard")
        except LabError:
            kind = "wireguard-go"
            need_program(kind, kind)
            done = subprocess.run(
                ["ip", "netns", "exec", name, kind, device], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise LabError(f"wireguard-go does not start on host h{host}: {done.stderr[-300:]}") from None
        peers = []
        for other in namespaces:
            if other != host:
                peers += [
                    "peer",
                    public[other],
                    "endpoint",
                    f"{outer_address(other)}:{PORT}",
                    "allowed-ips",
                    f"{address(other)}/32",
                ]
        done = subprocess.run(
            [
                "ip",
                "netns",
                "exec",
                name,
                "wg",
                "set",
                device,
                "listen-port",
                str(PORT),
                "private-key",
                "/dev/stdin",
                *peers,
            ],
            input=private[host],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise LabError(f"wg set on host h{host}: {done.stderr.strip()}")
        call("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", device)
        call("ip", "-n", name, "link", "set", device, "mtu", mtu - OVERHEAD_BYTES, "up")
    return kind
