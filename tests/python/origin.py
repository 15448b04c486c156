"""One process that has imported torch, for all tests of one ctest: each is a fork of it. An import takes more
than two seconds of a processor, and there are some forty files of tests.

The first run.py of a ctest makes that process, and every run.py then asks it for a fork. It listens at an
abstract socket of Linux, of which nothing is left when it ends, and it ends with ctest. TAGC_TEST_ORIGIN,
which only ctest sets, names the build: one with sanitizers has another process."""

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import zlib

_PATIENCE_S = 60


def run():
    """Asks for a fork, which does what this process was to do, and exits as it does. Returns in that fork,
    and here where there is no process to ask and none can be made."""
    name, caller = os.environ.get("TAGC_TEST_ORIGIN"), os.getppid()
    if not name or not hasattr(os, "pidfd_open"):
        return
    address = f"\0tagc {zlib.crc32(name.encode()):08x} {caller}"  # it has no room for a path
    server = _connect(address) or _make(address, caller)
    if server is not None and server is not _FORK:
        sys.exit(_ask(server))


_FORK = object()  # instead of a connection: this process is a fork that some run.py has asked for


def _connect(address):
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
        return server
    except ConnectionRefusedError:
        server.close()
        return None


def _make(address, caller):
    """Returns a connection to the process, which one of those that get here makes, or None after a minute."""
    end = time.monotonic() + _PATIENCE_S
    with socket.socket(socket.AF_UNIX) as turn:
        while True:
            with contextlib.suppress(OSError):
                turn.bind(address + " is being made")  # by one at a time
                break
            time.sleep(0.05)
            if (server := _connect(address)) is not None:
                return server
            if time.monotonic() > end:
                return None
        if (server := _connect(address)) is not None:  # made before this one's turn
            return server
        import preloaded  # noqa: F401

        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(64)
        if os.fork() == 0:
            turn.close()
            return _serve(listening, caller)
        listening.close()
    return _connect(address)


# ---- the run.py that ctest has started ----


def _ask(server):
    """Returns the exit code of a fork with this process's arguments, environment, folder and output."""
    asked = {"argv": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(asked).encode()
    sys.stdout.flush()
    socket.send_fds(server, [struct.pack("<q", len(text))], [0, 1, 2])
    server.sendall(text)
    answer = server.recv(8, socket.MSG_WAITALL)
    if len(answer) < 8:
        print("the process that tests are forks of has ended", flush=True)
        return 1
    return struct.unpack("<q", answer)[0]


# ---- the process that has imported torch ----


def _serve(listening, caller):
    """Forks until the caller ends. Returns _FORK in each fork, and nowhere else."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in 0, 1, 2:  # ctest waits until all have closed its pipe
        os.dup2(null, fd)
    os.close(null)
    os.chdir("/")
    try:
        watched = selectors.DefaultSelector()
        watched.register(os.pidfd_open(caller), selectors.EVENT_READ, ("caller", None))
        watched.register(listening, selectors.EVENT_READ, ("asked", None))
        forks = {}  # pid -> (pidfd, connection)
        while True:
            for key, _ in watched.select():
                what, pid = key.data
                if what == "caller":
                    for pid in forks:
                        _kill(pid)
                    os._exit(0)
                if what == "asked":
                    connection, _ = listening.accept()
                    if not _is_mine(connection):
                        connection.close()
                        continue
                    request = _receive(connection)
                    if request is None:
                        connection.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        watched.close()
                        listening.close()
                        connection.close()
                        for fd, other in forks.values():
                            os.close(fd)
                            other.close()
                        _become(*request)
                        return _FORK
                    for fd in request[1]:
                        os.close(fd)
                    forks[pid] = os.pidfd_open(pid), connection
                    watched.register(forks[pid][0], selectors.EVENT_READ, ("ended", pid))
                    watched.register(connection, selectors.EVENT_READ, ("hung up", pid))
                elif pid in forks:  # "hung up": ctest has killed who asked, after a time-out
                    fd, connection = forks.pop(pid)
                    if what == "hung up":
                        _kill(pid)
                    _, status = os.waitpid(pid, 0)
                    with contextlib.suppress(OSError):
                        connection.sendall(struct.pack("<q", _code(status)))
                    watched.unregister(fd)
                    watched.unregister(connection)
                    os.close(fd)
                    connection.close()
    except BaseException:
        os._exit(1)


def _is_mine(connection):
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.getuid()


def _receive(connection):
    """Returns (what was asked, its input and output), or None if who asked has gone."""
    try:
        head, fds, _, _ = socket.recv_fds(connection, 8, 3)
        n_bytes = struct.unpack("<q", head)[0]
        asked = json.loads(connection.recv(n_bytes, socket.MSG_WAITALL))
        return asked, fds
    except (OSError, ValueError, struct.error):
        return None


def _become(asked, fds):
    os.setsid()  # it and its ranks can be killed together
    for to, fd in enumerate(fds):
        os.dup2(fd, to)
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = asked["argv"]


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _code(status):
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
