"""Engines of DeepSpeed and Colossal-AI: one Error that says what to use instead, for the engine and for the
model inside it. Classes here stand for theirs."""

import functools
import sys
import types

import pytest

torch = pytest.importorskip("torch")
import ranks
from oracles import check_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def of(module, thing):
    """A class or function as if that module had it."""
    thing.__module__ = module
    return thing


def layers():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


class Wraps(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def deepspeed_engine(stage):
    """As deepspeed.initialize() leaves both: (engine, the model in it)."""

    class DeepSpeedEngine(Wraps):
        pass

    model = layers()
    engine = of("deepspeed.runtime.engine", DeepSpeedEngine)(model)
    if stage == 3:
        Status = of("deepspeed.runtime.zero.partition_parameters", type("ZeroParamStatus", (), {}))
        for parameter in model.parameters():
            parameter.ds_status = Status()
    else:
        model.register_forward_pre_hook(of("deepspeed.runtime.engine", lambda module, inputs: None))
    return engine, model


def colossal_model(kind):
    """As Booster.boost() leaves both."""
    model = layers()
    base = of("colossalai.interface.model", type("ModelWrapper", (Wraps,), {}))
    if kind == "low level zero":

        def handler(parameter, group):
            pass

        of("colossalai.zero.low_level.low_level_optim", handler)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(handler, group=0))
        made = of("colossalai.booster.plugin.low_level_zero_plugin", type("LowLevelZeroModel", (base,), {}))
        return made(model), model
    made = of("colossalai.booster.plugin.torch_ddp_plugin", type("TorchDDPModel", (base,), {}))
    return made(DistributedDataParallel(model)), None


def refused(rank, world_size):
    import tagc.torch as tagc

    instead = r"sums gradients by itself, uncompressed: use fully_shard\(\) or DistributedDataParallel"
    for stage in (0, 3):
        for model in deepspeed_engine(stage):
            for call in (tagc.compress, tagc.advise):
                check_error(lambda: call(model), rf"in an engine of DeepSpeed \(.*{instead}.*FSDP version 2")
    for model in colossal_model("low level zero"):
        check_error(
            lambda: tagc.compress(model), rf"in an engine of Colossal-AI \(.*{instead}.*TorchDDPPlugin"
        )
    boosted, _ = colossal_model("ddp")
    check_error(lambda: tagc.compress(boosted), "pass its .module, which is a DistributedDataParallel")
    with tagc.compress(boosted.module, verbose=False) as handle:
        boosted.module(torch.ones(2, 64)).sum().backward()
        assert handle.n_steps == 1


def allowed(rank, world_size):
    """Layers and optimizers of these libraries, and models with the same attributes, need no engine."""
    import tagc.torch as tagc

    Layer = of("deepspeed.moe.layer", type("Layer", (nn.Linear,), {}))
    model = nn.Sequential(Layer(64, 64), nn.Linear(64, 64))
    model[0].weight.ds_status = types.SimpleNamespace()
    model.register_forward_hook(of("deepspeeding.runtime", lambda module, inputs, output: None))
    Adam = of("colossalai.nn.optimizer.hybrid_adam", type("HybridAdam", (torch.optim.Adam,), {}))
    model = DistributedDataParallel(model)
    with tagc.compress(model, Adam(model.parameters()), verbose=False) as handle:
        model(torch.ones(2, 64)).sum().backward()
        assert handle.n_steps == 1
    assert not {"deepspeed", "colossalai"} & {*sys.modules}


def test_engines_are_refused():
    ranks.run_each([refused, allowed], 2)
