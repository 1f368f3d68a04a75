"""Steps of any optimizer on the meta device: what state it will have, and what it makes besides."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SWITCHES = ("foreach", "fused", "capturable")  # of torch's optimizers: how, not what they compute


class DryStep(NamedTuple):
    state: dict[Any, Any]  # the optimizer's, after it
    temporaries: int  # bytes beside it, at their most


def dry_step(
    kind: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    *,
    foreach: bool,
) -> DryStep:
    """Step a new optimizer twice: the first makes state, the second is like those that follow.

    Values that Python reads from tensors are all 1. Hooks are not called.

    Args:
        kind: constructed with those of ``defaults`` that it takes.
        groups: param_groups whose parameters are on the meta device and have gradients.
        foreach: torch's implementation for lists of tensors, else its loop.

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
    """An option whose numbers may be on a device; what they are changes no size."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return 0.5
    if type(value) is tuple:
        return tuple(map(_without_tensors, value))
    return value


class _Meter(TorchDispatchMode):
    """Bytes of the tensors that operators make on the meta device, live and at their peak."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = known  # so that their addresses stay theirs
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
