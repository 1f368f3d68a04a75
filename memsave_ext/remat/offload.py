"""``offload``: where a block may move memory to, as users write it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .. import _parts
from ..fakes.mode import predicts
from ..shared.table import parse_bytes

_UNLIMITED = 2**63 - 1
Offload = str | os.PathLike[str]


def check_offload(
    offload: object, limit: object, has_budget: bool, device: torch.device | None
) -> None:
    """Raises where they are wrong; ``device``: of the model, if it is known."""
    if limit is not None:
        if offload is None:
            raise ValueError(
                "remat: offload_limit bounds what offload= moves; give that, such as "
                "offload='/scratch', or leave offload_limit out"
            )
        most_moved(limit)
    if offload is None:
        return
    if not isinstance(offload, (str, os.PathLike)):
        raise TypeError(f"remat: offload must be a folder or None, got {type(offload).__name__}")
    if not has_budget:
        raise ValueError(
            "remat: offload needs a budget, which says how much has to be moved; give one, such "
            "as budget='8GB' or budget=0.2 (a share of the activations), or leave offload out"
        )
    if device is not None and device.type != "cpu":
        raise ValueError(
            f"remat: offload moves memory of the CPU to files; the model is on {device.type}"
        )
    if not Path(offload).is_dir():
        raise ValueError(
            f"remat: offload must be a folder that is there and can be written to, got {offload!r}"
        )


def most_moved(limit: object) -> int:
    """
    Raises:
        TypeError: it is neither an int nor a str.
        ValueError: it is no number of bytes.
    """
    if limit is None:
        return _UNLIMITED
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise TypeError(
            f"remat: offload_limit must be bytes or text such as '50GB', got {type(limit).__name__}"
        )
    count = limit if isinstance(limit, int) else parse_bytes(limit)
    if count is None or not 0 <= count <= _UNLIMITED:
        raise ValueError(
            "remat: offload_limit must be bytes, at least 0 and less than 2**63, or text such as "
            f"'50GB' (1e9 bytes each) or '512MiB' (2**20); got {limit!r}"
        )
    return count


def store_of(offload: Offload | None) -> Any:
    """Returns the native part's store; None for nowhere. In a prediction it moves fake memory, at
    the speed that the folder has.

    Raises:
        OSError: no file can be made in the folder.
        ValueError: the prediction is one for CUDA.
    """
    native: Any = _parts.native("remat")
    if offload is None or native is None or (predicts() and not native.remat_is_predicted()):
        return None
    if native.remat_is_predicted_for_cuda():
        raise ValueError(
            f"remat: offload={offload!r} is a folder, for memory of the CPU; the step is predicted "
            "for CUDA"
        )
    folder = os.path.realpath(offload)
    store = native.RematStore.in_folder(folder)
    return native.RematStore.predicted(folder, *store.speed()) if predicts() else store
