"""Which parts run in pure Python beside native ones: MEMSAVE_EXT_DISABLE and disable().

No other file reads that variable. A part asks :func:`native` for the compiled module, and where it
has operators it gives their Python kernels to :func:`add_kernel`. MEMSAVE_EXT_NATIVE=0 is the same
for all parts at once.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from . import _native

__all__ = ["disable"]

DEVICES = ("cpu", "cuda")
_WITH_KERNELS = ("adam", "batch_norm", "loss_head")
PARTS = (*_WITH_KERNELS, "checkpoint", "memory", "remat")
NAMES = tuple(
    name
    for part in PARTS
    for name in (part, *(f"{part}.{d}" for d in DEVICES if part in _WITH_KERNELS))
)
# Native regions, and no others, hear of native steps and are heard of by native trackers and remat.
_OFF_WITH_CHECKPOINT = ("adam", "memory", "remat")

_off: set[str] = set()
_libraries: list[torch.library.Library] = []  # a kernel goes when its library does
_kernels: dict[str, list[tuple[str, Callable[..., Any], str]]] = {}


def native(part: str) -> ModuleType | None:
    """Returns the compiled module for the code of a part around its kernels, or None."""
    if part in _off:
        return None
    # In Python Adam steps on all devices, and calls the kernels that are on.
    if part == "adam" and not _off.isdisjoint(f"adam.{device}" for device in DEVICES):
        return None
    return _native.module


def why_not(part: str) -> str:
    """Says why :func:`native` returns None."""
    if not _native.available:
        return _native.reason
    return f"{part} was switched off with MEMSAVE_EXT_DISABLE or disable()"


def disabled() -> tuple[str, ...]:
    """The names of what is off, in the order of ``NAMES``."""
    return tuple(name for name in NAMES if name in _off)


def runs_in_python(part: str, device: str) -> bool:
    """Whether the kernels of a part for a type of devices are off."""
    return part in _off or f"{part}.{device}" in _off


def add_kernel(
    part: str, operator: str, kernel: Callable[..., Any], key: str | None = None
) -> None:
    """Names the Python kernel of a native operator, for when the part is off.

    ``key``: the dispatch key of a native kernel of the whole part; without it those of the devices.
    """
    for name, of_key in (
        ((part, key),) if key else ((f"{part}.{d}", d.upper()) for d in DEVICES)
    ):  # fmt: skip
        _kernels.setdefault(name, []).append((operator, kernel, of_key))
        if name in _off or part in _off:
            _override([(operator, kernel, of_key)])


def python_kernel(operator: str) -> Callable[..., Any]:
    """Returns what :func:`add_kernel` was given for the devices."""
    of_devices = itertools.chain.from_iterable(
        kernels for name, kernels in _kernels.items() if "." in name
    )
    return next(kernel for name, kernel, _ in of_devices if name == operator)


def disable(*parts: str) -> None:
    """Run parts in pure Python from now on, as MEMSAVE_EXT_DISABLE does from the start.

    For a machine on which a part is wrong or fails, as ``python -m memsave_ext.check`` says.
    Results are those of pure Python. ``python -m memsave_ext.report`` shows what is off. There is
    no way back within a process. Without the native part it changes nothing.

    Args:
        *parts: "adam" (all optimizers, those made from then on), "batch_norm" and "loss_head", each
            also with ".cpu" or ".cuda" for the kernels of such devices alone; "memory" (tracking),
            "remat" (which keeps everything then) and, only in MEMSAVE_EXT_DISABLE, "checkpoint",
            with which "adam", "memory" and "remat" are off, too.

    Raises:
        ValueError: there is no such part.
        RuntimeError: "checkpoint", which is chosen when memsave_ext is imported.
    """
    _check(parts, "disable")
    if "checkpoint" in parts and "checkpoint" not in _off:
        raise RuntimeError(
            "disable: checkpoint cannot be switched off after memsave_ext has been imported: set "
            "MEMSAVE_EXT_DISABLE=checkpoint in the environment before the import"
        )
    for part in parts:
        for name in (part, *(f"{part}.{device}" for device in DEVICES)):
            if name not in _off and part not in _off:
                _override(_kernels.get(name, ()))
        _off.add(part)


def _check(parts: Iterable[str], said_by: str) -> None:
    for part in parts:
        if part not in NAMES:
            raise ValueError(
                f"{said_by}: there is no part {part!r}; the parts are {', '.join(NAMES)}"
            )


def _override(kernels: Iterable[tuple[str, Callable[..., Any], str]]) -> None:
    if not _native.available:
        return  # the Python kernels are the only ones
    library = torch.library.Library("memsave_ext", "FRAGMENT")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*other operators may also be overridden", UserWarning)
        for operator, kernel, key in kernels:
            library.impl(operator, kernel, key, allow_override=True)


_given = [name.strip() for name in os.environ.get("MEMSAVE_EXT_DISABLE", "").split(",")]
_check((name for name in _given if name), "MEMSAVE_EXT_DISABLE")
_off.update(name for name in _given if name)
if "checkpoint" in _off:
    _off.update(_OFF_WITH_CHECKPOINT)
