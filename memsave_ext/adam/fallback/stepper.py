"""Steps parameters in backward, in Python, by the rules of csrc/adam/stepper.cpp.

:meth:`ready` is called by hooks; the backward collects small gradients; :meth:`use` applies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import errors
from ..state_machine import Block, Event, State, StateMachine
from ..states import check_dense
from . import hooks
from .backward import Backward, Backwards, GradientAction
from .ddp import ReducedByDdp, params_of_modules
from .params import Params
from .records import Records
from .scaling import GradNorm, Scaling, grad_scale_of
from .updates import Update, apply, asks_others
from .uses import Uses


class AdamStepper:
    def __init__(
        self, optimizer: torch.optim.Optimizer, small_bytes: int, bucket_bytes: int, own_step: bool
    ) -> None:
        self._params = Params(optimizer, own_step)
        self.small_bytes, self.bucket_bytes = small_bytes, bucket_bytes
        self._attached = self._asks = False
        self._machine = StateMachine()
        self._blocks: Counter[Block] = Counter()  # how many of each kind are open
        self._backwards = Backwards()
        self._scaling = Scaling()
        self._records = Records()
        self._of_steps = self._params, self._records, self._scaling, self._machine
        self._reduced_by_ddp = ReducedByDdp()
        self.hand_to_ddp, self.ended = self._reduced_by_ddp.hand_over, self._backwards.ended
        self._uses = Uses()

    # called by the optimizer

    owner = staticmethod(hooks.owner)

    def optimizer(self) -> Any:
        """Returns the optimizer; None when it is gone."""
        return self._params.optimizer()

    def attach(self, params: Iterable[Tensor]) -> None:
        for param in params:
            if hooks.owner(param) is None:
                hooks.install_hook(param, self)
        self._attached = True

    def lost(self) -> list[Tensor]:
        """Returns the parameters that have lost their hook."""
        optimizer = self.optimizer()
        if not self._attached:
            return []
        return [param for param in self._params if hooks.owner(param) is not optimizer]

    def detach(self) -> None:
        self._attached = False
        for param in self._params:
            hooks.remove_hooks(param, self)

    def ask(self, enabled: bool) -> None:
        self._asks = enabled

    def accumulate(self, enabled: bool, fold: bool) -> None:
        if enabled:
            self._machine.check(Event.KEEP_GRADIENTS)
        self._blocks[Block.FOLD if fold else Block.ACCUMULATE] += 1 if enabled else -1

    def pause(self, enabled: bool, keep: bool) -> None:
        if enabled and keep:
            self._machine.check(Event.KEEP_GRADIENTS)
        self._blocks[Block.KEEP if keep else Block.DROP] += 1 if enabled else -1

    def begin_norm_pass(self) -> None:
        adds_up = self._blocks[Block.ACCUMULATE] or self._blocks[Block.FOLD]
        if adds_up or any(param.grad is not None for param in self._params):
            raise errors.measures_sums()
        folded = self.folded() > 0
        self._machine.handle(Event.PASS_AFTER_FOLD if folded else Event.BEGIN_NORM_PASS)
        self._scaling.norm = GradNorm()

    def end_norm_pass(self, max_norm: float | None) -> None:
        self._uses.forget_threads()  # the gradients that were measured are gone
        if max_norm is None:
            self._machine.handle(Event.DROP_NORM_PASS)
            self._scaling.norm = None
        else:
            self._machine.handle(Event.FINISH_NORM_PASS)
            sharded = self._params.sharded()
            self._scaling.finish_norm(max_norm, grad_scale_of(self.optimizer()), sharded)

    def step(self, max_norm: float, unscaled: bool) -> int:
        """Steps what has a gradient and closes the step. Returns how many parameters have been
        stepped since the last call, backwards included."""
        self._machine.check(Event.END_STEP)
        self._backwards.check_none("step()")
        left = [param for param in self._params if param.grad is not None]
        updates = self._remaining()
        scale = grad_scale_of(self.optimizer())
        scale = torch.ones_like(scale) if unscaled and scale is not None else scale
        if max_norm > 0:
            grads = [(param, grad) for param, _, grad in updates if grad is not None]
            self._scaling.clip_together(grads, max_norm, scale, self._params.sharded())
        apply(updates, *self._of_steps, scale, folds=False)
        if self._attached:
            for param in left:
                param.grad = None
                hooks.renew_hooks(param)
        count = self._uses.stepped() + len(updates)
        self._records.forget_folded()  # those left are of parameters removed from param_groups
        self._end_step(Event.END_STEP)
        return count

    def zero_grad(self, to_none: bool) -> None:
        if to_none:
            self._drop_gradients()
        if self._machine.state is State.FAILED:
            self._end_step(Event.ACKNOWLEDGE)

    def begin_loading(self) -> None:
        """Called before states are loaded; raises while a backward steps with the old ones."""
        self._backwards.check_none("load_state_dict()")

    def end_loading(self) -> None:
        """Forgets all that the open step has come to; an open norm pass stays open."""
        if self._attached:
            self._drop_gradients()
            self._reduced_by_ddp.note_reduced(self._params)
        self._records.forget_folded()
        self._end_step(Event.LOAD)
        if self._machine.state is State.MEASURING:
            self._scaling.norm = GradNorm()

    def _drop_gradients(self) -> None:
        for param in self._params:
            param.grad = None

    def grad_norm(self) -> Tensor | None:
        return self._scaling.last_norm

    def found_inf(self) -> list[Tensor]:
        return self._scaling.last_found_inf

    def folded(self) -> int:
        return self._records.folded()

    def drop_stale_low_part(self, param: Tensor, low_part: Tensor) -> None:
        """Called before parameters or states are read, with local tensors."""
        self._records.drop_stale_low_part(param, low_part)

    def count_used(self, params: list[Tensor]) -> int:
        if not self._attached:
            return 0
        backward = self._backwards.current()
        waiting = backward.waits_for if backward else lambda _: False
        return self._uses.count(param for param in params if not waiting(param))

    # called by DistributedDataParallel's communication hook

    def begin_reduced(self, params: list[Tensor]) -> Backward | None:
        """Called before these gradients are reduced. Returns the backward to give to
        step_reduced(); None where the gradients are dropped."""
        if self._blocks[Block.KEEP]:
            raise errors.keeps_reduced()
        if self._blocks[Block.DROP]:
            return None
        backward = self._current_backward()
        keeps = backward is not None and backward.action is GradientAction.KEEP
        if self._blocks[Block.ACCUMULATE] or keeps:
            raise errors.accumulates_reduced()
        self._machine.check(Event.USE_GRADIENT)
        for param in params:
            self._check_fires_once(param)
        self._reduced_by_ddp.note_reduced(params)
        return backward

    def step_reduced(
        self, backward: Backward | None, params: list[Tensor], grads: list[Tensor]
    ) -> None:
        if backward is None:
            return
        of_groups = zip(params, map(self._params.group_of, params), grads, strict=True)
        updates = [Update(p, group, grad) for p, group, grad in of_groups if group is not None]
        backward.use_reduced(updates)
        if backward.action is GradientAction.STEP:
            self._uses.add_stepped(param for param, *_ in updates)

    # called by hooks

    def ready(self, param: Tensor, is_last: bool) -> None:
        """Takes a complete gradient. If not ``is_last``, later hooks have still to see it."""
        if self._stays(param, is_last) or torch._C._current_graph_task_id() == -1:
            return
        # This must precede any look at .grad: another thread may have taken part of the gradient.
        if self._uses.is_of_another_thread(param):
            raise errors.several_threads(self._params.name(param))
        if param.grad is None:
            return
        backward = self._current_backward()
        if backward is None:
            return
        if id(param) in backward.of_ddp:
            raise errors.not_attached(param)
        if backward.action is GradientAction.KEEP:
            self._machine.check(Event.KEEP_GRADIENTS)
            return
        self._machine.check(Event.USE_GRADIENT)
        group = self._params.group_of(param)
        if group is None:  # the parameter is no longer in param_groups
            return
        if backward.action is GradientAction.FOLD and backward.waits_for(param):
            return  # the part of a second checkpoint region, which autograd has added to .grad
        self._check_fires_once(param)
        if self._params.own_step and param.grad.layout != torch.strided:
            raise errors.sparse_for_own_step()
        check_dense(param.grad, group)
        self._uses.note_thread(param)
        if backward.action is GradientAction.STEP:
            self._uses.add_stepped([param])
        try:
            backward.add(param, group, is_last)
        except BaseException:
            if param.grad is not None:  # it was not used
                self._uses.forget([param])
            raise

    def _stays(self, param: Tensor, is_last: bool) -> bool:
        """Whether the gradient is not used here: an open block or a reducer prevents it."""
        if self._blocks[Block.KEEP]:
            return True
        if self._blocks[Block.DROP]:
            if is_last:  # otherwise later hooks have still to see it
                param.grad = None
            return True
        folds = self._blocks[Block.FOLD] > 0
        if param.grad is not None and param in self._reduced_by_ddp:
            if folds:
                raise errors.folds_unreduced()
            self._reduced_by_ddp.note_local(param)
            return True
        return self._blocks[Block.ACCUMULATE] > 0 and not folds

    # called by backwards

    def use(self, updates: list[Update], action: GradientAction) -> None:
        if action is GradientAction.MEASURE:
            for param, _, grad in updates:
                assert grad is not None
                self._scaling.measure(param, grad)
        elif updates:
            scale = grad_scale_of(self.optimizer())
            apply(updates, *self._of_steps, scale, folds=action is GradientAction.FOLD)
            if action is GradientAction.STEP:
                self._machine.handle(Event.STEPPED)
            else:
                self._uses.add_folded(param for param, *_ in updates)

    def asks_others(self, param: Tensor, group: dict[str, Any]) -> bool:
        """Whether stepping the shard takes a collective. An own step() asks by itself."""
        scale = grad_scale_of(self.optimizer())
        return not self._params.own_step and asks_others(param, group, self._scaling, scale)

    def raised(self, used: int, waiting: list[Tensor]) -> None:
        """Notes that a backward raised after ``used`` gradients; ``waiting`` are in ``.grad``."""
        self._machine.fail(used)
        self._uses.forget(waiting)

    def _remaining(self) -> list[Update]:
        """Returns the updates that step() still has to make."""
        updates = []
        for group in self._params.groups():
            for param in group["params"]:
                if param.grad is not None:
                    stepped = self._attached and self._uses.is_stepped(param)
                    if stepped and param in self._reduced_by_ddp:
                        continue  # stepped with it already; the reducer has written it
                    if self._reduced_by_ddp.is_local(param):
                        raise errors.not_reduced(self._params.name(param))
                    if stepped:
                        raise errors.stepped_again(self._params.name(param))
                if param.grad is not None or self._records.is_folded(self._params.state_of(param)):
                    updates.append(Update(param, group, param.grad))
        return updates

    def _end_step(self, event: Event) -> None:
        self._machine.handle(event)
        self._uses.clear()
        self._scaling.end_step()

    def _current_backward(self) -> Backward | None:
        if self.optimizer() is None:
            return None
        if (backward := self._backwards.current()) is not None:
            return backward
        return self._backwards.begin(Backward(self, self._next_action(), params_of_modules()))

    def _next_action(self) -> GradientAction:
        """Returns what a backward that begins does with its gradients."""
        if self._machine.state is State.MEASURING:
            return GradientAction.MEASURE
        if self._blocks[Block.FOLD]:
            return GradientAction.FOLD
        optimizer: Any = self.optimizer()
        return GradientAction(optimizer._on_gradients()) if self._asks else GradientAction.STEP

    def _check_fires_once(self, param: Tensor) -> None:
        measures = self._machine.state is State.MEASURING
        measured = self._scaling.norm is not None and param in self._scaling.norm
        if measured if measures else self._uses.is_stepped(param):
            raise errors.second_gradient(self._params.name(param))
        if self._machine.state is State.CLIPPING and not measured:
            raise errors.not_measured(self._params.name(param))
