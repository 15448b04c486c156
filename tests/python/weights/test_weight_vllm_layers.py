"""vLLM's own layers and their own loaders, of two ranks of tensor parallelism on a processor, where vLLM is
installed (scripts/engines.sh): packed QKV and gate-up, a padded vocabulary, wider heads of values, rows of
experts or whole ones. Its worker half takes versions into them."""

import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.distributed.weight_transfer", reason="vLLM is not installed")
import fake_engine
import ranks
import weight_checks

from tagc.weights import Follower, Publisher
from tagc.weights.layout import Rank, engine_layout

CASES = [(fake_engine.Model, False), (fake_engine.Model, True), (fake_engine.WideValues, False)]


def same(model, of, is_ep, tp, tensors):
    """Returns whether a model of vLLM has the bits that plain code cuts from a checkpoint."""
    expected = of(tp, is_ep)
    expected.load_weights(tensors.items())
    named = dict(expected.named_parameters())
    assert named.keys() == {name for name, _ in model.named_parameters()}
    return all(
        torch.equal(p.view(torch.int16), named[name].view(torch.int16))
        for name, p in model.named_parameters()
    )


def receivers(rank, world_size, folder):
    import vllm_layers
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from tagc.weights.engines import register_vllm

    vllm_layers.begin(rank, world_size, f"{folder}/rendezvous")
    register_vllm()
    torch.accelerator.synchronize = lambda: None  # there is none here
    for number, (of, is_ep) in enumerate(CASES):
        here, generator = fake_engine.checkpoint(m=of), torch.Generator().manual_seed(3)
        store, tp = f"{folder}/{number}", (rank, world_size)
        sender = Publisher(here, store) if rank == 0 else None
        loaded, written, worked = (vllm_layers.make(world_size, is_ep, of) for _ in range(3))
        receiver = Follower(engine_layout(written, Rank(*tp)), store, loader=written.load_weights)
        config = types.SimpleNamespace(parallel_config=None, model_config=None)
        worker = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="tagc"), config, torch.device("cpu"), worked
        )
        worker.init_transfer_engine(worker.parse_init_info({"store": store}))
        for version in range(1, 4):
            if sender is not None:
                sender.publish()
            torch.distributed.barrier()
            loaded.load_weights(here.items())
            assert same(loaded, of, is_ep, tp, here)  # or the oracle is none
            assert receiver.update(version) == version and same(written, of, is_ep, tp, here)
            worker.update_weights({"version": version})
            assert same(worked, of, is_ep, tp, here)
            weight_checks.step(here, generator)
            torch.distributed.barrier()


def test_vllms_own_layers_and_loaders(tmp_path):
    ranks.run(receivers, 2, str(tmp_path), timeout_s=900)
