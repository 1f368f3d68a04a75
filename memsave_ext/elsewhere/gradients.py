"""``grads_on=``: the gradients of an optimizer lie elsewhere from when they are complete until each
is stepped."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from ..shared.dtensor import (
    as_placed,
    is_dtensor,
    largest_shard,
    local_of_hook,
    local_tensor,
    put_local,
)
from ..shared.tensors import is_shared
from ..store.folder import absolute_folder
from ..store.kept import SMALLEST, FileKeeper, HostKeeper, Keeper
from .gradient import GradientElsewhere, Values, is_dense

_MARK = "_memsave_ext_gradients_of"  # an attribute of hooks: a reference to the optimizer
_PART = 1 << 20  # bytes that are back at a time, or those of the largest gradient


class Gradients:
    """The gradients of some parameters, which lie elsewhere.

    Args:
        where: ``"cpu"``, pinned memory of the host for parameters on CUDA devices, or a folder, in
            which a file without a name has those of parameters on the CPU or a CUDA device.

    Raises:
        TypeError, ValueError: it is neither.

    Attributes:
        attached: whether gradients leave, from :meth:`attach` until :meth:`detach`. Of a copy,
            whether they left where it was made.
    """

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.attached = False
        self.where, self._keeper = _keeper_of(where)
        self._norms: set[float] = set()  # the orders that somebody has asked for
        self._handles: dict[int, Any] = {}
        weakref.finalize(self, _remove, self._handles).atexit = False

    def __reduce__(self) -> Any:  # a copy has a file of its own, and no hooks
        return Gradients, (self.where,), {"attached": self.attached}

    def attach(self, optimizer: Any, params: Iterable[Tensor]) -> None:
        """Has gradients leave as soon as they are complete, until the optimizer is gone.

        Raises:
            OSError: there is no room for them.
            ValueError: a parameter is on another device, or has no shape yet.
        """
        if any(map(is_lazy, params := list(params))):  # room is made for all gradients at once
            raise ValueError(
                "grads_on got a parameter that has no shape yet: call its module once, then make "
                "its optimizer"
            )
        params = [param for param in params if owner(param) is not optimizer]
        self._keeper.check(_real(params))
        # Room that those of before have given back is theirs.
        every = [p for group in optimizer.param_groups for p in group["params"]]
        self._keeper.reserve(_real(p for p in every if _values_of(p.grad) is None))
        hook = _hook(weakref.ref(self), weakref.ref(optimizer))
        for param in params:
            if not (param.is_floating_point() or param.is_complex()):
                continue  # codes of quantized weights, which have no gradients
            required = param.requires_grad
            handle = param.requires_grad_().register_post_accumulate_grad_hook(hook)
            param.requires_grad_(required)
            self._handles[id(param)] = handle
        self.attached = True

    def lost(self, optimizer: Any) -> list[Tensor]:
        """Returns the optimizer's parameters that have no hook, as where they were replaced."""
        every = [p for group in optimizer.param_groups for p in group["params"]]
        may_leave = (p for p in every if p.is_floating_point() or p.is_complex())
        return [p for p in may_leave if owner(p) is not optimizer] if self.attached else []

    def release(self, params: Iterable[Tensor]) -> None:
        """Leaves later gradients of these alone in memory, or to others."""
        for param in params:
            if (handle := self._handles.get(id(param))) is not None:
                handle.remove()

    def detach(self) -> None:
        """Leaves later gradients in memory."""
        _remove(self._handles)
        self.attached = False

    def leave(self, grad: Any) -> Any:
        """Returns a gradient that lies elsewhere, in place of one that does not."""
        if is_dtensor(grad):
            put_local(grad, self.leave(local_of_hook(grad)))
            return grad
        if isinstance(grad, GradientElsewhere) or grad.layout != torch.strided:
            return grad
        grad = grad.resolve_conj().resolve_neg()
        if grad.nbytes < SMALLEST or grad.requires_grad or not is_dense(grad):
            return grad  # of create_graph=True it has a graph
        if self._keeper.copies_later and is_shared(grad):
            # Backward goes on with that memory, and may write to it: of a view, as in
            # `h + param.view(...)`.
            grad = grad.clone()
        return Values(self._keeper, grad, self._norms).wrapper()


def _real(params: Iterable[Tensor]) -> list[Tensor]:
    """Returns the local tensors of those that get gradients, in no prediction."""
    local = (local_tensor(param) for param in params if param.requires_grad)
    return [tensor for tensor in local if not isinstance(tensor, FakeTensor)]


def any_elsewhere(params: Iterable[Tensor]) -> bool:
    """Whether a gradient in ``.grad`` lies elsewhere."""
    return bool(GradientElsewhere.made) and any(_values_of(p.grad) for p in params)


def nbytes_elsewhere(grads: Iterable[Tensor]) -> int:
    """Returns the bytes of those of the gradients that lie elsewhere."""
    if not GradientElsewhere.made:
        return 0
    found = ((grad, _values_of(grad)) for grad in grads)
    return sum(local_tensor(g).nbytes for g, v in found if v is not None and v.here is None)


def bring_back(params: Iterable[Tensor]) -> None:
    """Has the gradients in ``.grad`` in memory."""
    params = list(params)
    if any_elsewhere(params):
        for param in params:
            param.grad = _back(param.grad)


def step_in_parts(params: Iterable[Tensor], step: Callable[[], int]) -> int:
    """Calls ``step`` for a part of the parameters after the other.

    In each call only these have gradients, and they are in memory. Afterwards all have theirs
    again; where it raises, those that have not been stepped.

    Returns:
        The sum of what ``step`` has returned.
    """
    grads = [(param, param.grad) for param in params if param.grad is not None]
    for param, _ in grads:
        param.grad = None
    stepped = done = 0
    try:
        parts = _parts(grads)
        for i, part in enumerate(parts):
            for _, grad in parts[i + 1] if i + 1 < len(parts) else ():
                if (values := _values_of(grad)) is not None:
                    values.read_ahead()
            for param, grad in part:
                param.grad = _back(grad)
            stepped += step()
            for param, _ in part:
                param.grad = None
            done += len(part)
    except BaseException:
        del grads[:done]  # the next step must not use them again
        raise
    finally:
        for param, grad in grads:
            param.grad = grad
    return stepped


def _hook(
    reference: Callable[[], Gradients | None], optimizer: Callable[[], Any]
) -> Callable[[Tensor], None]:
    @_disable_dynamo  # it runs inside of what is compiled where that calls backward()
    def hook(param: Tensor) -> None:
        gradients = reference()
        if gradients is not None and param.grad is not None:
            grad = param.grad
            if (left := gradients.leave(grad)) is not grad:
                param.grad = left

    setattr(hook, _MARK, optimizer)
    return hook


def owner(param: Tensor) -> Any:
    """Returns the optimizer whose gradient of ``param`` leaves in backward, or None."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        if hasattr(hook, _MARK) and (found := getattr(hook, _MARK)()) is not None:
            return found
    return None


def _remove(handles: dict[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()


def _keeper_of(where: Any) -> tuple[str, Keeper]:
    if where == "cpu":
        return "cpu", HostKeeper("grads_on='cpu'")
    if not isinstance(where, (str, os.PathLike)):
        raise TypeError(f"grads_on must be None, 'cpu' or a folder, got {where!r}")
    folder = absolute_folder(where, "grads_on must be None, 'cpu' or a folder that exists")
    return folder, FileKeeper(folder, f"grads_on={folder!r}", "gradients")


def _largest_bytes(grad: Any) -> int:
    count: int = largest_shard(grad) if is_dtensor(grad) else grad.numel()
    return count * int(grad.element_size())


def _parts(grads: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Splits them so that none takes more memory than the largest gradient, or ``_PART``; sharded
    ones in the same way in all processes."""
    sizes = [_largest_bytes(grad) for _, grad in grads]
    most = max([_PART, *sizes])
    parts: list[list[tuple[Tensor, Tensor]]] = []
    left = 0
    for one, size in zip(grads, sizes, strict=True):
        if size > left or not parts:
            parts.append([])
            left = most
        parts[-1].append(one)
        left -= size
    return parts


def _values_of(grad: Any) -> Values | None:
    """Returns the values of a gradient that lies elsewhere, of a DTensor those of its shard."""
    local = local_tensor(grad)
    return local.stored if isinstance(local, GradientElsewhere) else None


def _back(grad: Any) -> Any:
    """Returns the gradient in memory."""
    values = _values_of(grad)
    return grad if values is None else as_placed(grad, values.get())
