"""python -m tagc data: text and JSON lines into the token files that `tagc train` reads.

A token is a byte, or what a tokenizer of the package tokenizers makes. Which files are read, in which order,
and what goes to validation is as in `tagc data` (engine/data/corpus.c), so that bytes give the same files."""

from __future__ import annotations

import argparse
import array
import ctypes
import dataclasses
import gzip
import json
import mmap
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from tagc import _library as lib
from tagc._library import Error
from tagc.commands import options
from tagc.commands.parser import Parser, UsageError

_EXAMPLES = """examples:
  python -m tagc data --out data/web --tokenizer tokenizer.json crawl.jsonl.gz books/
  python -m tagc data --out data/books --train-bpe 8192 books/
  python -m tagc data --out data/bytes --field body crawl.jsonl
"""
_PIECE_BYTES = 1 << 20  # read at once
_MOST_BYTES = 16 << 20  # of a piece in which no line ends
_BATCH = 4 << 20  # characters that a tokenizer gets at once
_MARK = b"\xef\xbb\xbf"  # a byte order mark, which is of the file and not of its text
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


# ---- which files ----


class Inputs:
    """The files that files and folders name, each once, and what was passed over, by reason."""

    def __init__(self, named: Iterable[str]) -> None:
        self.files: list[str] = []
        self.skipped: dict[str, list[str]] = {}
        self._seen: set[tuple[int, int]] = set()
        for path in named:
            about = os.stat(path)
            if stat.S_ISDIR(about.st_mode):
                self._add_folder(os.scandir(path))
            elif stat.S_ISREG(about.st_mode):
                self._add_once(path, about)
            else:
                self.files.append(path)  # what is named is read, a pipe of the shell, too

    def _add_folder(self, entries: Iterable[os.DirEntry[str]]) -> None:
        for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
            try:
                why = self._add(entry)
            except PermissionError:
                why = "cannot be read"
            except OSError:
                why = "links to nothing"
            if why:
                self.skipped.setdefault(why, []).append(entry.path)

    def _add(self, entry: os.DirEntry[str]) -> str | None:
        """Returns why the entry is passed over."""
        if entry.name.startswith("."):
            return "hidden"
        if entry.is_dir(follow_symlinks=False):
            self._add_folder(os.scandir(entry.path))
            return None
        about = os.stat(entry.path)
        if stat.S_ISDIR(about.st_mode):
            return "links to folders"
        if not stat.S_ISREG(about.st_mode):
            return "pipes, sockets or devices"
        if not os.access(entry.path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            return "cannot be read"
        self._add_once(entry.path, about)
        return None

    def _add_once(self, path: str, about: os.stat_result) -> None:
        if (about.st_dev, about.st_ino) in self._seen:
            self.skipped.setdefault("reached before, each is counted once", []).append(path)
        else:
            self._seen.add((about.st_dev, about.st_ino))
            self.files.append(path)


# ---- texts ----


@dataclasses.dataclass
class Texts:
    """The documents in files. Reading counts what it meets."""

    files: Sequence[str]
    field: str
    lossy: bool
    n_bytes: int = 0
    n_invalid: int = 0

    def pieces(self, path: str) -> Iterator[str | None]:
        """Yields the texts of a file in pieces, and None behind each document."""
        with open(path, "rb") as plain:
            file: IO[bytes] = gzip.open(plain) if plain.peek(2)[:2] == b"\x1f\x8b" else plain  # type: ignore[assignment]
            try:
                yield from self._lines(file, path) if is_lines(path) else self._document(file, path)
            except (EOFError, gzip.BadGzipFile, zlib.error) as failure:
                raise Error("corrupt", f"{path}: damaged gzip data: {failure}") from None

    def _document(self, file: IO[bytes], path: str) -> Iterator[str | None]:
        offset, more = 0, file.read(_PIECE_BYTES)
        held = more.removeprefix(_MARK)
        while more or held:
            more = file.read(_PIECE_BYTES)
            held += more
            n = _whole(held) if more else len(held)
            yield self._text(held[:n], path, offset)
            held, offset = held[n:], offset + n
        yield None

    def _lines(self, file: IO[bytes], path: str) -> Iterator[str | None]:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(_MARK) if number == 1 else line
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                value = json.loads(line)
            except ValueError as failure:
                raise Error("corrupt", f"{where}: not a JSON object: {failure}") from None
            if not isinstance(value, dict) or self.field not in value:
                fields = ", ".join(f'"{name}"' for name in value) if isinstance(value, dict) else "no fields"
                raise Error(
                    "corrupt", f'{where}: no field "{self.field}"; it has {fields}. --field takes another'
                )
            if not isinstance(value[self.field], str | None):
                raise Error("corrupt", f'{where}: field "{self.field}" is no string')
            text = (value[self.field] or "").encode("utf-8", "surrogatepass")
            yield self._text(text, f"{where}: the text", 0)
            yield None

    def _text(self, raw: bytes, where: str, offset: int) -> str:
        self.n_bytes += len(raw)
        try:
            if self.lossy or b"\0" not in raw:
                return raw.decode()
            at, what = raw.index(b"\0"), "no text (--lossy keeps such bytes)"
        except UnicodeDecodeError as failure:
            if self.lossy:
                text = raw.decode("utf-8", "surrogateescape")
                self.n_invalid += len(re.findall("[\udc80-\udcff]", text))
                return text
            at, what = (
                failure.start,
                "not UTF-8 there (iconv converts other encodings; --lossy keeps such bytes)",
            )
        raise Error("corrupt", f"{where}: byte {offset + at} is 0x{raw[at]:02x}, which is {what}")


def is_lines(path: str) -> bool:
    return path.removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def _whole(held: bytes) -> int:
    """Returns how many bytes can be encoded alone: up to the last line that text follows, since patterns of
    GPT-2's kind look at white space beside white space. All characters, where no line ends for too long."""
    at = held.rfind(b"\n")
    while at > 0:
        if at + 1 < len(held) and not held[at - 1 : at].isspace() and not held[at + 1 : at + 2].isspace():
            return at + 1
        at = held.rfind(b"\n", 0, at)
    if len(held) < _MOST_BYTES:
        return 0
    n = len(held) - 1
    while n > len(held) - 4 and held[n] & 0xC0 == 0x80:
        n -= 1
    return n


# ---- tokens ----


class Bytes:
    name = "bytes"
    vocab_size = 256
    end_of_text: int | None = 0

    def encode(self, texts: list[str]) -> Iterable[Iterable[int]]:
        return (text.encode("utf-8", "surrogateescape") for text in texts)


class Tokenizer:
    """Tokens of a tokenizer.json, of which `content` is the bytes. In a text, "<|endoftext|>" is text."""

    def __init__(self, content: bytes, where: str, end: str | None) -> None:
        try:
            self._tokenizer = _tokenizers().Tokenizer.from_buffer(content)
        except ValueError as failure:
            raise Error("corrupt", f"{where} is no tokenizer.json: {failure}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.content = content
        self.name = f"tokenizers-{lib.load().tagc_checksum(content, len(content)):016x}"
        self.vocab_size = max(vocabulary.values()) + 1
        names = (end,) if end else _ENDS
        self.end_of_text = (
            None if end == "none" else next((vocabulary[n] for n in names if n in vocabulary), None)
        )
        if self.end_of_text is None and end != "none":
            raise UsageError(
                f"{where} has no token {' or '.join(names)}: --end-of-text names the token that ends a text "
                "(none: none does)"
            )

    def encode(self, texts: list[str]) -> Iterable[Iterable[int]]:
        plain = [re.sub("[\udc80-\udcff]", "\ufffd", text) for text in texts]
        return (e.ids for e in self._tokenizer.encode_batch_fast(plain, add_special_tokens=False))


Tokens = Bytes | Tokenizer


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise Error(
            "unsupported", 'a tokenizer needs the package tokenizers: pip install "tagc-train[data]"'
        ) from None
    return tokenizers


def _train(texts: Texts, n_vocabulary: int) -> bytes:
    """Returns a tokenizer.json of GPT-2's kind, trained on all the texts."""
    package = _tokenizers()
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=n_vocabulary,
        special_tokens=[_ENDS[0]],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for path in texts.files for piece in texts.pieces(path) if piece)
    made.train_from_iterator((re.sub("[\udc80-\udcff]", "\ufffd", piece) for piece in pieces), trainer)
    texts.n_bytes = texts.n_invalid = 0  # they are read once more
    return bytes(made.to_str().encode())


# ---- token files ----


class Output:
    """A token file under a temporary name, until commit()."""

    HEADER = struct.Struct("<8s4I2Q64sI12x")  # and its checksum

    def __init__(self, folder: str, name: str, tokens: Tokens) -> None:
        self.n, self._tokens = 0, tokens
        self._code = "B" if tokens.vocab_size <= 1 << 8 else "H" if tokens.vocab_size <= 1 << 16 else "I"
        self._width = array.array(self._code).itemsize
        self._path = os.path.join(folder, name)
        self._temporary = f"{self._path}.tmp-{os.getpid()}"
        self._file = open(self._temporary, "w+b")
        self._file.write(bytes(self.HEADER.size + 8))

    def append(self, ids: Iterable[int]) -> None:
        made = array.array(self._code, ids)
        if sys.byteorder == "big":
            made.byteswap()
        self._file.write(made)
        self.n += len(made)

    def move_tail(self, n: int, other: Output) -> None:
        start = self._file.seek(-n * self._width, os.SEEK_END)
        other._file.write(self._file.read())
        self._file.seek(start)
        self._file.truncate()
        self.n, other.n = self.n - n, other.n + n

    def finish(self) -> None:
        """Writes the header, and all to disk."""
        self._file.flush()
        checksum, tokens, n_payload = lib.load().tagc_checksum, self._tokens, self.n * self._width
        with mmap.mmap(self._file.fileno(), 0) as map_:
            view = ctypes.c_char.from_buffer(map_, self.HEADER.size + 8)
            payload = checksum(ctypes.addressof(view), n_payload)
            del view
        end = 0xFFFFFFFF if tokens.end_of_text is None else tokens.end_of_text
        header = self.HEADER.pack(
            b"tagctok\n", 2, self._width, tokens.vocab_size, 0, self.n, payload, tokens.name.encode(), end
        )
        self._file.seek(0)
        self._file.write(header + struct.pack("<Q", checksum(header, len(header))))
        self._file.flush()
        os.fsync(self._file.fileno())

    def commit(self) -> None:
        os.replace(self._temporary, self._path)

    def close(self) -> None:
        """Removes what was not committed."""
        self._file.close()
        if os.path.exists(self._temporary):
            os.remove(self._temporary)


class Corpus:
    """Tokens for training and for validation, which gets whole documents where there are many, else tails."""

    def __init__(self, train: Output, val: Output | None, share: float, tokens: Tokens) -> None:
        self.train, self.val, self._share, self._tokens = train, val, share, tokens
        self._output: Output | None = None  # of the document that was begun
        self._n_before = 0
        self.n_documents = 0

    def add(self, pieces: Iterable[str | None], by_document: bool) -> None:
        for batch in _batches(pieces):
            encoded = iter(self._tokens.encode([piece for piece in batch if piece]))
            for piece in batch:
                if piece is None:
                    self._end(by_document)
                elif piece:
                    self._begin(by_document).append(next(encoded))

    def _begin(self, by_document: bool) -> Output:
        if self._output is None:
            self._output, self._n_before = self.train, self.train.n
            if self.val and by_document and self.val.n < self._share * (self.train.n + self.val.n):
                self._output = self.val
        return self._output

    def _end(self, by_document: bool) -> None:
        if self._output is None:
            return  # an empty document
        end = [] if self._tokens.end_of_text is None else [self._tokens.end_of_text]
        n_tail = int(self._share * (self.train.n - self._n_before))
        if self.val and not by_document and n_tail > 0:
            self.train.move_tail(n_tail, self.val)
            self.val.append(end)
        self._output.append(end)
        self._output = None
        self.n_documents += 1


def _batches(pieces: Iterable[str | None]) -> Iterator[list[str | None]]:
    batch: list[str | None] = []
    n = 0
    for piece in pieces:
        batch.append(piece)
        n += len(piece or " ")
        if n >= _BATCH:
            yield batch
            batch, n = [], 0
    yield batch


# ---- the command ----


def _parser() -> Parser:
    made = Parser(
        prog="python -m tagc data",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Makes token files of text, plain or gzip, and of JSON lines (.jsonl, .ndjson).",
    )
    add = made.add_argument
    add("inputs", nargs="+", metavar="FILE|FOLDER")
    add("--out", required=True, metavar="DIR", help="folder for train.bin, val.bin and tokenizer.json")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json; without it each byte is a token")
    which.add_argument(
        "--train-bpe",
        metavar="N",
        type=options.whole(257, 1 << 24),
        help="trains byte pairs on the text, for a vocabulary of N",
    )
    add("--end-of-text", metavar="TOKEN", help=f"ends a text; none: none does. Default: {' or '.join(_ENDS)}")
    add("--field", default="text", metavar="NAME", help="of JSON lines, holds the text. Default: text")
    add(
        "--val-share",
        type=options.real(0, 0.5),
        default=0.1,
        metavar="X",
        help="for validation. Default: 0.1",
    )
    add("--lossy", action="store_true", help="keep bytes that are not UTF-8 (a tokenizer gets U+FFFD)")
    add("--force", action="store_true", help="overwrite the files that --out has already")
    add("--quiet", action="store_true", help="print nothing but failures")
    return made


def _check_out(out: str, names: Sequence[str], force: bool) -> None:
    os.makedirs(out, exist_ok=True)
    for path in (os.path.join(out, name) for name in names):
        if os.path.lexists(path) and not force:
            raise Error("argument", f"{path} is there already: --force overwrites it")


def _tokens_of(arguments: argparse.Namespace, texts: Texts) -> Tokens:
    if arguments.train_bpe:
        return Tokenizer(_train(texts, arguments.train_bpe), "the new tokenizer", arguments.end_of_text)
    if not arguments.tokenizer:
        return Bytes()
    with open(arguments.tokenizer, "rb") as file:
        return Tokenizer(file.read(), arguments.tokenizer, arguments.end_of_text)


def _build(arguments: argparse.Namespace, texts: Texts, tokens: Tokens) -> Corpus:
    outputs: list[Output] = []
    try:
        for name in ("train.bin", "val.bin")[: 1 + (arguments.val_share > 0)]:
            outputs.append(Output(arguments.out, name, tokens))
        train, val = outputs[0], outputs[1] if len(outputs) > 1 else None
        corpus = Corpus(train, val, arguments.val_share, tokens)
        many = arguments.val_share > 0 and len(texts.files) >= 2 / arguments.val_share
        for path in texts.files:
            corpus.add(texts.pieces(path), many or is_lines(path))
        if not corpus.n_documents:
            raise Error("argument", f"{arguments.inputs[0]}: {len(texts.files)} files and no text in them")
        if val and val.n == 0:
            raise Error(
                "argument",
                f"--val-share is {arguments.val_share:g}: of {train.n} tokens nothing is left for val.bin; "
                "give more text",
            )
        for output in outputs:
            output.finish()
        if isinstance(tokens, Tokenizer):
            with open(os.path.join(arguments.out, "tokenizer.json"), "wb") as file:
                file.write(tokens.content)
        for output in reversed(outputs):
            output.commit()
    finally:
        for output in outputs:
            output.close()
    return corpus


def _told(why: str, paths: Sequence[str]) -> str:
    """A terminal gets no control characters."""
    named = ", ".join(re.sub(r"[\x00-\x1f\x7f]", "?", path[-120:]) for path in paths[:3])
    return f"skipped {len(paths)}: {why} ({named}{', ...' if len(paths) > 3 else ''})"


def run(words: Sequence[str]) -> int:
    arguments = _parser().parse_args(list(words))
    names = ["train.bin", "val.bin"]
    own = os.path.join(arguments.out, "tokenizer.json")
    if (
        arguments.train_bpe
        or arguments.tokenizer
        and not (
            os.path.exists(own)
            and os.path.exists(arguments.tokenizer)
            and os.path.samefile(own, arguments.tokenizer)
        )
    ):
        names.append("tokenizer.json")
    if arguments.end_of_text and not (arguments.train_bpe or arguments.tokenizer):
        raise UsageError("--end-of-text is for a tokenizer: the byte 0 ends a text of bytes")
    inputs = Inputs(arguments.inputs)
    skipped = [_told(why, paths) for why, paths in inputs.skipped.items()]
    if not inputs.files:
        raise Error("argument", "; ".join([f"{arguments.inputs[0]}: no file in it", *skipped]))
    _check_out(arguments.out, names, arguments.force)
    texts = Texts(inputs.files, arguments.field, arguments.lossy)
    tokens = _tokens_of(arguments, texts)
    corpus = _build(arguments, texts, tokens)
    if not arguments.quiet:
        n_val = corpus.val.n if corpus.val else 0
        print(
            f"{len(texts.files)} files, {corpus.n_documents} documents, {texts.n_bytes:,} bytes of text -> "
            f"{arguments.out}: {corpus.train.n:,} training and {n_val:,} validation tokens "
            f"({tokens.name}, vocabulary {tokens.vocab_size})"
        )
        print(*skipped, sep="\n", end="\n" if skipped else "")
        if texts.n_invalid:
            print(f"{texts.n_invalid} bytes are not UTF-8")
    return 0
