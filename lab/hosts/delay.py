"""Latency of the lab's links: the program tagc-lab-latency (latency.c), which connects two TAP devices
and delays each frame; and a check of the delay by ping."""

import json
import os
import pathlib
import re
import select
import statistics
import subprocess

from common import LabError

PROGRAM = "tagc-lab-latency"
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1}
LEAST_S, MOST_S = 1e-4, 1
PINGS, WARM_UP_PINGS = 20, 3  # the first ones wait for ARP
TOLERANCE_S, TOLERANCE = 5e-4, 0.05  # of the round trip, whichever is more
SPARE_BYTES = 16 << 20


def seconds(text):
    """The seconds of "10ms", or None if the text is not a latency."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text) if isinstance(text, str) else None
    return round(float(match[1]) * UNITS[match[2]], 9) if match else None


def is_latency(text):
    found = seconds(text)
    return found is not None and LEAST_S <= found <= MOST_S


def queue_ms(latency):
    """The longest wait in a shaper's queue when none is asked for: two round trips, which hold as many bytes
    as TCP has in flight, and 50 ms at least."""
    return max(50, round(4e3 * seconds(latency)))


def window_bytes(bits_per_s, latency):
    """What TCP may have under way: four times rate times round trip, since half of a receive buffer is for
    headers, and Linux's usual 6 MB at least."""
    return max(6 << 20, int(4 * bits_per_s / 8 * 2 * seconds(latency)))


def find_program(tagc):
    path = pathlib.Path(tagc).parent / PROGRAM
    if not os.access(path, os.X_OK):
        raise LabError(
            f"{path} is not there, which holds frames back for experiments with latency; make build makes it"
        )
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise LabError("/dev/net/tun cannot be opened, and experiments with latency need TAP devices")
    return path


class Delay:
    """Wires with latency. The constructor makes them, and stop() removes them."""

    def __init__(self, program, one_way_s, bits_per_s, wires):
        """wires: ((namespace, device), (namespace, device)) each."""
        queue_bytes = int(bits_per_s / 8 * one_way_s * 2) + SPARE_BYTES
        words = [
            program,
            f"--one-way-us={round(1e6 * one_way_s)}",
            f"--queue-bytes={queue_bytes}",
            *(f"{a}:{device_a}={b}:{device_b}" for (a, device_a), (b, device_b) in wires),
        ]
        self.process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        ready, _, _ = select.select([self.process.stdout], [], [], 10)
        if not ready or self.process.stdout.readline() != "ready\n":
            self.process.kill()
            said = self.process.communicate()[1].strip()
            raise LabError(said or f"{PROGRAM} did not get ready within 10 s")

    def check(self):
        """Raises if the wires are gone, because programs on them would never end."""
        if self.process.poll() is None:
            return
        status, said = self.process.returncode, self.process.stderr.read().strip()
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise LabError(
            f"{PROGRAM} {how} while its links were in use: the hosts had no network any more"
            + (f"; it said: {said}" if said else "")
        )

    def stop(self):
        """Ends the program and returns its report. Raises if it had ended before, or if frames were lost."""
        self.check()
        self.process.terminate()
        try:
            said = self.process.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired:
            self.kill()
            raise LabError(f"{PROGRAM} does not end") from None
        try:
            report = json.loads(said)
        except json.JSONDecodeError:
            raise LabError(
                f"{PROGRAM} ended without its report, with status {self.process.returncode}"
            ) from None
        if report["dropped_frames"]:
            raise LabError(
                f"{report['dropped_frames']} frames were dropped by {PROGRAM}, whose queue was full: the "
                "processor was too busy for this rate, and the times are of no worth"
            )
        return report

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def _ping(network, host, to_address, interval_s):
    words = network.inside(
        host, "ping", "-n", "-c", PINGS + WARM_UP_PINGS, "-i", f"{interval_s:.3f}", "-W", 5, to_address
    )
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise LabError(f"ping from host h{host} to {to_address} does not end") from None
    found = [
        (int(number), 1e-3 * float(ms))
        for number, ms in re.findall(r"seq=(\d+).* time=([0-9.]+) ms", done.stdout)
    ]
    counted = [s for number, s in found if number > WARM_UP_PINGS]
    if len(counted) < PINGS // 2:
        raise LabError(
            f"ping from host h{host} to {to_address}: {len(counted)} of {PINGS} answers; it said: "
            f"{(done.stderr or done.stdout).strip()[-300:]}"
        )
    return counted


def measure(network, addresses, latency):
    """Round trips of every host to the next one over idle links, by ping; checked against twice the latency
    asked for."""
    one_way_s = seconds(latency)
    hosts = list(network.hosts)
    least, medians = [], []
    for host, to in zip(hosts, hosts[1:] + hosts[:1]):
        network.check()
        samples = _ping(network, host, addresses(to), max(0.01, min(one_way_s, 0.1)))
        least.append(min(samples))
        medians.append(statistics.median(samples))
    check(latency, least)
    return {
        "asked": latency,
        "one_way_s": one_way_s,
        "ping_round_trip_s": medians,
        "ping_least_round_trip_s": least,
    }


def check(latency, least):
    """The shortest round trips, which other work on the machine disturbs least."""
    due = 2 * seconds(latency)
    allowed = max(TOLERANCE_S, TOLERANCE * due)
    for found in least:
        if abs(found - due) > allowed:
            raise LabError(
                f"the links are not as asked for: latency {latency} makes a round trip of {1e3 * due:g} ms, "
                "and "
                f"ping measures {1e3 * found:.3g} ms, off by more than {1e3 * allowed:g} ms"
            )


def set_tcp(network, host, window):
    """Sets TCP as a user of such links would: windows that fit rate times round trip, no slow start after
    each pause, and no metrics saved from earlier connections. Returns the settings for the result."""
    settings = {
        "tcp_rmem": f"4096 131072 {window}",
        "tcp_wmem": f"4096 16384 {window}",
        "tcp_slow_start_after_idle": "0",
        "tcp_no_metrics_save": "1",
    }
    for name, value in settings.items():
        words = network.inside(host, "sh", "-c", f'echo "$1" >/proc/sys/net/ipv4/{name}', "sh", value)
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise LabError(f"net.ipv4.{name} cannot be set in a host of the lab: {done.stderr.strip()}")
    return settings
