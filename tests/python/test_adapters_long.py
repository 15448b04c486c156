"""Adapters as PEFT names them, over as many steps as a short fine-tuning has: all of them come to the last
level, on attention alone and with the MLP."""

import pytest

torch = pytest.importorskip("torch")
import ranks
from test_adapters import adapters
from wrappers import printed


def come_to_the_last_level(rank, world_size):
    import tagc.torch as tagc

    for mlp in (False, True):
        model = adapters(mlp=mlp)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-3)
        handle, said = printed(tagc.compress, model, optimizer)
        assert "until tagc knows" not in said, said
        torch.manual_seed(rank)
        bits = []
        for _ in range(500):
            optimizer.zero_grad()
            model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
            bits.append(handle.stats()["bits_per_param"])
        levels = {level for name, level in handle.state.schedule.levels().items() if "lora" in name}
        assert levels == {3}, (mlp, levels)
        assert bits[0] > 8 and max(bits[-100:]) < bits[0] / 2, (mlp, bits[0], bits[-1])
        if rank == 0:
            print(
                f"{'with the MLP' if mlp else 'attention alone'}: bits at steps 1, 101 ...",
                bits[::100],
                bits[-1],
            )
        handle.close()


def test_adapters_over_500_steps():
    ranks.run(come_to_the_last_level, 2)
