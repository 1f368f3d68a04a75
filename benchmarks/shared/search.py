"""The largest number that fits, in few tries."""

from collections.abc import Callable
from typing import Any


def largest(
    peak_of: Callable[[int], int | None], limit: float, first: int, most: int = 1 << 20
) -> dict[str, Any]:
    """The largest ``n`` from 1 to ``most`` whose peak is at most ``limit``, by bisection.

    ``peak_of(n)`` is None where the memory did not suffice; peaks must not fall as ``n`` grows.
    Where two are known, the next try is where the line through them meets the limit, as peaks are
    all but linear in depth and batch; when two such tries have not halved the interval, one in its
    middle does.

    Returns ``largest`` (0 where nothing fits), its ``peak_bytes``, and ``tries``, pairs of a number
    and its peak in the order in which they were made.
    """
    peaks: dict[int, int | None] = {}
    low, high, slow = 0, most + 1, 0  # one that fits, one that does not, tries in vain
    while high - low > 1:
        failed = high <= most
        if not peaks:
            n = first
        elif slow >= 2 or (line := _line(peaks, limit)) is None:
            n, slow = (low + high) // 2 if failed else 2 * low, 0
        else:
            n = line if failed else min(line, 2 * low)  # what is too large takes long
        n = min(max(n, low + 1), high - 1)
        left = high - low
        peaks[n] = peak = peak_of(n)
        if peak is not None and peak <= limit:
            low = n
        else:
            high = n
        slow = slow + 1 if failed and 2 * (high - low) > left else 0
    return {"largest": low, "peak_bytes": peaks.get(low), "tries": list(peaks.items())}


def _line(peaks: dict[int, int | None], limit: float) -> int | None:
    """Where the line through the two peaks next to the limit meets it."""
    known = [(n, peak) for n, peak in peaks.items() if peak is not None]
    (n0, p0), (n1, p1), *_ = sorted(known, key=lambda of: abs(of[1] - limit)) + [(0, 0)] * 2
    if len(known) < 2 or p0 == p1:
        return None
    return int(n0 + (limit - p0) * (n1 - n0) / (p1 - p0))
