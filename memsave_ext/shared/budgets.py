"""Budgets of memory: what users write, read once."""

from __future__ import annotations

import re
from typing import NamedTuple

from .table import parse_bytes

_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")
# What "auto" leaves free, for memory that no allocator of torch counts, and for other processes.
_LEFT_FREE = 0.1


class Budget(NamedTuple):
    """A budget that was read: one of bytes, a share of the activations, or a part of the device's
    memory, which is asked for its bytes when they are needed.

    Attributes:
        given: as the user wrote it.
        bytes: 0 where they are not known.
        share: of the activations, else 0.
        of_device: the part of the device's memory, else 0.
        of_free: whether it is a part of what is free there, which comes to what was held before,
            and not of all that the process may have.
    """

    given: int | float | str
    bytes: int = 0
    share: float = 0.0
    of_device: float = 0.0
    of_free: bool = False


def read_budget(who: str, given: object, *, parts: bool = True, shares: bool = False) -> Budget:
    """Returns what a user's budget means; one that was read already as it is.

    Args:
        who: the function whose argument it is, for the message.
        parts: whether it may be a part of the device's memory.
        shares: whether it may be a share of the activations.

    Raises:
        TypeError: it is none of int, float and str.
        ValueError: it is out of range, cannot be read, or is not allowed here.
    """
    if isinstance(given, Budget):
        return given
    budget = _read(given)
    if budget and (parts or not budget.of_device) and (shares or not budget.share):
        return budget
    units = "bytes as an int, or text such as '8GB' (1e9 bytes each) or '512MiB' (2**20)"
    allowed = [units, "at least 1 and less than 2**63"]
    if parts:
        allowed.append(
            "or '80%' (above 0 and at most 100, of the device's memory) or 'auto' (what is free of "
            "the device's memory)"
        )
    if shares:
        allowed.append("or a float above 0 and at most 1, a share of the activations")
    hint = "" if shares or type(given) is not float else "; a share of the activations is for remat"
    is_number_or_text = isinstance(given, (int, float, str)) and not isinstance(given, bool)
    raise (ValueError if is_number_or_text else TypeError)(
        f"{who}: budget must be {', '.join(allowed)}; got {given!r}{hint}"
    )


def _read(given: object) -> Budget | None:
    if isinstance(given, float):
        return Budget(given, share=given) if 0 < given <= 1 else None
    if isinstance(given, str):
        if given.strip() == "auto":
            return Budget(given, of_device=1 - _LEFT_FREE, of_free=True)
        if percent := _PERCENT.fullmatch(given):
            part = float(percent[1]) / 100
            return Budget(given, of_device=part) if 0 < part <= 1 else None
        count = parse_bytes(given)
    elif isinstance(given, int) and not isinstance(given, bool):
        count = given
    else:
        return None
    return Budget(given, count) if count is not None and 1 <= count < 2**63 else None
