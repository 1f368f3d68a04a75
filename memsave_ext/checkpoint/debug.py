"""``debug=True``: which operators the forward and the recompute of a region ran."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import zip_longest
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Compared with the real folders: a user's own folder may have one of these names, too.
_NOT_USERS = tuple(
    os.path.join(folder, "")
    for folder in (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))
)


class _Recorder(TorchDispatchMode):
    """Notes every operator: name, shapes and dtypes of its tensors, the line that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def __enter__(self) -> _Recorder:
        self.calls = []  # a second recompute starts afresh
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = [
            f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
            for a in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(a, torch.Tensor)
        ]
        if func is not torch.ops.aten.detach.default:  # checkpointing itself detaches
            self.calls.append((f"{func}({', '.join(operands)})", _caller()))
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def record_operators() -> tuple[Callable[[], tuple[Any, Any]], Callable[[str], str]]:
    """A ``context_fn`` that records both runs, and what adds them to an error's message."""
    forward, recompute = _Recorder(), _Recorder()

    def context_fn() -> tuple[Any, Any]:
        return forward, recompute

    def on_error(message: str) -> str:
        lines = [
            message,
            "",
            # In torch's words, which code written for torch's checkpoint may look for.
            "You are seeing this error because you passed `debug=True` to checkpoint and the two "
            "runs of its function differ.",
            "Operators of the forward | of the recompute ('>' where they differ):",
        ]
        for position, (a, b) in enumerate(zip_longest(forward.calls, recompute.calls)):
            left, right = (f"{call[0]} at {call[1]}" if call else "-" for call in (a, b))
            # A recompute that stops early runs fewer: that alone is no difference.
            mark = ">" if a and b and a[0] != b[0] else " "
            lines.append(f"{mark} {position:4}: {left} | {right}")
        return "\n".join(lines)

    return context_fn, on_error
