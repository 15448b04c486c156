"""What compress() makes of optimizers and schedulers: those that are there before it, those that are not
Adams, those that get param_groups(). None of them is broken silently."""

import copy

import pytest

torch = pytest.importorskip("torch")
import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from wrappers import heard


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.mlp = nn.Sequential(nn.Linear(64, 80), nn.LayerNorm(80), nn.Linear(80, 64))

    def forward(self, x):
        return self.mlp(x)


def own_groups(model):
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def sharded_over_ranks(rank, world_size):
    """A ZeroRedundancyOptimizer is what it has inside, and trains as that does: each rank steps a share of
    the parameters with betas of its own, and the groups are as they were."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    import tagc.torch as tagc

    def trained(make, words, **options):
        model = DistributedDataParallel(Small())
        optimizer = make(model)
        with tagc.compress(model, optimizer, verbose=False, **options) as handle:
            assert words in handle.state.moments.words, handle.state.moments.words
            for step in range(6):
                backward(model, rank, step)
                optimizer.step()
            return [p.detach().clone() for p in model.parameters()], optimizer, handle.state.schedule.moments

    for kind, options, words in (
        (torch.optim.AdamW, {"lr": 0.02}, "beta1 is 0.5"),
        (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}, "selection works"),
    ):
        for chosen in ({"sparsity": 0.9}, {}):
            expected, _, moments = trained(lambda model: kind(model.parameters(), **options), words, **chosen)
            found, optimizer, found_moments = trained(
                lambda model: ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **options),
                f"ZeroRedundancyOptimizer of {kind.__name__}: ",
                **chosen,
            )
            assert found_moments == moments
            for one, other in zip(found, expected):
                torch.testing.assert_close(one, other)
            assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
            assert optimizer.param_groups[0].get("betas") in (None, (0.9, 0.999))


def backward(model, rank, step):
    random = torch.Generator().manual_seed(1000 * step + rank)
    model.zero_grad()
    model(torch.randn(8, 64, generator=random)).square().mean().backward()


class Lion(torch.optim.Optimizer):
    """As published: betas are of another kind than Adam's."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(torch.sign(torch.lerp(p.grad, m, group["betas"][0])), alpha=group["lr"])
                m.lerp_(p.grad, 1 - group["betas"][1])


class Unknown(Lion):
    pass


class Optimizer8bit(torch.optim.Optimizer):
    pass


class AdamW8bit(Optimizer8bit):
    """bitsandbytes' names."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999)):
        super().__init__(params, {"lr": lr, "betas": betas})

    def step(self, closure=None):
        pass


class PagedAdamW8bit(AdamW8bit):
    pass


class AdamWScheduleFree(torch.optim.Optimizer):
    """schedulefree's: betas[0] is where between two points gradients are taken, and no moment."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999)):
        super().__init__(params, {"lr": lr, "betas": betas})

    def step(self, closure=None):
        pass


def test_which_is_an_adam_and_which_has_a_short_moment():
    from tagc.torch.schedule import adapt

    optim = torch.optim

    def kind(make, *arguments, **options):
        parameter = nn.Parameter(torch.ones(4, 4))
        optimizer = make([parameter], *arguments, **options)
        can, none = adapt.kinds([optimizer], {id(parameter): "p"})
        return "can" if can else "none" if none else "other"

    for make in (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, AdamW8bit, PagedAdamW8bit):
        assert (
            kind(make) == "can" and kind(make, betas=(0.0, 0.9)) == kind(make, betas=(0.5, 0.9)) == "none"
        ), make
    for make in (Unknown, AdamWScheduleFree, optim.Muon, optim.Adamax, optim.ASGD, optim.Rprop):
        assert kind(make) == "other", make
    assert (
        kind(optim.SGD, 0.1) == kind(optim.RMSprop) == kind(optim.Adagrad) == kind(optim.Adafactor) == "none"
    )
    assert (
        kind(Lion) == kind(optim.SGD, 0.1, momentum=0.9) == "none"
        and kind(optim.RMSprop, momentum=0.9) == "other"
    )


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.5**n, lambda n: 0.9**n]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=9),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.StepLR(o, 2)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def schedulers(rank, world_size):
    """Made before adapt() or after it, with groups of different rates: those of a run without tagc, step by
    step."""
    import tagc.torch as tagc

    def rates(name, when):
        model = DistributedDataParallel(Small())
        optimizer = torch.optim.AdamW(own_groups(model), lr=0.1)
        scheduler = SCHEDULERS[name](optimizer) if when != "after" else None
        if when != "never":
            handle = tagc.compress(model, sparsity=0.9, verbose=False)
            handle.adapt(optimizer)
            scheduler = scheduler or SCHEDULERS[name](optimizer)
        found = []
        for step in range(6):
            backward(model, rank, step)
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            rates = [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
            found.append((rates, getattr(scheduler, "base_lrs", None), scheduler.get_last_lr()))
        saved = scheduler.state_dict()
        optimizer.load_state_dict(optimizer.state_dict())
        scheduler.load_state_dict(saved)
        return found

    for name in SCHEDULERS:
        expected = rates(name, "never")
        assert rates(name, "before") == expected and rates(name, "after") == expected, name


def resumes_with_and_without(rank, world_size):
    """nanoGPT's order: the optimizer loads its state, then the model is wrapped, then compress(). A state
    from before tagc, and of a run with it: what each parameter has is its own."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    import tagc.torch as tagc

    def made(saved=None):
        inner = Small()
        optimizer = torch.optim.AdamW(own_groups(inner), lr=0.1)
        if saved is not None:
            optimizer.load_state_dict(copy.deepcopy(saved))  # else it would share the tensors
        return DistributedDataParallel(inner), optimizer

    def run(model, optimizer, steps):
        for step in steps:
            backward(model, rank, step)
            optimizer.step()

    def state(model, optimizer):
        return {
            name: {k: v.clone() for k, v in optimizer.state[p].items()}
            for name, p in model.named_parameters()
        }

    def same(a, b):
        return a.keys() == b.keys() and all(
            torch.equal(a[name][key], b[name][key]) for name in a for key in a[name]
        )

    before = made()
    run(*before, range(3))
    saved = copy.deepcopy(before[1].state_dict())
    model, optimizer = made(saved)  # with tagc from here on
    tagc.compress(model, optimizer, sparsity=0.9, verbose=False)
    assert same(state(model, optimizer), state(*before))
    run(model, optimizer, range(3, 6))
    with_tagc = copy.deepcopy(optimizer.state_dict())
    assert [len(g["params"]) for g in with_tagc["param_groups"]] == [2, 4]
    again = made(with_tagc)  # and without it again
    assert same(state(*again), state(model, optimizer))
    late = made()
    tagc.compress(*late, sparsity=0.9, verbose=False)
    late[1].load_state_dict(copy.deepcopy(saved))  # after it
    assert same(state(*late), state(*before))
    set_optimizer_state_dict(late[0], late[1], get_optimizer_state_dict(model, optimizer))
    assert same(state(*late), state(model, optimizer))


def groups_of_an_unwrapped_model(rank, world_size):
    """Made before DDP and compress(), which sees that what is compressed has a short first moment, and
    selects it."""
    import tagc.torch as tagc
    from tagc.torch.schedule.schedule import NONE

    inner = Small()
    groups = tagc.param_groups(inner, groups=own_groups(inner), betas=(0.8, 0.95))
    named = dict(inner.named_parameters())
    assert [(len(g["params"]), g["betas"], g["weight_decay"]) for g in groups] == [
        (2, (0.5, 0.95), 0.1),
        (4, (0.8, 0.95), 0.0),
    ]
    assert groups[0]["params"][0] is named["mlp.0.weight"]
    optimizer = torch.optim.AdamW(groups)
    model = DistributedDataParallel(inner)
    handle = tagc.compress(model, optimizer, verbose=False)
    assert (
        set(handle.state.schedule.moments.values()) == {NONE}
        and "has no first moment" in handle.state.moments.words
    )
    assert [len(g["params"]) for g in tagc.param_groups(inner, rules={"mlp.0.*": "dense"})] == [1, 5]


def others_are_left_alone(rank, world_size):
    """An optimizer that is not an Adam trains as it would without its betas touched, whichever way it is
    given, and rank 0 says so."""
    import tagc.torch as tagc
    from tagc.torch.schedule.schedule import NONE

    def trained(make, how):
        model = DistributedDataParallel(Small())
        with heard("is not an Adam") as said:
            if how == "given":
                optimizer = make(model.parameters())
                handle = tagc.compress(model, optimizer, verbose=False)
            else:
                handle = tagc.compress(model, verbose=False)
                optimizer = make(model.parameters() if how == "plain" else handle.param_groups())
            for step in range(15):  # a window has 20: all in the first stage
                backward(model, rank, step)
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()], handle, said, optimizer

    stays = "tagc leaves it as it is, and sends every value of its parameters in 4 bits"
    goes = "tagc leaves it as it is, because selection works with its first moment"
    for make, words in (
        (lambda p: Unknown(p, lr=1e-3), stays),
        (lambda p: Lion(p, lr=1e-3), goes),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), goes),
        (
            lambda p: torch.optim.Adafactor(p),
            "tagc leaves it as it is, because it has no first moment, or a short one",
        ),
    ):
        plain, *_ = trained(make, "plain")
        for how in ("given", "groups"):
            found, handle, said, optimizer = trained(make, how)
            name = type(optimizer).__name__
            assert all(torch.equal(a, b) for a, b in zip(found, plain)), (name, how)
            assert (set(handle.state.schedule.moments.values()) == {NONE}) == (words != stays), (name, how)
            assert len(said) == (how == "groups" and rank == 0 and name != "Adafactor"), said
            assert handle.state.moments.words == (f"{name}: {words}" if how == "given" else "")
            assert not any("betas" in group for group in optimizer.param_groups) or name in (
                "Lion",
                "Unknown",
            )
    model = DistributedDataParallel(Small())
    handle = tagc.compress(model, verbose=False)
    # the optimizer's own, where none are given
    optimizer = torch.optim.AdamW(handle.param_groups(), betas=(0.8, 0.95))
    backward(model, rank, 0)
    optimizer.step()
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.95), (0.8, 0.95)]
    handle.close()
    handle = tagc.compress(model, verbose=False)
    given = torch.optim.AdamW(own_groups(Small()))
    for wrong, text in (
        (3, "must be a torch.optim.Optimizer"),
        (given, "has none of the parameters that tagc compresses.* make the optimizer after it"),
        (
            torch.optim.AdamW(list(model.parameters())[:1]),
            "lacks 1 of the 2 parameters that tagc compresses.* give a list",
        ),
    ):
        with pytest.raises(tagc.Error, match=text):
            handle.adapt(wrong)


def several_share_a_model(rank, world_size):
    """Muon for matrices and AdamW for the rest, in a list: each as it is. What Muon has stays as it was, and
    the Adam's goes on."""
    from oracles import WINDOW

    import tagc.torch as tagc

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.one, self.two = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))

        def forward(self, a, b):
            return (self.one * a).sum() + (self.two * b).sum()

    for wrapped in (DistributedDataParallel(Two()), fully_shard(Two())):
        inner = getattr(wrapped, "module", wrapped)
        optimizers = [Unknown([inner.one]), torch.optim.AdamW([inner.two])]
        handle = tagc.compress(wrapped, optimizers, verbose=False)
        assert (
            "Unknown: tagc leaves it as it is" in handle.state.moments.words
            and "AdamW: beta1 is 0.5" in handle.state.moments.words
        )
        random = torch.Generator().manual_seed(rank)
        for _ in range(2 * WINDOW + 1):
            wrapped.zero_grad()
            wrapped(torch.randn(64, 64, generator=random), torch.randn(64, 64, generator=random)).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert (
            handle.state.schedule.levels() == {"one": 1, "two": 2}
            and handle.state.moments.memories[id(inner.two)].moment == 0
        )


def handles_share_an_optimizer(rank, world_size, order):
    """Two models in one pass, and one AdamW whose groups have parameters of both: at each step each parameter
    moves, as the plain rule with its betas has it, and the user's groups stay. order: in which handles
    close."""
    from oracles import WINDOW

    import tagc.torch as tagc
    from tagc.torch.schedule import adapt

    class Part(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.one, self.two = nn.Linear(72, 72, bias=False), nn.Linear(72, 72, bias=False)

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    def groups(models):
        named = [named for model in models for named in model.named_parameters()]
        return [
            {"params": [p for name, p in named if "one" in name], "lr": 1e-3},
            {"params": [p for name, p in named if "two" in name], "lr": 2e-3},
        ]

    models = [DistributedDataParallel(Part(seed)) for seed in range(2)]
    optimizer = torch.optim.AdamW(groups(models))
    handles = [tagc.compress(model, optimizer, verbose=False) for model in models]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    # of each parameter one of its own
    plain = [torch.optim.AdamW([twin], lr=1e-3 if i < 2 else 2e-3) for i, twin in enumerate(twins)]
    kept = [(id(group), [*map(id, group["params"])], group["betas"]) for group in optimizer.param_groups]

    def step(number):
        x = torch.randn(4, 72, generator=torch.Generator().manual_seed(2 * number + rank))
        for model in models:
            x = model(x)
        (x * torch.randn(4, 72, generator=torch.Generator().manual_seed(number))).mean().backward()
        memories = {}
        for handle in handles:
            memories |= {} if handle.is_closed else handle.state.moments.memories
        for own, p, twin in zip(plain, parameters, twins):
            memory = memories.get(id(p), adapt.Memory())
            own.param_groups[0]["betas"] = memory.betas((0.9, 0.999))
            twin.grad = p.grad.clone()
            own.step()
        optimizer.step()
        optimizer.zero_grad()
        for p, twin in zip(parameters, twins):
            assert torch.allclose(p, twin, rtol=1e-5, atol=1e-7), number
        now = [(id(group), [*map(id, group["params"])], group["betas"]) for group in optimizer.param_groups]
        assert now == kept, number

    for number in range(5 * WINDOW):
        step(number)
    moments = [m for handle in handles for m in handle.state.moments.memories.values()]
    assert len(moments) == 4 and any(memory.moment < 1 for memory in moments), moments
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for i in order:
        handles[i].close()
        models[i] = models[i].module
        step(1000 + i)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def share_in_both_orders(rank, world_size):
    for order in ((0, 1), (1, 0)):
        handles_share_an_optimizer(rank, world_size, order)


def test_optimizers_and_schedulers():
    ranks.run_each(
        (
            schedulers,
            resumes_with_and_without,
            groups_of_an_unwrapped_model,
            others_are_left_alone,
            several_share_a_model,
            sharded_over_ranks,
            share_in_both_orders,
        ),
        2,
    )


def test_models_beside_each_other():
    """Each waits for its own optimizer's first step, whose hooks torch keeps in one list."""
    from tagc.torch.schedule import adapt

    models = [torch.nn.Linear(2, 2) for _ in range(3)]
    awaited = [
        adapt.Awaited({id(p): None for p in model.parameters()}, set(), lambda *_: None) for model in models
    ]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer.param_groups[0]["betas"] for optimizer in optimizers] == [(0.5, 0.999)] * 3
    for one in awaited:
        one.remove()
