"""The jobs of examples/pytorch that come from other projects: with every value in fp32 their losses are those
without tagc, bit for bit on two ranks, and with tagc's defaults they train."""

import sys

import pytest

torch = pytest.importorskip("torch")
import launch
import ranks

JOBS = {
    "reversible": ([], ["--ddp"], ["--in-turn=2"]),
    "preference": ([], ["--ddp"], ["--lora"], ["--lora", "--ddp"]),
    "offload": (["--parameters"], ["--optimizer"], ["--activations"], ["--parameters", "--activations"]),
}


def check(rank, world_size, name):
    sys.path.insert(0, str(launch.EXAMPLES))
    job = __import__(name)
    job.dist.init_process_group = job.dist.destroy_process_group = lambda *_, **__: None
    whole = job.main(["--steps=5", "--torch"]) if name == "reversible" else None
    for flags in JOBS[name]:
        flags = [*flags, "--steps=5"]
        alone = job.main([*flags, "--torch"])
        assert "--in-turn=2" not in flags or alone != whole  # two of three blocks' experts were frozen
        found = job.main(flags, sparsity=0, values="fp32", verbose=False)
        assert found == alone, (flags, found, alone)
        if flags != [*JOBS[name][-1], "--steps=5"]:
            continue  # what the defaults come to is shown once
        trained = job.main(flags, verbose=False)
        assert trained != alone and sum(trained[-2:]) < 0.97 * sum(trained[:2]), (flags, trained)


@pytest.mark.parametrize("name", JOBS)
def test_job(name):
    ranks.run(check, 2, name)


def test_reversed_gradients(monkeypatch):
    """Those of the backward pass by hand are autograd's."""
    sys.path.insert(0, str(launch.EXAMPLES))
    import reversible

    torch.manual_seed(0)
    model = reversible.Model(reversible.Config(n_vocab=64, n_embd=32, n_head=2, n_layer=3))
    tokens = torch.arange(40).view(2, 20)
    found = torch.autograd.grad(model(tokens, tokens + 1), model.embedding.weight)[0]
    found = [found, *(p.grad.clone() for p in model.blocks.parameters())]

    def plain(block, x1, x2, chain):
        y1 = x1 + block.attention(x2)
        return y1, x2 + block.experts(y1)

    monkeypatch.setattr(reversible.Block, "forward", plain)
    expected = torch.autograd.grad(
        model(tokens, tokens + 1), [model.embedding.weight, *model.blocks.parameters()]
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_script(capfd):
    """As users run it."""
    ranks.run(launch.as_main, 2, launch.EXAMPLES / "preference.py", "--steps", 3)
    said = capfd.readouterr().out
    assert "after 3 steps" in said and "elements compressed" in said, said


SCRIPTS = sorted(
    path.name for path in launch.EXAMPLES.glob("*.py") if "__main__" in path.read_text()
)  # the others are modules
SCRIPTS.remove("weight_store.py")  # its processes are in no group


@pytest.mark.parametrize("name", SCRIPTS)
def test_first_lines(name):
    """They say how to start it here, and on two hosts with a GPU each."""
    head = " ".join((launch.EXAMPLES / name).read_text().replace("\\\\\n", "").split()[:60])
    assert "torchrun --standalone --nproc-per-node" in head, head
    start = "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400"
    assert f"{start} {name} --device cuda" in head, head


def test_device(monkeypatch):
    """What --device cuda asks torch for; and that no model takes a tensor from elsewhere than where the
    default device is, for which the meta device stands here."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class OneDevice(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for one in tree_leaves((args, kwargs, made)):
                assert not isinstance(one, torch.Tensor) or one.is_meta, (function, one.device)
            return made

    sys.path.insert(0, str(launch.EXAMPLES))
    import device
    import preference

    asked = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(str(device)))
    monkeypatch.setattr(torch, "set_default_device", lambda device: asked.append(f"all on {device}"))
    monkeypatch.setattr(device.dist, "init_process_group", lambda *words, **more: asked.append((words, more)))
    device.start_on("cuda", timeout=7)
    assert asked == ["cuda:3", "all on cuda:3", (("cpu:gloo,cuda:nccl",), {"timeout": 7})]
    asked.clear()
    device.start_on("cpu", has_peers=False)
    device.start_on("cpu")
    assert asked == [(("gloo",), {})]
    config = dict(n_vocab=64, n_positions=16, n_embd=64, n_head=2, n_layer=2)
    with torch.device("meta"), OneDevice():
        x = torch.zeros(2, 16, dtype=torch.long)
        found = [
            preference.GPT(preference.Config(**config))(x, x),
            preference.Policy(preference.Config(**config))(x, 4),
        ]
    assert all(one.is_meta for one in found)
