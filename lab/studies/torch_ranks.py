"""Do the defaults hold at 2, 8 and 16 ranks, and where ranks share hosts? The set-ups of torch_first_try.py,
with the same batches for any number of ranks, so that dense arms run once, over two.

    python lab/studies/torch_ranks.py --seeds 1 2 3 --minutes 60

It runs what is missing in the JSON file, for as long as --minutes allows, and writes a table and a picture
beside it. Bits are those of the last step."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "lab" / "studies")]

import torch_first_try as first_try

SETUPS = {"untied": "DDP", "llama tied": "FSDP2"}
SEQUENCES = 16
DENSE = ("dense", "dense, nudged", "dense, bf16", "dense, beta1 0.5", "dense, tagc's betas")
OURS = {"one line": "compress(model)", "with the optimizer": "compress(model, optimizer)"}
# ranks, hosts; None: each rank is a host
CASES = ((2, None), (8, None), (8, 2), (16, 4), (16, None))


def setup_of(setup, ranks, hosts, steps):
    """Returns its name in the rows of torch_first_try.py."""
    call = argparse.Namespace(steps=steps, shared=True, sequences=SEQUENCES, hosts=hosts)
    return setup + first_try.words_of(call, ranks)


def case_name(ranks, hosts):
    return f"{ranks}" if hosts is None else f"{hosts} x {ranks // hosts}"


def jobs(args):
    """[(ranks, hosts, arms, seed)], the cheap ones first."""
    kinds = [(2, None, DENSE), *((*case, tuple(OURS)) for case in CASES)]
    return [(*kind, seed) for kind in kinds for seed in args.seeds]


def read(path):
    rows = json.loads(path.read_text()) if path.exists() else []
    return {(row["setup"], row["arm"], row["seed"]): row for row in rows}


def is_done(args, ranks, hosts, arms, seed):
    rows, setups = read(args.json), [setup_of(setup, ranks, hosts, args.steps) for setup in args.setups]
    return all((setup, arm, seed) in rows for setup in setups for arm in arms)


def run(args, ranks, hosts, arms, seed):
    """All set-ups and arms by the same processes, which take long to start."""
    words = ["--standalone", "--nproc-per-node", ranks, first_try.__file__, "--json", args.json]
    words += ["--setups", *args.setups, "--arms", *arms]
    words += ["--seeds", seed, "--sequences", SEQUENCES, "--shared"]
    words += ["--steps", args.steps] + ([] if hosts is None else ["--hosts", hosts])
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-4000:]}")


def percent(value):
    return f"{100 * value:+.2f}"


def gaps(args, rows, setup, ranks, hosts, arm, against=DENSE[:1]):
    """{seed: (loss / the lowest of `against` with this seed - 1, the row)} of what has been run."""
    found = {}
    for seed in args.seeds:
        dense = [rows.get((setup_of(setup, 2, None, args.steps), one, seed)) for one in against]
        row = rows.get((setup_of(setup, ranks, hosts, args.steps), arm, seed))
        if row and all(dense):
            found[seed] = row["loss"] / min(one["loss"] for one in dense) - 1, row
    return found


def table(args, rows):
    lines = [
        "| set-up | arm | ranks | above dense, by seed | mean | above the best dense arm of each seed, mean "
        "| bits between hosts | within |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for setup in args.setups:
        arms = [(arm, 2, None) for arm in DENSE] + [(arm, *case) for arm in OURS for case in CASES]
        for arm, ranks, hosts in arms:
            found = gaps(args, rows, setup, ranks, hosts, arm)
            if not found:
                continue
            values = [gap for gap, _ in found.values()]
            best = [gap for gap, _ in gaps(args, rows, setup, ranks, hosts, arm, DENSE).values()]
            ends = [row["last_bits"] for _, row in found.values()]
            within = [row["within_bits"] for _, row in found.values() if "within_bits" in row]
            cells = [
                f"`{setup}` ({SETUPS[setup]})",
                f"`{OURS[arm]}`" if arm in OURS else arm,
                case_name(ranks, hosts),
                ", ".join(map(percent, values)) + " %",
                percent(statistics.mean(values)) + " %",
                percent(statistics.mean(best)) + " %" if best else "",
                f"{statistics.mean(ends):.1f}",
                f"{statistics.mean(within):.1f}" if within else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(args, rows):
    """Points for seeds, a line for the mean of each arm, and a band for what dense arms differ by that should
    be equal."""
    import altair as alt

    from tagc.report import figures, pictures, style

    points, bands = [], []
    for setup in args.setups:
        title = f"{setup} ({SETUPS[setup]})"
        dense = [
            gap
            for arm in ("dense", "dense, nudged", "dense, bf16")
            for gap, _ in gaps(args, rows, setup, 2, None, arm).values()
        ]
        if dense:
            bands.append({"setup": title, "low": 100 * min(dense), "high": 100 * max(dense)})
        for arm, about in OURS.items():
            for ranks, hosts in CASES:
                for seed, (gap, _) in gaps(args, rows, setup, ranks, hosts, arm).items():
                    points.append(
                        {
                            "setup": title,
                            "arm": about,
                            "ranks": case_name(ranks, hosts),
                            "gap": 100 * gap,
                            "seed": seed,
                        }
                    )
    order, names = [case_name(*case) for case in CASES], list(OURS.values())
    x = alt.X("ranks:N", sort=order, title="ranks, or hosts x ranks of each", axis=alt.Axis(labelAngle=0))
    colour = style.arm_color(names, [style.line_color(i) for i in range(len(names))])
    band = alt.Chart().mark_rect(opacity=0.25, color=style.FRAME).encode(y="low:Q", y2="high:Q")
    base = alt.Chart().encode(x=x, color=colour)
    dots = base.mark_circle(size=36, opacity=0.7).encode(y=alt.Y("gap:Q", title="loss above that without, %"))
    means = base.mark_line().encode(y="mean(gap):Q")
    charts, data = [], {}
    for number, setup in enumerate(args.setups):
        title = f"{setup} ({SETUPS[setup]})"
        own, dense = f"runs{number}", f"dense{number}"
        data[own] = [point for point in points if point["setup"] == title]
        data[dense] = [one for one in bands if one["setup"] == title]
        layers = [band.properties(data=style.data(dense))]
        layers += [layer.properties(data=style.data(own)) for layer in (means, dots)]
        charts.append(alt.layer(*layers).properties(title=title, width=330, height=240))
    chart = alt.hconcat(*charts).resolve_scale(y="shared")
    about = "A point is a run, a line the mean of its seeds. Band: what runs without compression differ by."
    figure = figures.Figure("", "Loss by the number of ranks", about, "", None)
    args.json.with_suffix(".svg").write_bytes(pictures.render([style.Drawing(chart, data)], figure, False))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=pathlib.Path, default=ROOT / "lab" / "results" / "parity" / "ranks.json"
    )
    parser.add_argument("--setups", nargs="+", default=list(SETUPS), choices=SETUPS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no run after that; 0: only the table"
    )
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    for job in jobs(args):
        if time.monotonic() < end and not is_done(args, *job):
            run(args, *job)
    rows = read(args.json)
    args.json.with_suffix(".md").write_text(table(args, rows))
    print(table(args, rows))
    draw(args, rows)


if __name__ == "__main__":
    main()
