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
        foreach, fused: accepted, change nothing but where ``state["step"]`` lies on CUDA (``fused``
            and ``capturable``: on the device).
        differentiable: torch's implementation runs; not with ``in_backward``.

    The state of float16 and bfloat16 parameters is float32. A loaded state keeps its dtype.

    Raises:
        ValueError: an argument out of range; a parameter in two groups; a parameter that another
            optimizer steps in backward; ``in_backward`` with ``differentiable``.
        RuntimeError: in backward, a second gradient for a parameter in one step outside of
            :meth:`accumulate`; a sparse gradient. From :meth:`step`, a backward that raised after
            some parameters were stepped, until :meth:`zero_grad`.

    torch's ``clip_grad_norm_`` sees no gradients with ``in_backward`` and clips nothing. Source:
    Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019, arXiv 1711.05101.
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
        self._small_bytes, self._bucket_bytes = small_bytes, bucket_bytes
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        # torch.amp.GradScaler would leave unscaling to the step, as torch's fused one does.
        self.__dict__.pop("_step_supports_amp_scaling", None)
        self._make_stepper()
        if in_backward:
            self._attach(p for g in self.param_groups for p in g["params"])
            self._in_backward = True

    @property
    def in_backward(self) -> bool:
        return self._in_backward

    def add_param_group(self, param_group: dict[str, Any]) -> None:
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
        if not self._stepper.step() and self._in_backward:
            self._check_not_orphaned()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none=False)
        self._stepper.zero_grad(set_to_none)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let gradients add up in ``.grad`` inside the block.

        Around all but the last backward of a step. The last one then steps with the sum, as with
        one backward over the whole batch; a parameter that it does not reach is stepped by
        :meth:`step`.
        """
        self._stepper.accumulate(True)
        try:
            yield
        finally:
            self._stepper.accumulate(False)

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
        final: dict[str, Any] = {}  # what the pre-hooks leave
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: final.update(loaded))
        self._loading = final
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            del self._loading

    def _restore_dtypes(self, loaded: dict[str, Any]) -> None:
        saved = itertools.chain.from_iterable(g["params"] for g in loaded["param_groups"])
        params = itertools.chain.from_iterable(g["params"] for g in self.param_groups)
        for index, param in zip(saved, params, strict=True):
            for key, value in loaded["state"].get(index, {}).items():
                if key != "step" and torch.is_tensor(value) and value.dtype != param.dtype:
                    self.state[param][key] = value.detach().to(param.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_in_backward", "_small_bytes", "_bucket_bytes")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "_loading"):
            self._restore_dtypes(self._loading)
        if "_stepper" not in self.__dict__:  # a copy, or one that was pickled
            self._make_stepper()
            if self._in_backward:
                self._attach(p for g in self.param_groups for p in g["params"])


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
