"""What batch normalisation costs on a GPU, beside torch's and beside the least it could cost.

The floor: every tensor read or written once, at the speed of a copy (cuda_timing.py). Reuse is our
pass with kept statistics, which a recompute runs; torch's recompute is its forward again. Forward
must read its input twice where a channel does not fit on chip, and backward its two tensors: those
floors are of what fits, and what does not cannot reach them (docs/gpu-notes.md).

    python benchmarks/batch_norm_cuda.py --save benchmarks/results
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cuda_timing import AS_FAST, SHARE, Cases, Row, add_options, cell, make_row, prepare
from shared.common import (
    Rows,
    bar,
    figure,
    machine,
    parser_of,
    settings_of,
    show_bars,
    write_record,
)

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
LARGE = 1 << 26  # bytes of a tensor: what a launch takes is nothing beside its pass


def forward(x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.memsave_ext.batch_norm_forward(
        x, weight, bias, None, kept, None, None, True, 0.1, 1e-5, "none", 0.0, None
    )


def passes(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str
) -> Iterator[tuple[str, Cases]]:
    x, grad = (
        torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=LAYOUTS[layout])
        for _ in range(2)
    )
    weight, bias = (torch.randn(shape[1], device=device) for _ in range(2))
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


def measure(options: argparse.Namespace, timer: Any, bandwidth: float, rows: Rows) -> None:
    settings = [(s, d, layout) for s in options.shapes for d in DTYPES for layout in LAYOUTS]
    for shape, dtype, layout in bar(settings, show=options.progress):
        size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        names = {"shape": shape, "dtype": dtype, "layout": layout, "bytes": size}
        for name, cases in passes(shape, DTYPES[dtype], layout, options.device):
            times = timer.medians(cases)
            rows.append(make_row(times, PASSES[name] * size, bandwidth, **names, **{"pass": name}))


def bars(rows: list[Row]) -> list[dict[str, Any]]:
    found = []
    for name in PASSES:
        speeds = [row["torch_us"] / row["ours_us"] for row in rows if row["pass"] == name]
        found.append((f"{name}, times torch's speed: worst", min(speeds), AS_FAST))
        mean = statistics.geometric_mean(speeds)
        found.append((f"{name}, times torch's speed: mean", mean, AS_FAST))
    shares = [r["share"] for r in rows if r["pass"] == "reuse" and r["bytes"] >= LARGE]
    if shares:
        found.append(("reuse of 64 MiB and more, share of the floor: worst", min(shares), SHARE))
    return [figure(*each, at_least=True) for each in found]


def show(rows: list[Row], bandwidth: float) -> None:
    print(f"copy: {bandwidth / 1e3:.0f} GB/s. us / floor, share of the floor, times torch's speed")
    print(f"{'':30}" + "".join(f"{name:>34}" for name in PASSES))
    for i in range(0, len(rows), len(PASSES)):
        first = rows[i]
        name = f"{'x'.join(map(str, first['shape'])):18} {first['dtype']} {first['layout']}"
        print(f"{name:30}" + "".join(f"{cell(row):>34}" for row in rows[i : i + len(PASSES)]))


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_options(parser, rounds=20)
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="NxCxHxW")
    options = parser.parse_args(arguments)
    timer, bandwidth = prepare(parser, options)
    record: dict[str, Any] = {
        "machine": machine(options.device),
        "settings": settings_of(options, "rounds", "shapes"),
        "copy_bytes_per_us": bandwidth,
    }
    rows = Rows(options.save, "batch_norm_cuda", record)
    measure(options, timer, bandwidth, rows)
    held = bars(rows)
    show(rows, bandwidth)
    show_bars(held)
    record |= {"rows": rows, "bars": held}
    print(write_record(options.save, "batch_norm_cuda", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
