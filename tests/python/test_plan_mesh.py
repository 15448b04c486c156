"""Plans on a mesh beside published formulas, and beside ranks that are gone through one by one. Nothing here
shares code with planning/mesh/."""

import itertools
import json
import math
import pathlib
import random
import re

import plan_parts
import pytest
from on_mesh import (
    FULL,
    GRAD,
    HYBRID,
    INTERLEAVED,
    MEGATRON,
    NONE,
    ONE_F_ONE_B,
    TORCH,
    activations,
    ask,
    message,
)

from tagc import _library as lib
from tagc import _planner as planner
from tagc.commands import main


def planned(*words):
    """Returns what the command writes as JSON."""
    return json.loads(planner.plan([str(word) for word in words]).json)


# ---- parameters and states ----


def test_models_have_the_published_number_of_parameters():
    """As their authors and the files of the models say."""
    for name, billions, active in (
        ("llama-3-8b", 8.030261248, None),
        ("llama-3-70b", 70.553706496, None),
        ("llama-3-405b", 405.853388800, None),
        ("mixtral-8x7b", 46.702792704, 12.9),
        ("mixtral-8x22b", 140.630071296, 39.2),
    ):
        found = planned("--model", name.upper())
        assert found["n_params"] == round(1e9 * billions), name
        if active is not None:
            assert found["n_active_params"] / 1e9 == pytest.approx(active, abs=0.06)
    gpt = planned("--model", "gpt-3-175b")["n_params"]
    assert gpt == pytest.approx(175e9, rel=0.005)


def test_states_take_what_zero_says():
    """ZeRO, section 5, and Placement Semantics: 16 bytes per parameter, of which stage 1 divides 8, and
    stages 2 and 3 all. (The copy in half precision counts apart.) ZeRO-3 takes 8 times less on 8 ranks, and
    sends half as much again."""
    n = ask()["n_params"]
    sent = {}
    for world_size, sharding in itertools.product((2, 8, 64), (NONE, GRAD, FULL)):
        found = ask(world_size=world_size, sharding=sharding)
        states = sum(found["device"][kind] for kind in ("parameters", "gradients", "optimizer"))
        assert states == pytest.approx(16 * n / (1 if sharding == NONE else world_size))
        assert found["device"]["replicas"] == pytest.approx(2 * n if sharding == GRAD else 0)
        legs = found["legs"]
        sent[sharding] = legs["gradients"]["rank"] + legs["parameters"]["rank"]
        around = 2 * n * (world_size - 1) / world_size
        gathers = 3 if sharding == FULL else 2
        assert sent[sharding] == pytest.approx(gathers * around)
    assert sent[FULL] / sent[NONE] == pytest.approx(1.5)
    tensor = ask(world_size=8, n_tensor=8)
    split = n - 8 * (4 * 256 + 2 * 256) - 2 * 256  # norms, and biases that are added to sums
    assert tensor["device"]["parameters"] == pytest.approx(4 * (split / 8 + n - split))


def test_experts_are_split_over_their_ranks():
    n = dict(n_experts=8, n_active=2, world_size=16, ranks_per_host=4)
    dense, router = ask(**n | dict(n_experts=1, n_active=1))["n_params"], 8 * 256 * 8
    one = 8 * (2 * 256 * 1024 + 1024 + 256)
    all_ = ask(**n)["n_params"]
    assert all_ == dense + 7 * one + router
    for n_expert in (1, 2, 8):  # sharded over the ranks that hold the same ones, all together over all
        found = ask(**n, n_expert=n_expert)
        assert found["device"]["parameters"] == pytest.approx(4 * all_ / 16)
        whole = ask(**n, n_expert=n_expert, sharding=NONE)["device"]["parameters"]
        assert whole == pytest.approx(4 * (all_ - 8 * one + 8 * one / n_expert))


# ---- activations ----


def megatron(s, b, h, a, layers, vocab, t=1, is_sequence=False, selective=False, full=False, p=1, v=1):
    """2205.05198, equations 1 to 6 and section 4.3, of the first stage (p > 1) or of a whole model."""
    if full:
        layer = 2 * s * b * h / (t if is_sequence else 1)
    elif t == 1 or is_sequence:
        layer = s * b * h / t * (34 + (0 if selective else 5 * a * s / h))
    else:
        layer = s * b * h * (10 + 24 / t + (0 if selective else 5 * a * s / (h * t)))
    total = layer * layers * (1 + (p - 1) / (p * v) if v > 1 else 1)
    ends = s * b * h * p * (1 + (p - 1) / (p * v) if v > 1 else 1)  # masks of the embedding
    if p == 1:
        ends += 4 * s * b * (h / (t if is_sequence else 1) + vocab / t)
    return total + ends


@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_are_those_of_megatron(t):
    s, b, h, a, layers, vocab = 2048, 4, 1024, 16, 24, 32000
    shape = dict(
        n_layer=layers,
        n_embd=h,
        n_head=a,
        n_kv_head=a,
        n_ffn=4 * h,
        n_vocab=vocab,
        n_sequences=b,
        n_tokens=s,
        n_tensor=t,
        world_size=t,
        ranks_per_host=t,
        keeps_scores=1,
        has_dropout=1,
    )
    oracle = lambda **how: megatron(s, b, h, a, layers, vocab, t, **how)
    assert activations(**shape) == pytest.approx(oracle())
    assert activations(**shape, recompute=1) == pytest.approx(oracle(selective=True))
    again = activations(**shape, recompute=2) - oracle(
        full=True
    )  # one layer is there in full when it is computed again
    assert again == pytest.approx((oracle() - oracle(full=True)) / layers + 2 * s * b * h, rel=1e-6)
    if t > 1:
        shape["sequence"] = MEGATRON
        assert activations(**shape) == pytest.approx(oracle(is_sequence=True))
        assert activations(**shape, recompute=1) == pytest.approx(oracle(is_sequence=True, selective=True))
        more = activations(**shape | dict(sequence=TORCH)) - activations(
            **shape
        )  # two gathered inputs and the head's
        assert more == pytest.approx((layers * 4 + 2) * s * b * h * (1 - 1 / t))
    for v, schedule in ((1, ONE_F_ONE_B), (2, INTERLEAVED), (3, INTERLEAVED)):
        stages = dict(
            n_pipeline=4, n_stages_per_rank=v, schedule=schedule, n_micro_batches=8, world_size=4 * t
        )
        found = ask(**shape | stages)
        expected = oracle(p=4, v=v, is_sequence=t > 1)
        assert found["fullest"] == 0 and found["device"]["activations"] == pytest.approx(expected)


# ---- bytes by ranks and hosts ----


class Ranks:
    """Goes through the ranks of a mesh: a table of coordinates, and who sends how much to whom."""

    def __init__(self, t, c, d, p, per_host):
        self.per_host, order = per_host, itertools.product(range(p), range(d), range(c), range(t))
        self.at = {place: rank for rank, place in enumerate(order)}
        self.sent, self.host, self.between = {}, {}, 0

    def send(self, one, other, n_bytes):
        self.sent[one] = self.sent.get(one, 0) + n_bytes
        if one // self.per_host != other // self.per_host:
            self.host[one // self.per_host] = self.host.get(one // self.per_host, 0) + n_bytes
            self.between += n_bytes

    def ring(self, members, n_bytes):
        for one, other in zip(members, [*members[1:], members[0]]):
            self.send(one, other, n_bytes)

    def found(self):
        return dict(
            rank=max(self.sent.values(), default=0),
            all=sum(self.sent.values()),
            host=max(self.host.values(), default=0),
            between=self.between,
        )


MESHES = [  # tensor, context, data, pipeline, expert, ranks of a host
    (1, 1, 8, 1, 1, 2),
    (2, 1, 4, 2, 1, 4),
    (4, 2, 2, 1, 1, 4),
    (2, 2, 2, 2, 4, 4),
    (8, 1, 2, 2, 2, 4),
    (1, 4, 2, 2, 8, 2),
    (2, 1, 8, 1, 4, 16),
    (1, 2, 4, 4, 2, 8),
    (1, 1, 8, 1, 2, 4),
    (2, 1, 8, 1, 4, 8),
    (1, 2, 4, 2, 2, 2),
]


@pytest.mark.parametrize("t, c, d, p, e, per_host", MESHES)
def test_bytes_of_each_rank_and_host(t, c, d, p, e, per_host):
    """Every leg of torch's own traffic, counted by going through the ranks."""
    m, layers, h, tokens, k = 4, 8 // p, 256, 2 * 128 // c, 2
    shape = dict(
        n_experts=8,
        n_active=k,
        n_tensor=t,
        n_context=c,
        n_pipeline=p,
        n_expert=e,
        n_micro_batches=m,
        world_size=t * c * d * p,
        ranks_per_host=per_host,
        has_bias=0,
        n_kv_head=8,
    )
    legs = ask(**shape, sharding=GRAD)["legs"]
    of = {leg: Ranks(t, c, d, p, per_host) for leg in legs}
    at = of["tensor"].at
    for stage, x, y in itertools.product(range(p), range(d), range(c)):
        n_reduces = 4 * layers + (stage == 0) + (stage == p - 1)
        of["tensor"].ring(
            [at[stage, x, y, z] for z in range(t)], m * n_reduces * 2 * (t - 1) / t * tokens * h * 2
        )
    for stage, x, z in itertools.product(range(p), range(d), range(t)):
        kv = 2 * tokens * h / t
        rounds = (2 * 2 * (c - 1) + 4 * c) if c > 1 else 0
        of["context"].ring([at[stage, x, y, z] for y in range(c)], m * layers * rounds * kv)
    shared = layers * (4 * h * h / t + 2 * h + 8 * h)
    expert = layers * 8 / e * 2 * h * 1024 / t
    for stage, z in itertools.product(range(p), range(t)):
        mates = [at[stage, x, y, z] for x in range(d) for y in range(c)]
        n_bf16 = 2 * (shared + (stage == 0) * 4096 * h / t + (stage == p - 1) * (4096 * h / t + h))
        for leg in ("gradients", "parameters"):
            of[leg].ring(mates, n_bf16 * (len(mates) - 1) / len(mates))
            for first in range(e):
                same = mates[first::e]
                of[leg].ring(same, 2 * expert * (len(same) - 1) / len(same))
        for group in range(0, len(mates), e):
            for one, other in itertools.permutations(mates[group : group + e], 2):
                of["expert"].send(one, other, m * layers * 4 * k * tokens * 2 * h / e)
    for leg in ("tensor", "context", "expert", "gradients", "parameters"):
        assert legs[leg] == pytest.approx(of[leg].found()), leg
    check_tokens(shape, at, (t, c, d, p, e, per_host), m * layers, k * tokens * h / e)


def check_tokens(shape, at, mesh, n_layers, n_values):
    """The experts' leg by tagc, in int8 and int4: neighbours first give each other what is for the ranks of
    their place on any host, and each then sends one message to each other host. n_values: for each rank."""
    t, c, d, p, e, per_host = mesh
    ways = {"token_forward": lib.FORMATS["int8"], "token_backward": lib.FORMATS["int4"]}
    packed = ask(**shape, **ways, sharding=GRAD)["legs"]["expert"]
    ranks = Ranks(t, c, d, p, per_host)
    for stage, z in itertools.product(range(p), range(t)):
        mates = [at[stage, x, y, z] for x in range(d) for y in range(c)]
        for first in range(0, len(mates), e):
            group = mates[first : first + e]
            by_host = [list(same) for _, same in itertools.groupby(group, lambda rank: rank // per_host)]
            near, n = len(by_host[0]), n_values * len(by_host[0])
            sent = [88 + 64 + 2 * math.ceil(n / 64) + math.ceil(n * bits / 8) for bits in (8, 4)]
            sent = [88 + 2 * n] * 2 if n < 4096 else sent
            for own, host in enumerate(by_host):
                for i, rank in enumerate(host):
                    for other in (one for one in host if one != rank):
                        ranks.send(rank, other, n_layers * 4 * 2 * n_values * len(by_host))
                    for k, there in enumerate(by_host):
                        if k != own:
                            ranks.send(rank, there[i], n_layers * 2 * sum(sent))
    assert packed == pytest.approx(ranks.found())


def test_what_is_computed_again_is_sent_again():
    """Recomputed layers pass their forward messages once more: half as much again of tensor and expert
    parallelism."""
    for how in (dict(n_tensor=4), dict(n_expert=4, n_experts=8, n_active=2)):
        plain, again = (
            [ask(world_size=4, n_layer=n, recompute=recompute, **how)["legs"] for n in (4, 8)]
            for recompute in (0, 2)
        )
        leg = "tensor" if "n_tensor" in how else "expert"
        more = [two[leg]["rank"] - one[leg]["rank"] for one, two in (plain, again)]
        assert more[1] == pytest.approx(1.5 * more[0])
    once = ask(world_size=4, n_tensor=4, sequence=TORCH)["legs"]["tensor"]["rank"]
    regathered = ask(world_size=4, n_tensor=4, sequence=MEGATRON)["legs"]["tensor"]["rank"]
    # the inputs of attention, feed-forward and head
    assert regathered - once == pytest.approx((2 * 8 + 1) * 2 * 128 * 256 * 2 * 3 / 4)


def test_shards_within_a_host_and_replicas_between():
    """HSDP: a reduce-scatter and gathers within a host; between hosts an all-reduce of what a rank holds."""
    how = dict(world_size=12, ranks_per_host=4, sharding=HYBRID, n_embd=1024, n_ffn=4096, has_bias=0)
    found = ask(**how)
    n, legs = found["n_params"], found["legs"]
    across = 2 * 2 * n / 4 * 2 / 3
    assert legs["gradients"]["host"] == pytest.approx(4 * across)
    assert legs["gradients"]["rank"] == pytest.approx(2 * n * 3 / 4 + across)
    assert (
        legs["parameters"]["rank"] == pytest.approx(2 * 2 * n * 3 / 4) and legs["parameters"]["between"] == 0
    )
    assert found["device"]["parameters"] == pytest.approx(4 * n / 4)
    packed = ask("bf16", "int4", **how)["legs"]["gradients"]["host"]  # 4.5 bits there and back
    assert packed == pytest.approx(4 * across * 4.5 / 16, rel=0.03)


def test_gradients_accumulate_whole():
    """FSDP2 reduces after the last micro-batch alone; until then a rank keeps whole gradients, in bf16."""
    for sharding in (GRAD, FULL, HYBRID):
        one, four = (
            ask(world_size=4, ranks_per_host=2, sharding=sharding, n_micro_batches=m) for m in (1, 4)
        )
        assert four["device"]["gradients"] - one["device"]["gradients"] == 2 * one["n_params"]
        times = 1 if sharding == GRAD else 4
        assert four["legs"]["parameters"]["rank"] == pytest.approx(times * one["legs"]["parameters"]["rank"])
        assert four["legs"]["gradients"] == one["legs"]["gradients"]
    ddp = [ask(world_size=4, sharding=NONE, n_micro_batches=m)["device"]["gradients"] for m in (1, 4)]
    assert ddp[0] == ddp[1]


def test_tagc_sends_between_hosts_what_its_rows_take():
    """Between hosts: of what a rank owns of its host's sums 4.5 bits for gradients and 4.06 for deltas, all
    but an H-th of it; within a host a ring. torch's own groups within a host are left to torch."""
    for t, per_host, n_hosts in ((1, 1, 4), (1, 8, 4), (2, 8, 2), (8, 8, 4)):
        how = dict(
            n_embd=1024,
            n_ffn=4096,
            has_bias=0,
            n_tensor=t,
            world_size=per_host * n_hosts,
            ranks_per_host=per_host,
        )
        found = ask("delta4", "int4", **how)
        near = per_host // t
        n = found["n_params"] / t
        for leg, bits, n_rings in (("gradients", 4.5, 1), ("parameters", 4.06, 2)):
            between = bits / 8 * n / near * (n_hosts - 1) / n_hosts
            within = n_rings * 2 * n * (near - 1) / near
            assert found["legs"][leg]["host"] == pytest.approx(per_host * between, rel=0.02)
            assert found["legs"][leg]["rank"] == pytest.approx(between + within, rel=0.02)
        assert found["device"]["residual"] == pytest.approx(n / near, rel=0.02)
        assert found["device"]["replicas"] == pytest.approx(2 * n / near, rel=0.02)
        whole = ask("lossless", "int4", **how)  # for forward and backward
        between = 2 * 11.2 / 8 * n / near * (n_hosts - 1) / n_hosts
        assert whole["legs"]["parameters"]["host"] == pytest.approx(per_host * between, rel=0.02)
        assert whole["device"]["replicas"] == 0
    inside = ask("delta4", "int4", world_size=8, ranks_per_host=8)
    plain = ask(world_size=8, ranks_per_host=8)
    assert inside["legs"] | {"parameters": 0} == plain["legs"] | {"parameters": 0}
    assert inside["device"]["residual"] == inside["device"]["replicas"] == 0


# ---- what holds of all plans ----


def some_mesh(random):
    while True:
        t, c, p, e = (random.choice((1, 1, 2, 4)) for _ in range(4))
        d, per_host = random.choice((1, 2, 4, 8)), random.choice((1, 2, 4, 8))
        how = dict(
            n_tensor=t,
            n_context=c,
            n_pipeline=p,
            n_expert=e,
            world_size=t * c * d * p,
            ranks_per_host=per_host,
            n_experts=8,
            n_active=2,
            n_micro_batches=random.choice((1, 4, 8)),
            sharding=random.randrange(4),
            recompute=random.choice((0, 1, 2)),
            sequence=random.choice((0, 1, 2)) if t > 1 else 0,
        )
        try:
            return how, ask(**how)
        except lib.Error:
            continue


def test_what_holds_of_every_plan():
    """More ranks of a dimension never take more of what it splits; no byte between hosts is lost or invented;
    what goes to the host's memory leaves the device."""
    chance = random.Random(1)
    for _ in range(200):
        how, found = some_mesh(chance)
        n_hosts = how["world_size"] // how["ranks_per_host"]
        for name, leg in found["legs"].items():
            assert (
                0 <= leg["between"] <= leg["all"] * (1 + 1e-9)
                and leg["rank"] * how["world_size"] >= leg["all"] * 0.999
            )
            assert leg["between"] / max(1, n_hosts) <= leg["host"] * (1 + 1e-9) and leg["host"] <= leg[
                "between"
            ] * (1 + 1e-9)
            assert n_hosts > 1 or leg["between"] == 0, name
        doubled = dict(how, n_tensor=2 * how["n_tensor"], world_size=2 * how["world_size"])
        for wider, kinds in (
            (doubled, ("parameters", "gradients", "optimizer", "activations")),
            (dict(how, world_size=2 * how["world_size"]), ("parameters", "gradients", "optimizer")),
        ):
            try:
                other = ask(**wider)
            except lib.Error:
                continue
            if other["fullest"] != found["fullest"] or how["sharding"] == HYBRID:
                continue  # within a host, tensor parallelism takes ranks from those that shard
            for kind in kinds:
                assert other["device"][kind] <= found["device"][kind] * (1 + 1e-9), (how, kind)
        if how["sharding"] != NONE and (away := ask(**how, offload=7))["fullest"] == found["fullest"]:
            assert all(away["device"][kind] <= found["device"][kind] for kind in found["device"])
            for kind in ("parameters", "optimizer"):
                assert away["device"][kind] == 0
                assert (
                    away["host"][kind] == pytest.approx(found["device"][kind])
                    or away["fullest"] != found["fullest"]
                )
            assert away["legs"]["offload"]["rank"] > 0 and away["legs"]["offload"]["between"] == 0
            del away["legs"]["offload"], found["legs"]["offload"]
            assert away["legs"] == found["legs"]


def test_offload_moves_each_state_once():
    """As FSDP2's policy: each gather reads 4 bytes per owned value, gradients come once. ZeRO-Offload:
    gradients go, updated parameters come back."""
    n = ask(world_size=4)["n_params"] / 4
    for sharding, offload, times in ((FULL, 1, 3), (GRAD, 1, 2), (FULL, 2, 2), (FULL, 3, 3)):
        found = ask(world_size=4, sharding=sharding, offload=offload)
        assert found["legs"]["offload"]["rank"] == pytest.approx(4 * times * n)
        assert found["host"]["gradients"] == pytest.approx(4 * n) and found["device"]["optimizer"] == 0
    kept = ask(offload=4)
    layers = activations(n_layer=8) - activations(n_layer=4)
    assert kept["host"]["activations"] == pytest.approx(2 * layers)
    assert activations() - kept["device"]["activations"] == pytest.approx(2 * layers * 6 / 8)
    assert kept["legs"]["offload"]["rank"] == pytest.approx(2 * 2 * layers)


# ---- what is refused, and the command ----


def test_what_cannot_be_is_named():
    for numbers, words in (
        (
            dict(world_size=8, n_tensor=4, n_context=2, n_pipeline=2),
            "tensor 4 x context 2 x pipeline 2 are 16 ranks, but there are only 8",
        ),
        (
            dict(world_size=12, n_tensor=8),
            "are 8 ranks, which do not divide the 12 there are; allowed: 1, 2, 3, 4, 6, 12$",
        ),
        (dict(world_size=5040, n_tensor=11), "the 5040 there are; allowed: 1, 2, 3, .*, 28, ...$"),
        (dict(world_size=8, ranks_per_host=3), "ranks per host is 3, which does not divide the 8 ranks"),
        (dict(world_size=8, ranks_per_host=16), "ranks per host is 16, allowed: 1 to 8"),
        (
            dict(world_size=12, n_tensor=3),
            "tensor-parallel is 3, which does not divide the 8 heads; allowed with 12 ranks: 1, 2, 4$",
        ),
        (
            dict(world_size=16, n_tensor=8, n_tokens=4 * 127, sequence=1),
            "divide the 508 tokens of a rank's sequence; allowed with 16 ranks: 1, 2, 4$",
        ),
        (
            dict(world_size=4, n_tensor=4, n_kv_head=2),
            "tensor-parallel is 4, which does not divide the 2 heads of keys; allowed with 4 ranks: 1, 2$",
        ),
        (
            dict(world_size=8, n_tensor=8, n_ffn=1020),
            "does not divide the 1020 values of the feed-forward width; allowed with 8 ranks: 1, 2, 4$",
        ),
        (
            dict(world_size=6, n_context=3),
            "is 3, which does not divide the 128 tokens of a sequence; allowed with 6 ranks: 1, 2$",
        ),
        (dict(sequence=1), "sequence-parallel is given, but tensor-parallel is 1"),
        (dict(world_size=4, n_expert=2), "expert-parallel is 2, but the model has no experts"),
        (
            dict(world_size=6, n_expert=3, n_experts=8),
            "expert-parallel is 3, which does not divide the 8 experts; allowed with 6 ranks: 1, 2$",
        ),
        (
            dict(world_size=6, n_expert=4, n_experts=8),
            "expert-parallel is 4, which does not divide the 6 ranks of data",
        ),
        (dict(n_experts=4, n_active=5), "experts of a token is 5, allowed: 1 to 4"),
        (dict(world_size=24, ranks_per_host=8, n_pipeline=2), "a stage is 12 ranks and a host has 8"),
        (
            dict(world_size=3, n_pipeline=3),
            r"8 layers do not divide into 3 stages \(.*\); allowed: 1, 2, 4, 8$",
        ),
        (dict(n_stages_per_rank=2), "stages-per-rank is 2, but pipeline-parallel is 1"),
        (dict(world_size=2, n_pipeline=2, n_stages_per_rank=2), "stages-per-rank is 2, allowed with 1f1b: 1"),
        (
            dict(world_size=2, n_pipeline=2, schedule=2),
            "stages-per-rank is 1, allowed with interleaved: 2 or more",
        ),
        (
            dict(world_size=2, n_pipeline=2, n_stages_per_rank=2, schedule=2, n_micro_batches=3),
            "micro-batches is 3, allowed",
        ),
        (dict(offload=8), "offload is 8, allowed: 0 to 7"),
        (dict(sharding=NONE, offload=1), "which have to be sharded, but sharding is none"),
        (
            dict(world_size=2, n_context=2, keeps_scores=1),
            "attention keeps its scores, but context-parallel is 2",
        ),
        (dict(sparsity=0.5), "sparsity is 0.5, allowed: 0 with bf16"),
        (dict(block=63, world_size=2, n_pipeline=2, forward="int8"), "block"),
        (dict(forward="int2"), "forward is format 4, allowed: bf16, int8, int4"),
        (dict(n_micro_batches=0), "micro-batches is 0, allowed: 1 to 65536"),
    ):
        with pytest.raises(lib.Error, match=words):
            ask(**numbers)
    with pytest.raises(
        lib.Error, match="sharding is hybrid, where nothing of parameters is sent between hosts"
    ):
        ask("delta4", "int4", world_size=4, ranks_per_host=2, sharding=HYBRID)


def tagc(capsys, code, *words):
    assert main.main(["plan", *map(str, words)]) == code
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def test_the_command_names_what_is_wrong(capsys):
    for words, text in (
        (("--model", "lama-3-8b"), 'did you mean "llama-3-8b"?'),
        (
            ("--offload", "parameters,gradient"),
            '"parameters,gradient", allowed: parameters, optimizer, activations',
        ),
        (("--pipeline-schedule", "1f1b"), "--pipeline-schedule is given, but --pipeline-parallel is 1"),
        (
            ("--pipeline-parallel", 2, "--pipeline-values", "int8"),
            '"int8", allowed: two of bf16, int8 and int4',
        ),
        (("--experts-per-token", 2), "--experts-per-token is given, but the model has no experts"),
        (("--tensor-parallel", 2, "--tokens", 4096), "--tokens is not for a mesh"),
        (("--tensor-parallel", 2, "--codec-ns", 5), "--codec-ns is not for a mesh, of which nothing is"),
        (("--tensor-parallel", 2, "--token-values", "int8,int4"), "--token-values is given, but --expert"),
        (
            ("--experts", 8, "--expert-parallel", 2, "--token-values", "int8"),
            '--token-values is "int8", allowed',
        ),
        (("--model", "llama-3-8b", "--latency", "1s"), "--latency is not for a mesh"),
        (("--model", "llama-3-8b", "--host-link", "1kbit"), "--host-link is not for a mesh"),
        (("--tensor-parallel", 0), '"0", allowed: a whole number from 1 to 1024'),
        (("--pipeline-parallel", 2, "--pipeline-schedule", "dualpipe"), "gpipe|1f1b|interleaved|zero-bubble"),
        (("--gpus-per-host", 8, "--ranks-per-host", 8), "say the same thing twice"),
        (("--sequence-parallel=all",), '--sequence-parallel is "all", allowed: no, torch, megatron'),
        (
            ("--model", "llama-3-8b", "--tensor-parallel", 3, "--hosts", 3),
            "tensor-parallel is 3, which does not divide",
        ),
    ):
        assert text in tagc(capsys, 2, *words), words


def test_the_command_says_what_fits_and_what_is_sent(capsys):
    words = (
        "--model",
        "llama-3-70b",
        "--hosts",
        16,
        "--gpus-per-host",
        8,
        "--tensor-parallel",
        8,
        "--sequence-parallel",
        "--pipeline-parallel",
        4,
        "--micro-batches",
        16,
        "--recompute",
        "full",
        "--offload",
        "optimizer",
    )
    made = json.loads(tagc(capsys, 0, *words, "--json", "-"))
    rows, legs = {row["name"]: row for row in made["rows"]}, {leg["name"]: leg for leg in made["legs"]}
    assert made["bubble"] == pytest.approx(3 / 16) and made["mesh"]["data"] == 4
    assert legs["tensor parallel"]["between"] == 0  # within hosts
    whole, packed = legs["pipeline parallel"], legs["pipeline parallel, compress_stage(), int8 and int4"]
    n = 2048 * 8192 // 8
    assert packed["rank"] / whole["rank"] == pytest.approx((message(n, 8, 64) + message(n, 4, 64)) / (4 * n))
    for row in rows.values():
        assert row["device_all"] == pytest.approx(sum(row["device"].values()))
        assert row["fits"] == [size for size in (24, 40, 80) if row["device_all"] <= size * 1e9]
        assert row["device"]["optimizer"] == 0 < row["host"]["optimizer"]
    dense, deltas = (
        rows["FSDP2 in bf16, reshard_after_forward=False"],
        rows['tagc, 4 bits, parameters="delta4"'],
    )
    assert deltas["device_all"] > dense["device_all"] and dense["device"]["residual"] == 0
    text = tagc(capsys, 0, *words)
    assert "bubbles take 15.8 % of a step" in text and "memory of the host" in text and "fits in" in text
    within = json.loads(
        tagc(capsys, 0, "--params", "1b", "--hosts", 2, "--pipeline-parallel", 2, "--json", "-")
    )
    assert [
        row["name"] for row in within["rows"] if row["compresses"]
    ] == []  # one data rank: nothing to exchange


NAMED_SIZES = ("50m", "125m", "350m", "1b", "3b", "7b", "8b", "13b", "30b", "70b", "175b", "405b")


def test_sizes_become_gpts():
    """Of about so many parameters, which tensor parallelism and pipelines of the usual degrees divide."""
    between = [f"{5e7 * 1.3**i:.0f}" for i in range(38)]  # to 800 B
    for size in (*NAMED_SIZES, *between):
        asked = float(size.replace("m", "e6").replace("b", "e9"))
        for tensor, pipeline in ((1, 1), (1, 2), (2, 4), (4, 8), (8, 1), (8, 8)):
            words = ("--params", size, "--hosts", 8, "--gpus-per-host", 8)
            made = planned(*words, "--tensor-parallel", tensor, "--pipeline-parallel", pipeline)
            assert made["n_params"] == pytest.approx(asked, rel=0.06), size
            assert (made["mesh"]["tensor"], made["mesh"]["pipeline"]) == (tensor, pipeline)


def test_sizes_become_the_gpts_that_have_been_built():
    """Table 2.1 of 2005.14165, table 2 of 2302.13971."""
    for size, layers, width in (
        (2.7e9, 32, 2560),
        (6.7e9, 32, 4096),
        (7e9, 32, 4096),
        (13e9, 40, 5120),
        (65e9, 80, 8192),
        (175e9, 96, 12288),
    ):
        assert plan_parts.shape_of(size) == (layers, width)


def test_the_guide_shows_what_its_command_prints(capsys):
    """Line by line, in the order in which the command prints them."""
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs/guide/does-it-pay.md").read_text()
    page = page[page.index("## On a mesh") : page.index("## Draw")]
    command, *blocks, of_tokens, tokens = re.findall(r"^```\n(.*?)^```$", page, re.S | re.M)
    words = command.split()[4:]
    elsewhere = re.search(r"`--hosts (\d+) --gpus-per-host (\d+)`", page)
    other = list(words)
    other[other.index("--hosts") + 1], other[other.index("--gpus-per-host") + 1] = elsewhere.groups()
    assert len(blocks) == 2 and command.startswith("python -m tagc plan ")
    for block, given in zip([*blocks, tokens], (words, other, of_tokens.split()[4:])):
        printed = iter(line.rstrip() for line in tagc(capsys, 0, *given).splitlines())
        for line in block.splitlines():
            assert line in printed, f"not printed there: {line}"
