"""tagc.collectives: torch's collectives, compressed, for loops and optimizers that call them by
themselves, without a wrapper around the model.

    collectives    Collectives, which users call
    keys           what it knows of its keys
    calls          one call
    turned         Turned, reductions of matrices in the basis of their directions
    tokens         all_to_all(), in one level and two
    operators      the same for autograd and for compilers
    experts        CompressedExperts, a ParallelStyle for models with experts"""

from tagc.collectives.collectives import Collectives
from tagc.collectives.experts import CompressedExperts
from tagc.collectives.turned import Turned

__all__ = ["Collectives", "CompressedExperts", "Turned"]
