"""tagc.weights: a trainer's weights for those who generate with them, exact, as what each step changed.

sync        WeightSync, which users call
tensors     what of a model a rank holds
frame       the bytes of a version
links       the connections that move them"""

from tagc.weights.sync import WeightSync

__all__ = ["WeightSync"]
