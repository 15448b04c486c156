"""Markdown tables from results. An experiment's `table` names the view. No figure in a table is typed by
hand."""

import pathlib
import re

import cells
import clusterbench
import formulas
import pipelinebench
import tables_losses
import tables_times
import torchbench
import torchquality
from common import LabError, write_atomically

import results

KINDS = ("lab", "torch-quality")

# ---- bits ----


def compressed_bits(carrier):
    """Returns the bits of gradients in the compressed part: what all legs sent, less what the dense part must
    have sent."""
    n, n_compressed, options = carrier["n_params"], carrier["n_compressed"], carrier["options"]
    if n_compressed == 0 or options.get("mild", "dense") != "dense":
        return None  # what of it the rest has sent is not known
    sent = n * sum(carrier["bits_per_param"].get(leg, 0) for leg in cells.GRADIENT_LEGS)
    return (sent - (n - n_compressed) * formulas.dense_bits(carrier["options"])) / n_compressed


def link_bits(carrier):
    """What left the busiest host through its shaper, headers and start of the run included, per parameter and
    step."""
    if not carrier.get("shaped_bytes"):
        return None
    return 8 * max(carrier["shaped_bytes"]) / carrier["n_params"] / carrier["n_steps"]


def bits(result):
    """Per leg over the whole model, and the gradients of the compressed part beside their formula."""
    carried = list(cells.carriers(result))
    on_link = any(link_bits(carrier) for _, carrier in carried)
    used = [leg for leg in results.LEGS if any(c["bits_per_param"].get(leg, 0) >= 0.005 for _, c in carried)]
    rows = []
    for label, carrier in carried:
        n_compressed, options = carrier["n_compressed"], carrier["options"]
        union = carrier["n_union"] / n_compressed if n_compressed else None
        rows.append(
            [
                f"`{label}`",
                cells.number(100 * n_compressed / carrier["n_params"], 1, " %"),
                cells.number(compressed_bits(carrier), 3),
                cells.number(formulas.gradient_bits(options, union) if n_compressed else None, 3),
                cells.number(formulas.lhc_bits(options) if n_compressed else None, 1),
                *(cells.number(carrier["bits_per_param"].get(leg, 0)) for leg in used),
                cells.number(cells.total_bits(carrier)),
                cells.number(96 / cells.total_bits(carrier), 2, "x"),
                *([cells.number(link_bits(carrier))] if on_link else []),
            ]
        )
    head = [
        "arm",
        "compressed",
        "its gradients, counted",
        "by formula",
        "by formula in LHC",
        *used,
        "all legs",
        "under 96 bits",
        *(["left the busiest host"] if on_link else []),
    ]
    text = cells.grid(head, rows) + (
        "\nBits per parameter, rank and step before the factor (W-1)/W, from bytes that the "
        "transport counted; legs are over the whole model.\n"
    )
    overheads = [
        f"{case['interface']['overhead']:.3f}"
        for case in result["cases"]
        if (case["interface"] or {}).get("overhead")
    ]
    return text + (
        f"\nThe links carried {', '.join(overheads)} times the counted bytes.\n" if overheads else ""
    )


# ---- timeline ----

SHARES = (
    ("computing", "computing, compression included"),
    ("model", "of this the model"),
    ("codec", "of this compression"),
    ("communicating", "communicating"),
    ("gradient_exchange", "exchanging gradients"),
    ("gradient_exchange_with_gaps", "... with the gaps between"),
    ("gather", "gathering parameters"),
)


def timeline(result):
    runs, theirs = (
        [run for case in result["cases"] for run in case["runs"]],
        cells.paper(result["experiment"]),
    )
    first = runs[0]["timeline"]
    head = [f"backward of `{'`, `'.join(first['units'])}`, {first['n_windows']} windows"]
    for run in runs:
        head += [f"`{run['label']}`"] + (["paper"] if run["label"] in theirs else [])
    rows = []
    for key, text in SHARES:
        row = [text]
        for run in runs:
            row.append(cells.number(100 * run["timeline"][key], 1, " %"))
            if run["label"] in theirs:
                fact = theirs[run["label"]].get(key)
                row.append(cells.number(None if fact is None else 100 * fact, 1, " %"))
        rows.append(row)
    row, base = ["seconds of a window"], None
    for run in runs:
        window = run["timeline"]["window_s"]
        base = base or window
        row += [f"{window:.3f} ({window / base:.2f}x)"] + (["-"] if run["label"] in theirs else [])
    return cells.grid(head, rows + [row])


# ---- results ----

VIEWS = {
    "times": tables_times.times,
    "exchanges": tables_times.exchanges,
    "bits": bits,
    "losses": tables_losses.losses,
    "quality": tables_losses.quality,
    "timeline": timeline,
    "torch": torchbench.markdown,
    "cluster": clusterbench.markdown,
    "pipeline": pipelinebench.markdown,
}


def markdown(result):
    view = result["settings"].get("table")
    if view not in VIEWS:
        raise LabError(f'the result {result["experiment"]}: "table" is {view!r}, allowed: {", ".join(VIEWS)}')
    try:
        return VIEWS[view](result) + "\n" + origin_text(result)
    except KeyError as error:
        raise LabError(f"the result {result['experiment']}: the member {error} is missing") from None
    except (TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise LabError(f"the result {result['experiment']} is damaged: {error}") from None


def origin_text(result):
    about = result["origin"]
    notes = ", a quick run: not for keeping" if result["settings"].get("is_quick") else ""
    if about.get("is_busy"):
        notes += f", while other work kept {100 * about['busy_before']:.0f} % of the cores busy"
    blas = about["machine"].get("blas")
    kernel = f", {blas['name']} with its kernel {blas['kernel']}" if blas else ""
    return (
        f"`experiments/lab/lab run {result['experiment']}`, {about['machine']['n_cpus']} cores of "
        f"{about['machine']['cpu']}{kernel}, commit {about['commit'] or 'unknown'}, "
        f"{about['date'][:10]}{notes}.\n"
    )


def put_into(path, made):
    """Replaces the text between <!-- table NAME --> and <!-- end --> for each NAME of `made`; returns the
    names it found."""
    try:
        text = pathlib.Path(path).read_text()
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}") from None
    found = []
    for name, table in made.items():
        between = re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, n = between.subn(lambda match, table=table: f"{match[1]}\n{table}\n{match[2]}", text)
        found += [name] * (n > 0)
    if not found:
        raise LabError(
            f"{path} has no place for any of {', '.join(made)}: a place is <!-- table NAME --> ... "
            "<!-- end -->"
        )
    write_atomically(path, text)
    return found


def from_paths(paths):
    """Returns name -> markdown for result files, and for all results in folders; skips other files there."""
    files = []
    for path in map(pathlib.Path, paths):
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        inside = [file for file in inside if not file.name.endswith(".trace.json")]
        files += [file for file in inside if not path.is_dir() or results.load(file)[0] in KINDS]
    if not files:
        raise LabError(f"no results in {', '.join(map(str, paths))}; experiments/lab/lab run NAME makes them")
    made = {}
    for file in files:
        kind, found = results.load(file)
        if kind == "torch-quality":
            made[file.stem] = torchquality.markdown(found)
        else:
            result = results.read(file)
            made[result["experiment"]] = markdown(result)
    return made
