"""Loss against bits, and against simulated time over three links, as one SVG.

    python lab/parity/pictures.py lab/results/parity/NAME.json...     draws NAME.svg from what was kept

It shows the arms of COLOURS, which have the same colour in every picture. The table has all arms."""

import io
import json
import pathlib
import re
import sys

import runner
import simulate
import tables

COLOURS = {
    "dense": "#222222",
    "bf16": "#8a8f98",
    "tagc": "#56b4e9",
    "tagc-optimizer": "#0072b2",
    "tagc-all-95": "#009e73",
    "tagc-all-optimizer": "#6f58b8",
    "powersgd-4": "#d55e00",
    "demo-32": "#e69f00",
    "diloco": "#b3568f",
}


def draw(found, stem):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "parity", "font.size": 9}
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    setting, rows, _ = tables.rows_of(found)
    axes_of = {"bits per parameter sent by a rank": lambda point: point["bits"]} | {
        f"seconds over {name}, simulated": tables.time_of(rate) for name, rate in simulate.LINKS.items()
    }
    figure, grid = plt.subplots(2, 2, figsize=(11, 8), sharey=True)
    n_arms = len(rows)
    rows = [row for row in rows if row["arm"].name in COLOURS]
    for axes, (label, x) in zip(grid.flat, axes_of.items()):
        for row in rows:
            runs = list(row["runs"].values())
            style = {"color": COLOURS[row["arm"].name], "linewidth": 1.4}
            mean = tables._mean_curve(setting, row, x)[1:]
            mean = [point for point in mean if point[0] > 0]
            axes.plot(*zip(*mean), label=row["arm"].name, **style) if mean else None
            if len(runs) > 1 and mean:  # from the lowest to the highest seed
                curves = [
                    [y for _, y in simulate.curve(run, setting.n_vocabulary, x)[-len(mean) :]] for run in runs
                ]
                axes.fill_between(
                    [point[0] for point in mean],
                    [min(ys) for ys in zip(*curves)],
                    [max(ys) for ys in zip(*curves)],
                    color=style["color"],
                    alpha=0.15,
                    linewidth=0,
                )
        axes.set_xscale("log")
        least, most = axes.get_xlim()
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if most < 100 * least else (1,)))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel("validation loss, nats per token")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    title = f"{len(rows)} of {n_arms} arms" if len(rows) < n_arms else None
    figure.legend(handles, labels, loc="center right", fontsize=8, title=title)
    figure.tight_layout(rect=(0, 0, 0.87, 1))
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    stem.with_suffix(".svg").write_text(small(drawn.getvalue()))


def small(svg):
    """Returns the drawing in half the letters: places to a tenth of a point, relative to each other, and no
    groups that say nothing."""
    body = re.sub(
        r"\d+\.\d{2,}",
        lambda found: f"{float(found[0]):.{1 if float(found[0]) >= 1 else 2}f}".removesuffix(".0"),
        svg,
    )
    body = re.sub(r">\s+<", "><", re.sub(r" *\n(?! *<)", " ", body[body.index("<svg ") :]))
    body = re.sub(
        r"('DejaVu Sans'|'Bitstream)[^;\"]*sans-serif", "sans-serif", re.sub(r"<g id=\"[^\"]*\"", "<g", body)
    )
    body = re.sub(
        r"<metadata>.*?</metadata>| transform=\"rotate\(-0 [^\"]*\"", "", re.sub(r"<!--.*?-->", "", body)
    )
    body = re.sub(r" d=\"M ([^\"A-Y]+(?:L [^\"A-Y]+)+)\"", lambda found: f' d="{relative(found[1])}"', body)
    styles = re.findall(r"style=\"([^\"]*)\"", body)
    for number, style in enumerate(sorted({style for style in styles if styles.count(style) > 3})):
        body = body.replace(f'style="{style}"', f'class="s{number}"').replace(
            "</style>", f".s{number}{{{style}}}</style>"
        )
    while (flatter := re.sub(r"<g>((?:(?!</?g[ >]).)*)</g>", r"\1", body)) != body:
        body = flatter
    return body.replace("<g ", "\n<g ") + "\n"


def relative(places):
    """Returns "x y L x y L ..." as a path of steps from one place to the next; z at the end stays."""
    points = [[float(number) for number in place.replace("z", "").split()] for place in places.split("L")]
    steps = [f"{x1 - x0:.1f} {y1 - y0:.1f}" for (x0, y0), (x1, y1) in zip(points, points[1:])]
    start, short = "{:g} {:g}".format(*points[0]), " ".join(steps).replace(".0", "").replace(" -", "-")
    return f"M{start}l{short}" + ("z" if "z" in places else "")


if __name__ == "__main__":
    for name in map(pathlib.Path, sys.argv[1:]):
        kept = json.loads(name.read_text())
        draw(kept | {"runs": [runner.whole(run) for run in kept["runs"]]}, name.with_suffix(""))
