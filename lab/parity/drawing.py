"""Loss against bits, and against time: lines with names that a reader knows who never saw the lab.

    python lab/parity/drawing.py lab/results/parity/NAME.json...     draws NAME.svg from what was kept

It shows the arms of NAMES, which have the same colour in every picture. The table has all arms."""

import json
import pathlib
import sys

import runner
import simulate
import tables

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Arm -> its name in words; the place here is its colour.
NAMES = {
    "dense": "AdamW in fp32",
    "bf16": "gradients in bf16",
    "tagc-optimizer": "tagc: compress(model, optimizer)",
    "tagc": "tagc: compress(model)",
    "tagc-all-optimizer": "tagc, FSDP2: the optimizer, 4-bit parameters",
    "tagc-all-95": "tagc, FSDP2: beta1 0.5 at once, 4-bit parameters",
    "powersgd-4": "PowerSGD of rank 4",
    "demo-32": "DeMo, 32 of 4,096",
    "diloco": "DiLoCo, every 30 steps",
}
LOSS = "validation loss, nats per token"


def draw(found, stem):
    """The mean over an arm's seeds, in a band from the lowest to the highest."""
    setting, rows, _ = tables.rows_of(found)
    points = []
    for row in rows:
        arm, runs = row["arm"].name, list(row["runs"].values())
        if arm not in NAMES:
            continue
        mean = tables._mean_curve(setting, row, lambda point: point["bits"])[1:]
        curves = [
            simulate.curve(run, setting.n_vocabulary, lambda p: p["bits"])[-len(mean) :] for run in runs
        ]
        for (bits, loss), *seeds in zip(mean, *curves):
            ys = [y for _, y in seeds]
            points.append({"arm": NAMES[arm], "x": bits, "y": loss, "low": min(ys), "high": max(ys)})
    panels = {"bits per parameter that a rank has sent": points}
    about = "The mean over seeds, in a band from the lowest to the highest. The table has all arms."
    write(stem.with_suffix(".svg"), panels, list(NAMES.values()), LOSS, "Loss against bits sent", about, True)


def write(path, panels, names, y_title, title, about, is_log):
    """panels: title of the x axis -> [{"arm", "x", "y", perhaps "low" and "high"}]. They share the y axis and
    the legend, in which a name has the colour of its place in `names`."""
    if str(ROOT / "python") not in sys.path:
        sys.path.append(str(ROOT / "python"))
    import altair as alt

    from tagc.report import figures, pictures, style

    met = {point["arm"] for points in panels.values() for point in points}
    shown = [name for name in names if name in met]
    places = [names.index(name) for name in shown]
    colour = style.arm_color(shown, [style.line_color(place) for place in places])
    dashes = alt.StrokeDash(
        "arm:N", sort=None, title=None, scale=alt.Scale(domain=shown, range=[style.dash(i) for i in places])
    )
    y = alt.Y("y:Q", title=y_title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    data, charts = {}, []
    for number, (x_title, points) in enumerate(panels.items()):
        data[name := f"panel{number}"] = points
        scale = alt.Scale(type="log", nice=False) if is_log else alt.Scale(nice=False)
        ticks = alt.Axis(values=ticks_of(points), format=",", grid=False) if is_log else alt.Axis(grid=False)
        base = alt.Chart(style.data(name)).encode(
            x=alt.X("x:Q", title=x_title, scale=scale, axis=ticks), color=colour
        )
        lines = base.mark_line().encode(y=y, strokeDash=dashes)
        bands = base.transform_filter("datum.high > datum.low").mark_area(opacity=0.15)
        layers = [bands.encode(y=alt.Y("low:Q", title=y_title), y2="high:Q")] if "low" in points[0] else []
        width = (style.WIDTH - 60 - 30 * (len(panels) - 1)) // len(panels)
        charts.append(alt.layer(*layers, lines).properties(width=width, height=320))
    chart = charts[0] if len(charts) == 1 else alt.hconcat(*charts).resolve_scale(y="shared")
    figure = figures.Figure("", title, about, "", None)
    path.write_bytes(pictures.render([style.Drawing(chart, data)], figure, False))


def ticks_of(points):
    """Returns 1, 2 and 5 times powers of ten, or these alone where there would be too many."""
    xs = [point["x"] for point in points]
    subs = (1, 2, 5) if max(xs) < 200 * min(xs) else (1,)
    ticks = [sub * 10**power for power in range(-3, 9) for sub in subs]
    return [tick for tick in ticks if min(xs) <= tick <= max(xs)]


if __name__ == "__main__":
    for name in map(pathlib.Path, sys.argv[1:]):
        kept = json.loads(name.read_text())
        draw(kept | {"runs": [runner.whole(run) for run in kept["runs"]]}, name.with_suffix(""))
