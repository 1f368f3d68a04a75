"""Random combinations of Adam's options, against an Adam in float64; and in backward against after
it, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import random
import traceback
import warnings
from typing import Any

import torch
from oracles.adam import Oracle, clip_factor, too_far, wide
from torch import Tensor

import memsave_ext as ms

from .adam_cases import DEFAULTS, KINDS, Case, Give, generate, gradient, parameter, settled

NAMES = [
    "amsgrad", "maximize", "weight_decay", "eps", "betas", "bf16", "state_dtype", "seed",
    "max_grad_norm", "clip_global_norm", "small_bytes", "bucket_bytes",
]  # fmt: skip


class Training:
    """The run of a case, in backward or after it."""

    def __init__(self, case: Case, in_backward: bool) -> None:
        self.case, self.in_backward = case, in_backward
        self.rng = random.Random(case["number"])
        self.params = [parameter(*p[:3], number=i) for i, p in enumerate(case["params"])]
        self.scaler = None
        if case["scaler"]:
            # Small, so that only those gradients are infinite that were given so.
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        later = case["add_group"]
        self.later = self.params[-1:] if later is not None and len(self.params) > 1 else []
        count = len(self.params) - len(self.later)
        groups = [
            {"params": [p for p, c in zip(self.params[:count], case["params"], strict=False)
                        if c[3] == number], "lr": lr}
            for number, lr in ((0, 0.01), (1, 0.05))
        ]  # fmt: skip
        self.groups = [g for g in groups if g["params"]]
        self.optimizer = self.make(copy.copy(g) for g in self.groups)
        self.base = [group["lr"] for group in self.optimizer.param_groups]
        self.scheduler = self.make_scheduler()

    def make(self, groups: Any) -> Any:
        case = self.case
        options = {name: case[name] for name in NAMES}
        groups = [dict(g) for g in groups]
        if case["lr_tensor"]:
            for group in groups:
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        optimizer = ms.Adam(
            groups, in_backward=self.in_backward, grad_scaler=self.scaler,
            decoupled_weight_decay=case["decoupled"], **options,
        )  # fmt: skip
        return optimizer

    def make_scheduler(self) -> Any:
        kind = self.case["scheduler"]
        if kind == "step":
            return torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        if kind == "exponential":
            return torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        return None

    def interlude(self, kind: str) -> None:
        """What happens to optimizers between two steps."""
        old = self.optimizer
        if kind == "remove_hooks":
            old.remove_hooks()
            self.in_backward = False
        elif kind in ("save", "fp32"):
            saved = old.to_fp32_state_dict() if kind == "fp32" else old.state_dict()
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            old.remove_hooks()
            groups = old.param_groups
            self.optimizer = self.make({"params": g["params"], "lr": g["lr"]} for g in groups)
            self.optimizer.load_state_dict(torch.load(file, weights_only=False))
        else:
            both = (self.params, self.later, old)
            copied = copy.deepcopy(both) if kind == "deepcopy" else pickle.loads(pickle.dumps(both))
            self.params, self.later, self.optimizer = copied
        if self.scheduler is not None:
            self.scheduler.optimizer = self.optimizer

    def values(self) -> dict[int, Tensor]:
        """Of parameters that have more bits than they show."""
        if self.case["bf16"] not in ("split", "split8"):
            return {}
        params = (p for g in self.optimizer.param_groups for p in g["params"])
        return dict(zip(map(id, params), self.optimizer.fp32_parameters(), strict=True))

    def losses(self, number: int) -> list[tuple[Tensor, list[Tensor | None]]]:
        """Of a step's micro-batches: the loss and the gradients it will give."""
        case, result = self.case, []
        there = self.params[: len(self.params) - len(self.later)]
        for _ in range(case["micro"]):
            grads: list[Tensor | None] = []
            loss = torch.zeros((), dtype=torch.float64, requires_grad=True) * 1
            for param in there:
                kind = self.rng.choice(KINDS) if case["kinds"] else "plain"
                grad = gradient(param, kind, self.rng)
                if case["scaler"] and self.rng.random() < 0.15 and grad.numel() and kind == "plain":
                    grad.view(-1)[0] = torch.inf
                if case["missing"] and self.rng.random() < 0.3:
                    grads.append(None)
                    continue
                grads.append(grad)
                loss = loss + Give.apply(param, grad)
            result.append((loss, grads))
        return result

    def step(self, number: int) -> tuple[list[list[Tensor | None]], list[float]]:
        """One step. Returns the gradients of its micro-batches, and learning rates by parameter."""
        case, optimizer = self.case, self.optimizer
        if self.later and number == case["add_group"] and number:
            optimizer.add_param_group({"params": self.later, "lr": 0.02})
            self.base.append(0.02)
            self.later = []
            if self.scheduler is not None:
                self.scheduler.base_lrs.append(0.02)
        if case["scheduler"] == "by hand":
            for group in optimizer.param_groups:
                rate = 0.03 / (number + 1)
                as_tensor = torch.tensor(rate, dtype=torch.float64)
                group["lr"] = as_tensor if case["lr_tensor"] else rate
        rates = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
        losses = self.losses(number)
        for i, (loss, _) in enumerate(losses):
            self.backward(loss, i == len(losses) - 1)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=case["zero_to_none"])
        if self.scheduler is not None:
            self.scheduler.step()
        grads = [g for _, g in losses]
        return grads, [rates.get(id(p), 0.0) for p in self.params]

    def backward(self, loss: Tensor, last: bool) -> None:
        case, optimizer = self.case, self.optimizer
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        around: Any = contextlib.nullcontext()
        if self.in_backward and not last:
            if case["accumulate_when"]:
                optimizer.accumulate_when(lambda: True)
            else:
                around = optimizer.accumulate()
        elif self.in_backward and case["accumulate_when"]:
            optimizer.accumulate_when(None)
        if case["norm_pass"] and optimizer.in_backward:
            with optimizer.norm_pass(0.7):
                loss.backward(retain_graph=True)
        with around:
            loss.backward()


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
