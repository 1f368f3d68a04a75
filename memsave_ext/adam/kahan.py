"""All that is left of ``bf16="kahan"``, which versions up to 0.3 had: it is ``"split"`` now.

It kept the Kahan compensation of a parameter, what rounding took from it, in another bfloat16.
``"split"`` has the same size and is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..shared.dtensor import as_placed, local_tensor
from ..shared.warn import warn


def replace(options: dict[str, Any]) -> bool:
    """Puts "split" in the place of "kahan" in a param group, and returns whether it was there."""
    name = options.get("bf16")
    is_kahan = isinstance(name, str) and name == "kahan"
    if is_kahan:
        options["bf16"] = "split"
    return is_kahan


def replace_given(options: dict[str, Any]) -> None:
    """The same for options that a user has written, with a FutureWarning for that line."""
    if replace(options):
        warn(
            "memsave_ext: bf16='kahan' now does the same as bf16='split', which takes the same "
            "memory and is exact: write bf16='split'. Later versions will refuse 'kahan'.",
            FutureWarning,
        )


@torch.no_grad()
def low_bits(param: Tensor, compensation: Tensor) -> Tensor:
    """Returns the ``state["param_rest"]`` of "split" for a compensation that was saved.

    With it the parameter is the float32 number that parameter and compensation were; where that is
    infinite or NaN, the parameter alone. The parameter has to be the one that was saved: beside
    another one the bits are at most half of what its bfloat16 resolves.
    """
    upper = local_tensor(param.detach())
    values = upper.float() + local_tensor(compensation).to(upper.device).float()
    low = values.view(torch.int32) - (upper.view(torch.int16).int() << 16)
    # -0.0 and a compensation of 0.0 are 0.0, whose uppermost bit is another one.
    is_near = values.isfinite() & (values.signbit() == upper.signbit())
    low = torch.where(is_near, low.clamp_(-0x8000, 0x7FFF), 0).to(torch.int16)
    return as_placed(param, low)
