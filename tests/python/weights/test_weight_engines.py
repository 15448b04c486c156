"""Adapters of engines, against stand-ins of the engines' interfaces as vLLM 0.33, SGLang 0.5.23 and verl
0.9.1 have them: the same calls in the same order, with the same refusals. Where verl is installed, also
against its own classes, and test_weight_vllm does that with vLLM's."""

import asyncio
import dataclasses
import importlib
import importlib.util
import pathlib
import re
import sys
import types
import unittest.mock

import pytest

torch = pytest.importorskip("torch")
import fake_engine
import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh
from weight_checks import bits, step

import tagc.torch as tagc
from tagc.weights import Publisher


def modules(**named):
    """Makes modules of these names, with these attributes, and their parents."""
    made = {}
    for name, attributes in named.items():
        name = name.replace("__", ".")
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:n]), types.ModuleType(".".join(parts[:n])))
        vars(made[name]).update(attributes)
    return made


# ---- vLLM: distributed/weight_transfer/{base,factory}.py, v1/worker/gpu_worker.py ----


def vllm():
    @dataclasses.dataclass
    class TrainerInitInfo:
        rank: int = dataclasses.field(kw_only=True)

        def __init_subclass__(cls, **_):
            assert cls.backend

        @property
        def is_sender(self):
            return self.rank == 0

    class WeightTransferEngine:
        def __init__(self, config, vllm_config, device, model):
            self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
            self.model_config = vllm_config.model_config

        def update_weights(self, update_info):
            self.receive_weights(self.update_info_cls(**update_info))

    class TrainerWeightTransferEngine:
        def __init__(self, *, client, source=None, is_sender=True, rank=0):
            self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    def factory():
        class Factory:
            registry = {}

            @classmethod
            def register_engine(cls, name, module, class_name):
                if name in cls.registry:
                    raise ValueError(f"Weight transfer engine '{name}' is already registered.")
                cls.registry[name] = lambda: getattr(importlib.import_module(module), class_name)

        return Factory

    def initialize_layerwise_reload(model):
        model.is_reloading = True

    def finalize_layerwise_reload(model, config):
        assert model.is_reloading
        model.is_reloading = False

    rank = [(0, 1)]
    made = modules(
        vllm__distributed={
            "get_tensor_model_parallel_rank": lambda: rank[0][0],
            "get_tensor_model_parallel_world_size": lambda: rank[0][1],
        },
        vllm__distributed__weight_transfer={
            "WeightTransferEngineFactory": factory(),
            "WeightTransferTrainerFactory": factory(),
        },
        vllm__distributed__weight_transfer__base={
            "TrainerInitInfo": TrainerInitInfo,
            "TrainerWeightTransferEngine": TrainerWeightTransferEngine,
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferInitInfo": type("WeightTransferInitInfo", (), {}),
            "WeightTransferUpdateInfo": type("WeightTransferUpdateInfo", (), {}),
        },
        vllm__model_executor__model_loader__reload={
            "initialize_layerwise_reload": initialize_layerwise_reload,
            "finalize_layerwise_reload": finalize_layerwise_reload,
        },
    )
    return made, rank


@dataclasses.dataclass
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple
    owners: tuple = None
    mesh_shape: tuple = None
    placements: tuple = None


class Shard:
    def __init__(self, dim):
        self.dim = dim


class ModuleSource:
    """Of vLLM: a module's pieces."""

    def __init__(self, named):
        self.named = named

    @property
    def metadata(self):
        metas = []
        for name, p in self.named():
            layout = {}
            if hasattr(p, "device_mesh"):
                mesh = p.device_mesh.mesh
                layout = {"owners": tuple(mesh.flatten().tolist()), "mesh_shape": tuple(mesh.shape)}
                layout["placements"] = tuple(Shard(one.dim) for one in p.placements)
            metas.append(ParamMeta(name, p.dtype, tuple(p.shape), **layout))
        return metas

    def implements_iter_local(self):
        return True

    def iter_local(self):
        for name, p in self.named():
            yield name, p.to_local() if hasattr(p, "to_local") else p


class Client:
    """Calls the workers of an engine as vLLM does: a session of start, update, finish."""

    def __init__(self, workers):
        self.workers, self.version, self.is_active = workers, None, False

    def init_weight_transfer_engine(self, init_info):
        for worker in self.workers:
            worker.init_transfer_engine(worker.init_info_cls(**init_info))

    def start_weight_update(self):
        assert not self.is_active
        self.is_active = True
        for worker in self.workers:
            worker.start_weight_update()

    def update_weights(self, update_info):
        assert self.is_active
        for worker in self.workers:
            worker.update_weights(update_info)

    def finish_weight_update(self, weight_version=None):
        for worker in self.workers:
            worker.finish_weight_update()
        self.version, self.is_active = weight_version, False


def vllm_workers(made, rank, tps):
    from tagc.weights.engines import register_vllm

    register_vllm()
    register_vllm()
    registry = made["vllm.distributed.weight_transfer"].WeightTransferEngineFactory.registry
    workers = []
    for tp in tps:
        config = types.SimpleNamespace(model_config=None)
        workers.append(registry["tagc"]()(None, config, torch.device("cpu"), fake_engine.Model(tp)))
    return workers


def test_vllm_takes_versions_from_its_trainer_half(tmp_path, monkeypatch):
    made, rank = vllm()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tagc.weights.engines.vllm", raising=False)
    here, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(1)
    tps = [(0, 2), (1, 2)]
    workers = vllm_workers(made, rank, tps)

    class ByRank(Client):
        def init_weight_transfer_engine(self, init_info):
            for worker, tp in zip(self.workers, tps):
                rank[0] = tp
                worker.init_transfer_engine(worker.init_info_cls(**init_info))

    client = ByRank(workers)
    from tagc.weights.engines.vllm import StoreTrainerInitInfo

    with pytest.raises(RuntimeError, match="comes before"):
        workers[0].update_weights({"version": 1})
    trainer = made["vllm.distributed.weight_transfer"].WeightTransferTrainerFactory.registry["tagc"]()
    engine = trainer.trainer_init(
        StoreTrainerInitInfo(str(tmp_path), rank=0), client=client, source=ModuleSource(here.items)
    )
    for version in range(1, 4):
        engine.send_weights()
        assert client.version == str(version) and not client.is_active
        for worker, tp in zip(workers, tps):
            oracle = fake_engine.Model(tp)
            oracle.load_weights(here.items())
            assert bits(worker.model) == bits(oracle) and not worker.model.is_reloading
        step(here, generator)
    workers[0].shutdown()
    with pytest.raises(tagc.Error, match="source is None"):
        trainer.trainer_init(StoreTrainerInitInfo(str(tmp_path), rank=0), client=client)


def adapter_of(names, generator):
    """Returns parameters of PEFT's model by name, in eighths: sums of few are exact in any order."""
    named = {}
    for name, (rows, columns) in names.items():
        stem = f"base_model.model.{name}"
        named[f"{stem}.base_layer.weight"] = torch.zeros(rows, columns)
        for which, shape in (("A", (4, columns)), ("B", (rows, 4))):
            value = torch.randint(-8, 9, shape, generator=generator) / 8
            named[f"{stem}.lora_{which}.default.weight"] = value
    return named


LAYERS = {"model.layers.0.self_attn.k_proj": (8, 24), "model.layers.0.mlp.down_proj": (24, 32)}


def with_adapter(checkpoint, named, scale):
    result = dict(checkpoint)
    for name in LAYERS:
        a, b = (named[f"base_model.model.{name}.lora_{which}.default.weight"] for which in "AB")
        result[f"{name}.weight"] = (result[f"{name}.weight"].float() + scale * b @ a).bfloat16()
    return result


def test_vllm_adds_an_adapter(tmp_path, monkeypatch):
    made, rank = vllm()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tagc.weights.engines.vllm", raising=False)
    checkpoint, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(1)
    named = adapter_of(LAYERS, generator)
    (worker,) = vllm_workers(made, rank, [(0, 1)])
    worker.model.load_weights(checkpoint.items())
    from tagc.weights.engines.vllm import StoreTrainerInitInfo

    trainer = made["vllm.distributed.weight_transfer"].WeightTransferTrainerFactory.registry["tagc"]()
    info = StoreTrainerInitInfo(str(tmp_path), rank=0, lora_scale=0.25)
    engine = trainer.trainer_init(info, client=Client([worker]), source=ModuleSource(named.items))
    for _ in range(3):
        engine.send_weights()
        oracle = fake_engine.Model()
        oracle.load_weights(with_adapter(checkpoint, named, 0.25).items())
        assert bits(worker.model) == bits(oracle)
        for name, tensor in named.items():
            tensor += "lora" in name


def vllm_trainers(rank, world_size, folder):
    made, tp = vllm()
    sys.modules.update(made)
    from tagc.weights.engines import register_vllm

    register_vllm()
    from tagc.weights.engines.vllm import StoreTrainerInitInfo

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(5, 3, bias=False)).bfloat16()
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1]))
    trainer = made["vllm.distributed.weight_transfer"].WeightTransferTrainerFactory.registry["tagc"]()
    told = []
    client = types.SimpleNamespace(
        init_weight_transfer_engine=told.append, start_weight_update=lambda: None,
        update_weights=told.append, finish_weight_update=told.append,
    )  # fmt: skip
    info = StoreTrainerInitInfo(folder, torch.distributed.group.WORLD, rank=rank)
    engine = trainer.trainer_init(info, client=client, source=ModuleSource(model.named_parameters))
    for version in (1, 2):
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().add_(rank + 1)
        engine.send_weights()
        there = {name: torch.zeros(p.shape).bfloat16() for name, p in model.named_parameters()}
        from tagc.weights import Follower

        assert Follower(there, folder).update() == version
        assert all(torch.equal(p.full_tensor(), there[name]) for name, p in model.named_parameters())
        torch.distributed.barrier()
    return told


def test_vllm_trainers_of_several_ranks_send_what_they_own(tmp_path):
    first, second = ranks.run(vllm_trainers, 2, str(tmp_path), timeout_s=100)
    store = {"store": str(tmp_path), "folder": None, "threads": 1, "lora_scale": None}
    updates = [item for v in (1, 2) for item in ({"version": v, "wait_s": 60.0}, str(v))]
    assert first == [store, *updates] and second == []


# ---- SGLang: entrypoints/engine.py, model_runner_components/weight_updater.py ----


def sglang_engine(models, monkeypatch):
    rank = [(0, 1)]
    made = modules(
        sglang__srt__distributed={
            "get_tensor_model_parallel_rank": lambda: rank[0][0],
            "get_tensor_model_parallel_world_size": lambda: rank[0][1],
        }
    )
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)

    class Engine:
        is_open = False

        def begin_weight_update(self):
            self.is_open = True

        def end_weight_update(self):
            self.is_open = False

        def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
            custom_weight_loader = ["tagc.weights.engines.sglang.load"]  # what the engine was started with
            assert self.is_open and load_format in custom_weight_loader
            module, _, name = load_format.rpartition(".")
            loader = getattr(importlib.import_module(module), name)
            for number, model in enumerate(models):
                rank[0] = (number, 2)
                loader(model, named_tensors)

    return Engine()


def test_sglang_adds_an_adapter(tmp_path, monkeypatch):
    from tagc.weights.engines import sglang
    from tagc.weights.lora import adapters

    checkpoint, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(1)
    named = adapter_of(LAYERS, generator)
    sender = Publisher(adapters(named), tmp_path)
    models = [fake_engine.Model((number, 2), False) for number in range(2)]
    engine = sglang_engine(models, monkeypatch)
    for model in models:
        model.load_weights(checkpoint.items())
    for version in (1, 2):
        sender.publish()
        sglang.update(engine, str(tmp_path), version, lora_scale=2.0)
        for number, model in enumerate(models):
            oracle = fake_engine.Model((number, 2), False)
            oracle.load_weights(with_adapter(checkpoint, named, 2.0).items())
            assert bits(model) == bits(oracle)
        named["base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight"] += 1


def test_sglang_calls_the_loader_in_each_rank(tmp_path, monkeypatch):
    from tagc.weights.engines import sglang

    here, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(1)
    sender = Publisher(here, tmp_path)
    models = [fake_engine.Model((0, 2), False), fake_engine.Model((1, 2), False)]
    engine = sglang_engine(models, monkeypatch)
    for version in range(1, 4):
        sender.publish()
        sglang.update(engine, str(tmp_path), version)
        for number, model in enumerate(models):
            oracle = fake_engine.Model((number, 2), False)
            oracle.load_weights(here.items())
            assert bits(model) == bits(oracle)
        step(here, generator)
    with pytest.raises(tagc.Error, match="the store has version 3 yet, and not 9"):
        sglang.update(engine, str(tmp_path), 9, wait_s=0)
    assert not engine.is_open
    with pytest.raises(tagc.Error, match="is called by tagc.weights.engines.sglang.update"):
        sglang.load(models[0], [("a", torch.ones(3))])


# ---- verl: checkpoint_engine/base.py ----


def verl_stand_in(monkeypatch):
    class CheckpointEngineRegistry:
        registry = {}

        @staticmethod
        def register(backend):
            return lambda cls: CheckpointEngineRegistry.registry.setdefault(backend, cls)

        @classmethod
        def get(cls, backend):
            return cls.registry[backend]

    return types.SimpleNamespace(
        CheckpointEngine=type("CheckpointEngine", (), {}), CheckpointEngineRegistry=CheckpointEngineRegistry
    )


def verl_own(monkeypatch):
    """Returns verl's own module. What it imports, such as ray, is of no matter to these two classes."""
    spec = importlib.util.find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed")
    path = pathlib.Path(spec.submodule_search_locations[0]) / "checkpoint_engine" / "base.py"
    source = path.read_text()
    for name in re.findall(r"^(?:from|import) ((?:verl|ray)[\w.]*)", source, re.MULTILINE):
        monkeypatch.setitem(sys.modules, name, unittest.mock.MagicMock())
    made = types.ModuleType("base_of_verl")
    monkeypatch.setitem(sys.modules, made.__name__, made)  # dataclasses look there
    exec(compile(source, str(path), "exec"), vars(made))
    return made


@pytest.mark.parametrize("verl", [verl_stand_in, verl_own])
def test_verl_sends_by_a_store(verl, tmp_path, monkeypatch):
    base = verl(monkeypatch)
    named = {key: getattr(base, key) for key in ("CheckpointEngine", "CheckpointEngineRegistry")}
    for name, module in modules(verl__checkpoint_engine=named).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tagc.weights.engines.verl", raising=False)
    custom_backend_module = "tagc.weights.engines.verl"  # of the configuration
    importlib.import_module(custom_backend_module)
    made = base.CheckpointEngineRegistry.get("tagc")
    actors, rollouts = ([made(bucket_size=1 << 20, store=str(tmp_path)) for _ in range(2)] for _ in range(2))
    here, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(1)
    passes = []

    def weights():
        passes.append(1)
        yield from here.items()

    async def received(engine):
        return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=1)}

    for version in range(1, 4):
        if version == 3:  # the actors start again
            actors = [made(bucket_size=1 << 20, store=str(tmp_path)) for _ in range(2)]
        metadata = [one.prepare() for one in actors + rollouts]
        for group, options in zip((actors, rollouts), made.build_topology(2, 2, metadata)):
            for number, one in enumerate(group):
                one.init_process_group(**{key: values[number] for key, values in options.items()})
        told = [asyncio.run(one.send_weights(weights(), global_steps=1)) for one in actors]
        assert told[0]["tagc/share_changed"] > 0 and told[1] == {} and len(passes) == 2 * version
        for one in rollouts:
            assert {n: t.tolist() for n, t in asyncio.run(received(one)).items()} == {
                n: t.tolist() for n, t in here.items()
            }
        [one.finalize() for one in actors + rollouts]
        step(here, generator)
    with pytest.raises(tagc.Error, match="engine_kwargs.tagc.store is missing"):
        made(bucket_size=1)
    with pytest.raises(TypeError, match="stoer"):  # not left out
        made(bucket_size=1, stoer="/policy")
