"""A tiny training run by each part, beside the same run by plain torch: the same bits."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import memory
from ..adam import AdamW
from ..checkpoint import checkpoint
from ..remat import remat
from .rows import Row, message, same_bits, ulps

_STEPS, _WIDTH, _BATCH = 4, 64, 512
_ADAM_LIMIT = 64.0  # units in the last place that torch's AdamW, of another formula, may be away


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.inner, self.outer = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.outer(F.gelu(self.inner(self.norm(x)))), 0.1)


Call = Callable[[nn.Module, Tensor], Tensor]


@dataclass
class Run:
    """A model of three blocks, and its training."""

    device: torch.device

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(3))).to(self.device)
        self.batches = [
            torch.randn(_BATCH, _WIDTH, device="cpu").to(self.device) for _ in range(_STEPS)
        ]
        self.gradients: list[Tensor] = []

    def train(
        self,
        call: Call = nn.Module.__call__,
        around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> list[Tensor]:
        """Returns the parameters after the last step; by plain SGD without an optimizer."""
        steps = optimizer or torch.optim.SGD(self.model.parameters(), lr=0.05)
        torch.manual_seed(1)
        for x in self.batches:
            with around():
                for block in self.model:
                    x = call(block, x)
                loss = x.square().mean()
            loss.backward()
            steps.step()
            steps.zero_grad()
        return [param.detach() for param in self.model.parameters()]


def _compare(row: Row, found: list[Tensor], expected: list[Tensor]) -> None:
    row.cases += 1
    if not all(p.isfinite().all() for p in expected):
        row.wrong("the run of plain torch itself has results that are not finite")
    for f, e in zip(found, expected, strict=True):
        if not same_bits(f, e):
            row.from_python = max(row.from_python, ulps(f, e))
            row.wrong("the parameters are not bit for bit those of plain torch")


def _checkpoint(row: Row, device: torch.device) -> None:
    ran = [0]

    def counted(block: nn.Module, x: Tensor) -> Tensor:
        def region(x: Tensor) -> Tensor:
            ran[0] += 1
            result: Tensor = block(x)
            return result

        return checkpoint(region, x)  # type: ignore[no-any-return]

    _compare(row, Run(device).train(counted), Run(device).train())
    if ran[0] != 2 * 3 * _STEPS:
        row.wrong(f"the checkpointed blocks ran {ran[0]} times, expected {2 * 3 * _STEPS}")


def _remat(row: Row, device: torch.device) -> None:
    blocks: list[remat] = []

    def around() -> remat:
        blocks.append(remat(budget=0.5))
        return blocks[-1]

    _compare(row, Run(device).train(around=around), Run(device).train())
    if not any(block.figures().dropped_bytes for block in blocks):
        row.wrong("remat dropped nothing within a budget of half the activations")


def _adam(row: Row, device: torch.device) -> None:
    def train(kind: Callable[..., torch.optim.Optimizer], **options: bool) -> list[Tensor]:
        run = Run(device)
        optimizer = kind(run.model.parameters(), lr=1e-3, **options)
        found = run.train(optimizer=optimizer)
        if options and any(p.grad is not None for p in run.model.parameters()):
            row.wrong("gradients were left in .grad after backward")
        return found

    found = train(AdamW, in_backward=True)
    for f, after, theirs in zip(found, train(AdamW), train(torch.optim.AdamW), strict=True):
        if not same_bits(f, after):
            row.wrong("the parameters are not bit for bit those of steps after backward")
        row.from_python = max(row.from_python, ulps(f, theirs))
    row.cases += 1
    if not row.from_python <= _ADAM_LIMIT:
        row.wrong(f"the parameters are {row.from_python:.3g} ulp away from those of torch's AdamW")


def _memory(row: Row, device: torch.device) -> None:
    run = Run(device)
    with memory.track(run.model) as t:
        found = run.train()
    _compare(row, found, Run(device).train())
    parameters = sum(p.nbytes for p in run.model.parameters())
    if device.type == "cpu" and t.live != parameters:
        row.wrong(
            f"the tracker counts {t.live} live bytes, expected the {parameters} of the parameters"
        )
    if t.peak <= parameters or sum(t.at_peak.values()) != t.peak:
        row.wrong(
            f"the tracker counts a peak of {t.peak} bytes, made of {t.at_peak}, which cannot be"
        )


RUNS: dict[str, tuple[str, Callable[[Row, torch.device], None]]] = {
    "checkpoint": ("each block", _checkpoint),
    "remat": ("budget of a half", _remat),
    "adam": ("AdamW, in backward", _adam),
    "memory": ("tracker", _memory),
}


def check_run(part: str, row: Row, device: torch.device) -> None:
    with _restored_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            RUNS[part][1](row, device)
        except Exception as error:  # whatever it is, the other parts are to be checked
            row.wrong(message(error))


@contextlib.contextmanager
def _restored_random_state() -> Iterator[None]:
    with torch.random.fork_rng():
        yield
