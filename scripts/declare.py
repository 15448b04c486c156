#!/usr/bin/env python3
"""Writes what Python knows of the C headers, for ctypes: structs, words of enums, prototypes. So nobody types
a struct twice, and pip needs no parser of C.

    declare.py            writes python/tagc/_declared.py, of include/tagc, and _declared_plan.py, of planning
    declare.py --check    writes nothing; fails if a file is not what this would write

It reads the C of this project: no function pointer that returns one, no bit-fields, no union.
tests/python/test_library.py runs it, and holds the result to a compiler."""

from __future__ import annotations

import keyword
import pathlib
import re
import sys
import textwrap
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Target(NamedTuple):
    """A file to write. words: name there -> (enum, prefix of its names, whether as a tuple, in order)."""

    path: str
    headers: list[str]
    words: dict[str, tuple[str, str, bool]]
    constants: list[str]
    head: str


_HEAD = '''"""Written by scripts/declare.py from {what}: change those, and run it.
{library}"""

from __future__ import annotations

'''
LIBRARY = Target(
    "python/tagc/_declared.py",
    [
        f"include/tagc/{name}.h"
        for name in "tagc transport native policy schedule model blocks all_to_all changes device".split()
    ],
    {
        "STATUS_NUMBERS": ("tagc_status", "TAGC_ERR_", False),
        "LEGS": ("tagc_leg", "TAGC_LEG_", True),
        "PHASES": ("tagc_phase", "TAGC_PHASE_", True),
        "EXCHANGES": ("tagc_exchange", "TAGC_EXCHANGE_", False),
        "FORMATS": ("tagc_format", "TAGC_FORMAT_", False),
        "ROUNDINGS": ("tagc_rounding", "TAGC_ROUNDING_", False),
        "OPS": ("tagc_op", "TAGC_OP_", False),
        "OUTPUTS": ("tagc_output", "TAGC_OUTPUT_", False),
        "LEVELS": ("tagc_level", "TAGC_LEVEL_", False),
        "MOMENTS": ("tagc_moment", "TAGC_MOMENT_", False),
        "CLASSES": ("tagc_class", "TAGC_CLASS_", False),
        "ELEMENTS": ("tagc_element", "TAGC_ELEMENT_", False),
        "CUTS": ("tagc_cut", "TAGC_CUT_", False),
    },
    ("N_LEGS MAX_LEGS N_PHASES MAX_PHASES RESIDUAL_NONE SCHEDULE_SAMPLE N_ALARM_KINDS TRANSPORT_ABI").split(),
    _HEAD.format(what="include/tagc", library="tagc._library has the functions of libtagc."),
)
PLANNER = Target(
    "python/tagc/_declared_plan.py",
    [
        "planning/mesh/mesh.h",
        "lib/exchange/device_memory.h",
        "planning/plan/bytes.h",
        *(f"planning/sizes/{name}.h" for name in ("catalogue", "codec", "memory", "tokens", "units")),
        "command/cluster/ask.h",
    ],
    {
        "MESH_KINDS": ("tagc_mesh_kind", "TAGC_MESH_", True),
        "MESH_LEGS": ("tagc_mesh_leg", "TAGC_MESH_LEG_", True),
        "GATHER_KINDS": ("tagc_gather_kind", "TAGC_GATHER_", False),
        "MESH_SCHEDULES": ("tagc_mesh_schedule", "TAGC_MESH_", False),
    },
    [],
    _HEAD.format(
        what="headers of the planner", library="tagc._planner has the functions of libtagc-plan.so."
    ),
)
# Structs that Python has no use for, of types that it does not know; a tagc_blocks_state is on a device.
WITHOUT = ("tagc_transport_ops", "tagc_progress", "tagc_mesh_named", "tagc_strategy", "tagc_memory_row",
           "tagc_blocks_state")  # fmt: skip
CALLBACKS = "tagc_callback_ops"  # the struct whose functions Python writes
MORE = {"ReducerStats": ["    n_saturated = 0  # not libtagc's: a unit counts it"]}

NUMBERS = {
    "void": "None",
    "char": "c_char",
    "int": "c_int",
    "unsigned": "c_uint",
    "float": "c_float",
    "double": "c_double",
    "size_t": "c_size_t",
    "int32_t": "c_int32",
    "int64_t": "c_int64",
    "uint8_t": "c_uint8",
    "uint32_t": "c_uint32",
    "uint64_t": "c_uint64",
}
BY_ADDRESS = ("void", "float", "uint8_t", "uint16_t")  # arrays of these are tensors, or memory


def class_of(name: str) -> str:
    return "".join(word.capitalize() for word in name.removeprefix("tagc_").split("_"))


class Reader:
    """What headers declare. known: what those of another Target do, for its types."""

    def __init__(self, target: Target, known: Reader | None = None) -> None:
        self.target, self.known = target, known
        self.enums: dict[str, dict[str, int]] = {}  # by tag; "": without one
        self.numbers: dict[str, int] = dict(known.numbers) if known else {}  # constants by name
        self.structs: dict[str, list[tuple[str, str]]] = {}
        self.callbacks: list[str] = []
        self.functions: dict[str, dict[str, tuple[list[str], str]]] = {}  # by header
        for header in ["lib/exchange/options.h"] if known else []:
            self.read_enums(self.text_of(header))
        for header in target.headers:
            text = self.text_of(header)
            for name, number in re.findall(r"^#define (TAGC_\w+) \(?(-?\d+)u?\)?$", text, re.M):
                self.numbers[name] = int(number)
            text = re.sub(r"^#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.M)
            self.read_enums(text)
            for fields, name in re.findall(r"typedef struct \w+ \{(.*?)\n?\} (\w+);", text, re.S):
                if name not in WITHOUT:
                    self.read_struct(name, fields)
            found = re.findall(r"TAGC_API\s+([^;()]*?)\s*\b(tagc_\w+)\(([^;]*)\);", text, re.S)
            self.functions[pathlib.Path(header).name] = {
                name: (
                    []
                    if arguments.strip() == "void"
                    else [self.argument(one) for one in arguments.split(",")],
                    self.type_of(*self.parts(result)),
                )
                for result, name, arguments in found
            }

    @staticmethod
    def text_of(header: str) -> str:
        return re.sub(r"/\*.*?\*/", "", (ROOT / header).read_text(), flags=re.S)

    def read_enums(self, text: str) -> None:
        for tag, names in re.findall(r"\benum (\w*) ?\{(.*?)\}", text, re.S):
            at = -1
            for one in filter(None, (" ".join(name.split()) for name in names.split(","))):
                name, _, value = one.partition(" = ")
                at = self.number(value) if value else at + 1
                self.numbers[name] = at
                self.enums.setdefault(tag, {})[name] = at

    def number(self, text: str) -> int:
        """Returns the value of a constant: a number, a name, or one number shifted by another."""
        number, _, shift = text.partition(" << ")
        return (self.numbers[number] if number in self.numbers else int(number)) << int(shift or 0)

    def read_struct(self, name: str, fields: str) -> None:
        found = []
        for statement in filter(None, (" ".join(one.split()) for one in fields.split(";"))):
            if "(*" in statement:
                found.append(self.function_field(name, statement))
                continue
            first, *others = statement.split(",")
            base, stars, field, lengths = self.split(first)
            found.append((field, self.field_type(name, base, stars, field, lengths)))
            for other in others:
                _, stars, field, lengths = self.split(f"{base} {other}")
                found.append((field, self.field_type(name, base, stars, field, lengths)))
        self.structs[name] = found
        wrong = [field for field, _ in self.structs[name] if keyword.iskeyword(field)]
        assert not wrong, f"{name} has fields that Python cannot call so: {wrong}"

    def function_field(self, struct: str, statement: str) -> tuple[str, str]:
        result, field, arguments = re.fullmatch(r"(.*?)\(\*(\w+)\)\((.*)\)", statement).groups()
        if struct != CALLBACKS:
            return field, "c_void_p"
        kinds = [self.type_of(*self.parts(result)), *map(self.argument, arguments.split(","))]
        name = f"{field.upper()}_FN"
        self.callbacks.append(f"{name} = CFUNCTYPE({', '.join(kinds)})")
        return field, name

    @staticmethod
    def parts(text: str) -> tuple[str, int]:
        """Returns (name of a type, number of stars)."""
        words = [word for word in text.replace("*", " * ").split() if word not in ("const", "struct")]
        return " ".join(word for word in words if word != "*"), words.count("*")

    def split(self, text: str) -> tuple[str, int, str, list[str]]:
        """Returns (name of the type, stars, name, lengths of the array) of a declaration."""
        declared, *lengths = re.split(r"\[", text.replace("]", ""))
        before, name = re.fullmatch(r"(.*?)(\w+)\s*", declared, re.S).groups()
        return *self.parts(before), name, lengths

    def argument(self, text: str) -> str:
        base, stars, name, lengths = self.split(text)
        if name == base or not base:  # without a name
            base, stars = self.parts(text)
        return self.type_of(base, stars + len(lengths))

    def has_fields(self, name: str) -> bool:
        return name in self.structs or (self.known is not None and name in self.known.structs)

    def type_of(self, base: str, stars: int) -> str:
        if stars == 0:
            return class_of(base) if self.has_fields(base) else self.plain(base)
        if base == "char":
            return "c_char_p" if stars == 1 else "POINTER(c_char_p)"
        if base in BY_ADDRESS or not (self.has_fields(base) or self.plain(base)):
            return "c_void_p" if stars == 1 else "POINTER(c_void_p)"
        return f"POINTER({self.type_of(base, stars - 1)})"

    def plain(self, base: str) -> str:
        """Returns the type of a number or an enum; "" of what has no fields here."""
        readers = (self, self.known) if self.known else (self,)
        is_enum = any(base in reader.enums for reader in readers)
        return NUMBERS.get(base, "c_int" if is_enum else "c_void_p" if base.endswith("_fn") else "")

    def field_type(self, struct: str, base: str, stars: int, field: str, lengths: list[str]) -> str:
        kind = self.type_of(base, stars)
        assert kind, f"{struct}.{field} is of {base}, which has no fields here"
        for length in lengths:
            kind += f" * {length if length.isdigit() else self.numbers[length]}"
        return kind

    # ---- the file ----

    def text(self) -> str:
        body = []
        for name, (tag, prefix, is_tuple) in self.target.words.items():
            found = {
                (key.removeprefix(prefix) if key.startswith(prefix) else key.removeprefix("TAGC_"))
                .lower()
                .replace("_", " "): value
                for key, value in self.enums[tag].items()
                if "_N_" not in key  # how many there are
            }
            if is_tuple:
                assert list(found.values()) == list(range(len(found))), name
                body += wrapped(f"{name} = (", map(repr, found), ")")
            else:
                body += wrapped(f"{name} = {{", (f"{key!r}: {value}" for key, value in found.items()), "}")
        body += [f"{name} = {self.numbers[f'TAGC_{name}']}" for name in self.target.constants]
        for struct, fields in self.structs.items():
            if struct == CALLBACKS:
                body += ["", "", *self.callbacks]
            body += ["", "", f"class {class_of(struct)}(Structure):"]
            body += wrapped("    _fields_ = [", (f"({field!r}, {kind})" for field, kind in fields), "    ]")
            body += MORE.get(class_of(struct), [])
        body += [
            "",
            "",
            "# header -> name -> (arguments, result)",
            "FUNCTIONS: dict[str, dict[str, tuple[list[Any], Any]]] = {",
        ]
        for header, functions in self.functions.items():
            if functions:
                body += [f"    {header!r}: {{"]
                for name, (arguments, result) in functions.items():
                    body += wrapped(f"        {name!r}: ([", arguments, f"], {result}),", "            ")
                body += ["    },"]
        body += ["}", ""]
        text = "\n".join(body).replace("'", '"')
        used = sorted(set(re.findall(r"\b(?:c_\w+|POINTER|CFUNCTYPE|Structure)\b", text)))
        imports = [f"from ctypes import {', '.join(used)}"]
        if len(imports[0]) > 110:  # as ruff writes it
            imports = ["from ctypes import (", *(f"    {name}," for name in used), ")"]
        imports += ["from typing import Any"]
        if self.known:
            theirs = [name for name in map(class_of, self.known.structs) if re.search(rf"\b{name}\b", text)]
            imports += ["", f"from tagc._declared import {', '.join(theirs)}"]
        return self.target.head + "# fmt: off\n" + "\n".join(imports) + "\n\n" + text


def wrapped(begin: str, items, end: str, indent: str = "") -> list[str]:
    """Returns lines of at most 110 characters."""
    items = list(items)
    line = f"{begin}{', '.join(items)}{end.lstrip()}"
    if len(line) <= 110:
        return [line]
    depth = indent or " " * (len(begin) - len(begin.lstrip()) + 4)
    filled = textwrap.wrap(
        ", ".join(item.replace(" ", "\0") for item in items), 110 - len(depth), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    lines = [depth + one.replace("\0", " ") for one in filled]
    return [begin, *lines[:-1], lines[-1] + ("," if lines else ""), depth[4:] + end.lstrip()]


def main() -> int:
    library = Reader(LIBRARY)
    wrong = []
    for reader in (library, Reader(PLANNER, library)):
        path, text = ROOT / reader.target.path, reader.text()
        if sys.argv[1:] != ["--check"]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            wrong.append(reader.target.path)
    if wrong:
        print(f"not what the headers say: {', '.join(wrong)}; run scripts/declare.py", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
