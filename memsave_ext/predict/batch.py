"""Makes a training step of a model, its optimizer and a batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..fakes.mode import like, loss_in
from ..memory.measure import Build


def from_batch(
    model: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    loss: Callable[[Any], Tensor] | None,
) -> Build:
    """Returns a function that makes fake copies of all arguments, and a step of these.

    Raises:
        TypeError: ``optimizer`` is no optimizer; ``batch`` is missing.
        ValueError: ``optimizer`` has parameters that ``model`` has not.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"predict: optimizer must be a torch.optim.Optimizer or None, got "
            f"{type(optimizer).__name__}"
        )
    if batch is None:
        raise TypeError("predict: a model needs a batch, what it is called with")

    def build() -> tuple[nn.Module, Optimizer | None, Callable[[], object]]:
        copied = {id(t): like(t) for t in (*model.parameters(), *model.buffers())}
        # Gradients, and hooks on parameters, do not come along: an optimizer made of the copies
        # sets its own.
        model_copy = copy.deepcopy(model, dict(copied))
        made = None if optimizer is None else _remade(optimizer, copied)
        inputs = tree_map_only(Tensor, like, batch)

        def step() -> None:
            # The output is kept by nothing but its graph, as in a step that is written in one line.
            (loss or _loss_of)(_call(model_copy, inputs)).backward()
            if made is not None:
                made.step()
            model_copy.zero_grad()

        return model_copy, made, step

    return build


def _remade(optimizer: Optimizer, copied: Mapping[int, Tensor]) -> Optimizer:
    """Returns a new optimizer of the copied parameters, with the same options."""

    def parameter(p: Tensor) -> Tensor:
        if id(p) not in copied:
            raise ValueError(
                f"predict: optimizer has a parameter of shape {list(p.shape)} that is not in model"
            )
        return copied[id(p)]

    return remade(optimizer, type(optimizer), parameter, **_options_outside_groups(optimizer))


def remade(
    optimizer: Optimizer, kind: type[Optimizer], parameter: Callable[[Tensor], Tensor], **more: Any
) -> Optimizer:
    """Returns an optimizer of a kind that takes the groups and options of ``optimizer``.

    Args:
        optimizer: what to take them from.
        kind: the class of the new one.
        parameter: returns what stands for a parameter in the new one.
        **more: options that replace those.
    """
    groups = [
        {
            name: [parameter(p) for p in value] if name == "params" else value
            for name, value in group.items()
            if name not in more
        }
        for group in optimizer.param_groups
    ]
    return construct(kind, groups, optimizer.defaults, **more)


def construct(
    kind: type[Optimizer], groups: list[dict[str, Any]], defaults: Mapping[str, Any], **more: Any
) -> Optimizer:
    """Returns an optimizer of a kind, made with those of ``defaults`` that it takes."""
    taken = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in defaults.items() if name in taken}
    make: Any = kind
    made: Optimizer = make(groups, **options | more)
    return made


def _options_outside_groups(optimizer: Any) -> dict[str, Any]:
    """memsave_ext's Adam keeps some options outside of its groups."""
    if not type(optimizer).__module__.startswith("memsave_ext."):
        return {}
    return {
        "in_backward": optimizer._in_backward,
        "small_bytes": optimizer._small_bytes,
        "bucket_bytes": optimizer._bucket_bytes,
        "clip_global_norm": optimizer.clip_global_norm,
    }


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _loss_of(output: Any) -> Tensor:
    found = loss_in(output)
    if found is None:
        raise TypeError(
            "predict: the model returned no loss. Give loss, a function that makes it of what the "
            "model returned"
        )
    return found
