"""The backend "tagc" of vLLM's weight transfer (vLLM 0.33): a trainer publishes to a store, workers follow
it.

    trainer   send_weights()   -> publish() -> the client tells the workers the version
    worker    update_weights({"version": 7}) -> what changed, written where vLLM has its weights

All workers take the version that they are told, so that the ranks of an engine have the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from tagc._library import Error
from tagc.weights.follow import Follower
from tagc.weights.layout import Rank, engine_layout
from tagc.weights.lora import Merged, adapter_name
from tagc.weights.names import experts, hugging_face
from tagc.weights.publish import Publisher
from tagc.weights.tensors import Part, Parts, shard_of


@dataclass
class StoreInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """store: a path or an address, which workers reach. folder: for what they fetch. lora_scale: where the
    store has an adapter alone, of its product (lora_alpha / r), which workers add to their weights."""

    store: str
    folder: str | None = None
    threads: int = 1
    lora_scale: float | None = None


@dataclass
class StoreUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    version: int
    wait_s: float = 60.0  # until the store shows it


class StoreWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The worker's half. Weights are written in place, as vLLM keeps them. The first time vLLM's own loader
    loads the same version, and must come to the same bits: a model whose weights it keeps in another form
    than its checkpoints, as transposed ones, is refused then. An adapter is added to the weights that vLLM
    has."""

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)

        def name_of(name: str) -> str | None:
            return name if mapper is None else next(iter(mapper.apply_list([name])), None)

        rank = Rank(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        layout, store = engine_layout(self.model, rank, name_of), init_info.store
        kept: dict[str, Any] = {"folder": init_info.folder, "threads": init_info.threads}
        self._follower: Follower | Merged | None
        if init_info.lora_scale is None:
            self._follower = Follower(layout, store, loader=self._load, **kept)
        else:
            self._follower = Merged(layout, store, init_info.lora_scale, **kept)

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)
        finalize_layerwise_reload(self.model, self.model_config)

    def start_weight_update(self) -> None:
        """Does nothing: weights are written in place."""

    def finish_weight_update(self) -> None:
        """Does nothing."""

    def receive_weights(self, update_info: StoreUpdateInfo) -> None:
        if getattr(self, "_follower", None) is None:
            raise RuntimeError("init_weight_transfer_engine() comes before update_weights()")
        assert self._follower is not None
        with torch.no_grad():
            self._follower.update(update_info.version, update_info.wait_s)

    def shutdown(self) -> None:
        self._follower = None


@dataclass
class StoreTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """group: of all ranks of the trainer, which have shards each; None: this rank alone. quantize, dtype,
    by_magnitude: as those of Publisher. lora_scale: sends one adapter of PEFT alone, named by adapter, and
    tells the workers its scale (lora_alpha / r)."""

    backend: ClassVar[str] = "tagc"

    store: str
    group: Any = None
    dtype: torch.dtype | None = None
    quantize: Any = None
    by_magnitude: bool = False
    keep: int = 32
    threads: int = 1
    lora_scale: float | None = None
    adapter: str = "default"


class StoreTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's half: each rank writes what it owns, and the first tells the workers."""

    init_info_cls = StoreTrainerInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: StoreTrainerInitInfo, *, client: Any, source: Any = None
    ) -> StoreTrainerWeightTransferEngine:
        """source: a WeightSource, of which each rank sends the pieces that it owns."""
        if source is None:
            raise Error("argument", "source is None, must be a WeightSource, such as ModuleSource(model)")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        is_adapter = init_info.lora_scale is not None
        name_of = partial(adapter_name, adapter=init_info.adapter) if is_adapter else hugging_face
        engine._publisher = Publisher(
            lambda: experts(_pieces(source, init_info.rank, name_of)),
            init_info.store,
            init_info.group,
            quantize=init_info.quantize,
            dtype=init_info.dtype,
            by_magnitude=init_info.by_magnitude or is_adapter,  # workers have all of an adapter
            keep=init_info.keep,
            threads=init_info.threads,
        )
        if engine.is_sender:
            told = StoreInitInfo(init_info.store, lora_scale=init_info.lora_scale)
            client.init_weight_transfer_engine(asdict(told))
        return engine

    def send_weights(self) -> None:
        version = self._publisher.publish()
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights(asdict(StoreUpdateInfo(version)))
            self.client.finish_weight_update(str(version))


def _pieces(source: Any, rank: int, name_of: Callable[[str], str | None]) -> dict[str, torch.Tensor | Parts]:
    """Returns what this rank owns of a WeightSource: its pieces, or where the source has none, whole tensors.
    A pass over the source, which all ranks make. name_of: returns the name of a tensor in the store; None
    leaves it out."""
    has_pieces = source.implements_iter_local()
    held = dict(source.iter_local() if has_pieces else source.iter_full())
    named: dict[str, torch.Tensor | Parts] = {}
    for about in source.metadata:
        name = name_of(about.name)
        if name is None:
            continue
        parts: tuple[Part, ...] = ()
        if about.name in held:
            offsets = _offsets(about, rank) if has_pieces else (0,) * len(about.shape)
            parts = (Part(held[about.name], offsets),)
        named[name] = Parts(about.shape, about.dtype, parts)
    return named


def _offsets(about: Any, rank: int) -> tuple[int, ...]:
    """Returns the first index that an owner has of each dimension."""
    if about.placements is None:
        return (0,) * len(about.shape)
    coordinate: list[int] = []
    at = about.owners.index(rank)
    for n in reversed(about.mesh_shape):
        at, number = divmod(at, n)
        coordinate.insert(0, number)
    return shard_of(about.name, about.shape, about.mesh_shape, coordinate, about.placements).offsets
