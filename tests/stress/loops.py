"""What a random training loop has shown."""

from __future__ import annotations

import warnings
from collections.abc import Callable


def verdict_of(run: Callable[[], str]) -> str:
    """Returns what is wrong with a loop, which says so or raises it; nothing where all is well."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except AssertionError as error:
        return f"wrong: {error or 'other parameters'}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
