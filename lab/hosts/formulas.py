"""Bits per parameter and rank that the paper and docs/guide/choosing.md derive, before the factor (W-1)/W.
Tables show them beside counted bits."""


def gradient_bits(options, union_density):
    """Of a compressed tensor under the options of `tagc train`; None where there is no formula."""
    exchange = options["exchange"]
    index = 8 if options.get("index") == "sum4" else 2  # there and back
    if exchange == "dense":
        return dense_bits(options)
    if exchange == "packed":
        return index + 32 * union_density
    if exchange == "sketch":
        ratio = options["ratio"]
        return index + (32 * union_density / 0.75 if ratio in ("auto", 0) else 32 / float(ratio))
    return None


def lhc_bits(options):
    """The same sketch in LHC, which all-reduces it; None for what LHC has not."""
    if options["exchange"] != "sketch" or options["ratio"] in ("auto", 0):
        return None
    return (8 if options["index"] == "sum4" else 2) + 2 * 32 / float(options["ratio"])


def dense_bits(options):
    return 16 if options["wire"] == "bf16" else 32
