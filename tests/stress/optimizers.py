"""Every optimizer of torch's own database with each of its option inputs: stepped in backward by
in_backward(), to the bits of the plain one; and this package's beside torch's.

The database (``torch.testing._internal``: ``optim_db``) gives each its options, implementations and
schedulers. A program trains for some steps, with a parameter that has no gradient in one of them, a
scheduler, and a resume from the state_dict in the middle. Seeds beyond the number of cases draw
other schedulers, groups and buckets.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from oracles.lion import Oracle
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import memsave_ext as ms

from .databases import bits

STEPS, RESUMED, UNUSED = 6, 3, 1  # how many, before which one it resumes, which leaves one out
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
OURS: dict[str, Any] = {"Adam": ms.Adam, "AdamW": ms.AdamW, "SGD": ms.SGD}
LION = ("lr", "betas", "weight_decay", "maximize")
# Ours is float32 arithmetic in another order than torch's, except SGD's, which is the same bits.
BOUNDS = {torch.float32: (2e-5, 2e-6), torch.float64: (1e-10, 1e-12), torch.complex64: (2e-5, 2e-6)}


@dataclasses.dataclass(frozen=True)
class Case:
    info: OptimizerInfo
    number: int  # of its option input
    impl: str  # "", or "foreach", "fused", "differentiable"
    dtype: torch.dtype
    way: str  # "taken" by in_backward(), "ours" in its place, or "lion" with its options

    @property
    def options(self) -> dict[str, Any]:
        options = copy.deepcopy(self.info.optim_inputs_func("cpu")[self.number].kwargs)
        if self.impl:
            options[self.impl] = True
        elif "foreach" in self.info.supported_impls:
            options["foreach"] = False
        return options

    @property
    def is_refused(self) -> bool:
        """By right: it needs a closure, sparse gradients or a graph."""
        return self.info.name in ("LBFGS", "SparseAdam") or self.impl == "differentiable"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.way} {self.info.name} {self.options} {dtype}"


def _exists(case: Case) -> bool:
    if case.dtype.is_complex:
        supported = case.info.supports_complex and case.info.name != "Muon"
        if not supported or case.impl == "fused" or case.way == "lion":
            return False
    if case.way != "taken":
        by_default = case.dtype in BOUNDS and case.impl != "differentiable"  # needs parameters that
        return by_default and (case.way == "ours" or case.info.name == "Adam")  # are no leaves
    momentum = case.options.get("momentum")
    # docs/adam/any_optimizer.md: torch rounds otherwise while one has no momentum yet
    rounds = case.info.name == "SGD" and case.dtype == torch.bfloat16 and case.impl and momentum
    return not rounds


@functools.cache
def cases() -> list[Case]:
    """In an order of their own, so that a share of them has some of everything."""
    found = [
        Case(info, number, impl, dtype, way)
        for info in optim_db
        for number in range(len(info.optim_inputs_func("cpu")))
        for impl in ("", *info.supported_impls)
        if impl != "fused" or "cpu" in info.supports_fused_on
        for dtype in DTYPES
        for way in (["taken", "ours", "lion"] if info.name in OURS else ["taken"])
    ]
    found = [case for case in found if _exists(case)]
    random.Random(0).shuffle(found)
    return found


@dataclasses.dataclass
class Counts:
    """What was compared, how many parameters a backward stepped, and what was refused by right."""

    programs: int = 0
    stepped: int = 0
    refused: int = 0

    def __add__(self, other: Counts) -> Counts:
        mine, others = vars(self).values(), vars(other).values()
        return Counts(*(a + b for a, b in zip(mine, others, strict=True)))


@dataclasses.dataclass
class Draws:
    """What differs between two programs of a case."""

    several: bool
    small_bytes: int
    scheduler: int
    in_backward: bool

    @classmethod
    def of(cls, seed: int) -> Draws:
        rng = random.Random(seed)
        return cls(rng.random() < 0.5, rng.choice([0, 1 << 16]), rng.randrange(8), seed % 3 != 2)


class Side:
    """Parameters, their optimizer and its scheduler."""

    def __init__(self, case: Case, draws: Draws, make: Callable[[Any], Any]) -> None:
        generator = torch.Generator().manual_seed(5)
        shapes = [(6, 33), (33, 9), (9, 2)]
        if case.info.name != "Muon":  # which takes matrices alone
            shapes += [(33,), (9,), (2,)]
        self.params = [
            nn.Parameter(torch.randn(shape, generator=generator, dtype=case.dtype) / 3)
            for shape in shapes
        ]
        groups: Any = self.params
        if draws.several and case.info.supports_param_groups:
            groups = [{"params": self.params[::2]}, {"params": self.params[1::2], "lr": 0.005}]
        self.optimizer = make(groups)
        inputs = case.info.scheduler_inputs
        chosen = inputs[draws.scheduler % len(inputs)]
        self.schedulers = [make_scheduler(self.optimizer) for make_scheduler in chosen]

    def loss(self, number: int) -> Tensor:
        params: list[Tensor] = list(self.params)
        if number == UNUSED:
            params[1] = params[1].detach()
        generator = torch.Generator().manual_seed(number)
        h = torch.randn(8, 6, generator=generator, dtype=params[0].dtype)
        for i in range(3):
            h = h @ params[i]
            h = h + params[i + 3] if len(params) > 3 else h
            h = h / (1 + h.abs())  # tanh of complex numbers has poles
        return (h - 1).abs().square().mean()

    def step(self, number: int) -> int:
        """Returns how many parameters the backward has stepped."""
        loss = self.loss(number)
        before = [param.detach().clone() for param in self.params]
        loss.backward()
        changed = sum(not torch.equal(p, b) for p, b in zip(self.params, before, strict=True))
        self.optimizer.step()
        self.optimizer.zero_grad()
        for scheduler in self.schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([loss.detach().float().item()] if plateau else []))
        return changed

    def load(self, other: Side) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.params, other.params, strict=True):
                mine.copy_(theirs)
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        for scheduler, of_other in zip(self.schedulers, other.schedulers, strict=True):
            scheduler.load_state_dict(copy.deepcopy(of_other.state_dict()))

    def told(self) -> list[Any]:
        """The bits of parameters, states and groups."""
        state = [self.optimizer.state.get(param, {}) for param in self.params]
        saved = self.optimizer.state_dict()["param_groups"]
        return [
            [bits(param) for param in self.params],
            [
                {k: bits(v) if isinstance(v, Tensor) else v for k, v in sorted(of.items())}
                for of in state
            ],
            [str(sorted(group.items())) for group in saved],
        ]


def check(case: Case, seed: int = 0) -> Counts:
    """Raises AssertionError where something comes out otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"taken": _check_taken, "ours": _check_ours, "lion": _check_lion}[case.way](
            case, Draws.of(seed)
        )


def _check_taken(case: Case, draws: Draws) -> Counts:
    def plain() -> Side:
        return Side(case, draws, lambda groups: case.info.optim_cls(groups, **case.options))

    def taken() -> Side:
        side = plain()
        ms.in_backward(side.optimizer, small_bytes=draws.small_bytes)
        return side

    if case.is_refused:
        try:
            taken()
        except ValueError as error:
            if str(error).startswith("in_backward: ") and len(str(error)) > 40:
                return Counts(refused=1)
            raise
        raise AssertionError("was not refused")
    try:
        _train(plain, lambda _: None)
    except (RuntimeError, AssertionError):
        return Counts()  # torch's own does not run: fused ones with a state that is missing
    sides: list[Side] = []
    told: list[Any] = []
    _train(plain, lambda side: told.append(side.told()))
    expected = iter(told)
    stepped = _train(taken, lambda side: _assert_same(side.told(), next(expected)), sides)
    assert stepped > 0 or case.dtype == torch.bfloat16  # where steps may be too small to be seen
    for side in sides:
        side.optimizer.remove_hooks()
    return Counts(1, stepped)


def _assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for name, one, other in zip(("parameters", "states", "groups"), ours, theirs, strict=True):
        assert one == other, f"other {name}"


def _train(
    make: Callable[[], Side], look: Callable[[Side], None], made: list[Side] | None = None
) -> int:
    side, stepped = make(), 0
    for number in range(STEPS):
        if number == RESUMED:
            before, side = side, make()
            side.load(before)
            if made is not None:
                made.append(before)
        stepped += side.step(number)
        look(side)
    if made is not None:
        made.append(side)
    return stepped


def _check_ours(case: Case, draws: Draws) -> Counts:
    in_backward = draws.in_backward and case.impl != "differentiable"
    options = {"in_backward": in_backward, "small_bytes": draws.small_bytes}
    kind = OURS[case.info.name]

    def plain() -> Side:
        return Side(case, draws, lambda groups: case.info.optim_cls(groups, **case.options))

    def ours() -> Side:
        return Side(case, draws, lambda groups: kind(groups, **case.options, **options))

    try:
        values: list[list[Tensor]] = []
        _train(plain, lambda side: values.append([p.detach().clone() for p in side.params]))
    except (RuntimeError, AssertionError):
        return Counts()
    rtol, atol = BOUNDS[case.dtype]
    if kind is ms.SGD and case.impl != "fused" and not case.dtype.is_complex:
        rtol = atol = 0.0
    expected = iter(values)

    def look(side: Side) -> None:
        for param, value in zip(side.params, next(expected), strict=True):
            torch.testing.assert_close(param.detach(), value, rtol=rtol, atol=atol)

    sides: list[Side] = []
    stepped = _train(ours, look, sides)
    assert bool(stepped) == in_backward
    for side in sides:
        side.optimizer.remove_hooks()
    return Counts(1, stepped)


def _check_lion(case: Case, draws: Draws) -> Counts:
    """Options of Adam that Lion has, beside its oracle; the others are refused by name."""
    options = {name: value for name, value in case.options.items() if value is not False}
    if unknown := [name for name in options if name not in LION]:
        try:
            ms.Lion([nn.Parameter(torch.ones(2))], in_backward=True, **options)
        except TypeError as error:
            if any(f"'{name}'" in str(error) for name in unknown):
                return Counts(refused=1)
            raise
        raise AssertionError(f"{unknown} were not refused")
    side = Side(case, draws, lambda p: ms.Lion(p, in_backward=draws.in_backward, **options))
    oracles = [Oracle(param) for param in side.params]
    clear = [torch.ones_like(param, dtype=torch.bool) for param in side.params]
    stepped, eps = 0, torch.finfo(case.dtype).eps
    for number in range(STEPS):
        grads = torch.autograd.grad(side.loss(number), side.params, allow_unused=True)
        groups = {id(p): group for group in side.optimizer.param_groups for p in group["params"]}
        used = [
            {name: groups[id(p)][name] for name in LION} | {"lr": float(groups[id(p)]["lr"])}
            for p in side.params
        ]
        stepped += side.step(number)
        for i, (grad, oracle) in enumerate(zip(grads, oracles, strict=True)):
            if grad is None:
                continue
            total = oracle.update(grad, **used[i])
            clear[i] &= (total.abs() > 1e-6) | (total == 0)
            of, seen = side.params[i].detach()[clear[i]].double(), oracle.param[clear[i]]
            torch.testing.assert_close(of, seen, rtol=eps * 40, atol=eps * 8)
    share = torch.cat([seen.flatten() for seen in clear]).double().mean()
    assert share > 0.97 and bool(stepped) == draws.in_backward
    side.optimizer.remove_hooks()
    return Counts(1, stepped)


def run_seed(seed: int, without: list[str], shrink: bool) -> tuple[str, str]:
    case = cases()[seed % len(cases())]
    if case.info.name in without:
        return "refused: left out", ""
    try:
        counts = check(case, seed // len(cases()))
    except Exception as error:
        return f"{case}: {type(error).__name__}", traceback.format_exc()
    return "refused: by right" if counts.refused else "", str(case)
