"""The first word of `python -m tagc`.

An annex adds a command by a command.py with main(words), and by a COMMAND that says what it does."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence

from tagc import _annexes
from tagc import _library as lib
from tagc.commands import data, info, parser, plan

_OK, _FAILED, _USAGE = 0, 1, 2


def _advise(words: Sequence[str]) -> int:
    from tagc.commands import advise  # which needs torch

    return advise.run(words)


def _run(words: Sequence[str]) -> int:
    from tagc.run import command  # which needs torch

    return command.main(words)


def _of_annexes() -> dict[str, tuple[str, Callable[[Sequence[str]], int]]]:
    """Returns the commands of annexes, by name."""
    commands: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {}
    for name in _annexes.with_part("command"):
        about = getattr(importlib.import_module(f"tagc.{name}"), "COMMAND", None)
        if about is not None:
            commands[name] = (about, functools.partial(_call, f"tagc.{name}.command"))
    return commands


def _call(module: str, words: Sequence[str]) -> int:
    return int(importlib.import_module(module).main(words))  # only now, since it may need torch


def _version(words: Sequence[str]) -> int:
    parser.Parser(prog="python -m tagc version", description="The version of libtagc.").parse_args(
        list(words)
    )
    print(f"tagc {lib.version()}")
    return _OK


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "run": ("a training script as it is, compressed: torchrun ... -m tagc run train.py ARGS", _run),
    "plan": (
        "whether compression pays for a model on a cluster, and its memory; nothing is trained",
        plan.run,
    ),
    "advise": ("the same, measured over the link between the ranks that run it (needs torch)", _advise),
    "data": ("token files of text and JSON lines for `tagc train`, by any tokenizer", data.run),
    "info": ("what this installation has, and how fast its codec is here", info.run),
    "version": ("the version", _version),
    **_of_annexes(),
}


def _help() -> str:
    rows = "\n".join(f"  {name:8} {about}" for name, (about, _) in COMMANDS.items())
    return (
        "tagc: compressed gradient exchange for sharded and data parallel training\n\n"
        f"usage: python -m tagc COMMAND [options]\n\n{rows}\n\n"
        "python -m tagc COMMAND --help explains a command."
    )


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 0; 1 for a failure; 2 for a mistake in the command."""
    word = words[0] if words else ""
    if word in ("help", "--help", "-h"):
        if len(words) > 1 and words[1] in COMMANDS:
            return main([words[1], "--help"])
        print(_help())
        return _OK
    if word == "--version":
        word = "version"
    if word not in COMMANDS:
        if not word:
            print(_help(), file=sys.stderr)
        else:
            print(
                f'tagc: "{word[:64]}" is no command{parser.meant(word, COMMANDS)}\n'
                f"tagc: allowed: {', '.join(COMMANDS)}",
                file=sys.stderr,
            )
        return _USAGE
    try:
        return COMMANDS[word][1](words[1:])
    except parser.UsageError as failure:
        print(f"tagc: {failure}\npython -m tagc {word} --help explains the options", file=sys.stderr)
        return _USAGE
    except (lib.Error, OSError, ModuleNotFoundError) as failure:
        print(f"tagc: {failure}", file=sys.stderr)
        return _FAILED
