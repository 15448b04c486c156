"""One rank is different: late, a step behind, with other modules, dtypes or gradients, or with an exception
somewhere in its pass. Each row of SAME must train as torch alone does with the same difference; each row of
FAILS must be the same clear Error on all ranks; after each row of LEAVES, in which a rank's program ends or
ranks wait for each other for ever, all ranks end, soon, and tagc says which rank it was. Nowhere may ranks
hang or train on a wrong sum."""

import contextlib
import datetime
import faulthandler
import json
import re
import tempfile
import time

import pytest

torch = pytest.importorskip("torch")
import matrix_cells as cells
import ranks
import torch.distributed as dist
from matrix_cells import EXACT, GATHERING, KINDS, N_STEPS, SHAPES, batch, loss_of, training

LATE_S = 0.1
SOON_S = 3.0  # timeout_s where ranks wait for what never comes
BOUND_S = 60  # then all have ended


def is_odd():
    """Whether this is the rank that differs: the last one."""
    return dist.get_rank() == dist.get_world_size() - 1


class Failure(Exception):
    """The user's own."""


def fail_or(go_on):
    if is_odd():
        raise Failure("of the user's")
    return go_on


# ---- SAME: (kind, options of compress() or None) -> tensors ----


def trained_with(at_each_point, kind, options, n_steps=N_STEPS, **about):
    """at_each_point(point, one): called on all ranks at each point of a pass."""
    one = training(kind, options, **about)

    def after(i, x):
        at_each_point("forward", one)
        x.register_hook(lambda gradient: at_each_point("backward", one))
        return x

    one.plain.after = after
    for step in range(n_steps):
        at_each_point("pass", one)
        one.backward(step)
        at_each_point("step", one)
        one.step()
    one.close()
    return one.gradients


def late(point):
    def job(kind, options):
        def wait(at, one):
            if at == point and is_odd():
                time.sleep(LATE_S)

        return trained_with(wait, kind, options, n_steps=2)

    return job


def late_to_compress(kind, options):
    if is_odd():
        time.sleep(LATE_S)
    return trained_with(lambda *_: None, kind, options)


def late_to_save(kind, options):
    with tempfile.TemporaryDirectory() as folder:

        def save(at, one):
            if at == "pass" and one.handle is not None:
                if is_odd():
                    time.sleep(LATE_S)
                one.handle.save(folder)

        return trained_with(save, kind, options)


def earlier_micro_step(kind, options):
    """It exchanges at the first of two micro-steps, where the others exchange at the second."""
    one = training(kind, options)
    for step in range(2 * N_STEPS):
        exchanges = step % 2 == (not is_odd())
        with one.exchanges(exchanges):
            one.backward(step)
        if exchanges:  # what is added after that is the rank's own
            one.note() if kind != "fsdp1" else None
        if step % 2:
            one.optimizer.step()
            one.optimizer.zero_grad()
    one.close()
    return one.gradients


def other_order(kind, options):
    """Its layers come in another order in forward and backward."""

    def turn(at, one):
        if at == "pass" and is_odd():
            one.plain.order = [*reversed(range(cells.N_LAYERS))]

    return trained_with(turn, kind, options)


def without_a_gradient(kind, options):
    """A module is in use on the other ranks alone."""

    def use(at, one):
        one.plain.uses_spare = not is_odd()

    return trained_with(use, kind, options, spare=True)


def without_a_batch(kind, options):
    """It has one batch less: torch's join()."""
    one = training(kind, options)
    with one.model.join():
        for step in range(N_STEPS - is_odd()):
            one.backward(step)
            one.optimizer.step()
            one.optimizer.zero_grad()
    one.close()
    return [p.detach().clone() for _, p in one.parameters()]


def raised(point):
    """The rank's own exception there, which its program survives."""

    def job(kind, options):
        one = training(
            kind, options and options | {"on_step": lambda _: fail_or(None) if point == "end" else None}
        )
        for step in range(N_STEPS):
            is_raised = False
            if point == "before the pass":
                with contextlib.suppress(Failure):
                    fail_or(None)
            try:
                one.backward(step)
            except Failure:
                is_raised = True
            assert is_raised == (point == "end" and is_odd() and options is not None), is_raised
            one.note()
            with contextlib.suppress(Failure):
                if point == "optimizer":
                    fail_or(None)
                one.optimizer.step()
            one.optimizer.zero_grad()
            if point == "save" and one.handle is not None:
                _save(one.handle)
        one.close()
        return one.gradients

    return job


def _save(handle):
    import tagc.torch as tagc

    with tempfile.TemporaryDirectory() as folder:
        if not is_odd():
            handle.save(folder)
            return
        with pytest.raises(tagc.Error, match="/proc/nothing"):
            handle.save("/proc/nothing")


def not_finite(kind, options):
    """Its gradients have a NaN: all ranks see it, and the step after it is right again."""
    one = training(kind, options)
    for step in range(N_STEPS):
        x = batch(dist.get_rank(), step)
        if step == 1 and is_odd():
            x[0, 0] = float("nan")
        loss_of(one.model(x)).backward()
        n_before = len(one.gradients)
        one.note()
        if step == 1:
            one.gradients[n_before:] = [g.isnan().any().float() for g in one.gradients[n_before:]]
        else:
            one.optimizer.step()
        one.optimizer.zero_grad()
    one.close()
    return one.gradients


EVERY = {*KINDS}
# In these torch sums within hosts, and tagc between ranks of one place in them. A failure there is told to
# the ranks of that place; the others learn of it when a rank of theirs ends.
IN_PARTS = {"hsdp", "between"}
DDP = {"ddp", "ddp that finds unused"}
TAGCS_ALONE = {
    "ddp",
    "replicate",
}  # in others a rank that ends may be missed by a collective of torch's first
SAME = {
    "late to compress()": (late_to_compress, EVERY),
    **{f"late: {point}": (late(point), EVERY) for point in ("pass", "forward", "backward", "step")},
    "late to save()": (late_to_save, EVERY),
    "a micro-step earlier": (earlier_micro_step, DDP | {"replicate"}),
    "another order": (other_order, DDP),
    "without a gradient": (without_a_gradient, {"ddp that finds unused"}),
    "without a batch": (without_a_batch, DDP),
    **{
        f"an exception: {point}": (raised(point), EVERY)
        for point in ("before the pass", "end", "optimizer", "save")
    },
    "NaN": (not_finite, EVERY),
}

# ---- FAILS: what goes wrong, given the kind; all ranks raise the same Error ----


def fails_in_another_order(kind):
    other_order(kind, EXACT)


def fails_without_a_gradient(kind):
    without_a_gradient(kind, EXACT)


def fails_without_a_parameter(kind):
    """One is frozen on that rank alone, after compress()."""

    def freeze(at, one):
        if at == "pass" and is_odd():
            [*one.plain.layers[1].parameters()][1].requires_grad_(False)  # its bias

    trained_with(freeze, kind, EXACT)


def fails_with_another_loss_scale(kind):
    one = training(kind, EXACT)
    one.backward(0)
    one.step()
    if is_odd():
        one.handle.loss_scale(2.0)
    for step in (1, 2):  # ranks of another place may learn of it in the next pass (IN_PARTS)
        one.backward(step)


def fails_with_older_residuals(kind):
    """It goes on from the state of an exchange earlier."""
    one = training(kind, {"sparsity": 0.9})
    states = []
    for step in range(2):
        one.backward(step)
        one.optimizer.step()
        states.append(one.handle.state_dict())
    one.handle.load_state_dict(states[0 if is_odd() else 1])
    for step in (2, 3):  # likewise
        one.backward(step)


def fails_with_another_dtype(kind):
    training(kind, EXACT, dtype=torch.bfloat16 if is_odd() else torch.float32).backward(0)


def fails_with_another_option(kind):
    training(kind, EXACT | {"values": "bf16"} if is_odd() else EXACT)


def fails_with_a_wrong_argument(kind):
    training(kind, EXACT | {"threads": 0} if is_odd() else EXACT)


FAILS = {
    "another order": (fails_in_another_order, {"fsdp2", "replicate"}),
    "without a gradient": (fails_without_a_gradient, {"replicate"}),
    "without a parameter": (fails_without_a_parameter, {"fsdp2", "replicate"}),
    "another loss scale": (fails_with_another_loss_scale, EVERY - IN_PARTS),
    "older residuals": (fails_with_older_residuals, EVERY - IN_PARTS),
    "another dtype": (fails_with_another_dtype, EVERY),
    "another option": (fails_with_another_option, EVERY),
    "a wrong argument": (fails_with_a_wrong_argument, EVERY),
}
IN_COMPRESS = {"another dtype", "another option", "a wrong argument"}

# ---- LEAVES: likewise; a rank's program ends, or ranks wait for each other ----


def leaves(point):
    """The rank's program ends there, by an exception."""

    def job(kind):
        n_passes = 0

        def fail(at, one):
            nonlocal n_passes
            n_passes += at == "pass"
            if (
                at == point and n_passes == 3
            ):  # before the second one DDP rebuilds its buckets, by torch's means
                fail_or(None)

        trained_with(fail, kind, EXACT, n_steps=4)

    return job


def goes_on_after(point):
    """The rank drops that pass, and goes on with the next one."""

    def job(kind):
        one, n_passes = training(kind, EXACT), 0

        def after(i, x):
            if point == "backward" and n_passes == 2 and i == 1:
                x.register_hook(lambda gradient: fail_or(None))
            return x

        one.plain.after = after
        for step in range(N_STEPS):
            n_passes += 1
            with contextlib.suppress(Failure):
                if point == "pass" and n_passes == 2:
                    fail_or(None)
                one.backward(step)
                one.step() if kind not in GATHERING else one.optimizer.step()
            one.optimizer.zero_grad()

    return job


def closes_its_handle(kind):
    one = training(kind, EXACT)
    for step in range(N_STEPS):
        one.backward(step)
        one.optimizer.step()
        if step == 0 and is_odd():
            one.close()


def has_a_pass_less(kind):
    one = training(kind, EXACT)
    for step in range(N_STEPS - is_odd()):
        one.backward(step)
        one.optimizer.step()


def no_memory(nth):
    """The nth tensor that Python makes on that rank in the second pass cannot be made, whoever makes it."""

    def job(kind):
        one, n_made, is_armed = training(kind, EXACT), 0, False

        def scarce(make):
            def made(*arguments, **options):
                nonlocal n_made
                n_made += is_armed
                if is_armed and n_made == nth:
                    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
                return make(*arguments, **options)

            return made

        with pytest.MonkeyPatch.context() as monkey:
            for where, names in (
                (torch, ("empty", "empty_like", "zeros", "full", "cat")),
                (torch.Tensor, ("clone", "new_empty", "new_zeros", "float")),
            ):
                for name in names if is_odd() else ():
                    monkey.setattr(where, name, scarce(getattr(where, name)))
            for step in range(N_STEPS):
                is_armed = step == 1
                one.backward(step)
                is_armed = False
                one.optimizer.step()
                one.optimizer.zero_grad()

    return job


def micro_step_less(kind):
    """It exchanges at the first of two micro-steps, where the others exchange at the second, whose gathers
    of parameters are in its way."""
    earlier_micro_step(kind, EXACT)


LEAVES = {
    **{f"ends: {point}": (leaves(point), EVERY) for point in ("pass", "forward", "backward", "step")},
    **{f"goes on: {point}": (goes_on_after(point), EVERY) for point in ("pass", "backward")},
    # in these, collectives of torch's then meet other ones of torch's: gloo ends the process, or waits as
    # long as torch's own group does
    "closes its handle": (closes_its_handle, EVERY - {"ddp that finds unused", "fsdp2"}),
    **{f"no memory: {nth}": (no_memory(nth), EVERY) for nth in (1, 2, 3, 5, 8)},
    "a pass less": (has_a_pass_less, EVERY),
    "a micro-step earlier": (micro_step_less, EVERY - DDP - {"replicate"}),
    "another order": (fails_in_another_order, EVERY - DDP - FAILS["another order"][1]),
    # torch's gathers of that module have no partner
    "without a gradient": (fails_without_a_gradient, EVERY - DDP - {"replicate"}),
    "another loss scale": (fails_with_another_loss_scale, IN_PARTS),
    "older residuals": (fails_with_older_residuals, IN_PARTS),
}

# ---- what all ranks do ----


def cells_of(table):
    return [(name, kind) for name, (_, kinds) in table.items() for kind in KINDS if kind in kinds]


def run_same(rank, world_size, chosen):
    cells.run_each(rank, check_same, chosen)


def check_same(cell):
    name, kind = cell
    job = SAME[name][0]
    found, expected = job(kind, EXACT), job(kind, None)
    assert expected, cell
    cells.check_close(found, expected, name)


def outcome_of(job, kind):
    import tagc.torch as tagc

    try:
        job(kind)
    except tagc.Error as problem:
        return {"kind": "Error", "status": problem.status, "text": str(problem)}
    except BaseException as problem:
        return {"kind": type(problem).__name__, "text": str(problem)}
    return {"kind": "nothing", "text": ""}


def run_fails(rank, world_size, chosen):
    """What became of this rank in each cell. None ends before the others have heard, too."""
    store, found = dist.distributed_c10d._get_default_store(), []
    for i, (name, kind) in enumerate(chosen):
        if rank == 0:
            print(f"{name} x {kind}", flush=True)  # a hang ends with its name
        found.append(outcome_of(FAILS[name][0], kind))
        store.set(f"over {i} {rank}", "")
        over = [f"over {i} {other}" for other in range(world_size)]
        store.wait(over, datetime.timedelta(seconds=BOUND_S))
    return found


def check_fails(shape, chosen, run=run_fails):
    """chosen: cells that may run in the same processes. run: of a module that knows their kinds."""
    for cell, *found in zip(chosen, *ranks.run(run, SHAPES[shape], chosen)):
        assert all(one["kind"] == "Error" for one in found), (cell, found)
        assert len({one["status"] for one in found}) == 1, (cell, found)
        # hosts of several ranks find it host by host, and say so
        assert len({one["text"] for one in found}) == 1 or SHAPES[shape] > 2, (cell, found)
        assert found[0]["status"] in ("mismatch", "argument", "unsupported"), (cell, found)
        assert f"rank {SHAPES[shape] - 1}" in found[0]["text"], (cell, found)


def together(chosen):
    """Lists of cells that may run in the same processes: not after a failure within torch's gathers."""
    alone = [cell for cell in chosen if cell[1] in GATHERING and cell[0] not in IN_COMPRESS]
    return [[cell for cell in chosen if cell not in alone], *([cell] for cell in alone)]


def run_leaves(rank, world_size, cell):
    """Raises, for the test to read, what became of this rank. Its program ends with that, as a user's would:
    it closes its connections, and waits for nobody."""
    name, kind = cell
    cells.TIMEOUT_S = SOON_S
    faulthandler.dump_traceback_later(0.8 * BOUND_S)  # what hangs
    raise RuntimeError(f"OUTCOME {json.dumps(outcome_of(LEAVES[name][0], kind))}")


def check_leaves(shape, cell, run=run_leaves):
    found = []
    for _, trace in ranks.attempt(run, SHAPES[shape], cell, timeout_s=BOUND_S):
        match = re.search(r"^RuntimeError: OUTCOME (\{.*\})$", trace or "", re.MULTILINE)
        assert match, (cell, trace)  # it died, as by an abort of torch's
        found.append(json.loads(match[1]))
    others = found[:-1]
    if cell[0].startswith("no memory") and found[-1]["kind"] == "nothing":
        others = []  # it made fewer tensors
    if cell[0] == "a micro-step earlier" and shape == "1x2" and cell[1] in IN_PARTS:
        others = []  # gathers over one rank are in nobody's way, as in DDP: all exchange as often
    assert all(one["kind"] != "nothing" for one in others), (cell, found)
    if cell[1] in TAGCS_ALONE:
        assert all(one["kind"] == "Error" for one in others), (cell, found)


# ---- tests ----


@pytest.mark.parametrize("shape", SHAPES)
def test_as_torch_does(shape):
    ranks.run(run_same, SHAPES[shape], sample(SAME, shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_error(shape):
    for chosen in together(sample(FAILS, shape)):
        check_fails(shape, chosen)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_end(shape):
    for cell in sample(LEAVES, shape):
        check_leaves(shape, cell)


def sample(table, shape):
    """Each difference once, in a wrapper that goes round; those of LEAVES, which take processes of their own,
    in one of the shapes."""
    found, first = [], [*SHAPES].index(shape)
    for i, (name, (_, kinds)) in enumerate(table.items()):
        own = [kind for kind in KINDS if kind in kinds]
        if table is not LEAVES or i % len(SHAPES) == first:
            found.append((name, own[(i + first) % len(own)]))
    return found
