"""What the optimizers of this package share: options, steps by kernels, saving and loading."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..shared.checks import check_bool
from ..shared.dtensor import local_tensor
from ..shared.warn import warn
from . import kahan, modes
from .elsewhere import place_of, put_state, put_states
from .own_optimizer import step_of
from .rules import rule_of
from .states import sizes_of_states
from .step_in_backward import BUCKET_BYTES, SMALL_BYTES, InBackward


class Native(InBackward):
    """Methods of :class:`~memsave_ext.Adam`, :class:`SGD` and :class:`Lion`."""

    def _take_options(
        self,
        options: dict[str, Any],
        *,
        in_backward: bool = False,
        small_bytes: int = SMALL_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
        bf16: str | None = None,
        state_dtype: torch.dtype | str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        states_on: str | os.PathLike[str] | None = None,
        grads_on: str | os.PathLike[str] | None = None,
        clip_global_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Checks and keeps all options before the optimizer is made. ``options``: the rule's."""
        check_bool("in_backward", in_backward)
        modes.check_options(options)
        modes.check_ranges(options)
        if in_backward and options.get("differentiable"):
            raise ValueError(
                "differentiable=True cannot be combined with in_backward=True: a step in backward "
                "has no autograd graph. Leave one of them out."
            )
        modes.check_bytes("small_bytes", small_bytes)
        modes.check_bytes("bucket_bytes", bucket_bytes)
        self._small_bytes, self._bucket_bytes = small_bytes, bucket_bytes
        self._gradients = modes.gradients_of(grads_on, grad_scaler)
        self.clip_global_norm, self.grad_scaler = clip_global_norm, grad_scaler
        given: dict[str, Any] = {
            "bf16": bf16, "state_dtype": state_dtype, "seed": seed, "max_grad_norm": max_grad_norm,
            "states_on": place_of(states_on),
        }  # fmt: skip
        kahan.replace_given(given)
        self._modes = {name: v for name, v in given.items() if v != modes.DEFAULTS[name]}
        if options.get("differentiable"):
            ours = {
                "clip_global_norm": clip_global_norm, "grad_scaler": grad_scaler,
                "grads_on": grads_on,
            }  # fmt: skip
            modes.refuse_differentiable(self._modes | ours)

    def _begin(self, in_backward: bool) -> None:
        """Makes the stepper and attaches it, after the optimizer is made."""
        self._reserve(self.param_groups)
        self._make_stepper()
        if self._gradients is not None:
            self._attach(p for g in self.param_groups for p in g["params"])
        elif in_backward and self.clip_global_norm is None:
            self._attach(p for g in self.param_groups for p in g["params"])
            self._in_backward = True
        elif in_backward:
            warn(
                "memsave_ext: clip_global_norm needs all gradients, so that in_backward=True steps "
                "nothing in backward: leave in_backward out, or use max_grad_norm or grads_on= in "
                "place of clip_global_norm",
            )
        self._choose_unscaling()

    @staticmethod
    def _reserve(groups: list[dict[str, Any]]) -> None:
        """Makes room for states that lie elsewhere, so that a full disk is seen before a step."""
        for place, sizes in sizes_of_states(groups).items():
            place.reserve(sizes)

    def _without_states(self) -> list[dict[str, Any]]:
        """Returns the groups with the parameters alone that have no state yet."""
        return [
            group | {"params": [param for param in group["params"] if param not in self.state]}
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and "params" in param_group:
            params = param_group["params"]
            if not isinstance(params, (Tensor, set)):  # torch refuses a set
                param_group["params"] = list(params)  # it is read more than once
            for name, value in self._modes.items():
                param_group.setdefault(name, value)
            kahan.replace_given(param_group)
            if "states_on" in param_group:
                param_group["states_on"] = place_of(param_group["states_on"])
            modes.refuse_twice(param_group["params"])
            modes.refuse_options(param_group, self.defaults, type(self).__name__)
            complete = {**self.defaults, **param_group}
            modes.check_options(complete)
            modes.check_ranges(complete)
            modes.check_group(param_group, rule_of(complete))
            if self._is_differentiable:
                ours = {name: param_group[name] for name in modes.DEFAULTS if name in param_group}
                modes.refuse_differentiable(ours)
            if self.clip_global_norm is not None:
                modes.refuse_two_norms([param_group])
        super().add_param_group(param_group)
        if "_stepper" in self.__dict__:
            try:
                self._reserve(self._without_states())
                if self._takes_gradients:
                    self._attach(self.param_groups[-1]["params"])
            except BaseException:
                del self.param_groups[-1]
                raise
        if self._grad_scaler is not None:
            self._count_on_device(self.param_groups[-1:])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; with ``in_backward``, close the step.

        Args:
            closure: evaluates the model again, runs backward and returns the loss. With
                ``in_backward`` its backward steps, and this call closes the step.

        Returns:
            What ``closure`` returned.
        """
        self._check_step(closure)
        if self._is_differentiable:
            # Without torch's step hooks, which this method has around itself.
            return step_of(super(Native, type(self)))(self, closure)
        return self._close_step(closure)

    # ---- saving and loading ----

    def fp32_parameters(self) -> list[Tensor]:
        """Returns float32 copies of the parameters, in the order of ``param_groups``.

        Those of bfloat16 parameters include what ``bf16="split"`` or ``"split8"`` keeps beside
        them, unless the parameter has been overwritten since its last step. Those of complex ones
        are complex64.
        """
        self._drop_stale_low_parts()
        return [
            modes.fp32_parameter(param, self.state.get(param, {}), group)
            for group in self.param_groups
            for param in group["params"]
        ]

    def to_fp32_state_dict(self, state_dict: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the ``state_dict`` as torch's optimizer has it, which any of its rule can load.

        Moments of 4, 8 and 16 bits are float32 in it; this class's options are left out. For the
        parameters see :meth:`fp32_parameters`.

        Args:
            state_dict: is converted in place of the optimizer's own: what torch's
                ``get_optimizer_state_dict(model, opt)`` returns, with names in place of numbers.
        """
        return modes.to_fp32(self.state_dict() if state_dict is None else state_dict)

    def state_dict(self) -> dict[str, Any]:
        self._drop_stale_low_parts()
        return modes.to_saved(super().state_dict())

    def _drop_stale_low_parts(self) -> None:
        """Zeroes what is kept beside overwritten parameters, as their next step would.

        Before states are read: waits for those that are being written back.
        """
        for group in self.param_groups:
            if (place := group.get("states_on")) is not None:
                place.wait()
        for param, state in self.state.items():
            if isinstance(state, dict) and (low_part := state.get("param_rest")) is not None:
                self._stepper.drop_stale_low_part(local_tensor(param), local_tensor(low_part))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but state keeps its own dtype (pytorch#43706).

        It is a fresh start: what the open step has come to is forgotten, a backward that raised
        included. With ``in_backward`` gradients in ``.grad`` are dropped.

        Raises:
            RuntimeError: while a backward runs.
            ValueError: the ``state_dict`` does not fit, as in torch, or is of another mode.
        """
        groups = self.param_groups

        # Registered last, it gets the state_dict as the other pre-hooks leave it.
        def look(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            self._loading = modes.from_saved(loaded)
            modes.check_loadable(self._loading, groups)
            return modes.without_tensors(self._loading)

        self._stepper.begin_loading()
        before = {"state": self.state, "param_groups": self.param_groups}
        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.__dict__.update(before)
            raise
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)
        self._stepper.end_loading()

    def _finish_loading(self, loaded: dict[str, Any], old_groups: list[dict[str, Any]]) -> None:
        """Fills in the tensors of states, one parameter after the other: in its own format each is
        in memory but once."""
        modes.keep(old_groups, self.param_groups, scaled=self.grad_scaler is not None)
        self._reserve(self.param_groups)
        saved = itertools.chain.from_iterable(g["params"] for g in loaded["param_groups"])
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param, {})
                given = modes.from_bitsandbytes(loaded["state"].get(next(saved), {}), group)
                for key, value in modes.tensors_in(given).items():
                    is_as_torchs = value.dtype == param.dtype  # which torch does not copy
                    state[key] = value.detach().to(param.device, copy=not is_as_torchs)
                if not state:
                    continue
                modes.convert_loaded(param, state, group)
                # The device knows what is skipped.
                if "step" in state and self.grad_scaler is not None:
                    state["step"] = state["step"].to(param.device, torch.float32)
                self.state[param] = put_state(state, group, param.device)

    def __getstate__(self) -> dict[str, Any]:
        self._drop_stale_low_parts()
        own = (
            "_in_backward", "_small_bytes", "_bucket_bytes", "_modes", "_clip_global_norm",
            "_gradients",
        )  # fmt: skip
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        old_groups = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        if hasattr(self, "_loading"):
            self._finish_loading(self._loading, old_groups)
        if "_stepper" not in self.__dict__:  # this is a copied or unpickled optimizer
            self.grad_scaler = None
            kahan.replace(self._modes)
            modes.convert_unpickled(self.state, self.param_groups)
            put_states(self.state, self.param_groups)
            self._make_stepper()
            if self._takes_gradients:
                self._attach(p for g in self.param_groups for p in g["params"])
            self._choose_unscaling()
