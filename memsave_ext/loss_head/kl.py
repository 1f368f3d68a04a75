"""Divergences of two heads' distributions, chunk by chunk over the vocabulary: distillation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _leaves
from . import head
from .chunks import Chunk, Chunks, Settings, shape_of_chunk
from .cross_entropy import CrossEntropy
from .function import (
    autocasts,
    check_chunk_size,
    check_softcap,
    check_tensors,
    in_region,
    layer_is_chunked,
    logits_dtype,
)
from .log_probs import check_temperature, scaled
from .reference import Options
from .vocabulary import refuse_dtensors

_TENSORS = 8  # of a chunk's logits at once: of both heads, and what becomes of them


def linear_kl(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_size: int | None = None,
    debug: bool = False,
) -> Tensor:
    """Compute how far a student's distribution over the vocabulary is from a teacher's at each
    token, without the logits of either, forward and backward::

        kl = ms.linear_kl(hidden, head.weight, teacher_hidden, teacher_head.weight)
        loss = kl[labels != -100].mean()

    Chunks are of the vocabulary, as in :func:`linear_cross_entropy`, and what is said there of rows
    that are stepped holds for the student's weight. The teacher is a constant.

    Args:
        input: ``(..., in_features)``, the student's hidden states.
        linear_weight: ``(C, in_features)``, of the C classes: the student's head.
        teacher_input: ``(..., teacher_features)``.
        teacher_weight: ``(C, teacher_features)``.
        linear_bias, teacher_bias: ``(C)``. All tensors are on one device. The student's are of one
            dtype, and so are the teacher's, which may be another one; in autocast any.
        beta: 0 is KL(teacher || student), 1 is KL(student || teacher). Between them the generalized
            Jensen-Shannon divergence of on-policy distillation (arXiv 2306.13649):
            ``beta * KL(teacher || m) + (1 - beta) * KL(student || m)`` with
            ``m = beta * teacher + (1 - beta) * student``.
        temperature: logits, capped ones where there is a cap, are divided by it, of both.
        softcap, teacher_softcap: logits are ``softcap * tanh(logits / softcap)``. None: they stay.
        chunk_size: how many classes a chunk has; a multiple of 256. None chooses it.
        debug: warn in backward where the gradient of ``linear_weight`` is whole, and why.

    Returns:
        The divergences ``(...)``, in nats, not multiplied by the square of ``temperature``; in
        float32, or in float64 where a tensor is of it.

    Raises:
        TypeError: something else is given for a tensor, as a module for its weight.
        ValueError: shapes, devices or dtypes do not fit each other, or a number is not allowed.
    """
    of_student = {"input": input, "linear_weight": linear_weight}
    of_teacher = {"teacher_input": teacher_input, "teacher_weight": teacher_weight}
    check_tensors(**of_student, **of_teacher)
    _check_shapes(input, linear_weight, teacher_input, teacher_weight)
    biases = ("linear_bias", linear_bias, of_student), ("teacher_bias", teacher_bias, of_teacher)
    for name, bias, layer in biases:
        if bias is None:
            continue
        check_tensors(**{name: bias})
        if bias.shape != linear_weight.shape[:1]:
            allowed = tuple(linear_weight.shape[:1])
            raise ValueError(f"{name} must have shape {allowed}, got {tuple(bias.shape)}")
        layer[name] = bias
    refuse_dtensors(**of_student, **of_teacher)
    _check_places(of_student, of_teacher)
    if not (isinstance(beta, (int, float)) and 0 <= beta <= 1):
        raise ValueError(f"beta must be a number from 0 to 1, got {beta!r}")
    check_temperature(temperature)
    check_softcap("softcap", softcap)
    check_softcap("teacher_softcap", teacher_softcap)
    check_chunk_size(chunk_size)
    student = _layer(input, linear_weight, linear_bias, temperature)
    with torch.no_grad():
        teacher = _layer(teacher_input.detach(), teacher_weight.detach(), teacher_bias, temperature)
    kind = _Kind(
        beta,
        None if softcap is None else softcap / temperature,
        None if teacher_softcap is None else teacher_softcap / temperature,
    )
    call = _not_traced if torch.compiler.is_compiling() else _divergence
    return call(student, teacher, kind, chunk_size, debug).view(input.shape[:-1])


class _Layer(NamedTuple):
    input: Tensor  # (N, in_features)
    weight: Tensor
    bias: Tensor | None


def _layer(input: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> _Layer:
    rows = input.reshape(input.shape[:-1].numel(), input.shape[-1])
    rows, bias = scaled(rows, bias, 1 / temperature)
    return _Layer(rows, weight, bias)


class _Kind(NamedTuple):
    beta: float
    softcap: float | None
    teacher_softcap: float | None


def _check_shapes(input: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> None:
    shapes = [tuple(t.shape) for t in (input, weight, teacher, teacher_weight)]
    fit = weight.dim() == teacher_weight.dim() == 2 and weight.shape[0] == teacher_weight.shape[0]
    for given, of in ((input, weight), (teacher, teacher_weight)):
        fit = fit and given.dim() > 0 and given.shape[-1] == of.shape[-1]
    if not fit or shapes[0][:-1] != shapes[2][:-1]:
        raise ValueError(
            "input, linear_weight, teacher_input and teacher_weight must have shapes (..., "
            "in_features), (C, in_features), (..., teacher_features) and (C, teacher_features), "
            f"got {', '.join(map(str, shapes))}"
        )


def _check_places(*layers: dict[str, Tensor]) -> None:
    """Raises ValueError where tensors are on several devices, or a layer's of several dtypes."""
    named = {name: tensor for layer in layers for name, tensor in layer.items()}
    if len({t.device for t in named.values()}) > 1:
        devices = ", ".join(f"{name} on {t.device}" for name, t in named.items())
        raise ValueError(f"all tensors must be on one device, got {devices}")
    for layer in layers:
        kinds = {t.dtype for t in layer.values()}
        if not all(kind.is_floating_point for kind in kinds) or (
            len(kinds) > 1 and not autocasts(named["input"])
        ):
            dtypes = ", ".join(f"{name} of {t.dtype}" for name, t in layer.items())
            raise ValueError(
                f"{', '.join(layer)} must have the same floating-point dtype outside of autocast, "
                f"got {dtypes}"
            )


def _divergence(
    student: _Layer, teacher: _Layer, kind: _Kind, chunk_size: int | None, debug: bool
) -> Tensor:
    if not (
        len(student.weight) and layer_is_chunked(*student, *teacher) and layer_is_chunked(*teacher)
    ):
        return _by_torch(student, teacher, kind)
    rows, weight, _ = student
    tokens, classes = shape_of_chunk(rows.shape[0], weight.shape, weight.is_cuda, _TENSORS)
    if chunk_size is not None:
        tokens, classes = rows.shape[0], chunk_size
    settings = Settings(logits_dtype(rows), classes, tokens, in_region(), debug)
    of_teacher = settings._replace(dtype=logits_dtype(teacher.input))
    held = _leaves.hold_accumulators(student)
    kl: Tensor = _Kl.apply(*student, *teacher, kind, settings, of_teacher)
    del held
    return kl


# A compiled graph ends here and begins again: in it the chunks would be traced one by one.
_not_traced: Callable[..., Tensor] = torch._disable_dynamo(_divergence)  # type: ignore[attr-defined]


def _log_probs(logits: Tensor, softcap: float | None, lse: Tensor | None = None) -> Tensor:
    """Returns (n, B), in float32 at least, for the ``lse`` (n) of all classes; None: these are
    all."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(-1) if lse is None else logits - lse[:, None]


def _part(a: Tensor, b: Tensor) -> Tensor:
    """Returns each class's contribution to KL(a || b), of log-probabilities."""
    p = a.exp()
    return torch.where(p == 0, 0.0, p * (a - b))


def _parts(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Returns what each class is of the divergence, of log-probabilities, and what the student's
    part of it is: the gradient needs its sum."""
    if beta == 0:
        part = _part(teacher, student)
        return part, part
    if beta == 1:
        part = _part(student, teacher)
        return part, part
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    part = (1 - beta) * _part(student, mixed)
    return part + beta * _part(teacher, mixed), part


def _by_torch(student: _Layer, teacher: _Layer, kind: _Kind) -> Tensor:
    """By torch's operators, with all logits; differentiable as often as one likes."""
    of_student = _log_probs(F.linear(*student), kind.softcap)
    # The gradient of a class of probability 0 is 0, which by these operators would be 0 * inf.
    of_student = torch.where(of_student == -torch.inf, of_student.detach(), of_student)
    with torch.no_grad():
        of_teacher = _log_probs(F.linear(*teacher), kind.teacher_softcap)
    return _parts(of_student, of_teacher, kind.beta)[0].sum(-1)


class _Pair:
    """A student's and a teacher's chunks, and of each token what is kept for backward."""

    def __init__(
        self,
        student: _Layer,
        teacher: _Layer,
        kind: _Kind,
        settings: Settings,
        of_teacher: Settings,
    ) -> None:
        self.kind = kind
        self.student = Chunks(*student, settings)
        self.teacher = Chunks(*teacher, of_teacher)

    def lses(self) -> tuple[Tensor, Tensor]:
        """Returns the log-sum-exps of the student's and of the teacher's logits."""
        caps = self.kind.softcap, self.kind.teacher_softcap
        found = []
        for chunks, cap in zip((self.student, self.teacher), caps, strict=True):
            layer = chunks.given, chunks.linear_weight, chunks.linear_bias
            target = torch.full((chunks.tokens,), -100, device=chunks.given.device)  # of no class
            options = Options("none", -100, 0.0, cap, lse=True)
            loss, _ = CrossEntropy(
                *layer, None, None, target, None, chunks.settings, options
            ).loss()
            found.append(loss.lse)
        student, teacher = found
        assert student is not None and teacher is not None
        return student, teacher

    def _each(self, student: Tensor, teacher: Tensor) -> Iterator[tuple[Chunk, Tensor, Tensor]]:
        """Yields the student's chunks with the log-probabilities of both."""
        for chunk, other in zip(self.student, self.teacher, strict=True):
            tokens = chunk.tokens
            a = _log_probs(chunk.logits, self.kind.softcap, student[tokens])
            b = _log_probs(other.logits, self.kind.teacher_softcap, teacher[tokens])
            yield chunk, a, b

    def divergence(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns it, the sums of the student's parts, and both log-sum-exps."""
        student, teacher = self.lses()
        total = torch.zeros_like(student + teacher)
        of_student = torch.zeros_like(total)
        for chunk, a, b in self._each(student, teacher):
            whole, part = _parts(a, b, self.kind.beta)
            total[chunk.tokens] += whole.sum(1)
            of_student[chunk.tokens] += part.sum(1)
        return total, of_student, student, teacher

    def replaced(
        self, grad: Tensor, of_student: Tensor, student: Tensor, teacher: Tensor
    ) -> Iterator[Chunk]:
        """Yields the student's chunks, their logits replaced by their gradients."""
        for chunk, a, b in self._each(student, teacher):
            tokens = chunk.tokens
            if self.kind.beta == 0:
                gradient = a.exp() - b.exp()
            else:
                part = _parts(a, b, self.kind.beta)[1]
                gradient = part - a.exp() * of_student[tokens, None]
            gradient = gradient * grad[tokens, None]
            if (cap := self.kind.softcap) is not None:
                gradient = gradient * (1 - ((a + student[tokens, None]) / cap).square())
            chunk.logits.copy_(gradient)
            yield chunk


class _Kl(torch.autograd.Function):
    """Keeps three numbers of each token; backward computes the logits of both again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        tensors, rest = arguments[:6], arguments[6:]
        with torch.autocast(tensors[0].device.type, enabled=False):
            pair = _Pair(_Layer(*tensors[:3]), _Layer(*tensors[3:]), *rest)
            total, *kept = pair.divergence()
        ctx.save_for_backward(*tensors, *kept)
        ctx.settings, ctx.rest = pair.student.settings, rest
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        student, teacher = _Layer(*ctx.saved_tensors[:3]), _Layer(*ctx.saved_tensors[3:6])
        kind, _, of_teacher = ctx.rest
        none = (None,) * 6
        with torch.autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled():
                cast_tensors: list[Any] = [
                    None if t is None else t.to(of_teacher.dtype) for t in teacher
                ]
                cast = _Layer(*cast_tensors)

                def results(*layer: Any) -> list[Tensor]:
                    return [_by_torch(_Layer(*layer), cast, kind)]

                return *head.differentiable(ctx, results, student, [grad]), *none
            pair = _Pair(student, teacher, *ctx.rest)
            chunks = pair.replaced(grad, *ctx.saved_tensors[6:])
            needed = *ctx.needs_input_grad[:3], False, False
            return *head.gradients(ctx, pair.student, chunks, needed)[:3], *none
