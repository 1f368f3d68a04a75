"""What makes a training step fit on several devices, and how many it takes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ..shared.checks import check_count
from ..shared.table import Text, as_text, format_bytes, print_table
from .found import Fit, Fits

_NOT_PREDICTED = (
    "Of each process, the first, which has the largest shards. What NCCL takes for itself, and "
    "memory that streams of CUDA keep for longer, are not predicted."
)


@dataclass(frozen=True)
class FitsOnDevices:
    """What :func:`fits` returns where it is asked for numbers of devices.

    Attributes:
        by_devices: what fits on each of so many devices, in order.
        budget: bytes of each device.
        shard: what wraps the model; None where ``build`` does.
        failed: by number of devices, why the step cannot be built or predicted on so many.
    """

    by_devices: dict[int, Fits]
    budget: int
    shard: str | None
    failed: dict[int, str]

    @property
    def smallest(self) -> int | None:
        """The smallest number of devices that something fits on; None if there is none."""
        return next((n for n, found in self.by_devices.items() if found.cheapest), None)

    @property
    def cheapest(self) -> Fit | None:
        """The cheapest technique that fits on so many; None if none does."""
        return None if self.smallest is None else self.by_devices[self.smallest].cheapest

    def __str__(self) -> str:
        return self.report()

    def report(self, *, file: TextIO | None = None) -> Text:
        """Returns a table of techniques and numbers of devices, with the peak of each device, and
        the smallest number that fits. Peaks within the budget are marked.

        Args:
            file: where to print it, too; None for nowhere.
        """
        return as_text(self._write, file)

    def _write(self, file: TextIO) -> None:
        columns: dict[str, dict[int, Fit]] = {}
        for count, found in self.by_devices.items():
            for row in found.rows:
                columns.setdefault(row.name, {})[count] = row
        cells = [
            (name, *(_cell(rows.get(count)) for count in self.by_devices))
            for name, rows in columns.items()
        ]
        first = next(iter(self.by_devices.values()))
        reserved = any(row.reserved is not None for row in first.rows)
        what = f"{first.title()}{', as reserved' if reserved else ''}"
        title = f"{what}, by devices; *: in a budget of {format_bytes(self.budget)} each"
        print_table(title, ["technique", *map(str, self.by_devices)], cells, file)
        print(self.verdict(), file=file)
        for count, reason in self.failed.items():
            print(f"On {_devices(count)} it cannot be predicted: {reason}", file=file)
        print(_NOT_PREDICTED, file=file)

    def verdict(self) -> str:
        """Returns the smallest number that fits, or what holds the memory on the largest."""
        if self.smallest is not None and self.cheapest is not None:
            return f"It takes {_devices(self.smallest)}, with: {self.cheapest.name}."
        count, found = list(self.by_devices.items())[-1]
        return f"On {_devices(count)}: {found.verdict()}"

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as numbers, strings, lists and dicts."""
        return {
            "budget": self.budget,
            "shard": self.shard,
            "smallest": self.smallest,
            "by_devices": {str(n): found.to_json() for n, found in self.by_devices.items()},
            "failed": {str(n): reason for n, reason in self.failed.items()},
        }


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _cell(row: Fit | None) -> str:
    if row is None or row.peak is None:
        return "-"
    return f"{format_bytes(row.needed or 0)}{' *' if row.fits else ''}"


def counts_of(devices: object) -> Sequence[int]:
    """Returns the numbers of devices that an argument names, in order, as a range where it is one.

    Raises:
        TypeError, ValueError: it names none.
    """
    given = [devices] if isinstance(devices, int) else devices
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"fits: devices must be a number, or several, got {type(devices).__name__}")
    counts = given if isinstance(given, range) else list(given)
    if not counts:
        raise ValueError("fits: devices must be a number, or several, got none")
    for count in counts:
        check_count("fits: devices", count, 1)
    return counts if isinstance(counts, range) and counts.step == 1 else sorted(set(counts))


def search_devices(
    counts: Sequence[int], search: Callable[[int], Fits], every: bool
) -> tuple[dict[int, Fits], dict[int, str]]:
    """Returns what fits on numbers of devices, and why others cannot be predicted.

    Of a range, only doubled numbers are tried, until the step fits as it is built, and then those
    between the last that is too few and the first that is enough, by halves: more devices are taken
    to need no more memory each.

    Raises:
        Exception: what the search raises, where it does so for all numbers.
    """
    found: dict[int, Fits] = {}
    failed: dict[int, str] = {}
    raised: list[Exception] = []

    def fits_on(count: int) -> bool:
        try:
            found[count] = search(count)
        except Exception as error:  # a build may need some multiple of devices
            raised.append(error)
            text = str(error).partition("\n")[0] or type(error).__name__
            failed[count] = textwrap.shorten(text, 240, placeholder=" ...")
            return False
        return found[count].cheapest is not None

    if not isinstance(counts, range):
        for count in counts:
            fits_on(count)
    else:
        too_few, enough = counts[0] - 1, counts[-1] + 1
        for count in _doubled(counts):
            if not fits_on(count):
                too_few = count
                continue
            enough = min(enough, count)
            if found[count].rows[0].fits and not every:
                break
        while too_few + 1 < enough <= counts[-1]:
            count = (too_few + enough) // 2
            if fits_on(count):
                enough = count
            else:
                too_few = count
    if not found:
        raise raised[0]
    return dict(sorted(found.items())), dict(sorted(failed.items()))


def _doubled(counts: range) -> list[int]:
    first, last = counts[0], counts[-1]
    powers = [1 << k for k in range(last.bit_length())]
    return sorted({first, last, *(power for power in powers if first < power < last)})
