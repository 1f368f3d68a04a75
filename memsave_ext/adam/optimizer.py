"""Adam and AdamW."""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _native
from .._reference.adam_stepper import AdamStepper as _ReferenceStepper
from . import modes
from .dtensor import is_dtensor

SMALL_BYTES = 1 << 16
BUCKET_BYTES = 1 << 20


class Adam(torch.optim.Adam):
    """Adam, in one native call, or stepped in backward while gradients arrive.

    Drop-in for :class:`torch.optim.Adam`: same arguments and ``param_groups``, and a ``state_dict``
    that each loads from the other. With ``in_backward=True`` the training loop stays as it is::

        opt = ms.Adam(model.parameters(), lr=3e-4, in_backward=True)
        loss.backward()        # updates each parameter when its gradient is complete, and frees it
        opt.step()             # closes the step; applies what is left in .grad
        opt.zero_grad()
        scheduler.step()       # param_groups are read at each backward

    FSDP2's parameters are stepped when their gradients have been reduced and scattered;
    DistributedDataParallel's after :meth:`attach`.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, capturable,
            decoupled_weight_decay: as in torch. A tensor ``lr`` on CUDA is read on the device.
        in_backward: step in backward. One step per parameter between two calls of :meth:`step`.
        small_bytes, bucket_bytes: gradients of fewer than ``small_bytes`` wait in ``.grad`` until
            there are ``bucket_bytes`` of them, or backward ends, and are stepped together.
        bf16: how bfloat16 parameters keep what an update adds to less than their precision:
            ``"stochastic"`` rounds at random, ``"kahan"`` keeps the rest in another bfloat16,
            ``"split"`` the lower half of a float32 in an int16. None rounds to nearest.
        state_dtype: of the moments: ``torch.bfloat16``, rounded at random, or ``"8bit"``, in blocks
            of 256 with a scale, from 4096 elements on; None is float32, float64 for float64.
        seed: of random rounding.
        max_grad_norm: clips each parameter's gradient to this norm.
        clip_global_norm: clips all gradients together, exactly as ``clip_grad_norm_``. They are
            kept until :meth:`step`, so that nothing is stepped in backward and no memory is saved;
            :meth:`norm_pass` saves it.
        grad_scaler: the ``torch.amp.GradScaler`` of the training loop, whose calls stay as they
            are. A parameter whose gradient is not finite is not stepped, others are.
        foreach, fused: accepted, change nothing but where ``state["step"]`` lies on CUDA (``fused``
            and ``capturable``: on the device; a ``grad_scaler`` sets ``fused``).
        differentiable: torch's implementation runs; not with ``in_backward``.

    bf16, state_dtype, seed and max_grad_norm can differ between param groups. The state of float16
    and bfloat16 parameters is float32. A loaded state keeps its dtype; torch's becomes one of this
    optimizer's mode, another mode's is refused (:meth:`to_fp32_state_dict` is torch's).

    Raises:
        ValueError: an argument out of range; a parameter in two groups; a parameter that another
            optimizer steps in backward; ``in_backward`` with ``differentiable``.
        RuntimeError: in backward, a second gradient for a parameter in one step outside of
            :meth:`accumulate`; a sparse gradient. From :meth:`step`, a backward that raised after
            some parameters were stepped, until :meth:`zero_grad`.

    torch's ``clip_grad_norm_`` sees no gradients with ``in_backward`` and clips nothing. Source:
    Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019, arXiv 1711.05101; 8-bit states:
    Dettmers et al. 2022, arXiv 2110.02861.
    """

    _in_backward = False
    _small_bytes = SMALL_BYTES
    _bucket_bytes = BUCKET_BYTES

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        in_backward: bool = False,
        small_bytes: int = SMALL_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
        bf16: str | None = None,
        state_dtype: torch.dtype | str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        clip_global_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        if in_backward and options.get("differentiable"):
            raise ValueError(
                "differentiable=True cannot be combined with in_backward=True: a step in backward "
                "has no graph. Leave one of them out."
            )
        for name, value in (("small_bytes", small_bytes), ("bucket_bytes", bucket_bytes)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an int and at least 0, got {value!r}")
        if clip_global_norm is not None:
            modes.check_norm("clip_global_norm", clip_global_norm)
        self._small_bytes, self._bucket_bytes = small_bytes, bucket_bytes
        self.clip_global_norm, self.grad_scaler = clip_global_norm, grad_scaler
        given = {
            "bf16": bf16, "state_dtype": state_dtype, "seed": seed, "max_grad_norm": max_grad_norm
        }  # fmt: skip
        self._modes = {name: v for name, v in given.items() if v != modes.DEFAULTS[name]}
        if grad_scaler is not None and not options.get("capturable") and not options.get("foreach"):
            options.setdefault("fused", True)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._make_stepper()
        if in_backward and clip_global_norm is None:
            self._attach(p for g in self.param_groups for p in g["params"])
            self._in_backward = True
        self._choose_unscaling()

    @property
    def in_backward(self) -> bool:
        """Whether parameters are stepped in backward."""
        return self._in_backward

    @property
    def grad_norm(self) -> Tensor | None:
        """Of all gradients in the last step, before they were clipped: a float32 scalar. None where
        neither ``clip_global_norm`` nor :meth:`norm_pass` has measured it."""
        return self._stepper.grad_norm()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and "params" in param_group:
            params = param_group["params"]
            if not isinstance(params, (Tensor, set)):  # which torch refuses
                param_group["params"] = list(params)  # read more than once
            for name, value in self._modes.items():
                param_group.setdefault(name, value)
            amsgrad = param_group.get("amsgrad", self.defaults["amsgrad"])
            modes.check_group(param_group, amsgrad)
            if self.clip_global_norm is not None:
                self._refuse_dtensors("clip_global_norm", param_group["params"])
        super().add_param_group(param_group)
        if self._in_backward:
            try:
                self._attach(self.param_groups[-1]["params"])
            except BaseException:
                del self.param_groups[-1]
                raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; with ``in_backward``, close the step.

        Args:
            closure: evaluates the model again and returns the loss. With ``in_backward`` it must
                not call backward.

        Returns:
            What ``closure`` returned.
        """
        if self.defaults["differentiable"]:
            return super().step(closure)
        loss = None
        if closure is not None:
            self._stepper.forbid(self._in_backward)
            try:
                with torch.enable_grad():
                    loss = closure()
            finally:
                self._stepper.forbid(False)
        if self._in_backward and (lost := self._stepper.attach_lost()):
            warnings.warn(
                f"memsave_ext: {lost} parameters had lost their hook (their tensors were swapped, "
                "or something else took its place). It is attached again; this step is made from "
                "what is in .grad.",
                RuntimeWarning,
                stacklevel=3,
            )
        unscaled = self._check_scaler()
        if not self._stepper.step(self.clip_global_norm or 0.0, unscaled) and self._in_backward:
            self._check_not_orphaned()
        if self.grad_scaler is not None and self.grad_scaler.is_enabled():
            self._report_to_scaler(self.grad_scaler)
        return loss

    def _choose_unscaling(self) -> None:
        """Whether torch.amp.GradScaler leaves it to :meth:`step`, as for torch's fused Adam."""
        self._step_supports_amp_scaling = self._in_backward or self.grad_scaler is not None

    def _check_scaler(self) -> bool:
        """Whether gradients in ``.grad`` have been unscaled. ``GradScaler.step`` sets grad_scale
        around this call, to None where they have."""
        if not hasattr(self, "grad_scale"):
            return False
        if self.grad_scaler is None:
            raise RuntimeError(
                "Adam: GradScaler.step() for an optimizer that has stepped in backward, with "
                "gradients multiplied by the scale. Hand it over when making the optimizer: "
                f"{type(self).__name__}(..., in_backward=True, grad_scaler=scaler)"
            )
        return self.grad_scale is None

    def _report_to_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """What ``scaler.update()`` adapts the scale by."""
        found = self._stepper.found() or [torch.zeros_like(scaler._get_scale_async())]  # type: ignore[arg-type]
        # GradScaler has no public way: this is what its unscale_() fills.
        state = scaler._per_optimizer_states[id(self)]
        state["found_inf_per_device"] = {tensor.device: tensor for tensor in found}

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none=False)
        self._stepper.zero_grad(set_to_none)

    @contextlib.contextmanager
    def accumulate(self, fold: bool = False) -> Iterator[None]:
        """Let gradients add up in ``.grad`` inside the block.

        Around all but the last backward of a step. The last one then steps with the sum, as with
        one backward over the whole batch; a parameter that it does not reach is stepped by
        :meth:`step`.

        Args:
            fold: add them to the moments instead, at once, so that there is no memory of gradients
                at all. The first moment is exact. The second needs the square of the sum, and gets
                it from the first, of which meanwhile only 16 bits of the old value are kept, as of
                the second's: off by less than one percent of Adam's step. States of float32 or
                float64 only.

        Raises:
            ValueError: ``fold`` without ``in_backward``, or with what needs the sum of gradients
                before they are folded: a grad_scaler, max_grad_norm, clip_global_norm; or with
                another state_dtype.
        """
        if fold:
            self._check_foldable()
        self._stepper.accumulate(True, fold)
        try:
            yield
        finally:
            self._stepper.accumulate(False, fold)

    def _check_foldable(self) -> None:
        def refuse(other: str, way_out: str) -> None:
            raise ValueError(f"accumulate(fold=True) cannot be combined with {other}: {way_out}")

        if self.clip_global_norm is not None:
            refuse("clip_global_norm", "the norm is that of whole gradients. Use accumulate().")
        if not self._in_backward:
            refuse("in_backward=False", "gradients are folded in backward. Use accumulate().")
        if self.grad_scaler is not None:
            refuse("grad_scaler", "an infinity would stay in the moments. Use accumulate().")
        for group in self.param_groups:
            if group.get("max_grad_norm") is not None:
                refuse("max_grad_norm", "the norm is that of whole gradients. Use accumulate().")
            if (dtype := modes.of_group(group, "state_dtype")) is not None:
                refuse(f"state_dtype={dtype!r}", "folding takes the bits of a float32 state.")

    @contextlib.contextmanager
    def norm_pass(self, max_norm: float) -> Iterator[None]:
        """Measure the norm of all gradients, and drop them, so that the next backward is clipped.

        Exact, without the memory of all gradients, for the time of a second backward::

            with opt.norm_pass(max_norm=1.0):
                loss.backward(retain_graph=True)
            loss.backward()                        # clipped by the norm of all
            opt.step()

        Instead of ``retain_graph`` the forward can be run again. :attr:`grad_norm` is the norm.

        Raises:
            ValueError: not ``in_backward``, or with ``clip_global_norm``; DTensors.
            RuntimeError: gradients are being accumulated, or were stepped already.
        """
        modes.check_norm("max_norm", max_norm)
        if self.clip_global_norm is not None:
            raise ValueError(
                "norm_pass() cannot be combined with clip_global_norm, which clips in one backward "
                "and keeps the gradients: leave one of them out"
            )
        if not self._in_backward:
            raise ValueError("norm_pass() is for in_backward=True: use clip_global_norm=")
        params = [p for g in self.param_groups for p in g["params"]]
        self._refuse_dtensors("norm_pass()", params)
        self._stepper.begin_norm_pass()
        finished = False
        try:
            yield
            finished = True
        finally:
            self._stepper.end_norm_pass(max_norm if finished else None)

    @staticmethod
    def _refuse_dtensors(what: str, params: Any) -> None:
        if any(is_dtensor(param) for param in ([params] if isinstance(params, Tensor) else params)):
            raise ValueError(
                f"{what} would measure each process's part of DTensors alone: use "
                "torch.nn.utils.clip_grad_norm_ and an optimizer without in_backward"
            )

    def fp32_parameters(self) -> list[Tensor]:
        """Copies of the parameters, as ``param_groups`` has them, in float32: for bfloat16 ones
        with what ``bf16="kahan"`` or ``"split"`` keeps beside them."""
        return [
            modes.fp32_parameter(param, self.state.get(param, {}), group)
            for group in self.param_groups
            for param in group["params"]
        ]

    def to_fp32_state_dict(self) -> dict[str, Any]:
        """The ``state_dict`` as torch's Adam would have it, to be loaded by any: moments of 8 and
        16 bits in float32, without this class's options. For parameters, see
        :meth:`fp32_parameters`."""
        return modes.to_fp32(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        self._check_not_folding()
        return super().state_dict()

    def _check_not_folding(self) -> None:
        if count := self._stepper.folded():
            raise RuntimeError(
                f"Adam: {count} parameters have gradients folded into their moments that are not "
                "stepped yet. Finish the step first."
            )

    def attach(self, ddp: Any, hook: Any = None, state: Any = None) -> None:
        """Step the parameters of a DistributedDataParallel module when they have been reduced.

        Once, before training; the optimizer can be older or younger than ``ddp``. Accumulate with
        ``with ddp.no_sync(), opt.accumulate():``. FSDP2 needs no call.

        Args:
            ddp: the ``torch.nn.parallel.DistributedDataParallel``.
            hook, state: a communication hook to reduce with, as for ``ddp.register_comm_hook``,
                for instance one that compresses; torch's all-reduce otherwise.

        Raises:
            TypeError: ``ddp`` is something else.
            ValueError: not ``in_backward``, or no parameter of ``ddp`` is in this optimizer.
            RuntimeError: ``ddp`` has a communication hook.
        """
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                "ddp must be a torch.nn.parallel.DistributedDataParallel, got "
                f"{type(ddp).__name__}. FSDP2's parameters need no attach()."
            )
        if not self._in_backward:
            raise ValueError(
                "attach() is for in_backward=True: without it step() finds reduced gradients"
            )
        ours = {id(p) for g in self.param_groups for p in g["params"]}
        params: list[Tensor] = [p for p in ddp.parameters() if id(p) in ours]
        if not params:
            raise ValueError("ddp has no parameter that is in this optimizer")
        from .ddp import attach

        self._reductions.append(attach(self, ddp, params, hook, state))

    def remove_hooks(self) -> None:
        """Give the parameters back as they were; the optimizer goes on as an ordinary one."""
        for reduction in self._reductions:
            reduction.detach()
        self._reductions.clear()
        self._stepper.detach()
        self._in_backward = False
        self._choose_unscaling()

    def _attach(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        for param in params:
            if not param.is_leaf:
                raise ValueError("in_backward=True: can't step a non-leaf Tensor in backward")
        self._stepper.attach(params)

    def _make_stepper(self) -> None:
        kind = _native.module.AdamStepper if _native.module else _ReferenceStepper
        self._stepper = kind(self, self._small_bytes, self._bucket_bytes)
        self._reductions: list[Any] = []  # of DistributedDataParallel modules

    def _check_not_orphaned(self) -> None:
        """No parameter has had a gradient: are they still those of a model?"""
        params = [p for g in self.param_groups for p in g["params"]]
        (in_a_list,) = _reference_counts([torch.empty(0)])
        for param, count in zip(params, _reference_counts(params), strict=True):
            if count > in_a_list + 1 + (param in self.state):  # one more for the group's list
                return
        raise RuntimeError(
            "Adam: no parameter has received a gradient, and nothing but the optimizer refers to "
            "them: the model has other ones by now, as after load_state_dict(assign=True). Make "
            "the optimizer anew, and load_state_dict() this one's state_dict() into it."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its own dtype (pytorch#43706)."""
        groups = self.param_groups

        def look(_: Any, loaded: dict[str, Any]) -> None:  # at what other pre-hooks leave
            modes.check_loadable(loaded["param_groups"], groups)
            self._loading = loaded

        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)

    def _finish_loading(self, loaded: dict[str, Any], old_groups: list[dict[str, Any]]) -> None:
        modes.keep(old_groups, self.param_groups)
        saved = itertools.chain.from_iterable(g["params"] for g in loaded["param_groups"])
        for group in self.param_groups:
            for param in group["params"]:
                for key, value in loaded["state"].get(next(saved), {}).items():
                    if key != "step" and torch.is_tensor(value) and value.dtype != param.dtype:
                        self.state[param][key] = value.detach().to(param.device, copy=True)
                if self.state.get(param):
                    modes.convert_loaded(param, self.state[param], group)

    def __getstate__(self) -> dict[str, Any]:
        self._check_not_folding()
        own = ("_in_backward", "_small_bytes", "_bucket_bytes", "_modes", "clip_global_norm")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        old_groups = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        if hasattr(self, "_loading"):
            self._finish_loading(self._loading, old_groups)
        if "_stepper" not in self.__dict__:  # a copy, or one that was pickled
            self.grad_scaler = None
            self._make_stepper()
            if self._in_backward:
                self._attach(p for g in self.param_groups for p in g["params"])
            self._choose_unscaling()


class AdamW(Adam):
    """:class:`Adam` with decoupled weight decay; drop-in for :class:`torch.optim.AdamW`."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        if "decoupled_weight_decay" in options:
            raise TypeError("AdamW has no argument decoupled_weight_decay; Adam has")
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=True, **options
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


def _reference_counts(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors]
