"""Decides how an optimizer's parameters are stepped: in backward, or all together after it.

A collector has hooks on the parameters, collects their gradients and carries out what is decided
here. There are two that do the same, in csrc/adam/collector.h and, without the native part, in
fallback/collector.py.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _native, _parts
from ..elsewhere import gradients
from ..shared import dtensor
from . import errors, modes, rules, shards, states
from .fallback import operator
from .fallback.collector import Collector
from .norms import FoundInf, GradNorm, Scaling, grad_scale_of
from .state_machine import Block, Event, State, StateMachine

if _native.module:
    called = (
        dtensor.local_tensor, dtensor.local_gradient, dtensor.leave_buffer, shards.sharding_of,
        states.make_state, states.publish_states, rules.is_complete, operator.check_named,
        operator.options_of,
    )  # fmt: skip
    _native.module.register_functions({function.__name__: function for function in called})
    _native.module.register_functions({"adam_errors": errors})

# What a collector does with complete gradients, by the kind of block that is open. The first of
# them decides.
_INTAKES = {Block.KEEP: "keep", Block.DROP: "drop", Block.ACCUMULATE: "sum"}


def owner(param: Tensor) -> Any:
    """Returns the optimizer that takes gradients of ``param`` in backward, or None."""
    found = _native.module.AdamCollector.owner(param) if _native.module else None
    found = Collector.owner(param) if found is None else found
    return gradients.owner(param) if found is None else found


class Stepper:
    """The steps of one optimizer, to which it keeps a weak reference.

    One step is always open: the next begins where one ends. The collector's lock is held where what
    backwards of other threads see is changed.

    Args:
        small_bytes, bucket_bytes: gradients of fewer than ``small_bytes`` wait in buckets until
            there are ``bucket_bytes`` of them, or backward ends.
        own_step: the optimizer is not this package's, and steps by its own ``step()``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, small_bytes: int, bucket_bytes: int, own_step: bool
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._own_step = own_step
        self._machine = StateMachine()
        self._blocks: Counter[Block] = Counter()  # how many of each kind are open
        self._norm: GradNorm | None = None  # of this step, where all gradients are measured
        self._last_norm: Tensor | None = None
        self._found_inf = FoundInf()
        self._last_found_inf: list[Tensor] = []
        native = _parts.native("adam")
        kind: Any = native.AdamCollector if native else Collector
        self._collector = kind(self, small_bytes, bucket_bytes, own_step)
        self.attach, self.detach = self._collector.attach, self._collector.detach
        self.release = self._collector.release
        self.lost, self.hand_to_ddp = self._collector.lost, self._collector.hand_to_ddp
        self.count_used = self._collector.count_used
        self.drop_stale_low_part = self._collector.drop_stale_low_part

    # called by the optimizer

    def accumulate(self, enabled: bool) -> None:
        self._count(Block.ACCUMULATE, enabled)

    def pause(self, enabled: bool, keep: bool) -> None:
        self._count(Block.KEEP if keep else Block.DROP, enabled)

    def _count(self, block: Block, opens: bool) -> None:
        with self._collector:
            if opens and block is not Block.DROP:
                self._machine.check(Event.KEEP_GRADIENTS)
            self._blocks[block] += 1 if opens else -1
            self._collector.set_intake(self.intake())

    def intake(self) -> str:
        """Returns what becomes of complete gradients in the blocks that are open."""
        intakes = (intake for block, intake in _INTAKES.items() if self._blocks[block])
        return next(intakes, "step")

    def begin_norm_pass(self) -> None:
        """Gradients of backwards from here on are measured and dropped."""
        with self._collector:
            if self._blocks[Block.ACCUMULATE] or self._collector.any_gradient():
                raise errors.measures_sums()
            self._handle(Event.BEGIN_NORM_PASS)
            self._norm = GradNorm()

    def end_norm_pass(self, max_norm: float | None) -> None:
        """The step that follows is clipped to ``max_norm``; None: the pass is forgotten."""
        with self._collector:
            norm = self._norm  # None where zero_grad() has ended the step of the pass
            finishes = max_norm is not None
            try:
                if max_norm is not None and norm is not None:
                    norm.finish(max_norm, self._grad_scale(), self._sharded())
            except BaseException:  # of a collective, for example
                finishes = False
                raise
            finally:
                self._handle(Event.FINISH_NORM_PASS if finishes else Event.DROP_NORM_PASS)
                if norm is not None and not finishes:
                    self._norm = None
                    self._collector.next_step()

    def step(self, max_norm: float, unscaled: bool) -> int:
        """Steps the parameters that have a gradient in ``.grad``, and ends the step.

        Args:
            max_norm: what all gradients together are clipped to; 0: not.
            unscaled: the gradients are not multiples of the loss scale any more.

        Returns:
            How many parameters have been stepped since the last call, backwards included.
        """
        with self._collector as collector:
            self._machine.check(Event.END_STEP)
            if collector.runs_backward():
                raise errors.backward_runs("step()")
            optimizer = self.optimizer()
            if optimizer is not None and (max_norm > 0 or self._norm is not None):
                modes.refuse_two_norms(optimizer.param_groups)
            scale = grad_scale_of(optimizer)
            if unscaled and scale is not None:
                scale = torch.ones_like(scale)
            batches = collector.remaining("never" if max_norm > 0 else self._asks(scale))
            if max_norm > 0:
                self._clip(batches, max_norm, scale)
            done: list[Any] = []
            try:
                for batch in batches:
                    self._step(batch, scale)
                    done.append(batch)
            except BaseException:
                if done:
                    self._handle(Event.STEPPED)
                raise
            finally:
                collector.drop_used(done)
            return sum(map(len, done)) + self._end_step(Event.END_STEP)

    def zero_grad(self, to_none: bool) -> None:
        if to_none:
            self._collector.drop_gradients()
        if self._machine.state is State.FAILED:
            with self._collector:
                self._end_step(Event.ACKNOWLEDGE)

    def begin_loading(self) -> None:
        """Called before states are loaded; raises while a backward steps with the old ones."""
        if self._collector.runs_backward():
            raise errors.backward_runs("load_state_dict()")

    def end_loading(self) -> None:
        """Forgets all that the open step has come to; an open norm pass stays open."""
        with self._collector:
            self._collector.forget_gradients()
            self._end_step(Event.LOAD)
            if self._machine.state is State.MEASURING:
                self._norm = GradNorm()

    def grad_norm(self) -> Tensor | None:
        """Returns the norm of all gradients in the last step that has measured it."""
        norm = None if self._norm is None else self._norm.value
        return self._last_norm if norm is None else norm

    def note_norm(self, norm: Tensor) -> None:
        """Notes the norm of all gradients in the step that ends next, where others clip to it."""
        self._last_norm = norm

    def found_inf(self) -> list[Tensor]:
        """Returns, of the last step with a loss scale, a scalar for each device: 1 where a gradient
        was not finite."""
        return self._last_found_inf

    # called by DistributedDataParallel's communication hook

    def begin_reduced(self, params: list[Tensor]) -> Any:
        """Called before these gradients are reduced. Returns the backward whose step_reduced()
        takes them then; None where the gradients are dropped."""
        if self._blocks[Block.KEEP]:
            raise errors.keeps_reduced()
        if self._blocks[Block.DROP]:
            return None
        backward = self._collector.current_backward()
        if self._blocks[Block.ACCUMULATE] or (backward is not None and backward.action == "keep"):
            raise errors.accumulates_reduced()
        self._collector.check_reduced(params)
        return backward

    # called by the collector

    def begin_backward(self) -> tuple[Any, str, str] | None:
        """Returns the optimizer, what the backward does with its gradients ("step", "measure" or
        "keep"), and which shards ask others; None where the optimizer is gone."""
        optimizer: Any = self.optimizer()
        if optimizer is None:
            return None
        if self._norm is not None:
            modes.refuse_two_norms(optimizer.param_groups)
        if self._machine.state is State.MEASURING:
            return optimizer, "measure", "never"
        return optimizer, optimizer._on_gradients(), self._asks(grad_scale_of(optimizer))

    def check_kept(self) -> None:
        """Raises where gradients cannot be kept in ``.grad`` now."""
        self._machine.check(Event.KEEP_GRADIENTS)

    def check_gradient(self, name: str, stepped: bool, measured: bool) -> None:
        """Raises where the gradient of this parameter cannot be used now.

        Args:
            stepped, measured: what has been done with an earlier one in this step.
        """
        self._machine.check(Event.USE_GRADIENT)
        if measured if self._machine.state is State.MEASURING else stepped:
            raise errors.second_gradient(name)
        if self._machine.state is State.CLIPPING and not measured:
            raise errors.not_measured(name)

    def uses_remaining(self, name: str, stepped: bool, by_ddp: bool, unreduced: bool) -> bool:
        """Returns whether step() uses what is in the parameter's ``.grad``.

        Args:
            stepped: in this step.
            by_ddp: DistributedDataParallel reduces the gradient. It has written it to ``.grad``
                after the step, unless it is ``unreduced``.
        """
        if stepped and by_ddp:
            return False
        if unreduced:
            raise errors.not_reduced(name)
        if stepped:
            raise errors.stepped_again(name)
        return True

    def obstacle_to_rows(self, clips: bool, used: bool) -> str | None:
        """Returns why a parameter cannot be stepped row by row, without its whole gradient.

        Args:
            clips: the parameter has a max_grad_norm.
            used: a gradient of it has been used in this step.
        """
        if self._machine.state not in (State.IDLE, State.STEPPING):
            return (
                "the optimizer measures or clips by the norm of all gradients, or an earlier "
                "backward raised"
            )
        if self._own_step:
            return "the optimizer's own step() needs the whole gradient"
        if used:
            return "the weight has received a gradient in this step already"
        if clips:
            return "max_grad_norm needs the norm of the whole gradient"
        if self._grad_scale() is not None:
            return (
                "a GradScaler has to see the whole gradient, as it skips a step in which one is "
                "not finite"
            )
        return None

    def measure(self, batch: Any) -> None:
        if self._norm is not None and self._norm.value is None:
            self._norm.add(batch)

    def scaling(self, device: torch.device) -> Scaling | None:
        """Returns how gradients on this device, used on its current stream, are scaled."""
        return self._scaling(device, self._grad_scale())

    def step_shards(self, batch: Any) -> None:
        """Steps a batch in which shards ask the processes that have the others."""
        self._step_shards(batch, self._grad_scale())

    def step_by_own(self, batch: Any) -> None:
        self._step_by_own(batch, self._grad_scale())

    def stepped(self) -> None:
        """Called when the first parameters have been stepped in backward."""
        self._handle(Event.STEPPED)

    def failed(self, stepped: int) -> None:
        """Called where a backward raised after it had stepped parameters."""
        self._machine.fail(stepped)
        self._tell()

    # the rest is for this class

    def _handle(self, event: Event) -> None:
        before = self._machine.state
        self._machine.handle(event)
        if self._machine.state is not before:
            self._tell()

    def _tell(self) -> None:
        """Tells the collector which gradients it need not ask about."""
        self._collector.expect(*self._machine.expected())

    def _end_step(self, event: Event) -> int:
        """Returns how many parameters were stepped in backward."""
        self._handle(event)
        self._last_found_inf = self._found_inf.take()
        if self._norm is not None:
            if self._norm.skip is not None:
                self._last_found_inf.append(self._norm.skip)
            self._last_norm = self._norm.value
            self._norm = None
        stepped: int = self._collector.next_step()
        return stepped

    def _grad_scale(self) -> Tensor | None:
        return grad_scale_of(self.optimizer())

    def _sharded(self) -> list[Tensor]:
        """Returns one DTensor of each sharding among the parameters."""
        of_each: dict[int, Tensor] = {}
        for param in self._collector.dtensors():
            if number := shards.sharding_of(param)[0]:  # whole parameters take no collective
                of_each.setdefault(number, param)
        return list(of_each.values())

    def _clip(self, batches: Sequence[Any], max_norm: float, scale: Tensor | None) -> None:
        """Measures the norm of all gradients, to which each is then clipped.

        Other processes may have gradients where this one has none: all take part.
        """
        sharded = self._sharded()
        if not batches and not sharded:
            return
        self._norm = GradNorm()
        for batch in batches:
            self._norm.add(batch)
        self._norm.finish(max_norm, scale, sharded)

    def _asks(self, scale: Tensor | None) -> str:
        """Returns which shards are scaled by what other processes have: "never", "clipped", those
        with a max_grad_norm, or "always". An optimizer's own step() asks by itself."""
        if self._own_step or self._norm is not None:
            return "never"
        return "clipped" if scale is None else "always"

    def _scaling(self, device: torch.device, scale: Tensor | None) -> Scaling | None:
        if self._norm is not None and self._norm.value is not None:
            return self._norm.scaling(device)
        if scale is None:
            return None
        return Scaling(scale.to(device), self._found_inf.on(device), None, None)

    def _step(self, batch: Any, scale: Tensor | None) -> None:
        if self._own_step:
            self._step_by_own(batch, scale)
        elif batch.asks:
            self._step_shards(batch, scale)
        else:
            batch.step(self._scaling(batch.device, scale))

    def _step_shards(self, batch: Any, scale: Tensor | None) -> None:
        """Those that are split and clipped alike ask together. The order is the same in all
        processes that have shards of them."""
        parts: dict[Any, list[int]] = {}
        for i, key in enumerate(batch.asking()):  # None where a parameter does not ask
            parts.setdefault(key, []).append(i)
        others = parts.pop(None, [])
        by = self._scaling(batch.device, scale)
        for (_, max_norm), places in parts.items():
            part = batch.select(places)
            factor, skip = shards.agree(
                part.params[0], part.squares_of_each(), max_norm, *(by or (None, None))[:2]
            )
            part.step(Scaling(None, None, factor, skip))
        if others:
            batch.select(others).step(by)

    def _step_by_own(self, batch: Any, scale: Tensor | None) -> None:
        optimizer: Any = self.optimizer()
        if optimizer is None:
            return
        batch.put_gradients()
        try:
            optimizer._step_by_own(batch.params, batch.groups, self._scaling(batch.device, scale))
        except BaseException:
            self.failed(len(batch))  # which of them were stepped?
            raise
        batch.note_steps()
