"""python -m tagc data: token files as the engine reads them, from any tokenizer."""

import gzip
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys

import numpy
import pytest

from tagc import _library as lib
from tagc.commands import data, main

tokenizers = pytest.importorskip("tokenizers")

ENGINE = pathlib.Path(os.environ["TAGC_LIBRARY"]).parent / "tagc"
WORDS = (
    "the of owner shard sends each rank its values index gather reduce step when Straße 木🎉 we'll".split()
)


def made(capsys, code, *words):
    """Returns what the command prints."""
    assert main.main(["data", *map(str, words)]) == code
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def engine(*words):
    if not ENGINE.is_file():
        pytest.skip("the trainer is not built")
    return subprocess.run([ENGINE, *map(str, words)], check=True, capture_output=True, text=True).stdout


def text_of(seed, n_bytes):
    """Words, with white space of all kinds between them."""
    draw = numpy.random.default_rng(seed)
    gaps = [" ", " ", " ", ". ", "\n", "\n\n", "\n\n\n", "\n  ", " \n", "\t", "", "\r\n"]
    n = n_bytes // 4
    words, between = draw.choice(WORDS, n), draw.choice(gaps, n)
    return "".join(word + gap for word, gap in zip(words, between)).encode()[:n_bytes].decode(errors="ignore")


def read(path):
    """Returns the header's fields and the tokens, from the picture in engine/data/token_file.h."""
    raw = pathlib.Path(path).read_bytes()
    fields = struct.unpack("<8sIIIIQQ64sI12sQ", raw[:128])
    magic, version, width, n_vocabulary, zero, n, payload, name, end, zeros, header = fields
    assert (magic, version, zero, zeros) == (b"tagctok\n", 2, 0, bytes(12))
    assert header == lib.load().tagc_checksum(raw[:120], 120)
    assert payload == lib.load().tagc_checksum(raw[128:], len(raw) - 128)
    tokens = numpy.frombuffer(raw, {1: "u1", 2: "<u2", 4: "<u4"}[width], offset=128)
    assert len(tokens) == n
    return name.rstrip(b"\0").decode(), n_vocabulary, end, tokens.tolist()


def documents(tokens, end):
    """Returns the tokens between the ends."""
    found = [[]]
    for token in tokens:
        if token == end:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == []
    return found


@pytest.fixture
def tiny(tmp_path):
    """A tokenizer.json with all that models bring along: it adds a token in front, cuts, and pads."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text_of(1, 50_000)], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.enable_truncation(16)
    made.enable_padding(length=64, pad_id=1)
    made.save(str(tmp_path / "tiny.json"))
    return tmp_path / "tiny.json"


def test_tokens_are_the_tokenizers_and_the_engine_trains_on_them(tmp_path, capsys, tiny, monkeypatch):
    monkeypatch.setattr(data, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(data, "_BATCH", 5000)
    texts = [text_of(2, 300_000), "short </s> <s>", "", text_of(3, 5000)]  # the first is read in pieces
    for name, text in zip("abcd", texts):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text.encode())
    said = made(capsys, 0, "--out", tmp_path / "out", "--tokenizer", tiny, "--val-share", 0, tmp_path / "in")
    assert "4 files, 3 documents" in said
    name, n_vocabulary, end, tokens = read(tmp_path / "out" / "train.bin")
    assert (n_vocabulary, end) == (400, 1) and name.startswith("tokenizers-")
    assert f"({name}, vocabulary 400)" in said
    assert not (tmp_path / "out" / "val.bin").exists()
    whole = tokenizers.Tokenizer.from_file(str(tiny))
    whole.no_truncation()
    whole.no_padding()
    found = documents(tokens, end)
    assert [whole.decode(ids, skip_special_tokens=False) for ids in found] == [text for text in texts if text]
    assert [found[0], found[2]] == [
        whole.encode(text, add_special_tokens=False).ids for text in (texts[0], texts[3])
    ]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tiny.read_bytes()

    assert f"vocabulary 400, 1 ends a text, tokenizer {name}" in engine("info", tmp_path / "out")
    run = tmp_path / "run"
    small = ["--model", "tiny", "--steps", "3", "--batch-size", "2", "--seq-len", "16", "--ranks", "2"]
    engine("train", "--data", tmp_path / "out", "--out", run, "--quiet", *small)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 5 < [line["loss"] for line in steps if line["type"] == "step"][0] < 7  # ln 400 is 6.0
    # Numbers of tokens go in and come out: the engine knows no text of them.
    ids = whole.encode("the owner", add_special_tokens=False).ids
    lines = engine("generate", "--from", run, "--prompt", " ".join(map(str, ids)), "--n-tokens", "5")
    numbers = list(map(int, lines.split()))
    assert numbers[: len(ids)] == ids and len(numbers) == len(ids) + 5
    refused = subprocess.run(
        [ENGINE, "generate", "--from", run, "--prompt", "the"], capture_output=True, text=True
    )
    assert (
        refused.returncode == 1
        and f"but those of {name}, so numbers of tokens from 0 to 399" in refused.stderr
    )


def test_a_trained_vocabulary(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(text_of(4, 200_000).encode())
    for out in ("one", "two"):
        made(capsys, 0, "--out", tmp_path / out, "--train-bpe", 300, "--quiet", tmp_path / "a.txt")
    name, n_vocabulary, end, tokens = read(tmp_path / "one" / "train.bin")
    assert (n_vocabulary, end) == (300, 0)
    trained = tokenizers.Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    (train,) = documents(tokens, end)
    (val,) = documents(read(tmp_path / "one" / "val.bin")[3], end)
    assert (
        trained.decode(train + val) == (tmp_path / "a.txt").read_bytes().decode()
    )  # the tail is for validation
    assert len(val) == (len(train) + len(val)) // 10
    for file in ("train.bin", "val.bin", "tokenizer.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    # The same tokenizer by its file, over itself, makes the same files.
    own = tmp_path / "two" / "tokenizer.json"
    made(capsys, 0, "--out", tmp_path / "two", "--tokenizer", own, "--force", "--quiet", tmp_path / "a.txt")
    assert (tmp_path / "one" / "val.bin").read_bytes() == (tmp_path / "two" / "val.bin").read_bytes()


def fill(folder, n_files):
    """A folder with what folders have, and files of text among it."""
    (folder / "m").mkdir(parents=True)
    for i in range(n_files):
        text = text_of(100 + i, 10 + 997 * i % 5000)
        (folder / ("m/" if i % 3 else "") / f"{i:03d}.txt").write_text(text)
    (folder / "B").write_bytes(b"\xef\xbb\xbfa mark")
    (folder / "packed.gz").write_bytes(gzip.compress(b"com") + gzip.compress(b"pressed"))
    (folder / "empty").write_text("")
    (folder / ".hidden").write_text("no")
    (folder / "hard").hardlink_to(folder / "B")
    (folder / "soft").symlink_to("B")
    (folder / "gone").symlink_to("/nowhere")
    (folder / "ring").symlink_to("ring")
    (folder / "up").symlink_to("..")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        before = os.getcwd()
        os.chdir(folder)  # names of sockets are short
        listening.bind("socket")
        os.chdir(before)


@pytest.mark.parametrize("n_files", [3, 60])
def test_bytes_are_those_of_the_engines_command(tmp_path, capsys, n_files):
    fill(tmp_path / "in", n_files)
    inputs = [tmp_path / "in" / "000.txt", tmp_path / "in", tmp_path / "in" / "m"]
    said = made(capsys, 0, "--out", tmp_path / "python", *inputs)
    assert f"{n_files + 3} files, {n_files + 2} documents" in said
    for line in (
        f"skipped 1: hidden ({tmp_path}/in/.hidden)",
        f"skipped 2: links to nothing ({tmp_path}/in/gone, {tmp_path}/in/ring)",
        f"skipped 1: links to folders ({tmp_path}/in/up)",
        f"skipped 2: pipes, sockets or devices ({tmp_path}/in/pipe, {tmp_path}/in/socket)",
        f"skipped {2 + 1 + n_files * 2 // 3}: reached before, each is counted once ({tmp_path}/in/000.txt, ",
    ):
        assert line in said
    by_c = engine("data", "--out", tmp_path / "c", *inputs)
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "python" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    skips = [line for line in said.splitlines() if line.startswith("skipped")]
    assert sorted(skips) == sorted(line for line in by_c.splitlines() if line.startswith("skipped"))


def test_json_lines(tmp_path, capsys):
    lines = (
        b'\xef\xbb\xbf{"text": "one", "body": "eins"}\r\n\n{"body": "zwei", "text": "t\\u00fc\\n{\\"o\\""}\n'
        b'{"text": null, "body": ""}\n{"text": "three", "body": "drei"}\n{"text": "four", "body": "vier"}'
    )
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.ndjson").write_bytes(lines)
    for field, train, val in (
        ("text", ["one", "three", "four"], ['tü\n{"o"']),
        ("body", ["eins", "drei", "vier"], ["zwei"]),
    ):
        for name in ("a.jsonl.gz", "b.ndjson"):
            out = tmp_path / field / name
            said = made(capsys, 0, "--out", out, "--field", field, "--val-share", 0.25, tmp_path / name)
            assert "1 files, 4 documents" in said
            for file, texts in (("train.bin", train), ("val.bin", val)):
                found = documents(read(out / file)[3], 0)
                assert [bytes(ids).decode() for ids in found] == texts
    for text, message in (
        (b'{"text": "a"}\n\n{"content": "b", "id": 7}\n', 'line 3: no field "text"; it has "content", "id"'),
        (b'{"text": 3}\n', 'line 1: field "text" is no string'),
        (b'{"text": "a"}\n[1, 2]\n', 'line 2: no field "text"; it has no fields'),
        (b'{"text": "a"}\nplain\n', "line 2: not a JSON object"),
        (b'{"text": "\xff"}\n', "line 1: not a JSON object"),
        (b'{"text": "b\\u0000c"}\n', "line 1: the text: byte 1 is 0x00"),
        (b'{"text": "\\ud800"}\n', "line 1: the text: byte 0 is 0xed, which is not UTF-8"),
    ):
        (tmp_path / "w.jsonl").write_bytes(text)
        assert message in made(capsys, 1, "--out", tmp_path / "wrong", tmp_path / "w.jsonl")
        assert os.listdir(tmp_path / "wrong") == []


def test_what_is_no_text_is_named_with_its_byte(tmp_path, capsys, tiny):
    far = ("木" * 1000 + "\n").encode() * 1000
    path = tmp_path / "bad.txt"
    for text, message in (
        (b"abc\xff", "bad.txt: byte 3 is 0xff, which is not UTF-8"),
        (far + b"\xe6\x9c ", f"bad.txt: byte {len(far)} is 0xe6"),
        (far + b"\0", f"bad.txt: byte {len(far)} is 0x00, which is no text"),
        (gzip.compress(b"x" * 1000)[:-3], "bad.txt: damaged gzip data"),
        (gzip.compress(b"x" * 1000)[:-8] + bytes(8), "bad.txt: damaged gzip data"),
    ):
        path.write_bytes(text)
        for tokens in ([], ["--tokenizer", tiny]):
            assert message in made(capsys, 1, "--out", tmp_path / "out", *tokens, path), message
    path.write_bytes(b"a\xff\xc3(\xe6\x9c\xa8\xe6\x9c")
    out, none = tmp_path / "lossy", ["--val-share", 0, "--lossy", path]
    assert "4 bytes are not UTF-8" in made(capsys, 0, "--out", out, *none)
    assert bytes(read(out / "train.bin")[3]) == path.read_bytes() + b"\0"
    made(capsys, 0, "--out", out, "--force", "--tokenizer", tiny, *none)
    whole = tokenizers.Tokenizer.from_file(str(tiny))
    assert whole.decode(read(out / "train.bin")[3][:-1]) == "a\ufffd\ufffd(木\ufffd\ufffd"


def test_long_lines_are_cut_between_characters(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(data, "_MOST_BYTES", 3000)
    text = "木🎉ß" * 2000
    (tmp_path / "a.txt").write_text(text)
    made(capsys, 0, "--out", tmp_path / "out", "--val-share", 0, tmp_path / "a.txt")
    assert bytes(read(tmp_path / "out" / "train.bin")[3][:-1]).decode() == text


def test_a_failure_leaves_what_was_there(tmp_path, capsys, tiny):
    (tmp_path / "a.txt").write_text("some text that is enough for both")
    (tmp_path / "bad.txt").write_bytes(b"\xff" * 100)
    out = tmp_path / "out"
    made(capsys, 0, "--out", out, tmp_path / "a.txt")
    before = {name: (out / name).read_bytes() for name in os.listdir(out)}
    assert sorted(before) == ["train.bin", "val.bin"]
    for words, message in (
        ([tmp_path / "a.txt"], "train.bin is there already: --force overwrites it"),
        (["--force", tmp_path / "a.txt", tmp_path / "bad.txt"], "bad.txt: byte 0 is 0xff"),
        (["--force", tmp_path / "none.txt"], "none.txt"),
        (["--force", "--tokenizer", tmp_path / "a.txt", tmp_path / "a.txt"], "a.txt is no tokenizer.json"),
        (["--force", "--tokenizer", tmp_path / "none.json", tmp_path / "a.txt"], "none.json"),
    ):
        assert message in made(capsys, 1, "--out", out, *words)
        assert {name: (out / name).read_bytes() for name in os.listdir(out)} == before
    for words, message in (
        (["--tokenizer", tiny, "--train-bpe", 300, "a"], "not allowed with argument"),
        (["--train-bpe", 256, "a"], '"256", allowed: 257 to 16777216'),
        (["--end-of-text", "x", tmp_path / "a.txt"], "--end-of-text is for a tokenizer"),
        (["--force", "--tokenizer", tiny, "--end-of-text", "<none>", tmp_path / "a.txt"], "no token <none>"),
    ):
        assert message in made(capsys, 2, "--out", out, *words)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "gone").symlink_to("/nowhere")
    assert "no file in it; skipped 1: links to nothing" in made(capsys, 1, "--out", out, tmp_path / "folder")


def test_a_text_without_an_end(tmp_path, capsys, tiny):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    common = ["--tokenizer", tiny, "--val-share", 0, "--force", "--out", tmp_path / "out"]
    made(capsys, 0, *common, "--end-of-text", "none", *paths)
    _, _, end, tokens = read(tmp_path / "out" / "train.bin")
    assert end == 2**32 - 1 and len(tokens) == 2
    assert "0 ends a text" not in engine("info", tmp_path / "out")
    made(capsys, 0, *common, "--end-of-text", "<s>", *paths)
    assert read(tmp_path / "out" / "train.bin")[3] == [tokens[0], 0, tokens[1], 0]


def test_without_the_package_one_line_says_what_to_install(tmp_path, capsys, monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "a.txt").write_text("text")
    for words in (["--tokenizer", tiny], ["--train-bpe", 300]):
        said = made(capsys, 1, "--out", tmp_path / "out", *words, tmp_path / "a.txt")
        assert said == 'tagc: a tokenizer needs the package tokenizers: pip install "tagc-train[data]"\n'
    made(capsys, 0, "--out", tmp_path / "out", "--val-share", 0, tmp_path / "a.txt")  # bytes need none
