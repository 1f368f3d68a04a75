"""``offload``: where a block may move memory to, as users write it."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from .. import _parts
from ..dry_run.child import writing_files
from ..fakes.mode import predicts
from ..shared.table import parse_bytes
from ..shared.warn import warn
from ..store.folder import absolute_folder

_UNLIMITED = 2**63 - 1
_CPU = "cpu"  # a folder of this name is "./cpu"
_BUS = 25e9  # bytes a second each way: PCIe 4 with 16 lanes, in predictions
Offload = str | os.PathLike[str]


def check_offload(
    who: str, offload: object, limit: object, has_budget: bool, device: torch.device | None
) -> Offload | None:
    """Returns the place; a folder's path is made absolute, as the program may go elsewhere.

    Raises where an argument is wrong; ``who``: is given it; ``device``: of the model, if it is
    known.
    """
    if limit is not None:
        if offload is None:
            raise ValueError(
                f"{who}: offload_limit says how much offload= may move, and offload is None; pass "
                "it, such as offload='/scratch', or leave offload_limit out"
            )
        most_moved(limit)
    if offload is None:
        return None
    if not isinstance(offload, (str, os.PathLike)):
        raise TypeError(
            f"{who}: offload must be 'cpu', a folder or None, got {type(offload).__name__}"
        )
    if not has_budget:
        raise ValueError(
            f"{who}: offload needs a budget, which says how much has to be moved; pass one, such "
            "as budget='8GB' or budget=0.2 (a share of the activations), or leave offload out"
        )
    on = "cpu" if device is None else device.type
    if offload == _CPU:
        if on not in ("cpu", "cuda"):
            raise ValueError(
                f"{who}: offload='cpu' moves activations from a CUDA device to the host's memory; "
                f"the model is on {on}"
            )
        return _CPU
    if on not in ("cpu", "cuda"):
        raise ValueError(
            f"{who}: offload={os.fspath(offload)!r} moves activations of a model on the CPU or a "
            f"CUDA device to files; the model is on {on}"
        )
    must = f"{who}: offload must be 'cpu' or an existing folder that can be written to"
    return absolute_folder(offload, must)


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


@functools.cache
def _tell_of_cpu() -> None:
    warn(
        "remat: offload='cpu' moves activations from a CUDA device to the host's memory. This step "
        "is on the CPU, where nothing is moved; offload=FOLDER moves activations to files.",
    )


def store_of(offload: Offload | None, device: torch.device) -> Any:
    """Returns the native part's store; None for nowhere. In a prediction it moves fake memory, at
    the speed of the folder, or of a usual bus.

    Warns once in a process where memory of the CPU was to be moved to the CPU.

    Raises:
        OSError: no file can be made in the folder.
    """
    native: Any = _parts.native("remat")
    if offload is None or native is None or (predicts() and not native.remat_is_predicted()):
        return None
    on_cuda = native.remat_is_predicted_for_cuda() if predicts() else device.type == "cuda"
    if offload == _CPU:
        if not on_cuda:
            _tell_of_cpu()
            return None
        if predicts():
            return native.RematStore.predicted(_CPU, _BUS, _BUS)
        return native.RematStore.in_host_memory(device)
    folder = os.path.realpath(offload)
    if not predicts():
        try:
            return native.RematStore.in_folder(folder, device)
        except OSError as error:
            text = f"remat: offload={folder!r}: cannot make a file: {error.strerror}"
            raise OSError(error.errno, text) from None
    with writing_files():
        speed = native.RematStore.in_folder(folder, torch.device("cpu")).speed()
    if on_cuda:
        speed = tuple(min(of_disk, _BUS) for of_disk in speed)
    return native.RematStore.predicted(folder, *speed)
