"""Tokens to train on. "manual": the manual of Perl, real text that Debian and Ubuntu ship (perl-doc), as in
the demo; "words": pseudo-random words, for experiments in which only time and bytes count."""

import pathlib
import random
import shutil

from common import ROOT, call

WORDS = "the of owner shard sends each rank its values index gather reduce step and when".split()


def _words(folder):
    rng = random.Random(7)
    lines = (" ".join(rng.choices(WORDS, k=9)) + ".\n" for _ in range(20000))
    folder.mkdir(parents=True)
    (folder / "words.txt").write_text("".join(lines))


def folder_of(name, tagc, scratch):
    """A folder with train.bin and val.bin, made by `tagc data`. The manual is kept for the next time, where
    the demo looks for it too."""
    if name == "words":
        _words(scratch / "text")
        call(tagc, "data", "--quiet", "--out", scratch / "data", scratch / "text", timeout=120)
        return scratch / "data"
    kept = ROOT / "data" / "demo"
    if not (kept / "val.bin").exists():
        print("corpus: the manual of Perl", flush=True)
        call(ROOT / "scripts" / "corpus.sh", scratch / "text", timeout=120)
        call(tagc, "data", "--quiet", "--lossy", "--out", scratch / "data", scratch / "text", timeout=300)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(scratch / "data", kept)
    return pathlib.Path("data/demo")
