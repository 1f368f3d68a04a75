"""What recomputing costs on a GPU: a DenseNet's step at two batch sizes, and replicas in threads.

- ``host``: from the start of a step until all of it has been queued; and how much more than
  without recomputing that is for each region, queuing its second forward included. A small batch
  leaves the device waiting for the host; with a large one the host waits for the device, whose
  queue is finite.
- ``step``: until the device is done, and beside naive's.
- ``replicas``: as many models as threads, each with its stream and its thread, on one device: the
  time of a step of all of them, beside that of one alone. The device's own work adds up; where the
  host's does not hold it up, all take as long as their work, and 1.00 of that is the floor.

Methods take turns; medians.

    python benchmarks/checkpoint_cuda.py --save benchmarks/results
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms
from shared.common import (
    balanced_order,
    bar,
    machine,
    parser_of,
    seconds_together,
    settings_of,
    write_record,
)
from shared.models import LABELS, DenseNet, norm_of

ENGINE_HOOKS = "memsave_ext_checkpoint, engine hooks"
METHODS = [
    "naive", "memsave_ext_batch_norm", "torch", "torch_reentrant", "memsave_ext",
    "memsave_ext_checkpoint", ENGINE_HOOKS,
]  # fmt: skip
Step = Callable[[], None]


def label(method: str) -> str:
    return LABELS.get(method, "memsave_ext.checkpoint, engine hooks")


class Job:
    """A network, a batch, and a step of training without an optimizer."""

    def __init__(self, method: str, batch: int, options: argparse.Namespace) -> None:
        self.hooks = method == ENGINE_HOOKS
        name = "memsave_ext_checkpoint" if self.hooks else method
        self.device = torch.device(options.device)
        net = DenseNet(options.depth, options.growth, checkpoint=name, norm=norm_of(name))
        self.net = net.to(self.device)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(batch, 3, 32, 32, generator=generator).to(self.device)
        self.y = (torch.arange(batch) % 10).to(self.device)

    def forward(self) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.x), self.y)

    def step(self) -> None:
        before = ms.use_engine_hooks(True) if self.hooks else False
        self.forward().backward()
        if self.hooks:
            ms.use_engine_hooks(before)
        for parameter in self.net.parameters():
            parameter.grad = None

    def regions(self) -> int:
        return sum(hasattr(module, "bn_function") for module in self.net.modules())


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(run: Step, device: str) -> tuple[float, float]:
    """Seconds until all is queued, and until it is done."""
    synchronize(device)
    start = time.perf_counter()
    run()
    queued = time.perf_counter() - start
    synchronize(device)
    return queued, time.perf_counter() - start


def overhead(batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    jobs = {name: Job(name, batch, options) for name in METHODS}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    warmup = 3
    for round_ in bar(range(warmup + options.rounds), show=options.progress):
        for name in balanced_order(METHODS, round_):
            taken = timed(jobs[name].step, options.device)
            if round_ >= warmup:
                seconds[name].append(taken)
    host = {name: statistics.median(q for q, _ in values) for name, values in seconds.items()}
    step = {name: statistics.median(s for _, s in values) for name, values in seconds.items()}
    regions = jobs["naive"].regions()
    rows = []
    for name in METHODS:
        # Their kernels are others, and so is what queues them.
        base = "memsave_ext_batch_norm" if name.startswith("memsave_ext") else "naive"
        rows.append(
            {
                "method": name,
                "batch": batch,
                "host_ms": host[name] * 1e3,
                "host_us_per_region": (host[name] - host[base]) / regions * 1e6,
                "step_ms": step[name] * 1e3,
                "step_ratio": step[name] / step["naive"],
            }
        )
    return rows


def together(jobs: list[Job], steps: int, device: str) -> float:
    """Seconds that each of ``steps`` steps of all of them takes, a thread for each."""

    def work(job: Job) -> None:
        stream = torch.cuda.Stream() if device.startswith("cuda") else None
        with torch.cuda.stream(stream):
            for _ in range(steps):
                job.step()
        if stream is not None:
            stream.synchronize()

    return seconds_together([functools.partial(work, job) for job in jobs]) / steps


def replicas(batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    # use_engine_hooks is of the whole process: threads may not turn it on and off.
    methods = [name for name in METHODS if name != ENGINE_HOOKS]
    rows = []
    for name in bar(methods, show=options.progress):
        jobs = [Job(name, batch, options) for _ in range(options.threads)]
        for job in jobs:
            job.step()
        synchronize(options.device)
        counts = (1, options.threads)
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        for round_ in range(1 + options.rounds // 2):
            for count in counts:
                taken = together(jobs[:count], options.steps, options.device)
                if round_:
                    seconds[count].append(taken)
        one, all_ = (statistics.median(seconds[count]) for count in counts)
        rows.append(
            {
                "method": name,
                "batch": batch,
                "threads": options.threads,
                "one_ms": one * 1e3,
                "together_ms": all_ * 1e3,
                "ratio": all_ / (one * options.threads),
            }
        )
    return rows


def show(record: dict[str, Any]) -> None:
    print(f"{'':40}{'batch':>7}{'host ms':>10}{'us/region':>11}{'step ms':>10}{'/ naive':>9}")
    for row in record["overhead"]:
        print(
            f"{label(row['method']):40}{row['batch']:7}{row['host_ms']:10.2f}"
            f"{row['host_us_per_region']:11.1f}{row['step_ms']:10.2f}{row['step_ratio']:8.2f}x"
        )
    print(f"\n{'replicas in threads':40}{'batch':>7}{'one ms':>10}{'all ms':>10}{'/ sum':>9}")
    for row in record["replicas"]:
        print(
            f"{label(row['method']):40}{row['batch']:7}{row['one_ms']:10.2f}"
            f"{row['together_ms']:10.2f}{row['ratio']:8.2f}x"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depth", type=int, default=100, help="of the DenseNet-BC")
    parser.add_argument("--growth", type=int, default=12, help="its growth rate")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 256])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of each replica in a round")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device} needs a CUDA device")
    torch.manual_seed(0)
    names = ("depth", "growth", "batches", "rounds", "threads", "steps")
    record = {
        "machine": machine(options.device),
        "settings": settings_of(options, *names),
        "labels": {method: label(method) for method in METHODS},
        "overhead": [row for batch in options.batches for row in overhead(batch, options)],
        "replicas": [row for batch in options.batches for row in replicas(batch, options)],
    }
    show(record)
    print(write_record(options.save, "checkpoint_cuda", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
