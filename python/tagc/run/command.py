"""python -m tagc run: the command line. Everything that can be wrong in it is found before the script
starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import tagc.torch as tagc
from tagc import Error
from tagc.run import options, script
from tagc.run.training import Settings, Training, say

_EXAMPLES = """examples:
  # On each of two hosts of eight GPUs, with the address of one of them.
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
    -m tagc run train.py --lr 3e-4

  # The same without compression, to compare.
  torchrun ... -m tagc run --off train.py --lr 3e-4

  # Here, to see what it does: a host is then no reason to do nothing.
  torchrun --standalone --nproc-per-node 2 -m tagc run --even-on-one-host train.py
"""
_USAGE = 2
# what launchers set for each process: torchrun and accelerate, Open MPI, MPICH, Slurm
_LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"tagc: {message}\n{self.prog} --help explains the options\n")
        raise SystemExit(_USAGE)


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="python -m tagc run",
        usage="%(prog)s [OPTIONS] SCRIPT [ARGS of it], or [OPTIONS] -m MODULE [ARGS of it]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description="Runs a training script as it is, and compresses the models that it trains under DDP, "
        "FSDP2 or FSDP1. Start it by torchrun or another launcher, on every rank with the same options. "
        "docs/guide/run.md says more.",
    )
    add = made.add_argument
    add("--off", action="store_true", help="nothing compressed, for a comparison")
    add(
        "--advise",
        action="store_true",
        help="tagc.advise() on each model first; compressed only if that pays",
    )
    add("--even-on-one-host", action="store_true", help="compressed also where all ranks are on one host")
    add("--record", metavar="FILE", help="a line of statistics per step, by rank 0, for tagc-report")
    add(
        "--options", metavar="FILE", help="options of compress() in JSON or TOML; those given here come first"
    )
    of_compress = made.add_argument_group("options of compress()")
    for name, hint in options.of_compress().items():
        words = options.words_of(hint)
        of_compress.add_argument(
            f"--{name.replace('_', '-')}", metavar=f"{{{','.join(words)}}}" if words else name.upper()
        )
    return made


def _split(words: Sequence[str], made: argparse.ArgumentParser) -> tuple[list[str], list[str], bool]:
    """Returns (tagc's words, the script and its arguments, whether it is a module)."""
    known = {word: action for action in made._actions for word in action.option_strings}
    of_tagc: list[str] = []
    i = 0
    while i < len(words):
        if words[i] == "-m":
            if i + 1 == len(words):
                made.error("-m: a module is missing")
            return of_tagc, list(words[i + 1 :]), True
        if not words[i].startswith("-"):
            return of_tagc, list(words[i:]), False
        name, equals, value = words[i].partition("=")
        name = name.replace("_", "-")
        if name not in known:
            made.error(f"{words[i]} is no option of {made.prog}{options.meant(name, known)}")
        takes = known[name].nargs != 0 and not equals
        of_tagc += [name + equals + value, *words[i + 1 : i + 1 + takes]]
        i += 1 + takes
    made.parse_args(of_tagc)  # --help
    made.error("a script is missing, or -m and a module")


def _of(words: Sequence[str]) -> tuple[Settings, list[str], bool]:
    """Returns what the command line says."""
    made = parser()
    of_tagc, rest, is_module = _split(words, made)
    # argparse makes an empty list of --option=--
    given: dict[str, Any] = vars(made.parse_args(of_tagc))
    given = {name: "--" if value == [] else value for name, value in given.items()}
    try:
        of_compress: dict[str, Any] = {} if given["options"] is None else options.of_file(given["options"])
    except Error as failure:
        made.error(f"--options: {failure}")
    for name, hint in options.of_compress().items():
        if given[name] is not None:
            try:
                of_compress[name] = options.value_of(name, hint, given[name])
            except Error as failure:
                made.error(f"--{name.replace('_', '-')} is {failure}")
    try:
        tagc.check_options(**tagc.grouped(of_compress))
    except Error as failure:
        made.error(str(failure))
    if given["advise"] and "between" in of_compress:
        made.error("--advise takes no --between: it looks for the hosts itself")
    settings = Settings(
        of_compress, given["off"], given["advise"], given["even_on_one_host"], given["record"]
    )
    return settings, rest, is_module


def main(words: Sequence[str]) -> int:
    settings, argv, is_module = _of(words)
    code, names = (script.find_module if is_module else script.find_script)(argv[0])
    if not any(name in os.environ for name in _LAUNCHED):
        say("no launcher has started this process, as torchrun does: nothing is compressed")
        script.run(code, names, argv, is_module)
        return 0
    with Training(settings):
        script.run(code, names, argv, is_module)
    return 0
