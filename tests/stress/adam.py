"""Random combinations of Adam's options, against an Adam in float64; and in backward against after
it, or with gradients elsewhere against gradients in memory, bit for bit."""

from __future__ import annotations

import math
import traceback
import warnings
from typing import Any

import torch
from oracles.adam import Oracle, clip_factor, too_far, wide
from torch import Tensor

from . import elsewhere
from .adam_cases import DEFAULTS, Case, generate, settled
from .adam_training import Training


def expected(case: Case, training: Training, oracles: list[Oracle], grads: Any, rates: Any) -> None:
    """The step in float64."""
    sums: list[Tensor | None] = []
    sizes: list[Tensor] = []
    for column in zip(*grads, strict=True):
        present = [g.resolve_conj().resolve_neg() for g in column if g is not None]
        sums.append(wide(sum(present[1:], present[0])) if present else None)
        sizes.append(sum(wide(g).abs() for g in present))
    infinite = [g is not None and not bool(g.isfinite().all()) for g in sums]
    measured = case["norm_pass"] and training.in_backward
    everything = case["clip_global_norm"] is not None or measured
    if case["scaler"] and everything and any(infinite):
        return
    limit = case["clip_global_norm"] or (0.7 if everything else None)
    # Each parameter's own clipping comes first.
    for i, total in enumerate(sums):
        if total is not None:
            own = clip_factor([total], case["max_grad_norm"])
            sums[i], sizes[i] = total * own, sizes[i] * own
    factor = clip_factor([g for g in sums if g is not None], limit)
    # A sum of n squares is off by sqrt(n) roundings or so, its root by half of that: in units of
    # what the oracle allows a gradient, which are 4 ulps.
    rounding = 0.0 if limit is None else math.sqrt(sum(p.numel() for p in training.params)) / 16
    for oracle, total, size, lr, bad in zip(oracles, sums, sizes, rates, infinite, strict=False):
        if total is not None and not (case["scaler"] and bad):
            oracle.update(
                total * factor, lr=lr, betas=case["betas"], eps=case["eps"],
                weight_decay=case["weight_decay"], amsgrad=case["amsgrad"],
                maximize=case["maximize"], decoupled=case["decoupled"],
                parts=size * factor * (1 + rounding),
            )  # fmt: skip


def storage(case: Case, dtype: torch.dtype) -> str:
    parts = [case["bf16"] or ""] if dtype == torch.bfloat16 else []
    if case["state_dtype"]:
        coded = case["state_dtype"] in ("8bit", "4bit")
        parts.append(case["state_dtype"] if coded else "states")
    return "+".join(parts)


def check(case: Case) -> str:
    if case["elsewhere"]:
        return elsewhere.check(case)
    trainings = [Training(case, in_backward) for in_backward in (True, False)]
    oracles = [[Oracle(p) for p in training.params] for training in trainings]
    bitwise = not case["norm_pass"]
    for number in range(case["steps"]):
        for training, own in zip(trainings, oracles, strict=True):
            if case["interlude"] and case["interlude"][1] == number:
                training.interlude(case["interlude"][0])
            grads, rates = training.step(number)
            expected(case, training, own, grads, rates)
            where = f"step {number}, {'in' if training is trainings[0] else 'after'} backward"
            values = training.values()
            for param, oracle, about in zip(training.params, own, case["params"], strict=True):
                value = values.get(id(param), param)
                if wrong := too_far(value, oracle, storage(case, about[0]), about[0]):
                    return f"wrong: {where}: {about}: {wrong}"
        if bitwise:
            both = (training.params for training in trainings)
            for a, b, about in zip(*both, case["params"], strict=True):
                if not torch.allclose(wide(a), wide(b), 0, 0, equal_nan=True):
                    return f"other bits in backward than after it: step {number}: {about}"
    return ""


def guarded(case: Case) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(case)
    except Exception as error:
        both = case["max_grad_norm"] and (case["clip_global_norm"] or case["norm_pass"])
        if isinstance(error, ValueError) and both:
            return f"refused: {error}"
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = ", ".join(f"{frame.name}:{frame.lineno}" for frame in frames)
        return f"error: {type(error).__name__}: {error} ({where})"


def shrink(case: Case, verdict: str) -> Case:
    progress = True
    while progress:
        progress = False
        smaller = [{**case, name: value} for name, value in DEFAULTS.items() if case[name] != value]
        smaller += [{**case, "steps": n} for n in range(1, case["steps"])]
        chosen = case["elsewhere"] or {}
        without = ({**chosen, name: None} for name, value in chosen.items() if value)
        smaller += [{**case, "elsewhere": fewer} for fewer in without]
        for i in range(len(case["params"]) if len(case["params"]) > 1 else 0):
            smaller.append({**case, "params": case["params"][:i] + case["params"][i + 1 :]})
        for other in smaller:
            if guarded(settled(dict(other)))[:12] == verdict[:12]:
                case, progress = settled(dict(other)), True
                break
    return case


def run_seed(seed: int, without: list[str], shrinks: bool) -> tuple[str, str]:
    case = generate(seed, without)
    verdict = guarded(case)
    if not verdict or verdict.startswith("refused"):
        return verdict, ""
    if shrinks:
        case = shrink(case, verdict)
        verdict = guarded(case)
    told = {n: v for n, v in case.items() if n not in DEFAULTS or v != DEFAULTS[n]}
    return verdict, f"# {told}"
