"""What gradients and sums must be, from one process and from plain loops."""

import os
import pathlib
import re
import time

import torch
import torch.distributed as dist
from models import batch_of, loss_of
from wrappers import mean_residuals

WINDOW = 20  # exchanges, in which the schedule looks at gradients


def full_gradients(make_model, world_size, steps=(0,)):
    """Of the loss averaged over all ranks' batches and summed over steps, in one process."""
    torch.manual_seed(0)
    model = make_model()
    sum(loss_of(model, batch_of(rank, step)) for rank in range(world_size) for step in steps).div(
        world_size
    ).backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def sum_over_ranks(mine):
    """In rank order, in fp64: not gloo's own sum."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine.contiguous())
    return sum(one.double() for one in everyone)


def check_alike(mine, what, group=None):
    """All ranks have the same bits."""
    mine = mine.detach().contiguous()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    assert all(torch.equal(one.view(torch.uint8), mine.view(torch.uint8)) for one in everyone), (
        f"{what} differs between ranks"
    )


def check_equal(found, expected, what=""):
    """Dicts of gradients, to fp32 rounding."""
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=2e-6, atol=1e-7, msg=lambda text: f"{name} {what}: {text}"
        )


def mix_of_classes(name, parameter):
    return {"attn": "mild", "mlp": "compressed", "head": "compressed"}.get(
        name.split(".")[-2] if "." in name else "", "dense"
    )


def check_conserved(handle, received, given):
    """What came out and the mean of what is held back is what was given. handle: or {name: that mean}.
    Returns how many values are held back."""
    held = handle if isinstance(handle, dict) else mean_residuals(handle)
    for name, expected in given.items():
        total = received[name].double() + held.get(name, 0)
        torch.testing.assert_close(
            total, expected.double(), rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}"
        )
    return sum(values.count_nonzero().item() for values in held.values())


def check_error(function, pattern, same=True):
    """It raises a tagc.Error that says so; the same text on all ranks."""
    import tagc.torch as tagc

    try:
        function()
        text = "no error"
    except tagc.Error as error:
        text = str(error)
    assert re.search(pattern, text), text
    if same:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, text)
        assert all(other == text for other in everyone), everyone


def lose_a_rank(rank, world_size, folder, dies, backward):
    """The last rank dies or falls silent in backward(), and comes back only after the others. Writes down
    what each of them got, and ends the process."""
    import tagc.torch as tagc

    folder = pathlib.Path(folder)
    if rank == world_size - 1:
        if dies:
            os._exit(7)
        end = time.monotonic() + 60
        while len(list(folder.iterdir())) < world_size - 1 and time.monotonic() < end:
            time.sleep(0.05)
        os._exit(7)
    try:
        backward()
        text = "no error"
    except tagc.Error as error:
        text = f"{error.status}: {error}"
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.part").write_text(text)
    (folder / f"{rank}.part").rename(folder / str(rank))
    os._exit(0)


def check_loss_of_a_rank(world_size, folder):
    """After lose_a_rank(). A rank says what it saw itself, or what another that saw it first told it; and
    where."""
    whose = r"(gradients of [^:]+: )?"
    lost, others = world_size - 1, "|".join(map(str, range(world_size - 1)))
    for rank in range(world_size - 1):
        text = (folder / str(rank)).read_text()
        assert re.fullmatch(
            rf"(timeout: {whose}(rank ({others}) gave up: )?no answer from rank {lost} within 4 s"
            rf"|transport: {whose}(rank ({others}) gave up: )?rank {lost} ended or cannot be reached any more"
            r": .+)(; this rank exchanges .+)? \((leg \w+|while ranks agreed)\)",
            text,
            re.DOTALL,
        ), text
