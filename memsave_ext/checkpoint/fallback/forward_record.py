"""The regions whose functions this thread runs, and the forward records they carry."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

ForwardRecord = dict[Any, Any]
Scope = tuple[ForwardRecord, "ForwardRecord | None", int]

_thread = threading.local()


@contextlib.contextmanager
def forward_record_scope(record: ForwardRecord, replaying: bool) -> Iterator[None]:
    scope: Scope = (record, {} if replaying else None, torch._C._current_graph_task_id())
    outer = forward_record_scopes()
    _thread.scopes = (*outer, scope)
    try:
        yield
    finally:
        _thread.scopes = outer


def forward_record_scopes() -> tuple[Scope, ...]:
    """(record, positions, graph task) of each, outermost first; positions is None in a forward."""
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
