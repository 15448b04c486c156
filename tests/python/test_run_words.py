"""python -m tagc run: of any words and files of options come a refusal that names tagc, help, or settings."""

import os
import random

import pytest

from tagc.run import command, options

SCRIPT = "train.py"
VALUES = [
    "", "0", "-1", "0.9", "1e400", "nan", "inf", "true", "false", "auto", "int4", "none", "-m", "--", "-",
    "{}", "[]", "null", '{"head.*": "dense"}', '{"a": 1}', '{"a": {"b": []}}', '{"(": "dense"}', "[" * 3000,
    '{"a":' * 3000, "9" * 5000, "caf\xe9", "a\0b", "nowhere.json", "%s%n", "=", "--sparsity=2",
]  # fmt: skip


def _number_of_inputs() -> int:
    return 20000 if os.environ.get("LONG") else 150


def _words(draw: random.Random, names: list[str]) -> list[str]:
    words = []
    for _ in range(draw.randrange(6)):
        name = draw.choice(names)
        if draw.random() < 0.1:
            name = name[: draw.randrange(len(name) + 1)] + draw.choice(["x", "_", "", "-"])
        value = draw.choice(VALUES)
        words += [[name], [f"{name}={value}"], [name, value], [value]][draw.randrange(4)]
    return words + draw.choice([[SCRIPT], [SCRIPT, "--lr", "1"], ["-m"], ["-m", "train"], []])


def _check(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        _, rest, _ = command._of(words)
    except SystemExit as left:
        said = capsys.readouterr().err
        assert left.code in (0, 2), words
        assert left.code == 0 or said.startswith("tagc: "), (words, said)
    else:
        assert rest, words


def test_words(capsys):
    draw = random.Random(7)
    names = [word for action in command.parser()._actions for word in action.option_strings]
    for _ in range(_number_of_inputs()):
        _check(_words(draw, names), capsys)


def test_every_value_of_every_option(capsys):
    for name in options.of_compress():
        for value in VALUES:
            _check([f"--{name.replace('_', '-')}={value}", SCRIPT], capsys)


def test_files_of_options(capsys, tmp_path):
    draw = random.Random(8)
    whole = b'{"sparsity": 0.9, "residual": "int8", "rules": {"head.*": "dense"}, "timeout_s": 30}'
    for i in range(_number_of_inputs()):
        text = bytearray(whole)
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(text))
            text[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
        if i % 50 == 0:
            text = bytearray(draw.choice(VALUES).encode())
        path = tmp_path / ("options.toml" if i % 3 == 0 else "options.json")
        path.write_bytes(text)
        _check(["--options", str(path), SCRIPT], capsys)
