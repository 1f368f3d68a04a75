"""Every operator and module of torch's own databases, in regions and blocks and without them: the
same bits.

The databases (``torch.testing._internal``: ``op_db``, ``module_db``) give each its samples. A
program makes the inputs by another operator, and reads the outputs by others, so that inputs and
outputs can be dropped, and runs in each of the ways to save memory. A seed is an operator or a
module and a kind of number; seeds beyond the last draw other numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_operators import op_db

import memsave_ext as ms
from memsave_ext import _native

DTYPES = (torch.float32, torch.bfloat16, torch.complex64)


@functools.cache
def _folder() -> str:
    """Where memory is moved to, of this process; gone with it."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


# By what makes the block: None for a region around the whole program.
WAYS: dict[str, Callable[[], Any] | None] = {
    "remat": lambda: ms.remat(_everything=True),
    "offload": lambda: ms.remat(_everything=True, offload=_folder()),  # moves every second content
    "budget": lambda: ms.remat(budget=0.3),
    "checkpoint": None,
}

# Operators whose own results differ between plain runs, where two equal runs prove nothing.
UNSTABLE = {
    "linalg.lstsq": "gelsy reads pivots that torch leaves uninitialised",
}


@dataclasses.dataclass(frozen=True)
class Case:
    entry: OpInfo | ModuleInfo
    dtype: torch.dtype

    @property
    def name(self) -> str:
        variant = getattr(self.entry, "variant_test_name", "")
        return self.entry.name + (f".{variant}" if variant else "")

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}"


def ways() -> list[str]:
    """Those of this run: in pure Python remat drops nothing."""
    return list(WAYS) if _native.available else ["checkpoint"]


@functools.cache
def cases() -> list[Case]:
    """In an order of their own, so that a share of them has some of everything."""
    entries = [(op, op.supported_backward_dtypes("cpu")) for op in op_db if op.supports_autograd]
    entries += [(module, module.supported_dtypes("cpu")) for module in module_db]
    found = [
        Case(entry, dtype)
        for entry, supported in entries
        if entry.name not in UNSTABLE
        for dtype in DTYPES
        if dtype in supported
    ]
    random.Random(0).shuffle(found)
    return found


@dataclasses.dataclass
class Counts:
    """What was compared, what of that had something to drop, or to move, and what was refused by
    right."""

    samples: int = 0
    dropped: int = 0
    moved: int = 0
    refused: int = 0

    def __add__(self, other: Counts) -> Counts:
        mine, others = vars(self).values(), vars(other).values()
        return Counts(*(a + b for a, b in zip(mine, others, strict=True)))


@dataclasses.dataclass
class Program:
    """``make()`` gives a function and what it holds; it is called with a sample's arguments."""

    make: Callable[[], tuple[Callable[..., Any], list[Tensor]]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int
    changes_arguments: bool = False  # seen by a run: such as an instance norm's statistics

    def run(self, way: str | None) -> tuple[list[Any] | None, Any]:
        """The bits of the result and of gradients, None without any; and the block."""
        _seed(self.seed)
        function, held = self.make()
        values, structure = tree_flatten((self.args, self.kwargs))
        leaves = [_copy(value) for value in values]

        def call(*leaves: Any) -> Tensor:
            made = [leaf * 1 if _is_input(leaf) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(made, structure)
            return _read(function(*args, **kwargs))

        block = None
        if way == "checkpoint":
            total = ms.checkpoint(call, *leaves)
        else:
            make = WAYS[way] if way else None
            with make() if make else contextlib.nullcontext() as block:
                total = call(*leaves)
        if not total.requires_grad:
            return None, None
        inputs = [leaf for leaf in [*leaves, *held] if _is_input(leaf)]
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
        self.changes_arguments = any(isinstance(leaf, Tensor) and leaf._version for leaf in leaves)
        return [bits(total), *map(bits, grads), bits(torch.get_rng_state())], block


def _seed(seed: int) -> None:
    """Of a CPU alone: ``torch.manual_seed`` writes the stack down for each other kind of device."""
    torch.default_generator.manual_seed(seed)


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _is_input(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.layout == torch.strided


def _read(output: Any) -> Tensor:
    total = torch.zeros(())
    for value in filter(_is_input, tree_flatten(output)[0]):
        read = value * 1 if value.is_complex() else (value * 1).sin()
        square = read * read
        total = total + (square.abs() if square.is_complex() else square).sum()
    return total


def bits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach()
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.dtype, tensor.shape, tensor.flatten().view(torch.uint8).numpy().tobytes()


def _spread(values: list[Any], most: int | None) -> list[Any]:
    return values[:: -(-len(values) // most)] if most and values else values


def programs(case: Case, seed: int, most: int | None) -> Iterator[Program]:
    entry = case.entry
    _seed(seed)
    if isinstance(entry, OpInfo):
        # Not by sample_inputs(), which looks through the stack and all modules for a unittest.
        samples = list(entry.sample_inputs_func(entry, "cpu", case.dtype, requires_grad=True))
        forms = [form for form in (entry, entry.inplace_variant) if form]
        for sample in _spread(samples, most):
            for form in forms:

                def function(
                    *args: Any, form: Any = form, sample: Any = sample, **kwargs: Any
                ) -> Any:
                    return sample.output_process_fn_grad(form(*args, **kwargs))

                arguments = (sample.input, *sample.args)
                yield Program(lambda f=function: (f, []), arguments, sample.kwargs, seed)
        return
    for training in (True, False):
        inputs = entry.module_inputs_func(
            entry, device="cpu", dtype=case.dtype, requires_grad=True, training=training
        )
        for sample in _spread(list(inputs), most):
            made, called = sample.constructor_input, sample.forward_input
            if called is None:
                continue

            def make(made: Any = made, training: bool = training) -> Any:
                module = entry.module_cls(*made.args, **made.kwargs)
                module = module.to(case.dtype).train(training)
                return module, list(module.parameters())

            yield Program(make, called.args, called.kwargs, seed)


def check(case: Case, seed: int = 0, most: int | None = None) -> dict[str, Counts]:
    """Raises where a sample's bits are others. ``most``: samples looked at, spread over all."""
    counts = {way: Counts() for way in ways()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, program in enumerate(programs(case, seed, most)):
            try:
                plain = program.run(None)[0]
                stable = plain is not None and plain == program.run(None)[0]
            except (RuntimeError, TypeError, ValueError, AttributeError):
                continue  # a sample that has no plain run in this form, such as in place
            if not stable:
                continue
            for way, counted in counts.items():
                _check_way(program, way, plain, counted, number)
    return counts


def _check_way(program: Program, way: str, plain: list[Any], counts: Counts, number: int) -> None:
    try:  # a budget's plan is followed from the second step on
        for _ in range(2 if way == "budget" else 1):
            ours, block = program.run(way)
            assert ours == plain, "other bits"
    except Exception as error:
        if program.changes_arguments and "modified by an inplace" in str(error):
            counts.refused += 1
            return
        told = f"{way}, program {number}: {program.args} {program.kwargs}"
        raise AssertionError(told) from error
    counts.samples += 1
    counts.dropped += bool(block and block.figures().dropped_bytes)
    counts.moved += bool(block and block.figures().moved_bytes)


def run_seed(seed: int, without: list[str], shrink: bool) -> tuple[str, str]:
    case = cases()[seed % len(cases())]
    if case.name in without:
        return "refused: left out", ""
    try:
        check(case, seed // len(cases()))
    except Exception as error:
        return f"{case}: {type(error).__name__}", traceback.format_exc()
    return "", str(case)
