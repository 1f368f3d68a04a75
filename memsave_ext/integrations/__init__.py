"""What is for libraries that train models, each in a module that imports its library when it is
first used: ``ms.integrations.transformers.Fit``, ``ms.integrations.lightning.Fit``,
``ms.integrations.trl.patch_lm_head``."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("lightning", "transformers", "trl")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
