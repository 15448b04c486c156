"""One run: an arm, a learning rate, a seed. Its ranks are processes over gloo, or one process that computes
all of them."""

import dataclasses
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time

import corpus
import numpy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "python")]

from gpt import GPT, Config


def run(setting, arm, rate, seed, cache, path, stop):
    """Writes the run to `path` as it goes, and returns it when it is whole. stop: an event that ends it
    early."""
    world = setting.n_ranks if arm.kind == "gloo" else 1
    with tempfile.TemporaryDirectory() as folder:
        job = (world, setting, arm, rate, seed, str(cache), str(path), folder)
        in_ranks(_main, world, job, path.stem, ["torch.nn.parallel", "train"], stop.is_set)
    return json.loads(path.read_text())


def in_ranks(target, n_ranks, words, name, modules, is_stopped=lambda: False):
    """Runs target(rank, *words) in processes of a server that has imported torch and `modules` once, until
    all have ended, one has failed or is_stopped() says so. name: what the RuntimeError of a failure calls
    them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", *modules])
    ranks = [context.Process(target=target, args=(rank, *words)) for rank in range(n_ranks)]
    for process in ranks:
        process.start()
    try:
        while any(process.exitcode is None for process in ranks):
            time.sleep(0.1)
            if is_stopped() or any(process.exitcode not in (None, 0) for process in ranks):
                break
    finally:
        for process in ranks:
            if process.exitcode is None:
                process.terminate()
            process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"{name}: ranks ended with {[process.exitcode for process in ranks]}")


def _main(rank, world, setting, arm, rate, seed, cache, path, folder):
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if arm.kind == "gloo":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world
        )
    trainer = (_Gloo if arm.kind == "gloo" else _Simulated)(setting, arm, rate, seed, cache, rank)
    _train(trainer, setting, pathlib.Path(path), rank == 0)
    if arm.kind == "gloo":
        trainer.close()
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's threads may still hold what interpreters take apart


def _train(trainer, setting, path, is_first):
    found = {
        "arm": trainer.arm.name,
        "rate": trainer.rate,
        "seed": trainer.seed,
        "steps": setting.steps,
        "is_whole": False,
        "evals": [],
        "n_params": sum(p.numel() for p in trainer.plain.parameters()),
        "arm_options": dataclasses.asdict(trainer.arm),
    }
    first, totals, seconds = 0, {"bits": 0.0, "control_bits": 0.0, "gradient_bits": 0.0, "latencies": 0}, 0.0
    checkpoint = path.with_suffix(f".rank{trainer.rank}.pt")
    if setting.save_every and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        first, totals, seconds, found["evals"] = (
            saved["step"],
            saved["totals"],
            saved["seconds"],
            saved["evals"],
        )
        trainer.load_state_dict(saved["trainer"])
    parent = os.getppid()
    for step in range(first, setting.steps):
        if os.getppid() != parent:
            raise SystemExit("the experiment is gone")
        begin = time.process_time()
        sent = trainer.step(step, setting.rate(step, trainer.rate))
        seconds += time.process_time() - begin
        for name, value in sent.items():
            totals[name] += value
        if (step + 1) % setting.eval_every == 0 or step + 1 == setting.steps:
            found["evals"].append(
                {
                    "step": step + 1,
                    "loss": trainer.evaluate(setting.eval_tokens),
                    **totals,
                    "step_bits": sent["bits"],
                }
            )
        found |= {"is_whole": step + 1 == setting.steps, "cpu_seconds": seconds}
        if found["is_whole"]:
            found["loss"] = trainer.evaluate(setting.final_tokens)
        if setting.save_every and (step + 1) % setting.save_every == 0 and not found["is_whole"]:
            _write(
                checkpoint,
                lambda part: torch.save(
                    {
                        "step": step + 1,
                        "totals": totals,
                        "seconds": seconds,
                        "evals": found["evals"],
                        "trainer": trainer.state_dict(),
                    },
                    part,
                ),
            )
        if is_first and (found["is_whole"] or step + 1 == (found["evals"] or [{"step": 0}])[-1]["step"]):
            _write(path, lambda part: part.write_text(json.dumps(found) + "\n"))
    checkpoint.unlink(missing_ok=True)


def _write(path, write):
    part = path.with_suffix(f"{path.suffix}.part")
    write(part)
    part.replace(path)


class _Trainer:
    """`rank`: this process's. `plain`: the model before it is wrapped; its weights depend on the seed
    alone."""

    def __init__(self, setting, arm, rate, seed, cache, rank):
        self.setting, self.arm, self.rate, self.seed, self.rank = setting, arm, rate, seed, rank
        self.tokens = {kind: corpus.tokens(cache, kind, setting.n_vocabulary) for kind in ("train", "val")}
        torch.manual_seed(seed)
        self.plain = GPT(
            Config(
                setting.n_vocabulary,
                setting.n_positions,
                setting.n_embd,
                setting.n_head,
                setting.n_layer,
                setting.tied,
                bias=setting.bias,
            )
        )

    def batch(self, step, rank):
        return self._rows("train", numpy.random.default_rng((self.seed, step, rank)), self.setting.batch_size)

    def loss(self, model, step, rank):
        """With setting.autocast in bf16, attention as matrix products, because torch's fused attention is
        slow in bf16 on CPUs."""
        if not self.setting.autocast:
            return model(*self.batch(step, rank))
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            return model(*self.batch(step, rank))

    def _rows(self, kind, rng, n_rows):
        text, n = self.tokens[kind], self.setting.n_positions
        starts = rng.integers(len(text) - n - 1, size=n_rows)
        rows = torch.from_numpy(numpy.stack([text[i : i + n + 1] for i in starts]).astype(numpy.int64))
        return rows[:, :-1], rows[:, 1:]

    def loss_over(self, model, n_tokens, part, n_parts):
        """Of every n_parts-th batch; the same text for all arms and seeds."""
        n_batches, losses = n_tokens // (16 * self.setting.n_positions), []
        with torch.no_grad():
            for i in range(n_batches):
                rows = self._rows("val", numpy.random.default_rng((977, i)), 16)
                if i % n_parts == part:
                    losses.append(model(*rows).item())
        return sum(losses) / len(losses)

    def adamw(self, model, handle=None):
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.setting.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = (self.arm.beta1, self.arm.beta2 or self.setting.beta2)
        if handle is not None:
            groups = handle.param_groups(groups=groups, betas=betas)
        return torch.optim.AdamW(groups, lr=self.rate, betas=betas)


class _Simulated(_Trainer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        module, name = self.arm.peer.split(".")
        options = dict(self.arm.options)
        if "warmup" in options:
            options["warmup"] = round(options["warmup"] * self.setting.steps)
        self.peer = getattr(importlib.import_module(f"peers.{module}"), name)(
            self.plain, self.setting.n_ranks, self.adamw, **options
        )
        self.n_elems = sum(p.numel() for p in self.plain.parameters())

    def step(self, step, rate):
        def gradients(rank, model=self.plain):
            model.zero_grad()
            self.loss(model, step, rank).backward()
            return [p.grad.clone() for p in model.parameters()]

        sent = self.peer.step(gradients, rate, step, self.setting.clip)
        return {"bits": sent.bits(self.setting.n_ranks) / self.n_elems, "latencies": sent.latencies}

    def evaluate(self, n_tokens):
        return self.loss_over(self.plain, n_tokens, 0, 1)

    def state_dict(self):
        return {"model": self.plain.state_dict(), "peer": self.peer.state_dict()}

    def load_state_dict(self, saved):
        self.plain.load_state_dict(saved["model"])
        self.peer.load_state_dict(saved["peer"])


class _Gloo(_Trainer):
    """The real thing: DDP or FSDP2 over gloo, with torch's hooks or tagc's."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        import torch.distributed as dist

        self.dist, self.n_ranks = dist, dist.get_world_size()
        self.n_elems = sum(p.numel() for p in self.plain.parameters())
        self.handle, self.powersgd, self.local, self.local_bytes = None, None, None, 0
        self.model = self._wrapped(self.plain)
        self._hook()
        self.optimizer = self.adamw(self.model, self.handle if self.arm.groups else None)
        if self.arm.adapts:
            self.handle.adapt(self.optimizer)  # as compress(model, optimizer) does
        if "local" in self.arm.hook:
            from tagc.local import LocalSteps

            self.local = LocalSteps(
                self.plain,
                self.optimizer,
                verbose=False,
                on_exchange=self._exchanged,
                **self.arm.hook["local"],
            )

    def _exchanged(self, stats):
        self.local_bytes += stats["bytes_sent"] - stats["bytes_by_leg"]["control"]

    def _wrapped(self, model):
        if self.arm.wrap == "plain":
            return model
        if self.arm.wrap == "ddp":
            if (
                "powersgd" in self.arm.hook
            ):  # in one bucket: torch's hook waits in gloo's own threads, and several would never end
                self.dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 40
                return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1 << 20)
            return torch.nn.parallel.DistributedDataParallel(model)
        from torch.distributed.fsdp import fully_shard

        for block in model.transformer.h:
            fully_shard(block)
        return fully_shard(model)

    def _hook(self):
        hook = self.arm.hook
        if hook.get("bf16"):
            self.model.register_comm_hook(None, _bf16_hook)
        elif "powersgd" in hook:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            # torch leaves matrices dense that it would not halve; so small a model has more of them than a
            # real one
            self.powersgd = PowerSGDState(
                None,
                hook["powersgd"],
                start_powerSGD_iter=max(2, self.setting.warmup),
                use_error_feedback=True,
                warm_start=True,
                random_seed=self.seed,
            )
            self.model.register_comm_hook(self.powersgd, powerSGD_hook)
        elif "tagc" in hook:
            import tagc.torch as tagc

            hosts = {"hosts": self.setting.n_hosts} if self.setting.n_hosts else {}
            self.handle = tagc.compress(self.model, verbose=False, **tagc.grouped(hosts | hook["tagc"]))

    def step(self, step, rate):
        before = self._powersgd_elems()
        self.loss(self.model, step, self.rank).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._sent(self._powersgd_elems() - before)

    def _powersgd_elems(self):
        return self.powersgd.total_numel_after_compression if self.powersgd else 0

    def _sent(self, n_powersgd):
        """Bits per parameter that this rank sent: counted by tagc, else an all-reduce of what the hook
        sends."""
        share = 2 * (self.n_ranks - 1) / self.n_ranks
        if self.local:
            n_bytes, self.local_bytes = self.local_bytes, 0
            return {"bits": 8 * n_bytes / self.n_elems, "latencies": 5 * bool(n_bytes)}
        if self.handle:
            stats = self.handle.stats()
            control = stats["bytes_by_leg"]["control"]
            gathers = 2 * stats["n_units"] if self.arm.wrap == "fsdp2" else 0
            return {
                "bits": 8 * (stats["bytes_sent"] - control) / self.n_elems,
                "control_bits": 8 * control / self.n_elems,
                # per element and direction
                "gradient_bits": stats["bits_per_param"] / (1 if self.arm.wrap == "fsdp2" else 2),
                "latencies": 5 * stats["n_units"] + gathers,
            }
        if n_powersgd:
            return {"bits": 32 * share * n_powersgd / self.n_elems, "latencies": 6}
        return {"bits": (16 if self.arm.hook.get("bf16") else 32) * share, "latencies": 2}

    def evaluate(self, n_tokens):
        loss = torch.tensor(
            self.loss_over(
                self.model if self.arm.wrap == "fsdp2" else self.plain, n_tokens, self.rank, self.n_ranks
            )
        )
        self.dist.all_reduce(loss)
        return loss.item() / self.n_ranks

    def close(self):
        for one in filter(None, (self.handle, self.local)):
            one.close()

    # A checkpoint has this rank's part of everything. What PowerSGD remembers begins anew: its buckets do.

    def state_dict(self):
        for module in self.model.modules():  # FSDP2 leaves the root whole after a forward pass
            if hasattr(module, "reshard"):
                module.reshard()
        optimizer = [
            {name: _local(value) for name, value in self.optimizer.state[p].items()}
            for p in self.model.parameters()
        ]
        return {
            "model": [_local(p.detach()) for p in self.model.parameters()],
            "optimizer": optimizer,
            "tagc": self.handle.state_dict() if self.handle else None,
            "local": self.local.state_dict() if self.local else None,
        }

    def load_state_dict(self, saved):
        with torch.no_grad():
            for p, value, moments in zip(self.model.parameters(), saved["model"], saved["optimizer"]):
                _local(p.detach()).copy_(value)
                self.optimizer.state[p] = {"step": moments["step"]} | {
                    name: _like(p, moments[name]) for name in ("exp_avg", "exp_avg_sq")
                }
        if self.local:
            self.local.load_state_dict(saved["local"])
        if self.handle:
            self.handle.load_state_dict(saved["tagc"])
            self.handle.reset_parameters()


def _bf16_hook(state, bucket):
    """torch's, under another name: by its own, DDP takes it on GPUs only."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(state, bucket)


def _local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def _like(parameter, value):
    if not hasattr(parameter, "to_local"):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
