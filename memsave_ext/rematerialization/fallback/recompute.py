"""Recomputes dropped contents."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import UntypedStorage

from ...checkpointing import errors
from ...checkpointing.fallback import surroundings
from .content import Call, Content, Memory, Reference, copied
from .operators import results_of

_thread = threading.local()


@contextmanager
def paused() -> Iterator[None]:
    """Records nothing on this thread inside the block."""
    _thread.paused = getattr(_thread, "paused", 0) + 1
    try:
        yield
    finally:
        _thread.paused -= 1


def is_paused() -> bool:
    return getattr(_thread, "paused", 0) > 0


@dataclass
class Again:
    """Sums over a block's recomputes, and the lock that guards the block."""

    # By module and operator: [how often it ran, the bytes it made, the seconds it took].
    sums: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    # Held while the block records, decides or recomputes; not while a recorded operator runs.
    lock: threading.RLock = field(default_factory=threading.RLock)


def storage_of(memory: Memory, again: Again) -> UntypedStorage:
    """Recomputes dropped memory and returns its storage.

    The caller holds the lock and has paused recording. Raises CheckpointError where memory that it
    is computed from has changed.
    """
    with (
        surroundings.recomputing(surroundings.Again.OPERATORS),
        torch.no_grad(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
    ):
        return _Recomputation(again).storage_of(memory.content, memory.calls)


class _Recomputation:
    """Recomputes one content, and all that has to be computed on the way."""

    def __init__(self, again: Again) -> None:
        self._again = again
        self._computed: dict[Content, UntypedStorage] = {}

    def storage_of(self, content: Content, calls: dict[Content, Call]) -> UntypedStorage:
        """Returns the storage of ``content``, recomputed where it is not held.

        ``calls`` are those that recompute what was not kept when the dropped content was planned.
        """
        memory = content.memory
        if memory is not None and memory.dropped:
            calls = memory.calls
        if (
            memory is not None
            and memory.storage is not None
            and (memory.dropped or content not in calls)
        ):
            return memory.storage
        if content not in self._computed:
            self._run(calls[content], calls)
        return self._computed[content]

    def _run(self, call: Call, calls: dict[Content, Call]) -> None:
        written = {r.content for r in call.references if r.written}
        copies: dict[Content, UntypedStorage] = {}
        given = {
            key: [*value] if isinstance(value, list) else value
            for key, value in call.arguments.items()
        }
        for reference in call.references:
            storage = self.storage_of(reference.content, calls)
            if reference.content not in calls:
                _check_unchanged(call, reference, storage)
            if reference.content in written:
                copy = copied(storage, reference.geometry.device)
                storage = copies.setdefault(reference.content, copy)
            tensor = reference.geometry.view(storage)
            if reference.element < 0:
                given[reference.key] = tensor
            else:
                given[reference.key][reference.element] = tensor
        begin = time.perf_counter()
        result = call.operator.overload(
            *(value for key, value in given.items() if isinstance(key, int)),
            **{key: value for key, value in given.items() if isinstance(key, str)},
        )
        seconds = time.perf_counter() - begin
        results = {(i, element): tensor for i, element, tensor in results_of(result)}
        sums = self._again.sums.setdefault((call.module, call.operator.name), [0, 0, 0.0])
        sums[0] += 1
        sums[2] += seconds
        for made in call.made:
            content = made.content()
            if content is not None:
                if made.written is not None:
                    storage = copies[made.written]
                else:
                    storage = results[made.output, made.element].untyped_storage()
                sums[1] += content.bytes
                self._keep(content, storage)

    def _keep(self, content: Content, storage: UntypedStorage) -> None:
        """Keeps a result for this recompute, and for other holders that still wait for it."""
        self._computed[content] = storage
        memory = content.memory
        if memory is not None and memory.storage is None:
            memory.fill(storage)


def _check_unchanged(call: Call, reference: Reference, storage: UntypedStorage) -> None:
    """Raises where the memory behind ``reference`` has changed, or ``storage`` was freed."""
    content, name = reference.content, call.operator.name
    argument = call.operator.argument_names[reference.key]
    memory = content.memory
    if memory is not None and (versions := memory.change()) is not None:
        raise errors.remat_changed(name, argument, reference.geometry.sizes, *versions)
    if storage.nbytes() < content.bytes:
        raise errors.remat_given_back(name, argument)
