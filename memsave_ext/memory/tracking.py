"""Follows the memory of training: what lives when, what it belongs to, what the peak is made of."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ..shared.checks import check_allocator, check_bool, check_shapes, checked_device
from ..shared.modules import Modules
from .account import FEWEST_STEPS, Growth
from .fallback import ProfilerTracker
from .figures import make_tracker, untracked
from .holders import Holder, holders_of, storages_at
from .hooks import Hooks, Names
from .reported import Reported
from .snapshot import save_snapshot

_running: list[Track] = []
_running_lock = threading.Lock()


def running() -> list[Track]:
    """Returns the tracks that run now in this process, the outermost first."""
    with _running_lock:
        return list(_running)


class Track(Reported):
    """What :func:`track` returns. Its figures can be read at any time, also inside the block."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: list[Optimizer],
        device: torch.device,
        stacks: bool,
        max_events: int,
    ) -> None:
        modules, names = Modules(model), Names()
        tracker = make_tracker(device, modules.parents, stacks, max_events)
        super().__init__(tracker, device, modules, names)
        self.stacks = stacks
        self._hooks = Hooks(self._tracker, model, modules, optimizers, names)
        self._elsewhere = self._hooks.elsewhere
        # What growth() is about, by address, as it was when the block was left.
        self._left: dict[int, StorageWeakRef] = {}

    def growth(self, n: int = 10) -> list[Growth]:
        """Returns the ``n`` largest groups of tensors that three training steps or more have made
        and none has freed, and what holds them: a list of losses with their graphs, an attribute.
        The first of these steps is in the first half of all, or 20 steps ago or more, and three in
        four since then have left something: a queue or a cache has those of the latest steps alone.

        Call it where they are held, in the block or soon after it: it looks through all objects of
        the process, for a second or more. What a list or a cache had before the block is not
        counted; what it has grown by is. What was freed after the block has no holder, and is still
        listed; nor has what C++ alone holds, as what this package's BatchNorm, ``checkpoint`` and
        ``remat`` keep for backward, and what NumPy arrays hold. With ``stacks=True`` it says which
        line made them.

        Raises:
            RuntimeError: in the block in pure Python, where it is known once the block is left.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        if self._installed is not None and isinstance(self._tracker, ProfilerTracker):
            raise RuntimeError(
                "memory: in pure Python growth() is known once the `with` block of track() has "
                "been left"
            )
        return self._growth(n)

    def _growth(self, n: int) -> list[Growth]:
        with untracked():
            return self._account().growth(n, self._holders_of)

    def _holders_of(self, addresses: list[int]) -> dict[int, Holder]:
        if self._installed is None:
            there = {at for at, storage in self._left.items() if not storage.expired()}
            addresses = [address for address in addresses if address in there]
        return holders_of(addresses)

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes torch's snapshot of the CUDA device's memory.

        https://pytorch.org/memory_viz and :func:`plot_snapshot` show it. It holds a history if the
        block ran with ``stacks=True``.

        Raises:
            RuntimeError: the device that was tracked is not a CUDA device.
        """
        save_snapshot(self.device, path)

    def __enter__(self) -> Track:
        if self._installed is not None:
            raise RuntimeError("memory tracking cannot start: this track is running already")
        cuda = self.device.type == "cuda"
        self._installed = stack = ExitStack()
        try:
            with untracked():
                self._hooks.label()
                stack.callback(self._tracker.stop)  # an interrupt may come as soon as it runs
                self._tracker.start(torch.cuda.memory_allocated(self.device) if cuda else None)
                if cuda and self.stacks:
                    stack.enter_context(_history())
                stack.push(self._hooks.install())
                stack.callback(self._end)
                with _running_lock:
                    _running.append(self)
                self._final = None
            return self
        except BaseException:
            self._installed = None
            stack.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._installed is None:
            raise RuntimeError("memory tracking cannot stop: this track is not running")
        self._tracker.check_stop()
        installed, self._installed = self._installed, None
        installed.close()
        # What is freed from now on is not noticed, and others may be given its address.
        if self._tracker.steps >= FEWEST_STEPS:  # of fewer the events need not be read yet
            with untracked():
                self._left = storages_at(self._account().left_at)

    def _end(self) -> None:
        with _running_lock:
            if self in _running:
                _running.remove(self)


@contextmanager
def _history() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(context="all", stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def track(
    model: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    device: torch.device | str | None = None,
    stacks: bool = False,
    max_events: int = 500_000,
) -> Track:
    """Follows the memory of any number of training steps in a ``with`` block.

    Example::

        with memsave_ext.memory.track(model, optimizer) as t:
            for batch in batches:
                train_step(batch)
        print(t.report())
        t.plot("timeline.png")
        print(t.peak, t.at_peak)

    On the CPU every allocation of a tensor's memory counts, including temporaries inside kernels,
    in whichever thread of this process. Memory allocated before the block counts if it belongs to
    the model or the optimizer. On CUDA the figures are the caching allocator's; what it does for
    this thread and its backwards is followed block by block, and the rest is in "other". ``with``
    blocks may be nested and may run in several threads at once: each sees everything between its
    own beginning and end.

    An object can be entered again and goes on counting; memory freed in between is not noticed.

    In pure Python the allocations are those that torch's profiler records, which are read when the
    block is left. Until then ``live`` and ``peak`` stay as on entry. Other threads do not count.
    Memory from before that is freed may count until the next forward, step or end.

    Args:
        model: the model whose parameters, buffers and gradients are told apart. Its forwards give
            phases, activations and the names of modules. Nothing stays on it after the block, and
            it is not kept alive; modules added inside are not seen. What torch.compile runs is one
            module, named where it is called from outside: give the compiled model, not what it was
            made of, if that is one of torch's own classes (an ``nn.Sequential``).
        optimizer: the optimizer whose states are told apart, or several in the order in which they
            step. A training step ends with the step of the last one or, without optimizers, where
            the model's next forward begins.
        device: the device to follow. None: that of the model's first parameter, else that of the
            optimizer's first parameter, else the CPU.
        stacks: record the Python stack and the operator of every allocation, for
            :attr:`TensorAtPeak.line`, :attr:`TensorAtPeak.operator` and
            :meth:`Track.snapshot`. This costs several times the rest. Pure Python records none. The
            block must be left on the thread that entered it, whose operators are recorded.
        max_events: about how many allocations and frees are kept, at 60 to 80 bytes each. If there
            are more, the oldest steps are forgotten, except the one with the peak.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        RuntimeError: on CUDA, with another allocator than torch's caching one (cudaMallocAsync), as
            it reports nothing. On entry, when torch's profiler runs on this thread (on CUDA and in
            pure Python, where they share one slot); in pure Python also when another track runs on
            it.
    """
    optimizers = _optimizers(optimizer)
    _check(model, stacks, max_events)
    chosen = _device(device, model, optimizers)
    check_allocator("memory.track", chosen)
    return Track(model, optimizers, chosen, stacks, max_events)


def _check(model: Any, stacks: Any, max_events: Any) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
    if model is not None:
        check_shapes("track", model)
    check_bool("stacks", stacks)
    if isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1:
        raise ValueError(f"max_events must be a positive int, got {max_events!r}")


def _optimizers(optimizer: Any) -> list[Optimizer]:
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer)
    optimizers = list(optimizer) if several else [optimizer]
    for item in optimizers:
        if not isinstance(item, Optimizer):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, several of them or None, got "
                f"{type(item).__name__}"
            )
    return optimizers


def _device(
    device: torch.device | str | None, model: nn.Module | None, optimizers: list[Optimizer]
) -> torch.device:
    if device is None:
        params = list(model.parameters()) if model is not None else []
        params += [p for o in optimizers for group in o.param_groups for p in group["params"]]
        device = params[0].device if params else "cpu"
    chosen = checked_device("track", device)
    index: int | None = chosen.index
    if chosen.type == "cuda" and index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
