"""Times of CUDA kernels beside the least they could take: the bytes they must move, as a copy does.

Device events; medians; cases take turns. Before each call a buffer of a gibibyte is written, then
read: no case finds its tensors in the cache, or lines there that it has to write back first, and
the host has queued all of a call when the device comes to it. The speed of a copy of a gibibyte,
read and written, is measured in the same way, once: as a script this prints it, and the benchmarks
take it by --bandwidth.

    python benchmarks/cuda_timing.py

On the CPU, to try the benchmarks where there is no GPU, by the host's clock.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from memsave_ext.check.timing import Flush, events
from shared.common import balanced_order, copy_bandwidth, device_name, machine

Cases = dict[str, Callable[[], Any]]
Row = dict[str, Any]
WARMUP = 3
SHARE = 0.85  # of the floor that kernels should reach
AS_FAST = 0.97  # times torch's speed: as fast, but for noise


class Timer:
    def __init__(self, device: str, rounds: int, flush_bytes: int = 1 << 30) -> None:
        self.device, self.rounds = device, rounds
        self.on_cuda = device.startswith("cuda")
        self.flush = Flush(flush_bytes if self.on_cuda else 8, device)

    def medians(self, cases: Cases) -> dict[str, float]:
        """Microseconds of each case; a few rounds more come first and do not count."""
        timed: dict[str, list[Callable[[], float]]] = {name: [] for name in cases}
        for round_ in range(WARMUP + self.rounds):
            for name in balanced_order(list(cases), round_):
                self.flush()
                taken = events(cases[name]) if self.on_cuda else self._clock(cases[name])
                if round_ >= WARMUP:
                    timed[name].append(taken)
        return {
            name: statistics.median(1e6 * of() for of in values) for name, values in timed.items()
        }

    def _clock(self, run: Callable[[], Any]) -> Callable[[], float]:
        start = time.perf_counter()
        run()
        taken = time.perf_counter() - start
        return lambda: taken

    def bandwidth(self) -> float:
        """Bytes that a copy reads and writes in a microsecond."""
        nbytes = 1 << 30 if self.on_cuda else 1 << 20
        return copy_bandwidth(lambda run: self.medians({"copy": run})["copy"], self.device, nbytes)


def add_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="of a copy; measured where it is not given"
    )


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[Timer, float]:
    """A timer, and bytes per microsecond of a copy."""
    import memsave_ext as ms

    if options.device.startswith("cuda"):
        if not torch.cuda.is_available():
            parser.error(f"--device {options.device} needs a CUDA device")
        native = ms._native.module
        if not (native and native.with_cuda):
            parser.error(f"--device {options.device} needs a native build with CUDA")
    torch.manual_seed(0)
    timer = Timer(options.device, options.rounds)
    return timer, options.bandwidth * 1e3 if options.bandwidth else timer.bandwidth()


def make_row(times: dict[str, float], moved: float, bandwidth: float, **names: Any) -> Row:
    """Of one kernel: ``times`` of "ours" and, where there is one, "torch", in microseconds."""
    floor = moved / bandwidth
    return {
        **names,
        "ours_us": times["ours"],
        "torch_us": times.get("torch"),
        "floor_us": floor,
        "share": floor / times["ours"],
    }


def cell(row: Row) -> str:
    """Time, floor, share of it, and times torch's speed."""
    beside = f"{row['torch_us'] / row['ours_us']:5.2f}x" if row["torch_us"] else f"{'':6}"
    return f"{row['ours_us']:9.1f} /{row['floor_us']:9.1f} {row['share']:5.0%} {beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    bandwidth = Timer(options.device, options.rounds).bandwidth()
    print(f"{device_name(machine(options.device))}: a copy moves, in GB/s")
    print(f"{bandwidth / 1e3:.1f}")


if __name__ == "__main__":
    main()
