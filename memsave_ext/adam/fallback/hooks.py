"""Hooks on parameters that tell a collector when a gradient is complete."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from .. import errors

_MARK = "_memsave_ext_collector"
_HOOKS = "_post_accumulate_grad_hooks"


def install_hook(param: Tensor, collector: Any) -> None:
    made_dict = param._post_accumulate_grad_hooks is None
    collector_ref = weakref.ref(collector)

    @_disable_dynamo  # it runs inside of what is compiled where that calls backward()
    def hook(param: Tensor) -> None:
        _check_not_compiled_autograd()  # it cannot trace what follows
        collector = collector_ref()
        hooks = list((getattr(param, _HOOKS) or {}).values())
        if collector is not None and hook in hooks:  # an earlier hook may have removed this one
            collector.ready(param, is_last=hooks[-1] is hook)

    setattr(hook, _MARK, collector_ref)
    hook.made_dict = made_dict  # type: ignore[attr-defined]
    # As torch's register_post_accumulate_grad_hook(), which refuses what requires no gradients: it
    # may require them later. Codes of quantized weights never can.
    if made_dict:
        setattr(param, _HOOKS, OrderedDict())
    hooks = getattr(param, _HOOKS)
    hooks[RemovableHandle(hooks).id] = hook


def owner(param: Tensor) -> Any:
    """Returns the optimizer that steps ``param`` in backward, or None.

    Removes hooks whose optimizer is gone.
    """
    for key, reference in _ours(param):
        collector = reference()
        optimizer = None if collector is None else collector.optimizer()
        if optimizer is not None:
            return optimizer
        _remove(param, key)
    return None


def remove_hooks(param: Tensor, collector: Any) -> None:
    for key, reference in _ours(param):
        if reference() is collector:
            _remove(param, key)


def renew_hooks(param: Tensor) -> None:
    """Sets the hooks again: after the tensor was swapped they exist but are not called."""
    setattr(param, _HOOKS, getattr(param, _HOOKS))


def _ours(param: Tensor) -> Iterator[tuple[int, Callable[[], Any]]]:
    for key, hook in list((getattr(param, _HOOKS) or {}).items()):
        if (reference := getattr(hook, _MARK, None)) is not None:
            yield key, reference


def _remove(param: Tensor, key: int) -> None:
    hooks = getattr(param, _HOOKS)
    hook = hooks.pop(key)
    if hook.made_dict and not hooks:
        setattr(param, _HOOKS, None)


def _check_not_compiled_autograd() -> None:
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    # The first holds while the hook is traced; the second when it runs because tracing has failed.
    if torch.compiler.is_compiling() or getattr(module, "in_compiled_autograd_region", False):
        raise errors.compiled_autograd()
