"""The models of largest_model.py, and the ways to train them that it compares."""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn import functional as F

import memsave_ext as ms
from remat import checkpointed
from shared import adam_methods
from shared.adam_methods import FOREACH, FUSED, IN_BACKWARD, LR, METHODS, VisionTransformer, after
from shared.remat_models import TransformerBlock

VIT, GPT = "ViT", "GPT"
BLOCKS = nn.TransformerEncoderLayer, TransformerBlock


class LanguageModel(nn.Module):
    """A GPT whose head is not tied to its embedding."""

    def __init__(self, width: int, heads: int, depth: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, 0.0, post=False, causal=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x).flatten(0, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made of this type: converting them would need more memory than training."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(kind: str, options: argparse.Namespace, depth: int) -> nn.Module:
    if kind == VIT:
        return VisionTransformer(options.image, options.patch, options.width, options.heads, depth)
    shape = options.vocabulary, options.tokens
    return LanguageModel(options.width, options.heads, depth, *shape)


def parameters(kind: str, options: argparse.Namespace, depth: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(kind, options, depth).parameters())


Forward = Callable[[], Tensor]
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def _torch_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, target, options=options)


def plain(forward: Forward, model: nn.Module, budget: int) -> Tensor:
    return forward()


def in_remat(forward: Forward, model: nn.Module, budget: int) -> Tensor:
    with ms.remat(model):
        return forward()


def in_budget(forward: Forward, model: nn.Module, budget: int) -> Tensor:
    # A planned step may take 2 % more than its budget, and inputs do not count there.
    with ms.remat(model, budget=int(0.97 * budget)):
        return forward()


def compiled(share: float, forward: Forward, model: nn.Module, budget: int) -> Tensor:
    # It is read when the model is compiled, at its first call.
    with torch._functorch.config.patch(activation_memory_budget=share):
        return forward()


@dataclass(frozen=True)
class Way:
    """How to train: the optimizer, what is done to the model and around its forward."""

    method: adam_methods.Method
    change: Callable[[nn.Module], Any] = lambda model: model  # returns the model to call
    forward: Callable[[Forward, nn.Module, int], Tensor] = plain
    dtype: torch.dtype = torch.float32
    head: Head | None = None  # of the GPT: the loss without logits


def _checkpoint(model: nn.Module) -> nn.Module:
    ms.checkpoint_modules(model, BLOCKS)
    return model


def _theirs(model: nn.Module, selective: bool = False) -> nn.Module:
    for kind in BLOCKS:
        checkpointed(model, kind, 1, selective)
    return model


def _nested(model: nn.Module) -> nn.Module:
    """Pairs of blocks, inside of them each half of a block, and the MLP's in two pieces."""
    for block in model.blocks:  # type: ignore[union-attr]
        attend, mix = ("attend", "mix") if hasattr(block, "mix") else ("_sa_block", "_ff_block")
        setattr(block, attend, functools.partial(ms.checkpoint, getattr(block, attend)))
        setattr(block, mix, functools.partial(ms.checkpoint, getattr(block, mix), chunks=2))
    blocks = list(model.blocks)  # type: ignore[arg-type]
    pairs = (nn.Sequential(*blocks[i : i + 2]) for i in range(0, len(blocks), 2))
    model.blocks = nn.ModuleList(pairs)
    ms.checkpoint_modules(model, nn.Sequential)
    return model


def _low(bf16: str, bits: int) -> Way:
    method = after(
        lambda p: ms.AdamW(p, lr=LR, in_backward=True, bf16=bf16, state_dtype=f"{bits}bit")
    )
    return Way(method, _checkpoint, dtype=torch.bfloat16, head=ms.linear_cross_entropy)


NAIVE, OURS = "naive, foreach", "memsave_ext"
THEIRS = "torch's checkpoint, tutorial, chunked loss"  # all that torch has
REMAT, BUDGET = f"{OURS}, remat", f"{OURS}, remat in the budget"
LOWEST = f"{OURS}, bf16 stochastic, 4-bit states"
NESTED = f"{OURS}, nested, MLP in chunks"
TORCH_HEAD = _torch_head if hasattr(F, "linear_cross_entropy") else None  # torch 2.13 has it
TUTORIAL = METHODS["tutorial, fused"]  # fused, which has no temporaries
COMPILED = "torch.compile's budget, tutorial"
WAYS = {
    NAIVE: Way(METHODS[FOREACH]),
    "naive, fused": Way(METHODS[FUSED]),
    COMPILED: Way(
        TUTORIAL,
        lambda model: torch.compile(model, backend="aot_eager"),
        functools.partial(compiled, 0.25),
    ),
    "torch's checkpoint, tutorial": Way(TUTORIAL, _theirs),
    "torch's selective checkpoint, tutorial, chunked loss": Way(
        TUTORIAL, functools.partial(_theirs, selective=True), head=TORCH_HEAD
    ),
    THEIRS: Way(TUTORIAL, _theirs, head=TORCH_HEAD),
    OURS: Way(METHODS[IN_BACKWARD], _checkpoint, head=ms.linear_cross_entropy),
    REMAT: Way(METHODS[IN_BACKWARD], forward=in_remat, head=ms.linear_cross_entropy),
    BUDGET: Way(METHODS[IN_BACKWARD], forward=in_budget, head=ms.linear_cross_entropy),
    NESTED: Way(METHODS[IN_BACKWARD], _nested, head=ms.linear_cross_entropy),
    f"{OURS}, bf16 split8, 8-bit states": _low("split8", 8),
    LOWEST: _low("stochastic", 4),
}


class Trainer:
    """A model of one way, in the memory that ``budget`` bytes are of."""

    def __init__(
        self, kind: str, way: Way, depth: int, batch: int, budget: int, options: argparse.Namespace
    ) -> None:
        device = torch.device(options.device)
        torch.manual_seed(0)
        if ms._native.available:
            ms._native.module.remat_forget()  # as in a process of its own
        if kind == VIT:
            shape = batch, 3, options.image, options.image
            self.x = torch.randn(shape, device=device, dtype=way.dtype)
            self.y = torch.zeros(batch, dtype=torch.int64, device=device)
        else:
            self.x = torch.randint(options.vocabulary, (batch, options.tokens), device=device)
            self.y = self.x.roll(-1, 1).flatten()
        with device, default_dtype(way.dtype):
            self.model: Any = build(kind, options, depth)
        self.way, self.budget = way, budget
        self.head = way.head if kind == GPT else None
        self.called = way.change(self.model)
        self.run = way.method(list(self.model.parameters()))

    def loss(self) -> Tensor:
        if self.head is not None:
            return self.head(self.model.hidden(self.x), self.model.head.weight, self.y)
        return F.cross_entropy(self.called(self.x).float(), self.y)

    def step(self) -> None:
        self.run(lambda: self.way.forward(self.loss, self.model, self.budget).backward())

    def release(self) -> None:
        adam_methods.release(self.model.parameters())
