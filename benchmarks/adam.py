"""What a step of AdamW costs, in backward and after it: time per parameter, per step, and memory.

Four jobs; the first three have the 296 parameters of a ViT-L/16, made smaller:

- ``tiny``: 10 k elements in all: what the host does for each parameter. On a GPU the host runs
  ahead. Microseconds per parameter over a backward with an empty hook.
- ``large``: 19 M elements: the time of the optimizer, over an empty hook.
- ``real``: a transformer of 19 M elements trained on an image of 17 tokens: a whole step, and the
  peak of live bytes beyond parameters and states, which are there before.
- ``huge``: one parameter of 100 M elements, over an empty hook. On a GPU its floor is the bytes
  that must move, 28 for each element, at the speed of a copy in the same run. (On a CPU a copy is
  no floor: it also reads what it overwrites, which a step has to read anyway.)

Except in ``real``, gradients are made before the clock starts, and a node hands them out. All
methods take turns in one process; medians. The memory of a ViT-L/16 itself: adam_memory.py.

    python benchmarks/adam.py --save benchmarks/results
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms
from cuda_timing import Flush
from shared import any_optimizer
from shared.adam_methods import (
    AFTER,
    BASE,
    FOREACH,
    FUSED,
    IN_BACKWARD,
    METHODS,
    TUTORIAL,
    HandOut,
    VisionTransformer,
    available,
    reasons,
)
from shared.common import (
    balanced_order,
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

HUGE = [BASE, FOREACH, FUSED, TUTORIAL, AFTER, IN_BACKWARD]
BYTES_MOVED = 28  # of an element: gradient read, parameter and two states read and written
Run = Callable[[], Any]
Clock = Callable[[Run], float]  # seconds that a call takes
Cases = dict[str, Callable[[], float]]


def host_time(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def whole_time(run: Run) -> float:
    """Until the GPU is done, too."""
    torch.cuda.synchronize()

    def until_done() -> None:
        run()
        torch.cuda.synchronize()

    return host_time(until_done)


class DeviceTime:
    """The GPU's own time, from cold caches. It is kept busy meanwhile: no wait for the host."""

    def __init__(self) -> None:
        self.flush = Flush(1 << 30, "cuda")

    def __call__(self, run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            self.flush()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def shapes(elements: int, depth: int = 24) -> list[torch.Size]:
    """A ViT-L/16's, with the width reduced to about so many elements in all."""
    with torch.device("meta"):
        sizes = [p.shape for p in VisionTransformer(depth=depth).parameters()]
    scale = (elements / sum(size.numel() for size in sizes)) ** 0.5
    return [torch.Size(max(1, round(n * scale)) for n in size) for size in sizes]


def handed_out(
    sizes: list[torch.Size], methods: Iterable[str], device: str, clock: Clock, steps: int = 1
) -> Cases:
    """``steps`` at a time: none starts from the caches of another."""
    source = [torch.randn(size, device=device) for size in sizes]

    def case(step: Any, params: list[Tensor]) -> float:
        seconds = 0.0
        for _ in range(steps):
            loss = HandOut.apply([g.clone() for g in source], *params)
            seconds += clock(lambda loss=loss: step(loss.backward))
        return seconds / steps

    cases = {}
    for name in methods:
        params: list[Tensor] = [nn.Parameter(torch.randn_like(g)) for g in source]
        cases[name] = partial(case, METHODS[name](params), params)
    return cases


def real(device: str, depth: int, clock: Clock) -> tuple[Cases, dict[str, int]]:
    cases, peaks = {}, {}
    for name in available(device):
        torch.manual_seed(0)
        with torch.device(device):
            model, x = VisionTransformer(16, 4, 256, 4, depth), torch.randn(1, 3, 16, 16)
        step = METHODS[name](list(model.parameters()))

        def run(step: Any = step, model: nn.Module = model, x: Tensor = x) -> None:
            step(lambda: model(x).square().mean().backward())

        run()  # makes the states
        with CudaMemory(x.device) if x.is_cuda else ms.memory.track() as tracked:
            run()
        cases[name], peaks[name] = partial(clock, run), tracked.peak
    return cases, peaks


def medians(cases: Cases, options: argparse.Namespace) -> dict[str, float]:
    """Of the seconds that each case returns; a few rounds more come first and do not count."""
    warmup = 3
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    # What the cases hold is not to be looked through again and again.
    gc.collect()
    gc.freeze()
    for round_ in bar(range(warmup + options.rounds), show=options.progress):
        for name in balanced_order(list(cases), round_):
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(cases[name]())
    gc.unfreeze()
    return {name: statistics.median(values[warmup:]) for name, values in seconds.items()}


def floor(options: argparse.Namespace, clock: Clock) -> float:
    """Seconds that the huge job takes at least, on a GPU."""

    def time_of(copy: Run) -> float:
        return statistics.median(clock(copy) for _ in range(options.rounds))

    return BYTES_MOVED * options.huge / copy_bandwidth(time_of)


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], float | None]:
    """A row for each method, and the floor of the huge job in milliseconds."""
    device, methods = options.device, available(options.device)
    whole, gpu, floor_ms, steps = host_time, host_time, None, 20
    if device == "cuda":
        whole, gpu, steps = whole_time, DeviceTime(), 5
        floor_ms = floor(options, gpu) * 1e3
    tiny, large = shapes(9_700, options.depth), shapes(options.elements, options.depth)
    huge = [torch.Size([options.huge])]
    took = {"tiny": medians(handed_out(tiny, methods, device, host_time, steps), options)}
    took["large"] = medians(handed_out(large, methods, device, whole), options)
    cases, peaks = real(device, options.depth, whole)
    took["real"] = medians(cases, options)
    took["huge"] = medians(handed_out(huge, HUGE, device, gpu), options)

    def over_base(job: str, name: str) -> float:
        return took[job][name] - took[job][BASE]

    rows = [
        {
            "method": name,
            "us_per_parameter": over_base("tiny", name) / len(tiny) * 1e6,
            "large_ms": over_base("large", name) * 1e3,
            "huge_ms": over_base("huge", name) * 1e3 if name in HUGE else None,
            "real_ms": took["real"][name] * 1e3,
            "peak_bytes": peaks[name],
        }
        for name in methods
    ]
    return rows, floor_ms


def bars(rows: list[dict[str, Any]], floor_ms: float | None) -> list[dict[str, Any]]:
    of = {row["method"]: row for row in rows}
    ours, fused = of[IN_BACKWARD], of[FUSED]
    if floor_ms:
        figures = [
            ("µs per tiny parameter", ours["us_per_parameter"], 2.0),
            ("huge step over its floor", ours["huge_ms"] / floor_ms, 1 / 0.85),
        ]
    else:
        figures = [
            ("µs per tiny parameter", ours["us_per_parameter"], 1.0),
            ("optimizer time over torch fused", ours["large_ms"] / fused["large_ms"], 0.85),
            ("real step over the tutorial's", ours["real_ms"] / of[TUTORIAL]["real_ms"], 0.6),
            ("real step over torch fused", ours["real_ms"] / fused["real_ms"], 0.9),
        ]
    return [figure(*each) for each in figures]


def show(record: dict[str, Any]) -> None:
    names = ("µs/parameter", "large, ms", "huge, ms", "real, ms", "peak MiB")
    print(f"{'':32}" + "".join(f"{name:>14}" for name in names))
    for row in record["rows"]:
        huge = "-" if row["huge_ms"] is None else f"{row['huge_ms']:.1f}"
        print(
            f"{row['method']:32}{row['us_per_parameter']:14.2f}{row['large_ms']:14.1f}"
            f"{huge:>14}{row['real_ms']:14.1f}{row['peak_bytes'] / 2**20:14.1f}"
        )
    for name, reason in record["left_out"].items():
        print(f"{name:32} left out: {reason}")
    if record["floor_ms"]:
        print(f"{'floor of huge':60}{record['floor_ms']:14.1f}")
    for row in record["any_optimizer"]:
        print("in_backward({optimizer}): {own_us:.1f} µs and {overhead_us:+.1f}".format(**row))
    show_bars(record["bars"])


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--elements", type=int, default=19_500_000, help="of the large job")
    parser.add_argument("--huge", type=int, default=100_000_000, help="elements of the huge job")
    parser.add_argument("--depth", type=int, default=24, help="of the transformer")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    if reason := reasons(options.device).get(IN_BACKWARD):
        parser.error(reason)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows, floor_ms = measure(options)
    names = ("rounds", "elements", "huge", "depth", "threads")
    record = {
        "machine": machine(options.device),
        "settings": settings_of(options, *names),
        "parameters": len(shapes(1, options.depth)),
        "floor_ms": floor_ms,
        "rows": rows,
        "left_out": reasons(options.device),
        "any_optimizer": [] if options.device == "cuda" else any_optimizer.measure(),
        "bars": bars(rows, floor_ms),
    }
    show(record)
    print(write_record(options.save, "adam", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
