"""A step of one parameter in torch's operators: the formula of csrc/adam/math.h, and what
csrc/adam/state.cpp says of states."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import adam_formats as formats
from .adam_formats import BLOCK, Draw
from .stepped import note_step

# A step is made whole, or in parts: micro-gradients are folded into the moments, the last of them
# with an update of the parameter.
Phase = Literal["whole", "first_fold", "fold", "close"]

SPARSE = "Adam does not support sparse gradients, please consider SparseAdam instead"
_RESTS = {"kahan": torch.bfloat16, "split": torch.int16}
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def update(
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    *,
    position: int = 0,
    phase: Phase = "whole",
    factor: float | Tensor | None = None,
) -> None:
    """One step, or the folding of a micro-gradient.

    Args:
        grad: None for zeros.
        state: as the optimizer has it; changed in place.
        group: of ``param_groups``.
        position: of the parameter in the optimizer.
        factor: what the gradient is multiplied by.
    """
    own = param, dict(state)
    param, state = plain(param), {name: plain(value) for name, value in state.items()}
    _update(param, grad, state, group, position, phase, factor)
    for original, changed in ((own[0], param), *((own[1][n], v) for n, v in state.items())):
        if original is not changed:
            original.copy_(changed)


def _update(
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    position: int,
    phase: Phase,
    factor: float | Tensor | None,
) -> None:
    folds = phase in ("first_fold", "fold")
    step = state["step"]
    if not folds:
        step.add_(1)
    if param.numel() == 0:
        torch.autograd.graph.increment_version(param)
        return
    number = step.item() if step.device.type == "cpu" else formats.wide(step.to(param.device))
    number = number + 1 if folds else number
    stored = _Stored(param, state, group, position, number)
    c = _coefficients(group, number, stored.compute, param.device)
    g = torch.zeros_like(param) if grad is None else plain(grad)
    g = _real(g).to(stored.compute)
    if factor is not None:
        g = g * (factor.to(g) if isinstance(factor, Tensor) else factor)
    if group["maximize"]:
        g = -g
    if folds:
        _fold(c, g, stored, first=phase == "first_fold")
    else:
        _step(c, g, stored, closes=phase == "close")
        note_step(param, position)


def _fold(c: _Coefficients, grad: Tensor, stored: _Stored, first: bool) -> None:
    exp_avg = stored.load("exp_avg")
    if first:
        packed = formats.pack(exp_avg, stored.load("exp_avg_sq"), stored.random(Draw.EXP_AVG_SQ))
        stored.store("exp_avg_sq", packed)
        exp_avg = _average(c, grad, exp_avg)
    else:
        exp_avg = formats.fused(c.exp_avg_weight, grad, exp_avg)
    stored.store("exp_avg", exp_avg)


def _step(c: _Coefficients, grad: Tensor, stored: _Stored, closes: bool) -> None:
    group = stored.group
    param, exp_avg = stored.load_param(), stored.load("exp_avg")
    exp_avg_sq = stored.load("exp_avg_sq")
    if c.grad_decay != 0:
        grad = formats.fused(c.grad_decay, param, grad)
    if closes:
        before, exp_avg_sq = formats.unpack(exp_avg_sq)
        exp_avg = formats.fused(c.exp_avg_weight, grad, exp_avg)
        grad = formats.fused(-c.beta1, before, exp_avg) * c.per_exp_avg_weight  # the sum
    else:
        exp_avg = _average(c, grad, exp_avg)
    exp_avg_sq = formats.fused(grad * c.one_minus_beta2, grad, exp_avg_sq * c.beta2)
    second = exp_avg_sq
    if group["amsgrad"]:
        second = torch.maximum(stored.load("max_exp_avg_sq"), exp_avg_sq)
    denominator = formats.square_root(second).div_(c.bias_correction2_sqrt).add_(c.eps)
    direction = exp_avg
    if stored.in_blocks:  # rounded so coarsely that a step could be any size
        bound = _update_bound(group, stored.number) * denominator
        direction = torch.maximum(torch.minimum(exp_avg, bound), -bound)
    change = (direction * c.minus_step_size).div_(denominator)
    stored.store_param(change.add_(param * c.param_decay))
    stored.store("exp_avg", exp_avg, Draw.EXP_AVG)
    stored.store("exp_avg_sq", exp_avg_sq, Draw.EXP_AVG_SQ)
    if group["amsgrad"]:
        stored.store("max_exp_avg_sq", second, Draw.MAX_EXP_AVG_SQ)


class _Stored:
    """A parameter and its state, read as what they stand for and rounded when they are written.
    Complex ones as real ones."""

    def __init__(
        self,
        param: Tensor,
        state: Mapping[str, Tensor],
        group: Mapping[str, Any],
        position: int,
        number: float | Tensor,
    ) -> None:
        self.group, self.number = group, number
        self.compute = torch.float64 if _real_type(param) == torch.float64 else torch.float32
        self.in_blocks = state["exp_avg"].dtype == torch.uint8
        self._bf16 = group.get("bf16") if param.dtype == torch.bfloat16 else None
        self._param, self._state, self._position = param, state, position

    @functools.cached_property
    def _elements(self) -> _Elements:
        return _Elements(self._param)

    def random(self, draw: Draw) -> Tensor:
        bits = formats.random_bits(
            _real(self._param).numel(),
            seed=self.group.get("seed", 0),
            position=self._position,
            step=self.number if isinstance(self.number, Tensor) else int(self.number),
            draw=draw,
            device=self._param.device,
        )
        return self._elements.shaped(bits)

    def load_param(self) -> Tensor:
        if self._bf16 in _RESTS:
            join = formats.unkahan if self._bf16 == "kahan" else formats.unsplit
            return join(self._param, self._state["param_rest"])
        return _real(self._param).to(self.compute)

    def store_param(self, values: Tensor) -> None:
        if self._bf16 in _RESTS:
            values, rest = (formats.kahan if self._bf16 == "kahan" else formats.split)(values)
            self._state["param_rest"].copy_(rest)
        elif self._bf16 == "stochastic":
            values = formats.round_at_random(values, self.random(Draw.PARAM))
        _real(self._param).copy_(values)

    def load(self, name: str) -> Tensor:
        if not self.in_blocks:
            return _real(self._state[name]).to(self.compute)
        decode = formats.decode_exp_avg if name == "exp_avg" else formats.decode_exp_avg_sq
        codes = self._elements.flat(self._state[name])
        return self._elements.shaped(decode(codes, self._state[f"{name}_scale"]))

    def store(self, name: str, values: Tensor, draw: Draw = Draw.PARAM) -> None:
        to = self._state[name]
        if self.in_blocks:
            encode = formats.encode_exp_avg if name == "exp_avg" else formats.encode_exp_avg_sq
            flat, random = self._elements.flat(values), self._elements.flat(self.random(draw))
            codes, scale = encode(flat, random)
            self._state[f"{name}_scale"].copy_(scale)
            values = self._elements.shaped(codes)
        elif to.dtype == torch.bfloat16 and self.group.get("state_dtype") == torch.bfloat16:
            values = formats.round_at_random(values, self.random(draw))
        _real(to).copy_(values)


class _Coefficients(NamedTuple):
    """Numbers of the type that is computed in, as in csrc/adam/math.h. Those that are tensors
    depend on a step count or lr that is on a device."""

    grad_decay: float
    param_decay: float | Tensor
    exp_avg_weight: float
    adds_to_exp_avg: bool  # else to the gradient, which a beta1 of 0 then returns
    beta1: float
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float | Tensor
    eps: float
    minus_step_size: float | Tensor
    per_exp_avg_weight: float


def _coefficients(
    group: Mapping[str, Any], number: float | Tensor, dtype: torch.dtype, device: torch.device
) -> _Coefficients:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.item() if lr.device.type == "cpu" else formats.wide(lr.to(device))
    decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
    return _Coefficients(
        grad_decay=_rounded(group["weight_decay"] - decay, dtype),
        param_decay=_rounded(1 - lr * decay, dtype),
        exp_avg_weight=_rounded(1 - beta1, dtype),
        adds_to_exp_avg=abs(1 - beta1) < 0.5,
        beta1=_rounded(beta1, dtype),
        beta2=_rounded(beta2, dtype),
        one_minus_beta2=_rounded(1 - beta2, dtype),
        bias_correction2_sqrt=_rounded((1 - beta2**number) ** 0.5, dtype),
        eps=_rounded(group["eps"], dtype),
        minus_step_size=_rounded(-(lr / (1 - beta1**number)), dtype),
        per_exp_avg_weight=_rounded(1 / (1 - beta1), dtype),
    )


_N = TypeVar("_N", float, Tensor, float | Tensor)


def _rounded(value: _N, dtype: torch.dtype) -> _N:
    if isinstance(value, Tensor):
        return value.to(dtype)
    return ctypes.c_float(value).value if dtype == torch.float32 else value


def _update_bound(group: Mapping[str, Any], number: float | Tensor) -> Tensor:
    """What exp_avg / (exp_avg_sq.sqrt() / bias_correction2_sqrt) cannot exceed, by the
    Cauchy-Schwarz inequality over the gradients that both are sums of."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if not isinstance(number, Tensor):
        number = torch.tensor(number, dtype=torch.float64)
    ratio = beta1 * beta1 / torch.full_like(number, beta2)
    left1, left2 = beta1**number, beta2**number
    # ratio**number, of which nothing is left where both powers are too small for a number.
    left = torch.where(left2 > 0, left1 * left1 / left2, torch.where(ratio < 1, 0.0, torch.inf))
    steps = 1 - left
    bound = (1 - beta1) * ((1 - left2) / (1 - beta2) * steps / (1 - ratio)).sqrt()
    return torch.where(bound > 0, bound * 1.0001, 1e30).float()


def _average(c: _Coefficients, grad: Tensor, exp_avg: Tensor) -> Tensor:
    if c.adds_to_exp_avg:
        return formats.fused(c.exp_avg_weight, grad - exp_avg, exp_avg)
    return formats.fused(_rounded(c.exp_avg_weight - 1, exp_avg.dtype), grad - exp_avg, grad)


class _Elements:
    """A parameter's elements in the order of its memory; with gaps, in that of its indices."""

    def __init__(self, param: Tensor) -> None:
        param = _real(param)
        dims = sorted(range(param.dim()), key=param.stride, reverse=True)
        self.dense = param.permute(dims).is_contiguous()
        if not self.dense:
            dims = list(range(param.dim()))
        self._dims = dims
        self._shape = param.permute(dims).shape
        self._back = sorted(range(len(dims)), key=dims.__getitem__)

    def flat(self, tensor: Tensor) -> Tensor:
        return tensor.permute(self._dims).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        return flat.view(self._shape).permute(self._back)


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where its memory is not what it stands for: conjugate and
    negative views, and zeros without memory."""
    if torch._is_zerotensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_conj().resolve_neg()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _real_type(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


# states


def make_state(param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Zeros. The moments in float32 for types of 16 bits, else in the parameter's, where the group
    does not say otherwise; 8 bits only from SMALLEST_OF_BLOCKS elements on."""
    device = param.device if group["capturable"] or group["fused"] else "cpu"
    state_dtype = group.get("state_dtype")
    dtype = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
    state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    scales = {}
    if state_dtype == torch.bfloat16:
        dtype = torch.bfloat16
    elif state_dtype == "8bit" and takes_blocks(param):
        dtype = torch.uint8
        for name in ("exp_avg_scale", "exp_avg_sq_scale"):
            scales[name] = torch.zeros(_blocks_of(param), dtype=torch.float32, device=param.device)
    for name in names:
        state[name] = _zeros(param, dtype)
    state |= scales
    if (rest := _rest(param, group)) is not None:
        state["param_rest"] = _zeros(param, rest)
    return state


def takes_blocks(param: Tensor) -> bool:
    """Whether its moments can be of 8 bits: blocks follow memory, and are not worth it in small
    ones."""
    return param.numel() >= formats.SMALLEST_OF_BLOCKS and _Elements(param).dense


def check(
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    phase: Phase = "whole",
) -> None:
    """Raises where a step cannot be made; nothing is changed then."""
    if grad is not None:
        _check_grad(param, grad)
    if _real_type(param) not in _TYPES:
        raise RuntimeError(f"Adam: parameters must be floating-point or complex, got {param.dtype}")
    step = state.get("step")
    if not isinstance(step, Tensor) or step.numel() != 1 or not step.is_floating_point():
        raise RuntimeError(
            "Adam: the state step of a parameter must be a floating-point scalar tensor"
        )
    if "exp_avg" not in state:
        raise RuntimeError("Adam: the state of a parameter has no exp_avg")
    dtype = state["exp_avg"].dtype
    allowed = [param.dtype]
    if not param.is_complex() and param.dtype != torch.float64:
        own_mode = [torch.bfloat16] if group.get("state_dtype") == torch.bfloat16 else []
        others = [torch.float32, *own_mode, torch.uint8]  # the last with scales
        allowed += [other for other in others if other != param.dtype]
    if dtype not in allowed:
        raise RuntimeError(
            f"Adam: the state exp_avg of a {param.dtype} parameter must be "
            f"{' or '.join(map(str, allowed))}, got {dtype}. Convert the model before making the "
            "optimizer, or load the optimizer's state_dict() into it again."
        )
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
        if dtype == torch.uint8 and name == "max_exp_avg_sq":
            raise RuntimeError("Adam: 8-bit states cannot have amsgrad")
        _check_like(name, param, state, dtype)
    if dtype == torch.uint8:
        _check_blocks(param, state)
    if (rest := _rest(param, group)) is not None:
        _check_like("param_rest", param, state, rest)
    if phase != "whole" and _real_type(state["exp_avg"]) not in (torch.float32, torch.float64):
        raise RuntimeError(
            "Adam: accumulate(fold=True) needs states of float32 or float64, got "
            f"{dtype}. Use accumulate() or state_dtype=None."
        )


def _check_grad(param: Tensor, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise RuntimeError(SPARSE)
    if grad.shape != param.shape or grad.device != param.device or grad.dtype != param.dtype:
        raise RuntimeError(
            "Adam: a gradient must have the shape, dtype and device of its parameter, "
            f"{list(param.shape)} {param.dtype} {param.device}, got {list(grad.shape)} "
            f"{grad.dtype} {grad.device}"
        )


def _check_like(name: str, param: Tensor, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    if name not in state:
        raise RuntimeError(f"Adam: the state of a parameter has no {name}")
    tensor = state[name]
    if tensor.device != param.device or tensor.shape != param.shape:
        raise RuntimeError(
            f"Adam: the state {name} of a parameter is a tensor of shape {list(tensor.shape)} "
            f"on {tensor.device}, the parameter one of shape {list(param.shape)} on "
            f"{param.device}. Move the model before making the optimizer, or load the "
            "optimizer's state_dict() into it again."
        )
    if tensor.dtype != dtype:
        raise RuntimeError(
            f"Adam: the state {name} of a parameter is {tensor.dtype}, expected {dtype}"
        )


def _check_blocks(param: Tensor, state: Mapping[str, Tensor]) -> None:
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        scale = state.get(name)
        if (
            scale is None
            or scale.numel() != _blocks_of(param)
            or scale.dtype != torch.float32
            or scale.device != param.device
            or not scale.is_contiguous()
        ):
            raise RuntimeError(
                f"Adam: the state {name} of a parameter of shape {list(param.shape)} must be a "
                f"contiguous float32 tensor of {_blocks_of(param)} elements on its device"
            )
    # Blocks follow memory.
    if any(
        size > 1 and then != now
        for size, then, now in zip(
            param.shape, state["exp_avg"].stride(), param.stride(), strict=True
        )
    ):
        raise RuntimeError(
            "Adam: 8-bit states need a parameter in the memory format it had when they were made: "
            f"strides {state['exp_avg'].stride()} then, {param.stride()} now. Load "
            "to_fp32_state_dict() into a new optimizer."
        )


def _zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _blocks_of(param: Tensor) -> int:
    return (param.numel() + BLOCK - 1) // BLOCK


def _rest(param: Tensor, group: Mapping[str, Any]) -> torch.dtype | None:
    return _RESTS.get(group.get("bf16") or "") if param.dtype == torch.bfloat16 else None


# conversions


def to_blocks(state: dict[str, Tensor], param: Tensor) -> None:
    """Moments become 8 bits, rounded to nearest."""
    elements, half = _Elements(param), torch.tensor(0x8000, device=param.device)
    for name, encode in (
        ("exp_avg", formats.encode_exp_avg),
        ("exp_avg_sq", formats.encode_exp_avg_sq),
    ):
        values = elements.flat(state[name]).float()
        codes, state[f"{name}_scale"] = encode(values, half.expand(values.shape))
        state[name] = _zeros(param, torch.uint8).copy_(elements.shaped(codes))


def from_blocks(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A moment of 8 bits in float32."""
    elements = _Elements(state[name])
    decode = formats.decode_exp_avg if name == "exp_avg" else formats.decode_exp_avg_sq
    values = decode(elements.flat(state[name]), state[f"{name}_scale"])
    return _zeros(state[name], torch.float32).copy_(elements.shaped(values))
