"""``checkpoint(chunks=)`` under the operators and modules of torch's databases: where these act on
rows, so that plain pieces of the arguments give the whole, chunks give the same bits as the pieces.

A seed is that of the databases.
"""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import memsave_ext as ms

from . import databases
from .databases import Case, Program, bits

CHUNKS = 2
# Whose kernels read past the end where only a part of the arguments is cut.
UNCHECKED = ("batch_norm",)
# Instance norms that count statistics, which docs/chunks.md says: as modules, and as functions that
# are given them.
_REFUSED = ("statistics of the whole batch", "modified by an inplace")
_BROKEN = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, AssertionError)


def _run(program: Program, way: str) -> list[Tensor | None] | None:
    """The results and the gradients; None where the program is none of rows."""
    databases._seed(program.seed)
    function, held = program.make()
    values, structure = tree_flatten((program.args, program.kwargs))
    leaves = [databases._copy(value) for value in values]
    tensors = [v for v in leaves if isinstance(v, Tensor)]
    if not tensors or not tensors[0].dim() or any(t.layout != torch.strided for t in tensors):
        return None
    rows = tensors[0].shape[0]
    if rows < CHUNKS:
        return None

    def call(*leaves: Any) -> list[Tensor]:
        made = [leaf * 1 if databases._is_input(leaf) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(made, structure)
        flat = tree_flatten(function(*args, **kwargs))[0]
        return [value for value in flat if isinstance(value, Tensor)]

    def is_cut(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows

    if way == "whole":
        results = call(*leaves)
        if not results or any(not r.dim() or r.shape[0] != rows for r in results):
            return None
    elif way == "pieces":
        sizes = [part.numel() for part in torch.arange(rows).tensor_split(CHUNKS)]
        cut = [leaf.split(sizes) if is_cut(leaf) else [leaf] * CHUNKS for leaf in leaves]
        pieces = [call(*piece) for piece in zip(*cut, strict=True)]
        results = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    else:
        results = ms.checkpoint(call, *leaves, chunks=CHUNKS)
    inputs = [leaf for leaf in [*leaves, *held] if databases._is_input(leaf)]
    read = [r for r in results if r.requires_grad]
    if not read or not inputs:
        return None
    weights = [torch.linspace(-1, 1, r.numel()).reshape(r.shape).to(r.dtype) for r in read]
    return [*results, *torch.autograd.grad(read, inputs, weights, allow_unused=True)]


def _is_close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    try:
        torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError:
        return False
    return True


def check(case: Case, seed: int = 0, most: int | None = None) -> int:
    """How many samples act on rows; raises where chunks of one give other bits than its pieces."""
    compared = 0
    if any(name in case.name for name in UNCHECKED):
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, program in enumerate(databases.programs(case, seed, most)):
            try:
                whole = _run(program, "whole")
                pieces = whole and _run(program, "pieces")
            except _BROKEN:
                continue
            if not whole or not pieces or not all(map(_is_close, whole, pieces)):
                continue
            try:
                chunks = _run(program, "chunks")
                assert list(map(bits, chunks or [])) == list(map(bits, pieces)), "other bits"
            except Exception as error:
                if any(text in str(error) for text in _REFUSED):
                    continue
                told = f"program {number}: {program.args} {program.kwargs}"
                raise AssertionError(told) from error
            compared += 1
    return compared


def run_seed(seed: int, without: list[str], shrink: bool) -> tuple[str, str]:
    case = databases.cases()[seed % len(databases.cases())]
    if case.name in without:
        return "refused: left out", ""
    try:
        if not check(case, seed // len(databases.cases())):
            return "refused: no sample acts on rows", ""
    except Exception as error:
        return f"{case}: {type(error).__name__}", traceback.format_exc()
    return "", str(case)
