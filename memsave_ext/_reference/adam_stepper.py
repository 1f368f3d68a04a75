"""Steps in backward in Python: the rules of csrc/adam/stepper.cpp, at Python's price."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..adam import dtensor, modes
from . import adam, adam_update
from .adam_backward import Backward, check_not_compiled_autograd
from .adam_records import Records

_MARK = "_memsave_ext_stepper"
_HOOKS = "_post_accumulate_grad_hooks"

Update = tuple[Tensor, dict[str, Any], Tensor | None]  # parameter, group, gradient


class AdamStepper:
    def __init__(self, optimizer: torch.optim.Optimizer, small_bytes: int, bucket_bytes: int):
        self._optimizer = weakref.ref(optimizer)
        self._small_bytes, self._bucket_bytes = small_bytes, bucket_bytes
        self._attached = False
        self._accumulating = self._folding = 0
        self._asks = False
        self._reduced_by_ddp: set[int] = set()
        self._unreduced: set[int] = set()  # of these, those with a gradient of this process alone
        self._backwards: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()
        self.stepped: set[int] = set()  # in this step, or waiting
        self.stepped_before_failure = 0
        self._folds: set[int] = set()  # parameters with gradients in their moments, in this step
        self._records = Records()
        self._keeping = self._dropping = 0  # of blocks that pause
        self._threads: dict[int, int] = {}  # whose backward stepped a parameter, or folded, by id
        self.running: set[int] = set()  # backwards
        self._measuring = False
        self._squares: dict[int, Tensor] | None = None  # of a norm pass, by parameter
        self._clip: tuple[Tensor, Tensor | None] | None = None  # factor and skip of all gradients
        self._norm: Tensor | None = None
        self._found: dict[torch.device, Tensor] = {}
        self._last_found: list[Tensor] = []

    # called by the optimizer

    def attach(self, params: Iterable[Tensor]) -> None:
        for param in params:
            if self.owner(param) is None:
                self._install(param)
        self._attached = True

    def lost(self) -> list[Tensor]:
        """Parameters whose hook something else has displaced."""
        optimizer = self._optimizer()
        return [p for p in self._params() if self._attached and self.owner(p) is not optimizer]

    @staticmethod
    def owner(param: Tensor) -> Any:
        """The optimizer that steps it in backward. The hook of one that is gone is removed."""
        hooks = getattr(param, _HOOKS) or {}
        for key, hook in list(hooks.items()):
            reference: Callable[[], AdamStepper | None] | None = getattr(hook, _MARK, None)
            if reference is None:
                continue
            stepper = reference()
            optimizer = None if stepper is None else stepper._optimizer()
            if optimizer is not None:
                return optimizer
            _remove(param, key)
        return None

    def detach(self) -> None:
        self._attached = False
        for param in self._params():
            hooks = getattr(param, _HOOKS) or {}
            for key, hook in list(hooks.items()):
                reference = getattr(hook, _MARK, None)
                if reference is not None and reference() is self:
                    _remove(param, key)

    def step(self, max_norm: float, unscaled: bool) -> int:
        if self._measuring:
            raise RuntimeError(
                "Adam: step() inside of norm_pass(), which only measures gradients. Run the "
                "backward again after it, and then step()."
            )
        self.check_not_failed()
        if self.running:
            raise RuntimeError(
                "Adam: step() while a backward is under way, in another thread or around this "
                "call. Wait until all of a step's backwards have ended."
            )
        updates: list[Update] = []
        left = []
        for group in self._groups():
            for param in group["params"]:
                if param.grad is not None:
                    left.append(param)
                    stepped = self._attached and id(param) in self.stepped
                    if stepped and id(param) in self._reduced_by_ddp:  # what the reducer left
                        continue
                    self._check_reduced(param)
                    if stepped:
                        raise RuntimeError(
                            f"Adam: {self.name(param)} was stepped in backward and has a gradient "
                            "again, which would be a second step. Set .grad before backward(), or "
                            "after step()."
                        )
                if param.grad is not None or self._is_folded(param):
                    updates.append((param, group, param.grad))
        scale = self._loss_scale()
        scale = torch.ones_like(scale) if unscaled and scale is not None else scale
        if max_norm > 0 and updates:
            squares = [_square(grad) for param, _, grad in updates if grad is not None]
            self._finish_norm(squares, max_norm, scale)
        self.update(updates, "step", scale)
        if self._attached:
            for param in left:
                param.grad = None
                # Where the tensor was swapped, its hooks are there and are not called any more.
                setattr(param, _HOOKS, getattr(param, _HOOKS))
        count = len(self.stepped) + len(updates)
        self._records.forget_folded()  # of parameters that are not in param_groups any more
        self._end_step()
        return count

    def _end_step(self) -> None:
        self.stepped.clear()
        self._last_found = list(self._found.values())
        if self._clip is not None and self._clip[1] is not None:
            self._last_found.append(self._clip[1])
        self._found, self._clip, self._squares = {}, None, None
        self._folds.clear()
        self._threads.clear()

    def zero_grad(self, to_none: bool) -> None:
        if to_none:
            for param in self._params():
                param.grad = None
        if self.stepped_before_failure:
            self.stepped_before_failure = 0
            self._end_step()

    def accumulate(self, enabled: bool, fold: bool) -> None:
        if enabled:
            self._check_accumulates_after_no_norm()
        if fold:
            self._folding += 1 if enabled else -1
        else:
            self._accumulating += 1 if enabled else -1

    def pause(self, enabled: bool, keep: bool) -> None:
        if enabled and keep:
            self._check_accumulates_after_no_norm()
        if keep:
            self._keeping += 1 if enabled else -1
        else:
            self._dropping += 1 if enabled else -1

    def begin_norm_pass(self) -> None:
        if self._accumulating or self._folding or any(p.grad is not None for p in self._params()):
            raise RuntimeError(
                "Adam: norm_pass() while gradients are accumulated: it drops those that it "
                "measures. Use clip_global_norm=, which keeps them."
            )
        self.check_not_failed()
        if self._squares is not None or self.stepped or self.folded():
            raise RuntimeError(
                "Adam: norm_pass() must come before the backward that steps, once in each step"
            )
        self._squares, self._measuring = {}, True

    def end_norm_pass(self, max_norm: float | None) -> None:
        self._measuring = False
        assert self._squares is not None
        if max_norm is None:
            self._squares = None
        else:
            self._finish_norm(list(self._squares.values()), max_norm, self._loss_scale())

    def grad_norm(self) -> Tensor | None:
        return self._norm

    def found(self) -> list[Tensor]:
        return self._last_found

    def folded(self) -> int:
        return self._records.folded()

    def _is_folded(self, param: Tensor) -> bool:
        optimizer = self._optimizer()
        return optimizer is not None and self._records.is_folded(optimizer.state.get(param, {}))

    def _loss_scale(self) -> Tensor | None:
        scaler = getattr(self._optimizer(), "grad_scaler", None)
        if scaler is None or not scaler.is_enabled():
            return None
        return scaler._get_scale_async()  # type: ignore[no-any-return]

    def _finish_norm(self, squares: list[Tensor], max_norm: float, scale: Tensor | None) -> None:
        total = sum((s.to(squares[0].device) for s in squares), torch.zeros((), dtype=torch.double))
        norm = total.sqrt()
        skip = None
        if scale is not None:
            scale = scale.to(norm.device, torch.double)
            norm = norm / scale
            skip = norm.isfinite().logical_not().float()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        self._clip = factor if scale is None else factor / scale, skip
        self._norm = norm.float()

    def _scaling(self, device: torch.device, scale: Tensor | None) -> dict[str, Tensor | None]:
        """What the operator is told of gradients."""
        if self._clip is not None:
            factor, skip = self._clip
            return {"factor": factor.to(device), "skip": None if skip is None else skip.to(device)}
        if scale is None:
            return {}
        found = self._found.setdefault(device, torch.zeros((), device=device))
        return {"loss_scale": scale.to(device), "found": found}

    def ask(self, enabled: bool) -> None:
        self._asks = enabled

    def count_used(self, params: list[Tensor]) -> int:
        used = self.stepped | self._folds if self._attached else set()
        return sum(id(param) in used for param in params)

    # called by DistributedDataParallel's communication hook

    def hand_to_ddp(self, params: list[Tensor], enabled: bool) -> None:
        change = self._reduced_by_ddp.update if enabled else self._reduced_by_ddp.difference_update
        change(id(param) for param in params)

    def begin_reduced(self, params: list[Tensor]) -> Backward | None:
        if self._keeping:
            raise RuntimeError(
                "Adam: opt.paused(keep=True) around a backward whose gradients "
                "DistributedDataParallel reduces. Use `with ddp.no_sync(), opt.paused(keep=True):`."
            )
        if self._dropping:
            return None
        backward = self._current_backward()
        if self._accumulating or (backward is not None and backward.task == "keep"):
            raise RuntimeError(
                "Adam: opt.accumulate() around a backward whose gradients DistributedDataParallel "
                "reduces, or accumulate_when() says so. Use `with ddp.no_sync(), "
                "opt.accumulate():`."
            )
        self.check_not_failed()
        for param in params:
            self._check_fires_once(param)
        self._unreduced.difference_update(id(param) for param in params)
        return backward

    def step_reduced(
        self, backward: Backward | None, params: list[Tensor], grads: list[Tensor]
    ) -> None:
        if backward is None:
            return
        updates: list[Update] = []
        for param, grad in zip(params, grads, strict=True):
            if (group := self._group_of(param)) is not None:
                updates.append((param, group, grad))
        self.update(updates, backward.task, self._loss_scale())
        backward.stepped += len(updates)
        for param, *_ in updates:
            if backward.task == "step":
                self.stepped.add(id(param))
            param.grad = None

    # called by hooks

    def ready(self, param: Tensor, is_last: bool) -> None:
        if self._keeping:
            return
        if self._dropping:
            if is_last:  # to be seen by others
                param.grad = None
            return
        if param.grad is not None and id(param) in self._reduced_by_ddp:
            if self._folding:
                raise RuntimeError(
                    "Adam: accumulate(fold=True) would fold gradients of one process, which "
                    "DistributedDataParallel has not reduced. Use accumulate()."
                )
            self._unreduced.add(id(param))
            return
        if (self._accumulating and not self._folding) or torch._C._current_graph_task_id() == -1:
            return
        # Before .grad is looked at: another thread may have taken part of this gradient.
        thread = threading.get_ident()
        if self._threads.get(id(param), thread) != thread:
            raise RuntimeError(
                f"Adam: {self.name(param)} receives gradients from several threads in one step. "
                "Python has no access to torch's lock of a gradient: run the step's backwards in "
                "one thread, use accumulate(), or the compiled memsave_ext."
            )
        if param.grad is None:
            return
        backward = self._current_backward()
        if backward is None:
            return
        if id(param) in backward.of_ddp:
            raise RuntimeError(
                f"Adam: a parameter of shape {list(param.shape)} belongs to a "
                "DistributedDataParallel module, which reduces its gradient after it would be "
                "stepped here. Call opt.attach(ddp) once, before training."
            )
        if backward.task == "keep":
            self._check_accumulates_after_no_norm()
            return
        self.check_not_failed()
        group = self._group_of(param)
        if group is None:  # not in param_groups any more
            return
        if backward.task == "fold" and any(p is param for p, _ in backward.waiting):
            return  # a second region's part: it is in .grad too
        self._check_fires_once(param)
        if param.grad.layout != torch.strided:
            raise RuntimeError(adam_update.SPARSE)
        self._threads[id(param)] = thread
        backward.add(param, group, wait=not is_last or param.grad.nbytes < self._small_bytes)

    def _current_backward(self) -> Backward | None:
        optimizer: Any = self._optimizer()
        if optimizer is None:
            return None
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if backward is None:
            kind = "measure" if self._measuring else "fold" if self._folding else "step"
            if kind == "step" and self._asks:
                kind = optimizer._on_gradients()
            self._backwards[task] = backward = Backward(self, self._ddp_params(), kind)
            torch.autograd.Variable._execution_engine.queue_callback(backward.finish)
        return backward

    def _ddp_params(self) -> set[int]:
        """Parameters whose gradients a reducer reduces: its hooks cannot be seen from Python."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return set()
        from torch.nn.parallel import DistributedDataParallel

        modules = [m for m in gc.get_objects() if type(m) is DistributedDataParallel]
        return {id(p) for module in modules for p in module.parameters()}

    def _check_accumulates_after_no_norm(self) -> None:
        if self._squares is not None:
            raise RuntimeError(
                "Adam: gradients are accumulated after norm_pass(), whose norm is that of one "
                "backward. Use clip_global_norm=, which clips the sum."
            )

    def _check_reduced(self, param: Tensor) -> None:
        if id(param) in self._unreduced:
            raise RuntimeError(
                f"Adam: the gradient of {self.name(param)} has not been reduced over the "
                "processes. The last backward of a step must be outside of ddp.no_sync()."
            )

    def _check_fires_once(self, param: Tensor) -> None:
        measured = self._squares or {}
        if id(param) in (measured if self._measuring else self.stepped):
            raise RuntimeError(
                f"Adam: {self.name(param)} receives a second gradient in one step. Either "
                "backward() ran twice before opt.step(): put `with opt.accumulate():` around all "
                "but the last, or, where a trainer runs it, call opt.accumulate_when() once. Or "
                "one of them was of a loss that is not to train this parameter, as a GAN's "
                "generator's for the discriminator: put `with opt.paused():` around it. Or the "
                "parameter is used in several regions of "
                "torch.utils.checkpoint(use_reentrant=True), which deliver their gradients one by "
                "one: use use_reentrant=False, or memsave_ext.checkpoint."
            )
        if not self._measuring and self._squares is not None and id(param) not in measured:
            raise RuntimeError(
                f"Adam: {self.name(param)} has a gradient now, but had none in norm_pass(), whose "
                "norm it would be clipped by. Both must run the backward of the same loss."
            )

    def _group_of(self, param: Tensor) -> dict[str, Any] | None:
        groups = (g for g in self._groups() if any(p is param for p in g["params"]))
        return next(groups, None)

    def update(self, updates: list[Update], task: str, scale: Tensor | None) -> None:
        """Does it to these parameters, all of which are checked first."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if task == "measure":
            assert self._squares is not None
            for param, _, grad in updates:
                self._squares[id(param)] = _square(grad)
            return
        fresh = []
        for checked in {id(group): group for _, group, _ in updates}.values():
            modes.check_options(checked)
        if self._clip is not None:
            modes.refuse_two_norms(self._groups())
        try:
            for param, group, grad in updates:
                if not optimizer.state.get(param):
                    optimizer.state[param] = adam_update.make_state(param, group)
                    fresh.append(param)
                state, phase = optimizer.state[param], self._phase(param, task)
                adam_update.check(param, grad, state, group, phase)
        except BaseException:
            for made in fresh:
                del optimizer.state[made]
            raise
        positions = {id(param): i for i, param in enumerate(self._params())}
        prepared: dict[torch.device, list[adam.Prepared]] = {}
        for param, group, grad in updates:
            local = dtensor.local_tensor
            state = {name: local(value) for name, value in optimizer.state[param].items()}
            if task == "step":
                self._records.drop_stale_rest(local(param), state)
            prepared.setdefault(local(param).device, []).append(
                adam.Prepared(
                    local(param),
                    None if grad is None else dtensor.local_gradient(param, grad),
                    state,
                    group,
                    self._phase(param, task),
                    positions[id(param)],
                )
            )
        for device, of_device in prepared.items():
            adam.step(of_device, **self._scaling(device, scale))
            if task == "step":
                for p in of_device:
                    self._records.note_versions(p.param, p.state)
        for param, *_ in updates:
            self._records.set_folded(optimizer.state[param], task == "fold")
            if task == "fold":
                self._folds.add(id(param))

    def _phase(self, param: Tensor, task: str) -> adam_update.Phase:
        folded = self._is_folded(param)
        if task == "fold":
            return "fold" if folded else "first_fold"
        return "close" if folded else "whole"

    def check_not_failed(self) -> None:
        if self.stepped_before_failure:
            raise RuntimeError(
                f"Adam: a backward raised after {self.stepped_before_failure} parameters had been "
                "stepped; the others were not. Call zero_grad() to go on from there, or load a "
                "checkpoint."
            )

    def name(self, param: Tensor) -> str:
        position = next(i for i, p in enumerate(self._params()) if p is param)
        return f"parameter {position} of the optimizer (shape {list(param.shape)})"

    @property
    def bucket_bytes(self) -> int:
        return self._bucket_bytes

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def _params(self) -> Iterable[Tensor]:
        return itertools.chain.from_iterable(g["params"] for g in self._groups())

    def _install(self, param: Tensor) -> None:
        made_dict = param._post_accumulate_grad_hooks is None
        stepper_ref = weakref.ref(self)

        def hook(param: Tensor) -> None:
            check_not_compiled_autograd()  # which cannot trace what follows
            stepper = stepper_ref()
            hooks = list((getattr(param, _HOOKS) or {}).values())
            if stepper is not None and hook in hooks:  # not removed by one before it
                stepper.ready(param, is_last=hooks[-1] is hook)

        setattr(hook, _MARK, stepper_ref)
        hook.made_dict = made_dict  # type: ignore[attr-defined]
        required = param.requires_grad
        param.requires_grad_().register_post_accumulate_grad_hook(hook)
        param.requires_grad_(required)


def _remove(param: Tensor, key: int) -> None:
    hooks = getattr(param, _HOOKS)
    hook = hooks.pop(key)
    if hook.made_dict and not hooks:
        setattr(param, _HOOKS, None)


def _square(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return adam.sum_of_squares(dtensor.local_tensor(grad))
