"""What stands in the cells of tables: numbers, spreads, places, and which of two arms was faster."""

import statistics

import linkcheck
import results
from common import LAB, read_toml

GRADIENT_LEGS = ("index", "values", "leftover", "result")
LEAST_ROUNDS = 5  # as tagc bench's; with fewer, nobody knows by how much rounds differ
MARGIN = 0.05  # TAGC_VERDICT_MARGIN
TOO_FEW = "too few rounds"


def paper(name):
    return read_toml(LAB / "hosts" / "paper.toml").get(name, {})


def grid(head, rows):
    """A markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def number(value, digits=2, unit=""):
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def percent(value, digits=1):
    return "-" if value is None else f"{100 * value:+.{digits}f} %"


def spread_text(spread, digits, unit="", factor=1):
    """Returns the median, and behind it from where to where the samples go."""
    middle, least, most = (factor * spread[name] for name in ("median", "min", "max"))
    text = f"{middle:.{digits}f}{unit}"
    return text if spread["n"] == 1 else text + f" ({least:.{digits}f} to {most:.{digits}f})"


def seconds(spread):
    """Returns the spread in the unit that suits its median."""
    return spread_text(spread, 2, " s") if spread["median"] >= 1 else spread_text(spread, 1, " ms", 1e3)


def only(value):
    return results.spread([value])


def or_nan(value):
    return float("nan") if value is None else value


def rate_text(case):
    if not case["link"]:
        return "no shaped link"
    return case["link"]["rate"].replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")


def case_text(case):
    ranks = f"{case['hosts'] * case['ranks_per_host']} ranks"
    if not case["link"]:
        return f"{ranks} on one machine"
    hosts = "" if case["ranks_per_host"] == 1 else f" on {case['hosts']} hosts"
    latency = (case["link"].get("latency") or {}).get("asked", "")
    return (
        f"{ranks}{hosts}, {rate_text(case)}"
        + (", " + latency.replace("us", " us").replace("ms", " ms") if latency else "")
        + (", WireGuard" if case["link"].get("tunnel") else "")
    )


def link_text(link):
    one, both = (f"{min(link[f'tcp_{way}_bits_per_s']) / 1e9:.2f}" for way in ("one_way", "both_ways"))
    note = linkcheck.shortfall(link)
    return (
        f"link {link['rate']}, MTU {link['mtu']}, burst {link['burst']}; plain TCP in the same run: {one} "
        "Gbit/s "
        f"one way, {both} in both directions at once" + (f" ({note})" if note else "")
    )


def total_bits(arm):
    return sum(arm["bits_per_param"].values())


def ratios(slow, fast):
    """Returns one sample per round: both arms were measured close to each other."""
    return [one / other for one, other in zip(slow["round_s"], fast["round_s"])]


def noise(bench):
    """Returns by how much the first arm differs from itself, where a bench ran it twice in each round."""
    again = bench.get("again")
    return max(abs(again["max"] - 1), abs(again["min"] - 1)) if again else 0.0


def verdict(samples, noise=0.0, bytes_ratio=None):
    """Returns whether rounds show a difference at all: alike in every round, by more than the margin, than
    rounds differ, and than one arm differs from itself. bytes_ratio: what the slower arm sends over what the
    other does; arms that send the same differ by chance. Whether compression pays, tagc bench says."""
    if len(samples) < LEAST_ROUNDS:
        return TOO_FEW
    if bytes_ratio is not None and max(bytes_ratio, 1 / bytes_ratio) <= 1 + MARGIN:
        return "sends as much"
    median = statistics.median(samples)
    spread = max((max(samples) - min(samples)) / 2, noise)
    if max(median, 1 / median) <= 1 + MARGIN or abs(median - 1) <= spread:
        return "within the spread"
    if min(samples) > 1:
        return "faster"
    return "slower" if max(samples) < 1 else "within the spread"


def carriers(result):
    """What sent bytes: arms of a bench, or runs; (label, it)."""
    for case in result["cases"]:
        for arm in case.get("bench", {}).get("arms", []):
            yield arm["name"], arm
        options = {}  # which the first run of a label has
        for run in case.get("runs", []):
            own = options.setdefault(run["label"], run.get("options", {}))
            yield run["label"], run | {"options": case.get("options", {}) | own}
