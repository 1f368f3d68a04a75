"""What batch normalisation costs on a GPU, beside torch's and beside the least it could cost.

Median times of CUDA events; ours and torch's are interleaved, and the cache is flushed before each
call, which also hides what the host does. Floor: every tensor read or written once at the speed of
a copy in the same run. Reuse is our pass with kept statistics, which a recompute runs; torch's
recompute is its forward again.

    python benchmarks/batch_norm_cuda.py --save benchmarks/results
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import memsave_ext as ms
from common import balanced_order, bar, copy_bandwidth, machine, write_record

RESNET50 = [
    (256, 64, 112, 112),
    (256, 64, 56, 56),
    (256, 256, 56, 56),
    (256, 128, 28, 28),
    (256, 512, 28, 28),
    (256, 256, 14, 14),
    (256, 1024, 14, 14),
    (256, 512, 7, 7),
    (256, 2048, 7, 7),
]
DENSENET = [(64, 60, 32, 32), (64, 228, 16, 16), (64, 342, 8, 8)]  # DenseNet-BC 100, k = 12
OTHERS = [(256, 64, 32, 32), (64, 256, 14, 14), (32, 1024, 7, 7)]
SHAPES = [*RESNET50, *DENSENET, *OTHERS]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
PASSES = {"forward": 2, "reuse": 2, "backward": 3}  # tensors that must move
Cases = dict[str, Callable[[], Any]]


def flush_buffer() -> Tensor:
    return torch.empty(512 << 20, dtype=torch.uint8, device="cuda")


def medians(cases: Cases, rounds: int, buffer: Tensor) -> dict[str, float]:
    """Microseconds of each case; a few rounds more come first and do not count."""
    warmup = 3
    events: dict[str, list[Any]] = {name: [] for name in cases}
    for round_ in range(warmup + rounds):
        for name in balanced_order(list(cases), round_):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            buffer.zero_()
            start.record()
            cases[name]()
            end.record()
            if round_ >= warmup:
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs)
        for name, pairs in events.items()
    }


def forward(x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.memsave_ext.batch_norm_forward(
        x, weight, bias, None, kept, None, None, True, 0.1, 1e-5, "none", 0.0, None
    )


def passes(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Iterator[tuple[str, Cases]]:
    x, grad = (
        torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=LAYOUTS[layout])
        for _ in range(2)
    )
    weight, bias = (torch.randn(shape[1], device="cuda") for _ in range(2))
    kept = forward(x, weight, bias, None)[1]

    def torchs() -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)

    yield "forward", {"ours": lambda: forward(x, weight, bias, None), "torch": torchs}
    yield "reuse", {"ours": lambda: forward(x, weight, bias, kept), "torch": torchs}
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    outputs = {"ours": forward(x, weight, bias, None)[0], "torch": torchs()}
    yield (
        "backward",
        {
            name: lambda output=output: torch.autograd.grad(output, leaves, grad, retain_graph=True)
            for name, output in outputs.items()
        },
    )


def measure(options: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    buffer = flush_buffer()
    bandwidth = copy_bandwidth(lambda copy: medians({"copy": copy}, options.rounds, buffer)["copy"])
    settings = [(s, d, layout) for s in options.shapes for d in DTYPES for layout in LAYOUTS]
    rows = []
    for shape, dtype, layout in bar(settings, show=options.progress):
        for name, cases in passes(shape, DTYPES[dtype], layout):
            times = medians(cases, options.rounds, buffer)
            values = torch.Size(shape).numel()
            floor = PASSES[name] * values * DTYPES[dtype].itemsize / bandwidth
            rows.append(
                {
                    "shape": shape,
                    "dtype": dtype,
                    "layout": layout,
                    "pass": name,
                    "ours_us": times["ours"],
                    "torch_us": times["torch"],
                    "floor_us": floor,
                }
            )
    return bandwidth, rows


def show(bandwidth: float, rows: list[dict[str, Any]]) -> None:
    print(
        f"copy: {bandwidth / 1e3:.0f} GB/s. Of each pass: us, share of floor, times torch's speed"
    )
    print(f"{'':30}" + "".join(f"{name:>22}" for name in PASSES))
    for i in range(0, len(rows), len(PASSES)):
        group = rows[i : i + len(PASSES)]
        first = group[0]
        name = f"{'x'.join(map(str, first['shape'])):18} {first['dtype']} {first['layout']}"
        cells = (
            f"{row['ours_us']:8.1f} {row['floor_us'] / row['ours_us']:5.0%} "
            f"{row['torch_us'] / row['ours_us']:5.2f}x"
            for row in group
        )
        print(f"{name:30}" + "".join(f"{cell:>22}" for cell in cells))
    slower = [row for row in rows if row["ours_us"] > row["torch_us"]]
    print(f"slower than torch: {len(slower)} of {len(rows)}")


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="NxCxHxW")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", type=Path, default=Path("benchmarks/out"), metavar="DIR")
    parser.add_argument("--no-progress", dest="progress", action="store_false")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("batch_norm_cuda: needs a CUDA device")
    native = ms._native.module
    if not (native and native.with_cuda):
        sys.exit("batch_norm_cuda: needs a native build with CUDA")

    torch.manual_seed(0)
    bandwidth, rows = measure(options)
    show(bandwidth, rows)
    record = {
        "machine": machine("cuda"),
        "settings": {"rounds": options.rounds, "shapes": options.shapes},
        "copy_bytes_per_us": bandwidth,
        "rows": rows,
    }
    print(write_record(options.save, "batch_norm_cuda", record))


if __name__ == "__main__":
    main()
