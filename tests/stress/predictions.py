"""What ``memory.predict`` tells beside what ``memory.track`` sees, of torch's operators and modules
and of whole models.

A seed is an operator or module of torch's databases with a kind of number, forward and backward; or
a model of the zoo with an optimizer. Samples of the databases are made larger than they are there,
so that what grows with them shows; a seed none of whose peaks is large is counted as refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import random
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.fakes.mode import predicts
from memsave_ext.memory.measure import Build

from . import databases

PROMISED = 0.02
LARGE = 20_000  # bytes of a peak that means something
MOST = 64 << 20  # of one that is tracked
_ELEMENTS = 1 << 14  # of the largest tensor that a sample is given, about
_SIZES = {"XS": 6, "S": 16, "M": 20, "L": 24}  # in place of 3, 5, 10 and 20
_VALUES = "what it makes depends on values"
_INVALID = "repeated, its arguments are none, and it does not check them"
_MANY = "it would have thousands of results, or of steps"
_WORKSPACE = "its kernels make memory for themselves"
_PRODUCT = "oneDNN's products in bfloat16 copy blocks of their arguments, by rules of its own"
_CONVOLUTION = "oneDNN's other convolutions copy blocks of their arguments, by rules of its own"
_FORMULA = "torch computes its gradient otherwise for subclasses of tensors, as fakes are"


def _each(reason: str, names: str, before: str = "", after: str = "") -> dict[str, str]:
    return {f"{before}{name}{after}": reason for name in names.split()}


# Operators whose peaks cannot be told, and why; of all kinds of numbers, or of one.
UNKNOWN = {
    **_each(_VALUES, "matrix_exp to_sparse masked_scatter"),
    **_each(_VALUES, "prod masked.prod cumprod masked.cumprod"),
    **_each("its fake fails, which a note of the error says", "addbmm cov as_strided_scatter"),
    **_each(_MANY, "unbind unbind_copy nn.RNN nn.GRU"),
    "_segment_reduce.offsets": _INVALID,
    **_each(_WORKSPACE, "cond eigvalsh norm norm.subgradients_at_zero svdvals", "linalg."),
    **_each(_WORKSPACE, "linalg.matrix_norm norm.nuc svd median nanmedian masked.median"),
    **_each(_WORKSPACE, "msort sort quantile nanquantile sparse.sampled_addmm"),
    **_each(_WORKSPACE, "embedding_bag unfold bilinear upsample_bilinear", "nn.functional."),
    **_each(_WORKSPACE, "upsample_nearest interpolate.bilinear", "nn.functional."),
    **_each(_WORKSPACE, "nearest nearest-exact", "nn.functional.interpolate."),
    **_each(_WORKSPACE, "nn.functional.linear", after=" complex64"),
    "nn.LinearCrossEntropyLoss": _WORKSPACE,
    "masked_fill": _FORMULA,  # of the number
    **_each(_FORMULA, "nn.functional.binary_cross_entropy nn.BCELoss"),
    "nn.functional.binary_cross_entropy_with_logits": _FORMULA,  # of the target
    **_each(_FORMULA, "scatter_reduce.amax scatter_reduce.amin"),
    "scatter_reduce.mean bfloat16": _FORMULA,
    **_each(_FORMULA, "rfft rfft2 rfftn irfft irfft2 irfftn", "fft."),
    **_each(_FORMULA, "hfft hfft2 hfftn ihfft ihfftn", "fft."),
    **_each(_PRODUCT, "addmm addmm.decomposed addmv addr baddbmm bmm corrcoef", after=" bfloat16"),
    **_each(_PRODUCT, "dot einsum inner kron linalg.multi_dot matmul mm mv", after=" bfloat16"),
    **_each(_PRODUCT, "tensordot vdot __rmatmul__ nn.Linear", after=" bfloat16"),
    **_each(_PRODUCT, "nn.LinearCrossEntropyLoss nn.functional.linear", after=" bfloat16"),
    **_each(_PRODUCT, "linear_cross_entropy", "nn.functional.", " bfloat16"),
    **_each(_PRODUCT, "linear_cross_entropy.chunked", "nn.functional.", " bfloat16"),
    **_each(_CONVOLUTION, "1d 2d 3d", "nn.Conv"),
    **_each(_CONVOLUTION, "1d 2d 3d", "nn.ConvTranspose"),
    **_each(_CONVOLUTION, "1d 2d 3d", "nn.functional.conv"),
    **_each(_CONVOLUTION, "1d 2d 3d", "nn.functional.conv_transpose"),
}
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "in backward": lambda params: ms.AdamW(params, in_backward=True),
}

Case = databases.Case | tuple[str, str]


@functools.cache
def cases() -> list[Case]:
    """In an order of their own, so that a share of them has some of everything."""
    found: list[Case] = [*databases.cases()]
    found += [(name, optimizer) for name in zoo.ENTRIES for optimizer in OPTIMIZERS]
    random.Random(2).shuffle(found)
    return found


@contextlib.contextmanager
def _larger_samples() -> Iterator[None]:
    before = [
        (vars(module), name, vars(module)[name])
        for key, module in sys.modules.items()
        if key.startswith("torch.testing._internal") and module is not None
        for name in _SIZES
        if type(vars(module).get(name)) is int
    ]
    for names, name, _ in before:
        names[name] = _SIZES[name]
    try:
        yield
    finally:
        for names, name, value in before:
            names[name] = value


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if not predicts():
        copy.copy_(value.detach())
    return copy.requires_grad_(value.requires_grad)


def _enlarged(program: databases.Program) -> Iterator[databases.Program]:
    """Yields the program with larger tensors, in ways of which one may run: each dimension of all
    larger, the first one, or a batch of them; and as it is."""
    values, structure = tree_flatten((program.args, program.kwargs))
    tensors = [v for v in values if isinstance(v, Tensor) and v.layout == torch.strided]
    largest = max(tensors, key=Tensor.numel, default=None)
    if largest is not None and 0 < largest.numel() < _ELEMENTS // 2:
        times = _ELEMENTS / largest.numel()
        root = max(2, round(times ** (1 / max(1, largest.dim()))))
        for way in (
            lambda t: t.repeat([1 if size == 1 else root for size in t.shape]),
            lambda t: t.repeat(round(times) if t.shape[0] > 1 else 1, *[1] * (t.dim() - 1)),
            lambda t: t.repeat(round(times), *[1] * t.dim()),
        ):
            made = [
                way(v.detach()).requires_grad_(v.requires_grad)
                if isinstance(v, Tensor) and v.layout == torch.strided and v.dim()
                else v
                for v in values
            ]
            args, kwargs = tree_unflatten(made, structure)
            yield dataclasses.replace(program, args=args, kwargs=kwargs)
    yield program


def _built(program: databases.Program) -> Build:
    """Returns a function that makes a step of the program."""

    def build() -> tuple[nn.Module, None, Any]:
        torch.default_generator.manual_seed(program.seed)
        function, held = program.make()
        values, structure = tree_flatten((program.args, program.kwargs))
        leaves = [_copy(value) for value in values]
        tensors = [leaf for leaf in [*leaves, *held] if isinstance(leaf, Tensor)]
        model = nn.Module()
        for number, tensor in enumerate(tensors):
            model.register_buffer(f"tensor{number}", tensor)

        def step() -> None:
            made = [leaf * 1 if databases._is_input(leaf) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(made, structure)
            del made
            total = databases._read(function(*args, **kwargs))
            del args, kwargs
            if total.requires_grad:
                total.backward()
            for tensor in tensors:
                tensor.grad = None

        return model, None, step

    return build


def tracked(build: Build) -> int:
    """The peak of a third step, in which nothing of the others is collected."""
    model, optimizer, step = build()
    step()
    step()
    gc.disable()
    try:
        with ms.memory.track(model, optimizer) as track:
            step()
    finally:
        gc.enable()
    return track.peak


def _is_told(predicted: int, peak: int) -> bool:
    return abs(predicted - peak) <= PROMISED * peak


def _peaks(program: databases.Program) -> tuple[int, int] | None:
    """The predicted and the tracked peak, of the program made larger where it runs so; None if it
    has no plain run in this form, such as in place, or is refused in a sentence."""
    for larger in _enlarged(program):
        build = _built(larger)
        try:
            predicted = ms.memory.predict(build).peak
        except Exception as error:
            if larger is program and _runs(build) and not str(error).startswith("predict: "):
                raise
            continue
        if predicted > MOST:
            continue  # such as combinations of all elements
        try:
            peak = tracked(build)
        except Exception:
            continue
        if peak >= LARGE or larger is program:
            return predicted, peak
    return None


def _runs(build: Build) -> bool:
    try:
        build()[2]()
    except Exception:
        return False
    return True


def check_operator(case: databases.Case, seed: int = 0, most: int | None = None) -> list[int]:
    """The large peaks of samples that were told; raises where one is wrong."""
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _larger_samples():
            programs = list(databases.programs(case, seed, most))
        for number, program in enumerate(programs):
            peaks = _peaks(program)
            if peaks is None or peaks[1] < LARGE:
                continue
            assert _is_told(*peaks), f"{case}, program {number}: {peaks[0]} for {peaks[1]}"
            told.append(peaks[1])
    return told


def check_model(name: str, optimizer: str) -> int:
    entry = zoo.ENTRIES[name]

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = entry.build()
        made: Any = OPTIMIZERS[optimizer](model.parameters())
        loss = entry.batch(model)

        def step() -> None:
            loss().backward()
            made.step()
            made.zero_grad()

        return model, made, step

    peak, predicted = tracked(build), ms.memory.predict(build).peak
    assert _is_told(predicted, peak), f"{name}, {optimizer}: {predicted} for {peak}"
    return peak


def run_seed(seed: int, without: list[str], shrink: bool) -> tuple[str, str]:
    if not _native.available:
        return "refused: a track sees what kernels make only natively", ""
    case = cases()[seed % len(cases())]
    name = case[0] if isinstance(case, tuple) else case.name
    if name in without or not UNKNOWN.keys().isdisjoint((name, str(case))):
        return "refused: left out", ""
    try:
        if isinstance(case, tuple):
            check_model(*case)
        else:
            if not check_operator(case, seed // len(cases()), most=8):
                return "refused: no peak that means something", ""
    except pytest.skip.Exception as missing:
        return f"refused: {missing}", ""
    except Exception as error:
        return f"{case}: {type(error).__name__}", traceback.format_exc()
    return "", str(case)
