"""What a step of Adam costs on a GPU, in each mode, from 1 M to 500 M elements of one tensor.

Beside torch's fused AdamW and beside the floor: each element's bytes that a step must move, at the
speed of a copy (cuda_timing.py). Of a 16-bit parameter torch's fused has states of 16 bits, too:
beside modes whose states are float32 it moves less, and is shown by itself.

    python benchmarks/adam_cuda.py --save benchmarks/results
"""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms
from cuda_timing import AS_FAST, SHARE, Cases, Row, add_options, cell, make_row, prepare
from shared.adam_mode_list import BF16, FP32, LR, OURS, Mode
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

SIZES = [1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 500_000_000]
LARGE = 1 << 24  # from which the floor should be near
TORCH = {  # of each type, with states like the parameter
    "torch, fused": (FP32, 28),
    "torch, fused, bf16": (BF16, 14),
}


def modes() -> list[Mode]:
    """Those whose step is made of one gradient."""
    adam = Mode("fp32, Adam", "", 12, 28)
    amsgrad = Mode("fp32, amsgrad", "", 16, 36, options={"amsgrad": True})
    plain = [mode for mode in OURS if not mode.way and not mode.scaled and mode.kinds[0] != "after"]
    return [plain[0], adam, amsgrad, *plain[1:]]


def parameter(size: int, dtype: torch.dtype, device: str) -> Tensor:
    param = nn.Parameter(torch.randn(size, device=device).to(dtype))
    param.grad = torch.randn(size, device=device).to(dtype)
    return param


def ours(mode: Mode, size: int, device: str) -> Any:
    kind = ms.Adam if mode.name.endswith("Adam") else ms.AdamW
    return kind([parameter(size, mode.dtype, device)], lr=LR, **mode.options).step


def torchs(size: int, dtype: torch.dtype, device: str) -> Any:
    return torch.optim.AdamW([parameter(size, dtype, device)], lr=LR, fused=True).step


def cases(size: int, device: str) -> Iterator[tuple[str, float, Cases]]:
    """(mode, bytes of an element that move, its calls)."""
    for mode in modes():
        run: Cases = {"ours": ours(mode, size, device)}
        if mode.dtype == FP32 and not mode.options:
            run["torch"] = torchs(size, FP32, device)
        assert mode.moved is not None
        yield mode.name, mode.moved, run
    for name, (dtype, moved) in TORCH.items():
        yield name, moved, {"ours": torchs(size, dtype, device)}


def bars(rows: list[Row]) -> list[dict[str, Any]]:
    mine = [row for row in rows if row["mode"] not in TORCH]
    large = [row for row in mine if row["elements"] >= LARGE]
    speed = min(row["torch_us"] / row["ours_us"] for row in mine if row["torch_us"])
    figures = [figure("times the speed of torch fused: worst", speed, AS_FAST, at_least=True)]
    for name in dict.fromkeys(row["mode"] for row in large):
        share = min(row["share"] for row in large if row["mode"] == name)
        what = f"{name}: share of the floor from 16 M on, worst"
        figures.append(figure(what, share, SHARE, at_least=True))
    return figures


def show(rows: list[Row], bandwidth: float) -> None:
    print(f"copy: {bandwidth / 1e3:.0f} GB/s. us / floor, share of the floor, times torch's speed")
    sizes = list(dict.fromkeys(row["elements"] for row in rows))
    print(f"{'':34}" + "".join(f"{f'{size / 1e6:.0f} M':>34}" for size in sizes))
    for name in dict.fromkeys(row["mode"] for row in rows):
        cells = (cell(row) for row in rows if row["mode"] == name)
        print(f"{name:34}" + "".join(f"{text:>34}" for text in cells))


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_options(parser, rounds=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N")
    options = parser.parse_args(arguments)
    timer, bandwidth = prepare(parser, options)
    record: dict[str, Any] = {
        "machine": machine(options.device),
        "settings": settings_of(options, "rounds", "sizes"),
        "copy_bytes_per_us": bandwidth,
    }
    rows = Rows(options.save, "adam_cuda", record)
    for size in bar(options.sizes, show=options.progress):
        for name, moved, run in cases(size, options.device):
            times = timer.medians(run)
            rows.append(make_row(times, moved * size, bandwidth, mode=name, elements=size))
        gc.collect()
    held = bars(rows)
    show(rows, bandwidth)
    show_bars(held)
    record |= {"rows": rows, "bars": held}
    print(write_record(options.save, "adam_cuda", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
