"""Steps of one of several processes, as predictions make them: which are wrapped and how."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..adam.step_in_backward import InBackward
from ..fakes.storages import Collective
from ..memory.measure import Build, checked
from ..shared.checks import check_count
from ..shared.dtensor import is_dtensor
from .techniques import blocks_of

Shard = Literal["ddp", "fsdp2"]
_IMPORTS = ("memsave_ext.fakes.collectives", "torch.distributed.fsdp", "torch.distributed.tensor")


@dataclass(frozen=True)
class Ranks:
    """The processes that a step is predicted for, each with a device.

    Attributes:
        who: the function that errors are of.
        count: how many; None for those that there are, of a live model that is wrapped already.
        shard: what wraps the model; None where the function that builds it does.
    """

    who: str
    count: int | None
    shard: Shard | None

    def before(self, build: Build) -> Build:
        """Returns a function that builds what ``build`` does, with FSDP2's shards for each block
        and for the rest, where they are asked for."""

        @functools.wraps(build)
        def built() -> Any:
            model, optimizer, step = checked(f"{self.who}: build", self._built(build))
            if self.count is None:
                for ddp in _modules_in_ddp(model):
                    _collectives().renew(ddp)
                return model, optimizer, step
            self._check(model)
            if self.shard == "fsdp2":
                _shard(model, optimizer)
            return model, optimizer, step

        return built

    def after(self, build: Build) -> Build:
        """Returns a function that builds what ``build`` does, with DistributedDataParallel around
        the model, where it is asked for, and an optimizer in backward attached to it."""

        @functools.wraps(build)
        def built() -> Any:
            model, optimizer, step = checked(f"{self.who}: build", build())
            if self.shard == "ddp":
                _wrap(model)
            if isinstance(optimizer, InBackward) and optimizer.in_backward:
                for ddp in _collectives().wrapped():
                    if not optimizer._reductions:
                        optimizer.attach(ddp)
            return model, optimizer, step

        return built

    def join(self) -> Collective:
        """In a child: makes it one of the processes. Returns what runs collectives there."""
        collectives = _collectives()
        if self.count is None:
            collectives.stay()
        else:
            collectives.become_rank(self.count)
        run: Collective = collectives.run
        return run

    def settle(self, step: Callable[[], object]) -> None:
        """Makes the steps after the first that are not as later ones are."""
        for _ in range(2):
            if _collectives().will_change():
                step()

    def buckets(self) -> list[Tensor]:
        """Returns the memory that gradients are reduced in, from one step to the next."""
        found: list[Tensor] = _collectives().buckets()
        return found

    def _built(self, build: Build) -> Any:
        try:
            return build()
        except RuntimeError as error:
            if "Mesh should not be bigger" not in str(error):
                raise
            raise ValueError(
                f"{self.who}: the mesh that build makes is larger than devices={self.count}: "
                f"{error}"
            ) from error

    def _check(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ValueError(
                f"{self.who}: a module is wrapped in FullyShardedDataParallel, which is not "
                "predicted: shard it by fully_shard(), FSDP2"
            )
        is_wrapped = _collectives().wrapped() or any(map(is_dtensor, model.parameters()))
        if is_wrapped and self.shard is not None:
            raise ValueError(
                f"{self.who}: build wraps the model for several processes itself; leave out "
                f"shard={self.shard!r}"
            )
        if not is_wrapped and self.shard is None:
            raise ValueError(
                f"{self.who}: build wraps its model neither in DistributedDataParallel nor by "
                "fully_shard(). Pass shard='ddp' or shard='fsdp2' with devices="
            )


def ranks_of(who: str, devices: object, shard: object) -> Ranks | None:
    """Returns the processes that arguments name, None for one process.

    Raises:
        TypeError, ValueError: they name none.
    """
    if shard not in (None, "ddp", "fsdp2"):
        raise ValueError(f"{who}: shard must be None, 'ddp' or 'fsdp2', got {shard!r}")
    if devices is None:
        if shard is not None:
            raise TypeError(f"{who}: shard={shard!r} needs devices=, how many there are")
        return None
    check_count(f"{who}: devices", devices, 1)
    if not torch.distributed.is_available():
        raise ValueError(f"{who}: devices needs a torch that was built with torch.distributed")
    _import()
    return Ranks(who, devices, shard)  # type: ignore[arg-type]


def ranks_there(who: str) -> Ranks:
    """Returns the processes that there are, of a live model that is wrapped."""
    _import()
    return Ranks(who, None, None)


def is_wrapped(model: nn.Module) -> bool:
    """Whether a model is in DistributedDataParallel, or its parameters are DTensors."""
    return isinstance(model, DistributedDataParallel) or any(map(is_dtensor, model.parameters()))


def _import() -> None:
    for name in _IMPORTS:
        importlib.import_module(name)  # in each child it would take seconds


def _modules_in_ddp(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _collectives() -> Any:
    return importlib.import_module("memsave_ext.fakes.collectives")


def _shard(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Shards a model in place, and has its optimizer step the shards."""
    from torch.distributed.fsdp import fully_shard

    if optimizer is not None and optimizer.state:
        raise ValueError(
            "predict: the optimizer has states already, of whole parameters: predict with one that "
            "has not stepped yet"
        )
    has_hooks = isinstance(optimizer, InBackward) and optimizer._takes_gradients
    if has_hooks:
        optimizer.remove_hooks()  # type: ignore[union-attr]
    before = dict(model.named_parameters(remove_duplicate=False))
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    shards = {id(p): after[name] for name, p in before.items()}
    for group in () if optimizer is None else optimizer.param_groups:
        group["params"] = [shards.get(id(p), p) for p in group["params"]]
    if has_hooks:
        optimizer.renew_hooks()  # type: ignore[union-attr]


def _wrap(model: nn.Module) -> None:
    """Has a model's forward do what DistributedDataParallel does around it, in place.

    A model in another module would not do: the user's step calls the model that it knows.
    """
    ddp: Any = DistributedDataParallel(model)
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = ddp._pre_forward(*args, **kwargs)
        with ddp._inside_ddp_forward():
            result = forward(*args, **kwargs)
        return ddp._post_forward(result)

    model.forward = wrapped
