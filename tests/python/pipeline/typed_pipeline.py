# test_types.py has its types checked. An error that is expected and does not come is one.
import torch
from torch.distributed.pipelining import PipelineStage

from tagc.pipeline import CompressedStage, compress_stage

model = torch.nn.Linear(3, 3)
stage = PipelineStage(model, 0, 2, torch.device("cpu"))
piped: CompressedStage = compress_stage(stage, forward="int8", backward="whole", block=32, hosts=2)
compress_stage(stage, forward="int2")  # type: ignore[arg-type]
compress_stage(model)  # type: ignore[arg-type]
