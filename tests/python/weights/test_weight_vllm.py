"""vLLM's own factories, base classes, source and configuration, where vLLM is installed: its modules of
weight transfer need no GPU. test_weight_engines has what surrounds them. Workers have a fake engine's
model."""

import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="vLLM is not installed")
factories = pytest.importorskip("vllm.distributed.weight_transfer")
import fake_engine
from test_weight_engines import LAYERS, Client, adapter_of, with_adapter
from torch import nn
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import ModuleSource, VLLMWeightSyncClient
from weight_checks import bits, step

from tagc.weights.engines import register_vllm


class WorkersOfVLLM(Client):
    """Calls the workers as vLLM's gpu_worker.py does."""

    def init_weight_transfer_engine(self, init_info):
        for worker in self.workers:
            worker.init_transfer_engine(worker.parse_init_info(init_info))


class Named(nn.Module):
    """A module whose parameters have the names of these tensors."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            *above, last = name.split(".")
            module = self
            for part in above:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))


def workers_of(n, monkeypatch):
    register_vllm()
    register_vllm()
    import tagc.weights.engines.vllm as engine  # as the factory imports it

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # there is none here
    monkeypatch.setattr(engine, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(engine, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(
        engine.StoreWeightTransferEngine, "_load", lambda self, tensors: self.model.load_weights(tensors)
    )
    config = types.SimpleNamespace(parallel_config=None, model_config=None)
    create = factories.WeightTransferEngineFactory.create_engine
    backend = WeightTransferConfig(backend="tagc")
    return [create(backend, config, torch.device("cpu"), fake_engine.Model()) for _ in range(n)]


def test_versions_travel_between_vllms_two_halves(tmp_path, monkeypatch):
    workers = workers_of(2, monkeypatch)
    from tagc.weights.engines.vllm import StoreTrainerInitInfo

    here, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(1)
    client = WorkersOfVLLM(workers)
    assert isinstance(client, VLLMWeightSyncClient)
    trainer = factories.WeightTransferTrainerFactory.trainer_init(
        StoreTrainerInitInfo(str(tmp_path), rank=0, by_magnitude=True),
        client=client,
        source=ModuleSource(Named(here)),
    )
    for version in range(1, 4):
        trainer.send_weights()
        assert client.version == str(version)
        oracle = fake_engine.Model()
        oracle.load_weights(here.items())
        assert [bits(worker.model) == bits(oracle) for worker in workers] == [True, True]
        step(here, generator)
    trainer.shutdown()
    with pytest.raises(ValueError, match="Invalid init_info for StoreWeightTransferEngine"):
        workers[0].parse_init_info({"stoer": "/policy"})
    [worker.shutdown() for worker in workers]


def test_vllm_adds_an_adapter_of_its_source(tmp_path, monkeypatch):
    checkpoint, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(1)
    (worker,) = workers_of(1, monkeypatch)
    worker.model.load_weights(checkpoint.items())
    from tagc.weights.engines.vllm import StoreTrainerInitInfo

    named = adapter_of(LAYERS, generator)
    info = StoreTrainerInitInfo(str(tmp_path), rank=0, lora_scale=0.25)
    client, source = WorkersOfVLLM([worker]), ModuleSource(Named(named))
    trainer = factories.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    for _ in range(3):
        trainer.send_weights()
        oracle = fake_engine.Model()
        oracle.load_weights(with_adapter(checkpoint, named, 0.25).items())
        assert bits(worker.model) == bits(oracle)
        for name, tensor in named.items():
            tensor += "lora" in name
