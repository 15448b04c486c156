"""tagc.collectives: torch's collectives, compressed, for loops and optimizers that call them by
themselves, without a wrapper around the model.

    collectives    Collectives, which users call
    keys           what it knows of its keys
    calls          one call"""

from tagc.collectives.collectives import Collectives

__all__ = ["Collectives"]
