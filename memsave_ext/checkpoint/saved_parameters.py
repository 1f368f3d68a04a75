"""Parameters that a custom Function saved come back in its backward as the objects they were.

Under any saved-tensor hooks, torch's own included, autograd makes a new tensor of what a hook
returns. It has the parameter's memory, but neither its class nor its attributes, such as the
``main_grad`` that Megatron adds gradients to. What it does have is the parameter's accumulator of
gradients, which knows the parameter.

A property in place of torch's, because no hook is told who asks. Where no hooks were, it costs one
look at each tensor's class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge


def _lies_like(tensor: Tensor, other: Tensor) -> bool:
    return (
        other.layout is torch.strided
        and tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.data_ptr() == other.data_ptr()
    )


def _original(tensor: Any) -> Any:
    if type(tensor) is not Tensor or not tensor.requires_grad or not tensor.is_leaf:
        return tensor
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor  # torch finds no accumulator of theirs
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor
    leaf = get_gradient_edge(tensor).node.variable  # type: ignore[attr-defined]
    # A hook may have returned other values, as one that compresses does.
    return leaf if _lies_like(tensor, leaf) else tensor


def _saved_tensors(context: Any) -> tuple[Any, ...]:
    return tuple(map(_original, _torchs.__get__(context)))


_torchs: Any = torch._C._FunctionBase.saved_tensors
BackwardCFunction.saved_tensors = property(  # type: ignore[assignment]
    _saved_tensors, doc=_torchs.__doc__
)
