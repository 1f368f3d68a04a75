"""The folder of a store, as users name it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def absolute_folder(folder: str | os.PathLike[str], must: str) -> str:
    """Returns the folder's path, absolute, as the program may go elsewhere.

    Args:
        folder: what came.
        must: the sentence that says what is allowed.

    Raises:
        ValueError: there is no such folder, or the system is not Linux.
    """
    path = os.fspath(folder)
    if not os.path.isdir(path):  # as "" is not
        raise ValueError(f"{must}, got {path!r}")
    if sys.platform != "linux":
        raise ValueError(f"{must}; a folder can be used on Linux only, and this is {sys.platform}")
    return os.path.abspath(path)


def is_in_memory(folder: str) -> bool:
    """Whether what is written to a folder stays in memory; False where the system does not tell."""
    path = Path(folder).resolve()
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    kinds = {Path(point): kind for _, point, kind, *_ in map(str.split, lines)}  # the last counts
    mounted = next((p for p in (path, *path.parents) if p in kinds), None)
    return mounted is not None and kinds[mounted] in _IN_MEMORY
