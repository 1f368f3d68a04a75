"""Autocast as it is on a card, for fake tensors that are on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast_mode
from torch.utils._pytree import tree_any, tree_map_only

from .surroundings import predicts

_KEY = "AutocastCPU"
# What autocast computes in float32 on CUDA, and in the dtype of its arguments on the CPU.
_FLOAT32 = (
    *("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "cosine_similarity", "dist"),
    *("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod"),
    *("linalg_vector_norm", "linalg_matrix_norm", "logsumexp", "renorm", "pdist", "softplus"),
    *("exp", "expm1", "log", "log10", "log1p", "log2", "rsqrt", "reciprocal", "erfinv"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
    *("acos", "asin", "cosh", "sinh", "tan"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
)
_NARROW = (torch.float16, torch.bfloat16)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Makes autocast of a step do with fakes on the CPU what it does on a card.

    What it does on the CPU is the same for products, but for norms, softmax and others, which are
    in float32 on a card. In other threads autocast stays as it is.
    """
    before = autocast_mode.autocast.__init__
    library: list[torch.library.Library] = []

    def made(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if not predicts() or device_type not in ("cuda", "cpu"):
            return before(self, device_type, dtype, *args, **kwargs)
        if not library and not _registered:
            library.append(_register())
        # Tensors' own device is the CPU here, which a step may have asked for.
        return before(self, "cpu", dtype or torch.get_autocast_dtype("cuda"), *args, **kwargs)

    autocast_mode.autocast.__init__ = made  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            # Without a card it passes losses on, which takes as much.
            warnings.filterwarnings("ignore", "torch.cuda.amp.GradScaler is enabled, but CUDA")
            yield
    finally:
        autocast_mode.autocast.__init__ = before  # type: ignore[method-assign]
        for one in library:
            _registered.clear()
            one._destroy()


_registered: list[bool] = []  # by an outer prediction, or this one


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name in _FLOAT32:
        library.impl(name, _in_float32(_overload(name)), _KEY)
    _registered.append(True)
    return library


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_float32(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if not predicts() or not tree_any(_is_narrow, (args, kwargs)):
                return op(*args, **kwargs)
            if "dtype" in names:
                given = dict(zip(names, args, strict=False)) | kwargs
                given["dtype"] = given.get("dtype") or torch.float32
                return op(given.pop("self"), **given)
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _NARROW


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_narrow(tensor) else tensor
