"""How much of each parameter is kept, so that units select as if they were one.

A model is exchanged in units: FSDP's modules, or DDP's buckets. Each unit sends the largest values of its own. If each sent the same share,
a value of a unit with small gradients would travel, and a larger one of another unit would wait. That costs 1 % of loss in
docs/parity.md ("Units that select apart").

If the whole model selected at once, one threshold T would hold everywhere. Gradients are mostly noise when selection begins, so what
waits for an element is a random walk: with a mean square s of its gradient, it reaches T after about T^2 / s exchanges. So a parameter's
share is proportional to its mean square. The shares of a class and stage come to what they would be without this."""

from __future__ import annotations

from collections.abc import Mapping

LEAST, MOST = 1 / 8, 4.0  # of a parameter's share, relative to the mean
CHANGE = 0.2  # reducers are made anew where a share has changed by more


def factors(squares: Mapping[str, float], sizes: Mapping[str, int], most: float = MOST) -> dict[str, float]:
    """squares: name -> mean square of the gradient, finite, in any unit. sizes: name -> elements. Returns name -> share relative to the mean,
    LEAST to `most`, whose mean over elements is 1."""
    total = sum(sizes[name] for name in squares)
    mean = sum(squares[name] * sizes[name] for name in squares) / max(1, total)
    if mean <= 0:
        return dict.fromkeys(squares, 1.0)
    relative = {name: square / mean for name, square in squares.items()}

    def made(factor: float) -> dict[str, float]:
        return {name: min(most, max(LEAST, factor * value)) for name, value in relative.items()}

    def is_enough(factor: float) -> bool:
        return sum(share * sizes[name] for name, share in made(factor).items()) >= total

    low, high = 0.0, 1.0
    while not is_enough(high) and high < 2.0**100:  # where a square is 0, no factor may be enough
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return made(high)


def differ(now: Mapping[str, float], then: Mapping[str, float]) -> bool:
    """Whether shares have changed enough; those not named are 1."""
    return any(abs(share / now.get(name, 1.0) - 1) > CHANGE for name, share in then.items())
