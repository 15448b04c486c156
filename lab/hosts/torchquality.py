"""The table of what lab/studies/torch_quality.py found."""

import statistics

import cells
from common import LabError


def markdown(result):
    try:
        return _rows(result) + _origin(result)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LabError(f"the result is damaged: {error!r}") from None


def _rows(result):
    """Mean over the orders of the data; gaps to dense order by order."""
    runs = result["runs"]
    dense = {run["order"]: run["loss"] for run in runs if run["arm"] == "dense"}
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [run for run in runs if run["arm"] == arm]
        mean = statistics.mean(run["loss"] for run in own)
        gaps = [100 * (run["loss"] / dense[run["order"]] - 1) for run in own if run["order"] in dense]
        gap = f"{statistics.mean(gaps):+.2f} % ({', '.join(f'{gap:+.2f}' for gap in gaps)})" if gaps else "-"
        if arm == "dense":
            gap = f"differ by {100 * (max(dense.values()) - min(dense.values())) / mean:.2f} %"
        rows.append(
            [
                arm,
                f"{mean:.4f}",
                gap,
                f"{statistics.mean(run['bits'] for run in own):.2f}",
                cells.number(own[0]["gather_bits"] and statistics.mean(run["gather_bits"] for run in own), 2),
            ]
        )
    return cells.grid(
        [
            "arm",
            "validation loss",
            "above dense (each order of the data)",
            "gradients, bits per element",
            "parameters, where tagc gathers them",
        ],
        rows,
    )


def _origin(result):
    return (
        f"\nFSDP2, {result['world_size']} ranks, GPT of {result['n_params'] / 1e6:.2f} M parameters; "
        f"{result['trunk']} dense steps, from "
        f"which all arms go on for {result['steps']}.\n\n`torchrun --standalone --nproc-per-node "
        f"{result['world_size']} "
        f"{' '.join(result['command'])}`, torch {result['torch']}, commit {result['commit']}.\n"
    )
