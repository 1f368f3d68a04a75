"""Random parameters that SGD or Lion steps in backward and after it, beside torch's SGD or Lion in
float64."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import torch
from oracles.lion import Oracle
from torch import Tensor

import memsave_ext as ms

from .adam_cases import KINDS, LAYOUTS, SHAPES, Give, gradient, parameter

FUSES = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
REAL = [torch.float32, torch.float32, torch.float64]
OTHERS = [torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
STATES = ["8bit", torch.bfloat16]
Grads = list[Tensor | None]


class Run:
    """Parameters and what steps them."""

    def __init__(self, loop: Runs, kind: Any, **options: Any) -> None:
        self.loop, self.kind, self.own = loop, kind, options
        self.params = [parameter(*about, number=i) for i, about in enumerate(loop.about)]
        self.optimizer = self.make(self.groups())

    def make(self, groups: Any) -> Any:
        return self.kind([dict(group) for group in groups], lr=0.05, **self.own)

    def groups(self) -> list[dict[str, Any]]:
        half = len(self.params) // 2
        return [{"params": of} for of in (self.params[:half], self.params[half:]) if of]

    @property
    def in_backward(self) -> bool:
        return getattr(self.optimizer, "in_backward", False)

    def options(self) -> list[dict[str, Any]]:
        """Those of its groups; torch adds ``differentiable`` where a state_dict was loaded."""
        groups = self.optimizer.state_dict()["param_groups"]
        return [{n: v for n, v in group.items() if n != "differentiable"} for group in groups]

    def loss(self, grads: Grads, scale: Any = None) -> Tensor:
        losses = [
            Give.apply(p, g) for p, g in zip(self.params, grads, strict=True) if g is not None
        ]
        total = sum(losses, torch.zeros((), dtype=torch.float64, requires_grad=True) * 1)
        return total if scale is None else scale(total)

    def step(self, grads: Grads) -> None:
        self.loss(grads).backward()
        self.close()

    def close(self) -> None:
        assert not self.in_backward or all(p.grad is None for p in self.params)
        self.end()

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Runs:
    """All of a loop's runs, which are to come out alike."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.lion = rng.random() < 0.4
        kind = ms.Lion if self.lion else ms.SGD
        self.modes: dict[str, Any] = {}
        if rng.random() < 0.3:
            self.modes["bf16"] = rng.choice(["stochastic", "split", "split8"])
        if rng.random() < 0.3:
            self.modes["state_dtype"] = rng.choice(STATES)
        if self.modes:
            self.modes["seed"] = rng.choice([0, 2**63])
        self.about = [self.draw_param() for _ in range(rng.randint(1, 5))]
        self.exact = not self.modes and all(about[0] in REAL for about in self.about)
        hooks = {
            "small_bytes": rng.choice([0, 64, 1 << 16]),
            "bucket_bytes": rng.choice([1, 256, 1 << 20]),
        }
        if rng.random() < 0.2:
            self.modes["max_grad_norm"] = rng.choice([0.5, 100.0])
        self.runs = [
            Run(self, kind, in_backward=True, **hooks, **self.modes),
            Run(self, kind, **self.modes),
        ]
        bitwise = self.exact and not self.lion and "max_grad_norm" not in self.modes
        self.torchs = Run(self, torch.optim.SGD) if bitwise else None
        self.oracles: list[Oracle] | None = None
        if self.lion and self.exact:
            self.oracles = [Oracle(p) for p in self.runs[0].params]
        self.clear = [torch.ones(p.shape, dtype=torch.bool) for p in self.runs[0].params]
        self.notes: list[str] = []

    def draw_param(self) -> tuple[torch.dtype, Any, str]:
        dtype = self.rng.choice(REAL if self.rng.random() < 0.7 else OTHERS)
        if "bf16" in self.modes:
            dtype = torch.bfloat16
        elif "state_dtype" in self.modes:
            dtype = self.rng.choice([torch.float32, torch.float16, torch.bfloat16])
        coded = self.modes.get("state_dtype") == "8bit"
        return dtype, self.rng.choice(SHAPES), self.rng.choice(LAYOUTS[: 2 if coded else 4])

    def __str__(self) -> str:
        kind = "Lion" if self.lion else "SGD"
        return f"{kind}, {self.modes}, {self.about}: {'; '.join(self.notes)}"

    def all(self) -> list[Run]:
        return self.runs + ([self.torchs] if self.torchs else [])

    def grads(self, missing: float = 0.0) -> Grads:
        return [
            None if self.rng.random() < missing else gradient(p, self.rng.choice(KINDS), self.rng)
            for p in self.runs[0].params
        ]

    def difference(self) -> str:
        one, other = self.runs
        for i, (p, q) in enumerate(zip(one.params, other.params, strict=True)):
            if not same(p, q):
                return f"parameter {i} in backward and after it"
            a, b = one.optimizer.state.get(p, {}), other.optimizer.state.get(q, {})
            if a.keys() != b.keys():
                return f"states {sorted(a)} of parameter {i} in backward, {sorted(b)} after it"
            if names := [name for name in a if not same(a[name], b[name])]:
                return f"{names} of parameter {i} in backward and after it"
        if one.options() != other.options():
            return "groups in backward and after it"
        if self.torchs is not None:
            return self.unlike_torch(self.torchs)
        return self.unlike_oracle() if self.oracles is not None else ""

    def unlike_torch(self, theirs: Run) -> str:
        ours = self.runs[0]
        for i, (p, q) in enumerate(zip(ours.params, theirs.params, strict=True)):
            eps = torch.finfo(p.dtype).eps
            near = torch.allclose(p, q, rtol=100 * eps, atol=100 * eps)
            if not (same(p, q) if FUSES else near):
                return f"parameter {i} is not torch's, by {float((p - q).abs().max())}"
            a, b = ours.optimizer.state.get(p, {}), theirs.optimizer.state.get(q, {})
            if a.keys() - {"step"} != b.keys() - {"step"}:
                return f"states {sorted(a)} of parameter {i}, torch's {sorted(b)}"
        return ""

    def unlike_oracle(self) -> str:
        for i, (p, oracle) in enumerate(zip(self.runs[0].params, self.oracles or [], strict=True)):
            eps = torch.finfo(p.dtype).eps
            clear = self.clear[i]
            if not torch.allclose(
                p.double()[clear], oracle.param[clear], rtol=80 * eps, atol=80 * eps
            ):
                return f"parameter {i} is not the oracle's"
        return ""

    def choices(self) -> list[tuple[str, Any]]:
        shared: list[tuple[str, Any]] = [
            ("lr", 0.01), ("lr", 0.0), ("lr", torch.tensor(0.02)), ("maximize", True),
            ("maximize", False), ("weight_decay", 0.0), ("weight_decay", 0.25),
        ]  # fmt: skip
        if self.lion:
            return [*shared, ("betas", (0.5, 0.9)), ("betas", (0.0, 0.99)), ("betas", (0.95, 0.98))]
        return [
            *shared, ("momentum", 0.9), ("momentum", 0.5), ("momentum", 0.9), ("momentum", 0.0),
            ("dampening", 0.5), ("dampening", 0.0), ("nesterov", True), ("nesterov", False),
        ]  # fmt: skip

    # What all runs do; the oracle's share of it.

    def follow(self, grads: Grads) -> None:
        for i, (oracle, grad) in enumerate(zip(self.oracles or [], grads, strict=False)):
            if grad is None:
                continue
            group = next(
                g for g in self.runs[0].optimizer.param_groups
                if any(p is self.runs[0].params[i] for p in g["params"])
            )  # fmt: skip
            grad = grad.resolve_neg().double()
            if (limit := group.get("max_grad_norm")) is not None:
                grad = grad * min(1.0, limit / (float(grad.norm()) + 1e-6))
            names = ("betas", "weight_decay", "maximize")
            total = oracle.update(grad, lr=float(group["lr"]), **{n: group[n] for n in names})
            self.clear[i] &= (total.abs() > 1e-5 * (grad.abs() + oracle.m.abs())) | (total == 0)

    def forget(self) -> None:
        """Has the other runs, and the oracle, go on from where the first one is."""
        ours = self.runs[0]
        for run in self.all()[1:]:
            for p, q in zip(ours.params, run.params, strict=True):
                q.detach().copy_(p.detach())
            saved = copy.deepcopy(ours.optimizer.state_dict())
            if run.kind is torch.optim.SGD:
                saved["param_groups"] = run.optimizer.state_dict()["param_groups"]
            run.optimizer.load_state_dict(saved)
        for oracle, p in zip(self.oracles or [], ours.params, strict=False):
            oracle.param = p.detach().double().clone()
            exp_avg = ours.optimizer.state.get(p, {}).get("exp_avg", 0 * oracle.param)
            oracle.m = exp_avg.double().clone()


def same(one: Tensor, other: Tensor) -> bool:
    """Bitwise; NaN is equal to NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.allclose(one.detach(), other.detach(), 0, 0, equal_nan=True)


def file_of(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)
