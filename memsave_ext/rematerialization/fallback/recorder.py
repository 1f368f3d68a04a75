"""The part of a block that records operators."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from .content import Call, Content, Geometry, Made, Reference, is_plain, under_fakes
from .operators import Key, Operator, operator_of, results_of, tensors_of
from .recompute import paused

# The longest chain of calls since a kept content. What a longer one makes is not recomputed.
_DEEPEST = 32
NO_MODULE = -1
# Positions of arguments of this package's batch norm.
_STATISTICS, _RUNNING_MEAN, _RUNNING_VAR = 4, 5, 6


class _Recording:
    """The recording of an operator while it runs."""

    def __init__(self, operator: Operator, arguments: dict[Key, Any], module: int) -> None:
        self.call = Call(operator, arguments, module)
        # What runs without grad mode is inside of an autograd.Function or a compiled graph, whose
        # kernels may write unseen. This package's batch norm is such a Function, but is known.
        is_seen = torch.is_grad_enabled() or operator.is_own_batch_norm
        self.is_repeatable = operator.is_repeatable and is_seen
        self.written: list[Tensor] = []


class Recorder:
    def __init__(self, lock: threading.RLock) -> None:
        self.recorded = 0
        self.modules = [NO_MODULE]  # numbers of the modules whose forward runs, innermost last
        self._lock = lock
        self._table: dict[int, Content] = {}  # what each storage holds now, by its address
        self._sweep_at = 1024

    def clear(self) -> None:
        self._table.clear()

    def content_of(self, tensor: Tensor) -> Content:
        content = self._table.get(tensor.untyped_storage()._cdata)
        if content is None or content.was_changed_unseen():
            # A tensor with a history was made in a way that this block does not see. Others are
            # taken to come from outside, as parameters and inputs do.
            content = self._renew(tensor, external=tensor.is_leaf or not tensor.requires_grad)
        content.see(tensor)
        return content

    def run(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = operator_of(overload)
        with self._lock, paused():
            recording = self._start(operator, args, kwargs)
        begin = time.perf_counter()
        try:
            result = overload(*args, **kwargs)
        except BaseException:
            for tensor in recording.written:
                self._written(tensor)
            raise
        if not under_fakes():  # the time of a fake kernel says nothing
            recording.call.seconds = operator.measured(time.perf_counter() - begin, result)
        with self._lock, paused():
            self._end(recording, result)
        return result

    def _renew(self, tensor: Tensor, *, external: bool) -> Content:
        """Starts a new content of the tensor's storage, in place of the known one if any."""
        storage = tensor.untyped_storage()
        before = self._table.get(storage._cdata)
        if before is not None:
            before.overwritten = True
            external = before.external
        content = Content(storage, external=external, module=self.modules[-1])
        self._table[storage._cdata] = content
        return content

    def _written(self, tensor: Tensor) -> Content:
        content = self._renew(tensor, external=False)
        content.see(tensor, about_to_change=True)
        return content

    def _start(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Recording:
        self.recorded += 1
        self._sweep()
        arguments = operator.arguments(args, kwargs)
        left_out: tuple[int, ...] = ()  # positions of running statistics, not given to a recompute
        recording = _Recording(operator, arguments, self.modules[-1])
        if operator.is_own_batch_norm:
            left_out = _RUNNING_MEAN, _RUNNING_VAR
        elif operator.is_torch_batch_norm:
            if arguments.get(5) is True:  # in training it writes them, which its schema omits
                left_out = 3, 4
            elif arguments.get(3) is not None:
                recording.is_repeatable = False  # in eval it reads them, and they change unseen
        for key, element, tensor in [*tensors_of(arguments.items())]:
            self._take(recording, key, element, tensor, left_out)
        return recording

    def _take(
        self,
        recording: _Recording,
        key: Key,
        element: int,
        tensor: Tensor,
        left_out: tuple[int, ...],
    ) -> None:
        """Records a tensor argument of the operator."""
        call = recording.call
        if element < 0:
            call.arguments[key] = None
        else:
            call.arguments[key][element] = None
        if not is_plain(tensor) or tensor.is_inference():
            recording.is_repeatable = False
            return
        content = self.content_of(tensor)
        writes = key in call.operator.writes
        if writes or key in left_out:
            if content.memory is not None:
                content.memory.before_write()
            recording.written.append(tensor)
        if key not in left_out:
            geometry = Geometry.of(tensor)
            call.references.append(Reference(key, element, content, geometry, writes))

    def _end(self, recording: _Recording, result: Any) -> None:
        call = recording.call
        depths = [r.content.depth for r in call.references if r.content.call is not None]
        depth = 1 + max(depths, default=0)
        changed = {r.content for r in call.references if r.written}
        is_repeatable = recording.is_repeatable and depth <= _DEEPEST
        written = {tensor.untyped_storage()._cdata: tensor for tensor in recording.written}
        for output, element, tensor in results_of(result):
            if not is_plain(tensor):
                continue
            address = tensor.untyped_storage()._cdata
            before: Content | None = None
            if is_change := address in written:
                before = self._table.get(address)
                content = self._written(written.pop(address))
            elif address in self._table:  # a view, or another tensor on a storage made by this call
                continue
            else:
                content = self._renew(tensor, external=False)
                content.see(tensor)
            content.operator = call.operator.name
            if call.operator.is_own_batch_norm and output == 1:
                # A recompute uses the batch statistics that the forward returned.
                geometry = Geometry.of(tensor)
                call.references.append(Reference(_STATISTICS, -1, content, geometry, False))
            elif is_repeatable and (before in changed or not is_change):
                content.call, content.depth = call, depth
                call.made.append(Made(weakref.ref(content), output, element, before))
        for tensor in written.values():  # those that were written and not returned
            self._written(tensor)

    def _sweep(self) -> None:
        if len(self._table) < self._sweep_at:
            return
        self._table = {key: c for key, c in self._table.items() if not c.is_gone()}
        self._sweep_at = max(1024, 2 * len(self._table))
