"""The optimizer's side of loss scaling with torch.amp.GradScaler."""

from __future__ import annotations

from typing import Any

import torch

from .clipping import Clipping
from .dtensor import is_dtensor
from .shards import largest_of_processes


class LossScaling(Clipping):
    """Methods of :class:`~memsave_ext.Adam`."""

    _grad_scaler: torch.amp.GradScaler | None = None

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
            if self.__dict__.get("defaults", {}).get("differentiable"):
                raise ValueError(
                    "differentiable=True, which is torch's implementation, has no grad_scaler"
                )
            self._count_on_device(groups)
        self._grad_scaler = scaler
        self._choose_unscaling()

    def _count_on_device(self, groups: list[dict[str, Any]]) -> None:
        """Moves step counts to the device: whether a step is skipped is known only there."""
        for group in groups:
            if not group.get("capturable") and not group.get("foreach"):
                group["fused"] = True
            for param in group["params"]:
                if state := self.state.get(param):
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
                "memsave_ext: GradScaler.step() for an optimizer that has stepped in backward, "
                "with gradients multiplied by the scale. Hand it over before training, with "
                "grad_scaler=scaler where the optimizer is made, or opt.grad_scaler = scaler where "
                "a trainer has made it (trainer.accelerator.scaler, "
                "trainer.precision_plugin.scaler)."
            )
        return self.grad_scale is None

    def _report_to_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Hands ``scaler`` the found_inf tensors by which its ``update()`` adapts the scale."""
        found_inf = self._stepper.found_inf() or [torch.zeros_like(scaler._get_scale_async())]  # type: ignore[arg-type]
        params = [param for group in self.param_groups for param in group["params"]]
        if any(map(is_dtensor, params)):  # the processes must adapt the scale alike
            here = torch.stack([tensor.to(found_inf[0].device) for tensor in found_inf]).amax()
            found_inf = [largest_of_processes(params, here)]
        # GradScaler has no public function for this; its unscale_() fills the same dict.
        state = scaler._per_optimizer_states[id(self)]
        state["found_inf_per_device"] = {tensor.device: tensor for tensor in found_inf}
