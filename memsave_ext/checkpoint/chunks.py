"""``checkpoint(chunks=)``: a function of rows, run in pieces, each a region of its own.

The rest is autograd's. Its engine runs those nodes first that were made last, so all of a piece
before any of the one in front of it: a piece is computed again when its turn comes, and is gone
before the next. What the pieces add to the gradient of a tensor is summed up, in place, where the
engine collects that gradient, and goes on when the last piece has added its share.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from . import norms

Argument = int | str  # a position, or a keyword's name


class Chunking(NamedTuple):
    chunks: int
    dim: int
    args: Sequence[Argument] | None  # None: those of the first tensor's size


def check_chunking(chunks: object, chunk_dim: object, chunk_args: object) -> None:
    """Raises where one of these options of ``checkpoint`` is not one of its values."""
    if chunks is None:
        if chunk_args is not None or chunk_dim != 0:
            raise ValueError(
                "checkpoint: chunk_dim and chunk_args need chunks=n, and chunks is None: pass it, "
                "or leave them out"
            )
        return
    if not _is_int(chunks):
        raise TypeError(f"checkpoint: chunks must be a positive int or None, got {chunks!r}")
    if chunks < 1:  # type: ignore[operator]
        raise ValueError(f"checkpoint: chunks must be a positive int or None, got {chunks!r}")
    if not _is_int(chunk_dim):
        raise TypeError(f"checkpoint: chunk_dim must be an int, got {chunk_dim!r}")
    if chunk_args is None:
        return
    if not isinstance(chunk_args, (tuple, list)) or not all(
        isinstance(key, str) or _is_int(key) for key in chunk_args
    ):
        raise TypeError(
            "checkpoint: chunk_args must be a tuple or list of positions and keyword names, got "
            f"{chunk_args!r}"
        )
    if not chunk_args or any(not isinstance(key, str) and key < 0 for key in chunk_args):
        raise ValueError(
            "checkpoint: chunk_args must have at least one position or keyword name, positions "
            f"from 0 on, got {chunk_args!r}"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def run_in_pieces(
    region: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chunking: Chunking,
) -> Any:
    """Calls ``region`` with each piece of the arguments, in order, and joins what it returns."""
    arguments: dict[Argument, Any] = dict(enumerate(args))
    arguments.update(kwargs.items())
    tensors = _to_cut(arguments, chunking)
    size = next(iter(tensors.values())).size(chunking.dim)
    count = min(chunking.chunks, size)
    if count <= 1:
        return region(*args, **kwargs)
    sizes = [size // count + (1 if i < size % count else 0) for i in range(count)]
    # One node, which puts the pieces' gradients together; a slice would make a whole one each time.
    cut = {key: tensor.split(sizes, chunking.dim) for key, tensor in tensors.items()}
    results = []
    compiling = torch.compiler.is_compiling()
    with contextlib.nullcontext() if compiling else norms.refuse_batch_statistics():
        for i in range(count):
            of_args = [cut[k][i] if k in cut else value for k, value in enumerate(args)]
            of_kwargs = {k: cut[k][i] if k in cut else value for k, value in kwargs.items()}
            results.append(region(*of_args, **of_kwargs))
    return _join(results, sizes, chunking.dim)


def _to_cut(arguments: dict[Argument, Any], chunking: Chunking) -> dict[Argument, Tensor]:
    """The arguments to cut; not empty, and of one size in the dimension."""
    dim = chunking.dim
    if chunking.args is None:
        tensors = {k: v for k, v in arguments.items() if _is_data(v)}
        if not tensors:
            raise ValueError(
                "checkpoint: chunks=n cuts the tensors among the arguments, and the function was "
                "called with none (parameters are not cut). Pass what is to be cut as an argument, "
                "or name it in chunk_args."
            )
        first = next(iter(tensors))
        _check_dim(f"argument {first!r}", tensors[first], dim)
        size = tensors[first].size(dim)
        return {k: v for k, v in tensors.items() if _has_dim(v, dim) and v.size(dim) == size}
    for key in chunking.args:
        if key not in arguments:
            raise ValueError(
                f"checkpoint: chunk_args names {key!r}, but the function was called with the "
                f"arguments {list(arguments)}"
            )
        if not isinstance(arguments[key], Tensor):
            raise TypeError(
                f"checkpoint: chunk_args must name tensors, argument {key!r} is a "
                f"{type(arguments[key]).__name__}"
            )
        _check_dim(f"argument {key!r}", arguments[key], dim)
    tensors = {key: arguments[key] for key in chunking.args}
    sizes = {key: tensor.size(dim) for key, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "checkpoint: the arguments that chunk_args names must have the same size in dimension "
            f"{dim}, got {sizes}"
        )
    return tensors


def _is_data(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def _check_dim(what: str, tensor: Tensor, dim: int) -> None:
    if not _has_dim(tensor, dim):
        raise ValueError(
            f"checkpoint: {what} has no dimension chunk_dim={dim}: its shape is "
            f"{list(tensor.shape)}"
        )


def _join(results: Sequence[Any], sizes: Sequence[int], dim: int) -> Any:
    """One result of those of the pieces, whose rows were ``sizes``."""
    flat, specs = zip(*map(_pytree.tree_flatten, results), strict=True)
    for i, spec in enumerate(specs):
        if spec != specs[0]:
            raise _not_of_rows(
                f"the function returned {_kind(results[i])} of another structure for piece {i} "
                "than for piece 0"
            )
    joined = [_join_values(values, sizes, dim) for values in zip(*flat, strict=True)]
    return _pytree.tree_unflatten(joined, specs[0])


def _join_values(values: Sequence[Any], sizes: Sequence[int], dim: int) -> Any:
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _join_tensors(values, sizes, dim)
    if dataclasses.is_dataclass(first) and all(type(value) is type(first) for value in values):
        whole = copy.copy(first)
        for field in dataclasses.fields(first):
            of_field = [getattr(value, field.name) for value in values]
            object.__setattr__(whole, field.name, _join(of_field, sizes, dim))
        return whole
    for i, value in enumerate(values):
        if not _is_equal(first, value):
            raise _not_of_rows(
                "values that are not tensors must be the same for all pieces, but the function "
                f"returned {_kind(first)} for piece 0 and {_kind(value)} for piece {i}"
            )
    return first


def _join_tensors(values: Sequence[Tensor], sizes: Sequence[int], dim: int) -> Tensor:
    for tensor, size in zip(values, sizes, strict=True):
        if not _has_dim(tensor, dim):
            raise _not_of_rows(
                f"the function returned a tensor of shape {list(tensor.shape)} for a piece, which "
                f"has no dimension chunk_dim={dim}"
            )
        times = values[0].size(dim) // sizes[0]
        if tensor.size(dim) != times * size:
            raise _not_of_rows(
                f"for a piece of {size} rows the function returned a tensor of shape "
                f"{list(tensor.shape)}, whose size in dimension chunk_dim={dim} must be {size}, or "
                "a multiple of it that is the same for all pieces"
            )
    return torch.cat(list(values), dim)


def _is_equal(left: object, right: object) -> bool:
    if left is right:
        return True
    try:
        return type(left) is type(right) and bool(left == right)
    except Exception:  # an array has no truth value, and others compare as they like
        return False


def _kind(value: object) -> str:
    return f"{value!r:.80}" if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


def _not_of_rows(what: str) -> RuntimeError:
    return RuntimeError(
        f"checkpoint: {what}. With chunks=n the function must act on each row by itself: it is "
        "called with one piece of the rows after the other, and its results are put together."
    )
