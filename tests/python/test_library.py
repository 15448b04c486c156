"""That the library is found, is this version's, and that one which is missing or wrong says so by name."""

import ast
import ctypes
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import tagc
from tagc import _declared, _declared_plan, _library

ROOT = pathlib.Path(__file__).parents[2]


def python(code, **environment):
    """Output of a fresh interpreter, for libtagc is loaded only once in each."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()


def test_version_is_that_of_the_package():
    version = re.search(r"project\(tagc VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert tagc.__version__ == version


HEADERS = sorted((ROOT / "include/tagc").glob("*.h"))
RENAMED = {"Run": {"start": "from", "target": "to"}}  # fields that Python cannot call so


def structs_of(module):
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind is not ctypes.Structure
    ]


def test_declarations_are_written_from_the_headers(tmp_path):
    """A change of a header that Python does not know yet fails here, and so does one of what was written."""
    declare = [sys.executable, str(ROOT / "scripts/declare.py"), "--check"]
    assert subprocess.run(declare, capture_output=True, text=True, timeout=60).stderr == ""
    for folder in ("include", "lib/exchange", "planning", "command/cluster", "scripts", "python/tagc"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("lib", "torch", "__*")
        )
    copied = [sys.executable, str(tmp_path / "scripts/declare.py"), "--check"]
    header = tmp_path / "include/tagc/model.h"
    header.write_text(header.read_text().replace("uint32_t unit;", "uint32_t unit, more;"))
    said = subprocess.run(copied, capture_output=True, text=True, timeout=60)
    assert said.returncode == 1 and "not what the headers say: python/tagc/_declared.py;" in said.stderr


def test_structs_are_those_of_the_headers(tmp_path):
    """Names, places and sizes of all fields, as a compiler has them."""
    lines, expected = [], []
    for struct in {*structs_of(_declared), *structs_of(_declared_plan)}:
        name = "tagc_" + re.sub(r"(?<!^)([A-Z])", r"_\1", struct.__name__).lower()
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        expected.append((name, ctypes.sizeof(struct)))
        for field, *_ in struct._fields_:
            theirs = RENAMED.get(struct.__name__, {}).get(field, field)
            lines.append(f'printf("%zu\\n", offsetof({name}, {theirs}));')
            lines.append(f'printf("%zu\\n", sizeof((({name} *)0)->{theirs}));')
            at = getattr(struct, field)
            expected += [(f"{name}.{field}", at.offset), (f"{name}.{field}", at.size)]
    source = tmp_path / "fields.c"
    source.write_text(
        "#include <stdio.h>\n#include <cluster/ask.h>\n#include <exchange/device_memory.h>\n"
        + "".join(
            f"#include <{name}.h>\n" for name in ("mesh/mesh", "sizes/memory", "sizes/tokens", "sizes/units")
        )
        + "".join(f"#include <tagc/{header.name}>\n" for header in HEADERS if header.name != "mpi.h")
        + "int main(void) {\n"
        + "\n".join(lines)
        + "\n}\n"
    )
    compiler = os.environ.get("CC", "cc")
    if not shutil.which(compiler):
        pytest.skip(f"no C compiler: {compiler}")
    subprocess.run(
        [
            compiler,
            *(f"-I{ROOT / folder}" for folder in ("include", "lib", "planning", "command")),
            str(source),
            "-o",
            str(tmp_path / "fields"),
        ],
        check=True,
        timeout=60,
    )
    said = subprocess.run(
        [str(tmp_path / "fields")], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = [(name, int(number)) for (name, _), number in zip(expected, said.split(), strict=True)]
    assert found == expected


def test_words_are_those_of_the_headers():
    """Each table of words has all values of its enum, by its names."""
    text = re.sub(r"/\*.*?\*/", "", "".join(header.read_text() for header in HEADERS), flags=re.S)
    for table, prefix in (
        (_library.EXCHANGES, "EXCHANGE"),
        (_library.FORMATS, "FORMAT"),
        (_library.ROUNDINGS, "ROUNDING"),
        (_library.OPS, "OP"),
        (_library.OUTPUTS, "OUTPUT"),
        (_library.LEVELS, "LEVEL"),
        (_library.MOMENTS, "MOMENT"),
        (_library.CLASSES, "CLASS"),
        (_library.ELEMENTS, "ELEMENT"),
    ):
        theirs = {word: int(number) for word, number in re.findall(rf"\bTAGC_{prefix}_(\w+) = (\d+)", text)}
        assert {word.upper().replace(" ", "_"): number for word, number in table.items()} == theirs, prefix


def test_no_number_of_the_schedule_is_typed_again():
    """They are lib/schedule's, and tagc_schedule_constants tells them. So no file of tagc.torch.schedule
    gives a name to a number, but for limits of its own, and each has one place in lib."""
    MIN_ELEMS = pytest.importorskip("tagc.torch.schedule.policy").MIN_ELEMS
    own = {"MIN_ELEMS"}  # of the policy, a macro, which is compared below
    for path in sorted((ROOT / "python/tagc/torch/schedule").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            numbers = [
                one.value
                for one in ast.walk(node.value)
                if isinstance(one, ast.Constant) and type(one.value) in (int, float)
            ]
            assert not [n for n in numbers if n not in (0, 1)] or names <= own, (path.name, names, numbers)
    told = _library.initialised(_library.ScheduleConstants, "tagc_schedule_constants_init")
    defined = (ROOT / "lib/schedule/constants.h").read_text()
    policy = (ROOT / "include/tagc/policy.h").read_text()
    assert int(re.search(r"define TAGC_CLASS_MIN_ELEMS (\d+)", policy)[1]) == MIN_ELEMS
    for name, value in (
        ("WINDOW", told.window),
        ("FRESH_WINDOWS", told.fresh_windows),
        ("LARGEST_SHARE", told.largest_share),
        ("MOST_SHARE", told.most_share),
        ("BLOCK_OF_EVERY", told.block_of_every),
    ):
        assert [float(one) for one in re.findall(rf"define TAGC_{name}[\s\\]+([\d.]+)", defined)] == [value]


def kind_of(declared):
    """ "pointer", or what a type of C is in a call: its bytes, and whether it is a floating number."""
    declared = declared.strip()
    if "*" in declared or declared.endswith("]"):
        return "pointer"
    name = declared.removeprefix("const ").split()[0]
    if declared.startswith(("unsigned", "const unsigned")):
        return ("whole", 4)
    return {
        "void": None,
        "double": ("floating", 8),
        "float": ("floating", 4),
        "size_t": ("whole", ctypes.sizeof(ctypes.c_size_t)),
        "uint64_t": ("whole", 8),
        "int64_t": ("whole", 8),
        "uint32_t": ("whole", 4),
        "int32_t": ("whole", 4),
        "int": ("whole", 4),
    }.get(name, ("whole", 4))  # an enum


def kind_of_ctypes(kind):
    if kind is None:
        return None
    if kind in (ctypes.c_void_p, ctypes.c_char_p) or hasattr(kind, "contents"):
        return "pointer"
    return ("floating" if kind in (ctypes.c_double, ctypes.c_float) else "whole", ctypes.sizeof(kind))


def test_functions_are_those_of_the_headers():
    """As many arguments, each of the same kind, and so the result."""
    declared = {}
    for header in HEADERS:
        text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
        for result, name, arguments in re.findall(
            r"TAGC_API\s+([^;()]*?)\s*\b(tagc_\w+)\(([^;]*)\);", text, flags=re.S
        ):
            given = [] if arguments.strip() == "void" else arguments.split(",")
            declared[name] = ([kind_of(" ".join(each.split())) for each in given], kind_of(result))
    functions = {name: one for of in _declared.FUNCTIONS.values() for name, one in of.items()}
    assert functions.keys() == {
        name for name in declared if not name.startswith(("tagc_paper_", "tagc_comm_create_mpi", "tagc_mpi_"))
    }
    for name, (arguments, result) in functions.items():
        ours = [kind_of_ctypes(each) for each in arguments], kind_of_ctypes(result)
        assert declared[name] == ours, name


def test_defaults_are_the_librarys():
    options = _library.initialised(_library.ReducerOptions, "tagc_reducer_options_init")
    assert options.struct_bytes == ctypes.sizeof(options)
    assert (options.format, options.sparsity, options.n_threads, options.tag) == (-1, -1, 1, 2**64 - 1)


def test_whether_it_pays():
    """The words and the margin of the header, on both sides of each boundary."""
    margin = 1 + float(
        re.search(r"#define TAGC_VERDICT_MARGIN ([0-9.]+)", (ROOT / "include/tagc/tagc.h").read_text())[1]
    )
    for baseline_s, compressed_s, spread_s, word in (
        (margin, 1, 0, "makes no difference"),
        (math.nextafter(margin, 2), 1, 0, "pays"),
        (1, margin, 0, "makes no difference"),
        (1, math.nextafter(margin, 2), 0, "costs"),
        (1.5, 1, 0.5, "makes no difference"),
        (1.5, 1, 0.49, "pays"),
        (0, 1, 0, "unknown"),
        (1, -1, 0, "unknown"),
        (math.nan, 1, 0, "unknown"),
        (1, math.inf, 0, "unknown"),
        (2, 1, -1, "unknown"),
        (2, 1, math.nan, "unknown"),
    ):
        assert _library.verdict(baseline_s, compressed_s, spread_s) == word, (
            baseline_s,
            compressed_s,
            spread_s,
        )


def test_package_needs_no_torch():
    assert python("import sys, tagc; tagc.__version__; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("path", ["/nowhere/libtagc.so", str(ROOT), str(ROOT / "LICENSE"), "libm"])
def test_wrong_library_is_an_error_that_names_it(path):
    if path == "libm":  # a library, but another one
        path = next(line.split()[-1] for line in open("/proc/self/maps") if "/libm" in line)
    said = python(
        "import tagc\ntry: tagc.__version__\nexcept tagc.Error as e: print(e.status, e)", TAGC_LIBRARY=path
    )
    assert said.startswith("io ") and path in said and "Traceback" not in said
