"""The main job: train a DenseNet-BC on real images, naively and with each way to recompute.

    python benchmarks/densenet.py                            # handwritten digits, no download
    python benchmarks/densenet.py --data cifar10 --root PATH --depth 100 --epochs 300

All methods start from the same weights and are trained in lock step on the same batches, so that a
machine whose speed drifts treats them alike. Prints a table, checks that recomputing changed
nothing, writes the result as JSON and a picture.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from plot import draw
from shared.checks import check, median_ratio, statistics_diff
from shared.common import ROOT, machine, median_and_spread, show_left_out, write_record
from shared.data import DataError, Images, load
from shared.models import LABELS, STRATEGIES, available, reasons, without_checkpoint
from shared.training import Job, Trainer, train
from tables.training import densenet_caption, densenet_table

SETTINGS = ("data", "depth", "growth_rate", "batch_size", "epochs", "seed")


def measure(trainers: dict[str, Trainer], test: Images, job: Job) -> list[dict[str, Any]]:
    """One row of the table per method."""
    naive = trainers.get("naive")
    keep_everything = {without_checkpoint(name) for name in trainers}
    rows = []
    for name, trainer in trainers.items():
        seconds = trainer.seconds[job.skip :]
        median, spread = median_and_spread(seconds)
        row = {
            "method": name,
            "label": LABELS[name],
            "devices": 1,
            "batch_size": job.batch_size,
            "peak_memory_bytes": trainer.memory.peak,
            "seconds_per_step": median,
            "seconds_per_step_iqr": spread,
            "loss": statistics.fmean(trainer.losses[-(job.steps // job.epochs) :]),
            "test_error": trainer.test_error(test.in_order(job.batch_size, job.device)),
            "bn_updates_per_step": int(trainer.updates().max()) / job.steps,
            "running_stats_max_diff": None,
            "memory_ratio": None,
            "time_ratio": None,
        }
        if naive:
            if name not in keep_everything:
                other = trainers.get(without_checkpoint(name), naive)
                row["running_stats_max_diff"] = statistics_diff(trainer, other)
            row["memory_ratio"] = trainer.memory.peak / naive.memory.peak
            row["time_ratio"] = median_ratio(seconds, naive.seconds[job.skip :])
        rows.append(row)
    return rows


def option_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add, whole = parser.add_argument, {"type": int, "metavar": "N"}
    add("--data", choices=("digits", "cifar10"), default="digits", help="images to train on")
    add("--root", metavar="PATH", help="folder of CIFAR-10, for --data cifar10")
    both = {"type": str.lower, "choices": ("true", "false")}
    add("--efficient", **both, help="train memsave_ext alone (true) or naive alone (false)")
    add("--methods", metavar="A,B", default=",".join(available()), help="what to train")
    add("--depth", **whole, default=64, help="layers, 6 * n + 4")
    add("--growth-rate", **whole, default=6, help="channels each layer adds")
    add("--batch-size", **whole, default=16, help="images per step")
    add("--epochs", **whole, default=1, help="passes over the training images")
    add("--steps", **whole, help="stop after so many (default: when the epochs are over)")
    add("--seed", **whole, default=0, help="of weights and order of images")
    add("--threads", **whole, default=torch.get_num_threads(), help="of torch on CPU")
    add("--device", default=device, help="where to train")
    add("--save", metavar="DIR", type=Path, default=ROOT / "benchmarks/out", help="for the results")
    add("--no-progress", dest="progress", action="store_false", help="no progress bar")
    return parser


def prepare(args: argparse.Namespace) -> tuple[list[str], Job, Images, Images]:
    """Methods, job, training and test images. Raises ValueError that names the option at fault."""
    methods = list(dict.fromkeys(args.methods.split(",")))
    if args.efficient:
        methods = ["memsave_ext" if args.efficient == "true" else "naive"]
    for name in methods:
        if name not in STRATEGIES:
            raise ValueError(f"--methods: unknown {name!r}, choose from {','.join(STRATEGIES)}")
        if name in reasons():
            raise ValueError(f"--methods: {name} cannot run here: {reasons()[name]}")
    for name in ("batch_size", "epochs", "steps", "growth_rate", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if args.depth < 10 or (args.depth - 4) % 6:
        raise ValueError(f"--depth must be 6 * n + 4 (10, 16, ... 40, ... 100), got {args.depth}")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch {torch.__version__} sees no GPU")
    images, test = load(args.data, args.root)
    if args.batch_size > len(images):
        raise ValueError(f"--batch-size {args.batch_size} is more than the {len(images)} images")
    steps = args.epochs * (len(images) // args.batch_size)
    steps = min(steps, args.steps or steps)
    shape = args.depth, args.growth_rate, args.batch_size, args.epochs
    return methods, Job(*shape, steps=steps, seed=args.seed, device=device), images, test


def main(argv: list[str] | None = None) -> int:
    args = option_parser().parse_args(argv)
    try:
        methods, job, images, test = prepare(args)
    except (ValueError, DataError) as error:
        print(f"densenet.py: error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)

    trainers = {name: Trainer(name, job) for name in methods}
    train(trainers, images, job, args.progress)
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings |= {"steps": job.steps, "threads": args.threads, "methods": methods}
    record = {
        "machine": machine(args.device),
        "settings": settings,
        "rows": measure(trainers, test, job),
        "left_out": reasons(),
        "checks": check(trainers, images, job),
    }

    print(f"\n{densenet_table(record)}\n\n{densenet_caption(record)}\n")
    for item in record["checks"]:
        state = {True: "ok", False: "FAILED", None: "note"}[item["ok"]]
        print(f"{state:6}  {item['name']}: {item['text']}")
    show_left_out(record["left_out"])
    path = write_record(args.save, "densenet", record)
    print(f"\n{path}\n{draw(path)}")
    return 1 if any(item["ok"] is False for item in record["checks"]) else 0


if __name__ == "__main__":
    sys.exit(main())
