"""A card that need not be there: what a step calls of torch.cuda, on fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from .surroundings import predicts


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
def card() -> Iterator[None]:
    """Lets a step name a card and call its streams: its tensors are on the CPU instead.

    In other threads torch.cuda stays as it is.
    """
    before = {name: getattr(torch.cuda, name) for name in _CALLS}
    for name, call in _CALLS.items():
        setattr(torch.cuda, name, _for_fakes(call, before[name]))
    record_stream: Any = Tensor.record_stream
    Tensor.record_stream = _for_fakes(_nothing, record_stream)  # type: ignore[method-assign]
    try:
        with _CardNames():
            yield
    finally:
        Tensor.record_stream = record_stream  # type: ignore[method-assign]
        for name, call in before.items():
            setattr(torch.cuda, name, call)


def _for_fakes(call: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (call if predicts() else before)(*args, **kwargs)

    if not isinstance(before, type):
        return functools.wraps(before)(chosen)
    torchs: type = before

    class Kind(type):
        """Of a class in place of torch's, of which torch asks whether objects are instances."""

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
        if func in _MOVES:  # to a card that is told by its number
            args = tuple("cpu" if type(value) is int else value for value in args)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value
