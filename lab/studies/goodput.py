"""How many tokens do sites train in a second while some of them pause and die, beside the same without any
fault? Local steps, local steps by torchft's own DiLoCo, and an exchange in every step, under torchft.

    scripts/torchft.sh lab/studies/goodput.py --out runs/goodput.jsonl    # 8 sites, an hour of mostly sleep

Each site is a process, all on one machine. A step of a small model takes a few milliseconds; then the site
sleeps, so that a step takes --step-s and sites do not slow each other down. Every --every seconds a site is
killed, and another process takes its place after --restart seconds, or it is stopped for --pause seconds. All
ways see the same faults at the same times.

A step counts once what it did is in the parameters that all sites have: in every step its exchange, or the
next exchange of local steps. Steps of a site since its last exchange are lost when it dies, and when it gets
another site's state. Goodput is the tokens that count in --seconds, as a share of those without faults.
"sites that could": the share of the sites' time in which they were neither stopped nor gone: no way that
waits for a site could reach more."""

import argparse
import datetime
import json
import multiprocessing
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "examples" / "pytorch")]
os.environ.setdefault("TAGC_LIBRARY", str(ROOT / "build" / "libtagc.so"))

WAYS = ("local steps", "torchft DiLoCo", "every step")
POSITIONS = 64


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    add("--sites", type=int, default=8, help="(8)")
    add("--seconds", type=float, default=600.0, help="that are counted (600)")
    add("--every", type=float, default=50.0, help="seconds between faults (50)")
    add("--pause", type=float, nargs=2, default=[10.0, 50.0], help="a site is stopped for (10 50)")
    add("--restart", type=float, default=15.0, help="seconds until a killed site begins again (15)")
    add("--steps-between", type=int, default=30, help="local steps between two exchanges (30)")
    add("--step-s", type=float, default=1.0, help="(1)")
    add("--rows", type=int, default=4, help="sequences of a site and step (4)")
    add("--heard", type=float, default=4.0, help="seconds of silence until torchft leaves a site out (4)")
    # torchft counts from the first site that asks: where this is shorter than the time between two exchanges,
    # a quorum takes any half of the sites, and the others lose their steps
    add("--join", type=float, default=60.0, help="seconds that a quorum waits for sites that are heard (60)")
    add("--patience", type=float, default=8.0, help="seconds until an exchange with a silent site fails (8)")
    add("--seed", type=int, default=1, help="of the faults (1)")
    add("--out", type=pathlib.Path, help="rows, a line of JSON for each, added to")
    return parser.parse_args()


# ---- a site ----


class Trained:
    """Steps of this site: those since its last exchange, and a line for each exchange."""

    def __init__(self, path, n_tokens):
        self._file, self._n_tokens, self.n_open = path.open("a"), n_tokens, 0

    def step(self, *_):
        self.n_open += 1

    def lose(self):
        self.n_open = 0

    def count(self):
        note = {"at": time.monotonic(), "tokens": self.n_open * self._n_tokens}
        print(json.dumps(note), file=self._file, flush=True)
        self.n_open = 0


def site(args, way, name, folder):
    import torch
    import torch.distributed as dist
    import torchft
    from gpt import GPT, Config
    from torchft.local_sgd import DiLoCo

    from tagc.local import LocalSteps
    from tagc.quorum import Sites

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = GPT(Config(n_positions=POSITIONS, n_embd=32, n_head=2, n_layer=2))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained = Trained(folder / f"site{name}.jsonl", args.rows * POSITIONS)
    inner.register_step_post_hook(trained.step)  # before an exchange, which is a hook, too
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    patience = datetime.timedelta(seconds=args.patience)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        trained.lose()

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=patience),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"site_{name}",
        timeout=2 * patience,
        quorum_timeout=15 * patience,
        connect_timeout=2 * patience,
        use_async_quorum=way == "every step",
    )
    wrapped, optimizer, exchanges = model, inner, manager.current_step
    if way == "every step":
        wrapped = torchft.DistributedDataParallel(manager, model)
        optimizer = torchft.Optimizer(manager, inner)
    elif way == "local steps":
        options = {"every": args.steps_between, "layers": "all", "verbose": False}
        options["timeout_s"] = args.patience
        handle = LocalSteps(model, inner, manager=Sites(manager), **options)
        exchanges = lambda: handle.n_exchanges
    else:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        DiLoCo(manager, [model], inner, outer, args.steps_between, pin_memory=False).__enter__()
    generator, n_exchanges = torch.Generator().manual_seed(os.getpid()), exchanges()
    while True:
        begin = time.monotonic()
        optimizer.zero_grad()
        tokens = torch.randint(256, (args.rows, POSITIONS + 1), generator=generator)
        wrapped(tokens[:, :-1], tokens[:, 1:]).backward()
        time.sleep(max(0, begin + args.step_s - time.monotonic()))
        optimizer.step()
        if (n := exchanges()) > n_exchanges:
            if not manager.is_participating():  # it joined in this exchange
                trained.lose()
            trained.count()
        elif way == "torchft DiLoCo" and trained.n_open == args.steps_between:
            trained.lose()  # it has set the parameters back
        n_exchanges = n


# ---- all of them ----


def faults_of(args):
    """Returns (second, kind, site, seconds) in their order: kinds in turn, never two at once on a site."""
    chance, made, free_at = random.Random(args.seed), [], [0.0] * args.sites
    at, kinds = args.every / 2, ("kill", "stop")
    while at < args.seconds:
        i = chance.choice([i for i in range(args.sites) if free_at[i] <= at])
        kind = kinds[len(made) % 2]
        lasts = args.restart if kind == "kill" else chance.uniform(*args.pause)
        made.append((at, kind, i, lasts))
        free_at[i] = at + lasts + args.every  # it has to come back first
        at += chance.uniform(0.5, 1.5) * args.every
    return made


class Sites:
    """All processes of a run."""

    def __init__(self, args, way, folder):
        self.args, self.way, self.folder = args, way, folder
        self._context = multiprocessing.get_context("fork")
        port = 29000 + os.getpid() % 2000
        os.environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
        words = {"min_replicas": 1, "bind": f"[::]:{port}", "join_timeout_ms": int(1000 * args.join)}
        words |= {"heartbeat_timeout_ms": int(1000 * args.heard)}
        self._lighthouse = subprocess.Popen(
            [
                pathlib.Path(sys.executable).with_name("torchft_lighthouse"),
                *(word for name, value in words.items() for word in (f"--{name}", str(value))),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.n_errors, self._process, self._due = 0, [None] * args.sites, {}
        for i in range(args.sites):
            self._start(i)

    def _start(self, i):
        log = (self.folder / f"site{i}.log").open("a")

        def run():
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            site(self.args, self.way, i, self.folder)

        self._process[i] = self._context.Process(target=run, daemon=True)
        self._process[i].start()

    def begin(self, kind, i, lasts):
        process = self._process[i]
        if i in self._due or not process.is_alive():  # it has failed by itself and is gone already
            return
        if kind == "kill":
            process.kill()
            process.join()
            self._due[i] = time.monotonic() + lasts, lambda: self._start(i)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            self._due[i] = time.monotonic() + lasts, lambda: os.kill(process.pid, signal.SIGCONT)

    def look_after(self):
        """Ends what is over. A site that has failed begins again after as long as one that was killed."""
        for i, (until, undo) in list(self._due.items()):
            if time.monotonic() >= until:
                del self._due[i]
                undo()
        for i, process in enumerate(self._process):
            if i not in self._due and not process.is_alive():
                self.n_errors += 1
                self._due[i] = time.monotonic() + self.args.restart, lambda i=i: self._start(i)

    def notes(self):
        """Returns what each site has written."""
        paths = [self.folder / f"site{i}.jsonl" for i in range(self.args.sites)]
        whole = [path.read_text().rpartition("\n")[0] if path.exists() else "" for path in paths]
        return [[json.loads(line) for line in text.splitlines()] for text in whole]

    def end(self):
        for process in self._process:
            process.kill()
            process.join()
        self._lighthouse.kill()
        self._lighthouse.wait()


def run(args, way, faults, folder):
    folder.mkdir()
    sites = Sites(args, way, folder)
    try:
        limit = time.monotonic() + 300
        while not all(any(note["tokens"] for note in notes) for notes in sites.notes()):
            sites.look_after()
            if time.monotonic() > limit:
                raise SystemExit(f"goodput: {way}: not all sites have trained within five minutes: {folder}")
            time.sleep(0.1)
        begin, left = time.monotonic(), list(faults)
        while time.monotonic() < begin + args.seconds:
            if left and time.monotonic() >= begin + left[0][0]:
                sites.begin(*left.pop(0)[1:])
            sites.look_after()
            time.sleep(0.02)
        notes = [note for notes in sites.notes() for note in notes]
    finally:
        sites.end()
    n_tokens = sum(note["tokens"] for note in notes if begin < note["at"] <= begin + args.seconds)
    gone = sum(min(lasts, args.seconds - at) for at, _, _, lasts in faults)
    return {
        "way": way,
        "faults": len(faults),
        "tokens_per_s": n_tokens / args.seconds,
        "could": 1 - gone / (args.sites * args.seconds),
        "errors": sites.n_errors,
    }


def main():
    args = arguments()
    import torchft.local_sgd  # noqa: F401 (forked sites have it)

    import tagc.quorum  # noqa: F401

    print(f"{'':16} {'no fault':>10} {'faults':>10}  goodput")
    with tempfile.TemporaryDirectory(prefix="tagc-goodput-") as folder:
        for k, way in enumerate(args.ways):
            rows = []
            for faults in [], faults_of(args):
                rows.append(run(args, way, faults, pathlib.Path(folder) / f"{k}-{len(faults)}"))
                if args.out:
                    with args.out.open("a") as file:
                        sizes = {
                            name: value for name, value in vars(args).items() if name not in ("out", "ways")
                        }
                        print(json.dumps(rows[-1] | sizes), file=file, flush=True)
            plain, disturbed = (row["tokens_per_s"] for row in rows)
            print(
                f"{way:16} {plain:8.0f}/s {disturbed:8.0f}/s  {100 * disturbed / plain:.1f} % "
                f"({rows[1]['faults']} faults; sites that could: {100 * rows[1]['could']:.1f} %; "
                f"{rows[1]['errors']} ended by an error)",
                flush=True,
            )


if __name__ == "__main__":
    main()
