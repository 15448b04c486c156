"""A folder with versions of weights, on a file system or in an object store: one sender writes, any number of
receivers read, and neither waits for the other.

    whole-0000000016-0-of-1-6f1c20aa        all weights of a version, a frame of each sender
    changes-0000000017-0-of-1-6f1c20aa      what changed since the version before
    manifest-0000000017.json                what is here; the newest counts

A manifest appears as a whole or not at all, and once only: by a link of a complete file, or by a put that
fails where there is such an object. So a sender that dies leaves files that no manifest names, and of two
senders that take each other for dead one is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from tagc._library import Error

CHUNK_BYTES = 4 << 20
_FORMAT = 1
_MANIFEST = "manifest-"
_FILE = re.compile(r"(?:whole|changes|manifest)-(\d{10})[-.].*")


class Store(Protocol):
    """Where files are. A name has no folder in it."""

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes:
        """Returns a small file. FileNotFoundError if it is not there."""
        ...

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields a file from its begin. FileNotFoundError if it is not there."""
        ...

    def write(self, name: str, buffers: Iterable[Any]) -> None:
        """Makes a file of buffers. It is there once this returns, as a whole."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Makes a small file, as a whole. FileExistsError if there is one."""
        ...

    def remove(self, name: str) -> None: ...


def open_store(address: str | os.PathLike[str]) -> Store:
    """Returns the store at a path, or at an address that fsspec knows, such as s3://bucket/policy."""
    if not isinstance(address, (str, os.PathLike)) or not os.fspath(address):
        raise Error(
            "argument", f"store is {address!r}, must be a path or an address such as s3://bucket/policy"
        )
    text = os.fspath(address)
    scheme, is_address, rest = text.partition("://")
    if not is_address:
        return Folder(text)
    return Folder(rest) if scheme == "file" else Objects(text)


class Folder:
    """Of a file system, which may be a shared one that renames and links as POSIX says."""

    def __init__(self, path: str) -> None:
        self._path = pathlib.Path(path)

    def names(self) -> list[str]:
        return os.listdir(self._path) if self._path.exists() else []

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def chunks(self, name: str) -> Iterator[bytes]:
        with open(self._path / name, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def write(self, name: str, buffers: Iterable[Any]) -> None:
        with self._complete(name, buffers) as path:
            os.replace(path, self._path / name)

    def create(self, name: str, data: bytes) -> None:
        with self._complete(name, [data]) as path:
            os.link(path, self._path / name)

    @contextlib.contextmanager
    def _complete(self, name: str, buffers: Iterable[Any]) -> Iterator[pathlib.Path]:
        """Yields a file with these buffers that is on the disk, under a name that readers pass over."""
        self._path.mkdir(parents=True, exist_ok=True)
        path = self._path / f".{name}-{secrets.token_hex(4)}"
        try:
            with open(path, "xb") as file:
                for buffer in buffers:
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)
        folder = os.open(self._path, os.O_RDONLY)  # else the name might not outlive a crash of the host
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class Objects:
    """Of any file system of fsspec. Whether two senders can both write a manifest depends on it: s3fs on AWS,
    gcsfs and adlfs refuse the second put. Others may look first and write then, or not look."""

    def __init__(self, address: str) -> None:
        try:
            import fsspec
        except ImportError as missing:
            raise Error("unsupported", f"{address} needs fsspec: pip install fsspec") from missing
        try:
            self._files, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
        except (ImportError, ValueError) as problem:
            raise Error("argument", f"store is {address}: {problem}") from problem
        self._path = path.rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def names(self) -> list[str]:
        try:
            return [
                path.rsplit("/", 1)[-1] for path in self._files.ls(self._path, detail=False, refresh=True)
            ]
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        return self._files.cat_file(self._at(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        with self._files.open(self._at(name), "rb", block_size=CHUNK_BYTES, cache_type="readahead") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def write(self, name: str, buffers: Iterable[Any]) -> None:
        self._files.makedirs(self._path, exist_ok=True)
        with self._files.open(self._at(name), "wb") as file:
            for buffer in buffers:
                file.write(buffer)

    def create(self, name: str, data: bytes) -> None:
        self._files.makedirs(self._path, exist_ok=True)
        self._files.pipe_file(self._at(name), data, mode="create")

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))


# ---- manifests ----


class Version(NamedTuple):
    """A version's files, one of each sender, and their bytes."""

    version: int
    files: list[tuple[str, int]]

    @property
    def n_bytes(self) -> int:
        return sum(n_bytes for _, n_bytes in self.files)


@dataclasses.dataclass
class Manifest:
    """What a store has. run: of the sender. version: the newest. whole, changes: by version, oldest first."""

    run: int
    version: int
    whole: list[Version]
    changes: list[Version]

    @property
    def name(self) -> str:
        return f"{_MANIFEST}{self.version:010d}.json"

    def files(self) -> set[str]:
        return {name for one in (*self.whole, *self.changes) for name, _ in one.files}

    def path(self, run: int, version: int, to: int) -> list[Version]:
        """Returns what turns a version of a run into `to`: what changed, if all of it is here, else the last
        of all weights, and what changed since. Empty if there is no way."""
        changes = {one.version: one for one in self.changes if one.version <= to}
        if run == self.run and version and all(v in changes for v in range(version + 1, to + 1)):
            return [changes[v] for v in range(version + 1, to + 1)]
        for whole in reversed(self.whole):
            if whole.version <= to and all(v in changes for v in range(whole.version + 1, to + 1)):
                return [whole, *(changes[v] for v in range(whole.version + 1, to + 1))]
        return []

    def text(self) -> bytes:
        fields = {"format": _FORMAT, **dataclasses.asdict(self), "run": f"{self.run:016x}"}
        for kind in ("whole", "changes"):
            fields[kind] = [{"version": one.version, "files": one.files} for one in getattr(self, kind)]
        return json.dumps(fields).encode()

    @classmethod
    def of(cls, name: str, text: bytes) -> Manifest:
        try:
            fields = json.loads(text)
            if fields["format"] != _FORMAT:
                raise Error("unsupported", f"{name} has format {fields['format']}, this tagc reads {_FORMAT}")
            whole, changes = (
                [
                    Version(int(one["version"]), [(str(n), int(size)) for n, size in one["files"]])
                    for one in rows
                ]
                for rows in (fields["whole"], fields["changes"])
            )
            manifest = cls(int(fields["run"], 16), int(fields["version"]), whole, changes)
        except (ValueError, KeyError, TypeError) as problem:
            raise Error("corrupt", f"{name} is no manifest of weights: {problem!r}") from problem
        if any(not file or "/" in file or file.startswith(".") for file in manifest.files()):
            raise Error("corrupt", f"{name} names files outside of its folder")
        return manifest


def newest(store: Store, tries: int = 5) -> Manifest | None:
    """Returns the newest manifest; None if there is none."""
    for _ in range(tries):
        names = manifests(store.names())
        if not names:
            return None
        try:
            return Manifest.of(names[-1], store.read(names[-1]))
        except FileNotFoundError:  # two newer ones have come since
            continue
    raise Error("transport", f"the newest manifest was removed {tries} times before it could be read")


def version_of(name: str) -> int | None:
    """Returns the version of which a file of a store is; None if it is none of a Publisher's."""
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None


def manifests(names: Sequence[str]) -> list[str]:
    """Returns which of these are manifests, oldest first."""
    return sorted(name for name in names if name.startswith(_MANIFEST))
