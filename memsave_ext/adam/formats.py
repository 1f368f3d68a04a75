"""How Adam stores parameters and moments: one row for each format.

The checks of options, the contents of a state, the fallback's arithmetic and predicted footprints
all follow the rows of format_rows.h, of which csrc/adam/formats.h makes tables for the kernels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NARROW = (torch.float32, torch.float16, torch.bfloat16)  # dtypes that are computed in float32
COMPUTED = (torch.float64, *NARROW)  # supported dtypes; of complex parameters, their real dtype


def read_rows(table: str) -> list[list[Any]]:
    """Returns the columns of each row of a table in format_rows.h, without the enumerators.

    A name such as kBFloat16 becomes torch's dtype.
    """

    def value(word: str) -> Any:
        if word.startswith("k"):
            return None if word == "kNone" else getattr(torch, word[1:].lower())
        return json.loads(word)

    text = Path(__file__).with_name("format_rows.h").read_text("utf-8")
    rows = text.partition(f"#define MEMSAVE_EXT_{table}(ROW)")[2].partition("\n\n")[0]
    return [
        [value(word) for word in row.split(", ")[1:]] for row in re.findall(r"ROW\((.*)\)", rows)
    ]


# parameters


@dataclass(frozen=True)
class ParamFormat:
    """How a parameter is stored. Rows with a name are for bfloat16 parameters only.

    Attributes:
        name: the value of ``bf16=``.
        low_part: the dtype of ``state["param_rest"]``, which holds what bfloat16 has no room for:
            lower bits; None where there is none.
        at_random: whether ``store`` rounds at random.
        store: takes float32 values, and 16 random bits for each if ``at_random`` (else None);
            returns the parameter's values and the low part, None without one.
        load: takes the parameter and the low part and returns float32 values; None without one.
    """

    name: str | None
    low_part: torch.dtype | None
    at_random: bool
    store: Callable[[Tensor, Any], tuple[Tensor, Tensor | None]]
    load: Callable[[Tensor, Tensor], Tensor] | None = None


def round_at_random(values: Tensor, random: Tensor) -> Tensor:
    """Rounds to bfloat16 stochastically: up with a probability that is the discarded fraction."""
    return _upper(_bits(values) + random)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float32 into the nearest bfloat16 and the lower 16 bits in int16, without loss."""
    bits = _bits(values)
    return _upper(bits + 0x8000), bits.to(torch.int16)


def unsplit(upper: Tensor, low_bits: Tensor) -> Tensor:
    return ((upper.view(torch.int16).int() << 16) + low_bits.int()).view(torch.float32)


def split8(values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float32, rounded at random to 24 bits, into the nearest bfloat16 and an int8."""
    bits = _bits(values) + (random & 0xFF)
    return _upper(bits + 0x8000), (bits >> 8).to(torch.int8)


def unsplit8(upper: Tensor, low_bits: Tensor) -> Tensor:
    return unsplit(upper, low_bits.int() << 8)


def _bits(values: Tensor) -> Tensor:
    """Returns the bits of float32 values. All NaNs become one, whose bits can be added to."""
    return torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32))


def _upper(bits: Tensor) -> Tensor:
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


_ARITHMETIC: dict[str, tuple[Any, ...]] = {  # store and load
    "": (lambda values, _: (values, None),),
    "stochastic": (lambda values, random: (round_at_random(values, random), None),),
    "split": (lambda values, _: split(values), unsplit),
    "split8": (split8, unsplit8),
}
PARAM_FORMATS = tuple(
    ParamFormat(name or None, low_part, at_random, *_ARITHMETIC[name])
    for name, low_part, at_random in read_rows("PARAM_FORMATS")
)


# moments


@dataclass(frozen=True)
class Codes:
    """How numbers are coded in blocks that share a scale: see :mod:`.blocks`.

    Attributes:
        block: number of elements that share a float32 scale.
        bits: of a code.
        ratio: of the largest numbers of neighbouring levels.
    """

    block: int
    bits: int
    ratio: int


@dataclass(frozen=True)
class StateFormat:
    """How moments are stored.

    Attributes:
        name: the row's name.
        option: the ``state_dtype=`` that makes such states.
        dtype: the dtype of the moments; None: that of the parameter.
        params: dtypes of the parameters whose states can have this format.
        at_random: whether float32 values are rounded to ``dtype`` at random; else to nearest, or
            coded in blocks. It applies only where the option is set: without it, moments of the
            same dtype are rounded to nearest, because that is the parameter's own dtype.
        amsgrad: whether amsgrad can be combined with it.
        codes: of moments that are coded in blocks; None for others.
    """

    name: str
    option: torch.dtype | str | None
    dtype: torch.dtype | None
    params: tuple[torch.dtype, ...]
    at_random: bool
    amsgrad: bool
    codes: Codes | None

    @property
    def joint(self) -> bool:
        """Whether an element has one code for both moments, in ``state["moments"]``.

        That of exp_avg is in the lower bits of a byte, that of exp_avg_sq in the upper.
        """
        return self.codes is not None and self.codes.bits <= 4


STATE_FORMATS = tuple(
    StateFormat(
        name,
        (name if block else dtype) if is_option else None,
        dtype,
        tuple(param for param in COMPUTED if param.itemsize <= param_bytes),
        at_random,
        amsgrad,
        Codes(block, bits, ratio) if block else None,
    )
    for name, is_option, dtype, param_bytes, at_random, amsgrad, block, bits, ratio in read_rows(
        "STATE_FORMATS"
    )
)


# look-up


def param_format(name: object) -> ParamFormat:
    """Returns the row of a value of ``bf16=``.

    Raises:
        ValueError: no row has this name.
    """
    for row in PARAM_FORMATS:
        if name is row.name or (isinstance(name, str) and name == row.name):
            return row
    raise ValueError(f"bf16 must be {_listed([row.name for row in PARAM_FORMATS])}, got {name!r}")


def param_format_of(param: Tensor, group: Any) -> ParamFormat:
    """Returns the row of a parameter with this group's options."""
    return param_format(group.get("bf16") if param.dtype == torch.bfloat16 else None)


def state_option(group: Any) -> torch.dtype | str | None:
    """Returns the group's ``state_dtype``; None for the default and for torch.float32.

    Raises:
        ValueError: there is no such format.
    """
    value: Any = group.get("state_dtype")
    if value is torch.float32:  # the same as None, which means float32 where possible
        return None
    for row in STATE_FORMATS:
        if value is row.option or (isinstance(value, str) and value == row.option):
            return row.option
    options: list[Any] = [None, torch.float32]
    options += [row.option for row in STATE_FORMATS if row.option is not None]
    raise ValueError(f"state_dtype must be {_listed(options)}, got {value!r}")


def state_format(option: object) -> StateFormat | None:
    """Returns the row of a value of :func:`state_option`; None where the param's dtype decides."""
    if option is None:
        return None
    return next((row for row in STATE_FORMATS if row.option == option), None)


def made_state_format(param: Tensor, group: Any, in_blocks: bool) -> StateFormat:
    """Returns the format of a new state. ``in_blocks``: whether ``param`` can have blocks."""
    row = state_format(state_option(group))
    if row is not None and (in_blocks or row.codes is None):
        return row
    by_name = {row.name: row for row in STATE_FORMATS}
    return by_name["float32" if param.dtype in by_name["float32"].params else "as_param"]


def state_formats(param: Tensor, group: Any) -> dict[tuple[torch.dtype, bool], StateFormat]:
    """Returns the formats that a parameter can be stepped with, by :func:`key_of_state`."""
    option = state_option(group)
    formats = {(param.dtype, False): STATE_FORMATS[0]}
    for row in STATE_FORMATS[1:]:
        if row.dtype and param.dtype in row.params and (not row.at_random or row.option == option):
            formats[row.dtype, row.joint] = row
    return formats


def first_of_state(state: Mapping[str, Any]) -> str | None:
    """Returns the name of a state's first moment, or of both in one; None where it has none."""
    names = ("moments", "momentum_buffer", "exp_avg")
    return next((name for name in names if name in state), None)


def key_of_state(state: Mapping[str, Any]) -> tuple[torch.dtype, bool]:
    """Returns the dtype of a state's moments, and whether both share a tensor."""
    first = first_of_state(state)
    assert first is not None
    return state[first].dtype, first == "moments"


def _listed(values: list[Any]) -> str:
    *others, last = [repr(value) for value in values]
    return f"{', '.join(others)} or {last}"
