"""The options of compress() as words: which there are, and what each takes, is read from its signature."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import pathlib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import tagc.torch as tagc
from tagc import Error

_NOT_HERE = ("on_step", "options")  # what no word can be


def meant(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?", or "" if nothing is like the word."""
    like = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f"; did you mean {like[0]}?" if like else ""


def of_compress() -> dict[str, Any]:
    """Returns {name: annotation} of the options that a command line can give: those of compress(), and those
    of its Options."""
    hints = typing.get_type_hints(tagc.compress)
    own = {
        name: hints[name]
        for name, option in inspect.signature(tagc.compress).parameters.items()
        if option.kind is option.KEYWORD_ONLY and name not in _NOT_HERE
    }
    return own | typing.get_type_hints(tagc.Options)


def _alternatives(hint: Any) -> list[Any]:
    """Returns the types and words that an annotation allows."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for part in typing.get_args(hint) for one in _alternatives(part)]
    return [*typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else [hint]


def words_of(hint: Any) -> list[str]:
    """Returns the words that may be given, [] where it is no choice of words."""
    words = [one for one in _alternatives(hint) if isinstance(one, str)]
    return words or (["true", "false"] if bool in _alternatives(hint) else [])


def value_of(name: str, hint: Any, text: str) -> Any:
    """Returns the value of an option that was given as text; Error with what is allowed."""
    allowed, words = _alternatives(hint), words_of(hint)
    if words:
        if text not in words:
            raise Error("argument", f'"{text}", allowed: {", ".join(words)}{meant(text, words)}')
        return text == "true" if bool in allowed else text
    for kind in (int, float):
        if kind in allowed:
            try:
                return kind(text)
            except ValueError:
                raise Error(
                    "argument", f'"{text}", allowed: {"a whole number" if kind is int else "a number"}'
                ) from None
    if any(
        typing.get_origin(one) is not None and issubclass(typing.get_origin(one), Mapping) for one in allowed
    ):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Error("argument", f'"{text}", allowed: JSON, as \'{{"head.*": "dense"}}\'') from None
    return text


def of_file(path: str) -> dict[str, Any]:
    """Returns the options of compress() in a file of JSON or TOML."""
    try:
        text = pathlib.Path(path).read_text()
        if path.endswith(".toml"):
            options = importlib.import_module("tomllib").loads(text)  # of Python 3.11
        else:
            options = json.loads(text)
    except ModuleNotFoundError:
        raise Error(
            "unsupported", f"{path} is TOML, which needs Python 3.11: write the options as JSON"
        ) from None
    except (OSError, ValueError, RecursionError) as failure:
        raise Error("io", f"{path} cannot be read: {failure}") from None
    if not isinstance(options, dict):
        raise Error("argument", f"{path} must have a table of options of compress()")
    known, given = of_compress(), {key.replace("-", "_"): value for key, value in options.items()}
    for key in given.keys() - known.keys():
        raise Error("argument", f"{path}: {key} is no option{meant(key, known)}")
    return given
