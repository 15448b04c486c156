"""The table of kind "torch" for pipelines: seconds of a step, and bytes between two stages."""

import cells
import results
from common import bits_per_s


def markdown(result):
    parts = []
    for case in result["cases"]:
        own = "" if case["torch"]["tflops"] else ", computing on the processor"
        parts.append(
            f"**{case['hosts']} hosts, {cells.rate_text(case)}{own}**\n\n{_arms(case)}\n{_about(case)}"
        )
    return "\n".join(parts)


def baseline_of(arms):
    """Returns the fastest of those without tagc in bf16, or None."""
    own = [arm for arm in arms if not arm["is_tagc"] and arm["name"].endswith("-bf16")]
    return min(own, key=lambda arm: arm["total_s"]["median"], default=None)


def busy_share(case, arm):
    """Returns in what part of a step a link carries bytes, where each direction carries its half at the full
    rate: torch's own messages are of one size both ways."""
    if arm["is_tagc"] or not case["link"]:
        return None
    rate = min(map(bits_per_s, case["link"]["ways"]))
    return 8 * arm["n_bytes_needed"] / 2 / rate / arm["total_s"]["median"]


def _arms(case):
    arms, rows = case["torch"]["arms"], []
    base = baseline_of(arms)
    for arm in arms:
        busy = busy_share(case, arm)
        rows.append(
            [
                f"`{arm['name']}`: {arm['about']}",
                cells.seconds(arm["total_s"]),
                cells.spread_text(results.spread(cells.ratios(base, arm)), 2, "x") if base else "-",
                cells.number(arm["n_bytes_sent"] / 1e6, 2),
                cells.number(arm["n_bytes_needed"] and arm["n_bytes_needed"] / 1e6, 2),
                cells.number(None if busy is None else 100 * busy, 0, " %"),
            ]
        )
    head = [
        "arm",
        "step",
        f"times as fast as {base['name']}, per round" if base else "times as fast",
        "MB between two stages, both ways",
        "that torch must send",
        "a direction is busy",
    ]
    return cells.grid(head, rows)


def _about(case):
    found = case["torch"]
    simulated = f", simulated for a GPU of {found['tflops']:g} TFLOP/s" if found["tflops"] else ""
    text = (
        f"A stage per host: layers per stage: {found['layers_per_stage']}, of width {found['width']}; "
        f"{found['micro_batches']} micro-batches of {found['batch_size'] * found['seq_len']} tokens; a stage "
        f"computes for {1e3 * found['compute_s']:.0f} ms of a step{simulated}; torch {found['torch']}, gloo."
    )
    return text + (f" {cells.link_text(case['link'])}.\n" if case["link"] else "\n")
