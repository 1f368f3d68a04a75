"""Techniques that lower a peak, applied to a model and an optimizer that somebody else built."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..adam import Adam, AdamW
from ..adam.in_place import become, step_in_backward
from ..adam.own_optimizer import OwnStep
from ..checkpoint import checkpoint_modules
from ..elsewhere.weights import weights_on
from ..fakes.mode import is_cuda, predicts
from ..loss_head import patch_causal_lm, patch_seq2seq_lm
from ..memory.measure import Build, checked
from ..remat import remat_module
from ..remat.modules import RematHandle
from ..remat.offload import Offload
from ..shared.modules import device_of
from ..shared.warn import warn
from ..store.folder import is_in_memory


@dataclass(frozen=True)
class Techniques:
    """The techniques that are applied to a training step.

    Attributes:
        loss_head: whether a language model of Hugging Face makes its loss without logits.
        remat: whether the model runs in ``remat``.
        within_budget: whether it does so within the budget.
        offload: whether what it would be slower to recompute is moved elsewhere.
        checkpoint: whether the blocks of the model are checkpointed.
        optimizer_in_backward: whether the optimizer, of any kind, steps in backward.
        adam_in_backward: whether memsave_ext's Adam steps in backward in place of torch's.
        state_dtype: its ``state_dtype``.
        gradients_elsewhere: whether this optimizer does not step in backward, and gradients lie
            elsewhere until it steps.
        states_elsewhere: whether the states of memsave_ext's Adam lie elsewhere between steps.
        weights_elsewhere: whether the model's weights lie elsewhere.
    """

    loss_head: bool = False
    remat: bool = False
    within_budget: bool = False
    offload: bool = False
    checkpoint: bool = False
    optimizer_in_backward: bool = False
    adam_in_backward: bool = False
    state_dtype: str | None = None
    gradients_elsewhere: bool = False
    states_elsewhere: bool = False
    weights_elsewhere: bool = False

    @property
    def name(self) -> str:
        names = ["loss head in chunks"] * self.loss_head
        names += ["remat"] * self.remat
        names += ["remat within the budget"] * self.within_budget
        names += ["offload"] * self.offload
        names += ["checkpoint by block"] * self.checkpoint
        names += ["gradients elsewhere"] * self.gradients_elsewhere
        if self.steps_in_backward:
            names += ["optimizer in backward"] * self.optimizer_in_backward
            names += ["Adam in backward"] * self.adam_in_backward
        if self.state_dtype is not None:
            names.append(self.state_dtype.replace("bit", "-bit states"))
        names += ["states elsewhere"] * self.states_elsewhere
        names += ["weights elsewhere"] * self.weights_elsewhere
        return ", ".join(names) or "as built"

    @property
    def cost(self) -> str:
        costs = ["logits computed again, None in training"] * self.loss_head
        costs += ["cheap operators computed again"] * self.remat
        again = "computed again or results moved" if self.offload else "computed again"
        costs += [f"operators {again}, as few as needed"] * self.within_budget
        costs += ["one more forward"] * self.checkpoint
        costs += ["gradients copied out and back"] * self.gradients_elsewhere
        costs += ["rounded states"] * (self.state_dtype is not None)
        costs += ["states copied in and out"] * self.states_elsewhere
        costs += ["weights read and written"] * self.weights_elsewhere
        return ", ".join(costs) or "none"

    @property
    def row(self) -> tuple[str, str, str]:
        """What a row says of them."""
        return self.name, self.cost, self.bits

    @property
    def bits(self) -> str:
        """Whether results keep their bits."""
        if self.state_dtype is not None:
            return "no"
        # In exact arithmetic they are the same: sums are in another order, and this package's Adam
        # rounds elsewhere than torch's does.
        return "but for rounding" if self.loss_head or self.adam_in_backward else "yes"

    @property
    def changes_forward(self) -> bool:
        """Whether a forward of the step may need less than one of an evaluation, which as built
        keeps less."""
        return self.loss_head or self.remat or self.within_budget or self.checkpoint

    @property
    def steps_in_backward(self) -> bool:
        changes = self.optimizer_in_backward or self.adam_in_backward
        return changes and not self.gradients_elsewhere

    @property
    def keeps_elsewhere(self) -> bool:
        return self.gradients_elsewhere or self.states_elsewhere or self.weights_elsewhere

    def for_loops_that_clip(self) -> Techniques | None:
        """Returns these techniques with gradients elsewhere in place of a step in backward; None
        where others do as much."""
        as_torchs = self.state_dtype is None and not self.states_elsewhere
        if not self.steps_in_backward or (self.adam_in_backward and as_torchs):
            return None
        return replace(self, gradients_elsewhere=True)

    def apply(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        undo: ExitStack,
        budget: int | None = None,
        *,
        method: str = "forward",
        place: Offload | None = None,
        **options: Any,
    ) -> RematHandle | None:
        """Applies these techniques to a model and its optimizer, in place.

        Args:
            model, optimizer: what they are applied to.
            undo: takes back what was done, also where this raises.
            budget: bytes, for those that keep within it.
            method: the model's method that runs its forward and is called by the step.
            place: where what is moved goes, as ``offload`` of :func:`remat`.
            **options: of an optimizer that steps in backward.

        Returns:
            remat's handle, where it is among them.

        Raises:
            ValueError: they do not apply.
        """
        # What DistributedDataParallel does around its module is not the same in its second step.
        if isinstance(model, DistributedDataParallel):
            model = model.module
        if self.loss_head:
            undo.callback(_head_in_chunks(model))
        if self.checkpoint:
            undo.callback(_checkpoint_blocks(model))
        if self.gradients_elsewhere:
            options["grads_on"] = _place_on("gradients", model, place)
        if self.weights_elsewhere:
            weights = weights_on(model, _place_on("weights", model, place))
            undo.callback(weights.remove)
            if budget is not None:
                budget = max(budget - weights.beside, 1)
        if self.optimizer_in_backward:
            if optimizer is None:
                raise ValueError("the step has no optimizer")
            undo.callback(step_in_backward(optimizer, **options))
        if self.adam_in_backward:
            if self.states_elsewhere:
                options["states_on"] = _place_on("states", model, place)
            undo.callback(self._become_ours(optimizer, options))
        if not (self.remat or self.within_budget):
            return None
        if self.offload and place is None:
            raise ValueError("this technique needs offload=, a place that memory may be moved to")
        block = remat_module(
            model,
            budget=budget if self.within_budget else None,
            optimizer=optimizer if self.within_budget else None,
            offload=place if self.offload else None,
            _method=method,
        )
        undo.callback(block.remove)
        return block

    def applied(
        self,
        build: Build,
        budget: int | None = None,
        method: str = "forward",
        place: Offload | None = None,
    ) -> Build:
        """Returns a function that builds what ``build`` builds, with these techniques.

        ``budget``, ``method`` and ``place``: as for :meth:`apply`. The built function raises
        ValueError where they do not apply.
        """

        def built() -> object:
            model, optimizer, step = checked("fits: build", build())
            undo = ExitStack()  # the child ends as it is
            block = self.apply(model, optimizer, undo, budget, method=method, place=place)
            return model, optimizer, step if block is None else _checked_step(step, block)

        return built  # type: ignore[return-value]

    def _become_ours(
        self, optimizer: Optimizer | None, options: dict[str, Any]
    ) -> Callable[[], None]:
        """Makes torch's Adam or AdamW this package's, which steps in backward."""
        kinds = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}
        ours = next(
            (ours for torchs, ours in kinds.items() if type(optimizer) in (torchs, ours)), None
        )
        if isinstance(optimizer, OwnStep):
            raise ValueError("in_backward() has taken the optimizer already")
        if optimizer is None or ours is None:
            raise ValueError(f"the optimizer is {type(optimizer).__name__}, not Adam or AdamW")
        if isinstance(optimizer, Adam) and optimizer.in_backward and self.state_dtype is None:
            raise ValueError("the optimizer steps in backward already")
        more = {} if self.state_dtype is None else {"state_dtype": self.state_dtype}
        return become(optimizer, ours, in_backward=self.steps_in_backward, **more, **options)


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
    Techniques(loss_head=True, within_budget=True, optimizer_in_backward=True),
    Techniques(within_budget=True, offload=True),
    Techniques(within_budget=True, offload=True, optimizer_in_backward=True),
    Techniques(checkpoint=True),
    Techniques(checkpoint=True, optimizer_in_backward=True),
    Techniques(checkpoint=True, adam_in_backward=True),
    Techniques(loss_head=True, checkpoint=True, optimizer_in_backward=True),
    Techniques(adam_in_backward=True, state_dtype="8bit"),
    Techniques(within_budget=True, adam_in_backward=True, state_dtype="8bit"),
    Techniques(loss_head=True, within_budget=True, adam_in_backward=True, state_dtype="8bit"),
    Techniques(checkpoint=True, adam_in_backward=True, state_dtype="8bit"),
    Techniques(checkpoint=True, adam_in_backward=True, state_dtype="4bit"),
    # What is moved through a disk or the bus in each step comes last, although it is exact.
    Techniques(within_budget=True, adam_in_backward=True, states_elsewhere=True),
    Techniques(within_budget=True, optimizer_in_backward=True, weights_elsewhere=True),
    Techniques(
        within_budget=True, adam_in_backward=True, states_elsewhere=True, weights_elsewhere=True
    ),
    Techniques(
        within_budget=True, offload=True, adam_in_backward=True, states_elsewhere=True,
        weights_elsewhere=True,
    ),
    Techniques(
        loss_head=True, within_budget=True, adam_in_backward=True, states_elsewhere=True,
        weights_elsewhere=True,
    ),
)  # fmt: skip


def named(who: str, name: object) -> Techniques:
    """Returns the techniques of a name.

    Raises:
        ValueError: there are none.
    """
    by_name = {
        one.name: one
        for techniques in ALL
        for one in (techniques, techniques.for_loops_that_clip())
        if one is not None
    }
    if isinstance(name, str) and name in by_name:
        return by_name[name]
    names = ", ".join(map(repr, by_name))
    raise ValueError(f"{who}: technique must be None or one of {names}; got {name!r}")


def place_elsewhere(on_cuda: bool, offload: Offload | None) -> str | None:
    """Returns where gradients, states and weights lie, as ``grads_on``: in the host's memory, or
    for a model on the CPU in the folder of ``offload``, else the system's for temporary files.

    None where there is no such place: that folder is in memory.
    """
    if on_cuda:
        return "cpu"
    named = offload is not None and offload != "cpu"
    folder = os.fspath(offload) if named else tempfile.gettempdir()  # type: ignore[arg-type]
    return folder if sys.platform == "linux" and (named or not is_in_memory(folder)) else None


def _place_on(what: str, model: nn.Module, offload: Offload | None) -> str:
    is_prediction = what == "gradients" and predicts()
    where = "cpu" if is_prediction else place_elsewhere(is_cuda(device_of(model)), offload)
    if where is None:
        raise ValueError(
            f"{what} can lie in a folder on a disk only, and the system's for temporary files, "
            f"{tempfile.gettempdir()}, is none: pass offload=FOLDER, or set TMPDIR"
        )
    return where


def technique_of(who: str, technique: str | None, means: str | None) -> str | None:
    """Returns the name of a technique, also where it was given as ``means``, as until 0.3."""
    if means is None:
        return technique
    if technique is not None:
        raise TypeError(
            f"{who}: means is the old name of the argument technique: pass technique only"
        )
    warn_of_means(who)
    return means


def warn_of_means(who: str) -> None:
    warn(
        f"memsave_ext: means of {who} is called technique now, and later versions will not know "
        "the old name",
        FutureWarning,
    )


def _head_in_chunks(model: nn.Module) -> Callable[[], None]:
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    try:
        return (patch_seq2seq_lm if has_encoder else patch_causal_lm)(model).remove
    except TypeError as error:
        raise ValueError(str(error)) from None


def _checkpoint_blocks(model: nn.Module) -> Callable[[], None]:
    chosen = {id(block) for block in blocks_of(model)}
    if not chosen:
        raise ValueError("the model has no list of blocks of one class")
    return checkpoint_modules(model, lambda module: id(module) in chosen).remove


def _checked_step(step: Callable[[], object], block: RematHandle) -> Callable[[], object]:
    def checked_step() -> None:
        step()
        try:
            block.figures()
        except RuntimeError:
            raise ValueError("the step calls parts of the model, never the model itself") from None

    return checked_step


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
