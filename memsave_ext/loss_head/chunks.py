"""The logits of a linear layer, chunk by chunk over the vocabulary, and its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .vocabulary import Vocabulary

BLOCK = 256  # with as many classes, borders of chunks are borders of blocks of 8-bit states
LARGEST = 8192
FEWEST_ON_CUDA = 2048  # fewer would leave a GPU waiting for launches, and products too small for it
FEWEST_TOKENS = 1024  # in a block, where tokens are cut into blocks


class Settings(NamedTuple):
    """How a call goes over its logits."""

    dtype: torch.dtype  # of logits
    classes: int  # in a chunk
    tokens: int  # in a chunk
    in_region: bool  # whether a checkpointed region is around the call
    debug: bool
    vocabulary: Vocabulary | None = None  # None: the weight has all classes


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
    low_weight: Tensor | None  # (B, r), in the logits' type


def shape_of_chunk(
    tokens: int, weight: Sequence[int], on_cuda: bool, tensors: int = 1
) -> tuple[int, int]:
    """Returns how many tokens and classes make a chunk of logits, and of the weight's gradient,
    that together take about two fifths of the memory of a weight of this shape, where there are so
    many ``tensors`` of a chunk's logits at once. On CUDA tokens are cut into blocks where all of
    them would leave few classes."""
    classes, features = weight
    room = 2 * classes * features // 5
    wanted = room // max(tokens * tensors + features, 1) // BLOCK * BLOCK
    wanted = min(max(wanted, BLOCK), LARGEST)
    if not on_cuda or wanted >= FEWEST_ON_CUDA:
        return tokens, wanted
    fitting = max((room // FEWEST_ON_CUDA - features) // tensors, FEWEST_TOKENS)
    blocks = max(-(-tokens // fitting), 1)
    return -(-tokens // blocks), FEWEST_ON_CUDA


class Chunks:
    """One pass over the chunks, or several. With ``low`` (N, r) and ``low_weight`` (C, r) their
    product is added to the logits."""

    def __init__(
        self,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        settings: Settings,
        low: Tensor | None = None,
        low_weight: Tensor | None = None,
    ) -> None:
        self.settings = settings
        self.given, self.linear_weight, self.linear_bias = input, linear_weight, linear_bias
        self.given_low, self.low_weight = low, low_weight
        self.input = input.to(settings.dtype)
        self.low = None if low is None else low.to(settings.dtype)
        self.wide = torch.promote_types(settings.dtype, torch.float32)
        self.tokens, self.classes = input.shape[0], linear_weight.shape[0]

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
            weight = self._part(self.linear_weight, part)
            bias, low_weight = self._part(self.linear_bias, part), self._part(self.low_weight, part)
            assert weight is not None
            for block, tokens in enumerate(self.blocks()):
                # The last chunk, and the last block, may be smaller.
                shape = tokens.stop - tokens.start, weight.shape[0]
                logits = memory[: shape[0] * shape[1]].view(shape)
                if self.low is None or low_weight is None:
                    _set_logits(logits, self.input[tokens], weight, bias)
                else:  # first, as it is small: rounded to 16 bits, it is off by little
                    _set_logits(logits, self.low[tokens], low_weight, bias)
                    logits.addmm_(self.input[tokens], weight.t())
                yield Chunk(part, tokens, block, weight, logits, low_weight)

    def _part(self, of: Tensor | None, classes: slice) -> Tensor | None:
        return None if of is None else of[classes].to(self.settings.dtype)

    def gradients(
        self, chunks: Iterable[Chunk], needed: Sequence[bool], rows: Rows | None
    ) -> list[Tensor | None]:
        """Returns the gradients of input, weight, bias, ``low`` and ``low_weight``; None where none
        is ``needed``, and where ``rows`` has stepped the weight. ``chunks``: all, with gradients in
        place of logits."""
        of_input = of_weight = of_bias = of_low = of_low_weight = piece = None
        if needed[0]:
            of_input = self.input.new_zeros(self.input.shape, dtype=self.wide)
        if needed[1] and rows is None:
            of_weight = torch.empty_like(self.linear_weight)
        if needed[2]:
            assert self.linear_bias is not None
            of_bias = torch.empty_like(self.linear_bias)
        # These are narrow: with one column after the other, products on CPUs take a quarter.
        if needed[3]:
            assert self.low is not None
            of_low = self.low.new_zeros(self.low.shape[::-1], dtype=self.wide).t()
        if needed[4]:
            assert self.low_weight is not None
            of_low_weight = self.low_weight.new_empty(self.low_weight.shape[::-1]).t()
        blocks = len(self.blocks())
        weight_sum, bias_sum, low_sum = (_Sum(blocks, self.wide) for _ in range(3))
        for chunk in chunks:
            gradient, input = chunk.logits, self.input[chunk.tokens]
            if of_input is not None:
                _add_product(of_input[chunk.tokens], gradient, chunk.weight)
            if of_low is not None and chunk.low_weight is not None:
                _add_product(of_low[chunk.tokens], gradient, chunk.low_weight)
            if of_bias is not None:
                part = gradient.sum(0, dtype=self.wide)
                bias_sum.add(of_bias[chunk.classes], chunk.block, part)
            if of_low_weight is not None and self.low is not None:
                to = of_low_weight[chunk.classes]
                low_sum.add(to, chunk.block, gradient.t(), self.low[chunk.tokens])
            if of_weight is not None:
                weight_sum.add(of_weight[chunk.classes], chunk.block, gradient.t(), input)
            elif rows is not None:
                if piece is None:
                    piece = self.linear_weight.new_empty((gradient.shape[1], input.shape[1]))
                of_rows = piece[: gradient.shape[1]]
                weight_sum.add(of_rows, chunk.block, gradient.t(), input)
                if chunk.block == blocks - 1:
                    rows.step(chunk.classes.start, of_rows)
        if of_input is not None:
            of_input = of_input.to(self.given.dtype)
        if of_low is not None and self.given_low is not None:
            of_low = of_low.to(self.given_low.dtype).contiguous()
        if of_low_weight is not None:
            of_low_weight = of_low_weight.contiguous()
        return [of_input, of_weight, of_bias, of_low, of_low_weight]


def _set_logits(to: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(input, weight.t(), out=to)
    else:
        torch.addmm(bias, input, weight.t(), out=to)


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
