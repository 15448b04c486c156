"""What changes after compress(model, optimizer): parameters are unfrozen, groups added and edited,
parameters replaced. tagc follows what the optimizer and the model have at each exchange, or says what it
cannot follow."""

import pytest

torch = pytest.importorskip("torch")
import ranks
from test_meshes import Given, noise
from torch import nn
from wrappers import heard, wrap

EVERY, LAST = 1, 3
SHAPES = {"early": (80, 64), "late": (64, 96)}


def wrapped(kind, frozen=()):
    model = wrap(kind, Given(**SHAPES), **({"find_unused_parameters": True} if kind == "ddp" else {}))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def part(model, what):
    return next(p for name, p in model.named_parameters() if what in name)


class Run:
    """Exchanges noise, and notes beta1 of each parameter as the optimizer's steps use it."""

    def __init__(self, rank, model, optimizer, handle):
        self.rank, self.model, self.optimizer, self.handle = rank, model, optimizer, handle
        self.n_steps, self.used = 0, {}

    def _look(self, stepped):
        for group in stepped.param_groups:
            for parameter in group["params"]:
                self.used[id(parameter)] = group.get("betas", (None,))[0]

    def beta1(self, what):
        return self.used.get(id(part(self.model, what)))

    def level(self, what):
        return self.handle.state.schedule.levels()[f"of.{what}.weight"]

    def go(self, n_steps):
        for _ in range(n_steps):
            self.n_steps += 1
            self.model(
                {
                    name: noise(self.n_steps, self.rank, len(name), shape=shape)
                    for name, shape in SHAPES.items()
                }
            ).backward()
            for what in SHAPES:
                name, plan = f"of.{what}.weight", self.handle.state.schedule.plan
                if self.level(what) > EVERY and self.handle.state.schedule.moments[name] == 1:
                    assert plan({name: 1}).moment == 0, f"{what} is selected while its first moment is long"
            hook = self.optimizer.register_step_pre_hook(  # behind tagc's own
                lambda _, args, __: self._look(args[0])
            )
            self.optimizer.step()
            hook.remove()
            self.optimizer.zero_grad()


def unfrozen_later(rank, world_size):
    """A parameter that is trained later has a long first moment of its own, which becomes short before its
    values are selected; whether it was in the optimizer's groups all the time, comes into them, or comes
    into an optimizer that was made from param_groups()."""
    import tagc.torch as tagc

    for kind in ("fsdp2", "ddp"):
        for how in ("in groups", "added", "param_groups"):
            model = wrapped(kind, ["late"])
            if how == "param_groups":
                handle = tagc.compress(model, verbose=False)
                optimizer = torch.optim.AdamW(handle.param_groups(lr=1e-3), foreach=False)
            else:
                own = [p for p in model.parameters() if how == "in groups" or p.requires_grad]
                optimizer = torch.optim.AdamW(own, lr=1e-3, foreach=False)
                handle = tagc.compress(model, optimizer, verbose=False)
            run = Run(rank, model, optimizer, handle)
            run.go(61)
            assert run.beta1("early") == pytest.approx(0.5) and run.level("early") > EVERY, how
            assert run.level("late") == EVERY
            part(model, "late").requires_grad_(True)
            if how != "in groups":
                optimizer.add_param_group({"params": [part(model, "late")]})
            run.go(2)
            assert run.level("late") == EVERY and run.beta1("late") == 0.9, (kind, how, run.beta1("late"))
            run.go(80)
            assert run.level("late") == LAST, (kind, how)
            assert run.beta1("late") == pytest.approx(0.5) == run.beta1("early")
            handle.close()


def momentum_is_edited(rank, world_size):
    """A scheduler or a user changes beta1 or the momentum of a group."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.4, 0.99), foreach=False)
    with tagc.compress(model, optimizer, verbose=False) as handle:
        run = Run(rank, model, optimizer, handle)
        run.go(45)
        assert run.level("early") == LAST and run.beta1("early") == 0.4
        optimizer.param_groups[0]["betas"] = (0.95, 0.99)
        run.go(2)
        assert run.level("early") == LAST and run.beta1("early") == pytest.approx(0.5)
        assert optimizer.param_groups[0]["betas"] == (0.95, 0.99)
    model = wrapped("fsdp2")
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9, foreach=False)
    optimizer.param_groups[0]["momentum"] = 0
    with tagc.compress(model, optimizer, verbose=False) as handle:
        run = Run(rank, model, optimizer, handle)
        run.go(45)
        assert run.level("early") == LAST
        for state in optimizer.state.values():
            state["momentum_buffer"] = torch.zeros_like(state["square_avg"])
        optimizer.param_groups[0]["momentum"] = 0.9
        run.go(1)
        assert run.level("early") == EVERY, "tagc cannot shorten that momentum"


def what_is_not_followed(rank, world_size):
    """It is named once, by rank 0: parameters of an optimizer that tagc does not know, and parameters that no
    hook gets."""
    import tagc.torch as tagc

    def said_by(function):
        with heard("tagc: of.") as texts:
            function()
        assert rank == 0 or not texts, texts
        return texts

    for kind in ("fsdp2", "ddp"):
        model = wrapped(kind, ["late"])
        optimizer = torch.optim.AdamW([part(model, "early")], lr=1e-3, foreach=False)
        with tagc.compress(model, optimizer, verbose=False) as handle:
            run = Run(rank, model, optimizer, handle)
            assert not said_by(lambda: run.go(2))
            part(model, "late").requires_grad_(True)
            other = torch.optim.AdamW([part(model, "late")], lr=1e-3)
            assert not said_by(lambda: run.go(1)), "it may come into an optimizer yet"
            texts = said_by(lambda: run.go(3))
            assert len(texts) == (rank == 0), texts
            assert all("of.late.weight is trained" in text and "handle.adapt()" in text for text in texts)
            handle.adapt(other)
            assert handle.state.schedule.moments["of.late.weight"] == 1
            assert not said_by(lambda: run.go(3))
            inner = model.module if kind == "ddp" else model
            weight = inner.of["late"].weight
            inner.of["late"].weight = nn.Parameter(torch.zeros(*SHAPES["late"]))
            other.param_groups[0]["params"] = [inner.of["late"].weight]
            texts = said_by(lambda: run.go(3))
            # FSDP2 puts its own parameter back, which is in no optimizer any more
            words = "came into the model after" if kind == "ddp" else "of.late.weight is trained"
            assert len([text for text in texts if words in text]) == (rank == 0), texts
            inner.of["late"].weight = weight


def test_parameters_that_are_unfrozen_later():
    ranks.run(unfrozen_later, 2)


def test_groups_that_are_edited():
    ranks.run_each([momentum_is_edited, what_is_not_followed], 2)
