"""Engines that generate, and trainers, by their own public interfaces. Nothing here imports an engine before
the engine imports it.

vllm      a weight transfer engine of vLLM 0.33, both halves
sglang    a weight loader of SGLang 0.5.23
verl      a checkpoint engine of verl 0.9.1
trl       a weight transfer of trl 1.16 to a server of vLLM
whole     for trainers that hand out whole tensors, as the last two"""


def register_vllm() -> None:
    """Makes "tagc" a backend of vLLM's weight transfer, in this process. vLLM calls this in each of its own,
    as its plugin; a trainer that uses vLLM's trainer half calls it, too."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    module = "tagc.weights.engines.vllm"
    for factory, name in (
        (WeightTransferEngineFactory, "StoreWeightTransferEngine"),
        (WeightTransferTrainerFactory, "StoreTrainerWeightTransferEngine"),
    ):
        try:
            factory.register_engine("tagc", module, name)
        except ValueError:  # plugins are loaded several times in a process
            continue
