"""The table of the original repository, row by row: a DenseNet on one device and on two.

Its README (https://github.com/csrhddlam/pytorch-checkpoint) compares no checkpoint, torch's
("previous") and its own, on one GPU and on two under nn.DataParallel, with batches of 4, 256 and
512 in all. Here the same rows, with each row's time against naive's beside that of the original.

With two GPUs these are nn.DataParallel's. With one GPU both replicas are on it. On a CPU a device
is a thread with one core: the replicas' forwards and backwards run in two threads of Python, which
compete for its lock as those of DataParallel do; network and batches are smaller. Peak memory is
that of the device that needs most: parameters, gradients, momenta, activations, temporaries.

    python benchmarks/data_parallel.py --save benchmarks/results
"""

import argparse
import gc
import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from plot import draw
from shared.checks import median_ratio
from shared.common import (
    bar,
    figure,
    interleave,
    machine,
    median_and_spread,
    parser_of,
    settings_of,
    show_bars,
    show_left_out,
    write_record,
)
from shared.models import LABELS, STRATEGIES, reasons
from shared.replicas import DataParallel, Replicas
from shared.training import Job
from tables.training import data_parallel_caption, data_parallel_rows

# As its README has them: memory in G, seconds of a step; by what is here called method, number of
# devices and batch.
ORIGINAL = {
    ("naive", 1, 256): (9.93, 0.42),
    ("naive", 2, 4): (0.65, 0.10),
    ("naive", 2, 256): (5.25, 0.27),
    ("naive", 2, 512): (9.93, 0.50),
    ("torch", 1, 256): (5.38, 0.52),
    ("torch", 1, 512): (10.1, 1.00),
    ("torch", 2, 4): (0.62, 1.40),
    ("torch", 2, 256): (2.98, 1.41),
    ("torch", 2, 512): (5.39, 1.53),
    ("memsave_ext", 1, 256): (5.37, 0.50),
    ("memsave_ext", 1, 512): (10.1, 0.97),
    ("memsave_ext", 2, 4): (0.62, 0.13),
    ("memsave_ext", 2, 256): (2.97, 0.31),
    ("memsave_ext", 2, 512): (5.37, 0.58),
}
METHODS = [name for name in STRATEGIES if name != "torch_no_early_stop"]
BATCHES = {"cuda": [4, 256, 512], "cpu": [2, 16, 32]}
SHAPE = {"cuda": (100, 12), "cpu": (64, 6)}  # depth and growth rate
Row = dict[str, Any]


def replicas_on(device: torch.device, count: int) -> tuple[type, str]:
    """What trains on so many devices, and what a device is."""
    if device.type == "cpu":
        return Replicas, "a thread with one core"
    if count <= torch.cuda.device_count():
        return (DataParallel if count > 1 else Replicas), "a GPU"
    return Replicas, "a replica, all on one GPU"


def original(method: str, devices: int, place: int) -> dict[str, Any]:
    """Of the batch at this place in the row of batches."""
    batches = BATCHES["cuda"]
    if place >= len(batches):
        return {}
    # There the official one was reentrant, and is either here; ours has two forms.
    row = {"torch_reentrant": "torch", "memsave_ext_checkpoint": "memsave_ext"}.get(method, method)
    gigabytes, seconds = ORIGINAL.get((row, devices, batches[place]), (None, None))
    naive = ORIGINAL.get(("naive", devices, batches[place]))
    return {
        "original_batch": batches[place],
        "original_gb": gigabytes,
        "original_seconds": seconds,
        "original_time_ratio": seconds / naive[1] if naive and seconds else None,
    }


def measure(devices: int, place: int, options: argparse.Namespace) -> list[Row]:
    """A row for each method, at one number of devices and one batch."""
    device, batch = torch.device(options.device), options.batch_sizes[place]
    job = Job(options.depth, options.growth_rate, batch, 1, options.rounds, 0, device)
    kind, where = replicas_on(device, devices)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(10, (batch,), generator=generator).to(device)
    cases: dict[str, Callable[[], None]] = {}
    rows = []
    for name in options.methods:
        row = {"method": name, "label": LABELS[name], "devices": devices, "device_is": where,
               "batch_size": batch, **original(name, devices, place)}  # fmt: skip
        rows.append(row)
        try:
            trained = kind(name, job, devices)
            row["peak_memory_bytes"] = trained.peak(x, y)
        except torch.OutOfMemoryError:
            row["peak_memory_bytes"] = None
            continue
        cases[name] = partial(_step, trained, x, y)
    seconds = interleave(cases, options.rounds, warmup=1, progress=False)
    naive = next((row for row in rows if row["method"] == "naive"), None)
    for row in rows:
        taken = seconds.get(row["method"])
        median, spread = median_and_spread(taken) if taken else (None, None)
        row |= {"seconds_per_step": median, "seconds_per_step_iqr": spread}
        row |= {"memory_ratio": None, "time_ratio": None}
        if naive and taken and naive["peak_memory_bytes"]:
            row["memory_ratio"] = row["peak_memory_bytes"] / naive["peak_memory_bytes"]
            row["time_ratio"] = median_ratio(taken, seconds["naive"])
    return rows


def _step(trained: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    trained.step(x, y)
    if x.is_cuda:
        torch.cuda.synchronize()


def bars(rows: list[Row]) -> list[Row]:
    """Against naive no slower than the original was; checkpoints need no more than torch's."""
    of = {(row["method"], row["devices"], row["batch_size"]): row for row in rows}
    original = {
        (row["devices"], row["batch_size"]): row["original_time_ratio"]
        for row in rows
        if row["method"] == "memsave_ext"
    }
    figures = []
    for row in rows:
        place = row["devices"], row["batch_size"]
        if row["method"] not in ("memsave_ext", "memsave_ext_remat") or not row["time_ratio"]:
            continue
        where = f"{row['label']}, {place[0]} devices, batch {place[1]}"
        if at_most := original.get(place):
            figures.append((f"{where}: time over naive", row["time_ratio"], at_most))
        peer = of.get(("torch", *place))
        if row["method"] == "memsave_ext" and peer and peer["peak_memory_bytes"]:
            ratio = row["peak_memory_bytes"] / peer["peak_memory_bytes"]
            figures.append((f"{where}: memory over torch's", ratio, 1.01))
    return [figure(*each) for each in figures]


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="default 4 256 512, CPU 2 16 32")
    parser.add_argument("--methods", nargs="+", choices=STRATEGIES, metavar="NAME")
    parser.add_argument("--depth", type=int, help="default 100, on a CPU 64")
    parser.add_argument("--growth-rate", type=int, help="default 12, on a CPU 6")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    options.batch_sizes = options.batch_sizes or BATCHES[options.device]
    depth, growth_rate = SHAPE[options.device]
    options.depth, options.growth_rate = options.depth or depth, options.growth_rate or growth_rate
    for count, batch in itertools.product(options.devices, options.batch_sizes):
        if count < 1 or batch % count:
            parser.error(f"--batch-sizes: {batch} images are not so many for each of {count}")
    options.methods = options.methods or METHODS
    options.methods = [name for name in options.methods if name not in reasons()]
    torch.set_num_threads(1)
    rows = []
    places = range(len(options.batch_sizes))
    gc.freeze()  # what is there already need not be looked through after every batch
    for devices, place in bar(list(itertools.product(options.devices, places)), options.progress):
        rows += measure(devices, place, options)
        gc.collect()
    names = ("devices", "batch_sizes", "methods", "depth", "growth_rate", "rounds")
    record = {
        "machine": machine(options.device),
        "settings": settings_of(options, *names) | {"threads": 1},
        "rows": rows,
        "left_out": reasons(),
        "bars": bars(rows),
    }
    print(f"\n{data_parallel_rows(record)}\n\n{data_parallel_caption(record)}\n")
    show_left_out(record["left_out"])
    show_bars(record["bars"])
    path = write_record(options.save, "data_parallel", record)
    print(f"{path}\n{draw(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
