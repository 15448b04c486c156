"""Annexes: the folders beside this file that nothing else imports (docs/reference/architecture.md)."""

from __future__ import annotations

import pathlib
import pkgutil

import tagc


def with_part(part: str) -> list[str]:
    """Returns the names of the folders that have a <part>.py, which adds something to the rest."""
    return [
        module.name
        for folder in map(pathlib.Path, tagc.__path__)
        for module in pkgutil.iter_modules([str(folder)])
        if (folder / module.name / f"{part}.py").exists()
    ]
