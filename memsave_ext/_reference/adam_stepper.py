"""Steps in backward in Python: the rules of csrc/adam/stepper.cpp, at Python's price."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..adam import dtensor
from . import adam

_SPARSE = "Adam does not support sparse gradients, please consider SparseAdam instead"
_MARK = "_memsave_ext_stepper"
_HOOKS = "_post_accumulate_grad_hooks"


class AdamStepper:
    def __init__(self, optimizer: torch.optim.Optimizer, small_bytes: int, bucket_bytes: int):
        self._optimizer = weakref.ref(optimizer)
        self._small_bytes, self._bucket_bytes = small_bytes, bucket_bytes
        self._attached = False
        self._accumulating = 0
        self._forbidden = False
        self._reduced_by_ddp: set[int] = set()
        self._unreduced: set[int] = set()  # of these, those with a gradient of this process alone
        self._backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
        self.stepped: set[int] = set()  # in this step, or waiting
        self.stepped_before_failure = 0

    # called by the optimizer

    def attach(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        for param in params:
            if (other := self._hook_of(param)) is not None and other is not self:
                raise ValueError(
                    f"a parameter of shape {list(param.shape)} is stepped in backward by another "
                    "optimizer already: call its remove_hooks() first, or let each parameter be in "
                    "one optimizer"
                )
        for param in params:
            if self._hook_of(param) is None:
                self._install(param)
        self._attached = True

    def attach_lost(self) -> int:
        if not self._attached:
            return 0
        lost = [p for p in self._params() if self._hook_of(p) is not self]
        self.attach(lost)
        return len(lost)

    def detach(self) -> None:
        self._attached = False
        for param in self._params():
            hooks = getattr(param, _HOOKS) or {}
            for key, hook in list(hooks.items()):
                reference = getattr(hook, _MARK, None)
                if reference is None or reference() is not self:
                    continue
                del hooks[key]
                if hook.made_dict and not hooks:
                    setattr(param, _HOOKS, None)

    def step(self) -> int:
        self.check_not_failed()
        updates, left = [], []
        for group in self._groups():
            for param in group["params"]:
                if param.grad is None:
                    continue
                left.append(param)
                stepped = self._attached and id(param) in self.stepped
                if stepped and id(param) in self._reduced_by_ddp:  # what the reducer left
                    continue
                if id(param) in self._unreduced:
                    raise RuntimeError(
                        f"Adam: the gradient of {self.name(param)} has not been reduced over the "
                        "processes. The last backward of a step must be outside of ddp.no_sync()."
                    )
                if stepped:
                    raise RuntimeError(
                        f"Adam: {self.name(param)} was stepped in backward and has a gradient "
                        "again, which would be a second step. Set .grad before backward(), or "
                        "after step()."
                    )
                updates.append((param, group, param.grad))
        self.update(updates)
        if self._attached:
            for param in left:
                param.grad = None
                # Where the tensor was swapped, its hooks are there and are not called any more.
                setattr(param, _HOOKS, getattr(param, _HOOKS))
        count = len(self.stepped) + len(updates)
        self.stepped.clear()
        return count

    def zero_grad(self, to_none: bool) -> None:
        if to_none:
            for param in self._params():
                param.grad = None
        if self.stepped_before_failure:
            self.stepped_before_failure = 0
            self.stepped.clear()

    def accumulate(self, enabled: bool) -> None:
        self._accumulating += 1 if enabled else -1

    def forbid(self, enabled: bool) -> None:
        self._forbidden = enabled

    # called by DistributedDataParallel's communication hook

    def hand_to_ddp(self, params: list[Tensor], enabled: bool) -> None:
        change = self._reduced_by_ddp.update if enabled else self._reduced_by_ddp.difference_update
        change(id(param) for param in params)

    def begin_reduced(self, params: list[Tensor]) -> _Backward | None:
        self._check_not_forbidden()
        if self._accumulating:
            raise RuntimeError(
                "Adam: opt.accumulate() around a backward whose gradients DistributedDataParallel "
                "reduces. Use `with ddp.no_sync(), opt.accumulate():`."
            )
        self.check_not_failed()
        for param in params:
            self._check_not_stepped(param)
        self._unreduced.difference_update(id(param) for param in params)
        return self._current_backward()

    def step_reduced(
        self, backward: _Backward | None, params: list[Tensor], grads: list[Tensor]
    ) -> None:
        if backward is None:
            return
        updates = []
        for param, grad in zip(params, grads, strict=True):
            if (group := self._group_of(param)) is not None:
                updates.append((param, group, grad))
        self.update(updates)
        backward.stepped += len(updates)
        for param, *_ in updates:
            self.stepped.add(id(param))
            param.grad = None

    # called by hooks

    def ready(self, param: Tensor, is_last: bool) -> None:
        if param.grad is None:
            return
        if id(param) in self._reduced_by_ddp:
            self._unreduced.add(id(param))
            return
        if self._accumulating or torch._C._current_graph_task_id() == -1:
            return
        self._check_not_forbidden()
        backward = self._current_backward()
        if backward is None:
            return
        if id(param) in backward.of_ddp:
            raise RuntimeError(
                f"Adam: a parameter of shape {list(param.shape)} belongs to a "
                "DistributedDataParallel module, which reduces its gradient after it would be "
                "stepped here. Call opt.attach(ddp) once, before training."
            )
        self.check_not_failed()
        group = self._group_of(param)
        if group is None:  # not in param_groups any more
            return
        self._check_not_stepped(param)
        if param.grad.is_sparse:
            raise RuntimeError(_SPARSE)
        backward.add(param, group, wait=not is_last or param.grad.nbytes < self._small_bytes)

    def _current_backward(self) -> _Backward | None:
        if self._optimizer() is None:
            return None
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if backward is None:
            self._backwards[task] = backward = _Backward(self, self._ddp_params())
            torch.autograd.Variable._execution_engine.queue_callback(backward.finish)
        return backward

    def _ddp_params(self) -> set[int]:
        """Parameters whose gradients a reducer reduces: its hooks cannot be seen from Python."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return set()
        from torch.nn.parallel import DistributedDataParallel

        modules = [m for m in gc.get_objects() if type(m) is DistributedDataParallel]
        return {id(p) for module in modules for p in module.parameters()}

    def _check_not_forbidden(self) -> None:
        if self._forbidden:
            raise RuntimeError(
                "Adam: the closure given to step() runs a backward, which with in_backward=True "
                "steps the parameters itself. Call backward() first, and then step() without it."
            )

    def _check_not_stepped(self, param: Tensor) -> None:
        if id(param) in self.stepped:
            raise RuntimeError(
                f"Adam: {self.name(param)} receives a second gradient in one step. Either "
                "backward() ran twice before opt.step(): put `with opt.accumulate():` around all "
                "but the last. Or it is used in several regions of "
                "torch.utils.checkpoint(use_reentrant=True), which deliver their gradients one by "
                "one: use use_reentrant=False, or memsave_ext.checkpoint."
            )

    def _group_of(self, param: Tensor) -> dict[str, Any] | None:
        groups = (g for g in self._groups() if any(p is param for p in g["params"]))
        return next(groups, None)

    def update(self, updates: list[tuple[Tensor, dict[str, Any], Tensor]]) -> None:
        """Steps these parameters; those of a group together. Checks all first."""
        optimizer = self._optimizer()
        assert optimizer is not None
        fresh = []
        for param, group, grad in updates:
            if grad.is_sparse:
                raise RuntimeError(_SPARSE)
            if not optimizer.state.get(param):
                optimizer.state[param] = make_state(param, group)
                fresh.append(param)
            state = optimizer.state[param]
            try:
                adam.check(param, grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            except BaseException:
                for made in fresh:
                    del optimizer.state[made]
                raise
        for group in {id(g): g for _, g, _ in updates}.values():
            chosen = [(p, grad) for p, of, grad in updates if of is group]
            states = [
                {name: dtensor.local_tensor(value) for name, value in optimizer.state[p].items()}
                for p, _ in chosen
            ]
            lr, betas = group["lr"], group["betas"]
            adam.adam_step_(
                [dtensor.local_tensor(p) for p, _ in chosen],
                [dtensor.local_gradient(p, grad) for p, grad in chosen],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else [],
                [s["step"] for s in states],
                lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else None,
                float(lr),
                float(betas[0]),
                float(betas[1]),
                group["eps"],
                group["weight_decay"],
                group["decoupled_weight_decay"],
                group["amsgrad"],
                group["maximize"],
            )

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
            stepper = stepper_ref()
            if stepper is not None:
                hooks = list(getattr(param, _HOOKS).values())
                stepper.ready(param, is_last=hooks[-1] is hook)

        setattr(hook, _MARK, stepper_ref)
        hook.made_dict = made_dict  # type: ignore[attr-defined]
        required = param.requires_grad
        param.requires_grad_().register_post_accumulate_grad_hook(hook)
        param.requires_grad_(required)

    @staticmethod
    def _hook_of(param: Tensor) -> AdamStepper | None:
        """The stepper whose hook the parameter has."""
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            reference: Callable[[], AdamStepper | None] | None = getattr(hook, _MARK, None)
            if reference is not None and (stepper := reference()) is not None:
                return stepper
        return None


class _Backward:
    """One backward in which parameters are stepped. Held by its graph task alone."""

    def __init__(self, stepper: AdamStepper, of_ddp: set[int]) -> None:
        self.stepper = stepper
        self.of_ddp = of_ddp  # parameters whose gradients are reduced later
        self.waiting: list[tuple[Tensor, dict[str, Any]]] = []
        self.bytes = 0
        self.stepped = 0
        self.finished = False

    def add(self, param: Tensor, group: dict[str, Any], wait: bool) -> None:
        assert param.grad is not None
        self.waiting.append((param, group))
        self.stepper.stepped.add(id(param))
        self.bytes += param.grad.nbytes
        if not wait:
            self._flush([self.waiting.pop()])
        elif self.bytes >= self.stepper.bucket_bytes:
            # All but this one, whose later hooks are still to run.
            self._flush(self.waiting[:-1])
            self.waiting = self.waiting[-1:]
            self.bytes = param.grad.nbytes

    def finish(self) -> None:
        self._flush(self.waiting)
        self.waiting = []
        self.finished = True

    def _flush(self, updates: list[tuple[Tensor, dict[str, Any]]]) -> None:
        updates = [u for u in updates if u[0].grad is not None]
        self.stepper.update([(p, group, p.grad) for p, group in updates if p.grad is not None])
        for param, _ in updates:
            param.grad = None
        self.stepped += len(updates)

    def __del__(self) -> None:
        if not self.finished:  # backward raised
            self.stepper.stepped_before_failure += self.stepped
            self.stepper.stepped -= {id(p) for p, _ in self.waiting}


def make_state(param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """Zeros. In float32 for types of 16 bits, else in the parameter's."""
    dtype = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
    device = param.device if group["capturable"] or group["fused"] else "cpu"
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    for name in names:
        state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return state
