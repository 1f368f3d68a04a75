"""The folder of a store, as users name it."""

from __future__ import annotations

import os


def absolute_folder(folder: str | os.PathLike[str], must: str) -> str:
    """Returns the folder's path, absolute, as the program may go elsewhere.

    Args:
        folder: what came.
        must: the sentence that says what is allowed.

    Raises:
        ValueError: there is no such folder.
    """
    path = os.fspath(folder)
    if not os.path.isdir(path):  # as "" is not
        raise ValueError(f"{must}, got {path!r}")
    return os.path.abspath(path)
