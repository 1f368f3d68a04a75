"""Optimizers that are stepped in backward by their own step(), a part of the parameters a call."""

from __future__ import annotations

import copyreg
import functools
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ..elsewhere.gradients import Gradients
from ..shared.dtensor import is_dtensor
from . import modes
from .shards import clip_factor
from .step_in_backward import InBackward

# What a view does not share with its optimizer: the groups, step hooks, which belong to the step as
# a whole, and what GradScaler tells a step of whole gradients, which these are not any more.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OWN = ("param_groups", *_HOOKS, "grad_scale", "found_inf")
_NONE: OrderedDict[int, Any] = OrderedDict()
OF_EACH = ("params", "param_names")  # what a group has for each of its parameters
_DEEPEST = 8  # containers in containers that are compared


@functools.cache
def view_class(own: Any) -> type[Optimizer]:
    """Returns a class of views: objects with an optimizer's attributes, but for ``_OWN``.

    Slots of a class come before the attributes of an object.
    """
    # torch calls hooks around the step() of each class, also where that of another calls it.
    inner = (base for base in own.__mro__[1:] if base is not Optimizer and "step" in vars(base))
    bases = (own, *map(_without_hooks, inner))
    return type(own.__name__, bases, {"__slots__": _OWN, "__module__": own.__module__})


@functools.cache
def _without_hooks(base: Any) -> type[Any]:
    """Returns a class that in a view's order of bases comes before ``base``, with its step()."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return step_of(base)(self, *args, **kwargs)

    return type(base.__name__, (base,), {"__slots__": (), "step": step})


def step_of(own: Any) -> Any:
    """Returns the class's step(), without what calls step hooks and profiles around it."""
    step: Any = own.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def view(kind: type[Optimizer], attributes: dict[str, Any], groups: list[dict[str, Any]]) -> Any:
    """Returns a view with these attributes, which it shares, and these groups."""
    made: Any = object.__new__(kind)
    made.__dict__ = attributes
    made.param_groups = groups
    made._optimizer_step_pre_hooks = made._optimizer_step_post_hooks = _NONE
    return made


def part_of(group: dict[str, Any], params: list[Tensor]) -> dict[str, Any]:
    """Returns a copy of the group with these of its parameters alone, and with their names."""
    part = {**group, "params": params}
    names = group.get("param_names")
    if names is None or len(names) != len(group["params"]):
        return part
    if len(params) == 1:  # most often: without a table of all
        place = next(i for i, param in enumerate(group["params"]) if param is params[0])
        return part | {"param_names": [names[place]]}
    name_of = dict(zip(map(id, group["params"]), names, strict=True))
    return part | {"param_names": [name_of[id(param)] for param in params]}


def restricted(
    groups: list[dict[str, Any]], params: list[Tensor], numbers: list[int], counts: Iterable[str]
) -> dict[int, dict[str, Any]]:
    """Returns, by number, copies of the groups with these parameters alone.

    The options are those of this moment, so that a scheduler may change them between two steps.

    Args:
        numbers: those of the groups of the parameters.
        counts: options that a step changes, maybe in place.
    """
    of_each: dict[int, list[Tensor]] = {}
    for param, number in zip(params, numbers, strict=True):
        of_each.setdefault(number, []).append(param)
    chosen = {number: part_of(groups[number], listed) for number, listed in of_each.items()}
    for name in counts:
        for group in chosen.values():
            if isinstance(group.get(name), Tensor):
                group[name] = group[name].clone()
    return chosen


def equal(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether options or states have the same values, as far as can be told."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if depth > _DEEPEST:  # one may contain itself
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k], depth + 1) for k in one)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(equal(a, b, depth + 1) for a, b in pairs)
    if isinstance(one, (int, float, str, type(None))):
        return type(one) is type(other) and one == other
    return True  # of something else nothing is known


@torch.no_grad()
def scale(
    params: list[Tensor], norms: list[float | None], scalars: tuple[Tensor | None, ...]
) -> list[bool]:
    """Unscales and clips the gradients in ``.grad``. Returns which of them are to be used.

    Of DTensors, all processes find the same, in a collective for each gradient and question.

    Args:
        norms: what each gradient is clipped to; None: not.
        scalars: grad_scale and found_inf, of a GradScaler; factor and skip, where the norm of all
            gradients is known. Each is None where there is none.
    """
    grad_scale, found_inf, factor, skip = scalars
    used = []
    for param, max_norm in zip(params, norms, strict=True):
        grad = param.grad
        assert grad is not None
        if factor is not None:
            used.append(skip is None or not skip.item())
            grad.mul_(factor)
            continue
        found = torch.zeros((), dtype=torch.float32, device=grad.device)
        if grad_scale is not None:
            inverse = grad_scale.double().reciprocal().float()  # as GradScaler.unscale_()
            torch._amp_foreach_non_finite_check_and_unscale_([grad], found, inverse)
            assert found_inf is not None
            found_inf.copy_(torch.maximum(found_inf, found))
        used.append(grad_scale is None or not found.item())
        if max_norm is not None:
            modes.check_norm("max_grad_norm", max_norm)
            norm: Any = torch.nn.utils.get_total_norm([grad])  # as clip_grad_norm_()
            norm = norm.full_tensor() if is_dtensor(norm) else norm
            grad.mul_(clip_factor(norm, max_norm).to(grad.device))
    return used


class OwnStep(InBackward):
    """Methods of an optimizer that :func:`~memsave_ext.in_backward` has taken."""

    _own: Any  # the class that the optimizer had
    _own_step: Any  # its step()
    _view: Any  # that of its views
    _steps_by_own = True
    _clips_each = True  # whether max_grad_norm in a group is ours, and not the optimizer's
    _counts: tuple[str, ...] = ()  # options of groups that a step changes, as a count of steps
    _counted: dict[int, dict[str, Any]]  # groups that have been stepped in the open step

    def _begin(
        self,
        max_grad_norm: float | None,
        scaler: torch.amp.GradScaler | None,
        gradients: Gradients | None,
    ) -> None:
        self._clips_each = "max_grad_norm" not in self.defaults
        if max_grad_norm is not None:
            if not self._clips_each:
                raise ValueError(
                    f"{type(self).__name__} has a max_grad_norm of its own: set that one, and "
                    "leave max_grad_norm of in_backward() out"
                )
            self.defaults = {**self.defaults, "max_grad_norm": max_grad_norm}
            for group in self.param_groups:
                group.setdefault("max_grad_norm", max_grad_norm)
        for group in self.param_groups:
            modes.refuse_twice(group["params"])
        self._make_stepper()
        self._counted = {}
        self._patch_step_function()
        renew_counter(self)
        self._gradients = gradients
        self._attach(p for group in self.param_groups for p in group["params"])
        self._in_backward = gradients is None
        self.grad_scaler = scaler

    def _take_group(self, group: dict[str, Any]) -> None:
        """Prepares a group that was added."""
        modes.refuse_twice(group["params"])
        if self._takes_gradients:
            self._attach(group["params"])

    @_disable_dynamo  # a hook runs inside of what is compiled where that calls backward()
    def _step_by_own(
        self,
        params: list[Tensor],
        numbers: list[int],
        scalars: tuple[Tensor | None, ...] | None,
    ) -> None:
        """Steps parameters of these groups with the gradients in ``.grad``; for ``_stepper``."""
        groups = self.param_groups
        if len(params) == 1 and scalars is None and not self._counts:  # most often: cheap
            group = groups[numbers[0]]
            if not self._clips_each or group.get("max_grad_norm") is None:
                self._step_groups({numbers[0]: part_of(group, params)})
                return
        norms = [groups[n].get("max_grad_norm") if self._clips_each else None for n in numbers]
        if scalars is not None or any(norm is not None for norm in norms):
            used = scale(params, norms, scalars or (None,) * 4)
            left = [(p, n) for p, n, use in zip(params, numbers, used, strict=True) if use]
            if not left:
                return
            params, numbers = [p for p, _ in left], [n for _, n in left]
        self._step_groups(restricted(groups, params, numbers, self._counts))

    def _step_groups(self, chosen: dict[int, dict[str, Any]]) -> None:
        """Steps with copies of groups, by number, and notes what that has counted in them: some
        options begin to change after more steps than the trial has made."""
        self._run_own_step(list(chosen.values()))
        for number, after in chosen.items():
            before = self.param_groups[number]
            for name, value in after.items():
                if value is before.get(name) or name in (*OF_EACH, *self._counts):
                    continue
                if not equal(before.get(name), value):
                    self._counts += (name,)
        if self._counts:
            self._counted.update(chosen)

    def _run_own_step(self, groups: list[dict[str, Any]]) -> None:
        self._stepping_thread = threading.get_ident()
        try:
            self._own_step(view(self._view, self.__dict__, groups))
        finally:
            self._stepping_thread = None

    def _first_step_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Steps a parameter that is not the optimizer's with the options of a group. Returns the
        state that was made for it. Nothing of the optimizer changes."""
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        (one,) = restricted([group], [param], [0], group).values()
        self._own_step(view(self._view, {**self.__dict__, "state": state}, [one]))
        return state[param]

    def _count_step(self) -> None:
        """Takes over what the step has counted in each group.

        Its parameters all began from the same count, as if they had been stepped together.
        """
        counted, self._counted = self._counted, {}
        for number, group in enumerate(self.param_groups):
            if number in counted:
                after = counted[number]
                group.update({name: after[name] for name in self._counts if name in after})
            elif self.grad_scaler is None:
                self._run_own_step([group])  # nothing has a gradient: its steps are counted

    def _count_on_device(self, groups: list[dict[str, Any]]) -> None:
        """Its own step counts where it does: whether to skip is read before it."""


def renew_counter(optimizer: Optimizer) -> None:
    """Has the schedulers that there are already count calls of the step() that its class has."""
    if "step" not in optimizer.__dict__:
        return
    reference: Callable[[], Any] = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = counted


@functools.cache
def class_of(own: Any) -> type[OwnStep]:
    """Returns the class of optimizers that had the class ``own``.

    ``own`` is its first base, so that an object can change from one to the other.
    """

    class Taken(own, OwnStep):  # type: ignore[misc]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            self._check_step(closure)
            loss = self._close_step(closure)
            if self._counts:
                self._count_step()
            return loss

        @functools.wraps(own.zero_grad, updated=())  # trainers look at the names of its arguments
        def zero_grad(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            super().zero_grad(*args, **kwargs)  # which may be a class's own, without arguments
            self._stepper.zero_grad(False)

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            try:
                self._take_group(self.param_groups[-1])
            except BaseException:
                del self.param_groups[-1]
                raise

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._stepper.begin_loading()
            super().load_state_dict(state_dict)
            self._stepper.end_loading()
            self._counted = {}

        def __reduce_ex__(self, protocol: Any) -> Any:
            reduced: Any = super().__reduce_ex__(protocol)
            function, args, *rest = reduced
            if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
                raise TypeError(
                    f"in_backward: an optimizer of class {own.__name__} cannot be copied or "
                    "pickled after in_backward(), as the class has its own __reduce__()"
                )
            return (_new, (own, *args[1:]), *rest)

        def __getstate__(self) -> dict[str, Any]:
            names = (
                "_in_backward", "_small_bytes", "_bucket_bytes", "_clips_each", "_counts",
                "_gradients",
            )  # fmt: skip
            return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

        def __setstate__(self, state: dict[str, Any]) -> None:
            old_groups = self.__dict__.get("param_groups")
            super().__setstate__(state)
            if old_groups is not None:  # load_state_dict() calls it, and may lack the norm
                modes.keep(old_groups, self.param_groups, scaled=False)
                return
            self._make_stepper()
            self._counted = {}
            if self._takes_gradients:
                self._attach(p for group in self.param_groups for p in group["params"])
            self._choose_unscaling()

    Taken._own, Taken._view = own, view_class(own)
    Taken._own_step = staticmethod(step_of(own))
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(Taken, name, getattr(own, name))
    return Taken


def _new(own: Any) -> Any:
    return object.__new__(class_of(own))
