"""Whether each peer, where it runs as its paper says, comes out in its paper's order. A peer's row is for
README only if it does.

    python lab/parity/parity.py peers       # the runs
    python lab/studies/peers_verdict.py             # the verdicts, of what is there"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab" / "parity"))

import tables

# arm -> (what its paper finds, the arm it is held against, the per cent above that arm that still is so)
ORDERS = {
    "diloco": ("level with dense at two replicas (Douillard et al.; Therien et al.)", "dense", 1.0),
    "sparseloco": ("below DiLoCo (Sarfi et al., 512 M)", "diloco", 0.0),
    "demo-32": ("level with AdamW (Peng et al., 300 M and 1 B)", "dense", 0.5),
    "powersgd-4": ("level with dense (Vogels et al.), and below rank 1", "dense", 0.5),
    "powersgd-1": ("above rank 4 (Vogels et al.)", "powersgd-4", None),
    "blocks-4": ("level with dense (Xie et al., LoCo)", "dense", 0.5),
    # not a paper's: what LocalSteps is to reach
    "local-95": ("at most 0.5 % above every value in 4 bits", "local-4", 0.5),
    "local-99": ("at most 0.5 % above every value in 4 bits", "local-4", 0.5),
}
LEAST_EXCHANGES = 1000


def verdict(arm, losses, exchanges):
    """(per cent above the arm it is held against, the verdict); None where a run is missing."""
    _, other, most = ORDERS[arm]
    if arm not in losses or other not in losses:
        return None
    gap = 100 * (losses[arm] / losses[other] - 1)
    missing = [] if exchanges >= LEAST_EXCHANGES else [f"{exchanges} exchanges, not {LEAST_EXCHANGES}"]
    if gap > most if most is not None else gap <= 0:
        missing.append("its order is another")
    return gap, f"outside its regime here: {', '.join(missing)}" if missing else "reproduced"


def table(found):
    setting, rows, is_even = tables.rows_of(found)
    losses = {}
    for row in rows:
        own = [run["loss"] for run in row["runs"].values() if run["is_whole"]]
        if own:
            losses[row["arm"].name] = sum(own) / len(own)
    lines = ["| arm | what is to come out | above | verdict |", "|---|---|---:|---|"]
    for arm, (words, other, _) in ORDERS.items():
        every = 30 if "loco" in arm or "local" in arm else 1
        found = verdict(arm, losses, setting.steps // every)
        cells = (f"{found[0]:+.2f} % `{other}`", found[1]) if found else ("", "not run")
        lines.append(f"| `{arm}` | {words} | {' | '.join(cells)} |")
    note = "" if is_even else "\nNot every arm is tuned yet: these are verdicts at one rate.\n"
    return "\n".join(lines) + "\n" + note


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "lab/results/parity/peers.json")
    args = parser.parse_args()
    if not args.json.exists():
        raise SystemExit(f"peers_verdict.py: {args.json} is not there: run lab/parity/parity.py peers first")
    print(table(json.loads(args.json.read_text())))


if __name__ == "__main__":
    main()
