"""libtagc's own TCP connections between the ranks of a group (include/tagc/native.h). Messages then need no
lock of the interpreter.

Ranks learn each other's addresses, and a secret of rank 0, through the user's process group. From the secret
come two keys for each pair of ranks and each connection's name. A program that can reach a port, but does not
know the secret, is refused. With TAGC_NATIVE_TLS, TLS encrypts what they send."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hmac
import ipaddress
import os
import pathlib
import socket
import time
import warnings
from collections.abc import Sequence

import torch.distributed as dist

from tagc import _library as lib
from tagc._library import LOST, Error
from tagc.torch.exchange import internals

SECRET_BYTES = 32
PATIENCE_S = 60.0  # of connecting: all ranks have just met
KEY_BYTES = 32
ADDRESS_BYTES = 32
MOST_SOCKETS = 16

# The first that is set says which interface: names, separated by commas. NCCL's are beginnings of names; "="
# in front: whole names; "^": all but these.
VARIABLES = ("TAGC_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
FAMILIES = {"AF_INET": 4, "AF_INET6": 6, "": 0}
FAMILY_VARIABLES = ("TAGC_SOCKET_FAMILY", "NCCL_SOCKET_FAMILY")
SOCKETS_VARIABLE = "TAGC_SOCKETS"
TLS_VARIABLE = "TAGC_NATIVE_TLS"
LEAST_FILE_BYTES = 16


class Port:
    """An open port of this rank, of `ranks`, as messages call them. n_sockets: connections with each peer.
    has_tls: whether they are encrypted."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        local: str | None,
        family: int,
        n_sockets: int | None = None,
        has_tls: bool = False,
    ) -> None:
        self.rank, self.name, self.world_size = rank, ranks[rank], len(ranks)
        self.n_sockets = _n_sockets(len(ranks)) if n_sockets is None else n_sockets
        self.has_tls = has_tls
        self._handle = ctypes.c_void_p()
        options = lib.initialised(lib.NativeOptions, "tagc_native_options_init")
        names = (ctypes.c_int32 * len(ranks))(*ranks)
        options.local = None if local is None else local.encode()
        options.family, options.n_sockets, options.tls = family, self.n_sockets, int(has_tls)
        options.names = ctypes.cast(names, ctypes.POINTER(ctypes.c_int32))
        lib.call("tagc_native_open", ctypes.byref(options), rank, len(ranks), ctypes.byref(self._handle))
        address = ctypes.create_string_buffer(ADDRESS_BYTES)
        lib.call("tagc_native_address", self._handle, address)
        self.address = address.raw

    @property
    def is_loopback(self) -> bool:
        """Whether only its own host reaches it."""
        n_bytes = 4 if self.address[5] == 4 else 16
        return ipaddress.ip_address(self.address[16 : 16 + n_bytes]).is_loopback

    def connect(self, addresses: Sequence[bytes], secret: bytes, name: str, timeout_s: float) -> None:
        """Connects to all ranks. Collective, but a failure is an Error here only. name: of this connection,
        the same on all ranks and never used before with this secret."""

        if own := tls_secret():  # who reads the process group's traffic does not have it
            secret = hmac.digest(own, secret, "sha256")

        def key(proves: int, checks: int) -> bytes:
            return hmac.digest(secret, f"{name} {proves} {checks}".encode(), "sha256")

        keys = b"".join(key(self.rank, r) + key(r, self.rank) for r in range(self.world_size))
        try:
            lib.call("tagc_native_connect", self._handle, b"".join(addresses), keys, timeout_s)
        except Error as failure:
            if failure.status not in LOST:
                raise
            raise Error(
                failure.status, f"{failure} (another interface: {VARIABLES[0]}, in the environment)"
            ) from failure
        finally:
            if n_refused := lib.load().tagc_native_refused(self._handle):
                warnings.warn(
                    f"tagc: rank {self.name} refused {n_refused} connections of programs that do not know "
                    "this job's secret",
                    stacklevel=2,
                )

    def comm(self, options: lib.CommOptions) -> ctypes.c_void_p:
        """Returns a tagc_comm, which owns this."""
        comm = ctypes.c_void_p()
        lib.call("tagc_comm_create_native", self._handle, ctypes.byref(options), ctypes.byref(comm))
        self._handle = ctypes.c_void_p()
        return comm

    def close(self) -> None:
        lib.load().tagc_native_destroy(self._handle)
        self._handle = ctypes.c_void_p()


class Native:
    """The way of a Comm by connections of a Port."""

    name = "native"

    def __init__(self, port: Port, timeout_s: float) -> None:
        self._port, self._timeout_s = port, timeout_s
        self._comm = ctypes.c_void_p()

    def comm(self, options: lib.CommOptions) -> ctypes.c_void_p:
        """Returns a tagc_comm."""
        options.timeout_s = self._timeout_s
        try:
            self._comm = self._port.comm(options)
        except BaseException:
            self._port.close()
            raise
        return self._comm

    def wait(self, timeout_s: float) -> bool:
        """Waits until no message is under way. Returns whether that is so."""
        until = time.monotonic() + timeout_s
        while not lib.load().tagc_comm_is_idle(self._comm):
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """After the comm was destroyed."""
        self._comm = ctypes.c_void_p()


def open_port(
    rank: int, ranks: Sequence[int], may_be_loopback: bool, n_sockets: int | None = None
) -> tuple[Port | None, str]:
    """Returns (a port, ""), or (None, why there can be none). may_be_loopback: else another interface is
    taken, unless a variable names it. n_sockets: connections with each peer; None: as many as the environment
    says. If these take too many files, it is one, and the text says why."""
    try:
        local, family = _named_interface(), _family()
        if local is None and may_be_loopback:
            local = _own_address(family)
        port, why_fewer = functools.partial(Port, rank, ranks, local, family), ""
        has_tls = tls_secret() is not None
        try:
            return port(n_sockets, has_tls), ""
        except Error as failure:
            if failure.status != "memory" or n_sockets == 1:
                raise
            why_fewer = str(failure)
        return port(1, has_tls), why_fewer
    except Error as failure:
        return None, str(failure)


# ---- the environment ----


def tls_secret() -> bytes | None:
    """Returns None unless connections are to be encrypted; else what all ranks know beside rank 0's secret:
    the bytes of a file, or b""."""
    text = os.environ.get(TLS_VARIABLE, "").strip()
    if text in ("", "0"):
        return None
    if text == "1":
        return b""
    try:
        found = pathlib.Path(text).read_bytes()
    except OSError as failure:
        raise Error(
            "argument",
            f"{TLS_VARIABLE} is {text!r}, must be 1 or the path of a file with a secret: {failure.strerror}",
        ) from failure
    if len(found) < LEAST_FILE_BYTES:
        raise Error(
            "argument", f"{TLS_VARIABLE}: {text} has {len(found)} bytes, must have {LEAST_FILE_BYTES} or more"
        )
    return found


def _n_sockets(world_size: int) -> int:
    """Returns how many connections there are with each peer: one fills a link whose processor has time."""
    text = os.environ.get(SOCKETS_VARIABLE, "")
    if not text:
        return 4 if world_size <= 4 else 2 if world_size <= 16 else 1
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_SOCKETS:
        raise Error(
            "argument", f"{SOCKETS_VARIABLE} is {text!r}, must be a whole number from 1 to {MOST_SOCKETS}"
        )
    return int(text)


def _family() -> int:
    """Returns 4, 6, or 0 where the environment does not say."""
    for variable in FAMILY_VARIABLES:
        if text := os.environ.get(variable, "").strip():
            if text not in FAMILIES:
                raise Error("argument", f"{variable} is {text!r}, must be 'AF_INET' or 'AF_INET6'")
            return FAMILIES[text]
    return 0


def _named_interface() -> str | None:
    """Returns the names that the environment has, as libtagc wants them; None where it has none."""
    for variable in VARIABLES:
        text = os.environ.get(variable, "").strip()
        if text and variable.startswith("NCCL"):
            return _as_nccl(variable, text)
        if text:
            return text
    return None


def _as_nccl(variable: str, text: str) -> str:
    there = [name for _, name in socket.if_nameindex()]
    parts = [part for part in text.lstrip("^=").split(",") if part]

    def matches(name: str) -> bool:
        return name in parts if "=" in text[:2] else name.startswith(tuple(parts))

    found = [name for name in there if matches(name) != text.startswith("^")]
    if text.startswith("^"):
        found = [name for name in found if name != "lo"] or found
    if not found:
        raise Error("argument", f"{variable} is {text!r}, and this host has {', '.join(there)}")
    return ",".join(found)


def _own_address(family: int) -> str | None:
    """Returns this host's address on the way to the rank that hosts torch's store, or what its name means;
    None where neither is known, or has an address of that family (4, 6, or 0: either)."""
    wanted = {4: socket.AF_INET, 6: socket.AF_INET6}.get(family, socket.AF_UNSPEC)
    store = internals.default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        with contextlib.suppress(OSError):
            there, kind, _, _, address = socket.getaddrinfo(
                store.host, store.port or 1, wanted, socket.SOCK_DGRAM
            )[0]
            with socket.socket(there, kind) as probe:  # sends nothing
                probe.connect(address)
                return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found = str(socket.getaddrinfo(socket.gethostname(), None, wanted)[0][4][0])
        with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((found, 0))  # that it is this host's
            return found
    return None
