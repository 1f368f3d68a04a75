"""The CPU's kernels at instruction sets that are not chosen on it, each in a process of its own.

    ATEN_CPU_CAPABILITY=avx2 python -m memsave_ext.check.levels

prints the rows of one, a JSON object a line, and before each the kernel that comes now.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from .. import _parts
from .kernels import KERNELS, Kernel, check_kernel
from .rows import Row

_LEVELS = ("DEFAULT", "AVX2", "AVX512")


def level() -> str:
    return torch.backends.cpu.get_cpu_capability()


def row_of(kernel: Kernel, where: str, device: torch.device) -> Row:
    return Row(kernel.part, kernel.what, where, f"{kernel.part}.{device.type}")


def others() -> list[str]:
    """Returns the levels that this CPU has below the one that is chosen."""
    return [] if level() not in _LEVELS else [*_LEVELS[: _LEVELS.index(level())]]


def rows_at(other: str) -> Iterator[Row]:
    """Runs a process at that level. One that ends before its time failed at the last kernel."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, "ATEN_CPU_CAPABILITY": other.lower()},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    begun: Row | None = None
    for line in process.stdout:
        row = Row(**json.loads(line))
        if row.cases or row.problem:
            yield row
            begun = None
        else:
            begun = row
    if process.wait():
        begun = begun or Row("kernels", "all", f"cpu {other}", "MEMSAVE_EXT_NATIVE=0")
        begun.wrong(f"the process that checks {other} ended with exit status {process.returncode}")
        yield begun


def main() -> None:
    device = torch.device("cpu")
    for kernel in KERNELS:
        if _parts.runs_in_python(kernel.part, device.type):
            continue
        row = row_of(kernel, f"cpu {level()}", device)
        print(json.dumps(dataclasses.asdict(row)), flush=True)
        check_kernel(kernel, row, device)
        print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
