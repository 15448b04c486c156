# test_types.py has its types checked. An error that is expected and does not come is one.
import torch

from tagc.local import LocalSteps

model = torch.nn.Linear(3, 3)
LocalSteps(model, torch.optim.AdamW(model.parameters()), values="int3")  # type: ignore[arg-type]
