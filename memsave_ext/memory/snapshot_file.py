"""Reads a snapshot of torch's CUDA allocator: which code held how many bytes at which time.

A snapshot file is the pickled result of ``torch.cuda.memory._snapshot()``, whose docstring
describes the format. Sizes in a trace are those asked for; segments are what the allocator got
from CUDA.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BEFORE = "(allocated before the trace begins)"
NO_STACK = "(no stack)"
NO_PYTHON = "(no Python code, as in most of backward)"
_ALLOCATED = "active_allocated"
# States of blocks that were freed, but that another stream may still use.
_WAITING = ("active_pending_free", "active_awaiting_free")
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
# Matches files that are not the user's code: those of the standard library, and of this package and
# torch, be they installed, in a checkout or where they are on this machine. (A snapshot may come
# from another machine.) Any other folder called torch or memsave_ext holds the user's code.
_HERE = "|".join(
    re.escape(os.path.join(folder, ""))
    for folder in (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))
)
_NOT_USERS = re.compile(
    rf"^<|^({_HERE})|/memsave_ext/memsave_ext/|/pytorch/(torch|torchgen|functorch)/"
    r"|/(site|dist)-packages/(memsave_ext|torch|torchgen|functorch)/"
    r"|/lib/python3[^/]*/(?!(site|dist)-packages)"
)


@dataclass(frozen=True)
class History:
    """The bytes held on one device: row 0 is before the trace, row i after its i-th event."""

    device: int
    time: Tensor | None  # float64 [n], seconds since the first event; None if not known
    allocated: Tensor  # int64 [n], bytes of blocks in use or waiting for another stream
    reserved: Tensor  # int64 [n], bytes that the allocator holds
    changes: Tensor  # int64 [n], what each row adds to ``allocated``
    line: Tensor  # int64 [n], whose bytes changed: an index into ``lines``
    lines: list[str]  # the lines of code that allocated
    before: dict[int, int]  # bytes at row 0, by index into ``lines``
    out_of_memory: list[tuple[int, int]]  # rows where memory ran out, bytes asked for
    unexplained: int  # bytes in use at the end: the trace's figure less the segments'

    def by_line(self, row: int) -> dict[str, int]:
        """Returns the bytes at ``row`` by line of code, the largest first."""
        size = torch.zeros(len(self.lines), dtype=torch.int64, device="cpu")
        size.index_add_(0, self.line[: row + 1], self.changes[: row + 1])
        for line, held in self.before.items():
            size[line] += held
        order = size.sort(descending=True, stable=True).indices.tolist()
        return {self.lines[i]: int(size[i]) for i in order if size[i]}

    def of_line(self, name: str) -> Tensor:
        """Returns the bytes of one line of code at each row, int64 [n]."""
        line = self.lines.index(name)
        return self.changes.where(self.line == line, 0).cumsum(0) + self.before.get(line, 0)


class _Plain(pickle.Unpickler):
    """Reads plain data and refuses classes and functions, which could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, and a snapshot holds only plain data"
        )


def read_snapshot(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the snapshot in the file ``path``; runs no code that the file may hold.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is no pickle, holds more than plain data, or is no snapshot.
    """
    with open(path, "rb") as file:
        try:
            snapshot: dict[str, Any] = _Plain(file).load()
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise ValueError(f"{os.fspath(path)} cannot be read as a snapshot: {error}") from error
    for key in ("segments", "device_traces"):
        if not isinstance(snapshot, dict) or not isinstance(snapshot.get(key), list):
            raise ValueError(
                f"{os.fspath(path)} is no snapshot of torch's CUDA allocator: there must be a dict "
                "with lists 'segments' and 'device_traces'"
            )
    return snapshot


def histories(snapshot: Mapping[str, Any], name: str = "the snapshot") -> list[History]:
    """Returns the history of each device that has blocks or events in the snapshot.

    Args:
        snapshot: what :func:`read_snapshot` returned.
        name: what error messages call it.

    Raises:
        ValueError: entries are not as torch writes them.
    """
    found = []
    traces = snapshot["device_traces"]
    try:
        used = {segment["device"] for segment in snapshot["segments"] if segment["blocks"]}
        used |= {device for device, trace in enumerate(traces) if trace}
        for device in sorted(used):
            segments = [s for s in snapshot["segments"] if s["device"] == device]
            trace = traces[device] if device < len(traces) else []
            found.append(_history(device, segments, trace))
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{name} has entries that differ from those that torch writes: {what}"
        ) from error
    return found


def _history(
    device: int, segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]]
) -> History:
    lines = _Lines()
    lines.named(NO_STACK)  # number 0, that of rows that change nothing
    at_end = dict(_blocks(segments, lines))
    frees = _freeing_action(segments, trace)
    before = _undo(trace, at_end, frees, lines)

    live = dict(before)
    rows: list[tuple[int, int, int]] = [(0, 0, 0)]  # line; changes of allocated and of reserved
    out_of_memory = []
    for row, event in enumerate(trace, 1):
        action, size = event["action"], event.get("size", 0)
        line = change = 0
        if action == "alloc":
            line, change = lines.of(event.get("frames")), size
            live[event["addr"]] = (line, size)
        elif action == frees:
            line, freed = live.pop(event["addr"], (0, 0))
            change = -freed
        elif action == "oom":
            out_of_memory.append((row, size))
        rows.append((line, change, _RESERVES.get(action, 0) * size))
    line_of, changes, reserved = torch.tensor(rows, dtype=torch.int64, device="cpu").unbind(1)
    held: dict[int, int] = {}
    for line, size in before.values():
        held[line] = held.get(line, 0) + size
    allocated = changes.cumsum(0) + sum(held.values())
    reserved = reserved.cumsum(0)
    reserved += sum(segment["total_size"] for segment in segments) - reserved[-1]
    return History(
        device=device,
        time=_time(trace),
        allocated=allocated,
        reserved=reserved,
        changes=changes,
        line=line_of,
        lines=lines.names,
        before=held,
        out_of_memory=out_of_memory,
        unexplained=int(allocated[-1]) - sum(size for _, size in at_end.values()),
    )


def _blocks(
    segments: Sequence[Mapping[str, Any]], lines: _Lines
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields address, line and size of each block that was in use when the snapshot was taken."""
    for address, block in _places(segments):
        if block["state"] == _ALLOCATED or block["state"] in _WAITING:
            size = block.get("requested_size", block["size"])
            yield address, (lines.of(block.get("frames")), size)


def _places(segments: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            yield address, block
            address += block["size"]


def _freeing_action(
    segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]]
) -> str:
    """Returns the action that ends a block.

    This is the completed free, or the requested one where the trace leaves completed ones out.
    """
    if any(event["action"] == "free_completed" for event in trace):
        return "free_completed"
    waiting = {address for address, block in _places(segments) if block["state"] in _WAITING}
    requested = (event["addr"] for event in trace if event["action"] == "free_requested")
    return "free_completed" if waiting.issuperset(requested) else "free_requested"


def _undo(
    trace: Sequence[Mapping[str, Any]],
    at_end: Mapping[int, tuple[int, int]],
    frees: str,
    lines: _Lines,
) -> dict[int, tuple[int, int]]:
    """Returns the blocks in use before the trace, found by undoing its events from the last on.

    There are such blocks if the trace began late or has dropped its oldest events.
    """
    live = dict(at_end)
    for event in reversed(trace):
        if event["action"] == "alloc":
            live.pop(event["addr"], None)
        elif event["action"] == frees:  # with the stack of the free, not of the allocation
            live[event["addr"]] = (lines.named(BEFORE), event["size"])
    return live


def _time(trace: Sequence[Mapping[str, Any]]) -> Tensor | None:
    if not trace or not all("time_us" in event for event in trace):
        return None
    time = torch.tensor([event["time_us"] for event in trace], dtype=torch.int64, device="cpu")
    time = ((time - time[0]).double() / 1e6).cummax(0).values  # threads' clocks differ slightly
    return torch.cat([time[:1], time])


class _Lines:
    """Numbers the lines of code that allocate."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        # By the id of a list of frames, as a snapshot shares these lists between events.
        self._of_stack: dict[int, int] = {}

    def named(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]

    def of(self, frames: Sequence[Mapping[str, Any]] | None) -> int:
        if not frames:
            return self.named(NO_STACK)
        if id(frames) not in self._of_stack:
            self._of_stack[id(frames)] = self.named(line_of(frames))
        return self._of_stack[id(frames)]


def line_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """Returns the innermost line of the user's code in a stack, ``"net.py:12 in forward"``.

    Frames are ordered innermost first. If none is the user's, the innermost line of Python counts.
    """
    python = [f for f in frames if f["filename"].endswith(".py") or f["filename"].startswith("<")]
    users = [frame for frame in python if not _NOT_USERS.search(frame["filename"])]
    for frame in (users or python)[:1]:
        return f"{frame['filename'].rpartition('/')[2]}:{frame['line']} in {frame['name']}"
    return NO_PYTHON
