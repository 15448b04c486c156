#!/usr/bin/env python3
"""Writes engine/data/unicode_table.h: the code points of GPT-2's \\p{L} and \\p{N} as sorted ranges.

Run it when a newer Unicode matters (pip install unicodedata2; without it Python's own, older, tables are
used):

    scripts/unicode_table.py > engine/data/unicode_table.h
"""

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata


def ranges(major_class):
    first = None
    for code in range(0x110001):
        inside = code < 0x110000 and unicodedata.category(chr(code))[0] == major_class
        if inside and first is None:
            first = code
        elif not inside and first is not None:
            yield first, code - 1
            first = None


def table(name, major_class):
    items = ["{0x%x, 0x%x}" % pair for pair in ranges(major_class)]
    print("static const tagc_code_range %s[] = {" % name)
    for i in range(0, len(items), 5):
        print("    " + ", ".join(items[i : i + 5]) + ",")
    print("};\n")


print(
    "/* Letters and numbers of Unicode %s. Made by scripts/unicode_table.py. */" % unicodedata.unidata_version
)
print("// clang-format off")
print("#ifndef TAGC_DATA_UNICODE_TABLE_H\n#define TAGC_DATA_UNICODE_TABLE_H\n\n#include <stdint.h>\n")
print("typedef struct tagc_code_range {\n    uint32_t first, last;\n} tagc_code_range;\n")
table("letter_ranges", "L")
table("number_ranges", "N")
print("#endif")
