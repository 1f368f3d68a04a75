"""Has all processes of a training take one technique."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .found import Fits


def agreed(first: Callable[[], Fits], names: Sequence[str], only: Callable[[str], Fits]) -> Fits:
    """Returns what this process found of the cheapest technique that fits in every process.

    All processes of the default group call it. They tell each other what fits, in one collective
    where all have found the same.

    Args:
        first: searches in this process, and stops at the first that fits.
        names: of techniques, the cheapest first.
        only: tries one technique in this process.

    Raises:
        torch.OutOfMemoryError: none fits in every process.
        RuntimeError: another process has raised an error.
        Exception: what the search raised here.
    """
    found: Fits | None = None
    place, candidate = -1, -1  # in ``names``: of what fits here or may, and of what is tried
    while True:
        error: Exception | None = None
        try:
            if found is None:
                found = first()
                place = len(names) if found.cheapest is None else names.index(found.cheapest.name)
            elif found.cheapest is None or place != candidate:
                found = only(names[candidate])
                place = candidate + (found.cheapest is None)
        except Exception as raised:
            error = raised
        fits = found is not None and found.cheapest is not None
        of_all = _of_all((place, fits, None if error is None else _text(error)))
        if error is not None:
            raise error
        assert found is not None
        for rank, (_, _, text) in enumerate(of_all):
            if text is not None:
                raise RuntimeError(f"fit: rank {rank} has raised {text}")
        places = [one[0] for one in of_all]
        candidate = max(places)
        if candidate == len(names):
            if not fits:
                raise torch.OutOfMemoryError(found.sentence("fit"))
            raise torch.OutOfMemoryError(
                f"fit: nothing fits on rank {places.index(candidate)} of what the other processes "
                "could take, too. The step would run out of memory."
            )
        if min(places) == candidate and all(one[1] for one in of_all):
            return found


_Told = tuple[int, bool, str | None]


def _of_all(mine: _Told) -> list[_Told]:
    told = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
