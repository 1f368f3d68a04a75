"""Models that are wrapped for several processes are refused, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..fakes.mode import NotPredicted
from ..shared.dtensor import is_dtensor

_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp": "FSDP",
    "torch.distributed._composable": "FSDP",
}
_UNWRAPPED = (
    "Predict the model before it is wrapped, which is what one process holds without sharding, or "
    "with devices= a function that builds and wraps it; memory.footprint(model, optimizer) tells "
    "what a shard holds"
)


@contextmanager
def built_alone() -> Iterator[None]:
    """Raises an error that says what to do if DistributedDataParallel or FSDP fails inside."""
    try:
        yield
    except Exception as error:
        trace = error.__traceback__
        while trace is not None:
            module = trace.tb_frame.f_globals.get("__name__", "")
            for name, wrapper in _WRAPPERS.items():
                if module.startswith(name):
                    raise NotPredicted(
                        f"predict: {wrapper} cannot be predicted, as it communicates with other "
                        f"processes. {_UNWRAPPED}"
                    ) from error
            trace = trace.tb_next
        raise


def refuse_distributed(model: nn.Module) -> None:
    """Raises an error if a module is wrapped, or a parameter sharded, for several processes."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            what = f"module {name!r}" if name else "the model"
            raise ValueError(
                f"predict: {what} is a DistributedDataParallel, which communicates with other "
                f"processes. {_UNWRAPPED}"
            )
    for name, p in model.named_parameters():
        if is_dtensor(p):
            raise ValueError(
                f"predict: the parameter {name} is a DTensor, as FSDP2 makes them, and its "
                f"communication is not predicted. {_UNWRAPPED}"
            )
