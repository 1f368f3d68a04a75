"""What batch normalisation costs on a CPU, beside torch's and beside a copy of the tensor.

Modules in training mode, and our pass with kept statistics (``reuse``), which a recompute runs;
torch's recompute is its forward again. Medians; ours and torch's are interleaved in one process.
A copy reads and writes a tensor once, the floor of reuse. InPlace-ABN, which saves memory by
writing over its input, takes part in float32 where it is installed, without an activation.

The memory of an output is ``fresh`` where it comes from the system at every call, as glibc does
above 32 MiB, so that page faults take most of the time. For the rows ``reused``, mallopt raises
M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, and freed blocks serve again, for torch and ours alike.

    python benchmarks/batch_norm.py --save benchmarks/results
"""

import argparse
import ctypes
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms
from shared.common import (
    bar,
    figure,
    interleave,
    machine,
    parser_of,
    settings_of,
    show_bars,
    show_left_out,
    write_record,
)

RESNET50 = [(32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 28, 28)]
DENSENET = [(64, 60, 32, 32), (64, 342, 8, 8)]  # DenseNet-BC 100, k = 12
OTHERS = [(256, 64, 32, 32), (64, 256, 14, 14), (32, 1024, 7, 7)]
SHAPES = [*OTHERS, *RESNET50, *DENSENET]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
# Bytes from which the system is asked. Fresh comes first: what ``reused`` leaves in the heap would
# serve one case of each round, and that one would seem several times as fast as the others.
MEMORIES = {"fresh": 1 << 20, "reused": 2**31 - 1}
FRESH = 32 << 20  # what glibc takes from the system at every call, left to itself
PEER = "InPlace-ABN"
SLACK = 1.03  # of a row that must not be slower
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
Row = dict[str, Any]


def set_memory(name: str) -> bool:
    """False where the allocator is not glibc's."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    set_ = [libc.mallopt(which, MEMORIES[name]) for which in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)]
    # Or blocks that an earlier row has freed would serve this one.
    libc.malloc_trim(0)
    return all(set_)


@functools.cache
def reasons() -> dict[str, str]:
    """Why a peer cannot run here."""
    try:
        import inplace_abn

        inplace_abn.InPlaceABN(1, activation="identity")(torch.ones(2, 1, 2, 2))
    except Exception as error:  # one built for another torch may raise anything
        return {PEER: str(error).partition("\n")[0]}
    return {}


class _Overwritten(torch.autograd.Function):
    """Hands out a tensor that the next operator may write over; a leaf may not be."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def peer_cases(x: Tensor, grad: Tensor) -> dict[str, Callable[[], Any]]:
    from inplace_abn import InPlaceABN

    module, leaf = InPlaceABN(x.shape[1], activation="identity"), x.detach().requires_grad_()
    overwritten = x.clone(memory_format=torch.preserve_format)

    def forward() -> None:
        with torch.no_grad():
            module(overwritten)

    def step() -> None:
        output = module(_Overwritten.apply(leaf, overwritten))
        torch.autograd.grad(output, [leaf, *module.parameters()], grad)

    return {f"{PEER} forward": forward, f"{PEER} step": step}


def cases(
    shape: Sequence[int], dtype: str, layout: str, peer: bool
) -> dict[str, Callable[[], Any]]:
    x, grad = (
        torch.randn(*shape, dtype=DTYPES[dtype]).contiguous(memory_format=LAYOUTS[layout])
        for _ in range(2)
    )
    torchs, ours = nn.BatchNorm2d(shape[1]), ms.BatchNorm2d(shape[1])
    evaluating = nn.BatchNorm2d(shape[1]).eval()
    weight, bias = ours.weight.detach(), ours.bias.detach()
    leaf = x.detach().requires_grad_()

    def reuse(kept: Tensor | None) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.memsave_ext.batch_norm_forward(
            x, weight, bias, None, kept, None, None, True, 0.1, ours.eps, "none", 0.0, None
        )
        return result

    def without_grad(module: nn.Module) -> Tensor:
        with torch.no_grad():
            output: Tensor = module(x)
        return output

    def step(module: nn.Module) -> None:
        torch.autograd.grad(module(leaf), [leaf, *module.parameters()], grad)

    kept = reuse(None)[1]
    return {
        "copy": lambda: x.clone(),
        "torch eval": lambda: without_grad(evaluating),
        "torch forward": lambda: without_grad(torchs),
        "forward": lambda: without_grad(ours),
        "reuse": lambda: reuse(kept),
        "torch step": lambda: step(torchs),
        "step": lambda: step(ours),
        **(peer_cases(x, grad) if peer else {}),
    }


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    settings = list(itertools.product(MEMORIES, options.threads, options.shapes, DTYPES, LAYOUTS))
    for memory, threads, shape, dtype, layout in bar(settings, show=options.progress):
        size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        if not set_memory(memory) or (memory == "fresh" and size <= FRESH):
            continue
        torch.set_num_threads(threads)
        # It takes five times torch's time: where its figures say it all.
        peer = PEER not in reasons() and (dtype, threads, memory) == ("fp32", 1, "reused")
        case = cases(shape, dtype, layout, peer)
        seconds = interleave(case, options.rounds, 2, progress=False)
        row = {
            "shape": shape,
            "dtype": dtype,
            "layout": layout,
            "threads": threads,
            "memory": memory,
            "bytes": size,
            "ms": {name: statistics.median(values) * 1e3 for name, values in seconds.items()},
        }
        rows.append(row)
    return rows


def ratios(rows: Sequence[Row], over: str, under: str) -> list[float]:
    return [row["ms"][over] / row["ms"][under] for row in rows]


def bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What must hold: a name, the figure measured, its bar, and whether it is held."""
    fp32 = [row for row in rows if row["dtype"] == "fp32" and row["layout"] == "NCHW"]
    mean = statistics.geometric_mean
    forward, step = ratios(rows, "torch forward", "forward"), ratios(rows, "torch step", "step")
    figures = [
        ("forward, times torch's speed: worst row", min(forward), 1 / SLACK),
        ("forward, fp32 NCHW: worst row", min(ratios(fp32, "torch forward", "forward")), 2.0),
        ("reuse, times torch's forward: mean", mean(ratios(rows, "torch forward", "reuse")), 2.0),
        (
            "reuse, times torch's eval: worst row",
            min(ratios(rows, "torch eval", "reuse")),
            1 / SLACK,
        ),
        ("step, times torch's: mean", mean(step), 1.5),
        ("step, times torch's: worst row", min(step), 1 / SLACK),
    ]
    return [figure(*each, at_least=True) for each in figures]


def show(rows: Sequence[Row], held: Sequence[dict[str, Any]]) -> None:
    print("ms, and in brackets times torch's speed; GB/s of reuse and of a copy")
    print(f"{'':42}{'forward':>17}{'reuse':>17}{'/ eval':>8}{'forward + backward':>21}{'GB/s':>13}")
    for row in rows:
        ms_, name = row["ms"], "x".join(map(str, row["shape"]))
        where = f"{row['threads']} thread{'s' if row['threads'] > 1 else ' '} {row['memory']}"
        print(
            f"{name:16} {row['dtype']} {row['layout']} {where:16}"
            f"{ms_['forward']:9.3f} ({ms_['torch forward'] / ms_['forward']:5.2f})"
            f"{ms_['reuse']:9.3f} ({ms_['torch forward'] / ms_['reuse']:5.2f})"
            f"{ms_['torch eval'] / ms_['reuse']:8.2f}"
            f"{ms_['step']:13.3f} ({ms_['torch step'] / ms_['step']:5.2f})"
            f"{2e-6 * row['bytes'] / ms_['reuse']:7.1f}{2e-6 * row['bytes'] / ms_['copy']:6.1f}"
        )
    show_bars(held)
    for name in ("forward", "step", f"{PEER} forward", f"{PEER} step"):
        known = [row for row in rows if name in row["ms"]]
        if known:
            value = statistics.geometric_mean(ratios(known, f"torch {name.split()[-1]}", name))
            print(f"{name}, times torch's: mean {value:.2f}")
    show_left_out(reasons())


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="NxCxHxW")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="few rounds of the smallest shape")
    options = parser.parse_args(arguments)
    if options.quick:
        options.shapes, options.rounds = [DENSENET[-1]], 3

    torch.manual_seed(0)
    rows = measure(options)
    if not rows:
        sys.exit("batch_norm: needs glibc, whose allocator it sets")
    held = bars(rows)
    show(rows, held)
    record = {
        "machine": machine(),
        "settings": settings_of(options, "rounds", "threads", "shapes"),
        "rows": rows,
        "left_out": reasons(),
        "bars": held,
    }
    print(write_record(options.save, "batch_norm", record))


if __name__ == "__main__":
    main()
