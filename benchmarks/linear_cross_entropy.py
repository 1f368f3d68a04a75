"""The loss head: peak memory and time of forward and backward, beside torch's.

Peaks are above inputs, weight, its states and, where rows are stepped, nothing; as multiples of the
weight. Times are those of plain torch in the same round. Where rows are stepped, time includes the
step of Adam; the others do without one.

    python benchmarks/linear_cross_entropy.py --rounds 9 --shapes 4 --save benchmarks/results
    python benchmarks/linear_cross_entropy.py --device cuda --dtype bfloat16 --shapes 4
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import memsave_ext as ms
from shared.common import (
    Rows,
    figure,
    interleave,
    machine,
    median_and_spread,
    parser_of,
    settings_of,
    show_bars,
    write_record,
)

# With --device cuda.
SHAPES_CUDA = (
    (8192, 4096, 32000), (8192, 2048, 128256), (32768, 2048, 128256), (2048, 4096, 256000)
)  # fmt: skip
SHAPES = ((1024, 256, 32000), (4096, 256, 32000), (1024, 1024, 32000), (1024, 256, 64000))
PLAIN, CHUNKED = "torch", "torch, chunks of tokens"
WHOLE, STEPPED = "linear_cross_entropy", "linear_cross_entropy, rows stepped"
# Most of the weight's memory, most of the time of torch's plain loss, and of its chunked one.
BARS = {WHOLE: (1.7, 1.4, 0.7), STEPPED: (0.7, 1.25, 0.7)}


def cases(
    tokens: int, features: int, classes: int, device: str, dtype: torch.dtype
) -> tuple[int, dict[str, Callable[[], Any]]]:
    """The weight's bytes, and a function for each case, which runs forward and backward."""
    torch.manual_seed(0)
    x = torch.randn(tokens, features, device=device, dtype=dtype, requires_grad=True)
    initial = torch.randn(classes, features, device=device) * features**-0.5
    weight = torch.nn.Parameter(initial.to(dtype))
    target = torch.randint(classes, (tokens,), device=device)
    optimizer = ms.Adam([weight], lr=1e-4, in_backward=True)

    def backward(loss: torch.Tensor) -> None:
        x.grad = None
        loss.backward()
        synchronize(device)

    def plain() -> None:
        with optimizer.paused(keep=True):
            backward(F.cross_entropy(F.linear(x, weight), target))
        weight.grad = None

    def chunked() -> None:
        options = torch.nn.LinearCrossEntropyOptions()
        with optimizer.paused(keep=True):
            backward(F.linear_cross_entropy(x, weight, target, options=options))
        weight.grad = None

    def whole() -> None:
        with optimizer.paused(keep=True):
            backward(ms.linear_cross_entropy(x, weight, target))
        weight.grad = None

    def stepped() -> None:
        backward(ms.linear_cross_entropy(x, weight, target))
        optimizer.step()
        synchronize(device)

    of = {PLAIN: plain, WHOLE: whole, STEPPED: stepped}
    if hasattr(F, "linear_cross_entropy"):
        of[CHUNKED] = chunked
    return weight.nbytes, of


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak(run: Callable[[], None], device: str) -> int:
    run()  # the states, and what libraries keep
    if device == "cuda":  # exact there, also of what an operator frees itself
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with ms.memory.track() as track:
        run()
    return track.peak


def measure(
    shape: tuple[int, int, int], device: str, dtype: torch.dtype, rounds: int, progress: bool
) -> list[dict[str, Any]]:
    weight_bytes, of = cases(*shape, device, dtype)
    peaks = {name: peak(run, device) for name, run in of.items()}
    seconds = interleave(of, rounds, 1, progress)
    rows = []
    for name, taken in seconds.items():
        ratios = [a / b for a, b in zip(taken, seconds[PLAIN], strict=True)]
        rows.append(
            {
                "case": name,
                "tokens": shape[0],
                "features": shape[1],
                "classes": shape[2],
                "peak_bytes": peaks[name],
                "of_weight": peaks[name] / weight_bytes,
                "seconds": median_and_spread(taken)[0],
                "of_plain": median_and_spread(ratios)[0],
            }
        )
    return rows


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for shape in dict.fromkeys((row["tokens"], row["features"], row["classes"]) for row in rows):
        of = {
            row["case"]: row
            for row in rows
            if (row["tokens"], row["features"], row["classes"]) == shape
        }
        for case, (memory, time, chunked) in BARS.items():
            values = {
                "peak, of the weight": (of[case]["of_weight"], memory),
                "time, of torch's": (of[case]["of_plain"], time),
            }
            if CHUNKED in of:
                ratio = of[case]["seconds"] / of[CHUNKED]["seconds"]
                values["time, of torch's chunked"] = (ratio, chunked)
            for what, (value, bar) in values.items():
                name = f"{case}, {'x'.join(map(str, shape))}: {what}"
                found.append(figure(name, value, bar))
    return found


def line_of(row: dict[str, Any]) -> str:
    shape = f"{row['tokens']} x {row['features']} x {row['classes']}"
    time = f"{row['seconds'] * 1e3:7.1f}ms{row['of_plain']:8.2f}"
    return f"{shape:30}{row['case']:36}{row['of_weight']:12.2f}{time}"


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", type=int, default=1, help="how many of them; there are 4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    torch.set_num_threads(options.threads)
    shapes = SHAPES if options.device == "cpu" else SHAPES_CUDA
    names = ("rounds", "threads", "tiny", "device", "dtype")
    record: dict[str, Any] = {
        "machine": machine(options.device),
        "settings": settings_of(options, *names),
    }
    print(f"{'tokens x features x classes':30}{'':36}{'peak/weight':>12}{'time':>9}{'/plain':>8}")
    rows = Rows(options.save, "linear_cross_entropy", record, line=line_of)
    for shape in ((64, 16, 3000),) if options.tiny else shapes[: options.shapes]:
        dtype = getattr(torch, options.dtype)
        for row in measure(shape, options.device, dtype, options.rounds, options.progress):
            rows.append(row)
    # The bars are of a CPU's times.
    record |= {"rows": rows, "bars": bars(rows) if options.device == "cpu" else []}
    show_bars(record["bars"])
    print(write_record(options.save, "linear_cross_entropy", record))


if __name__ == "__main__":
    main()
