"""A wide layer in chunks: peak memory and time of forward and backward, beside whole regions.

Peaks are above the input, the output and the gradients of both, which every case has; gradients of
parameters count. Ratios are to checkpoint() without chunks, of the same round.

    python benchmarks/checkpoint_chunks.py --rounds 9 --save benchmarks/results
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import memsave_ext as ms
from shared.common import (
    figure,
    interleave,
    machine,
    median_and_spread,
    parser_of,
    show_bars,
    write_record,
)

CHUNKS = 8
PLAIN, WHOLE, CHUNKED = "plain", "checkpoint", f"checkpoint, chunks={CHUNKS}"
TORCH, PIECES = "torch's checkpoint", f"torch's checkpoint of each of {CHUNKS} pieces"
PEAK, TIME = 0.16, 1.05  # at most, of checkpoint without chunks


def cases(rows: int, width: int, hidden: int) -> tuple[int, dict[str, Callable[[], Any]]]:
    """The bytes that peaks are above, and a function for each case: forward and backward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
    x = torch.randn(rows, width, requires_grad=True)
    gradient = torch.randn(rows, width)  # made here, and so not tracked
    torchs = functools.partial(torch_checkpoint.checkpoint, net, use_reentrant=False)

    def step(forward: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = None
            net.zero_grad()
            forward().backward(gradient)

        return run

    of = {
        PLAIN: lambda: net(x),
        WHOLE: lambda: ms.checkpoint(net, x),
        CHUNKED: lambda: ms.checkpoint(net, x, chunks=CHUNKS),
        TORCH: lambda: torchs(x),
        PIECES: lambda: torch.cat([torchs(piece) for piece in x.chunk(CHUNKS)]),
    }
    return 2 * x.nbytes, {name: step(forward) for name, forward in of.items()}


def peak(run: Callable[[], None]) -> int:
    with ms.memory.track() as track:
        run()
    return track.peak


def measure(shape: tuple[int, int, int], rounds: int, progress: bool) -> list[dict[str, Any]]:
    beside, of = cases(*shape)
    peaks = {name: peak(run) - beside for name, run in of.items()}
    seconds = interleave(of, rounds, 0, progress)  # each has run
    rows = []
    for name, taken in seconds.items():
        ratios = [a / b for a, b in zip(taken, seconds[WHOLE], strict=True)]
        rows.append(
            {
                "case": name,
                "peak_bytes": peaks[name],
                "peak_of_whole": peaks[name] / peaks[WHOLE],
                "seconds": median_and_spread(taken)[0],
                "of_whole": median_and_spread(ratios)[0],
            }
        )
    return rows


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (ours,) = (row for row in rows if row["case"] == CHUNKED)
    found = {"peak": (ours["peak_of_whole"], PEAK), "time": (ours["of_whole"], TIME)}
    return [
        figure(f"{CHUNKED}: {what}, of {WHOLE}", value, bar) for what, (value, bar) in found.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a small layer, to see that it runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape = (256, 32, 512) if options.tiny else (8192, 256, 4096)
    rows = measure(shape, options.rounds, options.progress)
    print(f"{'':42}{'peak':>10}{'/whole':>8}{'time':>10}{'/whole':>8}")
    for row in rows:
        print(
            f"{row['case']:42}{row['peak_bytes'] / 2**20:6.1f} MiB{row['peak_of_whole']:8.3f}"
            f"{row['seconds'] * 1e3:7.0f} ms{row['of_whole']:8.2f}"
        )
    found = bars(rows)
    show_bars(found)
    settings = {
        "rounds": options.rounds,
        "threads": options.threads,
        "shape": dict(zip(("rows", "width", "hidden"), shape, strict=True)),
    }
    record = {"machine": machine(), "settings": settings, "rows": rows, "bars": found}
    print(write_record(options.save, "checkpoint_chunks", record))


if __name__ == "__main__":
    main()
