"""The ways to checkpoint a region that the benchmarks compare."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.checkpoint.fallback.function import checkpoint_apply as python_apply
from shared.models import reasons

TORCH = "torch, use_reentrant=False"
REENTRANT = "torch, use_reentrant=True"
FAIRSCALE = "fairscale"
CHECKPOINT = "checkpoint"
ENGINE_HOOKS = "checkpoint, engine hooks"
EXPLICIT = "CheckpointFunction"
PURE_PYTHON = "CheckpointFunction, pure Python"


class _Module(nn.Module):
    """A region as a module."""

    def __init__(self, region: Callable[..., Tensor]) -> None:
        super().__init__()
        self.region = region

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.region(*inputs)


def steps(
    region: Callable[..., Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> dict[str, Callable[[], None]]:
    """A forward and backward of ``region`` per peer, beside ``plain`` and a ``forward`` alone."""
    tensors = [*inputs, *parameters]

    def backward(call: Callable[[], Tensor]) -> None:
        call().sum().backward()
        for tensor in tensors:
            tensor.grad = None

    def with_engine_hooks(call: Callable[[], Tensor]) -> None:
        ms.use_engine_hooks(True)
        backward(call)
        ms.use_engine_hooks(False)

    def forward() -> Any:
        region(*inputs)

    ours = partial(ms.checkpoint, region, *inputs)
    explicit = (region, len(inputs), *inputs, *parameters)
    peers: dict[str, Callable[[], None]] = {
        "forward": forward,
        "plain": partial(backward, partial(region, *inputs)),
        TORCH: partial(backward, partial(checkpoint, region, *inputs, use_reentrant=False)),
        REENTRANT: partial(backward, partial(checkpoint, region, *inputs, use_reentrant=True)),
        PURE_PYTHON: partial(backward, partial(python_apply, *explicit)),
        CHECKPOINT: partial(backward, ours),
    }
    if FAIRSCALE not in reasons():
        from fairscale.nn.checkpoint import checkpoint_wrapper

        peers[FAIRSCALE] = partial(backward, partial(checkpoint_wrapper(_Module(region)), *inputs))
    if _native.available:
        peers[ENGINE_HOOKS] = partial(with_engine_hooks, ours)
        peers[EXPLICIT] = partial(backward, partial(ms.CheckpointFunction.apply, *explicit))
    return peers
