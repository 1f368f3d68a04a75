"""How gradients are scaled: by torch.amp.GradScaler's loss scale, and by the norm of all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._streams import current_stream, use_here
from . import shards


class Scaling(NamedTuple):
    """The scaling arguments of the operator ``adam_step_``, under their names."""

    grad_scale: Tensor | None
    found_inf: Tensor | None
    factor: Tensor | None
    skip: Tensor | None


def grad_scale_of(optimizer: Any) -> Tensor | None:
    """Returns the scale of the optimizer's GradScaler; None without one that is enabled."""
    scaler = getattr(optimizer, "grad_scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._get_scale_async()  # type: ignore[no-any-return]


class _PerStream:
    """Scalars that hooks accumulate into, one for each stream.

    Only that stream makes, changes and frees it, so that no hook waits for another stream.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, torch.cuda.Stream | None], Tensor] = {}

    def here(self, device: torch.device) -> Tensor | None:
        """Returns the tensor of the current stream; None at first."""
        return self._made.get(self._key(device))

    def set_here(self, tensor: Tensor) -> None:
        self._made[self._key(tensor.device)] = tensor

    def _key(self, device: torch.device) -> tuple[torch.device, torch.cuda.Stream | None]:
        return device, current_stream(device)

    def combined(self, combine: Any) -> list[Tensor]:
        """Returns for each device its tensors combined, ready on the current stream."""
        of_devices: dict[torch.device, Tensor] = {}
        for (device, stream), tensor in self._made.items():
            use_here(tensor, stream)
            others = of_devices.get(device)
            of_devices[device] = tensor if others is None else combine(others, tensor)
        return list(of_devices.values())


class FoundInf(_PerStream):
    """For each device a float scalar that is 1 where a gradient was not finite, else 0."""

    def on(self, device: torch.device) -> Tensor:
        """Returns the one that work on the current stream sets to 1 during this step."""
        found = self.here(device)
        if found is None:
            self.set_here(found := torch.zeros((), dtype=torch.float32, device=device))
        return found

    def take(self) -> list[Tensor]:
        """Returns those of the step, and begins the next."""
        if not self._made:
            return []
        found = self.combined(torch.maximum)
        self._made.clear()
        return found


class GradNorm:
    """The norm of all gradients together, and the factor that clips them to a maximum.

    Attributes:
        value: the norm of the gradients divided by their loss scale, before clipping: a float
            scalar; None until :meth:`finish`.
        skip: a float scalar that is 1 where the norm is not finite; None without a loss scale.
    """

    def __init__(self) -> None:
        self._squares: dict[int, _PerStream] = {}  # by number of the sharding
        self.value: Tensor | None = None
        self.skip: Tensor | None = None

    @torch.no_grad()
    def add(self, batch: Any) -> None:
        """Adds the gradients of a collector's batch, all on one device."""
        for sharding, square in batch.squares().items():
            sums = self._squares.setdefault(sharding, _PerStream())
            before = sums.here(square.device)
            sums.set_here(square if before is None else before + square)

    @torch.no_grad()
    def finish(self, max_norm: float, scale: Tensor | None, sharded: list[Tensor]) -> None:
        """Computes the norm and the factor. No gradients may be added after it.

        Args:
            scale: what the gradients are multiples of; None: they are not.
            sharded: one DTensor of each sharding among the optimizer's parameters. The shards' sums
                are added up over processes, in one collective for each, whether this process has
                added gradients or not.
        """
        sums: dict[int, Tensor] = {}
        for sharding, of_streams in self._squares.items():
            first, *others = of_streams.combined(torch.add)
            for other in others:
                first = first + other.to(first.device)
            sums[sharding] = first
        self.value, self._factor, self.skip = shards.clip_to_norm(sums, max_norm, scale, sharded)
        self._made_on = current_stream(self._factor.device)

    def scaling(self, device: torch.device) -> Scaling:
        """Returns the factor and the skip for gradients on this device."""
        use_here(self._factor, self._made_on)
        if self.skip is not None:
            use_here(self.skip, self._made_on)
        skip = None if self.skip is None else self.skip.to(device)
        return Scaling(None, None, self._factor.to(device), skip)
