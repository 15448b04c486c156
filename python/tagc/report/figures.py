"""The figures of a report, by name. One specification makes both the figure on the page and the picture
file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tagc.report import figures_bars, figures_loss, figures_pareto, figures_timeline
from tagc.report.model import Report, Units
from tagc.report.style import Drawing

_RUNS = "runs that tagc train wrote"
_QUALITY = "runs of two or more ranks with validation losses, of two or more arms"
_TRACE = "a trace (tagc train --trace FILE)"


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    caption: str
    needs: str  # the data that it needs
    # empty: nothing to draw; several if scales differ too much
    draw: Callable[[Report, Units], list[Drawing]]


def _one(draw: Callable[[Report], Drawing | None]) -> Callable[[Report, Units], list[Drawing]]:
    return lambda report, units: [drawing for drawing in [draw(report)] if drawing]


def _many(draw: Callable[[Report], list[Drawing]]) -> Callable[[Report, Units], list[Drawing]]:
    return lambda report, units: draw(report)


def _line(draw: Callable[[Report, Units], Drawing | None]) -> Callable[[Report, Units], list[Drawing]]:
    return lambda report, units: [drawing for drawing in [draw(report, units)] if drawing]


FIGURES = (
    Figure(
        "loss",
        "Loss against step",
        "Points: validation. Thin lines: training, smoothed over a fortieth of the run. Several seeds of "
        "one arm are drawn as their mean, in a "
        "band from least to most.",
        _RUNS,
        _one(figures_loss.loss),
    ),
    Figure(
        "loss-time",
        "Loss against time",
        "The same over the time of the steps, without validation and saving.",
        "runs with steps that tagc train wrote",
        _one(figures_loss.loss_time),
    ),
    Figure(
        "loss-bits",
        "Loss against bits sent",
        "The same over the bits that a rank has sent per parameter, gradients and parameters together.",
        "runs of two or more ranks with steps that tagc train wrote",
        _one(figures_loss.loss_bits),
    ),
    Figure(
        "gap",
        "Validation loss against the first arm",
        "Runs of the same seed are compared with each other, if there are such. The band is the spread "
        "over seeds. The first arm's band "
        "is the distance of its seeds from their mean: a gap inside it is not significant.",
        "two or more runs with validation losses",
        _one(figures_loss.gap),
    ),
    Figure(
        "pareto",
        "Loss against bits of gradients",
        "Each mark is an arm, the mean over its seeds. Whiskers run from least to most; each run is "
        "compared with the run of the baseline, the first arm, of the "
        "same seed. Line: arms that no other beats in both. Bold names: the paper's sketch. Bits are "
        "counted over the whole model, before the "
        "factor (W-1)/W.",
        _QUALITY,
        _one(figures_pareto.gradients),
    ),
    Figure(
        "pareto-all",
        "Loss against bits of gradients and parameters",
        "The same with the bits of the parameters, too.",
        _QUALITY,
        _one(figures_pareto.all_legs),
    ),
    Figure(
        "levels",
        "Level of each group of parameters",
        "What the schedule lets each group send: every value in 8 bits, every value in 4 bits, the "
        "largest, and fewer. The mean over the parameters of a group, by their sizes.",
        "runs that PyTorch's handle.record() wrote",
        _many(figures_loss.levels),
    ),
    Figure(
        "time",
        "Where the time of a step goes",
        "Exposed: compute waits for the network. At the end of a bar: the median, and the speed-up over "
        "the first arm. Whisker: "
        "least to most of the iterations of a bench or of a run of the lab, the middle 80 % of the steps "
        "of other training runs.",
        "runs, a bench result or a lab result",
        _many(figures_bars.time),
    ),
    Figure(
        "bits",
        "Bits per parameter on the wire",
        "Counted from the bytes sent, over the whole model including dense "
        "tensors. gather is the "
        "parameters; the other legs are the gradients and the agreement on them.",
        "runs of two or more ranks, a bench or lab result",
        _many(figures_bars.bits),
    ),
    Figure(
        "timeline",
        "Timeline of a step",
        "The step of median length. All timelines have one scale. comm: transfers under way, coloured by "
        "leg; simultaneous ones are in "
        "separate lanes. Outlined: the window that is enlarged below.",
        _TRACE,
        _line(figures_timeline.step),
    ),
    Figure(
        "window",
        "Backward pass of neighbouring units",
        (
            "From the start of the first unit's backward pass to the start of the next unit's. All timelines "
            "have one scale."
        ),
        f"{_TRACE} that holds backward passes of the units",
        _line(figures_timeline.window),
    ),
    Figure(
        "memory",
        "Memory of a rank",
        "Parameters, gradients, optimizer state and residuals that persist between steps.",
        "a bench or lab result",
        _many(figures_bars.memory),
    ),
    Figure(
        "codec",
        "Codec against the memory floor",
        (
            "Floor: reading two arrays and writing one, 12 bytes per element, on the same threads. The owner "
            "of a shard decodes."
        ),
        "a bench or lab result",
        _many(figures_bars.codec),
    ),
    Figure(
        "link",
        "Share of the link that each exchange fills",
        "100 % is a plain exchange of all ranks with all others, in the same run.",
        "a bench or lab result",
        _many(figures_bars.link),
    ),
)
NAMES = tuple(figure.name for figure in FIGURES)


def find(name: str) -> Figure:
    """Returns the figure of that name; KeyError if there is none."""
    return dict(zip(NAMES, FIGURES))[name]
