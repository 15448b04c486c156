"""The checkpoint engine "tagc" of verl (0.9.1), which imports this module where its configuration says so:

    checkpoint_engine:
      backend: tagc
      custom_backend_module: tagc.weights.engines.verl
      engine_kwargs: {tagc: {store: /shared/policy}}

The first rank of the actor has whole tensors from verl, keeps them in CPU memory, and publishes them. Each
rank of a rollout keeps them in CPU memory, too, follows the store, and hands all to its engine as verl's
others do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from tagc._library import Error
from tagc.weights import store as stores
from tagc.weights.engines.whole import WholePublisher
from tagc.weights.follow import Follower
from tagc.weights.layout import Copies


@CheckpointEngineRegistry.register("tagc")
class StoreCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    def __init__(
        self,
        bucket_size: int,
        store: str = "",
        keep: int = 32,
        threads: int = 1,
        wait_s: float = 600.0,
        folder: str | None = None,
        is_master: bool = False,
    ) -> None:
        """bucket_size, is_master: verl's, the rest is engine_kwargs. bucket_size is of no use here."""
        if not store:
            raise Error(
                "argument", "engine_kwargs.tagc.store is missing: a path or an address that all ranks reach"
            )
        self._address, self._wait_s = store, wait_s
        self._copies = Copies()
        self._follower = Follower(self._copies, store, folder=folder, threads=threads)
        self._publisher = WholePublisher(store, by_magnitude=True, keep=keep, threads=threads)
        self._is_sender, self._version = is_master, 0

    def prepare(self) -> dict[str, Any]:
        """Returns the number that the next version will have, of which the first actor's counts."""
        if self._publisher.version:
            return {"version": self._publisher.version + 1}
        newest = stores.newest(stores.open_store(self._address))
        return {"version": 1 if newest is None else newest.version + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        version = metadata[0]["version"]
        return tuple(  # type: ignore[return-value]
            {"is_sender": [is_actor and rank == 0 for rank in range(n)], "version": [version] * n}
            for is_actor, n in ((True, actor_wg_world_size), (False, rollout_world_size))
        )

    def init_process_group(self, is_sender: bool, version: int) -> None:
        self._is_sender, self._version = is_sender, version

    def finalize(self) -> None:
        """Does nothing: copies stay for the next version."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        if not self._is_sender:
            for _ in weights:  # each may be a collective of verl's
                continue
            return {}
        last = self._publisher.publish(weights)
        return {"tagc/bytes": last.n_bytes, "tagc/share_changed": last.n_changes / last.n_elems}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        self._follower.update(self._version, self._wait_s)
        for name, tensor in self._copies.tensors.items():
            yield name, tensor
