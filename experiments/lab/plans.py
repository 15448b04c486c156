"""Tables of what `tagc plan --json` simulated."""

import pathlib

import cells
from common import LabError


def markdown(plans):
    """Iterations over worlds and links, and beside measured ones where the plan was checked."""
    try:
        return simulated(plans) + checked(plans) + origin(plans[0])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise LabError(f"the plan is damaged: {error!r}") from None


def cell(plan, key):
    """A row of this plan. If an arm is impossible with some number of ranks, the row lacks it there."""
    row = {key_of(row): row for row in plan["rows"]}.get(key)
    first = plan["rows"][0]
    if row is None or row["iteration_s"] is None:
        return "-"
    if first["iteration_s"] is None:
        return f"{row['iteration_s']:.2f} s"
    return f"{row['iteration_s']:.2f} s ({first['iteration_s'] / row['iteration_s']:.2f}x)"


def key_of(row):
    return row["arm"], row["placement"]["name"]


def rate(plan):
    link = plan["link"]
    return f"{(link['line_bits_per_s'] or 8 * link['bytes_per_s']) / 1e9:g} Gbit/s" + latency(
        link["latency_s"]
    )


def latency(seconds):
    """Of a far link, without the time of wires and switches."""
    return f", {1e3 * seconds:.3g} ms" if seconds >= 5e-4 else ""


def simulated(plans):
    """A table per world size. Rows of one arm under several placements carry theirs in the name."""
    keys = list(dict.fromkeys(key_of(row) for plan in plans for row in plan["rows"]))
    names = [arm for arm, _ in keys]
    text = ""
    for world_size in dict.fromkeys(plan["world_size"] for plan in plans):
        same = [plan for plan in plans if plan["world_size"] == world_size]
        rows = []
        for key in keys:
            name, placement = key
            shown = name if names.count(name) == 1 else f"{name}, {placement}"
            rows.append([f"`{shown}`"] + [cell(plan, key) for plan in same])
        text += cells.grid([f"simulated, {world_size} ranks"] + [rate(plan) for plan in same], rows) + "\n"
    return text


def checked(plans):
    checks = plans[0].get("checks") or []
    held_out = [check for check in checks if check["is_held_out"]]
    if not held_out:
        return ""
    rows = [
        [
            f"`{check['arm']}`",
            f"{check['world_size']} ranks, {8e-9 * check['link_bytes_per_s']:.2f} Gbit/s"
            + latency(check.get("latency_s", 0)),
            f"{check['measured_s']:.2f} s",
            f"{check['simulated_s']:.2f} s",
            f"{100 * check['error']:+.1f} %",
        ]
        for check in held_out
    ]
    errors = [abs(check["error"]) for check in held_out]
    return (
        "\n"
        + cells.grid(["not seen by the fit", "place", "measured", "simulated", "error"], rows)
        + f"\nLargest error {100 * max(errors):.1f} %, mean {100 * sum(errors) / len(errors):.1f} %.\n"
    )


def origin(plan):
    about = plan["origin"]
    words = " ".join(
        pathlib.Path(about["command"][0]).name if number == 0 else word
        for number, word in enumerate(about["command"])
    )
    return f"\n`{words}`, commit {about['commit'] or 'unknown'}, {about['date'][:10]}.\n"
