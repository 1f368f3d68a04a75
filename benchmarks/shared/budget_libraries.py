"""Imports what the models of remat_budgets.py need; its processes start after that."""

import contextlib

import pytest

from shared.budget_models import zoo

for name in ("transformers.modeling_utils", "timm.models"):
    with contextlib.suppress(pytest.skip.Exception):
        zoo.library(name)
