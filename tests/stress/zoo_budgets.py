"""Whole models of libraries within budgets: plain's gradients bit for bit, and peaks as promised.

A seed is a model of the zoo and a share of its activations. Peaks are those of ``memory.track``,
which watches the allocator and knows nothing of what the block records.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import traceback
import warnings
from typing import Any

import pytest
import torch
import zoo
from helpers import gradients_and_peak
from torch import Tensor, nn

import memsave_ext as ms
from memsave_ext import _native

SHARES = (0.8, 0.6, 0.45)
PROMISED = 1.02  # times the budget, or the least where that is more
STEPS = 4


@functools.cache
def cases() -> list[tuple[str, float]]:
    """In an order of their own, so that the first few have some of everything."""
    found = [(name, share) for name in zoo.ENTRIES for share in SHARES]
    random.Random(1).shuffle(found)
    return found


def _step(model: nn.Module, loss: zoo.Loss, block: Any) -> tuple[list[Tensor | None], int]:
    """Gradients and peak of a step, which leaves the model as it was."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    grads, peak = gradients_and_peak(model, loss, block)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return grads, peak


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def check(name: str, share: float) -> list[float]:
    """Peaks of the second step and the later ones, by what was promised; raises for other bits."""
    entry = zoo.ENTRIES[name]
    model = entry.build()
    loss = entry.batch(model)
    # Each step collects; among all that was imported that takes longer than the step.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _step(model, loss, contextlib.nullcontext())  # libraries make caches in their first step
    plain, most = _step(model, loss, contextlib.nullcontext())
    ratios = []
    _native.module.remat_forget()
    for number in range(STEPS):
        block = ms.remat(model, budget=share)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a budget that is less than the least
            grads, peak = _step(model, loss, block)
        assert all(map(_is_same, plain, grads)), f"{name} {share}: other bits in step {number}"
        if number == 0:
            continue
        assert block.least is not None, f"{name} {share}: no plan in step {number}"
        if block.budget < most:  # where gradients come last, they leave room for activations
            assert block.figures().dropped_bytes > 0 and peak < most, f"{name} {share}: all kept"
        ratios.append(peak / max(block.budget, block.least))
    return ratios


def run_seed(seed: int, without: list[str], shrink: bool) -> tuple[str, str]:
    if not _native.available:
        return "refused: remat records natively", ""
    name, share = cases()[seed % len(cases())]
    if name in without:
        return "refused: left out", ""
    try:
        ratios = check(name, share)
    except pytest.skip.Exception as missing:
        return f"refused: {missing}", ""
    except Exception as error:
        return f"{name} {share}: {type(error).__name__}", traceback.format_exc()
    if max(ratios) > PROMISED:
        return f"{name} {share}: {max(ratios):.3f} times what was promised", str(ratios)
    return "", f"{name} {share}"
