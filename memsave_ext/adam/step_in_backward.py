"""The optimizer's methods for steps in backward, for clipping and for loss scaling."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ..elsewhere.gradients import Gradients, any_elsewhere, bring_back, step_in_parts
from ..shared.checks import check_bool
from ..shared.dtensor import is_dtensor
from ..shared.large_memory import LargeMemory
from ..shared.warn import warn
from . import clip_guard, modes, owners
from .norms import grad_scale_of
from .rules import is_adam, rule_of
from .shards import clip_over_meshes, largest_of_processes
from .stepper import Stepper

SMALL_BYTES = 1 << 16
BUCKET_BYTES = 1 << 20


class InBackward(torch.optim.Optimizer):
    """Methods of :class:`~memsave_ext.Adam`, carried out by ``_stepper``."""

    _in_backward = False
    _stepper: Any
    _small_bytes = SMALL_BYTES
    _bucket_bytes = BUCKET_BYTES
    _steps_by_own = False  # whether the parameters are stepped by another package's step()
    _stepping_thread: int | None = None  # the one that is in such a step()
    _reductions: list[Any]  # one StepReduced for each attached DistributedDataParallel module
    _pauses = 0  # how many paused() blocks are open
    _accumulate_when: Callable[[], object] | None = None
    _clip_global_norm: float | None = None
    _grad_scaler: torch.amp.GradScaler | None = None
    _large_memory: LargeMemory | None = None  # while gradients are freed as they arrive
    _gradients: Gradients | None = None  # where they lie elsewhere, of grads_on=

    @property
    def _takes_gradients(self) -> bool:
        """Whether hooks take gradients as they arrive, to step with them or to put them away."""
        return self._in_backward or (self._gradients is not None and self._gradients.attached)

    def _make_stepper(self) -> None:
        self._stepper = Stepper(self, self._small_bytes, self._bucket_bytes, self._steps_by_own)
        self._reductions = []
        owners.note_optimizer(self)

    @property
    def in_backward(self) -> bool:
        """Whether parameters are stepped in backward."""
        return self._in_backward

    def attach(self, ddp: Any, hook: Any = None, state: Any = None) -> None:
        """Step a DistributedDataParallel module's parameters when their gradients are reduced.

        Call it once, before training; the optimizer can be made before or after ``ddp``. Accumulate
        gradients with ``with ddp.no_sync(), opt.accumulate():``. FSDP2 does not need this call.

        Args:
            ddp: the ``torch.nn.parallel.DistributedDataParallel``.
            hook, state: a communication hook that reduces the gradients, as for
                ``ddp.register_comm_hook``, for instance one that compresses; by default torch's
                all-reduce.

        Raises:
            TypeError: ``ddp`` is something else.
            ValueError: not ``in_backward``; with ``grads_on``; no parameter of ``ddp`` is in this
                optimizer.
            RuntimeError: ``ddp`` has a communication hook, or is attached to another optimizer.
        """
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                "ddp must be a torch.nn.parallel.DistributedDataParallel, got "
                f"{type(ddp).__name__}. FSDP2's parameters need no attach()."
            )
        if self._gradients is not None:
            raise ValueError(
                "attach() cannot be combined with grads_on: DistributedDataParallel has all "
                "gradients in its buckets. Leave one of them out"
            )
        if not self._in_backward:
            clips = ", which clip_global_norm has switched off" if self.clip_global_norm else ""
            raise ValueError(
                f"attach() is only for optimizers with in_backward=True{clips}: leave attach() "
                "out, as step() finds the gradients that ddp has reduced"
            )
        ours = set(map(id, _params_of(self)))
        params: list[Tensor] = [p for p in ddp.parameters() if id(p) in ours]
        if not params:
            raise ValueError("attach: ddp has no parameter that is in this optimizer")
        from .ddp import attach

        self._reductions.append(attach(self, ddp, params, hook, state))

    def remove_hooks(self) -> None:
        """Stop stepping in backward: remove all hooks and go on as an ordinary optimizer.

        With ``grads_on`` later gradients stay in memory.
        """
        self._large_memory = None
        if self._gradients is not None:
            self._gradients.detach()
        for reduction in self._reductions:
            reduction.detach()
        self._reductions.clear()
        self._stepper.detach()
        self._in_backward = False
        self._choose_unscaling()

    def _release(self, params: list[Tensor]) -> None:
        """Leaves to others these parameters, which were taken out of the groups."""
        if self._gradients is not None:
            self._gradients.release(params)
        self._stepper.release(params)

    def renew_hooks(self) -> None:
        """Step in backward again after :meth:`remove_hooks`; with ``grads_on`` gradients leave
        again.

        Raises:
            ValueError: the optimizer could not have been made with ``in_backward=True``: it has a
                ``clip_global_norm``, or ``differentiable=True``.
        """
        if self._gradients is not None:
            self._attach(_params_of(self))
        elif not self._in_backward:
            if self.clip_global_norm is not None:
                raise ValueError(
                    "renew_hooks: clip_global_norm needs all gradients, which a step in backward "
                    "frees as they arrive: set it to None, or use grads_on="
                )
            if self._is_differentiable:
                raise ValueError(
                    "renew_hooks: differentiable=True steps nothing in backward: make the "
                    "optimizer without it"
                )
            self._attach(_params_of(self))
            self._in_backward = True
            self._choose_unscaling()

    def zero_grad(self, set_to_none: bool = True) -> None:
        check_bool("set_to_none", set_to_none)
        if not set_to_none:
            super().zero_grad(set_to_none=False)
        self._stepper.zero_grad(set_to_none)

    def _check_step(self, closure: object) -> None:
        """Raises where step() cannot be called now, or with this closure."""
        if self._pauses:
            raise RuntimeError(
                "memsave_ext: step() was called inside of paused(), where nothing is stepped. Call "
                "it after the `with` block."
            )
        if closure is not None and not callable(closure):
            raise TypeError(
                "closure must be a function without arguments, or None, got "
                f"{type(closure).__name__}"
            )

    @_disable_dynamo  # a compiled training step calls it
    def _close_step(self, closure: Callable[[], Any] | None) -> Any:
        """Steps what has a gradient, closes the step and returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward:
            lost = self._stepper.lost()
        else:
            lost = [] if self._gradients is None else self._gradients.lost(self)
        if lost:
            self._attach(lost)
            does = "are stepped in backward" if self._in_backward else "have gradients elsewhere"
            warn(
                f"memsave_ext: {len(lost)} parameters had lost their hook, with which they {does} "
                "(the parameters or their tensors were replaced, or something replaced the hook). "
                "The hooks are attached again, and this step uses the gradients in .grad.",
                RuntimeWarning,
            )
        unscaled = self._check_scaler()
        if unscaled and self._unscale_has_found_infinity():
            self._step_without_gradients()
        elif not self._step_all(unscaled) and self._takes_gradients:
            self._check_not_orphaned()
        if self.grad_scaler is not None and (scale := grad_scale_of(self)) is not None:
            self._report_to_scaler(self.grad_scaler, scale)
        return loss

    def _unscale_has_found_infinity(self) -> bool:
        """Whether ``GradScaler.unscale_()`` has found a gradient that was not finite: clipping may
        have made it finite since."""
        found = getattr(self, "found_inf", None)
        if not isinstance(found, Tensor):
            return False
        params = list(_params_of(self))
        if any(map(is_dtensor, params)):
            found = largest_of_processes(params, found)
        return bool(found)

    def _step_without_gradients(self) -> None:
        """Closes a step for which nothing in ``.grad`` is used; it stays there, as with torch's."""
        grads = [(param, param.grad) for param in _params_of(self)]
        for param, _ in grads:
            param.grad = None
        try:
            self._stepper.step(0.0, True)
        finally:
            for param, grad in grads:
                param.grad = grad

    def _step_all(self, unscaled: bool) -> int:
        """Steps what has a gradient, where gradients lie elsewhere a part after the other, and
        returns how many parameters have been stepped, backwards included."""
        # All processes go one way, whether or not their shards are large enough to lie elsewhere.
        is_sharded = self._gradients is not None and any(map(is_dtensor, _params_of(self)))
        if not is_sharded and not any_elsewhere(_params_of(self)):
            return int(self._stepper.step(self.clip_global_norm or 0.0, unscaled))
        params = list(_params_of(self))
        if self.clip_global_norm is not None:
            modes.refuse_two_norms(self.param_groups)
            self._stepper.note_norm(clip_over_meshes(params, self.clip_global_norm).float())
        return step_in_parts(params, lambda: self._stepper.step(0.0, unscaled))

    def _attach(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        for param in params:
            if not param.is_leaf:
                raise ValueError("in_backward=True: can't step a non-leaf Tensor in backward")
        owners.refuse_taken(self, params)
        self._large_memory = self._large_memory or LargeMemory()
        if self._gradients is not None:
            self._gradients.attach(self, params)
            return
        bring_back(params)
        self._stepper.attach(params)
        for reduction in self._reductions:
            reduction.tell_hooks()
        clip_guard.install()

    def _check_not_orphaned(self) -> None:
        """Raises RuntimeError where only the optimizer still refers to its parameters.

        Called where no parameter has received a gradient.
        """
        params = list(_params_of(self))
        (in_a_list,) = _reference_counts([torch.empty(0, device="cpu")])
        for param, count in zip(params, _reference_counts(params), strict=True):
            # The group's list refers to it once more, and so does the state.
            if count > in_a_list + 1 + (param in self.state):
                return
        raise RuntimeError(
            "memsave_ext: no parameter has received a gradient, and nothing but the optimizer "
            "refers to them: the model seems to have new parameters, as after "
            "load_state_dict(assign=True). Make a new optimizer from the model's parameters, and "
            "load the state_dict() of this one into it."
        )

    # ---- gradients that add up, and backwards that step nothing ----

    @contextlib.contextmanager
    def accumulate(self, fold: bool = False) -> Iterator[None]:
        """Let gradients add up in ``.grad`` inside the block.

        Put it around all but the last backward of a step. The last one then steps with the sum, as
        one backward over the whole batch would; :meth:`step` steps the parameters that the last
        backward does not reach.

        Raises:
            ValueError: ``fold``, which was removed.
        """
        _refuse_fold("accumulate", fold)
        self._stepper.accumulate(True)
        try:
            yield
        finally:
            self._stepper.accumulate(False)

    @contextlib.contextmanager
    def paused(self, *, keep: bool = False) -> Iterator[None]:
        """Step nothing in the backwards inside the block, whose losses must not train this model.

        For example, the discriminator's optimizer is paused in the generator's step of a GAN::

            with opt_d.paused():
                loss_g(discriminator(generator(z))).backward()

        It applies to the backwards of all threads, as :meth:`accumulate` does.

        Args:
            keep: leave gradients in ``.grad``, to which later ones are added. Otherwise each
                gradient is dropped as it arrives, and ``.grad`` is restored when the block ends.

        Raises:
            RuntimeError: ``keep`` after :meth:`norm_pass`; :meth:`step` is called in the block.
        """
        check_bool("keep", keep)
        params = list(_params_of(self))
        self._stepper.pause(True, keep)
        self._pauses += 1
        before: list[Tensor | None] = []
        if not keep:
            for param in params:
                before.append(param.grad)
                param.grad = None
        try:
            yield
        finally:
            self._pauses -= 1
            self._stepper.pause(False, keep)
            for param, grad in zip(params, before, strict=not keep):
                param.grad = grad

    def accumulate_when(
        self, condition: Callable[[], object] | None, *, fold: bool = False
    ) -> None:
        """Accumulate where ``condition`` says so: :meth:`accumulate` for loops that a trainer runs.

        Call it once, before training::

            opt.accumulate_when(lambda: not accelerator.sync_gradients)

        A copied or unpickled optimizer has no condition; call this again.

        Args:
            condition: called when the first gradient of a backward arrives; returns true where the
                backward is not the last of its step. None removes the condition.

        Raises:
            TypeError: ``condition`` is neither callable nor None.
            ValueError: ``fold``, which was removed.
        """
        if condition is not None and not callable(condition):
            raise TypeError(
                "accumulate_when: condition must be a function without arguments, or None, got "
                f"{type(condition).__name__}"
            )
        _refuse_fold("accumulate_when", fold)
        self._accumulate_when = condition

    def _on_gradients(self) -> str:
        """Returns what a backward does with its gradients: "step" or "keep"."""
        return "keep" if self._accumulate_when is not None and self._accumulate_when() else "step"

    # ---- clipping by the norm of all gradients ----

    @property
    def _is_differentiable(self) -> bool:
        """Whether torch's own implementation steps; False while the optimizer is being made."""
        return bool(self.__dict__.get("defaults", {}).get("differentiable"))

    @property
    def clip_global_norm(self) -> float | None:
        """The global norm that :meth:`step` clips all gradients to; None: no clipping."""
        return self._clip_global_norm

    @clip_global_norm.setter
    def clip_global_norm(self, norm: float | None) -> None:
        if norm is not None:
            modes.check_norm("clip_global_norm", norm)
            if self._in_backward:
                raise ValueError(
                    "clip_global_norm needs all gradients, which in_backward=True frees as they "
                    "arrive: pass it when the optimizer is made, call remove_hooks() first, or use "
                    "grads_on="
                )
            modes.refuse_two_norms(self.__dict__.get("param_groups", []))
            if self._is_differentiable:
                modes.refuse_differentiable({"clip_global_norm": norm})
        self._clip_global_norm = norm

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm of the last step's gradients before clipping, a float32 scalar.

        None where neither ``clip_global_norm`` nor :meth:`norm_pass` has measured it.
        """
        norm: Tensor | None = self._stepper.grad_norm()
        return norm

    @contextlib.contextmanager
    def norm_pass(self, max_norm: float) -> Iterator[None]:
        """Measure the global norm and drop the gradients, so that the next backward can clip.

        It will be removed: with ``grads_on=`` torch's ``clip_grad_norm_`` clips exactly in one
        backward. This takes a second one, without keeping all gradients::

            with opt.norm_pass(max_norm=1.0):
                loss.backward(retain_graph=True)
            loss.backward()                        # clipped by the norm of all
            opt.step()

        Instead of ``retain_graph`` the forward can be run again. :attr:`grad_norm` is the norm.

        Raises:
            ValueError: without ``in_backward``; with ``clip_global_norm`` or ``max_grad_norm``.
            RuntimeError: gradients are being accumulated, or were stepped already.
        """
        warn(
            "memsave_ext: norm_pass() will be removed: use grads_on=, with which torch's "
            "clip_grad_norm_ clips exactly in one backward",
            FutureWarning,
        )
        modes.check_norm("max_norm", max_norm)
        if self.clip_global_norm is not None:
            raise ValueError(
                "norm_pass() cannot be combined with clip_global_norm, which clips in one backward "
                "and keeps the gradients: leave one of them out"
            )
        if not self._in_backward:
            raise ValueError(
                "norm_pass() is only for optimizers with in_backward=True: use clip_global_norm= "
                "instead"
            )
        modes.refuse_two_norms(self.param_groups)
        self._stepper.begin_norm_pass()
        finished = False
        try:
            yield
            finished = True
        finally:
            self._stepper.end_norm_pass(max_norm if finished else None)

    # ---- torch.amp.GradScaler ----

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The training loop's GradScaler; None without one.

        It can be set later, before training, where a trainer makes it. A copied or unpickled
        optimizer has none and must be given it again.
        """
        return self._grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        groups: list[dict[str, Any]] = self.__dict__.get("param_groups", [])
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
        if scaler is not None:
            if self._is_differentiable:
                modes.refuse_differentiable({"grad_scaler": scaler})
            modes.refuse_scaler(self._gradients)
            self._count_on_device(groups)
        self._grad_scaler = scaler
        self._choose_unscaling()

    def _count_on_device(self, groups: list[dict[str, Any]]) -> None:
        """Moves step counts to the device: whether a step is skipped is known only there."""
        for group in groups:
            if is_adam(rule_of(group)) and not group.get("capturable"):
                group["fused"] = True
            for param in group["params"]:
                if "step" in (state := self.state.get(param, {})):
                    state["step"] = state["step"].to(param.device, torch.float32)

    def _choose_unscaling(self) -> None:
        """Sets whether GradScaler leaves unscaling to :meth:`step`, as for torch's fused Adam."""
        self._step_supports_amp_scaling = self._in_backward or self._grad_scaler is not None

    def _check_scaler(self) -> bool:
        """Returns whether the gradients in ``.grad`` have been unscaled already.

        ``GradScaler.step`` sets grad_scale around this call, and sets it to None if they have.
        """
        if not hasattr(self, "grad_scale"):
            return False
        if self.grad_scaler is None:
            raise RuntimeError(
                "memsave_ext: GradScaler.step() was called for an optimizer that has stepped in "
                "backward, with gradients that were still multiplied by the scale. Pass the scaler "
                "to the optimizer before training: grad_scaler=scaler where the optimizer is made, "
                "or opt.grad_scaler = scaler where a trainer has made it "
                "(trainer.accelerator.scaler, trainer.precision_plugin.scaler)."
            )
        return self.grad_scale is None

    def _report_to_scaler(self, scaler: torch.amp.GradScaler, scale: Tensor) -> None:
        """Hands ``scaler`` the found_inf tensors by which its ``update()`` adapts the scale."""
        found_inf = self._stepper.found_inf() or [torch.zeros_like(scale)]
        params = list(_params_of(self))
        if any(map(is_dtensor, params)):  # the processes must adapt the scale alike
            here = torch.stack([tensor.to(found_inf[0].device) for tensor in found_inf]).amax()
            found_inf = [largest_of_processes(params, here)]
        # GradScaler has no public function for this; its unscale_() fills the same dict.
        found = scaler._per_optimizer_states[id(self)]["found_inf_per_device"]
        for tensor in found_inf:
            before = found.get(tensor.device, tensor)
            found[tensor.device] = torch.maximum(before, tensor.reshape(before.shape))


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _refuse_fold(method: str, fold: bool) -> None:
    check_bool("fold", fold)
    if fold:
        raise ValueError(
            f"{method}(fold=True) was removed, as its steps were approximate: use grads_on=, with "
            "which gradients add up elsewhere, exactly, or accumulate() without fold"
        )


def _reference_counts(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors]
