"""Steps any optimizer on the meta device, to see its state and the temporaries of its step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SWITCHES = ("foreach", "fused", "capturable")  # choose how torch computes, not what


class DryStep(NamedTuple):
    state: dict[Any, Any]  # the optimizer's state after the step
    temporaries: int  # the most bytes that were live besides the state


def dry_step(
    kind: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    *,
    foreach: bool,
) -> DryStep:
    """Steps a new optimizer twice: the first step makes state, the second is like all later ones.

    Values that Python reads from tensors are all 1. Hooks are not called.

    Args:
        kind: the optimizer's class.
        defaults: its options; it is constructed with those that it takes.
        groups: param_groups whose parameters are on the meta device and have gradients.
        foreach: whether to use torch's implementation for lists of tensors instead of its loop.

    Raises:
        Exception: whatever the optimizer raises.
    """
    taken = inspect.signature(kind.__init__).parameters
    switched = dict.fromkeys(SWITCHES, False) | {"foreach": foreach}

    def options(given: dict[str, Any]) -> dict[str, Any]:
        return {
            name: switched[name] if name in switched else _without_tensors(value)
            for name, value in given.items()
        }

    own = [options(group) for group in groups]
    keywords = {name: value for name, value in options(defaults).items() if name in taken}
    known = [t for g in groups for p in g["params"] for t in (p, p.grad) if t is not None]
    meter = _Meter(known)
    with meter:
        optimizer = kind(own, **keywords)
        step: Any = type(optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        for _ in range(2):
            step(optimizer)
    return DryStep(dict(optimizer.state), meter.peak - meter.live)


def _without_tensors(value: Any) -> Any:
    """Returns an option with 0.5 in place of tensors of one number, which may be on a device.

    Their values change no size.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return 0.5
    if type(value) is tuple:
        return tuple(map(_without_tensors, value))
    return value


class _Meter(TorchDispatchMode):
    """Counts the bytes of tensors that operators make on the meta device: live and peak."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = known  # kept alive, so that no other storage gets their addresses
        self._storages: dict[int, weakref.ref[torch.UntypedStorage] | None] = {
            part.untyped_storage()._cdata: None for part in known if part.layout == torch.strided
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_meta and leaf.layout == torch.strided:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._storages:
            return

        def freed(_: object) -> None:
            del self._storages[address]
            self.live -= size

        self._storages[address] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
