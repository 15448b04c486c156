"""tagc and its peers at equal bits and equal simulated time: one command per table.

    python -m pip install -r lab/parity/requirements.txt  # beside torch; the library: make build
    python lab/parity/parity.py tiny            # every arm but LocalSteps, 0.2 M parameters, 240 steps
    python lab/parity/parity.py tiny-long       # 15 arms, 0.2 M parameters, 10 tokens per parameter
    python lab/parity/parity.py cluster         # 7 arms on 2 hosts of 2 ranks
    python lab/parity/parity.py tiny-untied     # fewer arms, the head has a matrix of its own
    python lab/parity/parity.py tiny-no-bias    # likewise without biases, which stay in fp32
    python lab/parity/parity.py 3m              # the finalists, to 10 tokens per parameter
    python lab/parity/parity.py 10m             # a few of them, a shorter stretch
    python lab/parity/parity.py curve           # dense, and FSDP2 with every leg, on 2 hosts of 2
    python lab/parity/parity.py peers           # peers in their own regime: 1,000 exchanges every 30 steps
    python lab/parity/parity.py curve-rate      # at which rate dense ends lowest there

Ctrl-C or --minutes ends it, the same command goes on, on another machine with --take-over; the table has a
row for whatever is there. lab/results/parity/NAME.json and .md are written after each run, NAME.svg at the
end (lab/studies/wall_clock.py draws those of several ranks per host); `--tables` makes them anew without
running. `--arms` runs these only, in that order; the tables still have the others that were run."""

import argparse
import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# glibc returns every large tensor to the system and zeroes it anew: 15 % of a step. The ranks inherit these.
os.environ.setdefault("MALLOC_MMAP_MAX_", "0")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 40))
if (ROOT / "build" / "libtagc.so").exists():
    os.environ.setdefault("TAGC_LIBRARY", str(ROOT / "build" / "libtagc.so"))

import arms
import corpus
import drawing
import runner
import tables


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="arms: " + ", ".join(arms.BY_NAME)
    )
    parser.add_argument("what", choices=["corpus", *arms.SETTINGS])
    parser.add_argument(
        "--arms", nargs="+", choices=arms.BY_NAME, metavar="ARM", help="only these, in this order"
    )
    parser.add_argument(
        "--cache",
        type=pathlib.Path,
        default=pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
        / "tagc"
        / "parity",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="count the finished runs of the old NAME.json as done: go on after another machine",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after that")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "lab" / "results" / "parity")
    args = parser.parse_args()
    if args.what == "corpus":
        print(json.dumps(corpus.make(args.cache), indent=1))
        return
    setting = arms.SETTINGS[args.what]
    text = corpus.make(args.cache, setting.n_vocabulary)
    folder, stem = args.cache / "runs" / setting.name, args.out / setting.name

    if args.take_over:
        runner.take_over(folder, json.loads(stem.with_suffix(".json").read_text()))

    def write():
        found = runner.result(
            setting, text, runner.read(folder, is_whole=False), ["lab/parity/parity.py", args.what]
        )
        args.out.mkdir(parents=True, exist_ok=True)
        kept = found | {"runs": [runner.small(run) for run in found["runs"]]}
        rows = json.dumps(kept, separators=(",", ":")).replace('{"arm"', '\n{"arm"')
        stem.with_suffix(".json").write_text(rows + "\n")
        stem.with_suffix(".md").write_text(tables.markdown(found))
        return found

    def say(line):
        print(line, flush=True)
        write()

    if not args.tables:
        try:
            is_whole = runner.run_all(
                setting, args.cache, folder, args.arms or setting.arms, args.jobs, args.minutes, say
            )
            print("whole" if is_whole else "unfinished: the same command goes on", flush=True)
        except KeyboardInterrupt:
            print("stopped: the same command goes on", flush=True)
    found = write()
    if not setting.n_hosts:
        drawing.draw(found, stem)
    print(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
