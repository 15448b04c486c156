"""Every python snippet of PAGES runs on two ranks as it stands there, also as a diff and in README's table of
calls; every relative link and every path of every page leads somewhere, and README stays short.

What a snippet takes from its reader's program comes from PROVIDED, or a function here of the same name: a
snippet that begins to use `sampler` needs a `@provides def sampler(take)`. take("model") gives what another
one makes, once per snippet. take.text is the snippet. What must hold after it is looked at by
`@after("words of the snippet")`."""

import ast
import builtins
import contextlib
import functools
import io
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
import oracles
import ranks
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/guide/pytorch.md",
    "docs/guide/trainers.md",
    "docs/guide/sites.md",
    "docs/guide/elastic.md",
    "docs/guide/compiled.md",
    "docs/guide/pipeline.md",
    "docs/guide/collectives.md",
    "docs/guide/local.md",
    "docs/guide/torchft.md",
    "docs/guide/weights.md",
)
PAGES = tuple(page for page in PAGES if (ROOT / page).exists())  # an annex may be deleted with its page
# test_integrations.py runs theirs, in processes that have them anyway
SLOW_TO_IMPORT = ("transformers", "accelerate", "lightning")


class Snippet(NamedTuple):
    page: str
    line: int  # of its first line
    text: str

    @property
    def library(self):
        """Of SLOW_TO_IMPORT, or torchft or trl, which test_torchft.py and test_trl.py run; or None."""
        return (
            "torchft"
            if "from torchft" in self.text
            else "trl"
            if "DPOTrainer" in self.text
            else next((name for name in SLOW_TO_IMPORT if f"tagc.integrations.{name}" in self.text), None)
        )


def snippets_of(page):
    """Those in fences; of a diff what it makes."""
    text = (ROOT / page).read_text()
    snippets = []
    for found in re.finditer(r"^```(python|diff)\n(.*?)^```$", text, re.M | re.S):
        lines = found[2].splitlines(keepends=True)
        if found[1] == "diff":
            lines = [line[2:] or "\n" for line in lines if not line.startswith("-")]
        snippets.append(Snippet(page, text[: found.start(2)].count("\n") + 1, "".join(lines)))
    return snippets


def calls_of_readme():
    """The code of each row of the table of calls."""
    text = (ROOT / "README.md").read_text()
    first = text.index("| cluster | code |")
    table = text[first : text.index("\n\n", first)]
    line = text[:first].count("\n") + 1
    return [
        Snippet("README.md", line + i, "\n".join(re.findall(r"`([^`]*)`", row.split("|")[2])) + "\n")
        for i, row in enumerate(table.split("\n"))
        if i >= 2
    ]


# Each has other calls.
PLANS = (
    "--hosts 4 --codec-ns 1 --link 1gbit",
    "--hosts 4 --codec-ns 1.5 --link 25gbit",
    "--hosts 2 --codec-ns 0 --codec host --link 1gbit",
    "--hosts 2 --gpus-per-host 8 --codec-ns 0 --link 10gbit",
)


def call_of_plan(words):
    """The code that `python -m tagc plan` has for its answer, on as many hosts and GPUs as this test has."""
    from tagc.commands import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main.main(["plan", *words.split(), "--json", "-"]) == 0
    (link,) = json.loads(printed.getvalue())["links"]
    code = "\n".join(link["code"]).replace("(2, 8)", "(2, 1)")
    return Snippet(f"plan {words}", 1, f"{code}\n")


SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)] + calls_of_readme()


def needed_names(tree):
    """Those that are used before the snippet makes them, in order."""
    made, needed = set(dir(builtins)), []
    for statement in tree.body:
        nodes = list(ast.walk(statement))
        inner = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        if isinstance(statement, (ast.For, ast.With, ast.FunctionDef, ast.ClassDef)):
            made |= inner
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            made.add(statement.name)
        made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        made |= {
            name.id
            for node in nodes
            if isinstance(node, ast.comprehension)
            for name in ast.walk(node.target)
            if isinstance(name, ast.Name)
        }
        for node in nodes:
            if (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Load)
                and node.id not in made
                and node.id not in needed
            ):
                needed.append(node.id)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                made |= {name.asname or name.name.split(".")[0] for name in node.names}
        made |= inner
    return needed


# ---- what readers' programs have ----

PROVIDED, AFTER = {}, []


def provides(make):
    PROVIDED[make.__name__] = make
    return make


def after(words):
    return lambda check: AFTER.append((words, check)) or check


class Take:
    """What a snippet finds in its surroundings."""

    def __init__(self, text, rank, world_size, folder):
        self.text, self.rank, self.world_size, self.folder = text, rank, world_size, folder
        self._made = {}

    def __call__(self, name):
        if name not in self._made:
            if name not in PROVIDED:
                raise NameError(f"name {name!r} is not defined")
            self._made[name] = PROVIDED[name](self)
        return self._made[name]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
            for _ in range(3)
        )
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def backward(model, rank, step):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    (model(x) - x.roll(1, 1)).square().mean().backward()


@provides
def init_device_mesh(take):
    """On processors, whatever the device is called."""
    from torch.distributed.device_mesh import init_device_mesh

    return lambda device, *given, **more: init_device_mesh("cpu", *given, **more)


@provides
def ExpertParallel(take):
    from torch.distributed.tensor.parallel import ParallelStyle

    class Style(ParallelStyle):
        def _apply(self, module, device_mesh):
            module.register_forward_hook(lambda _, inputs, output: self.move(output, None, None, device_mesh))
            return module

        def move(self, tokens, received, sent, mesh):
            return all_to_all_single_autograd(tokens, received, sent, mesh.get_group())

    return Style


@provides
def model(take):
    """Not wrapped yet where the snippet does that."""
    if "accelerate" in take.text:
        return Model()
    if "TagcCallback" in take.text:
        return tiny_gpt2()
    torch.manual_seed(7)
    made = Model()
    if "lora" in take.text:
        made.head.lora_A, made.head.lora_B = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        made.head.forward = types.MethodType(
            lambda self, x: nn.Linear.forward(self, x) + self.lora_B(self.lora_A(x)), made.head
        )
        return made
    if not re.search(
        r"fully_shard\(|DistributedDataParallel\(|LocalSteps\(|Collectives\(|data_parallel\(", take.text
    ):
        for layer in made.layers:
            take("fully_shard")(layer)
        take("fully_shard")(made)
    return made


@provides
def peft_model(take):
    """With an adapter, by PEFT's names."""
    torch.manual_seed(7)
    made = nn.ModuleDict({"q_proj": nn.Module()})
    made["q_proj"].lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
    made["q_proj"].lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})
    return made


@provides
def handle(take):
    made = take("tagc").compress(take("model"), verbose=False)
    backward(take("model"), take.rank, 0)
    return made


@provides
def writer(take):
    """As TensorBoard's."""
    take.logged = logged = []

    def add_scalar(tag, value, step):
        logged.append((tag, float(value), int(step)))

    return types.SimpleNamespace(add_scalar=add_scalar)


@provides
def wandb(take):
    def log(values):
        assert values and all(
            isinstance(key, str) and isinstance(value, (int, float)) for key, value in values.items()
        ), values

    return types.SimpleNamespace(log=log)


IMPORTED = {
    "DistributedDataParallel": "torch.nn.parallel:DistributedDataParallel",
    "PipelineStage": "torch.distributed.pipelining:PipelineStage",
    "Schedule1F1B": "torch.distributed.pipelining:Schedule1F1B",
    "dcp": "torch.distributed.checkpoint",
    "dist": "torch.distributed",
    "fully_shard": "torch.distributed.fsdp:fully_shard",
    "nn": "torch.nn",
    "parallelize_module": "torch.distributed.tensor.parallel:parallelize_module",
    "tagc": "tagc.torch",
    "torch": "torch",
}
PROVIDED |= {name: lambda take, where=where: pkgutil.resolve_name(where) for name, where in IMPORTED.items()}
PROVIDED |= dict.fromkeys(("n_hosts", "n_sites", "n_stages"), lambda take: take.world_size)
PROVIDED |= dict.fromkeys(("ranks_per_host", "gpus_per_host", "ranks_per_site"), lambda take: 1)
PROVIDED |= dict.fromkeys(
    ("mesh", "ep_mesh"), lambda take: take("init_device_mesh")("cpu", (take.world_size,))
)
PROVIDED |= {
    "accelerator": lambda take: pkgutil.resolve_name("accelerate:Accelerator")(cpu=True),
    "batches": lambda take: torch.randn(31, 4, 64, generator=torch.Generator().manual_seed(take.rank)),
    "dataset": lambda take: [{"input_ids": row, "labels": row} for row in rows_of_tokens()],
    "device": lambda take: torch.device("cpu"),
    "experts": lambda take: nn.Identity(),
    "folder": lambda take: str(take.folder / "folder"),
    "i": lambda take: take.rank,
    "layers": lambda take: nn.Linear(64, 64),
    "loss_fn": lambda take: nn.functional.mse_loss,
    "lr": lambda take: 1e-3,
    "optimizer": lambda take: torch.optim.AdamW(take("model").parameters(), lr=1e-3),
    "path": lambda take: str(take.folder / "checkpoint"),
    "scheduler": lambda take: torch.optim.lr_scheduler.CosineAnnealingLR(take("optimizer"), 10),
    "stage": lambda take: take("PipelineStage")(*map(take, ("layers", "i", "n_stages", "device"))),
    "trainer": lambda take: take("Trainer")(*map(take, ("model", "args")), train_dataset=take("dataset")),
}


# ---- loops that others own ----


def rows_of_tokens():
    return torch.randint(96, (64, 16), generator=torch.Generator().manual_seed(1))


def environment(rank, n):
    """Of Lightning: the ranks of this test, in place of torchrun's."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Environment(LightningEnvironment):
        creates_processes_externally = property(lambda self: True)
        world_size = lambda self: n
        global_rank = local_rank = lambda self: rank
        set_world_size = set_global_rank = lambda self, n: None

    return Environment()


def tiny_gpt2():
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_positions=16, n_embd=64, n_layer=1, n_head=2)
    )


@provides
def args(take):
    import transformers

    return transformers.TrainingArguments(
        output_dir=str(take.folder / "trainer"),
        per_device_train_batch_size=4,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )


@provides
def Trainer(take):
    if "transformers" in take.text:
        import transformers

        return transformers.Trainer
    import lightning.pytorch as lightning

    return functools.partial(
        lightning.Trainer,
        accelerator="cpu",
        devices=take.world_size,
        plugins=[environment(take.rank, take.world_size)],
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


@provides
def module(take):
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, i):
            return self.model(batch).square().mean()

        def train_dataloader(self):
            return torch.utils.data.DataLoader(
                torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(take.rank)), batch_size=None
            )

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module()


@provides
def config(take):
    """As torchtitan's: a spec, and build(), which makes a trainer of it."""
    import dataclasses

    @dataclasses.dataclass
    class Spec:
        parallelize_fn: object
        post_optimizer_build_fn: object = None

    def parallelize(model):
        for layer in model.layers:
            take("fully_shard")(layer)
        return take("fully_shard")(model)

    def build():
        model = made.model_spec.parallelize_fn(Model())
        optimizers = types.SimpleNamespace(optimizers=[torch.optim.AdamW(model.parameters())])
        made.model_spec.post_optimizer_build_fn(optimizers, [model])
        return types.SimpleNamespace(
            checkpointer=types.SimpleNamespace(states={}), train=lambda: backward(model, take.rank, 0)
        )

    made = types.SimpleNamespace(model_spec=Spec(parallelize), build=build)
    return made


def stand_in_for_torchtitan():
    """Makes modules for `from torchtitan... import data_parallel`, whatever is installed."""
    sys.path.append(str(ROOT / "tests" / "python" / "compiled"))
    import compiled_runs

    path = ""
    for name in "torchtitan.experiments.graph_trainer.simple_fsdp".split("."):
        path += f".{name}" if path else name
        sys.modules[path] = types.ModuleType(path)
    sys.modules[path].data_parallel = compiled_runs.parallel_as_torchtitan


# ---- what holds afterwards ----


@after("compress(model")
def trains(take, names):
    """The model that was given to compress() trains, and sends little."""
    for step in range(2):
        backward(names["model"], take.rank, step)
    if "handle" in names:
        stats = names["handle"].stats()
        most = 24 if '"lora" in name' in take.text else 12  # an all-reduce sends everything twice
        assert stats["n_units"] >= 1 and 0 < stats["bits_per_param"] < most, stats


@after("torch.compile(model")
def compiles(take, names):
    """As one graph; what inductor makes of it, test_compiled_long.py looks at."""
    torch.compile(names["model"], fullgraph=True, backend="eager")(torch.zeros(8, 64))


@after('"lora" in name')
def exchanges_adapters_alone(take, names):
    """ranks_per_host is 1 here, so that each rank has them whole."""
    assert names["handle"].stats()["n_elems"] == 2 * 64 * 64


@after("PipelineStage(")
def pipes(take, names):
    x = torch.ones(16, 64)
    names["schedule"].step(*((x,) if take.rank == 0 else ()), **({"target": x} if take.rank else {}))
    assert names["handle"].stats()["steps"] == 1 and names["handle"].stats()["bytes_sent"] > 0


@after("comm.all_reduce(p.grad")
def averages_gradients(take, names):
    """All ranks have the same model after many steps, and gradients have travelled in about 5 bits, twice."""
    oracles.check_alike(nn.utils.parameters_to_vector(names["model"].parameters()), "the model")
    stats = names["comm"].stats()
    assert stats["step"] == 31 and 8 < stats["bits_per_param"] < 14, stats
    names["comm"].close()


@after('compress(model, sparsity=0, values="int8")')
def sends_eight_bits(take, names):
    for step in range(2):
        backward(names["model"], take.rank, step)
    stats = names["handle"].stats()
    assert 7 < stats["bits_per_param"] < 10, stats


@after("turned, works = Turned(comm)")
def turns_gradients(take, names):
    oracles.check_alike(nn.utils.parameters_to_vector(names["model"].parameters()), "the model")
    bases = [one.bases is not None for one in names["turned"]._matrices.values()]
    assert len(bases) > 3 and all(bases), bases
    names["comm"].close()


@after('handle.save(f"{path}.tagc")')
def each_rank_has_saved(take, names):
    folder = pathlib.Path(f"{take('path')}.tagc")
    dist.barrier()
    assert sorted(file.name for file in folder.iterdir()) == ["rank0.pt", "rank1.pt"]


@after("comm.at(path)")
def has_what_was_saved(take, names):
    about = names["comm"].state_dict()[f"rank{take.rank}"]
    assert len(about["residuals"]) == 7, about["residuals"].keys()
    names["comm"].close()


@after("LocalSteps(")
def takes_local_steps(take, names):
    """What the snippet does not do itself is done here: 30 steps, and whatever is exchanged comes to the same
    on both."""
    handle = names["handle"]
    for step in range(handle.n_steps, 30):
        names["optimizer"].zero_grad()
        backward(names["model"], take.rank, step)
        names["optimizer"].step()
    handle.synchronize()
    assert handle.n_exchanges >= 2 and 0 < handle.stats()["bits_per_param"] < 12, handle.stats()
    values = torch.cat(
        [
            p.detach().full_tensor().flatten() if hasattr(p, "full_tensor") else p.detach().flatten()
            for p in names["model"].parameters()
        ]
    )
    everyone = [torch.empty_like(values) for _ in range(take.world_size)]
    dist.all_gather(everyone, values)
    assert torch.equal(everyone[0], everyone[1])
    handle.close()


@after("param_groups")
def has_all_parameters(take, names):
    own = {id(parameter) for group in names["optimizer"].param_groups for parameter in group["params"]}
    assert own == {id(parameter) for parameter in take("model").parameters()}
    assert {group["betas"][0] for group in names["optimizer"].param_groups} == {0.5, 0.9}


@after("add_scalar")
def has_logged(take, names):
    assert ("tagc/step", 1.0, 1) in take.logged and any(
        tag.startswith("tagc/time_s/") for tag, _, _ in take.logged
    )


@after("TagcCallback")
def callback_has_run(take, names):
    callbacks = (
        names["trainer"].callbacks
        if "lightning" in take.text
        else names["trainer"].callback_handler.callbacks
    )
    (callback,) = [one for one in callbacks if type(one).__name__ == "TagcCallback"]
    assert callback.handle.n_steps == 2


@after("checkpointed(")
def is_in_checkpoints(take, names):
    (handle,) = names["spec"].handles
    assert handle.n_steps == 1


@after("compress(accelerator")
def accelerated(take, names):
    x = torch.randn(8, 64)
    names["accelerator"].backward(names["model"](x).square().mean())
    names["optimizer"].step()
    names["scheduler"].step()
    assert names["handle"].n_steps == 1


# ---- running them ----


def run_one(snippet, rank, world_size, folder):
    take = Take(snippet.text, rank, world_size, folder)
    where = f"{snippet.page}, line {snippet.line}"
    tree = ast.parse("\n" * (snippet.line - 1) + snippet.text, filename=snippet.page)
    try:
        names = {name: take(name) for name in needed_names(tree)}
    except NameError as failure:
        raise AssertionError(
            f"{where}: {failure}: the snippet takes it from its reader's program. Write it there, or a "
            "function of that name "
            "with @provides into tests/python/test_docs.py"
        ) from None
    if "from torchtitan.experiments" in snippet.text:
        stand_in_for_torchtitan()
    exec(compile(tree, str(ROOT / snippet.page), "exec"), names)
    for words, check in AFTER:
        if words in snippet.text:
            check(take, names)


def run_all(rank, world_size, snippets):
    """The failure of each, or None. One that fails on one rank alone leaves the others waiting, and then all
    of them fail."""
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TOKENIZERS_PARALLELISM": "false",
    }
    warnings.simplefilter("ignore")
    temporary = tempfile.TemporaryDirectory() if rank == 0 else None
    names = [temporary.name if rank == 0 else None]
    dist.broadcast_object_list(names)
    failures = []
    for i, snippet in enumerate(snippets):
        failure = None
        folder = pathlib.Path(names[0]) / str(i)
        folder.mkdir(exist_ok=True)
        os.chdir(folder)  # where snippets write files of relative names
        try:
            run_one(snippet, rank, world_size, folder)
        except Exception:
            failure = traceback.format_exc()
        os.chdir(ROOT)
        failures.append(failure)
        dist.barrier()
    return failures


def run_recipes(rank, world_size, *libraries):
    """For test_integrations.py."""
    recipes = [snippet for snippet in SNIPPETS if snippet.library in libraries]
    assert {recipe.library for recipe in recipes} == set(libraries)
    assert not (failures := [failure for failure in run_all(rank, world_size, recipes) if failure]), (
        "\n".join(failures)
    )


HERE = [snippet for snippet in SNIPPETS if snippet.library is None]


@pytest.fixture(scope="module")
def failures():
    snippets = [*HERE, *map(call_of_plan, PLANS)]
    each = ranks.run(run_all, 2, snippets)
    return {snippet: next(filter(None, failures), None) for snippet, failures in zip(snippets, zip(*each))}


@pytest.mark.parametrize("snippet", HERE, ids=lambda snippet: f"{snippet.page}:{snippet.line}")
def test_snippet(snippet, failures):
    assert failures[snippet] is None, f"{snippet.text}\n{failures[snippet]}"


def test_code_of_plan(failures):
    codes = list(map(call_of_plan, PLANS))
    assert len({code.text for code in codes}) == len(PLANS), codes
    for code in codes:
        assert failures[code] is None, f"{code.page}:\n{code.text}\n{failures[code]}"


def test_all_are_found():
    """A fence that is written in another way would not be looked at."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert (
            len(snippets_of(page))
            == len(re.findall(r"^\s*(```|~~~)+[ \t]*(?:python|py|Python|diff)\b", text, re.M))
            > 0
        ), page
    assert len(calls_of_readme()) == 7 and all("tagc" in call.text for call in calls_of_readme())


# The second one is to be read in ten minutes, at 200 words a minute.
MOST_WORDS = {"README.md": 900, "docs/guide/weights.md": 2000}


def n_words(text):
    """Of what a reader sees: with code, and without the targets of links."""
    seen = re.sub(r"\]\([^)]*\)", "]", text).replace("<br>", " ")
    return sum(any(map(str.isalnum, word)) for word in seen.split())


@pytest.mark.parametrize("page", [page for page in MOST_WORDS if (ROOT / page).exists()])
def test_pages_are_short(page):
    assert n_words("| a | [b c](d/e.md)<br>`f` - |\n") == 4
    n = n_words((ROOT / page).read_text())
    assert n <= MOST_WORDS[page], f"{page} has {n} words, allowed: {MOST_WORDS[page]}; move some elsewhere"


# ---- links ----


def anchors_of(text):
    """Returns the anchors of a page's headings, as GitHub makes them. What looks like a heading in a fence
    counts, too."""
    names = {}
    for heading in re.findall(r"^#{1,6} +(.*?) *$", text, re.M):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-")
        names[name] = names.get(name, -1) + 1
    return {name if i == 0 else f"{name}-{i}" for name, n in names.items() for i in range(n + 1)}


def broken_links(page, text, exists, read):
    """Returns the relative links of a page that lead nowhere: to no file, or to no heading of a page."""
    text, broken = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), []
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if (
            not exists(path)
            or anchor
            and path.endswith(".md")
            and anchor not in anchors_of(text if path == page else read(path))
        ):
            broken.append(target)
    return broken


def pages():
    """Returns every .md file of the repository. Where there is no git, as in an sdist, those of the
    folders."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, text=True, capture_output=True
    ).stdout.split("\n")
    return [page for page in listed if page] or [
        str(path.relative_to(ROOT)) for path in ROOT.glob("[!.b]*/**/*.md")
    ] + ["README.md"]


@pytest.mark.parametrize("page", pages())
def test_links(page):
    broken = broken_links(
        page,
        (ROOT / page).read_text(),
        lambda path: (ROOT / path).exists(),
        lambda path: (ROOT / path).read_text(),
    )
    assert not broken, f"{page}: these links lead nowhere: {', '.join(broken)}"


def test_contents_of_the_guide():
    text = (ROOT / "docs/guide/pytorch.md").read_text()
    contents = " ".join(text[text.index("Contents: ") : text.index("\n## ")].split())
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert re.findall(r"\[([^]]*)\]\(#", contents) == titles


OUR_WORDS = (
    "unit",
    "leg",
    "arm",
    "level",
    "mild",
    "gentl[ey]",
    "place",
)  # that mean more here than elsewhere


def undefined_words(text):
    """Returns those of OUR_WORDS that a page uses before it defines them; there they are *emphasised*.
    Headings and code do not count."""
    prose = re.sub(r"^```.*?^```$|^#.*?$", "", text, flags=re.M | re.S)
    prose = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", prose)
    undefined = []
    for word in OUR_WORDS:
        first = re.search(rf"(?<![\w-])(\*?){word}s?\b(\*?)", prose)
        if first and not (first[1] and first[2]):
            undefined.append(word)
    return undefined


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith(("README", "docs/guide/"))])
def test_words_are_defined(page):
    undefined = undefined_words((ROOT / page).read_text())
    assert not undefined, (
        f"{page} uses {', '.join(undefined)} before it says what that is: *unit* (...), or none"
    )


def test_undefined_words_are_found():
    assert undefined_words("# Units\nA *unit* is. `arm`; units, all-legs.\n```\nlevels\n```\n") == []
    assert undefined_words("Each unit is. A *unit* is. [an arm](arm.md)") == ["unit", "arm"]
    assert undefined_words("It goes gently, in place, at a *level*.") == ["gentl[ey]", "place"]


def test_the_reference_has_all_options():
    import dataclasses
    import inspect

    from tagc.torch import Options, compress

    text = (ROOT / "docs/reference/options.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    options = [name for name, at in inspect.signature(compress).parameters.items() if at.kind in kinds]
    inner = [field.name for field in dataclasses.fields(Options)]
    assert named == [name for name in options if name != "model"] + inner
    guide = (ROOT / "docs/guide/pytorch.md").read_text()
    used = guide[guide.index("## The most used options") :].split("\n\n")[1]
    assert len(shown := set(re.findall(r"^\| `(\w+)=", used, re.M))) == 6 and shown <= {*named}, shown


def test_broken_links_are_found():
    other = {"docs/b.md": "# One heading\n## `code`, and more\n## `code`, and more\n"}
    text = (
        "# Own\n[a](b.md) [b](b.md#one-heading) [c](b.md#code-and-more-1) [d](#own) "
        "[e](https://x.y/z) `[in](code.md)`\n```\n[in](a-fence.md)\n```\n"
    )
    # docs/a.md is not there
    assert broken_links("docs/a.md", text, other.__contains__, other.__getitem__) == ["#own"]
    other["docs/a.md"] = text
    assert broken_links("docs/a.md", text, other.__contains__, other.__getitem__) == []
    for bad in ("c.md", "../b.md", "b.md#two", "#two", "/docs/b.md"):
        assert broken_links("docs/a.md", f"{text}[x]({bad})", other.__contains__, other.__getitem__) == [
            bad
        ], bad


# ---- paths ----

HISTORY = "CHANGELOG.md"  # names what was
FOLDERS = "bench|cmake|command|docs|engine|examples|fuzz|include|lab|lib|planning|python|scripts|tests"


def broken_paths(page, text, finds):
    """Returns the paths in the code of a page, in fences or not, that exist neither from the root nor from
    the page's folder. What is to be filled in or made is no path: NAME.toml, test_<what>.py, mkdir."""
    fences = re.findall(r"^```.*?^```$", text, re.M | re.S)
    inline = re.findall(r"`[^`\n]+`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    code = re.sub(r"mkdir -p \S+|cp \S+ \S+", "", "\n".join(fences + inline))
    named = re.findall(rf"(?<![\w./$=<-])((?:{FOLDERS})/[\w./*-]*\w\*?)(?![\w./*-]*[<{{])", code)
    return [
        path
        for path in dict.fromkeys(named)
        if not re.match("(?!README)[A-Z]{3}", os.path.basename(path))
        and not finds(path)
        and not finds(os.path.normpath(os.path.join(os.path.dirname(page), path)))
    ]


@pytest.mark.parametrize("page", [page for page in pages() if page != HISTORY])
def test_paths(page):
    broken = broken_paths(page, (ROOT / page).read_text(), lambda path: any(ROOT.glob(path)))
    assert not broken, f"{page}: these paths lead nowhere: {', '.join(broken)}"


def test_broken_paths_are_found():
    there = {"lab/lab", "lab/docs/a.md", "tests/python/door.py", "lab/configs/*.conf"}
    text = (
        "`lab/lab run x` `docs/a.md` `lab/configs/*.conf` `lab/experiments/NAME.toml` lib/words/are no code "
        "`tests/python/test_<what>.py` `MODULE=python/hooks` `build/bench/x`\n"
        "```\nsudo lab/lab # lab/docs/a.md\n```\n"
    )
    assert broken_paths("lab/README.md", text, there.__contains__) == []
    for bad in "lab/hosts/lab", "tests/lab", "scripts/no.sh", "lab/results/speed.svg":
        for planted in f"`python {bad}`", f"```\nsudo {bad} run\n```":
            assert broken_paths("lab/README.md", f"{text}{planted}\n", there.__contains__) == [bad]
