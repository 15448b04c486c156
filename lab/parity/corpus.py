"""Text to train on: what Debian's documentation packages say in English, as tokens of a BPE vocabulary made
from it.

    python lab/parity/parity.py corpus

Packages are downloaded and unpacked into the cache, never installed. A paragraph of 40 characters or more
counts once: the same licence, menu or warning on a thousand pages would be learnt by heart. Documents, not
lines, are held out."""

import gzip
import hashlib
import json
import os
import pathlib
import re
import subprocess

import numpy

PACKAGES = (
    "python3.11-doc", "postgresql-doc-15", "git-doc", "debian-reference-en", "perl-doc", "libstdc++-12-doc",
    "debian-policy",
    "linux-doc-6.1", "anarchism", "rust-doc", "sqlite3-doc", "octave-doc", "cmake-doc", "python-django-doc",
    "sphinx-doc",
    "bash-doc", "vim-doc", "erlang-doc", "python-scipy-doc", "python-pandas-doc", "dict-gcide",
)  # fmt: skip
# of the training text one piece in so many becomes tokens of a vocabulary of that size
ONE_IN = {1024: 8, 4096: 2}
HELD_OUT_OF = 50  # one document in so many is for validation
SHORT = 40  # characters; shorter paragraphs are headings and list items, and may come again
PLAIN = (".txt", ".rst", ".pod", ".md", ".dict")
HTML = (".html", ".htm", ".xhtml")
BLOCKS = frozenset(
    "p div h1 h2 h3 h4 h5 h6 li ul ol dl dt dd table tr pre blockquote section article br hr".split()
)
FOREIGN = re.compile(
    r"[./_-](ar|ca|cs|da|de|es|fi|fr|hu|id|it|ja|ko|nb|nl|pl|pt|pt-br|pt_br|ro|ru|sv|tr|uk|vi|zh|zh-cn|zh_cn|zh-tw)[./]",
    re.IGNORECASE,
)
BUILT = re.compile(
    r"(genindex|py-modindex|searchindex|/_sources/|/_static/|/src/|theindex|doxygen|/changelog|/copyright)",
    re.IGNORECASE,
)


def make(cache, n_vocabulary=None):
    """Documents as train.txt and val.txt in `cache`, and with a vocabulary as uint16 tokens in
    train-<n>.bin and val-<n>.bin. What is there already stays. Returns what the text is made of, and the
    number of tokens."""
    cache = pathlib.Path(cache)
    cache.mkdir(parents=True, exist_ok=True)
    found = _kept(cache / "text.json", lambda: _text(cache))
    if n_vocabulary:
        found["n_tokens"] = _kept(cache / f"tokens-{n_vocabulary}.json", lambda: _tokens(cache, n_vocabulary))
    return found


def _kept(path, make_it):
    if not path.exists():
        _write(path, make_it())
    return json.loads(path.read_text())


def _write(path, found):
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


# ---- packages -> documents ----


def documents(cache, names, seen, endings=PLAIN + HTML, one_in=HELD_OUT_OF):
    """Yields (package, its version, characters, whether it is held out, what no text had before) of each
    English document of Debian's packages. seen: paragraphs that count as had; grows."""
    for name in names:
        folder, version = _unpacked(cache, name)
        if folder is None:
            print(f"corpus: {name} is not in this Debian, left out", flush=True)
            continue
        for path in _files(folder, endings):
            text = _read(path)
            if len(text) < 400 or _is_foreign(text):
                continue
            is_held_out = _is_held_out(f"{name}/{path.relative_to(folder)}", one_in)
            yield name, version, len(text), is_held_out, _unseen(text, seen)


def _text(cache):
    seen, texts_of, packages = set(), {"train": [], "val": []}, []
    for name in PACKAGES:
        n_bytes = n_kept = n_documents = 0
        for _, version, n_chars, is_held_out, kept in documents(cache, [name], seen):
            n_bytes, n_kept, n_documents = n_bytes + n_chars, n_kept + len(kept), n_documents + 1
            if len(kept) >= 200:
                texts_of["val" if is_held_out else "train"].append(kept)
        if not n_documents:
            continue
        packages.append(
            {
                "name": name,
                "version": version,
                "n_documents": n_documents,
                "n_chars": n_bytes,
                "n_chars_kept": n_kept,
            }
        )
        print(
            (
                f"corpus: {name} {version}: {n_documents} documents, {n_bytes / 1e6:.1f} M characters, "
                f"{n_kept / 1e6:.1f} M new"
            ),
            flush=True,
        )
    repeats = _Repeats()
    for kind, texts in texts_of.items():
        for text in texts:
            repeats.add(text.encode())
        (cache / f"{kind}.txt").write_text("\n\n".join(texts))
    return {
        "packages": packages,
        "repeated_windows": repeats.share(),
        "n_bytes": {kind: (cache / f"{kind}.txt").stat().st_size for kind in texts_of},
    }


def _unpacked(cache, name):
    """(its folder, its version), (None, None) where apt does not know it."""
    folder = cache / "packages" / name
    if not folder.exists():
        debs = cache / "debs"
        debs.mkdir(exist_ok=True)
        if subprocess.run(["apt-get", "download", name], cwd=debs, capture_output=True).returncode != 0:
            return None, None
        deb = next(debs.glob(f"{name}_*.deb"))
        part = folder.with_name(f".{name}.part")
        part.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg", "-x", deb, part], check=True)
        part.rename(folder)
    deb = next((cache / "debs").glob(f"{name}_*.deb"))
    return folder, subprocess.run(
        ["dpkg-deb", "-f", deb, "Version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def _files(folder, endings):
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        bare = name.removesuffix(".gz").removesuffix(".dz")
        if path.is_file() and not path.is_symlink() and bare.lower().endswith(endings):
            if not FOREIGN.search("/" + bare) and not BUILT.search("/" + bare):
                yield path


def _read(path):
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    if path.name.removesuffix(".gz").lower().endswith(HTML):
        return _html(data)
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n")


def _html(data):
    from lxml import html

    try:
        page = html.document_fromstring(data)
    except (ValueError, html.etree.ParserError):
        return ""
    body = page.find("body")
    page = page if body is None else body
    for element in list(
        page.iter("script", "style", "nav", "header", "footer", "noscript", "svg", html.etree.Comment)
    ):
        element.drop_tree() if element.getparent() is not None else None
    for element in page.iter():
        if element.tag in BLOCKS:
            element.text = "\n\n" + (element.text or "") if element.tag != "br" else element.text
            element.tail = (
                "\n\n" + (element.tail or "") if element.tag != "br" else "\n" + (element.tail or "")
            )
    return page.text_content()


def _is_foreign(text):
    """Mostly not ASCII: another language's, or no text."""
    head = text[:20000]
    return sum(character > "\x7f" for character in head) > 0.1 * len(head)


def _is_held_out(name, one_in):
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % one_in == 0


def _unseen(text, seen):
    """Its paragraphs that no text had before. Adds them to `seen`."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        if not words:
            continue
        if len(words) >= SHORT:
            key = hashlib.blake2b(words.encode(), digest_size=8).digest()
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph.strip("\n").rstrip())
    return "\n\n".join(kept)


class _Repeats:
    """Which share of all windows of 64 bytes came before. Windows are sampled by their content, one in 16, so
    that both occurrences of one are sampled or neither."""

    N, ONE_IN = 64, 16
    PRIME, INVERSE = 0x9E3779B97F4A7C15, pow(0x9E3779B97F4A7C15, -1, 2**64)

    def __init__(self):
        self._pieces, self._n = [], 0

    def add(self, data):
        for start in range(0, max(0, len(data) - self.N), 1 << 20):
            block = numpy.frombuffer(data[start : start + (1 << 20) + self.N], numpy.uint8)
            if len(block) <= self.N:
                continue
            with numpy.errstate(over="ignore"):
                sums = numpy.concatenate(
                    [
                        [numpy.uint64(0)],
                        numpy.cumsum(
                            (block.astype(numpy.uint64) + 1) * self._powers(len(block), self.PRIME),
                            dtype=numpy.uint64,
                        ),
                    ]
                )
                hashes = (sums[self.N : -1] - sums[: -self.N - 1]) * self._powers(
                    len(block) - self.N, self.INVERSE
                )
                hashes = (hashes ^ (hashes >> numpy.uint64(31))) * numpy.uint64(0xBF58476D1CE4E5B9)
            self._pieces.append(hashes[hashes >> numpy.uint64(60) == 0])  # ONE_IN = 2^4

    @staticmethod
    def _powers(n, base, known={}):
        if base not in known or len(known[base]) < n:
            with numpy.errstate(over="ignore"):
                factors = numpy.full((1 << 20) + _Repeats.N + 1, base, numpy.uint64)
                factors[0] = 1
                known[base] = numpy.cumprod(factors, dtype=numpy.uint64)
        return known[base][:n]

    def share(self):
        hashes = numpy.concatenate(self._pieces) if self._pieces else numpy.empty(0, numpy.uint64)
        return 1 - len(numpy.unique(hashes)) / max(1, len(hashes))


# ---- documents -> tokens ----


def _tokens(cache, n_vocabulary):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_pieces(cache / "train.txt", every=32), trainer)
    tokenizer.save(str(cache / f"bpe-{n_vocabulary}.json"))
    counts = {}
    for kind in ("train", "val"):
        with open(cache / f"{kind}-{n_vocabulary}.part", "wb") as file:
            n = 0
            for piece in _pieces(
                cache / f"{kind}.txt", ONE_IN.get(n_vocabulary, 1) if kind == "train" else 1
            ):
                ids = numpy.array(tokenizer.encode(piece).ids, numpy.uint16)
                ids.tofile(file)
                n += len(ids)
        (cache / f"{kind}-{n_vocabulary}.part").replace(cache / f"{kind}-{n_vocabulary}.bin")
        counts[kind] = n
    print(
        (
            f"corpus: vocabulary of {n_vocabulary}: {counts['train'] / 1e6:.1f} M tokens, "
            f"{counts['val'] / 1e6:.2f} M held out"
        ),
        flush=True,
    )
    return counts


def _pieces(path, every=1):
    """The text in pieces of about 64 Ki characters, cut between lines; one in `every`."""
    with open(path) as file:
        for i, lines in enumerate(iter(lambda: file.readlines(1 << 16), [])):
            if i % every == 0:
                yield "".join(lines)


def tokens(cache, kind, n_vocabulary):
    return numpy.fromfile(pathlib.Path(cache) / f"{kind}-{n_vocabulary}.bin", numpy.uint16)
