"""Where a module leaves what its forward computed for the recomputes of the regions around it.

Every region has a forward record, a dict. It belongs to the object that stands for the region, is
filled in the region's forward, read in each of its recomputes, and dies with the graph:

- ``memsave_ext``'s own regions carry it;
- torch's non-reentrant checkpoint: the frame object that its saved-tensor hooks share;
- any ``torch.autograd.Function`` that runs a function again in backward (torch's reentrant
  checkpoint, fairscale's): its ``ctx``, an argument in forward and the current node in backward;
- :func:`count_once_contexts`, for everything that takes a ``context_fn``.

That a backward is running says nothing: hooks run forwards, too. A recompute counts as one only
while the graph task that asked for it is the current one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import _engine_run_backward

from .. import _parts
from .fallback import surroundings as _fallback
from .fallback.surroundings import ForwardRecord as ForwardRecord

Contexts = tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]

_ATTRIBUTE = "_memsave_ext_forward_record"
_POSITIONS = "_memsave_ext_positions"
_RUN_BACKWARD: CodeType = _engine_run_backward.__code__
_native_or = _parts.native("checkpoint") or _fallback
_forward_record_scopes: Callable[[], tuple[_fallback.Scope, ...]] = _native_or.forward_record_scopes
_pack_hooks: Callable[[], tuple[Any, ...]] = _native_or.pack_hooks


class _Thread(threading.local):
    scopes: tuple[_fallback.Scope, ...] = ()


_thread = _Thread()


class Replay(NamedTuple):
    record: ForwardRecord
    positions: ForwardRecord  # lives as long as one recompute
    is_complete: bool = True  # False: forwards in eval mode may not be in it


class Enclosing(NamedTuple):
    recording: list[ForwardRecord]
    replay: Replay | None


NOTHING = Enclosing([], None)


def enclosing(functions: bool = True) -> Enclosing:
    """The records to be filled, and the one to be read: that of the innermost recompute.

    Forwards of other people's autograd Functions are looked for on the Python stack where there is
    no graph; without ``functions`` they are not, which is what inference can afford.
    """
    scopes = _forward_record_scopes()
    contexts = _thread.scopes
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    task = torch._C._current_graph_task_id()
    look_for_forwards = functions and not torch.is_grad_enabled()
    if not scopes and not contexts and not hooked and task == -1 and not look_for_forwards:
        return NOTHING

    recording: list[ForwardRecord] = []
    replay: Replay | None = None
    if task != -1 or look_for_forwards:
        recording, replay = _function_records(look_for_forwards)
    for record, positions, of_task in (*contexts, *_torch_scopes(hooked), *scopes):
        if positions is None:
            recording.append(record)
        elif of_task == task:
            replay = Replay(record, positions)
    return Enclosing(recording, replay)


def count_once_contexts() -> Contexts:
    """``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    With it, what torch promises of ``context_fn`` is all that this package's batch norms need to
    count their statistics once there; without it, they read torch's own objects, which has the same
    effect. torch's batch norms count twice with it, too.

    Returns:
        Two context managers, for the forward and for its recomputes.
    """
    record: ForwardRecord = {}
    return _Contexts(record, replaying=False), _Contexts(record, replaying=True)


class _Contexts:
    """Can be entered again, by several threads at once: a recompute happens at each backward."""

    def __init__(self, record: ForwardRecord, replaying: bool) -> None:
        self.forward_record, self.replaying = record, replaying

    def __enter__(self) -> None:
        scope: _fallback.Scope
        scope = (
            self.forward_record,
            {} if self.replaying else None,
            torch._C._current_graph_task_id(),
        )
        _thread.scopes = (*_thread.scopes, scope)

    def __exit__(self, *exception: object) -> None:
        _thread.scopes = _thread.scopes[:-1]


def _torch_scopes(hooked: bool) -> Iterator[_fallback.Scope]:
    """Scopes of torch's non-reentrant checkpoint, read from closures of its saved-tensor hooks."""
    for pack in _pack_hooks() if hooked else ():
        function = getattr(pack, "__wrapped__", pack)
        name = getattr(function, "__qualname__", "")
        if getattr(function, "__module__", None) != "torch.utils.checkpoint":
            continue
        values = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if name == "_checkpoint_hook.__init__.<locals>.pack_hook":
            yield _record_of(values["frame"].cell_contents), None, -1
        elif name == "_recomputation_hook.__init__.<locals>.pack_hook":
            frame = values["target_frame_ref"].cell_contents()
            gid = values["gid"].cell_contents
            positions = vars(pack).setdefault(_POSITIONS, {})
            # A number is a graph task, or made up where no backward is running. An object is a
            # group of backwards.
            task = torch._C._current_graph_task_id()
            yield _record_of(frame), positions, gid if isinstance(gid, int) and task != -1 else task


def _record_of(owner: Any) -> ForwardRecord:
    record: ForwardRecord = vars(owner).setdefault(_ATTRIBUTE, {})
    return record


def _function_records(look_for_forwards: bool) -> tuple[list[ForwardRecord], Replay | None]:
    """Records of autograd Functions: those whose forward is on the Python stack, and that of the
    current node, which is being computed again."""
    node: Any = torch._C._current_autograd_node()
    if getattr(node, _ATTRIBUTE, None) is None:  # its forward recorded nothing
        node = None
    recording: list[ForwardRecord] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (node is not None or look_for_forwards):
        code = frame.f_code
        if code is _RUN_BACKWARD:  # frames further out belong to another graph task
            break
        if code.co_argcount and code.co_varnames[0] == "ctx":
            ctx = frame.f_locals.get("ctx")
            if ctx is not None and ctx is node:
                return recording[::-1], Replay(_record_of(ctx), _positions_of(ctx), False)
            if look_for_forwards and isinstance(ctx, FunctionCtx):
                recording.append(_record_of(ctx))
        frame = frame.f_back
    return recording[::-1], None


def _positions_of(ctx: Any) -> ForwardRecord:
    task = torch._C._current_graph_task_id()
    of_task, positions = getattr(ctx, _POSITIONS, (None, {}))
    if of_task != task:  # another backward recomputes from the start
        positions = {}
        setattr(ctx, _POSITIONS, (task, positions))
    return positions
