"""How long a step would take: a stated model, nothing measured.

The loss curve is the small model's. Time is that of a model of N_PARAMS which sends as many bits per
parameter: a small model's own would be nothing but latencies."""

N_PARAMS = 124e6
COMPUTE_S = 0.25  # a host: 6 x N_PARAMS x 32,768 tokens at 100 TFLOP/s
LATENCY_S = 1e-4  # one way
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}


def seconds(n_steps, bits, latencies, rate):
    """bits: per parameter, of one rank, all steps together."""
    return n_steps * COMPUTE_S + latencies * LATENCY_S + bits * N_PARAMS / rate


def curve(run, n_vocabulary, x):
    """[(x, loss)] of a run, from random weights on. x(evaluation) -> its place on the x axis."""
    import math

    start = {"step": 0, "loss": math.log(n_vocabulary), "bits": 0.0, "latencies": 0}
    return [(x(point), point["loss"]) for point in (start, *run["evals"])]


def at(points, where):
    """The loss at x = where, linear between evaluations; the last one's beyond the end."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= where <= x1:
            return y0 + (y1 - y0) * (where - x0) / (x1 - x0) if x1 > x0 else y1
    return points[-1][1]


def reaches(points, loss):
    """The first x at which the curve is down to `loss`, linear between evaluations; None where it never
    is."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if y1 <= loss:
            return x1 if y0 == y1 else max(x0, x0 + (x1 - x0) * (y0 - loss) / (y0 - y1))
    return None
