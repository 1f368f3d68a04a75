"""How Adam stores parameters and moments: one row for each format.

Whatever depends on a format reads it here: the checks of options, what a state consists of, the
fallback's arithmetic, predicted footprints. csrc/adam/formats.h has the same rows for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # elements of 8-bit moments that share a scale
NARROW = (torch.float32, torch.float16, torch.bfloat16)  # computed in float32
COMPUTED = (torch.float64, *NARROW)  # real types of parameters


# parameters


@dataclass(frozen=True)
class ParamFormat:
    """A value of ``bf16=``, for bfloat16 parameters; None is for all.

    Attributes:
        store: from float32 values, the parameter and its rest; with 16 random bits for each where
            it is ``at_random``, else None.
        load: the values again, from both. Where there is no rest, they are the parameter's.
        rest: the type of ``state["param_rest"]``; None where there is none.
    """

    name: str | None
    store: Callable[[Tensor, Any], tuple[Tensor, Tensor | None]]
    load: Callable[[Tensor, Tensor], Tensor] | None = None
    rest: torch.dtype | None = None
    at_random: bool = False


def round_at_random(values: Tensor, random: Tensor) -> Tensor:
    """To bfloat16, up in proportion to the distance from below."""
    return _upper(_bits(values) + random)


def kahan(values: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16, and what rounding took, as another. An infinity has no rest: with one it would be
    no number when it is read again."""
    upper = values.bfloat16()
    rest = values - upper.float()
    return upper, torch.where(rest.isfinite(), rest, 0).bfloat16()


def unkahan(upper: Tensor, rest: Tensor) -> Tensor:
    return upper.float() + rest.float()


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """All bits: a bfloat16, of the nearest, and an int16."""
    bits = _bits(values)
    return _upper(bits + 0x8000), bits.to(torch.int16)


def unsplit(upper: Tensor, rest: Tensor) -> Tensor:
    return ((upper.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def _bits(values: Tensor) -> Tensor:
    """With one NaN for all, to whose bits others can be added."""
    return torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32))


def _upper(bits: Tensor) -> Tensor:
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


PARAM_FORMATS = (
    ParamFormat(None, lambda values, _: (values, None)),
    ParamFormat("stochastic", lambda v, bits: (round_at_random(v, bits), None), at_random=True),
    ParamFormat("kahan", lambda values, _: kahan(values), unkahan, torch.bfloat16),
    ParamFormat("split", lambda values, _: split(values), unsplit, torch.int16),
)


# moments


@dataclass(frozen=True)
class StateFormat:
    """How both moments are stored.

    Attributes:
        name: that of the row, as csrc/adam/formats.h has it.
        option: the ``state_dtype=`` that makes such states.
        dtype: of the moments; None: the parameter's.
        params: types of parameters that can have it beside their own type.
        store: rounds float32 values at random to ``dtype``, with 16 random bits for each; None
            where they are rounded to nearest, or lie in blocks. Only where the option is set:
            without it the same dtype is the parameter's own, rounded to nearest.
        amsgrad: whether it can be combined.
        block: elements that share a scale of float32; 0: there are no scales.
    """

    name: str
    option: torch.dtype | str | None
    dtype: torch.dtype | None
    params: tuple[torch.dtype, ...]
    store: Callable[[Tensor, Tensor], Tensor] | None = None
    amsgrad: bool = True
    block: int = 0

    @property
    def at_random(self) -> bool:
        return self.store is not None

    @property
    def sharded(self) -> bool:
        """Whether states of DTensors can be it: scales are of memory, not of a placement."""
        return self.block == 0

    def bytes_per_element(self, param: torch.dtype) -> float:
        """Of both moments, without amsgrad."""
        scale = torch.float32.itemsize / self.block if self.block else 0
        return 2 * ((self.dtype or param).itemsize + scale)


STATE_FORMATS = (
    StateFormat("as_param", None, None, COMPUTED),
    StateFormat("float32", None, torch.float32, (torch.float16, torch.bfloat16)),
    StateFormat("bfloat16", torch.bfloat16, torch.bfloat16, NARROW, round_at_random),
    StateFormat("8bit", "8bit", torch.uint8, NARROW, amsgrad=False, block=BLOCK),
)


# look-up


def param_format(name: object) -> ParamFormat:
    """The row of a value of ``bf16=``.

    Raises:
        ValueError: there is none.
    """
    for row in PARAM_FORMATS:
        if name is row.name or (isinstance(name, str) and name == row.name):
            return row
    raise ValueError(f"bf16 must be {_listed([row.name for row in PARAM_FORMATS])}, got {name!r}")


def param_format_of(param: Tensor, group: Any) -> ParamFormat:
    """Of a parameter with this group's options."""
    return param_format(group.get("bf16") if param.dtype == torch.bfloat16 else None)


def state_option(group: Any) -> torch.dtype | str | None:
    """The group's ``state_dtype``; None where it is torch's.

    Raises:
        ValueError: there is no such format.
    """
    value: Any = group.get("state_dtype")
    if value is torch.float32:  # which is what None means, where it can
        return None
    for row in STATE_FORMATS:
        if value is row.option or (isinstance(value, str) and value == row.option):
            return row.option
    options: list[Any] = [None, torch.float32]
    options += [row.option for row in STATE_FORMATS if row.option is not None]
    raise ValueError(f"state_dtype must be {_listed(options)}, got {value!r}")


def state_format(option: object) -> StateFormat | None:
    """The row of a value of :func:`state_option`; None where the parameter's type decides."""
    rows = (row for row in STATE_FORMATS if option is not None and row.option == option)
    return next(rows, None)


def made_state_format(param: Tensor, group: Any, in_blocks: bool) -> StateFormat:
    """Of the states that are made for a parameter; ``in_blocks``: whether it can have these."""
    row = state_format(state_option(group))
    if row is not None and (in_blocks or not row.block):
        return row
    by_name = {row.name: row for row in STATE_FORMATS}
    return by_name["float32" if param.dtype in by_name["float32"].params else "as_param"]


def state_formats(param: Tensor, group: Any) -> dict[torch.dtype, StateFormat]:
    """What a parameter can be stepped with, by the dtype of its moments."""
    option = state_option(group)
    formats = {param.dtype: STATE_FORMATS[0]}
    for row in STATE_FORMATS[1:]:
        if row.dtype and param.dtype in row.params and (not row.at_random or row.option == option):
            formats[row.dtype] = row
    return formats


def _listed(values: list[Any]) -> str:
    *others, last = [repr(value) for value in values]
    return f"{', '.join(others)} or {last}"
