"""How far Adam's modes are from exact Adam, in made-up gradients and in a training.

*Distance.* 100 steps on gradients mu + noise, with mu = snr * N(0, 1) constant, of its own for each
element, and noise of N(0, 1) in every micro-gradient; rounded to bfloat16, so that all see the
same. Weights start from 0.02 * N(0, 1). With dp what a mode has moved the parameters by, a low
precision's rest included, and exact that of torch's AdamW in float64::

    distance = norm(dp - exact) / norm(exact)

Accumulating modes have 4 micro-batches a step, exact Adam the sum of them. Where a norm is clipped,
gradients are multiplied by exp(N(0, 1)) in each step, or Adam would not notice, and those of the
tensors by 1, 2, 4 and 8; norms are limited to half of the largest one's. "spread" is that of scales
within a block of 8-bit states: gradients times exp(spread * N(0, 1)), constant for each element,
of which Adam itself knows nothing.

*Loss.* A small vision transformer learns the digits; the mean loss of the last 50 steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared import data
from shared.adam_methods import VisionTransformer
from shared.adam_mode_list import (
    CORE,
    DECAY,
    LR,
    OURS,
    PEERS,
    Mode,
    Stepper,
    reasons,
)
from shared.common import bar

SNRS = (0.1, 1.0, 10.0)
TENSORS, ELEMENTS = 4, 8192
LAST = 50  # steps that the loss is the mean of
Row = dict[str, Any]


@dataclass(frozen=True)
class Gradients:
    """The same for the same numbers."""

    snr: float
    backwards: int = 1
    spread: float = 0.0
    uneven: bool = False  # in norm, from step to step and tensor to tensor

    @property
    def norm(self) -> float:
        """Of one tensor's, about."""
        return math.sqrt(ELEMENTS * (1 + self.snr**2))

    def of_step(self, number: int) -> list[list[Tensor]]:
        """Micro-gradients of each tensor."""
        signal = torch.Generator().manual_seed(1)
        noise = torch.Generator().manual_seed(1000 + number)
        factor = math.exp(torch.randn(1, generator=noise).item()) if self.uneven else 1.0
        grads: list[list[Tensor]] = [[] for _ in range(self.backwards)]
        for i in range(TENSORS):
            mu = self.snr * torch.randn(ELEMENTS, generator=signal)
            scale = (self.spread * torch.randn(ELEMENTS, generator=signal)).exp()
            for part in grads:
                grad = mu + torch.randn(ELEMENTS, generator=noise)
                part.append((grad * scale * (factor * 2**i if self.uneven else 1.0)).bfloat16())
        return grads


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [0.02 * torch.randn(ELEMENTS, generator=generator).bfloat16() for _ in range(TENSORS)]


def limit(gradients: Gradients, clip: str) -> float:
    """Half of the norm of the tensor whose gradient is the largest."""
    return gradients.norm * (4 if clip else 1)


def clip_by_torch(params: Sequence[Tensor], clip: str, norm: float) -> None:
    for part in {"all": [params], "each": [[p] for p in params], "": []}[clip]:
        nn.utils.clip_grad_norm_(part, norm)


def exact(gradients: Gradients, clip: str, steps: int) -> list[Tensor]:
    """Displacements."""
    params = [nn.Parameter(t.double()) for t in start()]
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY)
    norm = limit(gradients, clip)
    for number in range(steps):
        for param, *parts in zip(params, *gradients.of_step(number), strict=True):
            param.grad = torch.stack(parts).double().sum(0)
        clip_by_torch(params, clip, norm)
        optimizer.step()
    return [p.detach() - s for p, s in zip(params, start(), strict=True)]


def displaced(mode: Mode, gradients: Gradients, steps: int, device: str) -> list[Tensor]:
    values = start()
    params = [nn.Parameter(v.to(device, mode.dtype, copy=True)) for v in values]
    step = Stepper(mode, params, mode.kinds[0], max_norm=limit(gradients, mode.clip))
    for number in range(steps):
        parts = [[g.to(device, mode.dtype) for g in part] for part in gradients.of_step(number)]
        step([lambda part=part: _product(params, part) for part in parts])
    return [p.cpu().double() - s for p, s in zip(step.parameters(), values, strict=True)]


def _product(params: list[Tensor], grads: list[Tensor]) -> Tensor:
    """A loss with these gradients."""
    return torch.stack([(p * g).sum().float() for p, g in zip(params, grads, strict=True)]).sum()


def distance(moved: list[Tensor], way: list[Tensor]) -> float:
    apart = sum((m - w).square().sum().item() for m, w in zip(moved, way, strict=True))
    return math.sqrt(apart / sum(w.square().sum().item() for w in way))


def distances(steps: int, device: str, progress: bool) -> list[Row]:
    """A row for each mode, for what is done instead of some, and for spread scales."""
    cases: list[tuple[str, str, Callable[[float], float]]] = []
    known: dict[Any, list[Tensor]] = {}

    def way(gradients: Gradients, clip: str = "") -> list[Tensor]:
        key = gradients, clip
        if key not in known:
            known[key] = exact(*key, steps)
        return known[key]

    def of_mode(mode: Mode, snr: float, spread: float = 0.0) -> float:
        backwards = 1 if mode.way == "norm_pass" else mode.backwards
        gradients = Gradients(snr, backwards, spread, uneven=bool(mode.clip))
        moved = displaced(mode, gradients, steps, device)
        return distance(moved, way(gradients, mode.clip))

    def of_clipping_nothing(snr: float) -> float:
        gradients = Gradients(snr, uneven=True)
        return distance(way(gradients), way(gradients, "all"))

    def add(name: str, page: str, measure: Callable[[float], float]) -> None:
        cases.append((name, page, measure))

    for mode in OURS:
        add(mode.name, mode.page, lambda snr, mode=mode: of_mode(mode, snr))
        for spread in (1, 3) if mode.name == "fp32, 8-bit states" else ():
            add(
                f"{mode.name}, spread {spread}",
                mode.page,
                lambda snr, mode=mode, spread=spread: of_mode(mode, snr, spread),
            )
    add("torch's clip_grad_norm_, in backward", "clipping", of_clipping_nothing)
    for mode in PEERS:
        if mode.name not in reasons(device):
            add(mode.name, mode.page, lambda snr, mode=mode: of_mode(mode, snr))
    return [
        {"method": name, "page": page, "distance": {f"{snr:g}": measure(snr) for snr in SNRS}}
        for name, page, measure in bar(cases, show=progress)
    ]


# a training


def curve(mode: Mode | None, seed: int, steps: int, clip: str, device: str) -> list[float]:
    """Losses of every step. None for torch's AdamW, with its clipping, of norms to 1."""
    torch.manual_seed(seed)
    images, _ = data.load("digits")
    of = CORE if mode is None else mode
    with torch.device(device):
        model = VisionTransformer(32, 16, 48, 4, 2).to(of.dtype)
    if mode is None:
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=DECAY)
    else:
        step = Stepper(mode, list(model.parameters()), mode.kinds[0], lr=1e-3)
    optimizer = theirs if mode is None else step.optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[Tensor] = []
    parts = of.backwards if of.way == "accumulate" else 1

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(model(x.to(of.dtype)).float(), y) / parts
        losses.append(value.detach())
        return value

    def batches() -> Any:
        epoch = 0
        while True:
            yield from images.epoch(32, torch.device(device), 1000 * seed + epoch)
            epoch += 1

    curve = []
    for _, (x, y) in zip(range(steps), batches(), strict=False):
        micro = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
        if mode is None:
            loss(x, y).backward()
            clip_by_torch(list(model.parameters()), clip, 1.0)
            theirs.step()
            theirs.zero_grad()
        else:
            step([lambda pair=pair: loss(*pair) for pair in micro])
        scheduler.step()
        curve.append(torch.stack(losses[:parts]).sum())  # a norm pass computes it twice
        losses.clear()
    return torch.stack(curve).tolist()


def trained(seeds: int, steps: int, device: str, progress: bool) -> list[Row]:
    cases: list[tuple[str, Mode | None, str]] = [
        ("torch, fp32", None, ""),
        ("torch, fp32, clip_grad_norm_", None, "all"),
        ("torch, fp32, clip_grad_norm_ of each", None, "each"),
    ]
    cases += [(mode.name, mode, mode.clip) for mode in OURS]
    rows: list[Row] = []
    theirs: dict[str, list[float]] = {}  # with the same seeds and the same clipping
    for name, mode, clip in bar(cases, show=progress):
        curves = [curve(mode, seed, steps, clip, device) for seed in range(seeds)]
        final = [statistics.fmean(losses[-LAST:]) for losses in curves]
        every = max(1, steps // 20)
        base = theirs.setdefault(clip, final)
        rows.append(
            {
                "method": name,
                "page": mode.page if mode else "clipping" if clip else "",
                "loss": statistics.fmean(final),
                "loss_spread": statistics.stdev(final) if seeds > 1 else 0.0,
                "loss_change": statistics.fmean(a - b for a, b in zip(final, base, strict=True)),
                "losses": final,
                "curve": [
                    statistics.fmean(v for c in curves for v in c[i : i + every])
                    for i in range(0, steps, every)
                ],
            }
        )
    return rows
