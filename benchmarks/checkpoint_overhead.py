"""What checkpointing a region costs on the host, beyond running it twice.

Overhead = forward and backward of the checkpointed region - the same without checkpoint - one more
forward. The region multiplies a tiny tensor K times by a weight, so that K tensors are saved and
nothing but the host is measured. Peers and ours are interleaved in one process; minima, because
whatever disturbs a call only adds to it. Floor: below zero, as the forward of an explicit region
builds no graph, which the plain forward does.

    python benchmarks/checkpoint_overhead.py --save benchmarks/results
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import memsave_ext as ms
from common import interleave, machine, write_record
from memsave_ext import _native
from memsave_ext._reference.checkpointing import checkpoint_apply as python_apply

Region = Callable[[Tensor], Tensor]
TORCH = "torch, use_reentrant=False"
REENTRANT = "torch, use_reentrant=True"
OURS = "CheckpointFunction"


def cases(saved_tensors: int, device: str) -> dict[str, Callable[[], None]]:
    """What is timed, by name; ``plain`` and ``forward`` are subtracted from the others."""
    x = torch.ones(8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)

    def region(value: Tensor) -> Tensor:
        for _ in range(saved_tensors):
            value = value * weight
        return value

    def backward(call: Callable[[], Tensor]) -> None:
        call().sum().backward()
        x.grad = weight.grad = None

    def with_engine_hooks(call: Callable[[], Tensor]) -> None:
        ms.use_engine_hooks(True)
        backward(call)
        ms.use_engine_hooks(False)

    ours = partial(ms.checkpoint, region, x)
    timed: dict[str, Callable[[], None]] = {
        "plain": partial(backward, partial(region, x)),
        TORCH: partial(backward, partial(checkpoint, region, x, use_reentrant=False)),
        REENTRANT: partial(backward, partial(checkpoint, region, x, use_reentrant=True)),
        f"{OURS}, pure Python": partial(backward, partial(python_apply, region, 1, x, weight)),
        "checkpoint": partial(backward, ours),
    }
    if _native.available:
        timed["checkpoint, engine hooks"] = partial(with_engine_hooks, ours)
        explicit = partial(ms.CheckpointFunction.apply, region, 1, x, weight)
        timed[OURS] = partial(backward, explicit)

    def forward() -> None:
        region(x)

    return {"forward": forward, **timed}


def measure(saved_tensors: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    seconds = interleave(
        cases(saved_tensors, options.device), options.rounds, warmup=20, progress=options.progress
    )
    best = {name: min(values) * 1e6 for name, values in seconds.items()}
    base = best.pop("plain") + best.pop("forward")
    overhead = {name: value - base for name, value in best.items()}
    return [
        {
            "saved_tensors": saved_tensors,
            "peer": name,
            "overhead_us": value,
            "ratio": value / overhead[REENTRANT],
        }
        for name, value in overhead.items()
    ]


def show(rows: list[dict[str, Any]], counts: list[int]) -> None:
    width = max(len(row["peer"]) for row in rows)
    print(f"{'saved tensors':{width}}" + "".join(f"{n:>19}" for n in counts))
    for peer in dict.fromkeys(row["peer"] for row in rows):
        cells = [
            f"{r['overhead_us']:7.1f} us ({r['ratio']:5.2f}x)" for r in rows if r["peer"] == peer
        ]
        print(f"{peer:{width}}" + "".join(f"{cell:>19}" for cell in cells))
    print(f"In brackets: against {REENTRANT}.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saved-tensors", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", type=Path, default=Path("benchmarks/out"), metavar="DIR")
    parser.add_argument("--no-progress", dest="progress", action="store_false")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for count in options.saved_tensors:
        rows += measure(count, options)
    show(rows, options.saved_tensors)
    record = {
        "machine": machine(options.device),
        "settings": {
            "rounds": options.rounds,
            "threads": 1,
            "saved_tensors": options.saved_tensors,
        },
        "rows": rows,
    }
    print(f"Wrote {write_record(options.save, 'checkpoint_overhead', record)}")


if __name__ == "__main__":
    main()
