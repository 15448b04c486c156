"""Shared by all modules of the lab: paths, one kind of failure, and running a program."""

import difflib
import os
import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAB = ROOT / "lab"
RATE_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


class LabError(Exception):
    """A failure with a text for the user; the lab prints it and ends with status 1."""


def nearest(word, known):
    """The text ", did you mean ...?" when one of `known` is like `word`, or nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def bits_per_s(rate):
    """The bits per second of "2gbit"."""
    match = re.fullmatch(r"([0-9.]+)([kmg])bit", rate)
    return float(match[1]) * RATE_UNITS[match[2]]


def need_program(name, package):
    if not shutil.which(name):
        raise LabError(
            f"{name} is not installed; the package {package} has it (scripts/setup.sh lab installs it)"
        )


def call(*words, check=True, timeout=30):
    """Runs a short command; its output. A failure names the command and what it said."""
    try:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{' '.join(map(str, words))}: {error}") from None
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "nothing"
        raise LabError(f"{' '.join(map(str, words))}: exit status {done.returncode}, it said: {said}")
    return done.stdout


def write_atomically(path, text):
    """Writes the file completely or not at all."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise LabError(f"{path}: {error.strerror}") from None


def read_toml(path):
    try:
        import tomllib
    except ImportError:
        raise LabError("the lab needs Python 3.11 or newer (tomllib)") from None
    try:
        return tomllib.loads(pathlib.Path(path).read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: {error}") from None
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}") from None
