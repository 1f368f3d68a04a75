"""Imports the compiled module. No other file imports it or reads MEMSAVE_EXT_NATIVE.

``auto`` (the default) uses the native part where it fits the running torch. ``0`` never uses it.
``1`` requires it: where it cannot be used, importing memsave_ext fails and names cause and fix.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # _C links against torch's libraries, which only this import makes findable.

from . import _cards

_FOLDER = Path(__file__).resolve().parent
_IN_SOURCE_TREE = (_FOLDER.parent / "setup.py").is_file()
_FIX = "run `pip install --no-build-isolation .`" + (
    f" or `python setup.py build_ext --inplace` in {_FOLDER.parent}"
    if _IN_SOURCE_TREE
    else " in a checkout of memsave_ext"
)


def _compiled_file(folder: Path) -> Path | None:
    """Returns the compiled file for this Python, else one for another Python, else None."""
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_C{suffix}"
        if path.is_file():
            return path
    return next((p for end in ("so", "pyd") for p in sorted(folder.glob(f"_C.*.{end}"))), None)


def _installed_and_hidden() -> Path | None:
    """Returns the installed package with a compiled file that this source tree, in whose folder
    Python was started, hides; None if there is none."""
    if not _IN_SOURCE_TREE:
        return None
    for found in importlib.metadata.distributions(name="memsave_ext"):
        folder = Path(str(found.locate_file("memsave_ext")))
        if not (folder.parent / "setup.py").is_file() and _compiled_file(folder) is not None:
            return folder
    return None


def _read_build_info() -> dict[str, Any]:
    try:
        info = json.loads((_FOLDER / "_build_info.json").read_text())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _minor(version: object) -> list[str]:
    return str(version).split("+")[0].split(".")[:2]


def _misfit(path: Path, info: dict[str, Any]) -> str | None:
    """Returns why the file must not be imported, or None.

    It is checked before the import, because a binary that does not fit can crash the process.
    """
    if not any(path.name == f"_C{suffix}" for suffix in EXTENSION_SUFFIXES):
        return f"{path.name} is not for Python {platform.python_version()}"
    if info.get("file") != path.name:
        return f"its build info describes another file than {path.name}"
    if _minor(info.get("torch")) != _minor(torch.__version__):
        return "a compiled file works only with the minor version of torch that it was built for"
    if info.get("cuda") and info.get("torch_cuda") != torch.version.cuda:
        return (
            f"it was built for CUDA {info.get('torch_cuda')}, and torch uses CUDA "
            f"{torch.version.cuda}"
        )
    return None


def _load() -> tuple[ModuleType | None, str]:
    choice = os.environ.get("MEMSAVE_EXT_NATIVE") or "auto"
    if choice not in ("auto", "0", "1"):
        raise ValueError(f"MEMSAVE_EXT_NATIVE must be auto, 0 or 1, got {choice!r}")
    if choice == "0":
        return None, "MEMSAVE_EXT_NATIVE=0"

    path = _compiled_file(_FOLDER)
    hidden = _installed_and_hidden() if path is None else None
    if hidden is not None:
        reason = (
            f"Python has found the source tree {_FOLDER.parent}, which has no compiled file, "
            f"before the installed {hidden}: run it in another folder"
        )
    elif path is None:
        where = "the source tree" if _IN_SOURCE_TREE else "the installed package"
        reason = f"{where} has no compiled file: {_FIX}"
    else:
        cause = _misfit(path, build_info)
        if cause is None:
            try:
                module = importlib.import_module("._C", __package__)
                return module, f"{path.name} was built for torch {build_info['torch']}"
            except ImportError as error:
                cause = str(error)
        reason = (
            f"the compiled file was built for torch {build_info.get('torch', 'unknown')} and "
            f"cannot be used with the running torch {torch.__version__} ({cause}): {_FIX}"
        )
    if choice == "1":
        raise ImportError(f"MEMSAVE_EXT_NATIVE=1, but {reason}")
    if path is not None or hidden is not None:
        message = f"memsave_ext runs in pure Python: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return None, reason


build_info: dict[str, Any] = _read_build_info()
module, reason = _load()
available: bool = module is not None
if module is not None and torch.version.cuda is not None:  # else torch uses no card
    missing = _cards.without_kernels(build_info, _cards.cards())
    if missing:
        warnings.warn(missing, RuntimeWarning, stacklevel=2)
