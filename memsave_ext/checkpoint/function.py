"""The explicit form of checkpointing: what is differentiated is listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _parts
from .fallback import function as _fallback
from .fallback import stepped, surroundings

_native = _parts.native("checkpoint")


class CheckpointFunction:
    """Checkpointing in its explicit form: ``CheckpointFunction.apply(function, n, *args)``.

    Calls ``function(*args[:n])`` without keeping a graph, and once more in backward, for its
    gradients. Between the two it holds the inputs and nothing else. Example, a dense layer whose
    concatenation and bottleneck are not kept::

        def bottleneck(*features):
            return self.conv1(self.norm1(torch.cat(features, 1)).relu())

        parameters = [*self.norm1.parameters(), *self.conv1.parameters()]
        y = CheckpointFunction.apply(bottleneck, len(features), *features, *parameters)

    Args:
        function: takes the n inputs as positional arguments and returns a tensor, or a tuple or
            list of tensors and other values. Values other than floating-point and complex tensors
            are passed through. It must do the same each time it is called; the second call finds
            the random numbers, autocast state (with the cast cache off), default dtype, torch's
            settings of determinism, precision and backends, CUDA device and stream of the first.
            Tensors that it reads from outside must not have changed in between; those
            that stand in its closure, the globals it names or modules there are looked at, as
            :func:`checkpoint` does, and one that has changed and is read raises.
        n: how many of ``args`` are inputs.
        *args: tensors of any shape: the n inputs, then the tensors that ``function`` uses by itself
            and that are to be differentiated, such as the parameters of its modules.

    Returns:
        What ``function`` returned. The differentiable tensors in it share one autograd node, so
        that hooks, DDP, ``autograd.grad`` and ``inputs=`` see every gradient exactly once.

    Raises:
        TypeError: ``function`` is not callable, ``n`` is not an int, one of ``args`` is not a
            tensor, or an output is a container that holds tensors.
        ValueError: ``n`` is negative or larger than the number of ``args``.
        CheckpointError: the recompute read a tensor from outside that has changed since the
            forward: in place, by another object in its place, or by a step of this package's
            optimizers.
        RuntimeError: ``function`` changes an input in place; or inside a ``torch.func`` transform.
            In backward: an input or parameter was changed in place since the forward; the recompute
            returns another structure or other shapes; a second backward without ``retain_graph``;
            double backward, which is not supported.
        NotImplementedError: forward mode AD, where a tensor needs a gradient, too.

    Warns:
        UserWarning: once per call site, when ``function`` uses a tensor that needs a gradient and
            is not listed: it gets no gradient from this region.
    """

    apply: Callable[..., Any] = staticmethod((_native or _fallback).checkpoint_apply)

    def __new__(cls, *args: Any, **kwargs: Any) -> CheckpointFunction:
        raise TypeError(
            "CheckpointFunction is not instantiated: call CheckpointFunction.apply(...)"
        )


def is_recomputing() -> bool:
    """Whether this thread is inside the recompute of a region of this package.

    True in everything the recomputed function calls, regions nested in it included; False in the
    first forward, and in the backward of what was recomputed. False under ``torch.compile``, which
    recomputes inside one compiled graph and calls nothing again.
    """
    return not torch.compiler.is_compiling() and _is_recomputing()


_is_recomputing: Callable[[], bool] = (_native or surroundings).is_recomputing
# Optimizers tell regions and blocks that wait for their recompute which parameters they step.
is_any_pending: Callable[[], bool] = (_native or stepped).is_any_pending
note_step: Callable[[Tensor, int], None] = (_native or stepped).note_step
