# test_types.py has its types checked. An error that is expected and does not come is one.
import torch

from tagc.collectives import Collectives, Turned

model = torch.nn.Linear(3, 3)
comm = Collectives(names=model, parameters="delta4", hosts=2)
comm.all_reduce(model.weight, key=model.weight)
comm.reduce_scatter(model.weight, model.weight, key=3, async_op=True)  # type: ignore[arg-type]
Collectives(values="int3")  # type: ignore[arg-type]
muon = Turned(comm, every=50)
muon.reduce_scatter(model.weight, model.weight, key=model.weight, async_op=True)
muon.all_reduce(model.weight)  # type: ignore[call-arg]
Turned(model)  # type: ignore[arg-type]
