"""Calls of every operator that has kernels: of shapes that matter, odd ones and unaligned ones.

Each is made three times: as it is, by the pure-Python kernel, and by that one in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _parts
from ..adam import SGD, Adam, AdamW, Lion
from ..adam.fallback.operator import Prepared, alike, call_of
from ..adam.states import make_state
from .rows import CLOSE, Row, message

_F32, _BF16, _F16, _F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
_FLOATS = _F32, _BF16, _F16, _F64
_LAST = torch.channels_last
_MANY = 4_000_000  # only what is timed has so many values
_DRAWN = 1_000_003  # of which so many are drawn, and repeated: drawing takes longer than a kernel
Arguments = tuple[Any, ...]  # with a dict at the end where some are named


@dataclass
class Kernel:
    """An operator in one format.

    ``cases``: makes arguments. ``results``: what of them, and of what is returned, is compared.
    ``large``: arguments to be timed, and the bytes that they are to move. ``exact``: the same in
    float64, or None. ``limit``: units in the last place that results may be from those.
    """

    part: str
    what: str
    operator: str
    cases: Callable[[torch.device], Iterator[Arguments]]
    large: Callable[[torch.device], tuple[Arguments, int]] | None
    results: Callable[[Arguments, Any], list[Tensor]]
    limit: Callable[[Arguments], float] = lambda _: CLOSE
    exact: Callable[[Arguments], Arguments | None] = lambda arguments: _wide(arguments)
    same_bits: bool = False  # whether pure Python has them
    first_in_float64: bool = False  # only as many results as the first argument has tensors are

    def call(self, arguments: Arguments) -> list[Tensor]:
        operator = getattr(torch.ops.memsave_ext, self.operator)
        return self.results(arguments, called(operator, arguments))

    def call_python(self, arguments: Arguments) -> list[Tensor]:
        kernel = _parts.python_kernel(self.operator)
        return self.results(arguments, called(kernel, arguments))

    def check(self, row: Row, device: torch.device) -> None:
        torch.manual_seed(0)
        for arguments in self.cases(device):
            exact_arguments = self.exact(arguments)
            found = self.call(copied(arguments))
            python = self.call_python(copied(arguments))
            exact = None
            if exact_arguments is not None:
                count = len(arguments[0]) if self.first_in_float64 else None
                exact = self.call_python(exact_arguments)[:count]
            row.compare(found, python, exact, self.limit(arguments))
        if self.same_bits and _has_bits_of_python(device) and row.from_python:
            row.wrong("the result is not bit for bit that of pure Python")


def called(function: Callable[..., Any], arguments: Arguments) -> Any:
    if arguments and isinstance(arguments[-1], dict):
        return function(*arguments[:-1], **arguments[-1])
    return function(*arguments)


def _has_bits_of_python(device: torch.device) -> bool:
    """Without FMA instructions steps are rounded once more, and on CUDA a few states otherwise."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def check_kernel(kernel: Kernel, row: Row, device: torch.device) -> None:
    try:
        kernel.check(row, device)
    except Exception as error:  # whatever it is, the other kernels are to be checked
        row.wrong(message(error))


def _changed(arguments: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        return [of(one) for one in value] if isinstance(value, list) else value

    return tuple(of(argument) for argument in arguments)


def copied(arguments: Arguments) -> Arguments:
    return _changed(arguments, _copy)


def _copy(tensor: Tensor) -> Tensor:
    """Returns a copy with the same strides, as far from an aligned address."""
    offset = tensor.data_ptr() % 64 // tensor.element_size()
    storage = tensor.new_empty(offset + tensor.untyped_storage().nbytes() // tensor.element_size())
    return storage.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)


def _wide(arguments: Arguments) -> Arguments:
    return _changed(arguments, lambda t: t.double() if t.is_floating_point() else t.clone())


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device, shift: int) -> Tensor:
    """Values around 0.5, ``shift`` elements from an aligned address."""
    count = torch.Size(shape).numel() + shift
    drawn = count if count < _MANY else _DRAWN
    values = (torch.randn(drawn, device="cpu") * 1.5 + 0.5).to(device, dtype)
    return values.repeat(-(-count // drawn))[shift:count].view(shape)


def _of_sums(terms: int) -> float:
    """Returns the limit for sums of so many terms in the type of the result."""
    return 2 * CLOSE * math.sqrt(terms)


# ---- batch norm ---------------------------------------------------------------------------------

_SHAPES = [(2, 3, 5, 7), (4, 130, 14, 14), (3, 5, 65, 31), (8, 64, 7, 7)]
# Those that a block of CUDA keeps in shared memory, of 48 KiB and more.
_SHAPES_CUDA = [(48, 128, 16, 16), (64, 128, 8, 8), (128, 128, 8, 8), (512, 130, 7, 7)]
_LARGE = (32, 64, 56, 56)


def _norm_inputs(
    shape: Sequence[int], dtype: torch.dtype, layout: torch.memory_format, device: torch.device
) -> tuple[Any, ...]:
    """Returns input, gradient, residual, weight, bias and statistics."""
    shift = 1 if shape[1] % 2 else 0
    tensors = [_random(shape, dtype, device, shift) for _ in range(3)]
    if layout is _LAST:
        n, c, h, w = shape
        tensors = [_random((n, h, w, c), dtype, device, shift).permute(0, 3, 1, 2) for _ in "xgr"]
    wide = _F64 if dtype == _F64 else _F32
    weight, bias = torch.rand(2, shape[1], device=device, dtype=wide) + 0.5
    x = tensors[0].double().transpose(0, 1).flatten(1)
    statistics = torch.stack([x.mean(1), (x.var(1, correction=0) + 1e-5).rsqrt()]).to(wide)
    return *tensors, weight, bias, statistics


def _norm_arguments(name: str, inputs: tuple[Any, ...], activation: str) -> Arguments:
    x, grad, residual, weight, bias, statistics = inputs
    added = residual if activation != "none" else None
    given, tail = (x, weight, bias, added), (activation, 0.1)
    running = [torch.zeros_like(weight), torch.ones_like(weight)]
    if name == "forward":
        return *given, None, *running, True, 0.1, 1e-5, *tail, None
    if name == "reuse":
        return *given, statistics, None, None, True, 0.1, 1e-5, *tail, None
    if name == "moments":
        return (x,)
    back = (grad, *given, statistics)
    if name == "backward":
        return *back, True, 1e-5, *tail, [True, added is not None, True, True]
    if name == "backward sums":
        return *back, *tail
    return *back, statistics * 0.1, *tail, [True, added is not None]


def _norm_results(arguments: Arguments, returned: Any) -> list[Tensor]:
    if isinstance(returned, Tensor):
        if returned.dtype != torch.uint8:
            return list(returned)
        x = arguments[0]
        wide = _F64 if x.dtype == _F64 else _F32
        size = 2 * x.shape[1] * wide.itemsize
        return [*returned[:size].view(wide).view(2, -1), returned[size:].view(torch.int64)]
    rows = [row for t in returned for row in (t if t.dim() == 2 and t.numel() else [t])]
    running = [t for t in arguments[5:7] if isinstance(t, Tensor) and t.dim() == 1]
    return rows + running


_NORM = {  # operator, and how many tensors are read or written
    "forward": ("batch_norm_forward", 2),
    "reuse": ("batch_norm_forward", 2),
    "backward": ("batch_norm_backward", 3),
    "moments": ("batch_norm_moments", 1),
    "backward sums": ("batch_norm_backward_sums", 2),
    "backward input": ("batch_norm_backward_input", 3),
}


def _norm(name: str, dtype: torch.dtype) -> Kernel:
    operator, moved = _NORM[name]

    def cases(device: torch.device) -> Iterator[Arguments]:
        shapes = _SHAPES + (_SHAPES_CUDA if device.type == "cuda" else [])
        activations = itertools.cycle(["relu", "none", "leaky_relu"])
        for layout, shape in itertools.product((torch.contiguous_format, _LAST), shapes):
            inputs = _norm_inputs(shape, dtype, layout, device)
            # Among many values some are at the bend, and rounding decides their gradient.
            activation = "none" if shape in _SHAPES_CUDA else next(activations)
            yield _norm_arguments(name, inputs, activation)

    def large(device: torch.device) -> tuple[Arguments, int]:
        shape = (_LARGE[0] * (8 if device.type == "cuda" else 1), *_LARGE[1:])
        inputs = _norm_inputs(shape, dtype, torch.contiguous_format, device)
        return _norm_arguments(name, inputs, "none"), moved * inputs[0].nbytes

    def limit(arguments: Arguments) -> float:
        x = arguments[0]
        return CLOSE if name in ("reuse", "backward input") else _of_sums(x.numel() // x.shape[1])

    timed = large if dtype in (_F32, _BF16) else None
    what = f"{name}, {_short(dtype)}"
    return Kernel("batch_norm", what, operator, cases, timed, _norm_results, limit)


# ---- loss head ----------------------------------------------------------------------------------

# Tokens, classes, what is given, softcap; the second and the fourth are not aligned.
_CHUNKS = [
    (64, 2048, "target", 0.0), (3, 33, "target", 30.0), (17, 1000, "probabilities", 0.0),
    (5, 4099, "weights", 0.0), (1, 1, "target", 0.0), (9, 515, "entropy", 30.0),
]  # fmt: skip


def _chunk(
    tokens: int, classes: int, given: str, softcap: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Arguments]:
    """Returns sums of other classes, logits, coefficients, and the other arguments of a chunk."""
    logits = _random((tokens, classes), dtype, device, classes % 2)
    wide = _F64 if dtype == _F64 else _F32
    entropy = given == "entropy"
    sums = torch.rand(3 + entropy, tokens, device=device, dtype=wide) + 0.5
    maximum = logits.to(wide).amax(1).clamp_min(3.0)
    log_sum = (logits.to(wide) - maximum[:, None]).exp().sum(1).log()
    scale = torch.rand(2 + entropy, tokens, device=device, dtype=wide) / tokens
    scale[:, tokens // 2 + 1 :: 5] = 0.0  # tokens that are ignored
    target = torch.randint(-2, classes + 3, (tokens,), device=device)
    probabilities = None
    if given == "probabilities":
        probabilities = torch.rand(tokens, classes, device=device, dtype=wide)
    weights = torch.rand(classes, device=device, dtype=wide) if given == "weights" else None
    spread = 0.0 if given in ("target", "entropy") else 0.1 / classes
    rest = (None if probabilities is not None else target, probabilities, weights, 0, 0.9, spread)
    return sums, logits, torch.stack([maximum, log_sum, *scale]), (*rest, softcap)


def _head(name: str, dtype: torch.dtype) -> Kernel:
    def arguments(*case: Any) -> Arguments:
        sums, logits, coefficients, rest = _chunk(*case)
        return (sums, logits, *rest) if name == "reduce_" else (logits, coefficients, *rest)

    def cases(device: torch.device) -> Iterator[Arguments]:
        return (arguments(*case, dtype, device) for case in _CHUNKS)

    def large(device: torch.device) -> tuple[Arguments, int]:
        tokens = 8192 if device.type == "cuda" else 512
        made = arguments(tokens, 8192, "target", 0.0, dtype, device)
        moved = tokens * 8192 * dtype.itemsize
        return made, moved if name == "reduce_" else 2 * moved

    def results(arguments: Arguments, _: Any) -> list[Tensor]:
        return list(arguments[0]) if name == "reduce_" else [arguments[0]]

    def limit(arguments: Arguments) -> float:
        # An exponential has the error of its argument, of up to some ten units.
        return _of_sums(arguments[1].shape[1]) if name == "reduce_" else 4 * CLOSE

    what = f"{name.rstrip('_')}, {_short(dtype)}"
    timed = large if dtype in (_F32, _BF16) else None
    operator = f"linear_cross_entropy_{name}"
    return Kernel("loss_head", what, operator, cases, timed, results, limit)


# ---- Adam, SGD, Lion ----------------------------------------------------------------------------

_SIZES = [1, 31, 257, 4097, 70_003]
_OPTIMIZERS: list[tuple[str, Any, torch.dtype, dict[str, Any]]] = [
    ("AdamW, fp32", AdamW, _F32, {}),
    ("Adam, fp64, amsgrad", Adam, _F64, {"amsgrad": True}),
    ("AdamW, fp32, clipped", AdamW, _F32, {"max_grad_norm": 0.5}),
    ("AdamW, fp16", AdamW, _F16, {}),
    ("AdamW, bf16", AdamW, _BF16, {}),
    ("AdamW, bf16 stochastic", AdamW, _BF16, {"bf16": "stochastic"}),
    ("AdamW, bf16 split", AdamW, _BF16, {"bf16": "split"}),
    ("AdamW, bf16 split8", AdamW, _BF16, {"bf16": "split8"}),
    ("AdamW, fp32, bf16 states", AdamW, _F32, {"state_dtype": _BF16}),
    ("AdamW, fp32, 8bit", AdamW, _F32, {"state_dtype": "8bit"}),
    ("AdamW, fp32, 4bit", AdamW, _F32, {"state_dtype": "4bit"}),
    ("AdamW, stochastic, 8bit", AdamW, _BF16, {"bf16": "stochastic", "state_dtype": "8bit"}),
    ("SGD, fp32, momentum", SGD, _F32, {"momentum": 0.9}),
    ("Lion, fp32", Lion, _F32, {}),
]


def _optimizer(what: str, kind: Any, dtype: torch.dtype, options: dict[str, Any]) -> Kernel:
    exact_options = {k: v for k, v in options.items() if k not in ("bf16", "state_dtype")}

    def made(sizes: Sequence[int], device: torch.device, shift: int) -> list[Prepared]:
        params = [_random((size,), dtype, device, shift) for size in sizes]
        optimizer = kind(params, lr=1e-2, weight_decay=0.1, **options)
        (group,) = optimizer.param_groups
        return [
            Prepared(p, _random(p.shape, dtype, device, shift), make_state(p, group), group, i)
            for i, p in enumerate(params)
        ]

    def cases(device: torch.device) -> Iterator[Arguments]:
        for shift in (0, 1):
            first = made(_SIZES, device, shift)
            for prepared in first:
                if "step" in prepared.state:
                    prepared.state["step"].fill_(1)
            for places in alike(first):
                arguments = call_of([first[i] for i in places])
                yield arguments
                second = copied(arguments)
                called(_parts.python_kernel("adam_step_"), second)
                yield second

    def exact(arguments: Arguments) -> Arguments | None:
        """Returns a first step in float64; later ones begin with what was rounded."""
        params, grads, states, *_ = arguments
        if any(bool(t.ne(0).any()) for t in states if t.numel() > 1):
            return None
        wide = kind([p.double() for p in params], lr=1e-2, weight_decay=0.1, **exact_options)
        (group,) = wide.param_groups
        steps = []
        for i, (param, grad) in enumerate(zip(group["params"], grads, strict=True)):
            state = make_state(param, group)
            if "step" in state:
                state["step"].fill_(1)
            steps.append(Prepared(param.detach(), grad.double(), state, group, i))
        return call_of(steps)

    def large(device: torch.device) -> tuple[Arguments, int]:
        (prepared,) = made([1 << (26 if device.type == "cuda" else 22)], device, 0)
        written = [prepared.param, *prepared.state.values()]
        return call_of([prepared]), prepared.grad.nbytes + 2 * sum(t.nbytes for t in written)

    def results(arguments: Arguments, _: Any) -> list[Tensor]:
        return [*arguments[0], *arguments[2]]

    # Python has no fused multiplication and addition of doubles.
    bits = dtype != _F64
    return Kernel(
        "adam", what, "adam_step_", cases, large, results, exact=exact, same_bits=bits,
        first_in_float64=True
    )  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return {_F32: "fp32", _F16: "fp16", _F64: "fp64", _BF16: "bf16"}[dtype]


KERNELS = [
    *(_optimizer(*case) for case in _OPTIMIZERS),
    *(_norm(name, dtype) for name in _NORM for dtype in _FLOATS),
    *(_head(name, dtype) for name in ("reduce_", "gradient_") for dtype in _FLOATS),
]
