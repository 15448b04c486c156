"""tagc.compiled: models that are compiled whole, by SimpleFSDP's parametrizations, whose collectives are
operators of tagc. parametrize.py has data_parallel(), kind.py is what compress() knows of such a model."""

from tagc.compiled.parametrize import data_parallel

__all__ = ["data_parallel"]
