"""The factors of gradients: clipping, and unscaling by torch.amp.GradScaler's loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..._streams import current_stream, use_here
from .. import dtensor, shards
from ..precise import total
from .operator import Prepared, sum_of_squares


def grad_scale_of(optimizer: Any) -> Tensor | None:
    scaler = getattr(optimizer, "grad_scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._get_scale_async()  # type: ignore[no-any-return]


class _Made:
    """A tensor that hooks on other streams may read."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._stream = tensor, current_stream(tensor.device)

    def here(self) -> Tensor:
        use_here(self._tensor, self._stream)
        return self._tensor


class GradNorm:
    """The global norm of gradients, and the factor that clips them."""

    def __init__(self) -> None:
        self._squares: dict[int, _Made] = {}  # sums of squares, by the parameter's id
        self._of_shards: dict[int, list[_Made]] = {}  # those of shards, by number of the sharding
        self.value: Tensor | None = None  # the unscaled norm before clipping; None until finish()
        self.factor: _Made | None = None  # clips and unscales a gradient; None until finish()
        self.skip: _Made | None = None  # 1 if the norm is not finite; None without a loss scale

    def add(self, param: Tensor, grad: Tensor) -> None:
        square = sum_of_squares(dtensor.local_gradient(param, grad))
        number = shards.sharding_of(param)[0] if dtensor.is_dtensor(param) else 0
        self._squares[id(param)] = _Made(torch.zeros_like(square) if number else square)
        if number:
            self._of_shards.setdefault(number, []).append(_Made(square))

    def __contains__(self, param: Tensor) -> bool:
        return id(param) in self._squares

    def finish(self, max_norm: float, scale: Tensor | None, sharded: list[Tensor]) -> None:
        """Computes the norm and the factor from the gradients added. Ends the adding.

        ``sharded`` has one DTensor of each sharding among the optimizer's parameters: the shards'
        sums are added up over processes, in one collective for each, whether this process has
        added gradients or not.
        """
        sums: dict[int, Tensor] = {}
        whole = [square.here() for square in self._squares.values()]
        if whole:
            zero = torch.zeros((), dtype=torch.double)
            sums[0] = sum((square.to(whole[0].device) for square in whole), zero)
        for number, of_shards in self._of_shards.items():
            sums[number] = total(torch.stack([square.here() for square in of_shards]))
        self.value, factor, skip = shards.clip_to_norm(sums, max_norm, scale, sharded)
        self.factor = _Made(factor)
        self.skip = None if skip is None else _Made(skip)


class Scaling:
    """How the gradients of a step are scaled.

    Attributes:
        norm: the global norm, where it is measured or clips; else None.
        last_norm: the value of the last global norm; None before the first.
        last_found_inf: found_inf of the last step, a tensor per device that is 1 where a gradient
            was not finite; empty without a loss scale.
    """

    def __init__(self) -> None:
        self.norm: GradNorm | None = None
        self.last_norm: Tensor | None = None
        self.last_found_inf: list[Tensor] = []
        # One for each stream, which alone changes it.
        self._found_inf: dict[tuple[torch.device, torch.cuda.Stream | None], _Made] = {}

    @property
    def clips_all(self) -> bool:
        return self.norm is not None and self.norm.factor is not None

    def measure(self, param: Tensor, grad: Tensor) -> None:
        assert self.norm is not None
        self.norm.add(param, grad)

    def finish_norm(self, max_norm: float, scale: Tensor | None, sharded: list[Tensor]) -> None:
        assert self.norm is not None
        self.norm.finish(max_norm, scale, sharded)
        self.last_norm = self.norm.value

    def clip_together(
        self,
        grads: Iterable[tuple[Tensor, Tensor]],
        max_norm: float,
        scale: Tensor | None,
        sharded: list[Tensor],
    ) -> None:
        """Measures the global norm of complete gradients, given with their parameters.

        Other processes may have gradients where this one has none: all take part.
        """
        grads = list(grads)
        if not grads and not sharded:
            return
        self.norm = GradNorm()
        for param, grad in grads:
            self.norm.add(param, grad)
        self.finish_norm(max_norm, scale, sharded)

    def on(self, device: torch.device, scale: Tensor | None) -> dict[str, Tensor | None]:
        """Returns the operator's scaling arguments on ``device``.

        ``scale`` is the loss scale of the gradients; None without one.
        """
        if self.norm is not None and self.norm.factor is not None:
            factor, skip = self.norm.factor.here(), self.norm.skip
            return {
                "factor": factor.to(device),
                "skip": None if skip is None else skip.here().to(device),
            }
        if scale is None:
            return {}
        key = device, current_stream(device)
        if key not in self._found_inf:
            self._found_inf[key] = _Made(torch.zeros((), device=device))
        return {"grad_scale": scale.to(device), "found_inf": self._found_inf[key].here()}

    def agree(
        self, param: Tensor, prepared: list[Prepared], scale: Tensor | None
    ) -> dict[str, Tensor | None]:
        """Returns the operator's scaling arguments for shards that are split as ``param``.

        All have the same max_grad_norm. A collective.
        """
        here = torch.stack([sum_of_squares(p.grad) for p in prepared if p.grad is not None])
        by = self.on(here.device, scale)
        max_norm = prepared[0].group.get("max_grad_norm") or 0.0
        factor, skip = shards.agree(
            param, here, max_norm, by.get("grad_scale"), by.get("found_inf")
        )
        return {"factor": factor, "skip": skip}

    def end_step(self) -> None:
        of_devices: dict[torch.device, Tensor] = {}
        for (device, _), made in self._found_inf.items():
            found, others = made.here(), of_devices.get(device)
            of_devices[device] = found if others is None else torch.maximum(others, found)
        self.last_found_inf = list(of_devices.values())
        if self.norm is not None and self.norm.skip is not None:
            self.last_found_inf.append(self.norm.skip.here())
        self._found_inf, self.norm = {}, None
