"""Training on a device whose driver has bad manners (tests/gpu/fake_runtime.h), and a backward pass in which
the driver waits for the device while Python's lock is held, as torch's allocator does: it ends, with the same
bits."""

import ctypes

import pytest

torch = pytest.importorskip("torch")

import ranks
from models import batch_of, loss_of
from test_staging import check_same, fake, have_kernels, local, wrapped

MANNERS = ("blocking-alloc", "lazy-loading", "late-flags", "connections=1", "connections=2", "depth=8", "all")
# An exchange with kernels needs more places in a launch queue behind its first flag; CUDA's has 1,024.
MANNERS_WITH_KERNELS = ("lazy-loading", "all,depth=128")
# No call returns before its work has run, as under a debugger: the host's codec, step by step.
MANNERS_OF_DEBUGGERS = ("launch-blocking", "copy-blocking,blocking-alloc")
N_STEPS = 3  # the first two make layouts


def free_with_lock(device):
    """What torch's allocator does when memory is short, in FSDP2's resize_: cudaFree in a call that keeps
    Python's lock."""
    held, memory = ctypes.PyDLL(device.library), ctypes.c_void_p()
    assert held.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(64)) == 0
    assert held.cudaFree(memory) == 0


def train(kind, rank, device=None):
    import tagc.torch as tagc

    model = wrapped(kind)
    handle = tagc.compress(
        model, verbose=False, sparsity=0.9, layers="all", options=tagc.Options(transport="native")
    )
    if device is not None:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(
                    lambda *given: given[-1].register_hook(lambda _: free_with_lock(device)) and None
                )
    optimizer = torch.optim.AdamW(handle.param_groups(lr=1e-2))
    losses = []
    for step in range(N_STEPS):
        loss = loss_of(model, batch_of(rank, step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    handle.synchronize()
    parameters = [local(parameter.detach()).clone() for parameter in model.parameters()]
    residuals = next(iter(handle.state_dict().values()))["residuals"]
    found = handle.stats()
    stats = {key: found[key] for key in ("n_elems", "n_compressed", "sparsity")}
    # in CPU memory ranks agree by no messages of their own
    stats["bytes"] = {leg: n for leg, n in found["bytes_by_leg"].items() if leg != "control"}
    codec = handle.codec
    handle.close()
    return losses, parameters, residuals, stats, codec


def in_all_manners(rank, world_size):
    n_waited = 0
    for kind in ("fsdp2", "ddp"):
        plain = train(kind, rank)
        cases = [(manners, False) for manners in MANNERS]
        with_kernels = MANNERS_WITH_KERNELS + MANNERS_OF_DEBUGGERS
        cases += [(manners, True) for manners in with_kernels if True in have_kernels()]
        cases += [(MANNERS_OF_DEBUGGERS[1], False)]
        for number, (manners, kernels) in enumerate(cases):
            with fake(300 + 10 * number + rank, lazy=True, kernels=kernels) as device:
                device.fake.fake_behave(manners.encode())
                device.fake.fake_limit(30000)
                staged = train(kind, rank, device)
                n_waited += device.fake.fake_n_waited()
            device.check()
            check_same(plain, staged)
            has_kernels = kernels and manners not in MANNERS_OF_DEBUGGERS
            assert staged[4] == ("device" if has_kernels else "host"), manners
    assert n_waited > 0, "the driver never waited for the device: this shows nothing"


def test_manners():
    ranks.run(in_all_manners, 2)
