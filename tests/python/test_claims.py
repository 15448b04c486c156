"""What README and the guide say is run by a test, or stands in a stored result or study: README says by which
for each sentence of README, and claims.txt for the guide. The beginning of each paragraph there is an entry,
that of a sentence where another test holds what follows. So a sentence that comes is held by the entry before
it, and must find in that test what can be looked for: each name in code, and each figure. Figures may also be
in the stored row that the paragraph points to, or (=FILE) in the source that defines them. A test that reads
the figures of the page by itself needs to hold no copy of them."""

import functools
import math
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "tests/python/claims.txt"
TESTS, ANNEX = "tests/python/test_", "tests/python/"
ANNEXES = (
    "collectives",
    "compiled",
    "fsdp1",
    "integrations",
    "local",
    "pipeline",
    "quorum",
    "report",
    "weights",
)
TABLE, ROWS = f"{TESTS}commands.py::test_", "lab/tests/check_stored.py::check_"

README = {
    "makes training on several machines faster": "lab/results/speed.json",
    "It is a PyTorch library with a core in C": f"{TESTS}docs.py::test_snippet",
    "HOST is the address of one of the two": f"{TESTS}run.py::test_torchrun",
    "takes a script as it is": f"{TESTS}run.py::test_ddp",
    "It pays between machines": f"{TABLE}the_guide_says_what_its_commands_say",
    "Within one machine it does not help": f"{TESTS}advice.py::test_hosts_of_several_ranks",
    "measures whether it pays on yours": f"{TESTS}advice.py::test_measuring",
    "No GPU yet": "lab/results/speed.json",
    "All measurements are from processors": "lab/results/speed.json",
    "The code for CUDA is tested without a GPU": "tests/gpu/cuda",
    "Losses were compared for models of up to 12 M": "lab/docs/parity.md",
    "There compress(model, optimizer) ended": "lab/docs/fork.md",
    "Times were compared up to 162 M": "lab/results/speed.json",
    "lowers Adam's beta1 from 0.9 to 0.5": f"{TESTS}gentle.py::test_memories_make_betas",
    "keeps it, and sends every value in 4 bits": f"{TESTS}gentle.py::test_levels",
    "A GPU holds 1 byte more per parameter": f"{TESTS}memory.py::test_memory",
    "Questions and bugs": "SECURITY.md",
    "prints the call for its best row": f"{TABLE}the_code_of_the_best_row_is_that_of_readme",
    "begins with what to do before you compress": f"{TESTS}claims.py::test_what_comes_first",
    "GPT-2 with 162 M parameters": "lab/experiments/speed.toml",
    "One machine with two cores plays two": "lab/experiments/speed.toml",
    "tagc sends 5 % of the gradient": "lab/experiments/speed.toml",
    "With four micro-steps, a step accumulates": "lab/experiments/speed-accumulate.toml",
    "With four micro-steps at 1 Gbit/s, rounds differ": "lab/results/speed-accumulate.json",
    "PowerSGD is compared in time alone": "lab/docs/peers.md",
    "The more a GPU computes": f"{TABLE}readme_says_what_these_commands_say_by_tokens",
    "Forecasts for 1 B parameters, four machines": f"{TABLE}readme_says_what_these_commands_say_by_tokens",
    "also where compression loses": f"{ROWS}hosts",
    "each beside a run without compression": "lab/docs/first-try.md",
    "Chance alone is half a per cent": "lab/docs/results.md",
    "In three of five models a beta1 of 0.5": "lab/docs/results.md",
    "sends gradients to the ranks that own": f"{TESTS}fsdp2.py::test_fsdp2",
    "At first tagc sends every gradient value": f"{TESTS}gentle.py::test_levels",
    "When a gradient is mostly noise": f"{TESTS}gentle.py::test_levels",
    "Parameters travel as 4-bit differences": f"{TESTS}gathers.py::test_two_levels",
    "is the method in one file": f"{TESTS}direct_simple.py",
    "tagc began as an implementation of": "lab/docs/paper.md",
}  # fmt: skip


def paragraphs_of(text):
    """Without code, pictures and headings; items of a list are paragraphs, and so is a table."""
    text = re.sub(r"^```.*?^```$|^[#!].*?$|^ {4}.*?$|^\|[-:| ]*$\n", "", text, flags=re.M | re.S)
    found = re.split(r"\n\n|^- |^\d\. |^(?=\|)(?<!\|\n)", text, flags=re.M)
    found = [one if one[:1] == "|" else " ".join(one.split()) for one in found]
    return [one for one in found if len(re.findall(r"[A-Za-z]{2,}", one)) > 2]


def split(paragraph):
    """Returns its sentences, or its rows."""
    if paragraph[0] == "|":
        return [row.strip("| ") for row in paragraph.splitlines() if row]
    return re.split(r"(?:(?<=[.:;])|(?<=[.:;]\*\*)) (?=[A-Z`*\[])", paragraph)


def plain_of(sentence):
    """Without the marks of markdown."""
    return re.sub(r"\]\([^)]*\)|[\[*`]", "", sentence)


def sentences_of(text):
    paragraphs = [one for one in paragraphs_of(text) if one[0] != "|"]
    found = [plain_of(one) for paragraph in paragraphs for one in split(paragraph)]
    return [sentence for sentence in found if len(re.findall(r"[A-Za-z]{2,}", sentence)) > 2]


def is_gone(holder):
    """An annex may have gone, with the tests of its folder."""
    return any(f"{name}/" in holder and not (ROOT / ANNEX / name).is_dir() for name in ANNEXES)


def is_there(holder):
    path, _, name = holder.partition("::")
    path = path if (ROOT / path).exists() else f"{path}.sh"
    if not (ROOT / path).exists():
        return is_gone(holder)
    return not name or f"def {name}(" in (ROOT / path).read_text()


def test_every_sentence_of_readme():
    text = (ROOT / "README.md").read_text()
    sentences = [sentence for sentence in sentences_of(text) if not sentence.startswith("Documentation, ")]
    assert len(sentences) > 20
    open_ones = [one for one in sentences if not any(words in one for words in README)]
    assert not open_ones, f"README has sentences that no entry here names: {open_ones}"
    gone = [words for words in README if not any(words in one for one in sentences_of(text))]
    assert not gone, f"README no longer says: {gone}"


def table():
    """Returns {page: [(beginning, [holder])]} of claims.txt."""
    found = {}
    for line in CLAIMS.read_text().splitlines():
        if line.startswith("== "):
            entries = found.setdefault(line[3:], [])
        elif line and line[0] != "#":
            beginning, _, holders = line.partition(" | ")
            entries.append((beginning, holders.split()))
    return found


def file_of(holder):
    """Returns the path of a holder in claims.txt; None if there is none."""
    name = holder.removeprefix("=").partition("::")[0]
    folder, _, stem = name.rpartition("/")
    places = [name, *(f"tests/{name}.{ending}" for ending in ("c", "sh"))]
    places += [f"tests/{folder}/test_{stem}.{ending}" for ending in ("c", "sh")]
    places += [f"tests/python/{folder}/test_{stem}.{ending}" for ending in ("py", "sh")]
    places += [f"tests/python/{name}.py"]
    return next((ROOT / place for place in places if (ROOT / place).is_file()), None)


@functools.cache
def text_of(path):
    """A test, with the modules and programs of ours that it names."""
    text = path.read_text()
    if path.is_relative_to(ROOT / "tests"):
        words = {*re.findall(r"[\w./]+\.(?:py|sh|h|toml)\b", text)}
        words |= {f"{name}.py" for name in re.findall(r"^(?:import|from) (\w+)", text, re.M)}
        places = (
            path.parent,
            ROOT,
            ROOT / "tests/python",
            ROOT / "tests/python/run_scripts",
            ROOT / "examples/pytorch",
        )
        found = {place / word for word in words for place in places if (place / word).is_file()} - {path}
        text += "".join(one.read_text(errors="replace") for one in sorted(found))
    return text


def figures_of(text):
    return {number.replace(",", "") for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)}


def evidence(page, sentence, paragraph, holders):
    """Returns the names in code and the figures of a sentence that its holders and the stored rows that its
    paragraph points to have not."""
    texts = [text_of(file_of(holder)) for holder in holders]
    linked = [ROOT / place for place in re.findall(r"\]\((?:\.\./)+(lab/[^)#]+)", paragraph)]
    texts += [path.read_text() for path in linked if path.is_file()]
    code = [one for one in re.findall(r"`([^`]+)`", sentence) if not one.startswith("ctest ")]
    words = [word for one in code for word in one.split() if not (ROOT / word).exists()]
    names = {
        one for one in re.findall(r"[A-Za-z_]\w{2,}", " ".join(words)) if not re.fullmatch(r"[A-Z]+", one)
    }
    tests = [text for text, holder in zip(texts, holders) if holder[0] != "="] + texts[len(holders) :]
    there = {*re.findall(r"[A-Za-z_]\w{2,}", " ".join(tests))}
    plain = re.sub(r"`[^`]+`|\]\([^)]*\)", " ", sentence)
    figures = {one.replace(",", "") for one in re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)", plain)}
    known = figures_of(" ".join(texts))
    if any("::" in holder and f"docs/guide/{page}.md" in text for text, holder in zip(texts, holders)):
        figures = set()
    return sorted(names - there), sorted(n for n in figures if not {n, f"{float(n) / 100:g}"} & known)


def claims_of(page, text):
    """Yields (sentence, paragraph, holders) of a page, in the order of its entries, which must all be met."""
    entries, holders = iter(table()[page]), None
    beginning, following = next(entries)
    for paragraph in paragraphs_of(text):
        for number, sentence in enumerate(split(paragraph)):
            if plain_of(sentence).startswith(beginning):
                holders = following
                beginning, following = next(entries, ("(the end)", None))
            elif number == 0:
                raise AssertionError(
                    f"{page}: no entry begins as {sentence!r}; the next one is {beginning!r}"
                )
            yield sentence, paragraph, holders
    assert beginning == "(the end)", f"{page}: nothing begins as {beginning!r}"


PAGES = sorted(path.stem for path in (ROOT / "docs/guide").glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_of_the_guide(page):
    text = (ROOT / f"docs/guide/{page}.md").read_text()
    claims = list(claims_of(page, text))
    holders = {holder for _, _, held in claims for holder in held}
    assert not (gone := sorted(holder for holder in holders if not is_held(holder))), gone
    lacking = []
    for sentence, paragraph, held in claims:
        if any(map(is_gone, held)):
            continue
        names, figures = evidence(page, sentence, paragraph, held)
        if names or figures:
            lacking.append(f"{names + figures} of {plain_of(sentence)!r} not in {' '.join(held)}")
    assert not lacking, "\n".join(lacking)


def entropy(p):
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def test_bits_of_the_table_of_choices():
    """By formulas: positions as sites.md has them, a scale of 16 bits for 128 values of a gradient and for
    256 of a parameter, two bits of index and 32 for a value that any rank kept. tests/exchange/test_volume.c
    and tests/cli/test_cli_wire.sh count what is sent."""
    text = (ROOT / "docs/guide/choosing.md").read_text()
    rows = [row.split(" | ") for row in split(next(p for p in paragraphs_of(text) if "what is sent" in p))]
    figures = r"[\d.]+(?= /|$| per)"
    said = {row[-2].strip("| "): list(map(float, re.findall(figures, row[-1]))) for row in rows}

    def direct(p, bits):
        return 1.09 * entropy(p) + p * (bits + 1 / 8)

    expected = {
        "`--exchange sketch --ratio 2` / `4` / `10`, `--index or`": [2 + 32 / r for r in (2, 4, 10)],
        "the same with `--index sum4`": [8 + 32 / r for r in (2, 4, 10)],
        "`--exchange direct` (95 % sparsity, 2-bit values)": [direct(0.05, 2)],
        "the same at 0.9 / 0.9875": [direct(0.1, 2), direct(0.0125, 2)],
        "`--exchange direct --values int4`": [direct(0.05, 4)],
        "`--exchange direct --sparsity 0 --values int8` / `int4` / `int2`": [b + 1 / 8 for b in (8, 4, 2)],
        "`--sharding grad --gather delta8` / `delta4` / `delta2`": [b + 1 / 16 for b in (8, 4, 2)],
        "`--sharding full --gather int8`": [2 * (8 + 1 / 16)],
    }
    for choice, bits in expected.items():
        assert len(said[choice]) == len(bits), (choice, said[choice])
        assert all(abs(a - b) < 0.03 for a, b in zip(said[choice], bits)), (choice, said[choice], bits)
    sites = (ROOT / "docs/guide/sites.md").read_text()  # docs/guide/sites.md has the formulas themselves
    assert f"(C: {4 + 1 / 8:.1f}, with `--block 32` {4 + 16 / 32:g})" in sites
    assert "1.09 H(p) + p (v + 1/8)" in sites and "q (max(v, 4) + 1/8)" in sites


def is_held(holder):
    if is_gone(holder):
        return True
    path, name = file_of(holder), holder.partition("::")[2]
    return path is not None and (not name or f"def test_{name}(" in path.read_text())


def test_what_holds_them_is_there():
    assert not (gone := sorted(holder for holder in README.values() if not is_there(holder))), gone


def test_what_comes_first():
    """The guide's first section is what to do before compressing, in three points, on its first screen."""
    text = (ROOT / "docs/guide/pytorch.md").read_text()
    first = text[text.index("\n## ") + 1 :].split("\n## ")[0]
    assert first.startswith("## Before you compress") and len(re.findall(r"^\d\. ", first, re.M)) == 3
    assert text[: text.index(first) + len(first)].count("\n") < 25


def test_sentences_are_found():
    page = "# A\n\nOne two *three*. `x y`: Six [seven](nine.md) ten.\n\n| a b c |\n\n- **X.** Yes we do.\n"
    assert sentences_of(page) == ["One two three.", "Six seven ten.", "Yes we do."]


def test_what_nothing_holds_is_found(monkeypatch):
    monkeypatch.setattr(f"{__name__}.table", lambda: {"x": [("One", ["claims"]), ("Four", ["claims"])]})
    assert [held for *_, held in claims_of("x", "One two three. Two four six.\n\nFour five six.")] == 3 * [
        ["claims"]
    ]
    for text, words in (
        ("One two three.\n\nA new paragraph here.\n\nFour five six.", "no entry begins as 'A new"),
        ("One two three.", "nothing begins as 'Four'"),
    ):
        with pytest.raises(AssertionError, match=words):
            list(claims_of("x", text))
    absent = "no_such_" + "name"
    assert evidence("x", f"`{absent}` and `is_held` take {97 + 0.25} % of 3 in bf16.", "", ["claims"]) == (
        [absent],
        [str(97 + 0.25)],
    )
    assert not is_held("claims::nothing") and is_held("claims::every_sentence_of_the_guide")
