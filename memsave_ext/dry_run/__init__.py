"""Runs of real models on fake tensors, in child processes: nothing of the user's is touched."""

from .child import is_dry_run

__all__ = ["is_dry_run"]
