"""What each rule of the schedule is worth: libtagc is built once for each rule that is left out, and the
first-try set-ups run with it.

    lab/studies/schedule_ablation.py --out build/ablation --setups untied "llama bpe" --seeds 1

A run that was broken off goes on where it stopped. The table has the gap of each variant to all rules, of the
same set-up and seed; the first line is how far two dense runs scatter that differ by a millionth of their
initial weights."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ARM = "with the optimizer"

# Name of a variant -> macros of schedule/constants.h that leave the rule out.
VARIANTS = {
    "all rules": {},
    "noise is below 1.1": {"TAGC_MOST_COHERENCE": 1.1},
    "noise is below 1.8": {"TAGC_MOST_COHERENCE": 1.8},
    "weak directions do not follow": {"TAGC_WEAK_COHERENCE": 0},
    "the first moment is short at once": {"TAGC_FADING": 1, "TAGC_FADING_OF_TRAINED": 1},
    "all have their level's share": {"TAGC_MOST_SHARE": 1.0},
    "beta2 is the user's": {"TAGC_SELDOM": 1.0},
    "no alarm for a direction": {"TAGC_ALARM": 1e300},
    "no alarm for a residual": {"TAGC_MOST_GROWTH": 1e300},
    "no alarm for the loss": {"TAGC_MOST_RISE": 1e300},
    "FRESH for one window": {"TAGC_FRESH_WINDOWS": 1},
}


def built(name: str, out: pathlib.Path) -> pathlib.Path:
    """Returns the libtagc of a variant."""
    folder = out / name.replace(" ", "-")
    flags = " ".join(f"-D{macro}={value}" for macro, value in VARIANTS[name].items())
    subprocess.run(
        [
            "cmake",
            "-S",
            ROOT,
            "-B",
            folder,
            "-DCMAKE_BUILD_TYPE=Release",
            "-DTAGC_TRAINER=OFF",
            "-DBUILD_TESTING=OFF",
            "-DTAGC_MPI=OFF",
            f"-DCMAKE_C_FLAGS={flags}",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(
        ["cmake", "--build", folder, "--target", "tagc_shared", "-j2"], check=True, stdout=subprocess.DEVNULL
    )
    return folder / "libtagc.so"


def run(name: str, out: pathlib.Path, arms: list[str], args: argparse.Namespace) -> list[dict]:
    """Returns the rows of a variant, old and new."""
    rows = out / f"{name.replace(' ', '-')}.json"
    environment = os.environ | {"TAGC_LIBRARY": str(built(name, out)), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            ROOT / "lab" / "studies" / "torch_first_try.py",
            "--arms",
            *arms,
            "--setups",
            *args.setups,
            "--seeds",
            *map(str, args.seeds),
            "--steps",
            str(args.steps),
            "--json",
            rows,
        ],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    return json.loads(rows.read_text())


def gaps(
    rows: list[dict], arm: str, base: list[dict], base_arm: str, args: argparse.Namespace
) -> list[float]:
    """Returns the relative gap of an arm to one of `base`, for each set-up and seed that both have."""
    found = {(row["setup"], row["seed"]): row["loss"] for row in rows if row["arm"] == arm}
    wanted = {(row["setup"], row["seed"]): row["loss"] for row in base if row["arm"] == base_arm}
    # as torch_first_try writes them
    names = [setup if args.steps == 500 else f"{setup}, {args.steps} steps" for setup in args.setups]
    keys = [(name, seed) for name in names for seed in args.seeds]
    return [found[key] / wanted[key] - 1 for key in keys if key in found and key in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of builds and rows")
    parser.add_argument("--setups", nargs="+", default=["untied"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    base = run("all rules", out, [ARM, "dense", "dense, nudged"], args)
    print("| left out | gap to all rules, by set-up and seed |\n|---|---|", flush=True)
    lines = [
        ("(dense, scatter)", gaps(base, "dense, nudged", base, "dense", args)),
        ("(dense)", gaps(base, "dense", base, ARM, args)),
    ]
    for name in args.variants:
        if name != "all rules":
            lines.append((name, gaps(run(name, out, [ARM], args), ARM, base, ARM, args)))
        while lines:
            what, found = lines.pop(0)
            print(f"| {what} | {', '.join(f'{100 * gap:+.2f} %' for gap in found)} |", flush=True)


if __name__ == "__main__":
    main()
