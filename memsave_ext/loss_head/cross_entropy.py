"""The cross entropy and the gradients of its logits, chunk by chunk over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import operators
from .chunks import Chunk, Chunks, Settings
from .reference import Found, Options
from .vocabulary import Vocabulary


class CrossEntropy(Chunks):
    """``target`` has class indices (N), or probabilities (N, C)."""

    def __init__(
        self,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        low: Tensor | None,
        low_weight: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        settings: Settings,
        options: Options,
    ) -> None:
        super().__init__(input, linear_weight, linear_bias, settings, low, low_weight)
        self.options = options
        self.weight = None if weight is None else weight.to(self.wide).contiguous()
        self.indices = target.contiguous() if target.dim() == 1 else None
        self.probabilities = None if target.dim() == 1 else target
        self.keep = 1 - options.label_smoothing
        self.of = settings.vocabulary or Vocabulary(self.classes)
        self.spread = options.label_smoothing / max(self.of.classes, 1)

    def _distribution(self, chunk: Chunk) -> tuple[Any, ...]:
        """Returns the last arguments of both operators."""
        probabilities = None
        if self.probabilities is not None:
            probabilities = self.probabilities[chunk.tokens, chunk.classes]
            probabilities = probabilities.to(self.wide).contiguous()
        first, stop = (self.of.first + place for place in (chunk.classes.start, chunk.classes.stop))
        weight = None if self.weight is None else self.weight[first:stop]
        indices = None if self.indices is None else self.indices[chunk.tokens]
        softcap = self.options.softcap or 0.0
        return indices, probabilities, weight, first, self.keep, self.spread, softcap

    def loss(self) -> tuple[Found, Tensor]:
        """Returns what is found, and the coefficients of each token's gradient, in a fifth row its
        entropy where that is asked for."""
        of_blocks = []
        for tokens in self.blocks():
            rows = 3 + self.options.entropy
            sums = self.input.new_zeros((rows, tokens.stop - tokens.start), dtype=self.wide)
            sums[0] = -torch.inf
            of_blocks.append(sums)
        totals = sums.new_zeros(self.tokens)  # of each token's distribution
        best = _Best(totals, self.of.first) if self.options.predicted else None
        for chunk in self:
            if best is not None:
                best.add(chunk)
            distribution = self._distribution(chunk)
            operators.run("reduce_", of_blocks[chunk.block], chunk.logits, *distribution)
            if (probabilities := distribution[1]) is not None:
                weight = 1.0 if self.weight is None else distribution[2]
                totals[chunk.tokens] += ((self.keep * probabilities + self.spread) * weight).sum(1)
        sums = torch.cat(of_blocks, 1) if len(of_blocks) > 1 else sums
        if self.of.group is not None:
            assert self.indices is not None
            self.of.combine_(sums, self.indices)
            if best is not None:
                self.of.choose_(best.value, best.place)
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
                totals += self.spread * (
                    self.of.classes if self.weight is None else self.weight.sum()
                )
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
        lse = maximum + log_sum if self.options.lse else None
        coefficients = [maximum, log_sum, of_softmax, scale]
        entropy = None
        if self.options.entropy:  # a sum of two numbers that are not negative
            entropy = log_sum - sums[3] / sums[1]
            coefficients.append(entropy)
        found = Found(loss, lse, None if best is None else best.place, entropy)
        return found, torch.stack(coefficients)

    def replaced(self, coefficients: Tensor) -> Iterator[Chunk]:
        """Yields the chunks, their logits replaced by their gradients."""
        of_blocks = [coefficients[:, tokens].contiguous() for tokens in self.blocks()]
        for chunk in self:
            arguments = of_blocks[chunk.block], *self._distribution(chunk)
            operators.run("gradient_", chunk.logits, *arguments)
            yield chunk


class _Best:
    """The class with the largest logit of each token, the first one of several. A cap keeps the
    order of logits, so that they are compared without it."""

    def __init__(self, like: Tensor, first: int) -> None:
        self.first = first  # of the classes of the chunks
        self.value = torch.full_like(like, -torch.inf)
        self.place = torch.zeros_like(like, dtype=torch.int64)

    def add(self, chunk: Chunk) -> None:
        value, place = chunk.logits.max(1)
        best = self.value[chunk.tokens]
        larger = value > best
        self.place[chunk.tokens] = torch.where(
            larger, place + self.first + chunk.classes.start, self.place[chunk.tokens]
        )
        self.value[chunk.tokens] = torch.where(larger, value, best)
