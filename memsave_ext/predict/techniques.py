"""Techniques that lower a peak, applied to a model and an optimizer that somebody else built."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from ..adam import Adam, AdamW, in_backward
from ..checkpoint import checkpoint_modules
from ..loss_head import patch_causal_lm
from ..memory.measure import Build, checked
from ..remat import remat_module
from .batch import remade


@dataclass(frozen=True)
class Techniques:
    """The techniques that are applied to a training step.

    Attributes:
        loss_head: whether a causal language model of Hugging Face makes its loss without logits.
        remat: whether the model runs in ``remat``.
        within_budget: whether it does so within the budget.
        checkpoint: whether the blocks of the model are checkpointed.
        optimizer_in_backward: whether the optimizer, of any kind, steps in backward.
        adam_in_backward: whether memsave_ext's Adam steps in backward in place of torch's.
        state_dtype: its ``state_dtype``.
    """

    loss_head: bool = False
    remat: bool = False
    within_budget: bool = False
    checkpoint: bool = False
    optimizer_in_backward: bool = False
    adam_in_backward: bool = False
    state_dtype: str | None = None

    @property
    def name(self) -> str:
        names = ["loss head in chunks"] * self.loss_head
        names += ["remat"] * self.remat
        names += ["remat within the budget"] * self.within_budget
        names += ["checkpoint by block"] * self.checkpoint
        names += ["optimizer in backward"] * self.optimizer_in_backward
        names += ["Adam in backward"] * self.adam_in_backward
        if self.state_dtype is not None:
            names.append(self.state_dtype.replace("bit", "-bit states"))
        return ", ".join(names) or "as built"

    @property
    def cost(self) -> str:
        costs = ["logits again"] * self.loss_head
        costs += ["cheap operators again"] * self.remat
        costs += ["operators again, as many as it takes"] * self.within_budget
        costs += ["a forward more"] * self.checkpoint
        costs += ["states are rounded"] * (self.state_dtype is not None)
        return ", ".join(costs) or "none"

    def applied(self, build: Build, budget: int | None = None) -> Build:
        """Returns a function that builds what ``build`` builds, with these techniques.

        ``budget``: bytes, for those that keep within it. The built function raises ValueError
        where they do not apply.
        """

        def built() -> object:
            model, optimizer, step = checked("fits: build", build())
            if self.loss_head:
                _head_in_chunks(model)
            if self.checkpoint:
                _checkpoint_blocks(model)
            if self.optimizer_in_backward:
                _step_in_backward(optimizer)
            if self.adam_in_backward:
                optimizer = self._step_in_place_of(optimizer)
            if self.remat or self.within_budget:
                step = _rematerialized(
                    model, optimizer, step, budget if self.within_budget else None
                )
            return model, optimizer, step

        return built  # type: ignore[return-value]

    def _step_in_place_of(self, optimizer: Optimizer | None) -> Optimizer:
        """Returns an optimizer that steps where the step that was built calls ``optimizer``."""
        kinds = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}
        ours = next(
            (ours for torchs, ours in kinds.items() if type(optimizer) in (torchs, ours)), None
        )
        if optimizer is None or ours is None:
            raise ValueError(f"the optimizer is {type(optimizer).__name__}, not Adam or AdamW")
        if isinstance(optimizer, Adam) and optimizer._in_backward:
            if self.state_dtype is None:
                raise ValueError("the optimizer steps in backward already")
            optimizer.remove_hooks()
        more = {} if self.state_dtype is None else {"state_dtype": self.state_dtype}
        made = remade(optimizer, ours, lambda p: p, in_backward=True, **more)
        optimizer.step, optimizer.zero_grad = made.step, made.zero_grad  # type: ignore[method-assign]
        return made


# The cheapest first: what is exact comes before what rounds, and then what costs no time.
ALL = (
    Techniques(),
    Techniques(optimizer_in_backward=True),
    Techniques(adam_in_backward=True),
    Techniques(loss_head=True),
    Techniques(loss_head=True, optimizer_in_backward=True),
    Techniques(remat=True),
    Techniques(remat=True, optimizer_in_backward=True),
    Techniques(within_budget=True),
    Techniques(within_budget=True, optimizer_in_backward=True),
    Techniques(checkpoint=True),
    Techniques(checkpoint=True, optimizer_in_backward=True),
    Techniques(checkpoint=True, adam_in_backward=True),
    Techniques(loss_head=True, checkpoint=True, optimizer_in_backward=True),
    Techniques(adam_in_backward=True, state_dtype="8bit"),
    Techniques(within_budget=True, adam_in_backward=True, state_dtype="8bit"),
    Techniques(checkpoint=True, adam_in_backward=True, state_dtype="8bit"),
    Techniques(checkpoint=True, adam_in_backward=True, state_dtype="4bit"),
)


def _head_in_chunks(model: nn.Module) -> None:
    try:
        patch_causal_lm(model)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _rematerialized(
    model: nn.Module,
    optimizer: Optimizer | None,
    step: Callable[[], object],
    budget: int | None,
) -> Callable[[], object]:
    handle = remat_module(model, budget=budget, optimizer=optimizer if budget is not None else None)

    def checked_step() -> None:
        step()
        try:
            handle.figures()
        except RuntimeError:
            raise ValueError("the step calls parts of the model, never the model itself") from None

    return checked_step


def _step_in_backward(optimizer: Optimizer | None) -> None:
    if optimizer is None:
        raise ValueError("the step has no optimizer")
    in_backward(optimizer)


def _checkpoint_blocks(model: nn.Module) -> None:
    chosen = {id(block) for block in blocks_of(model)}
    if not chosen:
        raise ValueError("the model has no list of blocks of one class")
    checkpoint_modules(model, lambda module: id(module) in chosen)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a model: modules of one class, of which several are in a list or
    sequence, and which hold more parameters than those of any other class."""
    found: defaultdict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        if not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            continue
        children = [
            child for child in module.children() if next(child.children(), None) is not None
        ]
        for kind, count in Counter(map(type, children)).items():
            if count > 1:
                found[kind] += [child for child in children if type(child) is kind]
    outermost = [
        [block for block in blocks if not any(_holds(outer, block) for outer in blocks)]
        for blocks in found.values()
    ]

    def parameters(blocks: list[nn.Module]) -> int:
        return sum(p.numel() for block in blocks for p in block.parameters())

    return max(outermost, key=parameters, default=[])


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return outer is not inner and any(module is inner for module in outer.modules())
