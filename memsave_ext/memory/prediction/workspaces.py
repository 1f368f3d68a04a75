"""What kernels make for themselves, which no operator shows."""

from __future__ import annotations

from typing import Any

import torch

from .storages import Workspace


def workspace_of(device: torch.device) -> Workspace:
    """Returns what tells the workspaces of the kernels of a device."""
    return _nothing


def _nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    return 0
