"""The regions whose functions this thread runs, and the tapes they carry."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

Tape = dict[Any, Any]
Scope = tuple[Tape, "Tape | None", int]

_thread = threading.local()


@contextlib.contextmanager
def tape_scope(tape: Tape, replaying: bool) -> Iterator[None]:
    scope: Scope = (tape, {} if replaying else None, torch._C._current_graph_task_id())
    outer = tape_scopes()
    _thread.scopes = (*outer, scope)
    try:
        yield
    finally:
        _thread.scopes = outer


def tape_scopes() -> tuple[Scope, ...]:
    """(tape, positions, graph task) of each, outermost first; positions is None in a forward."""
    return getattr(_thread, "scopes", ())


def pack_hooks() -> tuple[Callable[[torch.Tensor], Any], ...]:
    """Of torch.autograd.graph.saved_tensors_hooks, outermost first."""
    top: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
    hooks = []
    while (pair := top(True)) is not None:
        hooks.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return tuple(pack for pack, _ in reversed(hooks))
