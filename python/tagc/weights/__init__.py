"""tagc.weights: a trainer's weights for those who generate with them, exact, as what each step changed.

sync        WeightSync: versions of weights as bytes, or over a process group
publish     Publisher: a trainer's versions, into a store
follow      Follower: a receiver's weights, from a store
store       the files of a store, and which of them count
layout      where the store's tensors lie in an engine's model
lora        adapters alone, and weights with them added
quantize    weights as receivers quantise them, made by the sender
names       trainers' names and forms of tensors, as those of checkpoints
engines/    vLLM, SGLang and verl, by their own interfaces
tensors     what of a model a rank holds
frame       the bytes of a version
links       the connections of a process group"""

from tagc.weights.follow import Follower
from tagc.weights.layout import Layout, Target
from tagc.weights.lora import Merged
from tagc.weights.publish import Publisher
from tagc.weights.sync import WeightSync
from tagc.weights.tensors import Part, Parts

__all__ = ["Follower", "Layout", "Merged", "Part", "Parts", "Publisher", "Target", "WeightSync"]
