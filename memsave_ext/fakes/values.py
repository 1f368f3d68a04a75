"""What Python reads from fake tensors: 1, or what follows from it.

Steps look for numbers that are not finite, or large, and leave out what is done otherwise. So the
results of comparisons and tests are those of tensors of ones, and of what was filled with a number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from ..shared.recording import unrecorded

MOST_KNOWN = 64  # elements of a tensor whose values are known
_MOST_COMPUTED = 1 << 22  # elements of what is computed from a batch's mask, as what it hides
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
_FILLED = frozenset(
    _each("zeros zeros_like new_zeros zero_ ones ones_like new_ones", _same)
    | _each("full full_like new_full fill_ normal_ uniform_", _same)
)  # whatever the values were
_CHANGES = frozenset(_each("zero_ fill_ normal_ uniform_", _same))


class _Several(NamedTuple):
    tensor: Tensor
    place: tuple[Any, ...]  # which part of the storage has them


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


class Values:
    """Knows the value of each tensor whose elements all have the same, and the values of those that
    are computed from a batch's whole numbers, such as its mask."""

    def __init__(self) -> None:
        # By the storage: the version of the tensors in it, and their value, or the values of one.
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
        """Returns the value of a tensor's elements; 1 where it is not known, or not one."""
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return 1
        value = self._value_of(tensor)
        return 1 if value is None or isinstance(value, Tensor) else value

    def _value_of(self, tensor: FakeTensor) -> Any:
        """Returns the value of a tensor's elements, or a tensor of them; None: not known."""
        if tensor.constant is not None:
            return _only_value(tensor.constant)
        version, value = self._known.get(tensor.untyped_storage()._cdata, (-1, None))
        if version != tensor._version:
            return None
        if isinstance(value, _Several):
            return value.tensor if value.place == _place_of(tensor) else None
        return value

    def is_known(self, tensor: Tensor) -> bool:
        """Whether the values are known, and not only taken to be 1."""
        if tensor.layout is not torch.strided:
            return False
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return True
        return self._value_of(tensor) is not None

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
        value: Any
        if func not in _FILLED and any(map(self._has_several_values, args)):
            value = self._computed(func, args, kwargs, result)
        else:
            value = self._of_rule(func, args, kwargs, result)
        if isinstance(value, Tensor):
            value = _Several(value, _place_of(result))
        if not isinstance(value, (bool, int, float, complex, _Several)):
            return
        # An operator that changes its argument has not raised the version yet.
        self._known[storage._cdata] = result._version + (func in _CHANGES), value

    def _of_rule(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Any:
        values = (self.of(a) if isinstance(a, Tensor) else a for a in args)
        try:
            value = _RULES[func](*values, **kwargs)
        except TypeError:
            return None  # complex numbers cannot be compared, for example
        if func in _SUMS and self.is_known(args[0]):
            value *= args[0].numel() // max(result.numel(), 1)
        return value

    def _has_several_values(self, argument: Any) -> bool:
        if not isinstance(argument, FakeTensor) or argument.layout is not torch.strided:
            return False
        return isinstance(self._value_of(argument), Tensor)

    def _computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Any:
        """Returns the result of an operator on values, which it computes; None where it cannot."""
        if func in _CHANGES or result.numel() > _MOST_COMPUTED:
            return None
        with unset_fake_temporarily(), unrecorded():
            values = [self._tensor_of(a) if isinstance(a, Tensor) else a for a in args]
            if any(v is None for v, a in zip(values, args, strict=True) if isinstance(a, Tensor)):
                return None
            try:
                return _only_value(func(*values, **kwargs))
            except (RuntimeError, TypeError):
                return None

    def _tensor_of(self, tensor: Tensor) -> Tensor | None:
        """Returns a tensor with the values; None where they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value = self._value_of(tensor)
        if value is None or isinstance(value, Tensor):
            return value
        return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")


def with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Returns a small range of numbers with its values, as models are built with those; another
    result as it is."""
    if func not in _COUNTS or not isinstance(result, FakeTensor) or result.numel() > MOST_KNOWN:
        return result
    with unset_fake_temporarily():
        real = func(*args, **kwargs)
    mode = result.fake_mode
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


def values_elsewhere(arguments: Any) -> list[tuple[Tensor, Any]]:
    """Returns the number of each tensor of whole numbers on another device whose elements all have
    the same: a model may leave out a mask that hides nothing. A child asks the CPU's themselves."""
    tensors = (t for t in tree_leaves(arguments) if isinstance(t, Tensor))
    values = ((t, _only_value(t)) for t in tensors if _has_whole_numbers_elsewhere(t))
    return [(t, v) for t, v in values if v is not None and not isinstance(v, Tensor)]


def _has_whole_numbers_elsewhere(tensor: Tensor) -> bool:
    if tensor.is_cpu or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_floating_point() or tensor.is_complex())


def _only_value(constant: Tensor) -> Any:
    """Returns the value that all elements have; the tensor where they have several; None of an
    empty one."""
    with unset_fake_temporarily(), unrecorded():
        if not constant.numel():
            return None
        first = constant.flatten()[0]
        is_only = constant.numel() == 1 or bool((constant == first).all())
        return first.item() if is_only else constant


def _is_unknown(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def _python_type(dtype: torch.dtype) -> type[bool] | type[int] | type[float] | type[complex]:
    if dtype is torch.bool:
        return bool
    if dtype.is_complex:
        return complex
    return float if dtype.is_floating_point else int
