"""The weight transfer of trl (1.16), which its AsyncGRPOTrainer takes as weight_transfer:

    vllm serve MODEL --weight-transfer-config '{"backend": "tagc"}'
    AsyncGRPOTrainer(..., weight_transfer=StoreWeightTransfer("/shared/policy"))

trl gathers whole tensors on its first rank, which keeps them in CPU memory, publishes them, and tells the
server the version over HTTP."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from trl.experimental.async_grpo.vllm_client import VLLMClient

from tagc.weights.engines.whole import WholePublisher
from tagc.weights.names import experts


class StoreWeightTransfer:
    """store: a path or an address that the server's workers reach, too. server: where vLLM answers.
    keep, threads: as those of Publisher. timeout_s: for the server to be ready, and to take a version."""

    def __init__(
        self,
        store: str,
        server: str = "http://localhost:8000",
        *,
        keep: int = 32,
        threads: int = 1,
        timeout_s: int = 1800,
    ) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._client = VLLMClient(server, timeout_s)
        self._publisher = WholePublisher(store, experts, keep=keep, threads=threads)

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()
        self._client.init_weight_transfer_engine({"store": self._store}, timeout=self._timeout_s)

    def pause(self) -> None:
        self._client.pause(timeout=self._timeout_s)

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        version = self._publisher.publish(iterator).version
        self._client.start_weight_update(timeout=self._timeout_s)
        self._client.update_weights({"version": version}, timeout=self._timeout_s)
        self._client.finish_weight_update(timeout=self._timeout_s)

    def resume(self) -> None:
        self._client.resume(timeout=self._timeout_s)

    def destroy(self) -> None:
        """Does nothing: the store stays."""
