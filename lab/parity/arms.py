"""What is compared, each arm with its source. An arm is a way to run: "gloo" arms are W processes under DDP
or FSDP2 with torch's own hooks or tagc's; "simulated" ones are one process with a peer (peers/) that turns
the gradients of all ranks into a step."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Arm:
    name: str
    about: str
    source: str
    kind: str  # "gloo" or "simulated"
    wrap: str = "ddp"  # gloo: "ddp", "fsdp2", or "plain": each rank is a site of LocalSteps
    # gloo: {"bf16": True}, {"powersgd": rank}, {"tagc": options of compress()} or {"local": LocalSteps'}
    hook: dict = dataclasses.field(default_factory=dict)
    peer: str = ""  # simulated: a class of peers/, "module.Class"
    options: dict = dataclasses.field(default_factory=dict)  # of the peer; "warmup": a share of the steps
    beta1: float = 0.9
    beta2: float = 0.0  # 0: the setting's
    groups: bool = False  # tagc: the optimizer gets handle.param_groups()
    adapts: bool = False  # tagc: it gets the optimizer
    is_baseline: bool = False  # a dense arm, of which the best one is what others are held against


def _tagc(name, about, wrap="ddp", groups=False, adapts=False, **options):
    return Arm(name, about, "this repository", "gloo", wrap, {"tagc": options}, groups=groups, adapts=adapts)


def _local(name, about, **options):
    options = {"every": 30, "outer_lr": 0.7, "outer_momentum": 0.9, **options}
    return Arm(name, f"LocalSteps every 30, {about}", "this repository", "gloo", "plain", {"local": options})


def _powersgd(rank):
    return Arm(
        f"powersgd-{rank}",
        f"PowerSGD, rank {rank}, error feedback and warm start",
        "Vogels et al., 1905.13727; torch's powerSGD_hook under DDP",
        "gloo",
        hook={"powersgd": rank},
    )


def _peer(name, about, source, peer, **options):
    return Arm(name, about, source, "simulated", peer=peer, options=options)


ONE_BIT, DEMO = "Tang et al., 2102.02888", "Peng et al., 2411.19870"
LOCO = "Xie et al., 2407.04480"

ALL = [
    Arm("dense", "AdamW, gradients in fp32", "torch's DDP", "gloo", is_baseline=True),
    _tagc("tagc", "tagc.compress(model), one line, DDP"),
    _tagc("tagc-optimizer", "tagc.compress(model, optimizer), one line, DDP", adapts=True),
    _powersgd(4),
    _tagc("tagc-int2", "every value in 2 bits, one line, DDP", sparsity=0, values="int2", mild="int2"),
    _peer("demo-32", "DeMo, 32 coefficients a chunk", DEMO, "demo.DeMo", k=32),
    _peer("onebit", "1-bit Adam, a fifth of the run dense", ONE_BIT, "onebit.OneBitAdam", warmup=0.2),
    _peer(
        "sparseloco",
        "SparseLoCo, 64 of 4,096 values in 2 bits, every 30 steps",
        "Sarfi et al., 2508.15706",
        "local.Local",
        every=30,
        sparse=True,
    ),
    _tagc("tagc-groups", "tagc.compress(model) and param_groups(), DDP", groups=True),
    _peer(
        "blocks-4", "4 bits a value in blocks, error feedback on both ways", LOCO, "blocks.Blocks", n_bits=4
    ),
    _tagc(
        "tagc-paper",
        "TAGC as published: 10x sketch of 1.25 %, true OR of a 1-bit index, DDP",
        exchange="sketch",
        sparsity=0.9875,
    ),
    Arm(
        "dense-b1=0", "AdamW without a first moment, fp32", "torch's DDP", "gloo", beta1=0.0, is_baseline=True
    ),
    Arm(
        "dense-b1=0.5",
        "AdamW with a short first moment, fp32",
        "torch's DDP",
        "gloo",
        beta1=0.5,
        is_baseline=True,
    ),
    Arm(
        "dense-b2=0.999",
        "AdamW with a longer second moment, fp32",
        "torch's DDP",
        "gloo",
        beta2=0.999,
        is_baseline=True,
    ),
    _peer(
        "diloco",
        "DiLoCo, every 30 steps, Nesterov outside",
        "Douillard et al., 2311.08105",
        "local.Local",
        every=30,
    ),
    _tagc(
        "tagc-all-4",
        "every value in 2 bits, parameters as 4-bit deltas, FSDP2",
        "fsdp2",
        sparsity=0,
        values="int2",
        mild="int2",
        parameters="delta4",
    ),
    _tagc(
        "tagc-all-2",
        "tagc.compress(model) with param_groups(), parameters as 2-bit deltas, FSDP2",
        "fsdp2",
        groups=True,
        parameters="delta2",
    ),
    Arm(
        "bf16",
        "AdamW, gradients in bf16 on the wire",
        "torch's bf16_compress_hook under DDP",
        "gloo",
        hook={"bf16": True},
        is_baseline=True,
    ),
    _powersgd(1),
    _powersgd(16),
    _peer("demo-8", "DeMo, 8 coefficients a chunk", DEMO, "demo.DeMo", k=8),
    _tagc("tagc-80", "80 % zero, 2 bits, and param_groups(), DDP", groups=True, sparsity=0.8),
    _peer(
        "zeroone",
        "0/1 Adam's idea: as 1-bit Adam, the second moment renewed ever more rarely",
        "Lu et al., 2202.06009",
        "onebit.OneBitAdam",
        warmup=0.1,
        refresh=1.3,
    ),
    _peer(
        "blocks-8", "8 bits a value in blocks, error feedback on both ways", LOCO, "blocks.Blocks", n_bits=8
    ),
    _tagc(
        "tagc-all-95",
        "tagc.compress(model) with param_groups(), parameters as 4-bit deltas, FSDP2",
        "fsdp2",
        groups=True,
        parameters="delta4",
    ),
    _tagc(
        "tagc-all-optimizer",
        "tagc.compress(model, optimizer), parameters as 4-bit deltas, FSDP2",
        "fsdp2",
        adapts=True,
        parameters="delta4",
    ),
    _powersgd(2),
    _powersgd(8),
    _powersgd(32),
    _local("local-4", "DiLoCo's outer step, every value in 4 bits"),
    _local("local-95", "the same, 95 % zero, 2 bits", sparsity=0.95, values="int2"),
    _local("local-99", "the same, 99 % zero, 2 bits", sparsity=0.99, values="int2"),
]
BY_NAME = {arm.name: arm for arm in ALL}
FINALISTS = (
    "dense",
    "tagc-optimizer",
    "tagc",
    "powersgd-4",
    "demo-32",
    "onebit",
    "tagc-int2",
    "tagc-groups",
    "tagc-all-4",
    "sparseloco",
    "dense-b1=0",
)
LONG = (
    "dense",
    "tagc-optimizer",
    "tagc",
    "blocks-4",
    "powersgd-4",
    "demo-32",
    "dense-b1=0",
    "dense-b1=0.5",
    "sparseloco",
    "diloco",
    "tagc-groups",
    "tagc-all-95",
    "tagc-int2",
    "bf16",
    "onebit",
)
UNTIED = ("dense", "bf16", "tagc-optimizer", "tagc", "tagc-all-95", "blocks-4", "dense-b1=0.5")
# of which the lab has the time of a step, or a formula: lab/studies/wall_clock.py
CLUSTER = ("bf16", "tagc-all-optimizer", "tagc-optimizer", "powersgd-1", "blocks-4", "demo-32", "tagc")
PEERS = (
    "dense",
    "diloco",
    "sparseloco",
    "local-4",
    "local-95",
    "local-99",
    "powersgd-1",
    "powersgd-4",
    "blocks-4",
    "demo-32",
    "tagc",
    "tagc-optimizer",
)
NO_BIAS = (
    "dense",
    "tagc-all-optimizer",
    "tagc-all-95",
    "tagc-optimizer",
    "bf16",
    "dense-b1=0.5",
    "dense-b2=0.999",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One table: a model, how long it is trained, and which arms, seeds and rates are tried."""

    name: str
    n_layer: int
    n_embd: int
    n_head: int
    n_positions: int
    n_vocabulary: int
    batch_size: int  # sequences of a rank and step
    steps: int
    arms: tuple
    seeds: tuple = (1, 2, 3)
    # neighbours of first_rate are tried, on the first seed
    rates: tuple = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    first_rate: float = 2e-3
    n_ranks: int = 2
    n_hosts: int = 0  # of as many ranks each, for tagc; 0: each rank is a host
    warmup: int = 30
    eval_every: int = 60
    eval_tokens: int = 16384
    final_tokens: int = 131072
    save_every: int = 0  # steps between checkpoints of a run; 0: none, a run that was interrupted begins anew
    tied: bool = True  # the head's matrix is the token embedding
    bias: bool = True  # of linear layers and norms
    autocast: bool = False  # products in bf16, weights, gradients and evaluations in fp32
    clip: float = 1.0
    weight_decay: float = 0.1
    beta2: float = 0.99

    def rate(self, step, peak):
        """Rises over `warmup` steps, stays, and falls to a twentieth over the last fifth of the run."""
        falling = self.steps // 5
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        if step < self.steps - falling:
            return peak
        return peak * (1 - 0.95 * (step - (self.steps - falling) + 1) / falling)


TINY = Setting(
    "tiny",
    n_layer=3,
    n_embd=64,
    n_head=4,
    n_positions=64,
    n_vocabulary=1024,
    batch_size=8,
    steps=240,
    arms=tuple(name for name, arm in BY_NAME.items() if "local" not in arm.hook),
    first_rate=4e-3,
    warmup=20,
    eval_every=30,
    eval_tokens=4096,
    final_tokens=32768,
)
TINY_LONG = dataclasses.replace(
    TINY,
    name="tiny-long",
    steps=2000,
    arms=LONG,
    first_rate=8e-3,
    warmup=200,
    eval_every=100,
    eval_tokens=8192,
    final_tokens=65536,
)
TINY_UNTIED = dataclasses.replace(TINY_LONG, name="tiny-untied", arms=UNTIED, first_rate=4e-3, tied=False)
# 2 hosts of 2 ranks, the batch of tiny-long, and its best rate
OF_CLUSTER = dataclasses.replace(
    TINY_LONG,
    name="cluster",
    arms=CLUSTER,
    rates=(4e-3,),
    first_rate=4e-3,
    batch_size=4,
    n_ranks=4,
    n_hosts=2,
)
TINY_NO_BIAS = dataclasses.replace(TINY_UNTIED, name="tiny-no-bias", arms=NO_BIAS, bias=False)
OF_3M = Setting(
    "3m",
    n_layer=4,
    n_embd=192,
    n_head=6,
    n_positions=128,
    n_vocabulary=4096,
    batch_size=16,
    steps=6600,
    arms=FINALISTS,
    seeds=(1,),
    rates=(1e-3, 2e-3),
    warmup=200,
    eval_every=300,
    eval_tokens=32768,
    final_tokens=262144,
    save_every=300,
    autocast=True,
)
OF_10M = dataclasses.replace(
    OF_3M,
    name="10m",
    n_layer=7,
    n_embd=320,
    n_head=8,
    steps=600,
    arms=FINALISTS[:5],
    rates=(1e-3,),
    first_rate=1e-3,
    warmup=60,
    eval_every=150,
    save_every=150,
)
# the shape of the lab's model, on 2 hosts of 2 ranks: FSDP2 with every leg compressed, beside dense
OF_CURVE = dataclasses.replace(
    OF_10M,
    name="curve",
    n_layer=6,
    n_embd=384,
    n_head=6,
    batch_size=8,
    steps=750,
    arms=("dense", "tagc-all-optimizer"),
    n_ranks=4,
    n_hosts=2,
    warmup=75,
    eval_every=25,
    save_every=25,
    autocast=False,
)
# which rate `curve` gets: the one with which dense ends lowest
OF_CURVE_RATE = dataclasses.replace(
    OF_CURVE,
    name="curve-rate",
    batch_size=16,
    steps=120,
    arms=("dense",),
    rates=(1e-3, 2e-3),
    first_rate=2e-3,
    n_ranks=2,
    n_hosts=0,
    warmup=40,
    eval_every=20,
    final_tokens=65536,
    save_every=0,
)
# Peers in their own regime: those that exchange every 30 steps make 1,000 exchanges, as they do in no other
# setting here. Two replicas, a warm-up of 7 % and beta2 are those of a public recipe of DiLoCo at 180 M
# (diloco_180m.toml in facebookresearch/MuLoCo).
OF_PEERS = dataclasses.replace(
    TINY_LONG,
    name="peers",
    n_embd=80,
    batch_size=4,
    steps=30000,
    arms=PEERS,
    seeds=(1,),
    rates=(5e-4, 1e-3, 2e-3, 4e-3),
    first_rate=1e-3,
    warmup=2100,
    eval_every=1500,
    save_every=1500,
)
SETTINGS = {
    one.name: one
    for one in (
        TINY,
        TINY_LONG,
        OF_CLUSTER,
        TINY_UNTIED,
        TINY_NO_BIAS,
        OF_3M,
        OF_10M,
        OF_CURVE_RATE,
        OF_CURVE,
        OF_PEERS,
    )
}
