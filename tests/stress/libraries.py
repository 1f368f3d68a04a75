"""Operators of libraries and declared Functions in blocks, honest ones and liars: plain's bits, or
an error that says what was not the same again.

A kernel is told whether it is called for the first time for a step's statement, and what a liar
does it does in calls after that: it keeps state that the plain step, which calls once, does not
see. What a liar does from the third call on comes after its proof, and may be raised.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

import memsave_ext as ms
from memsave_ext import CheckpointError, _native

HONEST = ("pure", "number", "random")
KEPT = ("differs", "raises", "writes", "returns_argument", "alias", "cache")
MAY_RAISE = ("differs_later", "raises_later", "writes_later", "kind_later")
SAVES = ("nothing", "argument", "result", "middle", "all", "on_ctx")
STEPS = 4
repeated = {"operators": 0, "functions": 0}  # in all programs of this process


class Again(ValueError):
    """What liars raise."""


@dataclasses.dataclass
class Statement:
    what: str  # "operator", "function" or an operator of torch's
    kind: str = ""
    saves: str = ""
    i: int = 0
    j: int = 0
    change: bool = False  # the argument is changed in place afterwards


def drawn(seed: int) -> list[Statement]:
    rng = random.Random(seed)
    statements = []
    liars = rng.choice([(), KEPT, KEPT, (*KEPT, *MAY_RAISE)])
    for _ in range(rng.randint(3, 10)):
        what = rng.choice(["operator", "function", "operator", "function", *TORCHS])
        kind = rng.choice(liars if liars and rng.random() < 0.4 else HONEST)
        saves = rng.choice(SAVES)
        # A result in its argument's memory would change with it, and what is saved may not change.
        may_change = kind not in ("alias", "returns_argument") and saves not in ("argument", "all")
        change = may_change and rng.random() < 0.2
        statements.append(
            Statement(what, kind, saves, rng.randrange(24), rng.randrange(24), change)
        )
    return statements


TORCHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "sin": lambda x, y: x.sin(),
    "matmul": lambda x, y: (x @ y).tanh(),
    "dropout": lambda x, y: nn.functional.dropout(x, 0.3),
    "view": lambda x, y: x.t() * y,
}


class Called:
    """What a statement calls: kernels whose behaviour is told by how often they were called."""

    def __init__(self, statement: Statement) -> None:
        self.statement = statement
        self.calls = 0
        self.cache: Tensor | None = None

    def begins(self) -> None:
        self.calls = 0

    def kernel(self, x: Tensor, number: float) -> Tensor:
        kind, calls = self.statement.kind, self.calls
        self.calls += 1
        later = calls > 1 if kind.endswith("_later") else calls > 0
        if later and kind.startswith("raises"):
            raise Again("once more")
        if later and kind.startswith("writes"):
            x.detach().numpy()[...] *= 2
        if kind == "returns_argument":
            return x
        if kind == "alias":
            return torch.from_numpy(x.detach().numpy())
        if kind == "random":
            return x.detach() * torch.rand(x.shape, dtype=x.dtype)
        if kind == "cache":
            if self.cache is None:
                self.cache = _unseen(x, number)
            return self.cache.detach()
        result = _unseen(x, number + (later and kind.startswith("differs")))
        return result.float() if later and kind.startswith("kind") else result


def _unseen(x: Tensor, number: float) -> Tensor:
    """By no operator that a recorder sees."""
    result = torch.zeros_like(x)
    result.numpy()[...] = np.sin(x.detach().numpy()) * number
    return result


_spaces = itertools.count()


def operator_of(called: Called) -> Callable[[Tensor], Tensor]:
    space = f"stress_{next(_spaces)}"
    torch.library.define(f"{space}::op", "(Tensor x, float number) -> Tensor")
    torch.library.impl(f"{space}::op", "CPU", called.kernel)
    saves = called.statement.saves

    def setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        kept = {"argument": [inputs[0]], "result": [output], "all": [inputs[0], output]}
        ctx.save_for_backward(*kept.get(saves, []))

    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gradient(grad, *ctx.saved_tensors), None

    torch.library.register_autograd(f"{space}::op", backward, setup_context=setup)
    op = getattr(torch.ops, space).op
    number = 2.0 + called.statement.i if called.statement.kind == "number" else 2.0
    return lambda x: op(x, number)


def function_of(called: Called) -> type[Function]:
    saves, number = called.statement.saves, 2.0

    class Made(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, text: str) -> Tensor:
            middle = called.kernel(x, number)
            # Of a liar's memory nothing new is made.
            lies = middle is x or called.statement.kind in ("alias", "cache")
            result = middle if lies else middle.cos()
            kept = {"argument": [x], "result": [result], "middle": [middle]}
            kept["all"] = [x, middle, result]
            ctx.save_for_backward(*kept.get(saves, []))
            if saves == "on_ctx":
                ctx.middle = middle.detach().clone()
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            kept = [ctx.middle] if saves == "on_ctx" else ctx.saved_tensors
            return _gradient(grad, *kept), None

    return Made


def _gradient(grad: Tensor, *kept: Tensor) -> Tensor:
    """Of nothing in particular, but of all that was saved."""
    return grad * sum((t.cos() for t in kept), torch.ones_like(grad))


def step(
    statements: list[Statement], calls: list[tuple[Called, Any]], block: AbstractContextManager[Any]
) -> list[Tensor]:
    """A step's loss and gradients."""
    torch.manual_seed(3)
    leaves = [nn.Parameter(torch.rand(16, 16, dtype=torch.double) + i) for i in range(2)]
    with block:
        values: list[Tensor] = [leaf * 1 for leaf in leaves]
        for statement, (called, call) in zip(statements, calls, strict=True):
            x, y = (values[k % len(values)] for k in (statement.i, statement.j))
            if statement.what in TORCHS:
                values.append(TORCHS[statement.what](x, y))
                continue
            x = x.sin() * y if statement.change else x.sin()
            called.begins()
            values.append(call(x) * y.cos())
            if statement.change:
                with torch.no_grad():
                    x.mul_(2)
        loss = torch.stack([v.tanh().mean() for v in values]).sum()
    grads = torch.autograd.grad(loss, leaves)
    return [loss.detach(), *grads, torch.get_rng_state()]


def made(statements: list[Statement]) -> tuple[list[tuple[Called, Any]], list[type[Function]]]:
    calls: list[tuple[Called, Any]] = []
    functions = []
    for statement in statements:
        called = Called(statement)
        call: Any = None
        if statement.what == "operator":
            call = operator_of(called)
        elif statement.what == "function":
            function = function_of(called)
            functions.append(function)

            def call(x: Tensor, function: type[Function] = function) -> Any:
                return function.apply(x, "text")

        calls.append((called, call))
    return calls, functions


def block_of(rng: random.Random, functions: list[type[Function]]) -> Any:
    everything = {"_everything": True}
    budgets = [{"budget": budget} for budget in (0.3, 0.7, 1)]
    options: dict[str, Any] = rng.choice([everything, everything, {}, {"retry": True}, *budgets])
    # Those that are not declared are kept.
    pure = [function for function in functions if rng.random() < 0.9]
    return lambda: ms.remat(pure=pure, **options)


def check(statements: list[Statement], seed: int) -> str:
    """What is wrong; "refused" where a liar was found out; empty."""
    plain_calls, _ = made(statements)
    plain = [step(statements, plain_calls, nullcontext()) for _ in range(STEPS)]
    calls, functions = made(statements)
    block = block_of(random.Random(seed), functions)
    for number in range(STEPS):
        opened = block()
        try:
            ours = step(statements, calls, opened)
        except (CheckpointError, Again) as error:
            kinds = {s.kind for s in statements if s.what not in TORCHS}
            return "refused" if kinds & {*MAY_RAISE} else f"step {number}: {error!r}"
        for row in opened.figures().recomputed:
            repeated["operators"] += row.operator.startswith("stress_")
            repeated["functions"] += row.operator.startswith("stress.libraries")
        for one, other in zip(ours, plain[number], strict=True):
            if one.detach().numpy().tobytes() != other.detach().numpy().tobytes():
                return f"step {number}: other bits"
    return ""


def run_seed(seed: int, without: list[str], shrink: bool) -> tuple[str, str]:
    if not _native.available:
        return "refused: remat records natively", ""
    statements = [s for s in drawn(seed) if s.what not in without and s.kind not in without]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = check(statements, seed)
        while shrink and wrong and wrong != "refused":
            for i in range(len(statements)):
                fewer = statements[:i] + statements[i + 1 :]
                still = check(fewer, seed)
                if still and still != "refused":
                    statements, wrong = fewer, still
                    break
            else:
                break
    return wrong, "\n".join(map(str, statements)) if wrong else ""
