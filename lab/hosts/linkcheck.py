"""Measures plain TCP bulk transfers on the lab's links with iperf3, to compare exchanges with."""

import json
import subprocess
import time

import delay
from common import LabError, bits_per_s
from hosts import address


def _client(network, host, to, seconds):
    # not counted: TCP opens its window, which takes round trips
    ahead = ["-O", 1] if network.case.latency else []
    return subprocess.Popen(
        network.inside(host, "iperf3", "-c", address(to), "-t", seconds, "-J", *ahead),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _result(network, client, seconds):
    try:
        answer = json.loads(client.communicate(timeout=seconds + 20)[0])
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        client.kill()
        network.check()
        raise LabError("iperf3 gave no answer between two hosts of the lab") from None
    if "error" in answer:
        raise LabError(f"iperf3 between two hosts of the lab: {answer['error']}")
    return answer["end"]["sum_received"]["bits_per_second"]


def _wait_for(network, host):
    """A server is ready when a short transfer to itself succeeds."""
    for _ in range(50):
        done = subprocess.run(
            network.inside(host, "iperf3", "-c", address(host), "-n", "1K"), capture_output=True
        )
        if done.returncode == 0:
            return
        time.sleep(0.1)
    raise LabError(f"iperf3's server does not answer on host h{host}")


def measure(network, seconds):
    """Every host to the next one, in bits per second: one pair at a time, then all at once, which fills each
    link in both directions."""
    hosts = list(network.hosts)
    waits = delay.measure(network, address, network.case.latency) if network.case.latency else None
    nexts = hosts[1:] + hosts[:1]
    servers = [
        subprocess.Popen(
            network.inside(host, "iperf3", "-s"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for host in hosts
    ]
    try:
        for host in hosts:
            _wait_for(network, host)
        one_way = [
            _result(network, _client(network, host, to, seconds), seconds) for host, to in zip(hosts, nexts)
        ]
        clients = [_client(network, host, to, seconds) for host, to in zip(hosts, nexts)]
        both_ways = [_result(network, client, seconds) for client in clients]
    finally:
        for server in servers:
            server.kill()
            server.wait()
    network.check()
    rates = [network.case.way(host, to) for host, to in zip(hosts, nexts)]
    _check(rates, one_way, both_ways)
    return {
        "rate": network.case.link_text(),
        "ways": rates,
        "tunnel": network.tunnel,
        "mtu": network.case.mtu,
        "burst": network.case.burst,
        "queue": f"tbf latency {network.case.queue_text()}",
        "latency": waits,
        "tcp": network.tcp,
        "tcp_one_way_bits_per_s": one_way,
        "tcp_both_ways_bits_per_s": both_ways,
    }


def _check(rates, one_way, both_ways):
    for rate, got in zip(rates * 2, one_way + both_ways):
        if got > 1.1 * bits_per_s(rate):
            raise LabError(
                f"the link is not shaped: {rate} was asked for, and iperf3 gets {got / 1e9:.2f} Gbit/s"
            )


def shortfall(link):
    """A text when this machine cannot fill the link in both directions, else None: measurements then are of
    the machine."""
    got = link["tcp_both_ways_bits_per_s"]
    least = min(
        bits / bits_per_s(rate) for bits, rate in zip(got, link.get("ways") or [link["rate"]] * len(got))
    )
    if least >= 0.85:
        return None
    return (
        f"plain TCP in both directions at once reaches only {least:.0%} of {link['rate']}: the processor is "
        "the "
        "limit here, not the link"
    )
