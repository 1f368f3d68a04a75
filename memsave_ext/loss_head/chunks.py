"""The arithmetic of the loss and its gradients, chunk by chunk over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import operators
from .reference import Options
from .rows import Rows

BLOCK = 256  # with as many classes, borders of chunks are borders of blocks of 8-bit states
LARGEST = 8192


class Settings(NamedTuple):
    """What a call depends on beside its tensors."""

    options: Options
    dtype: torch.dtype  # of logits
    result: torch.dtype  # of the loss
    classes: int  # in a chunk
    in_region: bool  # whether a checkpointed region is around the call
    debug: bool


class Chunk(NamedTuple):
    classes: slice
    weight: Tensor  # (B, D), in the logits' type
    logits: Tensor  # (N, B)
    distribution: tuple[Any, ...]  # the last arguments of both operators


def classes_of_chunk(tokens: int, weight: Tensor) -> int:
    """Returns how many classes make a chunk of logits, and of the weight's gradient, that together
    take about two fifths of the weight's memory."""
    classes, features = weight.shape
    wanted = 2 * classes * features // (5 * max(tokens + features, 1))
    return min(max(wanted // BLOCK * BLOCK, BLOCK), LARGEST)


class Chunks:
    """One pass over the chunks. ``target`` has class indices (N), or probabilities (N, C)."""

    def __init__(
        self,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        settings: Settings,
    ) -> None:
        self.settings, self.options = settings, settings.options
        self.given, self.linear_weight, self.linear_bias = input, linear_weight, linear_bias
        self.input = input.to(settings.dtype)
        self.wide = torch.promote_types(settings.dtype, torch.float32)
        self.weight = None if weight is None else weight.to(self.wide).contiguous()
        self.tokens, self.classes = input.shape[0], linear_weight.shape[0]
        self.indices = target.contiguous() if target.dim() == 1 else None
        self.probabilities = None if target.dim() == 1 else target
        self.keep = 1 - self.options.label_smoothing
        self.spread = self.options.label_smoothing / max(self.classes, 1)

    def __iter__(self) -> Iterator[Chunk]:
        most = min(self.settings.classes, self.classes)
        memory = self.input.new_empty(self.tokens * most)
        for first in range(0, self.classes, self.settings.classes):
            part = slice(first, min(first + self.settings.classes, self.classes))
            weight = self.linear_weight[part].to(self.settings.dtype)
            # The last chunk may be smaller.
            logits = memory[: self.tokens * weight.shape[0]].view(self.tokens, weight.shape[0])
            if self.linear_bias is None:
                torch.mm(self.input, weight.t(), out=logits)
            else:
                bias = self.linear_bias[part].to(self.settings.dtype)
                torch.addmm(bias, self.input, weight.t(), out=logits)
            yield Chunk(part, weight, logits, self._distribution(part))

    def _distribution(self, part: slice) -> tuple[Any, ...]:
        probabilities = None
        if self.probabilities is not None:
            probabilities = self.probabilities[:, part].to(self.wide).contiguous()
        weight = None if self.weight is None else self.weight[part]
        softcap = self.options.softcap or 0.0
        return self.indices, probabilities, weight, part.start, self.keep, self.spread, softcap

    def loss(self) -> tuple[Tensor, Tensor]:
        """Returns the loss, and for each token the coefficients of its gradient."""
        sums = self.input.new_zeros((3, self.tokens), dtype=self.wide)
        sums[0] = -torch.inf
        totals = sums.new_zeros(self.tokens)  # of each token's distribution
        for chunk in self:
            operators.run("reduce_", sums, chunk.logits, *chunk.distribution)
            if (probabilities := chunk.distribution[1]) is not None:
                weight = 1.0 if self.weight is None else chunk.distribution[2]
                totals += ((self.keep * probabilities + self.spread) * weight).sum(1)
        maximum, log_sum, dot = sums[0], sums[1].log(), sums[2]
        counted = torch.ones_like(totals)
        share = counted
        if self.indices is not None:
            counted = (self.indices != self.options.ignore_index).to(self.wide)
            share = counted
            if self.weight is not None:
                place = torch.where(counted != 0, self.indices, 0)
                share = torch.where(counted != 0, self.weight[place], 0.0)
            totals = self.keep * share
            if self.spread:  # else an infinite weight of another class has no part
                totals += self.spread * (self.classes if self.weight is None else self.weight.sum())
        losses = totals * log_sum - (dot - totals * maximum)
        # A sum of infinite parts, which all have the sign of `totals`.
        losses = torch.where(totals.isinf(), totals + 0 * (maximum + log_sum), losses)
        losses = torch.where(counted == 0, 0.0, losses)
        if self.options.reduction == "mean":
            count = share.sum()
            loss, scale = losses.sum() / count, torch.where(counted == 0, 0.0, 1 / count)
            if self.spread:  # torch divides the target's part by itself, too: 0 / 0 is NaN
                loss = loss + 0 / count
        else:
            loss, scale = losses if self.options.reduction == "none" else losses.sum(), counted
        # NaN where the softmax is: torch's gradients are then, of tokens that do not count, too.
        of_softmax = totals * scale + 0 * (maximum + log_sum)
        return loss, torch.stack([maximum, log_sum, of_softmax, scale])

    def gradients(
        self, coefficients: Tensor, needed: Sequence[bool], rows: Rows | None
    ) -> list[Tensor | None]:
        """Returns the gradients of input, weight and bias; None where none is needed, and where
        ``rows`` has stepped the weight."""
        features = self.given.shape[1]
        of_input = of_weight = of_bias = piece = None
        if needed[0]:
            of_input = self.input.new_zeros((self.tokens, features), dtype=self.wide)
        if needed[1] and rows is None:
            of_weight = torch.empty_like(self.linear_weight)
        if needed[2]:
            assert self.linear_bias is not None
            of_bias = torch.empty_like(self.linear_bias)
        for chunk in self:
            gradient = chunk.logits
            operators.run("gradient_", gradient, coefficients, *chunk.distribution)
            if of_input is not None:
                _add_product(of_input, gradient, chunk.weight)
            if of_bias is not None:
                of_bias[chunk.classes] = gradient.sum(0, dtype=self.wide)
            if of_weight is not None:
                _product(gradient.t(), self.input, of_weight[chunk.classes])
            elif rows is not None:
                if piece is None:
                    piece = self.linear_weight.new_empty((gradient.shape[1], features))
                of_rows = piece[: gradient.shape[1]]
                _product(gradient.t(), self.input, of_rows)
                rows.step(chunk.classes.start, of_rows)
        return [None if of_input is None else of_input.to(self.given.dtype), of_weight, of_bias]


def _add_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    if to.dtype == left.dtype:
        to.addmm_(left, right)
    else:
        to += left @ right


def _product(left: Tensor, right: Tensor, to: Tensor) -> None:
    if to.dtype == left.dtype:
        torch.mm(left, right, out=to)
    else:
        to.copy_(left @ right)
