"""``remat_module``: runs every forward of a module in a ``remat`` block."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import MethodType
from typing import Any, TextIO

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..checkpoint.models import ForwardInPlace
from ..shared.checks import check_bool
from ..shared.table import Text
from .block import remat
from .budget import check_ahead, check_arguments, counted_device
from .figures import RematFigures
from .functions import check_pure
from .offload import Offload, check_offload


class _RematForward(ForwardInPlace):
    last: remat | None = None  # block of the last forward with gradients, also of a replica's
    origin: _RematForward | None = None  # in a replica: that of the module

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch.compile itself decides what to recompute, and without grad mode nothing is saved.
        # What torch.jit.trace notes runs elsewhere.
        function = self.function(module)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._is_tracing():
            return function(module, *args, **kwargs)
        block = remat._of_checked(module, **self.options)
        # What DistributedDataParallel does before its module is not the same in its second step.
        if not isinstance(module, DistributedDataParallel):
            known_as = module if self.origin is None else self.origin.module
            block._plan_ahead(module, function, args, kwargs, known_as)
        with block:
            (self.origin or self).last = block
            return function(module, *args, **kwargs)

    def replicate(self) -> nn.Module:
        replica = super().replicate()
        replica.__dict__[self.method].origin = self
        return replica

    def __getstate__(self) -> dict[str, Any]:
        # A copy has run no forward yet, and its parameters are not the optimizer's.
        options = self.options | {"optimizer": None}
        state = {"module": self.module, "options": options, "method": self.method, "own": self.own}
        return state | {"removed": self.removed}


class RematHandle:
    """What :func:`remat_module` returns."""

    def __init__(self, forward: _RematForward) -> None:
        self._forward = forward

    def remove(self) -> None:
        """Give the module its own forward back. A second call does nothing.

        Where another library has wrapped the forward since, it calls the module's own from now on.
        """
        self._forward.retire()

    def figures(self) -> RematFigures:
        """Returns the figures of the module's last forward: see :meth:`remat.figures`.

        Raises:
            RuntimeError: the module has run no forward with gradients yet.
        """
        return self._last().figures()

    def report(self, *, top: int = 10, file: TextIO | None = None) -> Text:
        """Returns the report of the module's last forward: see :meth:`remat.report`.

        Raises:
            RuntimeError: the module has run no forward with gradients yet.
        """
        return self._last().report(top=top, file=file)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the module's last step: see :meth:`remat.plot`.

        Raises:
            RuntimeError: the module has run no forward with gradients yet, or has no budget.
        """
        self._last().plot(path)

    @property
    def peak(self) -> int:
        """See :attr:`remat.peak`, of the module's last step."""
        return self._last().peak

    @property
    def least(self) -> int | None:
        """See :attr:`remat.least`, of the module's last step."""
        return self._last().least

    @property
    def budget(self) -> int | None:
        """See :attr:`remat.budget`, of the module's last step."""
        return self._last().budget

    def _last(self) -> remat:
        if self._forward.last is None:
            raise RuntimeError(
                "remat_module: nothing to report: the module has run no forward with gradients yet"
            )
        return self._forward.last


def remat_module(
    model: nn.Module,
    *,
    by_module: bool = False,
    budget: int | float | str | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    strict: bool = False,
    retry: bool = False,
    offload: Offload | None = None,
    offload_limit: int | str | None = None,
    ahead: bool | float = True,
    pure: Sequence[type[Function]] = (),
    _everything: bool = False,
    _method: str = "forward",
) -> RematHandle:
    """Run every forward of ``model`` in a :class:`remat` block, changing the model in place.

    It is for trainers, where one does not write the training step oneself. Only ``forward`` of the
    model is replaced: classes, names, parameters, hooks and the state_dict stay as they are, and
    the model can be copied and pickled. Hooks of the model itself run outside of the block.
    Forwards without gradients, and those that torch.compile traces, run as they are.

    Args:
        model: the model, or a part of one.
        by_module: whether reports show its modules separately; see :class:`remat`.
        budget: as of :class:`remat`, for every step.
        optimizer: as of :class:`remat`.
        strict: as of :class:`remat`.
        retry: as of :class:`remat`.
        offload: as of :class:`remat`.
        offload_limit: as of :class:`remat`.
        ahead: as of :class:`remat`.
        pure: as of :class:`remat`.

    Returns:
        A handle whose ``remove()`` restores the model's forward.

    Raises:
        TypeError: ``model`` is no module; another argument is of the wrong type.
        ValueError: the instance has a ``forward`` of its own already, other than a bound method as
            accelerate's ``prepare()`` sets one; a budget is out of range; ``offload`` or
            ``offload_limit`` is wrong, as of :class:`remat`.
        OSError: from a call of the model, where no file can be made in the folder ``offload``.
        RuntimeError: a budget without the native part, or with a CUDA allocator that reports
            nothing (cudaMallocAsync).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"remat_module: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    own = model.__dict__.get(_method)
    if own is not None and not (isinstance(own, MethodType) and own.__self__ is model):
        raise ValueError(
            f"remat_module: the {_method} of {type(model).__name__} has been replaced already; "
            "remove() the handle that replaced it first, or call remat_module before it is replaced"
        )
    check_bool("remat_module: by_module", by_module)
    within = check_arguments(budget, optimizer, strict, retry)
    check_ahead(ahead)
    functions = check_pure("remat_module", pure)
    has_budget = within is not None or _everything
    offload = check_offload(
        "remat_module", offload, offload_limit, has_budget, counted_device(model)
    )
    options: dict[str, Any] = {"budget": within, "optimizer": optimizer}
    options |= {"strict": strict, "retry": retry, "ahead": ahead}
    options |= {"offload": offload, "offload_limit": offload_limit}
    options |= {"pure": functions, "by_module": by_module, "everything": _everything}
    forward = _RematForward(model, options, _method)
    forward.install()
    return RematHandle(forward)
