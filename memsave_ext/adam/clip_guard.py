"""Makes clipping by torch and timm raise for parameters that were stepped in backward.

Their gradients are gone. Trainers clip by default, and neither reports that it has clipped nothing
(torchtune#1934).
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.clip_grad as _torch
from torch import Tensor

from . import owners


class NothingToClip(RuntimeError):
    """Gradients that are to be clipped are gone."""


_guarded: set[str] = set()


def install() -> None:
    """Make clipping functions raise for parameters that an optimizer has stepped already."""
    # clip_grad_norm_ calls _clip_grads_with_norm_.
    _guard("_clip_grads_with_norm_", "clip_grad_norm_", "max_norm")
    _guard("clip_grad_value_", "clip_grad_value_", "clip_value")
    _guard_timm()


def _check(name: str, params: list[Tensor], limit: float) -> None:
    if limit == math.inf:  # the caller only wants to know the norm
        return
    optimizer: Any
    for optimizer in owners.alive_optimizers():
        if not optimizer.in_backward:
            continue
        if optimizer._stepping_thread == threading.get_ident():  # its own step() clips
            continue
        if count := optimizer._stepper.count_used(params):
            kind = type(optimizer).__name__
            kind = f"in_backward({kind})" if optimizer._steps_by_own else kind
            raise NothingToClip(
                f"{name}: {count} of {len(params)} parameters have been stepped in backward by "
                f"memsave_ext.{kind}, so that their gradients are gone and cannot be clipped. "
                "Switch this clipping off (transformers: max_grad_norm=0, Lightning: "
                "gradient_clip_val=None), and let the optimizer clip: max_grad_norm= clips each "
                "gradient. Or keep it: with grads_on= gradients lie elsewhere until step(). A "
                "function that clips each gradient by itself can be called in a hook, "
                "param.register_post_accumulate_grad_hook(clip), which must assign param.grad and "
                "not change it in place."
            )


def _guard(function: str, name: str, limit: str) -> None:
    if function in _guarded:
        return
    wrapper = getattr(_torch, function)
    variables = wrapper.__code__.co_freevars
    if "func" not in variables:  # the function is not wrapped by torch's decorator
        return
    # Replaces the function inside its decorator, which also reaches modules that imported it.
    cell = wrapper.__closure__[variables.index("func")]
    cell.cell_contents = _guarded_by(cell.cell_contents, name, limit)
    _guarded.add(function)


def _guard_timm() -> None:
    """Guards timm's adaptive_clip_grad where timm has been imported."""
    function: Any = getattr(sys.modules.get("timm.utils.agc"), "adaptive_clip_grad", None)
    is_plain = isinstance(function, types.FunctionType) and function.__closure__ is None
    if not is_plain or "adaptive_clip_grad" in _guarded:
        return
    # Replaces what the function runs, which also reaches modules that imported it.
    inner = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    guarded = _guarded_by(inner, "adaptive_clip_grad", "clip_factor")
    function.__globals__["_memsave_ext_guarded"] = guarded
    function.__code__, function.__defaults__ = _call_guarded.__code__, None
    function.__wrapped__ = inner  # for its signature
    _guarded.add("adaptive_clip_grad")


def _call_guarded(*args: Any, **kwargs: Any) -> Any:
    return _memsave_ext_guarded(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _guarded_by(inner: Callable[..., Any], name: str, limit: str) -> Callable[..., Any]:
    """Returns a function that checks ``inner``'s parameters before it calls it."""
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        params = call.arguments["parameters"]
        # It is read twice, and may be a generator.
        params = [params] if isinstance(params, Tensor) else list(params)
        call.arguments["parameters"] = params
        _check(name, params, float(call.arguments[limit]))
        return inner(*call.args, **call.kwargs)

    return guarded
