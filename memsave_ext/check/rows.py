"""What a comparison found, and how it is judged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
OF_SHORT_TYPES = 2.0  # units in the last place that 16-bit results may be off
CLOSE = 4.0  # those that others may, where nothing is added up
CHANGED_CODES = 0.02  # the share of integers that may be off by more than one


@dataclass
class Row:
    """One kernel or part on one device. Errors are in units in the last place of the value, or of
    the root mean square of its tensor where that is larger: the worst of all cases."""

    part: str
    what: str
    where: str  # "cpu AVX512", "cuda:0"
    setting: str  # what MEMSAVE_EXT_DISABLE has to name where this is wrong
    cases: int = 0
    from_python: float = 0.0
    from_exact: float | None = None
    gb_per_s: float | None = None
    percent_of_copy: float | None = None
    problem: str = ""

    def compare(self, found: Tensors, python: Tensors, exact: Tensors | None, limit: float) -> None:
        """Counts a case; ``exact``: the first results in float64.

        Wrong is what is further from float64 than ``limit`` and than twice the way of the
        pure-Python path. What has no float64 beside it is compared with pure Python.
        """
        self.cases += 1
        for i, (f, p) in enumerate(zip(found, python, strict=True)):
            from_python = 0.0 if same_bits(f, p) else ulps(f, p)
            self.from_python = max(self.from_python, from_python)
            allowed = OF_SHORT_TYPES if f.element_size() == 2 else limit
            if exact is not None and i < len(exact):
                from_exact = ulps(f, exact[i])
                self.from_exact = max(self.from_exact or 0.0, from_exact)
                if not from_exact <= max(allowed, 2 * ulps(p, exact[i])):
                    self.wrong(f"the error is {from_exact:.3g} ulp, compared with float64")
            elif f.is_floating_point() and not from_python <= allowed:
                self.wrong(f"the result is {from_python:.3g} ulp away from that of pure Python")
            elif not f.is_floating_point():
                changed = ((f.int() - p.int()).abs() > 1).double().mean().item()
                if changed > CHANGED_CODES:
                    self.wrong(
                        f"{changed:.0%} of the states' codes differ from those of pure Python"
                    )

    def wrong(self, problem: str) -> None:
        self.problem = self.problem or problem


def ulps(found: Tensor, expected: Tensor) -> float:
    """Returns the largest distance in units in the last place of the type of ``found``.

    Integers: the largest difference. NaN beside a number is infinitely far.
    """
    if found.numel() == 0 and expected.numel() == 0:
        return 0.0
    if not found.is_floating_point():
        return float((found.double() - expected.double()).abs().max())
    info = torch.finfo(found.dtype)
    f, e = found.double(), expected.double()
    mean_square = e.square().mean().nan_to_num(0.0, 0.0)
    scale = e.abs().clamp_min(max(float(mean_square.sqrt()), info.smallest_normal))
    unit = torch.exp2(scale.log2().floor()) * info.eps
    apart = torch.where((f == e) | (f.isnan() & e.isnan()), 0.0, (f - e).abs() / unit)
    return float(apart.nan_to_num(torch.inf, torch.inf).max())


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(_bytes(found), _bytes(expected))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def message(error: BaseException) -> str:
    """Returns the first line of an exception, without paths."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: " + re.sub(r"(?:/[\w.+-]+){2,}", "(path)", first)
