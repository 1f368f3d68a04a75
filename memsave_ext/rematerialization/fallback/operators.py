"""The properties of operators that the recorder needs, looked up once for each operator."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::")
# These return uninitialised memory, or exchange or resize storages. Zeros are among them because
# custom kernels, which the dispatcher does not see, may be given them to write to.
_LEAVE_VALUES_OPEN = (
    "aten::empty", "aten::new_empty", "aten::_empty", "aten::resize", "aten::_resize",
    "aten::set_", "aten::_cudnn_init", "aten::pin_memory", "aten::_pin_memory",
    "aten::record_stream", "aten::_efficientzero", "aten::zeros", "aten::new_zeros",
)  # fmt: skip
# Batch norms that handle running statistics differently; they are not recomputed.
_OTHER_BATCH_NORMS = ("aten::_native_batch_norm_legit", "aten::_batch_norm_with_update")
_TORCH_BATCH_NORMS = (
    "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm",
)  # fmt: skip
_OWN_BATCH_NORM = "memsave_ext::batch_norm_forward"
_HEAVY = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv",
    "aten::addmv", "aten::dot", "aten::vdot", "aten::addr", "aten::sort", "aten::topk",
    "aten::argsort", "aten::kthvalue", "aten::_addmm_activation", "aten::cumsum",
)  # fmt: skip
_HEAVY_BEGINNINGS = (
    "aten::linalg_", "aten::_linalg", "aten::_fft", "aten::fft_", "aten::unique", "aten::_unique",
    "aten::_scaled_dot", "aten::_flash", "aten::_efficient_attention", "aten::mkldnn_",
    "aten::_cdist", "aten::_thnn_fused", "aten::_cudnn_rnn", "aten::_scaled_mm",
    "aten::_grouped_mm", "aten::_int_mm", "mkldnn::", "quantized::",
)  # fmt: skip
_MEASURABLE = 1 << 16  # bytes; calls with smaller results are not measured
_TRUSTED = 3  # the first measured call whose time counts; earlier ones allocate and start threads

Key = int | str  # of an argument: its position, or its name where it is keyword-only
# The argument, the index in it if it is a list (-1: the argument itself), and the tensor.
Given = tuple[Key, int, Tensor]


class Operator:
    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        name = self.name = schema.name
        self.overload = overload
        collective = name.startswith(_COLLECTIVES)
        self.keys: list[Key] = [
            a.name if a.kwarg_only else i for i, a in enumerate(schema.arguments)
        ]
        self.argument_names = {
            key: argument.name for key, argument in zip(self.keys, schema.arguments, strict=True)
        }
        self.positions = {a.name: i for i, a in enumerate(schema.arguments) if not a.kwarg_only}
        # The arguments it writes to: by its schema, or all for a collective. record_stream changes
        # no value.
        by_schema = schema.name != "aten::record_stream"
        self.writes = {
            key
            for key, argument in zip(self.keys, schema.arguments, strict=True)
            if collective or (by_schema and argument.alias_info and argument.alias_info.is_write)
        }
        # Whether a second call with the same arguments gives the same values: it draws no random
        # numbers, reads no uninitialised memory and does not communicate with other processes.
        self.is_repeatable = not (
            collective
            or name.startswith(_LEAVE_VALUES_OPEN)
            or torch.Tag.nondeterministic_seeded in overload.tags
            or name in _OTHER_BATCH_NORMS
        )
        # Whether it is bound by arithmetic, as matrix products: never cheap to recompute.
        self.is_heavy = name in _HEAVY or name.startswith(_HEAVY_BEGINNINGS) or "conv" in name
        self.is_torch_batch_norm = name in _TORCH_BATCH_NORMS
        self.is_own_batch_norm = name == _OWN_BATCH_NORM
        # The least time measured per byte of results. The least is the best estimate, because a
        # busy machine can only make a call slower.
        self._seconds_per_byte, self._measured = 1.0, 0

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Key, Any]:
        """Returns the arguments by position where they have one, with copies of lists."""
        given: dict[Key, Any] = dict(enumerate(args))
        given.update((self.positions.get(name, name), value) for name, value in kwargs.items())
        return {
            key: [*value] if isinstance(value, (list, tuple)) else value
            for key, value in given.items()
        }

    def measured(self, seconds: float, results: Any) -> float:
        """Returns the time to plan with for a call that took ``seconds``.

        It is 0 until enough calls are measured, and then at most twice the least for this size.
        """
        size = sum(t.numel() * t.itemsize for _, _, t in results_of(results))
        if size >= _MEASURABLE:
            self._measured += 1
            self._seconds_per_byte = min(self._seconds_per_byte, seconds / size)
        return 0.0 if self._measured < _TRUSTED else min(seconds, 2 * self._seconds_per_byte * size)


@functools.cache
def operator_of(overload: Any) -> Operator:
    return Operator(overload)


def _sequence(results: Any) -> Any:
    return results if isinstance(results, (tuple, list)) else (results,)


def results_of(results: Any) -> Iterator[Given]:
    """Yields the tensors among an operator's results."""
    return tensors_of(enumerate(_sequence(results)))


def tensors_of(values: Any) -> Iterator[Given]:
    """Yields the tensors in ``values``, pairs of key and value, and in lists among the values."""
    for key, value in values:
        if isinstance(value, Tensor):
            yield key, -1, value
        elif isinstance(value, (list, tuple)):
            for i, element in enumerate(value):
                if isinstance(element, Tensor):
                    yield key, i, element
