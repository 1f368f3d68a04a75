"""What following the memory of a DenseNet's training step costs: with and without memory.track().

The same model takes every step, in turn plain and tracked; entering and leaving a block happen once
per round, outside what is timed, as around the many steps of a training.

    python benchmarks/memory_overhead.py --save benchmarks/results
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import memsave_ext as ms
from shared.common import (
    balanced_order,
    bar,
    figure,
    machine,
    median_and_spread,
    parser_of,
    settings_of,
    show_bars,
    write_record,
)
from shared.models import DenseNet

OFF = "not tracked"
BAR = 1.05


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = DenseNet(options.depth, options.growth_rate, checkpoint=options.method, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(options.batch_size, 3, 32, 32)
    labels = torch.randint(10, (options.batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    tracks: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        OFF: nullcontext,
        "track()": ms.memory.track,
        "track(model, optimizer)": lambda: ms.memory.track(model, optimizer),
        "track(model, optimizer, stacks=True)": lambda: ms.memory.track(
            model, optimizer, stacks=True
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in tracks}
    events: dict[str, int] = {}
    for round_ in bar(range(options.rounds), show=options.progress):
        for name in balanced_order(list(tracks), round_):
            with tracks[name]() as track:
                step()
                for _ in range(options.steps):
                    start = time.perf_counter()
                    step()
                    seconds[name].append(time.perf_counter() - start)
            if track is not None:
                events[name] = len(track.timeline.time) // (options.steps + 1)
    rows = []
    for name, taken in seconds.items():
        middle, spread = median_and_spread(taken)
        base, _ = median_and_spread(seconds[OFF])
        rows.append(
            {
                "case": name,
                "step_ms": middle * 1e3,
                "spread_ms": spread * 1e3,
                "ratio": middle / base,
                "changes": events.get(name),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="timed, in each round and case")
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--growth-rate", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--method", default="naive", help="of densenet.py")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = measure(options)
    names = ("rounds", "steps", "depth", "growth_rate", "batch_size", "method", "threads")
    tracked = next(row for row in rows if row["case"] == "track(model, optimizer)")
    record = {
        "machine": machine(),
        "settings": settings_of(options, *names),
        "rows": rows,
        "bars": [figure("step tracked over not tracked", tracked["ratio"], BAR)],
    }
    for row in rows:
        changes = f"{row['changes']} changes" if row["changes"] else ""
        print(
            f"{row['case']:38}{row['step_ms']:8.1f} ± {row['spread_ms'] / 2:.1f} ms"
            f" ({row['ratio']:.3f}x)  {changes}"
        )
    show_bars(record["bars"], digits=3)
    print(write_record(options.save, "memory_overhead", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
