"""Replicas under torchft with tagc, while they are killed, stopped and cut off: does the run end where an
undisturbed one does?

    # a few minutes; an hour or two on two busy cores; each replica in a network namespace, whose link goes
    # down, too
    python lab/studies/torch_chaos.py --steps 300
    python lab/studies/torch_chaos.py --steps 800 --seeds 1 --every 20
    sudo python lab/studies/torch_chaos.py --links

Needs torchft (pip install torchft==0.2.0) and libtagc (make build). A small GPT learns the sources of tagc in
so many steps, without disturbance with each of --seeds, then with it. Every few seconds one of the replicas
is killed (another process takes its place), stopped by SIGSTOP for a while, or its link goes down for a
while. It fails unless the disturbed run's evaluation loss is between those of the undisturbed ones, or at
most --allowed outside. Goodput is the share of all passes of all replicas that counted, and the undisturbed
runs' time as a share of the disturbed one's.

A replica is disturbed only while another one has the newest parameters: if all were lost, the run would begin
anew. All runs of a command read one copy of the sources: after an edit, a replica that starts later would
have other batches and another evaluation text.

Each step has one batch, whatever the number of replicas: those that take part share its rows. So runs differ
by what tagc and torchft do, and not by how many samples a step has. One more undisturbed run has --fewest
replicas: selection keeps a share of each replica's gradient, so how many there are matters, and a disturbed
run has fewer. With --sparsity 0 it does not matter."""

import argparse
import contextlib
import datetime
import json
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


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="that count (300)")
    add("--replicas", type=int, default=4)
    add("--every", type=float, default=8.0, help="mean seconds between disturbances (8)")
    add(
        "--pause",
        type=float,
        default=6.0,
        help="longest that a replica is stopped or cut off, in seconds (6)",
    )
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        help="of the data, of the undisturbed runs; the disturbed one has the first (1 2 3)",
    )
    add(
        "--fewest",
        type=int,
        default=1,
        help="replicas of one more undisturbed run, with the first seed; 0: none (1)",
    )
    add("--only", choices=["undisturbed", "disturbed"], help="make only these runs, and compare nothing")
    add(
        "--out",
        type=pathlib.Path,
        help="new or empty folder in which each run leaves what its replicas wrote down (none)",
    )
    add(
        "--allowed",
        type=float,
        default=0.01,
        help="how far outside the undisturbed runs' losses is allowed, as a share (0.01)",
    )
    add("--links", action="store_true", help="network namespaces, whose links go down; needs root")
    add("--sparsity", type=float, default=0.95)
    add("--replica", nargs=4, metavar=("NAME", "FOLDER", "SEED", "ADDRESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(
            f"--out is {args.out}, which is not empty: name a new folder, so that an older run is not lost"
        )
    return args


# ---- a replica ----

ROWS = 24  # of a step's batch: 1, 2, 3, 4 and 6 replicas have as many each


def batch(data, rows, n, *key):
    import torch

    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    starts = torch.randint(len(data) - n - 1, (rows,), generator=generator)
    found = torch.stack([data[i : i + n + 1] for i in starts.tolist()]).long()
    return found[:, :-1], found[:, 1:]


def replica(args):
    import torch
    import torch.distributed as dist
    from gpt import GPT, Config
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from train_gpt import read_bytes

    import tagc.torch as tagc

    name, folder, seed, address = args.replica
    folder, seed = pathlib.Path(folder), int(seed)
    torch.set_num_threads(1)
    train, evaluation = read_bytes([folder.parent / "text"])
    torch.manual_seed(1)
    model = GPT(Config(n_positions=64, n_embd=64, n_head=4, n_layer=2))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    second = datetime.timedelta(seconds=1)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=5 * second),
        load_state_dict=load,
        min_replica_size=1,
        rank=0,
        world_size=1,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        hostname=address,
        store_addr=address,
        store_port=store.port,
        replica_id=f"replica_{name}",
        timeout=10 * second,
        quorum_timeout=60 * second,
        connect_timeout=10 * second,
    )
    wrapped = DistributedDataParallel(manager, model)
    handle = tagc.compress(wrapped, inner, sparsity=args.sparsity, timeout_s=4)
    optimizer = Optimizer(manager, inner)
    with (folder / f"replica{name}.jsonl").open("a") as notes:
        while (step := manager.current_step()) < args.steps:
            for group in inner.param_groups:
                group["lr"] = 2e-3 * min(1, (step + 1) / 50) * (1 - 0.9 * step / args.steps)
            optimizer.zero_grad()  # which asks who is there
            n, place = max(1, manager.num_participants()), manager.participating_rank() or 0
            step = manager.current_step()  # of the others, where this one is being healed
            loss = wrapped(*(rows[place::n] for rows in batch(train, ROWS, 64, seed, step)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = manager.current_step()
            optimizer.step()
            counts, crc = (
                manager.current_step() > before,
                sum(p.detach().double().sum().item() for p in model.parameters()),
            )
            print(
                json.dumps(
                    {
                        "step": before,
                        "counts": counts,
                        "loss": loss.item(),
                        "replicas": manager.num_participants(),
                        "weights": crc,
                        "took part": manager.is_participating(),
                        **{f"n_{key}": n for key, n in handle.wrapper.quorum.counts.items()},
                    }
                ),
                file=notes,
                flush=True,
            )
        with torch.no_grad():
            losses = [model(*batch(evaluation, 32, 64, "evaluation", i)).item() for i in range(20)]
        print(
            json.dumps({"evaluation": sum(losses) / len(losses), "step": manager.current_step()}),
            file=notes,
            flush=True,
        )
    deadline = time.monotonic() + 30
    while not (folder / "end").exists() and time.monotonic() < deadline:
        time.sleep(0.1)  # others may still need this one's store, or its parameters
    os._exit(0)


# ---- where they run ----


class Place:
    """All on this machine's loopback."""

    def address(self, _i):
        return "127.0.0.1"

    def inside(self, _i, command):
        return command

    def end(self):
        pass


class Hosts(Place):
    """A network namespace for each replica, and one for the lighthouse, which has a bridge between them."""

    def __init__(self, n):
        # the last one: the lighthouse's
        self._names = [f"tagc-chaos-{os.getpid()}-{i}" for i in range(n + 1)]
        self._made = []
        try:
            for name in self._names:
                self._call("netns", "add", name)
                self._made.append(name)
            hub = self._names[n]
            self._call("-n", hub, "link", "add", "bridge0", "type", "bridge")
            for i, name in enumerate(self._names[:n]):
                self._call(
                    "-n",
                    hub,
                    "link",
                    "add",
                    f"port{i}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    name,
                )
                self._call("-n", hub, "link", "set", f"port{i}", "master", "bridge0", "up")
            for i, name in enumerate(self._names):
                device = "bridge0" if i == n else "eth0"
                self._call("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", device)
                for up in ("lo", device):
                    self._call("-n", name, "link", "set", up, "up")
        except BaseException:
            self.end()
            raise

    def _call(self, *words):
        subprocess.run(["ip", *words], check=True)

    def address(self, i):
        return f"10.79.0.{i + 1}"

    def inside(self, i, command):
        """torchft sends parameters from a server whose address is the host's name."""
        return [
            "env",
            "GLOO_SOCKET_IFNAME=eth0",
            "ip",
            "netns",
            "exec",
            self._names[i],
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {self.address(i)} && exec "$@"',
            "sh",
            *command,
        ]

    def link(self, i, state):
        self._call("-n", self._names[-1], "link", "set", f"port{i}", state)

    def end(self):
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False)


class Job:
    """A run: the lighthouse and replicas."""

    def __init__(self, args, place, seed, folder):
        self.args, self.place, self.seed, self.folder = args, place, seed, folder
        folder.mkdir(parents=True)
        self.n_started = 0
        self.notes, self.n_read, self.n_before = (
            [[] for _ in range(args.replicas)],
            [0] * args.replicas,
            [0] * args.replicas,
        )
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "RUST_LOG": "error", "PYTHONHASHSEED": "0"}
        hub = place.address(args.replicas)
        port = 29000 + os.getpid() % 2000
        self.lighthouse = subprocess.Popen(
            place.inside(
                args.replicas,
                [
                    str(pathlib.Path(sys.executable).with_name("torchft_lighthouse")),
                    "--min_replicas",
                    "1",
                    "--bind",
                    f"[::]:{port}",
                    "--join_timeout_ms",
                    "3000",
                    "--heartbeat_timeout_ms",
                    "2000",
                ],
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment,
        )
        self.environment["TORCHFT_LIGHTHOUSE"] = f"http://{hub}:{port}"
        self.replicas = [None] * args.replicas
        for i in range(args.replicas):
            self.start(i)

    def start(self, i):
        self.read()
        self.n_before[i] = len(self.notes[i])
        command = [
            sys.executable,
            __file__,
            "--steps",
            str(self.args.steps),
            "--sparsity",
            str(self.args.sparsity),
            "--replica",
            str(i),
            str(self.folder),
            str(self.seed),
            self.place.address(i),
        ]
        log = (self.folder / f"replica{i}.log").open("a")
        self.replicas[i] = subprocess.Popen(
            self.place.inside(i, command), stdout=log, stderr=subprocess.STDOUT, env=self.environment
        )
        self.n_started += 1

    def read(self):
        """What replicas have written since the last call. A line may be half a one, of a replica that was
        killed."""
        for i, notes in enumerate(self.notes):
            path = self.folder / f"replica{i}.jsonl"
            text = path.read_bytes()[self.n_read[i] :] if path.exists() else b""
            whole = text[: text.rfind(b"\n") + 1]
            self.n_read[i] += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    notes.append(json.loads(line))

    def step(self, i):
        """The last step of this replica that counted since it started; -1 before."""
        steps = (note["step"] for note in reversed(self.notes[i][self.n_before[i] :]) if note.get("counts"))
        return next(steps, -1)

    def has_all(self, i):
        """Whether this replica has what the others have: if they were gone, the run would go on and not begin
        anew."""
        return (
            self.replicas[i].poll() is None
            and 0 <= self.step(i) >= max(map(self.step, range(len(self.replicas)))) - 1
        )

    def is_over(self):
        """Ends the replicas. One that has finished waits for the others, and a last one could not continue
        alone."""
        self.read()
        return any("evaluation" in notes[-1] for notes in self.notes if notes)

    def end(self):
        (self.folder / "end").touch()
        for process in [*self.replicas, self.lighthouse]:
            if process is not None:
                process.kill()
                process.wait()


def disturb(job, chance, counts, open_pauses):
    """One thing that happens, if another replica is left that has all. Pauses end by themselves, in
    look_after()."""
    kinds = ["kill", "stop"] + (["link"] if job.args.links else [])
    kind, i = chance.choice(kinds), chance.randrange(len(job.replicas))
    others = [j for j in range(len(job.replicas)) if j != i and j not in open_pauses and job.has_all(j)]
    if i in open_pauses or job.replicas[i].poll() is not None or not others:
        return
    counts[kind] = counts.get(kind, 0) + 1
    until = time.monotonic() + chance.uniform(0.5, job.args.pause)
    if kind == "kill":
        job.replicas[i].kill()
    elif kind == "stop":
        job.replicas[i].send_signal(signal.SIGSTOP)
        open_pauses[i] = until, lambda: job.replicas[i].send_signal(signal.SIGCONT)
    else:
        job.place.link(i, "down")
        open_pauses[i] = until, lambda: job.place.link(i, "up")


def look_after(job, counts, open_pauses):
    for i, (until, undo) in list(open_pauses.items()):
        if time.monotonic() > until:
            undo()
            del open_pauses[i]
    for i, process in enumerate(job.replicas):
        if process.poll() is not None and i not in open_pauses and not job.is_over():
            if process.returncode != -signal.SIGKILL:
                counts["ended by an error"] = counts.get("ended by an error", 0) + 1
            if not any(job.has_all(j) for j in range(len(job.replicas))):
                counts["no replica was left"] = counts.get("no replica was left", 0) + 1
            job.start(i)  # it joins


def run(args, place, seed, folder, is_disturbed):
    job, chance, counts, open_pauses = Job(args, place, seed, folder), random.Random(args.seeds[0]), {}, {}
    begin = time.monotonic()
    try:
        while not any(note["step"] > 5 for notes in job.notes for note in notes):
            time.sleep(0.2)
            job.read()
            if all(process.poll() is not None for process in job.replicas):
                raise SystemExit(f"all replicas ended: {(folder / 'replica0.log').read_text()[-3000:]}")
        following = time.monotonic() + chance.expovariate(1 / args.every)
        while not job.is_over():
            time.sleep(0.1)
            look_after(job, counts, open_pauses)
            if is_disturbed and time.monotonic() > following:
                disturb(job, chance, counts, open_pauses)
                following = time.monotonic() + chance.expovariate(1 / args.every)
        time.sleep(1)
        for until, undo in open_pauses.values():
            undo()
    finally:
        job.end()
    return report(job, counts, time.monotonic() - begin)


def curve(useful, steps):
    """The mean training loss of each tenth of the run. Runs with the same seed have the same batches."""
    tenths = [{} for _ in range(10)]
    for note in useful:
        tenths[10 * note["step"] // steps].setdefault(note["step"], []).append(note["loss"])
    return [
        round(sum(sum(losses) / len(losses) for losses in tenth.values()) / len(tenth), 4) if tenth else None
        for tenth in tenths
    ]


def report(job, counts, wall_s):
    job.read()
    notes = [note for notes in job.notes for note in notes]
    passes = [note for note in notes if "counts" in note]
    losses = {note["evaluation"] for note in notes if "evaluation" in note}
    by_step = {}
    for note in passes:
        if note["counts"]:
            by_step.setdefault(note["step"], set()).add(note["weights"])
    apart = sorted(step for step, weights in by_step.items() if len(weights) > 1)
    useful = [note for note in passes if note["counts"] and note["took part"]]
    return {
        "loss": sum(losses) / len(losses),
        "losses of replicas": len(losses),
        "steps": len(by_step),
        "wall_s": wall_s,
        "replicas per step": len(useful) / max(1, len(by_step)),
        "passes": len(passes),
        "useful": len(useful),
        "training loss": curve(useful, job.args.steps),
        "weights differ at": apart,
        "started": job.n_started,
        "disturbances": counts,
        "most undone": max((note["n_undone"] for note in passes), default=0),
        "lost": max((note["n_lost"] for note in passes), default=0),
    }


def copy_text(path):
    """One for all replicas of all runs, also of those that start after an edit."""
    import torch
    from train_gpt import TEXT, read_bytes

    path.write_bytes(torch.cat(read_bytes(TEXT)).numpy().tobytes())


def main():
    args = arguments()
    if args.replica:
        return replica(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends replicas and network namespaces
    place, results, fewest = Hosts(args.replicas) if args.links else Place(), [], list[float]()
    try:
        with contextlib.nullcontext(args.out) if args.out else tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            folder.mkdir(exist_ok=True)
            copy_text(folder / "text")
            if args.fewest and args.only != "disturbed":
                few = run(
                    argparse.Namespace(**vars(args) | {"replicas": args.fewest}),
                    Place(),
                    args.seeds[0],
                    folder / "few",
                    False,
                )
                print(
                    f"undisturbed, seed {args.seeds[0]}, replicas {args.fewest}: {json.dumps(few)}",
                    flush=True,
                )
                fewest = [few["loss"]]
            for seed in args.seeds if args.only != "disturbed" else []:
                results.append(run(args, place, seed, folder / f"seed{seed}", False))
                print(f"undisturbed, seed {seed}: {json.dumps(results[-1])}", flush=True)
            if args.only == "undisturbed":
                return None
            found = run(args, place, args.seeds[0], folder / "disturbed", True)
            print(f"disturbed: {json.dumps(found)}", flush=True)
    finally:
        place.end()
    if args.only == "disturbed":
        return sys.exit(differ([found]))
    losses, wall = (
        [result["loss"] for result in results],
        sum(result["wall_s"] for result in results) / len(results),
    )
    low, high = min(losses + fewest), max(losses + fewest)
    away, allowed = max(low - found["loss"], found["loss"] - high, 0.0), args.allowed * high
    print(
        f"evaluation loss: undisturbed {', '.join(f'{loss:.4f}' for loss in losses)}; of {args.fewest} "
        "replicas "
        f"{', '.join(f'{loss:.4f}' for loss in fewest) or '-'}; disturbed {found['loss']:.4f} with "
        f"{found['replicas per step']:.2f} replicas per step, "
        f"{away:.4f} outside (allowed {allowed:.4f})"
    )
    print(
        f"goodput: {found['useful'] / found['passes']:.1%} of all passes counted; "
        f"{wall / found['wall_s']:.1%} of the undisturbed speed"
    )
    if away > allowed:
        print("FAILED: the loss is further away than allowed")
    sys.exit(differ([*results, found]) or away > allowed)


def differ(results):
    """Whether replicas did not agree. Says so."""
    apart = next((result["weights differ at"] for result in results if result["weights differ at"]), [])
    if apart:
        print(f"FAILED: replicas had other weights after the same step: {apart[:5]}")
    several = any(result["losses of replicas"] > 1 for result in results)
    if several:
        print("FAILED: replicas have other losses at the end")
    return bool(apart) or several


if __name__ == "__main__":
    main()
