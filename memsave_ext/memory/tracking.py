"""Seeing memory: how many bytes of tensors a piece of training holds, at its peak and now."""

from __future__ import annotations

from types import TracebackType

from . import _native
from ._reference import memory as _reference

_Tracker = _native.module.AllocationTracker if _native.module else _reference.AllocationTracker


class Track:
    """What :func:`track` returns: the bytes of CPU tensors allocated inside its ``with`` blocks."""

    def __init__(self) -> None:
        self._tracker = _Tracker()

    @property
    def live(self) -> int:
        """Bytes allocated minus bytes freed inside the blocks so far."""
        return self._tracker.live

    @property
    def peak(self) -> int:
        """The largest :attr:`live` has been, in bytes."""
        return self._tracker.peak

    def reset_peak(self) -> None:
        """Make the present :attr:`live` the new :attr:`peak`."""
        self._tracker.reset_peak()

    def __enter__(self) -> Track:
        self._tracker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tracker.stop()


def track() -> Track:
    """Count the bytes of CPU tensors inside a ``with`` block.

    Example::

        with memsave_ext.memory.track() as t:
            model = make_model()
            train_step(model)
        print(t.peak)

    The object can be entered again and goes on counting. Every CPU allocation of the thread and of
    the autograd threads of its backwards counts, temporaries inside kernels included; threads
    started from Python inside the block do not. Memory from before tracking began does not count,
    and what is freed between two blocks is not noticed.

    Raises:
        RuntimeError: on entry, when this thread is tracked already or torch's profiler runs on it:
            the two share one slot in torch.
    """
    return Track()
