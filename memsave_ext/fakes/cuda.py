"""What a step asks of CUDA, on fake tensors that are on the CPU: no card need be there.

The backward of a fake CUDA tensor asks for a device guard, without which the process ends. So fakes
of the CPU stand for CUDA's.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import autocast_mode
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map_only

from .attention import attention, torchs_attention
from .mode import predicts, replaced

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


class _Stream:
    """A stream or an event: nothing runs, and so nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = synchronize = wait_stream = wait_event = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


_CALLS: dict[str, Callable[..., Any]] = {
    "synchronize": _nothing,
    "set_device": _nothing,
    "current_device": lambda: 0,
    "Stream": _Stream,
    "Event": _Stream,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "stream": lambda stream=None: nullcontext(),
}


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Lets a step inside the block name a card, call its streams and autocast as on one.

    In other threads torch.cuda and autocast stay as they are.
    """
    with ExitStack() as stack:
        for name, call in _CALLS.items():
            call = _for_fakes(call, getattr(torch.cuda, name))
            stack.enter_context(replaced(torch.cuda, name, call))
        record_stream = _for_fakes(_nothing, Tensor.record_stream)
        stack.enter_context(replaced(Tensor, "record_stream", record_stream))
        for before, fused in _FUSED.items():  # torch's functions call each other by these names
            stack.enter_context(replaced(functional, before.__name__, _for_fakes(fused, before)))
        stack.enter_context(_CardNames())
        stack.enter_context(_autocast())
        yield


def step_as_on_cuda(optimizer: Optimizer | None) -> None:
    """Torch's optimizers step lists of tensors on CUDA, unless an option says otherwise."""
    if optimizer is not None and type(optimizer).__module__.startswith("torch.optim"):
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True


def _for_fakes(call: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (call if predicts() else before)(*args, **kwargs)

    if not isinstance(before, type):
        return functools.wraps(before)(chosen)
    torchs: type = before

    class Kind(type):
        """Makes a class in place of torch's, which torch asks whether objects are instances."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return chosen(*args, **kwargs)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, (torchs, _Stream))

    return Kind(before.__name__, (), {})


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
            args = tuple(map(_on_cpu, args))
            kwargs = {name: _on_cpu(value) for name, value in kwargs.items()}
        if (fused := _FUSED.get(func)) is not None:
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
_FUSED: dict[Any, Callable[..., Any]] = {
    _torchs_dropout: _dropout,
    torchs_attention: attention,
}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


@contextmanager
def _autocast() -> Iterator[None]:
    """Makes autocast of a step do with fakes on the CPU what it does on a card.

    What it does on the CPU is the same for products, but for norms, softmax and others, which are
    in float32 on a card. One that was made before, as accelerate does, is entered as the CPU's.
    """
    kind = autocast_mode.autocast
    before, enter, leave = kind.__init__, kind.__enter__, kind.__exit__
    library: list[torch.library.Library] = []
    entered: list[tuple[Any, str]] = []  # those that are open, with the device of each

    def prepare() -> None:
        if not library and not _registered:
            library.append(_register())

    def made(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if not predicts() or device_type not in ("cuda", "cpu"):
            return before(self, device_type, dtype, *args, **kwargs)
        prepare()
        # A step may have asked a tensor for its device, which is the CPU here.
        return before(self, "cpu", dtype or torch.get_autocast_dtype("cuda"), *args, **kwargs)

    def as_cpus(self: Any) -> Any:
        if predicts():
            entered.append((self, self.device))
        if predicts() and self.device == "cuda":
            prepare()
            self.device = "cpu"
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        if entered and entered[-1][0] is self:
            self.device = entered.pop()[1]
        return result

    try:
        with ExitStack() as stack:
            for name, method in (("__init__", made), ("__enter__", as_cpus), ("__exit__", left)):
                stack.enter_context(replaced(kind, name, method))
            stack.enter_context(warnings.catch_warnings())
            # Without a card a scaler passes losses on, which takes as much memory.
            warnings.filterwarnings("ignore", "torch.cuda.amp.GradScaler is enabled, but CUDA")
            yield
    finally:
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
