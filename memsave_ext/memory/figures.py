"""The figures of a track: what lives now, and what the peak was made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .. import _native, _parts
from ..shared.device_memory import check_counts
from ..shared.modules import Modules
from . import fallback
from .account import Account, Region, Step, TensorAtPeak, Timeline
from .events import CATEGORIES
from .hooks import Names
from .remedies import remedies
from .tracker import NativeTracker

_HAVE_TRACKERS: Any = [part for part in (_native.module, fallback) if part]


@contextmanager
def untracked() -> Iterator[None]:
    """Does not count what this thread allocates inside, such as for the work of tracking itself."""
    for part in _HAVE_TRACKERS:
        part.pause_tracking(True)
    try:
        yield
    finally:
        for part in _HAVE_TRACKERS:
            part.pause_tracking(False)


def make_tracker(
    device: torch.device, parents: list[int], stacks: bool, max_events: int
) -> NativeTracker | fallback.ProfilerTracker:
    """Returns a tracker, native where there is one. Those of pure Python take no stacks.

    Raises:
        RuntimeError: torch counts no memory of the device.
    """
    check_counts("track", device)
    if _parts.native("memory"):
        return NativeTracker(device, parents, stacks, max_events)
    return fallback.ProfilerTracker(device, parents, max_events)


class Figures:
    """Reads the figures of a tracker, while it runs and afterwards.

    Before it has run ``live`` and ``peak`` are 0, and all else is a RuntimeError.
    """

    timed = True  # whether the times in the figures are those of a run
    reserved: int | None = None  # bytes, where an allocator was simulated

    def __init__(self, tracker: Any, device: torch.device, modules: Modules, names: Names) -> None:
        self.device = device
        self._modules, self._names = modules, names
        self._tracker = tracker
        self._installed: ExitStack | None = None  # ends tracking when closed; None: not running
        self._final: Account | None = None  # kept once tracking has ended; None: not made yet
        self._elsewhere: dict[str, int] = {}  # see Hooks.elsewhere

    @property
    def live(self) -> int:
        """Bytes that live now or, after the block, that lived when it was left."""
        return int(self._tracker.live)

    @property
    def peak(self) -> int:
        """The largest value that :attr:`live` has had, in bytes."""
        return int(self._tracker.peak)

    def reset_peak(self) -> None:
        """Makes the present :attr:`live` the new :attr:`peak` and forgets the earlier timeline."""
        self._tracker.reset_peak()
        self._elsewhere.clear()
        self._final = None

    @property
    def at_peak(self) -> dict[str, int]:
        """The peak's bytes by category: parameters (with buffers), gradients (of parameters),
        optimizer (its states), activations (made by a forward or a recompute, and alive after it)
        and other (inputs, temporaries, gradients of activations). Their sum is :attr:`peak`."""
        return self._account().at_peak

    @property
    def peak_phase(self) -> str:
        """What training was doing at the peak: forward, backward, recompute, rematerialize,
        optimizer or other."""
        return self._account().peak_phase

    @property
    def peak_step(self) -> int:
        """The training step that has the peak, counted from 0."""
        return self._account().peak_step

    @property
    def peak_time(self) -> float:
        """When the peak was, in seconds since tracking began."""
        return self._account().peak_time

    @property
    def timeline(self) -> Timeline:
        """Live bytes by category over time."""
        return self._account().timeline

    @property
    def most_moved(self) -> int:
        """The most bytes that ``offload`` of :func:`remat` had elsewhere at a time, as in files."""
        moved = self.timeline.moved
        return int(moved.max()) if len(moved) else 0

    @property
    def most_elsewhere(self) -> dict[str, int]:
        """The most bytes of each category that lay elsewhere at a time, in files or, of a CUDA
        device, in the host's memory: parameters by ``weights_on``, gradients by ``grads_on`` and
        optimizer states by ``states_on``, as steps of the optimizers found them, and activations,
        which is :attr:`most_moved`. Categories of which nothing did are left out."""
        found = {**self._elsewhere, "activations": self.most_moved}
        return {category: found[category] for category in CATEGORIES if found.get(category)}

    @property
    def steps(self) -> list[Step]:
        """The training steps that are in the timeline, each with its time and peak."""
        return self._account().steps

    @property
    def regions(self) -> list[Region]:
        """What was recomputed, and what that cost: checkpointed regions, and ``remat`` by module.

        Regions of other packages' checkpoints are seen module by module.
        """
        return self._account().regions

    def top(self, n: int = 10) -> list[TensorAtPeak]:
        """Returns the ``n`` largest tensors at the peak, the largest first."""
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        with untracked():
            return self._account().top(n)

    def remedies(self) -> list[str]:
        """Returns what would lower the peak where it is of a kind that no recompute lowers: a
        sentence for each head of the model whose logits are a large part of it, or for a module
        that makes a large part of it while it is computed again or in a forward without a graph.
        """
        with untracked():
            account = self._account()
            tensors, phase = account.top(1 << 62), account.peak_phase
        return list(remedies(tensors, phase, self._modules.names, self._modules.layers))

    def _account(self) -> Account:
        if self._final is not None:
            return self._final
        with untracked():
            record = self._tracker.record()
            if not len(record.changes):
                raise RuntimeError(
                    "memory: nothing was tracked yet: the figures are known once the `with` block "
                    "of track() has been entered"
                )
            account = Account(record, self._names.texts, self._modules.names)
        if self._installed is None:
            self._final = account
        return account
