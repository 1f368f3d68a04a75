"""Checks every part of this build on this machine, and says how fast its kernels are.

    python -m memsave_ext.check                    # a minute at most; a table
    python -m memsave_ext.check --json check.json  # and a file to attach to an issue

Kernels are compared with the pure-Python path and with float64, at each instruction set that the
CPU has; checkpoint, remat, Adam in backward and the tracker with a training run of plain torch. The
exit status is 1 if something is wrong, and the last lines say what to switch off.

In the table, "to Python" and "to fp64" are the largest distances of a kernel's results from those
of pure Python and of float64, in units in the last place (ulp), and "of a copy" is the kernel's
speed beside that of a plain copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _cards, _native, _parts
from .._version import __version__
from ..report import why_no_cuda
from . import levels
from .kernels import KERNELS, Kernel, called, check_kernel, copied
from .rows import Row, message
from .timing import Flush, events
from .training import RUNS, check_run

_ROUNDS, _SECONDS = 9, 0.25  # a kernel is called until one of them is reached
_MANY_BYTES = 1 << 28  # more than caches hold
_FLUSHED_BYTES = 1 << 30  # which takes a card longer than the host takes to queue a call


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m memsave_ext.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument(
        "--quick", action="store_true", help="skip the timings and the other instruction sets"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="check this device only")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (reason := why_no_cuda()):
        parser.error(f"--device cuda: {reason}; --device cpu is there")
    machine = machine_of_now()
    print("\n".join(f"{name:<13}{value}" for name, value in machine.items()))
    rows: list[Row] = []
    try:
        for row in _rows(options.quick, options.device):
            rows.append(row)
    finally:
        if options.json is not None:
            found = {**machine, "rows": [dataclasses.asdict(row) for row in rows]}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return _conclude(rows)


def machine_of_now() -> dict[str, Any]:
    """Returns versions and devices, without paths."""
    info = _native.build_info
    reason = why_no_cuda()
    devices = () if reason else range(torch.cuda.device_count())
    return {
        "memsave_ext": __version__,
        "native": _native.available,
        "built for": f"torch {info.get('torch')}, CUDA {info.get('torch_cuda')}, "
        f"archs {info.get('archs') or 'none'}",
        "off": ", ".join(_parts.disabled()) or "nothing",
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "CPU": f"{levels.level()}, {torch.get_num_threads()} threads",
        "devices": ", ".join(map(_device_name, devices)) or f"none: {reason}",
        "driver": "none" if reason else _driver(),
    }


def _device_name(index: int) -> str:
    capability = torch.cuda.get_device_capability(index)
    info = _native.build_info
    lacks = info.get("cuda") and not _cards.runs_on(info.get("archs") or "", capability)
    missing = ", for which this build has no kernels" if lacks else ""
    return f"{torch.cuda.get_device_name(index)} ({_cards.sm(capability)}{missing})"


def _driver() -> str:
    """Returns the newest CUDA that the driver knows."""
    version = int(getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)())
    return f"for CUDA {version // 1000}.{version % 1000 // 10}"


def _rows(quick: bool, only: str | None) -> Iterator[Row]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    for device in devices:
        if only in (None, device.type):
            yield from _rows_of(device, quick)
    if quick or only == "cuda" or not _native.available:
        return
    for other in levels.others():
        print(f"\nthe same kernels with {other} instructions:")
        worst: dict[str, list[Row]] = {}
        for row in levels.rows_at(other):
            worst.setdefault(row.part, []).append(row)
            yield row
        for part, of_part in worst.items():
            wrong = [row for row in of_part if row.problem]
            print(f"  {part:<11}{len(of_part)} kernels, {len(wrong)} wrong")
            for row in wrong:
                _print_problem(row)


def _rows_of(device: torch.device, quick: bool) -> Iterator[Row]:
    where = f"cpu {levels.level()}" if device.type == "cpu" else str(device)
    speed = None if quick else _copy_speed(device)
    copied = "" if speed is None else f": a copy reads and writes {speed:.1f} GB/s"
    print(f"\n{where}{copied}")
    print(f"{'part':<11}{'what':<26}{'to Python':>10}{'to fp64':>9}{'GB/s':>9}{'of a copy':>11}")
    usable = True
    for kernel in KERNELS:
        if _parts.runs_in_python(kernel.part, device.type):
            continue
        row = levels.row_of(kernel, where, device)
        check_kernel(kernel, row, device)
        if speed is not None and not row.problem:
            _time(kernel, row, device, speed)
        yield _printed(row)
        if row.problem and not _is_usable(device):
            usable = False
            break
    print("training, beside plain torch:")
    for part, (what, _) in RUNS.items():
        if usable and _is_checked(part, device):
            row = Row(part, what, where, part)
            check_run(part, row, device)
            yield _printed(row)
    if not usable:
        print(
            f"  {device} cannot be used after this error: switch off what is wrong, and run the "
            "check again"
        )


def _is_checked(part: str, device: torch.device) -> bool:
    """Whether its run is: not of parts that are off, and remat drops nothing in pure Python. In a
    build without CUDA Adam says on it that it has no kernel."""
    module = _parts.native(part)
    if part == "adam" and device.type == "cuda" and module is not None and not module.with_cuda:
        return False
    return _parts.native(part) is not None or (not _native.available and part != "remat")


def _time(kernel: Kernel, row: Row, device: torch.device, speed: float) -> None:
    try:
        row.gb_per_s = _speed_of(kernel, device)
    except torch.OutOfMemoryError:
        return
    except Exception as error:  # the others are to be timed
        row.wrong(message(error))
    if row.gb_per_s is not None:
        row.percent_of_copy = 100 * row.gb_per_s / speed


def _copy_speed(device: torch.device) -> float:
    """Returns the GB/s that a copy reads and writes."""
    size = _MANY_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device) / 1e9


def _speed_of(kernel: Kernel, device: torch.device) -> float | None:
    """Returns the GB/s of what a kernel has to move, each input and each output once; None where it
    isn't timed."""
    if kernel.large is None:
        return None
    arguments, moved = kernel.large(device)
    operator = getattr(torch.ops.memsave_ext, kernel.operator)
    # In turn, so that none is found in a cache.
    copies = [arguments, *(copied(arguments) for _ in range(_MANY_BYTES // moved))]
    turns = itertools.cycle(copies)
    return moved / _seconds(lambda: called(operator, next(turns)), device) / 1e9


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the shortest time of a call, after one that is not counted."""
    taken: list[float] = []
    timed = _on_cuda(device) if device.type == "cuda" else _clock
    _synchronize(device)
    begin = time.perf_counter()
    while len(taken) <= _ROUNDS and (len(taken) < 3 or time.perf_counter() - begin < _SECONDS):
        taken.append(timed(call))
    return min(taken[1:])


def _clock(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _on_cuda(device: torch.device) -> Callable[[Callable[[], object]], float]:
    flush = Flush(_FLUSHED_BYTES, device)

    def seconds(call: Callable[[], object]) -> float:
        flush()
        return events(call)()

    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_usable(device: torch.device) -> bool:
    """An illegal access leaves CUDA unusable to the process."""
    try:
        return bool(torch.ones((), device=device).item())
    except Exception:
        return False


def _printed(row: Row) -> Row:
    python = "same bits" if row.from_python == 0 else _units(row.from_python)
    exact = "" if row.from_exact is None else _units(row.from_exact)
    speed = "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}"
    share = "" if row.percent_of_copy is None else f"{row.percent_of_copy:.0f} %"
    if row.problem:
        python, exact = "WRONG", ""
    line = f"{row.part:<11}{row.what:<26}{python:>10}{exact:>9}{speed:>9}{share:>11}"
    print(line.rstrip(), flush=True)
    if row.problem:
        _print_problem(row)
    return row


def _units(error: float) -> str:
    return (
        "< .01 ulp"
        if 0 < error < 0.01
        else f"{error:.2g} ulp"
        if error < 99
        else f"{error:.0f} ulp"
    )


def _print_problem(row: Row) -> None:
    print(f"  WRONG: {row.part}, {row.what}, {row.where}: {row.problem}"[:240], flush=True)


def _conclude(rows: Sequence[Row]) -> int:
    cases = sum(row.cases for row in rows)
    wrong = sorted({row.setting for row in rows if row.problem})
    print(f"\n{len(rows)} kernels and runs, {cases} cases: ", end="")
    if not wrong:
        print("all right" if _native.available else "all right, in pure Python alone")
        return 0
    print(f"{sum(bool(row.problem) for row in rows)} are wrong")
    print(
        f"Set MEMSAVE_EXT_DISABLE={','.join(wrong)}, which runs these parts in pure Python, and "
        "please"
    )
    print("open an issue with the file that --json FILE writes.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
