"""What Python reads from fake tensors: 1, or what follows from it.

Steps look for numbers that are not finite, or large, and leave out what is done otherwise. So the
results of comparisons and tests are those of tensors of ones, and of what was filled with a number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

MOST_KNOWN = 64  # elements of a tensor whose values are known
_aten = torch.ops.aten
_COUNTS = (
    *(_aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.linspace.default),
)
_ALIKE = (_aten.equal.default, _aten.allclose.default)
Rule = Callable[..., Any]  # of numbers to a number


def _each(names: str, rule: Rule) -> dict[Any, Rule]:
    """Returns the rule for each overload of the named operators."""
    packets = [getattr(_aten, name) for name in names.split()]
    return {getattr(packet, o): rule for packet in packets for o in packet.overloads()}


def _same(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _filled(_: Any, value: Any, *__: Any, **___: Any) -> Any:
    return value


# What an operator makes of its arguments' values. All elements of a tensor have one value.
_RULES: dict[Any, Rule] = {
    **{
        overload: rule
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for overload, rule in _each(name, getattr(operator, name)).items()
    },
    **_each("isnan", lambda x: x != x),
    **_each("isinf isposinf isneginf", lambda x: abs(x) == math.inf),
    **_each("logical_not bitwise_not", lambda x: not x),
    **_each("logical_and bitwise_and", lambda x, y: bool(x) and bool(y)),
    **_each("logical_or bitwise_or maximum", max),
    **_each("add", lambda x, y, **_: int(x != 0 or y != 0)),
    **_each("any all max min amax amin sum mean abs clone _to_copy count_nonzero", _same),
    **_each("cumsum", lambda x, *_, **__: int(x != 0)),
    **_each("zeros zeros_like new_zeros zero_", lambda *_, **__: 0),
    **_each("ones ones_like new_ones", lambda *_, **__: 1),
    **_each("full full_like new_full fill_", _filled),
    # nn.init.trunc_normal_ draws again what lies out of its bounds, until nothing does.
    **_each("normal_", lambda _, mean=0.0, *__, **___: mean),
    # Models choose among several sizes by such a number, as an index.
    **_each("uniform_", lambda _, least=0.0, *__, **___: least),
}
_SUMS = frozenset(_each("sum", _same))
_CHANGES = frozenset(_each("zero_ fill_ normal_ uniform_", _same))


class Values:
    """Knows the value of each tensor whose elements all have the same."""

    def __init__(self) -> None:
        # By the storage: the version of the tensors in it, and their value.
        self._known: dict[int, tuple[int, Any]] = {}

    def forget(self, storage: int) -> None:
        self._known.pop(storage, None)

    def note(self, storage: int, version: int, value: Any) -> None:
        """Notes that all elements of a tensor have a value."""
        self._known[storage] = version, value

    def read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Returns what an operator hands to Python of tensors without values; None for all other
        operators and tensors."""
        if func is _aten._local_scalar_dense.default and _is_unknown(args[0]):
            return _python_type(args[0].dtype)(self.of(args[0]))
        if func in _ALIKE and any(map(_is_unknown, args[:2])):
            return bool(args[0].shape == args[1].shape)
        return None

    def of(self, tensor: Tensor) -> Any:
        """Returns the value of a tensor's elements."""
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return 1
        if tensor.constant is not None:
            with unset_fake_temporarily():
                return tensor.constant.item() if tensor.numel() == 1 else 1
        version, value = self._known.get(tensor.untyped_storage()._cdata, (-1, 1))
        return value if version == tensor._version else 1

    def is_known(self, tensor: Tensor) -> bool:
        """Whether the values are known, and not only taken to be 1."""
        if tensor.layout is not torch.strided:
            return False
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return True
        version, _ = self._known.get(tensor.untyped_storage()._cdata, (-1, 1))
        return version == tensor._version

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes the value of an operator's result."""
        rule = _RULES.get(func)
        if rule is None or not isinstance(result, FakeTensor) or result.constant is not None:
            return
        if result.layout is not torch.strided:
            return
        storage = result.untyped_storage()
        if result.fake_device.type == "meta" or not storage.nbytes():
            return  # nobody tells when it is freed
        if rule is _same and not self.is_known(args[0]):
            return
        values = (self.of(a) if isinstance(a, Tensor) else a for a in args)
        try:
            value = rule(*values, **kwargs)
        except TypeError:
            return  # complex numbers cannot be compared, for example
        if not isinstance(value, (bool, int, float, complex)):
            return
        if func in _SUMS and self.is_known(args[0]):
            value *= args[0].numel() // max(result.numel(), 1)
        # An operator that changes its argument has not raised the version yet.
        self._known[storage._cdata] = result._version + (func in _CHANGES), value


def with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Returns a small range of numbers with its values, as models are built with those; another
    result as it is."""
    if func not in _COUNTS or not isinstance(result, FakeTensor) or result.numel() > MOST_KNOWN:
        return result
    with unset_fake_temporarily():
        real = func(*args, **kwargs)
    mode = result.fake_mode
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


def _is_unknown(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def _python_type(dtype: torch.dtype) -> type[bool] | type[int] | type[float] | type[complex]:
    if dtype is torch.bool:
        return bool
    if dtype.is_complex:
        return complex
    return float if dtype.is_floating_point else int
