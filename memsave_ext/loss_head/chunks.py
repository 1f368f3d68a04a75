"""The arithmetic of the loss and its gradients, chunk by chunk over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import operators
from .reference import Found, Options

BLOCK = 256  # with as many classes, borders of chunks are borders of blocks of 8-bit states
LARGEST = 8192
FEWEST_ON_CUDA = 2048  # fewer would leave a GPU waiting for launches, and products too small for it
FEWEST_TOKENS = 1024  # in a block, where tokens are cut into blocks


class Settings(NamedTuple):
    """What a call depends on beside its tensors."""

    options: Options
    dtype: torch.dtype  # of logits
    result: torch.dtype  # of the loss
    classes: int  # in a chunk
    tokens: int  # in a chunk
    in_region: bool  # whether a checkpointed region is around the call
    debug: bool


class Rows(Protocol):
    """The step of a weight, in parts. Made by an optimizer that steps in backward."""

    def step(self, first: int, grad: Tensor) -> None:
        """Steps the rows from ``first`` on with their gradient."""
        ...


class Chunk(NamedTuple):
    classes: slice
    tokens: slice
    block: int  # of tokens, counted from 0
    weight: Tensor  # (B, D), in the logits' type
    logits: Tensor  # (n, B) of the n tokens
    distribution: tuple[Any, ...]  # the last arguments of both operators


def shape_of_chunk(tokens: int, weight: Sequence[int], on_cuda: bool) -> tuple[int, int]:
    """Returns how many tokens and classes make a chunk of logits, and of the weight's gradient,
    that together take about two fifths of the memory of a weight of this shape. On CUDA tokens are
    cut into blocks where all of them would leave few classes."""
    classes, features = weight
    room = 2 * classes * features // 5
    wanted = min(max(room // max(tokens + features, 1) // BLOCK * BLOCK, BLOCK), LARGEST)
    if not on_cuda or wanted >= FEWEST_ON_CUDA:
        return tokens, wanted
    fitting = max(room // FEWEST_ON_CUDA - features, FEWEST_TOKENS)
    blocks = max(-(-tokens // fitting), 1)
    return -(-tokens // blocks), FEWEST_ON_CUDA


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

    def blocks(self) -> list[slice]:
        """Those of tokens; one of none where there are no tokens."""
        step = max(self.settings.tokens, 1)
        starts = range(0, max(self.tokens, 1), step)
        return [slice(first, min(first + step, self.tokens)) for first in starts]

    def __iter__(self) -> Iterator[Chunk]:
        """Of the same classes all blocks of tokens, one after the other."""
        most = min(self.settings.classes, self.classes)
        memory = self.input.new_empty(min(self.settings.tokens, self.tokens) * most)
        for first in range(0, self.classes, self.settings.classes):
            part = slice(first, min(first + self.settings.classes, self.classes))
            weight = self.linear_weight[part].to(self.settings.dtype)
            bias = None
            if self.linear_bias is not None:
                bias = self.linear_bias[part].to(self.settings.dtype)
            for block, tokens in enumerate(self.blocks()):
                # The last chunk, and the last block, may be smaller.
                shape = tokens.stop - tokens.start, weight.shape[0]
                logits = memory[: shape[0] * shape[1]].view(shape)
                if bias is None:
                    torch.mm(self.input[tokens], weight.t(), out=logits)
                else:
                    torch.addmm(bias, self.input[tokens], weight.t(), out=logits)
                distribution = self._distribution(part, tokens)
                yield Chunk(part, tokens, block, weight, logits, distribution)

    def _distribution(self, part: slice, tokens: slice) -> tuple[Any, ...]:
        probabilities = None
        if self.probabilities is not None:
            probabilities = self.probabilities[tokens, part].to(self.wide).contiguous()
        weight = None if self.weight is None else self.weight[part]
        indices = None if self.indices is None else self.indices[tokens]
        softcap = self.options.softcap or 0.0
        return indices, probabilities, weight, part.start, self.keep, self.spread, softcap

    def loss(self) -> tuple[Found, Tensor]:
        """Returns what is found, and for each token the coefficients of its gradient."""
        of_blocks = []
        for tokens in self.blocks():
            sums = self.input.new_zeros((3, tokens.stop - tokens.start), dtype=self.wide)
            sums[0] = -torch.inf
            of_blocks.append(sums)
        totals = sums.new_zeros(self.tokens)  # of each token's distribution
        best = _Best(totals) if self.options.predicted else None
        for chunk in self:
            if best is not None:
                best.add(chunk)
            operators.run("reduce_", of_blocks[chunk.block], chunk.logits, *chunk.distribution)
            if (probabilities := chunk.distribution[1]) is not None:
                weight = 1.0 if self.weight is None else chunk.distribution[2]
                totals[chunk.tokens] += ((self.keep * probabilities + self.spread) * weight).sum(1)
        sums = torch.cat(of_blocks, 1) if len(of_blocks) > 1 else sums
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
        lse = maximum + log_sum if self.options.lse else None
        found = Found(loss, lse, None if best is None else best.place)
        return found, torch.stack([maximum, log_sum, of_softmax, scale])

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
        blocks = self.blocks()
        of_blocks = [coefficients[:, tokens].contiguous() for tokens in blocks]
        weight_sum, bias_sum = _Sum(len(blocks), self.wide), _Sum(len(blocks), self.wide)
        for chunk in self:
            gradient, input = chunk.logits, self.input[chunk.tokens]
            operators.run("gradient_", gradient, of_blocks[chunk.block], *chunk.distribution)
            if of_input is not None:
                _add_product(of_input[chunk.tokens], gradient, chunk.weight)
            if of_bias is not None:
                part = gradient.sum(0, dtype=self.wide)
                bias_sum.add(of_bias[chunk.classes], chunk.block, part)
            if of_weight is not None:
                weight_sum.add(of_weight[chunk.classes], chunk.block, gradient.t(), input)
            elif rows is not None:
                if piece is None:
                    piece = self.linear_weight.new_empty((gradient.shape[1], features))
                of_rows = piece[: gradient.shape[1]]
                weight_sum.add(of_rows, chunk.block, gradient.t(), input)
                if chunk.block == len(blocks) - 1:
                    rows.step(chunk.classes.start, of_rows)
        return [None if of_input is None else of_input.to(self.given.dtype), of_weight, of_bias]


class _Best:
    """The class with the largest logit of each token, the first one of several. A cap keeps the
    order of logits, so that they are compared without it."""

    def __init__(self, like: Tensor) -> None:
        self.value = torch.full_like(like, -torch.inf)
        self.place = torch.zeros_like(like, dtype=torch.int64)

    def add(self, chunk: Chunk) -> None:
        value, place = chunk.logits.max(1)
        best = self.value[chunk.tokens]
        larger = value > best
        self.place[chunk.tokens] = torch.where(
            larger, place + chunk.classes.start, self.place[chunk.tokens]
        )
        self.value[chunk.tokens] = torch.where(larger, value, best)


class _Sum:
    """Sums over the blocks of tokens, which are rounded to the result's type once."""

    def __init__(self, blocks: int, wide: torch.dtype) -> None:
        self.last, self.wide = blocks - 1, wide
        self.memory: Tensor | None = None

    def add(self, to: Tensor, block: int, left: Tensor, right: Tensor | None = None) -> None:
        """Adds ``left``, or its product with ``right``; ``to`` has the sum after the last block."""
        if self.last == 0:
            if right is None:
                to.copy_(left)
            else:
                _set_product(to, left, right)
            return
        total = to
        if to.dtype != self.wide:
            if self.memory is None:
                self.memory = to.new_empty(to.shape, dtype=self.wide)
            total = self.memory[: to.shape[0]]
        if block == 0:
            total.zero_()
        if right is None:
            total += left
        else:
            _add_product(total, left, right)
        if block == self.last and total is not to:
            to.copy_(total)


_adding: dict[tuple[torch.device, torch.dtype], bool] = {}


def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of this dtype can be added to a float32 sum without being rounded: by
    torch 2.11 and later on most GPUs. Tried once, and not while a graph is captured, which an error
    would end: without an eager step before it such products are rounded in the graph."""
    if torch.version.cuda is None or device.type != "cuda":
        return False
    known = _adding.get((device, dtype))
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        known = _adding[device, dtype] = _try_to_add(device, dtype)
    return known


def _try_to_add(device: torch.device, dtype: torch.dtype) -> bool:
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        _add_in_float32(ones.float(), ones, ones)
    except (AttributeError, RuntimeError, TypeError):  # of torch before 2.11, and of GPUs
        return False
    return True


def _add_in_float32(to: Tensor, left: Tensor, right: Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(to, left, right, torch.float32, out=to)


def _add_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    if to.dtype == left.dtype:
        to.addmm_(left, right)
    elif to.dtype == torch.float32 and _adds_in_float32(to.device, left.dtype):
        _add_in_float32(to, left, right)
    else:
        to += left @ right


def _set_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    if to.dtype == left.dtype:
        torch.mm(left, right, out=to)
    else:
        to.copy_(left @ right)
