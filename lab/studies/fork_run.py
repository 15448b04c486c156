"""One run of fork.py: an arm, a rate and a seed, on 2 hosts of 2 ranks. Ranks are processes over gloo on this
machine; tagc is told which of them share a host."""

import copy
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, BertForMaskedLM

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("examples/pytorch", "python", "lab/parity", "lab/studies")]

import corpus
from fine_tune import masked
from preference import BETA, SFT, Lora
from train import in_ranks

HOSTS, PER_HOST = 2, 2
RANKS = HOSTS * PER_HOST
PACKAGES = ("debian-policy", "debian-reference-en", "git-doc")  # of Debian 12; their plain text
HELD_OUT_OF = 12  # documents, one of which is held out
LORA_RANK = 16
SAMPLES_OF_RUN = 10**6  # seeds of batches; runs with other seeds have others


class Fork(BertForMaskedLM):
    """Its head is tied to the embedding, and computes what is asked for alone."""

    def forward(self, tokens, wanted, with_rejected=False):
        """Returns the mean loss. tokens, wanted: (rows, length); wanted is -100 where nothing is asked.
        with_rejected: (the mean loss, (rows,): how much more likely each row's words are than other words of
        the batch in their places)."""
        x = self.bert(input_ids=tokens).last_hidden_state  # (rows, length, width)
        asked = wanted != -100
        words = wanted[asked]  # (n,)
        scores = self.cls(x[asked]).log_softmax(-1)  # (n, vocabulary)
        loss = F.nll_loss(scores, words)
        if not with_rejected:
            return loss
        margins = (scores.gather(1, words[:, None]) - scores.gather(1, words.roll(1)[:, None]))[:, 0]
        of_row = asked.nonzero()[:, 0]  # (n,): its row
        return loss, margins.new_zeros(len(tokens)).index_add(0, of_row, margins)


class Preferences:
    """DPO with a term of supervised tuning: the words of a text are preferred to the same words in other
    places. The reference is the model as it was, sharded by itself; tagc does not see it."""

    def __init__(self, reference):
        self.reference = reference.requires_grad_(False).eval()

    def __call__(self, model, tokens, wanted):
        with torch.no_grad():
            _, before = self.reference(tokens, wanted, with_rejected=True)
        loss, now = model(tokens, wanted, with_rejected=True)
        return -F.logsigmoid(BETA * (now - before)).mean() + SFT * loss


def masked_words(model, tokens, wanted):
    return model(tokens, wanted)


# ---- the text ----


def debian_documents(cache):
    return corpus.documents(cache, PACKAGES, set(), corpus.PLAIN, HELD_OUT_OF)


def made_text(cache, folder, length, documents):
    """Returns (a file with the tokens in blocks, what the text is). documents: as of corpus.documents()."""
    texts, versions = {"train": [], "held": []}, {}
    for name, version, _, is_held_out, text in documents:
        versions[name] = version
        texts["held" if is_held_out else "train"].append(text)
    joined = {kind: "\n\n".join(own) for kind, own in texts.items()}
    digest = hashlib.sha256(f"{joined['train']}\f{joined['held']}".encode()).hexdigest()
    path = cache / f"fork-{length}-{digest[:12]}.pt"
    if not path.exists():
        tokenizer, blocks = AutoTokenizer.from_pretrained(folder), {}
        for kind, own in texts.items():
            ids = tokenizer([text for text in own if text], add_special_tokens=False)["input_ids"]
            tokens = torch.tensor([token for document in ids for token in document])
            n = len(tokens) // length
            blocks[kind] = tokens[: n * length].view(n, length)
        part = path.with_suffix(".part")
        torch.save(blocks, part)
        part.replace(path)
    n_tokens = {kind: own.numel() for kind, own in torch.load(path).items()}
    return str(path), {"sha256": digest, "packages": versions, "n_tokens": n_tokens}


# ---- a run ----


def run(job, arm, setting, folder, tokens):
    """Returns the row of a run."""
    with tempfile.TemporaryDirectory() as scratch:
        words = (scratch, job, arm, setting, str(folder), tokens)
        in_ranks(_main, RANKS, words, str(job), ["transformers", "fork_run"])
        return json.loads(pathlib.Path(scratch, "row.json").read_text())


def _main(rank, scratch, *words):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{scratch}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    row = one_run(*words)
    if rank == 0:
        pathlib.Path(scratch, "row.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's threads may still hold what interpreters take apart


def one_run(job, arm, setting, folder, tokens):
    """job: the row's key; arm: of fork.ARMS; setting: of fork.SETTING; folder: of the model; tokens: a file
    of made_text(). Collective."""
    seed, rate, begin = job["seed"], job["rate"], time.process_time()
    torch.manual_seed(seed)  # the head's own layer begins at random
    model = Fork.from_pretrained(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tokenizer, blocks = AutoTokenizer.from_pretrained(folder), torch.load(tokens)
    objective = masked_words
    if arm.get("preferences"):
        objective = Preferences(_wrapped(copy.deepcopy(model), arm)[0])
    model, sites = _wrapped(_with_adapters(model) if arm.get("lora") else model, arm)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=arm.get("betas", (0.9, 0.999)))
    counts = _Counts(model, optimizer, arm, sites)
    row = {
        "n_params": sum(p.numel() for p in model.parameters()),
        "n_trained": sum(map(torch.numel, trained)),
    }
    losses = {0: _held_loss(model, objective, blocks["held"][: setting["held"]], tokenizer, setting)}
    model.train()
    parent = os.getppid()
    for step in range(setting["steps"]):
        if os.getppid() != parent:
            raise SystemExit("the study is gone")
        for group in optimizer.param_groups:
            group["lr"] = rate * _share_of_rate(step, setting)
        own = seed * SAMPLES_OF_RUN + step * RANKS + dist.get_rank()
        chosen = torch.randint(
            len(blocks["train"]), (setting["rows"],), generator=torch.Generator().manual_seed(own)
        )
        objective(model, *masked(blocks["train"][chosen], tokenizer, own)).backward()
        nn.utils.clip_grad_norm_(trained, setting["clip"])
        optimizer.step()
        optimizer.zero_grad()
        counts.step(step + 1)
        is_last = step + 1 == setting["steps"]
        if (step + 1) % setting["held_every"] == 0 and not is_last:
            losses[step + 1] = _held_loss(
                model, objective, blocks["held"][: setting["held"]], tokenizer, setting
            )
    counts.close()
    row["loss"] = _held_loss(model, objective, blocks["held"][: setting["held_at_end"]], tokenizer, setting)
    seconds = torch.tensor(time.process_time() - begin)
    dist.all_reduce(seconds)
    return job | row | {"losses": losses, "cpu_seconds": seconds.item()} | counts.row()


def _share_of_rate(step, setting):
    """As Hugging Face's Trainer: up over the warm-up, then down to zero, linearly."""
    if step < setting["warmup"]:
        return (step + 1) / setting["warmup"]
    return (setting["steps"] - step) / (setting["steps"] - setting["warmup"])


def _with_adapters(model):
    """LoRA on all matrices of the layers; the head's layer, which begins at random, is trained whole."""
    model.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.key, attention.value = (
            Lora(each, LORA_RANK) for each in (attention.query, attention.key, attention.value)
        )
        for each in (layer.attention.output, layer.intermediate, layer.output):
            each.dense = Lora(each.dense, LORA_RANK)
    model.cls.predictions.transform.requires_grad_(True)
    model.cls.predictions.bias.requires_grad_(True)
    return model


def _wrapped(model, arm):
    """Returns the model, and with LocalSteps the mesh of the sites."""
    if arm.get("lora"):
        return DistributedDataParallel(model), None
    mesh = init_device_mesh("cpu", (HOSTS, PER_HOST), mesh_dim_names=("site", "local"))
    options = {"mesh": mesh["local"]} if "local" in arm else {}
    for layer in model.bert.encoder.layer:
        fully_shard(layer, **options)
    return fully_shard(model, **options), mesh["site"]


@torch.no_grad()
def _held_loss(model, objective, held, tokenizer, setting):
    """Returns the mean over all that is asked in those blocks, of which each rank has its share; the same for
    all arms and seeds."""
    rank, own = dist.get_rank(), torch.zeros(2, dtype=torch.float64)
    model.eval()
    for number, rows in enumerate(held.split(setting["held_rows"])):
        tokens, wanted = masked(rows, tokenizer, number)
        # FSDP2's ranks gather together, so that each computes its rows of every batch
        tokens, wanted = tokens.chunk(RANKS)[rank], wanted.chunk(RANKS)[rank]
        n = (wanted != -100).sum()
        own += torch.stack([objective(model, tokens, wanted).double() * n, n.double()])
    model.train()
    dist.all_reduce(own)
    return (own[0] / own[1]).item()


class _Counts:
    """Connects tagc with a model, counts what a host sends to the other one, and follows the schedule."""

    def __init__(self, model, optimizer, arm, sites):
        self.arm, self.optimizer, self.handle, self.local = arm, optimizer, None, None
        self.bits, self.n_bytes, self.n_steps, self.levels, self.coherence = [], 0, 0, {}, {}
        self.sizes = {name.removeprefix("module."): p.numel() for name, p in model.named_parameters()}
        n = sum(p.numel() for p in model.parameters())
        layers = sum(p.numel() for name, p in model.named_parameters() if ".layer." in name)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # A ring leaves a host once. FSDP2 gathers layers twice, and what is left, the root's, once.
        share = (RANKS - 1) / RANKS
        self.by_gradients = share * 4 * trained * (2 if arm.get("lora") else 1)
        self.by_gathers = 0 if arm.get("lora") else share * 4 * (n + layers)
        if "local" in arm:
            from tagc.local import LocalSteps

            self.local = LocalSteps(
                model, optimizer, between=sites, verbose=False, on_exchange=self._exchanged, **arm["local"]
            )
        elif "compress" in arm:
            import tagc.torch as tagc

            given = (optimizer,) if arm.get("optimizer") else ()
            self.handle = tagc.compress(model, *given, hosts=HOSTS, **arm["compress"])
            self._watch_coherence(self.handle.state.schedule)

    def _watch_coherence(self, schedule):
        """No public name has it: what all ranks have seen of each window passes here."""
        see, names = schedule._see, schedule._names

        def seen(full, pooled, group):
            n_fields = (len(pooled) - 3) // max(1, len(full))
            for at, number in enumerate(full):
                signal, weight = pooled[3 + at * n_fields : 5 + at * n_fields]
                self.coherence.setdefault(names[number], []).append(
                    round(signal / weight, 3) if weight else None
                )
            see(full, pooled, group)

        schedule._see = seen

    def _exchanged(self, stats):
        self.n_bytes += stats["bytes_sent"]
        self.bits.append(stats["bits_per_param_and_step"])

    def step(self, step):
        self.n_steps = step
        if self.handle is None:
            return
        stats = self.handle.stats()
        self.n_bytes += stats["bytes_sent"]
        self.bits.append(stats["bits_per_param"])
        for name, level in self.handle.state.schedule.levels().items():
            changes = self.levels.setdefault(name, {"n": self.sizes[name], "changes": []})["changes"]
            if not changes or changes[-1][1] != level:
                changes.append([step, level])

    def close(self):
        if self.local is not None:
            self.local.synchronize()
        elif self.handle is not None:
            self.handle.close()

    def row(self):
        """Collective."""
        n_bytes = torch.tensor([float(self.n_bytes)], dtype=torch.float64)
        dist.all_reduce(n_bytes)
        of_host = n_bytes.item() / HOSTS / self.n_steps
        if self.local is None and self.handle is None:
            of_host += self.by_gradients
        if self.local is None and not self.arm.get("compress", {}).get("parameters"):
            of_host += self.by_gathers
        found = {"bytes_of_host": round(of_host)}
        if self.local is not None:
            found["bits"] = self.bits[-1]  # of all exchanges, in a step
        if self.handle is not None:
            every = max(1, self.n_steps // 60)
            found |= {
                "bits": sum(self.bits) / len(self.bits),
                "last_bits": self.bits[-1],
                "bits_by_step": [[i + 1, round(self.bits[i], 3)] for i in range(0, len(self.bits), every)],
                "levels": self.levels,
                "coherence": self.coherence,
            }
        return found
