"""Adam's modes: distance from exact Adam, loss of a training, time of a step, and bytes.

- ``distance`` and ``loss``: see shared/adam_accuracy.py.
- ``one`` and ``vit``: milliseconds of a step in backward and after it, over a backward with an
  empty hook, of a tensor of 20 M elements and of the 296 parameters of a ViT-L/16 made as small.
  Divided by those of the float32 core, of accumulating by its own.
  SGD's and Lion's by those of their own float32 steps.
- ``bytes``: of a model of a few large layers, for each of its parameters: after a step (the
  parameter and its states), and at the peak of a step, which has gradients, too.

On a GPU ``one`` has 100 M elements and a floor: the bytes that a mode moves, at the speed of a
copy in the same run. Gradients are made before the clock starts, methods take turns in one
process, medians. With one thread on a CPU the clock counts the time of the processor, to which
other programs add little. Peers take part where they are installed; all but torch's in fewer
rounds and for one tensor, as some are compiled for each shape.

    python benchmarks/adam_modes.py --save benchmarks/results
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms
from adam import DeviceTime, HandOut, host_time, medians, shapes, whole_time
from shared import adam_accuracy
from shared.adam_methods import release
from shared.adam_mode_list import (
    BF16,
    CORE,
    FP32,
    OURS,
    PEERS,
    SGD_LION,
    Mode,
    Stepper,
    available,
    reasons,
)
from shared.common import (
    bar,
    copy_bandwidth,
    figure,
    machine,
    parser_of,
    settings_of,
    show_bars,
    write_record,
)
from shared.training import CudaMemory

Clock = Callable[[Callable[[], Any]], float]
Case = tuple[str, str]  # mode and kind: in backward or after
FAST = ("torch, fused", "torch, fused, bf16")  # peers that take part in every round
JOBS = ("one", "vit")


# time


def cases(modes: list[Mode], sizes: list[torch.Size], device: str, clock: Clock) -> dict[Any, Any]:
    """For :func:`medians`; and that of a backward with an empty hook, of each type."""
    source = {t: [torch.randn(s, device=device).to(t) for s in sizes] for t in (FP32, BF16)}

    def prepared(params: list[Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
        loss = HandOut.apply([g.clone() for g in source[dtype]], *params)
        return lambda: loss

    def case(step: Stepper) -> float:
        mode = step.mode
        losses = [prepared(step.params, mode.dtype) for _ in range(mode.backwards)]
        return clock(lambda: step(losses))

    def base(params: list[Tensor], dtype: torch.dtype) -> float:
        loss = prepared(params, dtype)

        def run() -> None:
            loss().backward()
            for p in params:
                p.grad = None

        return clock(run)

    def parameters(dtype: torch.dtype) -> list[Tensor]:
        return [nn.Parameter(torch.randn_like(g)) for g in source[dtype]]

    made: dict[Any, Any] = {}
    for dtype in (FP32, BF16):
        params = parameters(dtype)
        for p in params:
            p.register_post_accumulate_grad_hook(lambda param: None)
        made["base", str(dtype)] = partial(base, params, dtype)
    for mode in modes:
        for kind in mode.kinds:
            made[mode.name, kind] = partial(case, Stepper(mode, parameters(mode.dtype), kind))
    return made


def times(
    modes: list[Mode], sizes: list[torch.Size], clock: Clock, options: argparse.Namespace
) -> dict[Case, float]:
    """Seconds over as many backwards with an empty hook as a step has."""
    took = medians(cases(modes, sizes, options.device, clock), options)
    return {
        (mode.name, kind): took[mode.name, kind] - mode.backwards * took["base", str(mode.dtype)]
        for mode in modes
        for kind in mode.kinds
    }


def processor_time(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def timed(options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], float | None]:
    """Of each mode its times, and the bytes a second of a copy on a GPU."""
    one: Clock = processor_time if options.threads == 1 else host_time
    vit, bandwidth = one, None
    if options.device == "cuda":
        one, vit = DeviceTime(), whole_time

        def time_of(copy: Callable[[], Any]) -> float:
            return statistics.median(one(copy) for _ in range(options.rounds))

        bandwidth = copy_bandwidth(time_of)
    few = argparse.Namespace(**{**vars(options), "rounds": max(2, options.rounds // 4)})
    often = [m for m in available(options.device) if not m.peer or m.name in FAST]
    seldom = [m for m in available(options.device) if m not in often]
    jobs = [
        ("one", [torch.Size([options.elements // 256 * 256])], one),
        ("vit", shapes(options.elements, options.depth), vit),
    ]
    rows: dict[str, dict[str, Any]] = {}
    for job, sizes, clock in jobs:
        took = times(often, sizes, clock, options)
        compare(rows, often, took, job)
        gc.collect()
        if job == "one" and seldom:
            # Beside the core again: what is divided has been measured in the same rounds.
            compare(rows, seldom, times([CORE, *seldom], sizes, clock, few), job)
            gc.collect()
        compare(rows, SGD_LION, times(SGD_LION, sizes, clock, options), job)
        gc.collect()
    if bandwidth:
        elements = options.elements // 256 * 256
        for mode in OURS:
            assert mode.moved is not None
            rows[mode.name]["floor_ms"] = mode.moved * elements / bandwidth * 1e3
    return rows, bandwidth


def compare(
    rows: dict[str, dict[str, Any]], modes: list[Mode], took: dict[Case, float], job: str
) -> None:
    for mode in modes:
        row = rows.setdefault(mode.name, {"method": mode.name, "page": mode.page})
        row[job] = {}
        for kind in mode.kinds:
            milliseconds = took[mode.name, kind] * 1e3
            row[job][kind] = {
                "ms": milliseconds,
                "ratio": milliseconds / (took[mode.against, kind] * 1e3),
            }


# bytes


def measured_bytes(mode: Mode, kind: str, device: str, width: int, depth: int) -> dict[str, float]:
    """For each parameter: after a step, and at the peak of one."""

    def memory() -> Any:
        return CudaMemory(torch.device(device)) if device == "cuda" else ms.memory.track()

    x = torch.ones(1, width, device=device, dtype=mode.dtype)
    with memory() as standing:
        layers = (
            nn.Linear(width, width, bias=False, device=device, dtype=mode.dtype)
            for _ in range(depth)
        )
        model = nn.Sequential(*layers)
        step = Stepper(mode, list(model.parameters()), kind)
        losses = [lambda: model(x).float().square().mean()] * mode.backwards
        step(losses)
    with memory() as moving:
        step(losses)
    release(model.parameters())
    count = width * width * depth
    return {
        "after": standing.live / count,
        "peak": (standing.live + moving.peak) / count,
    }


def all_bytes(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    gc.freeze()  # what is there already need not be looked through after every mode
    for mode in bar([*available(options.device), *SGD_LION], show=options.progress):
        found = {
            kind: measured_bytes(mode, kind, options.device, options.width, options.layers)
            for kind in mode.kinds
        }
        gc.collect()
        rows.append(
            {
                "method": mode.name,
                "page": mode.page,
                "stored": mode.stored,
                "measured": next(iter(found.values()))["after"],
                "peak": {kind: of["peak"] for kind, of in found.items()},
            }
        )
    return rows


# all of it


def bars(rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """The slower of in backward and after it, for each job; of a GPU, over the floor."""
    found = []
    of = {row["method"]: row for row in rows}
    for mode in OURS:
        row = of[mode.name]
        if device == "cuda":
            slowest = max(v["ms"] for v in row["one"].values())
            found.append((f"{mode.name}: one tensor over its floor", slowest / row["floor_ms"],
                          1 / 0.8))  # fmt: skip
        elif mode.name != mode.against:
            for job in JOBS:
                slowest = max(v["ratio"] for v in row[job].values())
                found.append((f"{mode.name}: {job}, over {mode.against}", slowest, mode.bar))
        if row["stored"]:
            over = row["measured"] / row["stored"]
            found.append((f"{mode.name}: bytes over arithmetic", over, 1.01))
    return [figure(*each) for each in found]


def merged(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for part in parts for row in part):
        rows.setdefault(row["method"], {}).update(row)
    return list(rows.values())


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], float | None]:
    device = options.device
    time_rows, bandwidth = timed(options)
    parts = [
        adam_accuracy.distances(options.steps, device, options.progress),
        list(time_rows.values()),
        all_bytes(options),
        adam_accuracy.trained(options.seeds, options.loss_steps, device, options.progress),
    ]
    return merged(parts), bandwidth


def show(record: dict[str, Any]) -> None:
    heads = ("0.1", "1", "10", "loss", "± seeds", "bytes", "peak", "peak", "one", "one", "vit",
             "vit")  # fmt: skip
    print(f"{'':40}{'distance at snr':>27}{'':16}{'':8}{'in bw':>8}{'after':>8}", end="")
    print(f"{'in bw':>16}{'after':>16}{'in bw':>16}{'after':>16}")
    widths = (9, 9, 9, 8, 8, 8, 8, 8, 16, 16, 16, 16)
    print(f"{'':40}" + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
    for row in record["rows"]:
        cells = [f"{value:.2g}" for value in row.get("distance", {}).values()] or [""] * 3
        cells += [f"{row[key]:.4f}" if key in row else "" for key in ("loss", "loss_spread")]
        cells.append(f"{row['measured']:.2f}" if "measured" in row else "")
        kinds = ("in backward", "after")
        cells += [f"{v:.2f}" if (v := row.get("peak", {}).get(kind)) else "" for kind in kinds]
        for job in JOBS:
            for kind in kinds:
                taken = row.get(job, {}).get(kind)
                cells.append(f"{taken['ms']:.1f} ({taken['ratio']:.2f}x)" if taken else "")
        line = "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        print(f"{row['method']:40}{line.rstrip()}")
    for name, reason in record["left_out"].items():
        print(f"{name:40} left out: {reason}")
    missed = [each for each in record["bars"] if not each["ok"]]
    show_bars(missed)
    print(f"{len(record['bars']) - len(missed)} of {len(record['bars'])} bars met")


QUICK = {
    "rounds": 3, "elements": 2_000_000, "seeds": 1, "loss_steps": 60, "steps": 20, "layers": 8,
    "width": 256,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--elements", type=int, help="default 20 M, on a GPU 100 M")
    parser.add_argument("--depth", type=int, default=24, help="of the ViT whose shapes are stepped")
    parser.add_argument("--steps", type=int, default=100, help="of the distance")
    parser.add_argument("--seeds", type=int, default=3, help="of the training")
    parser.add_argument("--loss-steps", type=int, default=200, help="of the training")
    parser.add_argument("--width", type=int, default=512, help="of the model whose bytes count")
    parser.add_argument("--layers", type=int, default=16, help="of that model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="little of everything")
    options = parser.parse_args(arguments)
    on_cuda = options.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    if options.quick:
        for name, value in QUICK.items():
            if getattr(options, name) == parser.get_default(name):
                setattr(options, name, value)
    if options.elements is None:
        options.elements = 100_000_000 if on_cuda else 20_000_000
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows, bandwidth = measure(options)
    names = ("rounds", "elements", "depth", "steps", "seeds", "loss_steps", "width", "layers",
             "threads")  # fmt: skip
    record = {
        "machine": machine(options.device),
        "settings": settings_of(options, *names),
        "bandwidth": bandwidth,
        "rows": rows,
        "left_out": reasons(options.device),
        "peers": [mode.name for mode in PEERS],
        "bars": bars(rows, options.device),
    }
    show(record)
    print(write_record(options.save, "adam_modes", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
