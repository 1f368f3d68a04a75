"""A gradient that lies elsewhere, and is a tensor all the same: whoever uses it gets its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .._streams import current_stream, use_here
from ..store.kept import Keeper

_aten: Any = torch.ops.aten
_NORM = _aten.linalg_vector_norm.default
_MULTIPLIES = (_aten.mul_.Tensor, _aten.mul_.Scalar)
# Operators on lists that do for each tensor what they would do for it alone.
_OF_EACH = ("_foreach_", "_amp_foreach_", "_fused_")


class Values:
    """The values of a gradient, which a tensor and what is detached from it share.

    Args:
        keeper: keeps them.
        grad: has them. It is dense.
        norms: the orders of the norms that somebody wants to know, to which this object adds those
            that it is asked for.
        leaves: whether they leave memory.
    """

    def __init__(
        self, keeper: Keeper, grad: Tensor, norms: set[float], leaves: bool = True
    ) -> None:
        self._keeper, self._wanted = keeper, norms
        self._like = torch.empty_like(grad, device="meta")
        self._device = grad.device
        # Where they are back for good, or have never left.
        self.here = grad if not leaves else None
        # By which they are still to be multiplied, one by one, and the streams that made these.
        self._factors: list[tuple[Any, torch.cuda.Stream | None]] = []
        if leaves:
            self._kept = keeper.keep(_bytes_of(grad))
            self._norms = self._norms_of(grad)

    def of_another(self, grad: Tensor) -> Values:
        """Returns those of another gradient, which lie in the same place if they can."""
        leaves = grad.device == self._device and is_dense(grad)
        return Values(self._keeper, grad, self._wanted, leaves)

    def wrapper(self) -> Tensor:
        like = self._like
        made: Any = torch.Tensor._make_wrapper_subclass(
            GradientElsewhere, like.shape, strides=like.stride(), dtype=like.dtype,
            device=self._device,
        )  # fmt: skip
        made.stored = self
        GradientElsewhere.made = True
        return made  # type: ignore[no-any-return]

    def get(self) -> Tensor:
        """Returns them in new memory, or where they are here for good, in that."""
        if self.here is not None:
            return self.here.detach()
        # In inference mode it would stay a tensor that cannot be written to afterwards.
        with torch.inference_mode(False), torch.no_grad():
            got = torch.empty_like(self._like, device=self._device)
            self._kept.read(_bytes_of(got))
            for factor, made_on in self._factors:
                if isinstance(factor, Tensor):
                    use_here(factor, made_on)
                got.mul_(factor)
        return got

    def put(self, grad: Tensor) -> None:
        """Has these values from now on, which :meth:`get` has returned, maybe changed in place.

        Raises:
            RuntimeError: they are of another shape.
        """
        like = self._like
        if (grad.shape, grad.stride(), grad.dtype) != (like.shape, like.stride(), like.dtype):
            raise RuntimeError(
                f"{self._keeper.name}: the shape of a gradient that lies elsewhere cannot be "
                f"changed in place, from {list(like.shape)} to {list(grad.shape)}: use a copy, "
                "param.grad.clone()"
            )
        if self.here is not None:
            return
        self._kept.write(_bytes_of(grad))
        self._factors.clear()
        self._norms = self._norms_of(grad)

    def bring_back(self) -> Tensor:
        """Returns them, here for good: somebody has their memory, and may write to it."""
        if self.here is None:
            self.here = self.get()
        return self.here

    def read_ahead(self) -> None:
        if self.here is None:
            self._kept.read_ahead()

    def multiply(self, factor: Any) -> bool:
        """Multiplies them when they are next read; returns False where it cannot wait."""
        if self.here is not None or isinstance(factor, GradientElsewhere):
            return False
        if isinstance(factor, Tensor):
            if factor.dim() or torch.result_type(self._like, factor) != self._like.dtype:
                return False
            factor = factor.detach().clone()
        elif isinstance(factor, complex):
            return False
        self._factors.append((factor, current_stream(self._device)))
        return True

    def norm(self, order: float) -> Tensor | None:
        """Returns the norm, where it is known without reading them."""
        self._wanted.add(order)
        if self.here is not None or self._factors or order not in self._norms:
            return None
        use_here(self._norms[order], self._made_on)
        return self._norms[order].clone()

    def _norms_of(self, grad: Tensor) -> dict[float, Tensor]:
        self._made_on = current_stream(self._device)
        return {order: torch.linalg.vector_norm(grad, order) for order in tuple(self._wanted)}


class GradientElsewhere(Tensor):
    """A gradient in ``.grad`` whose values lie elsewhere.

    Each operator on it reads them, and writes back what it changes, one gradient after the other;
    nobody has to know. Who asks for its memory, by a view or an address, brings it back for good.
    """

    stored: Values
    made = False  # whether there has ever been one
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls):
            if func in _MULTIPLIES and first.stored.multiply(args[1]):
                return first
            if (
                func is _NORM
                and (norm := _known_norm(first.stored, *args[1:], **kwargs)) is not None
            ):
                return norm
            if func is _aten.detach.default:
                return first.stored.wrapper()
        if func._schema.name.removeprefix("aten::").startswith(_OF_EACH):
            return _run_for_each(func, args, kwargs)
        return _run(func, args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """What is in memory of it."""
        return [] if self.stored.here is None else ["here"], None

    @property
    def here(self) -> Tensor | None:
        return self.stored.here

    @property
    def data(self) -> Tensor:
        return self.stored.wrapper()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Sets it as ``module.to()`` does, which may change its type and place."""
        is_elsewhere = isinstance(value, GradientElsewhere)
        given: Any = value
        stored = given.stored if is_elsewhere else self.stored.of_another(value.detach())
        torch._C.TensorBase.data.__set__(self, stored.wrapper())  # type: ignore[attr-defined]
        self.stored = stored

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.stored.get())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is in memory, as nothing says where it belongs."""
        memo[id(self)] = copied = self.stored.get().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.stored.get().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.stored.get().tolist()


def _of_memory(name: str) -> Callable[..., Any]:
    """Returns a method of tensors that gives out their memory."""

    def method(self: GradientElsewhere, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.stored.bring_back(), name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "data_ptr", "untyped_storage", "_typed_storage", "storage", "share_memory_", "numpy",
    "__array__", "__dlpack__", "pin_memory",
):  # fmt: skip
    setattr(GradientElsewhere, _name, _of_memory(_name))


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements are all of a piece of memory, each once."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a dense tensor."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _known_norm(
    values: Values, order: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor | None:
    return None if dim is not None or keepdim or dtype is not None else values.norm(float(order))


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the values, and writes back those that it changes."""
    schema = func._schema
    returns_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    # A collective's schema does not say what it writes, which may come later.
    stays = returns_view or schema.name.startswith("c10d::")
    read: dict[int, tuple[GradientElsewhere, Tensor]] = {}

    def here(value: Any) -> Any:
        if not isinstance(value, GradientElsewhere):
            return value
        values = value.stored
        if id(values) not in read:
            read[id(values)] = value, values.bring_back() if stays else values.get()
        return read[id(values)][1]

    result = func(*tree_map(here, args), **tree_map(here, kwargs))
    for value in _written(schema, args, kwargs):
        if isinstance(value, GradientElsewhere):
            value.stored.put(read[id(value.stored)][1])
    given = {id(real): value for value, real in read.values()}
    return tree_map(lambda value: given.get(id(value), value), result)


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that the operator writes to."""
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    names = [schema.arguments[i].name for i in written]
    values = [args[i] for i in written if i < len(args)]
    return tree_leaves([*values, *(kwargs[name] for name in names if name in kwargs)])


def _run_for_each(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on lists for one tensor of each after the other."""
    lists = [value for value in (*args, *kwargs.values()) if _is_list_of_tensors(value)]
    (count, *others) = {len(value) for value in lists}
    if others:
        return _run(func, args, kwargs)

    def results() -> Iterator[Any]:
        for i in range(count):

            def one(value: Any, i: int = i) -> Any:
                return [value[i]] if _is_list_of_tensors(value) else _of_one(value, i, count)

            yield _run(func, [one(v) for v in args], {n: one(v) for n, v in kwargs.items()})

    made = list(results())
    return None if made[0] is None else [result[0] for result in made]


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Tensor)


def _of_one(value: Any, i: int, count: int) -> Any:
    """Of a list of numbers, one for each tensor, that of one tensor."""
    return [value[i]] if isinstance(value, (list, tuple)) and len(value) == count else value
