"""The libraries that models are trained with; tests are skipped where theirs is missing."""

import importlib
import importlib.util
import os

import pytest
import torch

from memsave_ext import _native as native

os.environ.setdefault("HF_HUB_OFFLINE", "1")

_operators = None


def library(name):
    """The module ``name``, as pytest.importorskip, which does not expect every error."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    try:
        _let_torchvision_be_imported()
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        if os.environ.get("MEMSAVE_EXT_LIBRARIES") == "1":  # they were installed for the tests
            raise
        pytest.skip(f"{name} cannot be imported: {error}")


def _let_torchvision_be_imported():
    """torchvision's wheels are made for CUDA. Beside a torch for CPUs its operators are not loaded,
    and the import fails where fakes of two of them are registered; with it that of timm, Lightning
    and transformers, which look for it. Declared, with nothing behind them, they are enough for
    everything here."""
    global _operators
    if _operators is not None or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        _operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


# Options of remat_module that have something to drop, however small a model is.
REMATERIALIZED = [
    pytest.param(
        options, marks=pytest.mark.skipif(not native.available, reason="remat records natively")
    )
    for options in ({"_everything": True}, {"budget": 0.01})
]
