"""The table of kind "torch" for hosts of several ranks: what passes the network card of one host."""

import cells
import results

BASELINE = "fsdp2-bf16"  # what a careful user has; all else is compared with it


def markdown(result):
    parts = []
    for case in result["cases"]:
        where = f"{case['ranks_per_host']} ranks on each of {case['hosts']} hosts"
        parts.append(f"**{where}, {cells.rate_text(case)}**\n\n{_arms(case)}\n{_about(case)}")
    return "\n".join([*parts, _growth(result)])


def host_bytes(case, arm, key="n_bytes_sent"):
    """Returns the bytes of a step through the card of one host, or None where that is not known."""
    return None if arm[key] is None else arm[key] * case["ranks_per_host"]


def _arms(case):
    arms = {arm["name"]: arm for arm in case["torch"]["arms"]}
    base, rows = arms.get(BASELINE), []
    for arm in arms.values():
        sent, needed = host_bytes(case, arm), host_bytes(case, arm, "n_bytes_needed")
        least = host_bytes(case, base, "n_bytes_needed") if base else None
        rows.append(
            [
                f"`{arm['name']}`: {arm['about']}",
                cells.seconds(arm["total_s"]),
                cells.spread_text(results.spread(cells.ratios(base, arm)), 2, "x") if base else "-",
                cells.number(sent and sent / 1e6, 2),
                cells.number(needed and needed / 1e6, 2),
                cells.number(least / sent if least and sent else None, 1, "x"),
                cells.number(arm.get("rank_memory_bytes") and arm["rank_memory_bytes"] / 1e6, 0),
                cells.number(arm["tagc_memory_bytes"] / 1e6 if arm.get("tagc_memory_bytes") else None, 1),
            ]
        )
    head = [
        "arm",
        "step",
        f"times as fast as {BASELINE}, per round",
        "MB through the card of a host, counted",
        "that torch must send",
        f"times fewer than {BASELINE} must send",
        "MB of memory of a rank",
        "of these tagc's own",
    ]
    return cells.grid(head, rows)


def _about(case):
    found, model = case["torch"], case["torch"]["model"]
    text = (
        f"GPT of {model['n_params'] / 1e6:.1f} M parameters, {found['seq_len']} tokens a rank and step, "
        f"computing alone {1e3 * found['compute_s']:.0f} ms; sparsity {100 * found['sparsity']:g} %; torch "
        f"{found['torch']}, gloo."
    )
    text += f" {cells.link_text(case['link'])}.\n" if case["link"] else "\n"
    return text + (
        "Memory: by how much the process grew, with parameters and Adam's state; tagc's own by "
        "`handle.memory()`.\n"
        if any(arm.get("rank_memory_bytes") for arm in found["arms"])
        else ""
    )


def _growth(result):
    """Returns how what passes the card changes with the ranks of a host, where cases differ in that alone."""
    cases, rows = result["cases"], []
    for i, fewer in enumerate(cases):
        for more in cases[i + 1 :]:
            same = fewer["hosts"] == more["hosts"] and cells.rate_text(fewer) == cells.rate_text(more)
            if not same or fewer["ranks_per_host"] >= more["ranks_per_host"]:
                continue
            others = {arm["name"]: arm for arm in more["torch"]["arms"]}
            for arm in fewer["torch"]["arms"]:
                one = host_bytes(fewer, arm)
                other = arm["name"] in others and host_bytes(more, others[arm["name"]])
                if one and other:
                    rows.append([f"`{arm['name']}`", _place(fewer, more), cells.percent(other / one - 1)])
    head = ["arm", "from how many ranks per host to how many", "bytes through the card"]
    return "\n" + cells.grid(head, rows) if rows else ""


def _place(fewer, more):
    return f"{fewer['ranks_per_host']} to {more['ranks_per_host']}, {cells.rate_text(fewer)}"
