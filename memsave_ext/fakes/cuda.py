"""What a step asks of CUDA, on fake tensors that are on the CPU: no card need be there.

The backward of a fake CUDA tensor asks for a device guard, without which the process ends. So fakes
of the CPU stand for CUDA's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map_only

from .attention import attention, torchs_attention
from .mode import stand_for_cuda

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


def as_on_cuda() -> TorchFunctionMode:
    """Lets autocast compute here what it does on a card, for good; in the mode that is returned a
    step may name a card. See also ``patches.on_cuda``.

    What autocast does on the CPU is the same for products, but for norms, softmax and others, which
    are in float32 on a card.
    """
    stand_for_cuda()
    if torch.is_autocast_enabled("cuda"):
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
    # Without a card a scaler passes losses on, which takes as much memory.
    warnings.filterwarnings("ignore", "torch.cuda.amp.GradScaler is enabled, but CUDA")
    library = torch.library.Library("aten", "IMPL")
    for name in _FLOAT32:
        library.impl(name, _in_float32(_overload(name)), _KEY)
    _libraries.append(library)
    # Parameters have this class here, of which torch's optimizers step no lists by themselves.
    optimizer._foreach_supported_types.append(FakeTensor)
    return _CardNames()


_MOVES = (Tensor.to, torch._C._nn._parse_to)
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _CardNames(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func == _IS_CUDA and isinstance(args[0], FakeTensor):
            return True
        if func is not torch.device.__new__:
            args = tuple(map(on_cpu, args))
            kwargs = {name: on_cpu(value) for name, value in kwargs.items()}
        if (fused := FUSED.get(func)) is not None:
            func = fused
        if func in _MOVES:  # to a card, by its number
            args = tuple("cpu" if type(value) is int else value for value in args)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One kernel on a card, which makes a mask of bools: ``is_fused_kernel_acceptable`` in torch's
    Dropout.cpp."""
    if isinstance(input, FakeTensor) and training and not inplace and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return _torchs_dropout(input, p, training, inplace)


_torchs_dropout = functional.dropout
FUSED: dict[Any, Callable[..., Any]] = {
    _torchs_dropout: _dropout,
    torchs_attention: attention,
}


def on_cpu(value: Any) -> Any:
    """Returns the CPU in place of a card; other values as they are."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


_libraries: list[torch.library.Library] = []  # kernels go when their library does


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_float32(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if not tree_any(_is_narrow, (args, kwargs)):
                return op(*args, **kwargs)
            if "dtype" in names:
                named = dict(zip(names, args, strict=False)) | kwargs
                named["dtype"] = named.get("dtype") or torch.float32
                return op(named.pop("self"), **named)
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _NARROW


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_narrow(tensor) else tensor
