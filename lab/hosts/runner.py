"""Runs an experiment: makes its hosts, checks their link, starts `tagc` across them, collects what came
out."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

import corpus
import hosts
import linkcheck
import quality
import results
import summary
import torchbench
import traced
from common import LAB, ROOT, LabError
from experiment import split_arm

MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


class Runner:
    def __init__(self, experiment, tagc, command, is_quiet, python=None):
        """python: an interpreter with torch, for kind "torch"."""
        self.experiment, self.tagc, self.command, self.is_quiet = experiment, tagc, command, is_quiet
        self.python = python
        self.deadline = time.monotonic() + 60 * (4 * experiment.minutes + 2)
        self.traces = {}  # name of the file -> where it lies now
        self.scratch = self.data = self.forks = self.origin = None

    def run(self, out_dir, numbers=None):
        """All cases, or those of these numbers; the path of the result. Nothing is written unless all went
        well; with numbers, each case that went well is, beside those that an earlier run left there."""
        out_dir = pathlib.Path(out_dir)
        _check_writable(out_dir)
        _check_memory(self.experiment)
        path = out_dir / f"{self.experiment.name}.json"
        kept = results.kept_cases(path, self.experiment, numbers) if numbers else {}
        most_hosts = max(case.hosts for case in self.experiment.cases)
        self.origin = origin = results.origin(self.command, self.tagc, most_hosts)
        if origin["is_busy"]:
            self.say(
                f"note: other work keeps {origin['busy_before']:.0%} of this machine's cores busy: times "
                "will be "
                "of little worth"
            )
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix=f"{hosts.PREFIX}{os.getpid()}-"))
        try:
            if self.experiment.kind == "train":
                self.data = corpus.folder_of(self.experiment.data or "words", self.tagc, self.scratch)
            if self.experiment.base:
                quality.check_base(self.experiment)
                self.forks = quality.Quality(self)
            for number, case in enumerate(self.experiment.cases):
                if numbers and number not in numbers:
                    continue
                kept[number] = summary.case(self._case(case, number))
                if numbers:
                    self._write(out_dir, origin, kept)
            return self._write(out_dir, origin, kept)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _write(self, out_dir, origin, cases):
        for name, path in self.traces.items():
            shutil.copy(path, out_dir / f".{name}.part")
            os.replace(out_dir / f".{name}.part", out_dir / name)
        path = out_dir / f"{self.experiment.name}.json"
        results.write(
            path,
            {
                "type": "lab",
                "format": 1,
                "experiment": self.experiment.name,
                "title": self.experiment.title,
                "origin": origin,
                "settings": self.experiment.settings,
                "cases": [cases[number] for number in sorted(cases)],
            },
        )
        return path

    def say(self, text):
        if not self.is_quiet:
            print(text, flush=True)

    def _case(self, case, number):
        self.say(f"== {self.experiment.name}, case {number}: {case.text()}")
        made = {
            "number": number,
            "commit": self.origin["commit"],
            "date": results.now_text(),
            "hosts": case.hosts,
            "ranks_per_host": case.ranks_per_host,
            "link": None,
            "interface": None,
        }
        if case.hosts == 1:
            return made | self._measure(case, None)
        with hosts.Network(case, self.tagc) as network:
            made["link"] = linkcheck.measure(
                network, 1 if self.experiment.is_quick else 2 if case.latency else 3
            )
            if case.latency:
                self.say(
                    f"latency: {case.latency} one way; round trips by ping: "
                    + ", ".join(f"{1e3 * s:.2f}" for s in made["link"]["latency"]["ping_round_trip_s"])
                    + " ms"
                )
            short = linkcheck.shortfall(made["link"])
            self.say(
                f"link: {case.link_text()}{', in WireGuard' if case.wireguard else ''}, plain TCP gets "
                + ", ".join(f"{bits / 1e9:.3f}" for bits in made["link"]["tcp_both_ways_bits_per_s"])
                + " Gbit/s in both directions at once"
                + (f"\nnote: {short}" if short else "")
            )
            before = network.counters()
            made |= self._measure(case, network)
            after = network.counters()
            if report := network.end_delay():
                made["link"]["latency"]["forwarder"] = report
        made["interface"] = {name: [b - a for a, b in zip(before[name], after[name])] for name in after}
        self._compare_bytes(case, made)
        return made

    def _measure(self, case, network):
        if self.forks:
            return self.forks.case(case)
        if self.experiment.kind == "torch":
            return torchbench.run(self, case, network, _options(case.options))
        return self._bench(case, network) if self.experiment.kind == "bench" else self._train(case, network)

    # ---- the command ----

    def _launch(self, case, network, words):
        """The words of `tagc` on all ranks of a case."""
        tagc = [str(self.tagc), words[0]]
        if network is None:
            return [*tagc, *words[1:], f"--ranks={case.ranks_per_host}"]
        places = ",".join(f"{hosts.address(host)}:{case.ranks_per_host}" for host in network.hosts)
        btl = "tcp,self" if case.ranks_per_host == 1 else "tcp,vader,self"
        return network.inside(
            1,
            "mpirun",
            "--mca",
            "plm_rsh_agent",
            LAB / "hosts" / "agent",
            "--host",
            places,
            "--bind-to",
            "none",
            "--mca",
            "btl",
            btl,
            "--mca",
            "btl_tcp_if_include",
            hosts.SUBNET,
            "--mca",
            "oob_tcp_if_include",
            hosts.SUBNET,
            *tagc,
            *words[1:],
        )

    def _run(self, words, network, shows=False):
        self.run_all([words], network, shows)

    def run_all(self, commands, network, shows=False):
        """Runs commands side by side to their end, each in a group of its own so that all of it can be ended,
        which happens when one fails. Their output goes to a log, and with `shows` to the terminal too."""
        environment = {**os.environ, **MPI_ENVIRONMENT, "TMPDIR": str(self.scratch)}
        if network:
            environment["TAGC_LAB"] = network.prefix
        log = self.scratch / "log"
        with open(log, "wb") as out, open(log, "rb") as read:
            processes = []
            try:
                for words in commands:
                    processes.append(
                        subprocess.Popen(
                            [str(word) for word in words],
                            cwd=ROOT,
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=subprocess.STDOUT,
                            env=environment,
                            start_new_session=True,
                        )
                    )
                failed = self._wait(
                    processes, read if shows and not self.is_quiet else None, commands[0], network
                )
            finally:
                for process in processes:
                    _end_group(process)
        if failed is not None:
            words, process = commands[failed], processes[failed]
            last = log.read_text(errors="replace").strip().splitlines()[-15:]
            raise LabError(
                f"exit status {process.returncode} of: {' '.join(map(str, words))}\nits last lines:\n"
                + "\n".join("    " + line for line in last or ["(none)"])
            )

    def run_command(self, words):
        """A command of this machine alone; its seconds."""
        start = time.monotonic()
        self._run(words, None)
        return time.monotonic() - start

    def _wait(self, processes, log, words, network):
        """Until all have ended or one has failed: which, or None. Raises when they run over links that are
        gone."""
        failed, running = None, True
        while running and failed is None:
            for process in processes:
                try:
                    process.wait(timeout=0.3 / len(processes))
                except subprocess.TimeoutExpired:
                    pass
            if network:
                network.check()
            running = any(process.returncode is None for process in processes)
            failed = next((i for i, process in enumerate(processes) if process.returncode), None)
            if running and time.monotonic() > self.deadline:
                raise LabError(
                    f"the experiment takes more than four times the {self.experiment.minutes} minutes "
                    f"that it says; ended: {' '.join(map(str, words))}"
                )
            if log:
                print(log.read().decode(errors="replace"), end="", flush=True)
        return failed

    # ---- bench ----

    def _bench(self, case, network):
        path = self.scratch / "bench.json"
        path.unlink(missing_ok=True)
        words = ["bench", f"--arms={','.join(case.arms)}", *_options(case.options), f"--json={path}"]
        self._run(self._launch(case, network, words), network, shows=True)
        try:
            return {"bench": json.loads(path.read_text())}
        except (OSError, json.JSONDecodeError) as error:
            raise LabError(f"tagc bench ended well, but its result cannot be read: {error}") from None

    # ---- train ----

    def _train(self, case, network):
        runs = []
        todo = [(seed, arm) for seed in self.experiment.seeds or [0] for arm in case.arms]
        for number, (seed, arm) in enumerate(todo, 1):
            start = time.monotonic()
            runs.append(self._one_run(case, network, seed, arm))
            seconds = time.monotonic() - start
            runs[-1]["wall_s"] = seconds
            losses = runs[-1].get("evals") or [{"val_loss": None}]
            loss = f", validation loss {losses[-1]['val_loss']:.4f}" if losses[-1]["val_loss"] else ""
            self.say(f"[{number}/{len(todo)}] {runs[-1]['label']}, seed {seed}: {seconds:.1f} s{loss}")
        return {"runs": runs}

    def _one_run(self, case, network, seed, arm):
        label, config, extras = split_arm(arm)
        folder = self.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        words = [
            "train",
            f"--config={config}",
            f"--data={self.data}",
            f"--seed={seed}",
            "--quiet",
            *_options(case.options),
            *extras,
        ]
        run = {"label": label, "seed": seed}
        if self.experiment.trace:  # no metrics: a folder would get checkpoints, of gigabytes for a real model
            run["trace"] = f"{self.experiment.name}-{re.sub('[^A-Za-z0-9.-]+', '-', label)}.trace.json"
            self.traces[run["trace"]] = self.scratch / run["trace"]
            words += [f"--trace={self.traces[run['trace']]}", f"--trace-steps={self.experiment.trace}"]
        else:
            words.append(f"--out={folder}")
        command = [str(word) for word in self._launch(case, network, words)]
        before = network.counters() if network else None
        self._run(command, network)
        if self.experiment.trace:
            run |= {"world_size": case.world_size, "n_params": None, "evals": []}
            run["timeline"] = traced.shares(self.traces[run["trace"]], self.experiment.units)
        else:
            run |= results.run_summary(folder / "metrics.jsonl")
        if network:
            run["shaped_bytes"] = [
                b - a for a, b in zip(before["shaped_bytes"], network.counters()["shaped_bytes"])
            ]
        return run

    def _compare_bytes(self, case, made):
        """What the transport counted against what left the first host, when that host has one rank and its
        runs do nothing but steps: the rest is headers, acknowledgements and the launcher's words."""
        runs = [run for run in made.get("runs", []) if "n_bytes_sent" in run and not run["evals"]]
        if case.ranks_per_host != 1 or not runs:
            return
        counted = sum(sum(run["n_bytes_sent"].values()) * run["n_steps"] for run in runs)
        left = sum(run["shaped_bytes"][0] for run in runs)
        made["interface"] |= {"counted_bytes": counted, "overhead": left / counted}
        self.say(
            f"bytes: {counted:.0f} counted by the transport of rank 0, {left} left its host, "
            f"{left / counted - 1:+.1%}"
        )


def _check_writable(folder):
    """Asked before the work, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise LabError(f"--out {folder}: {error.strerror}") from None


def _check_memory(experiment):
    """All hosts share this machine's memory, which the ranks cannot know."""
    free = results.available_memory_bytes()
    if experiment.memory_gb and free is not None and free < 1e9 * experiment.memory_gb:
        raise LabError(
            f"{experiment.name} needs {experiment.memory_gb} GB of memory, and {free / 1e9:.1f} are free"
        )


def _end_group(process):
    """Nothing of a command's group survives, also when its leader is gone already."""
    for number, patience_s in ((signal.SIGTERM, 2), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        try:
            process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            continue


def _options(options):
    return [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in options.items()
    ]
