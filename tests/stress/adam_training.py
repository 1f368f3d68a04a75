"""The run of a random case of Adam's options."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
from typing import Any

import torch
from torch import Tensor

import memsave_ext as ms

from .adam_cases import KINDS, Case, Give, gradient, parameter

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
        return self.adam(groups, grad_scaler=self.scaler)

    def adam(self, groups: Any, **more: Any) -> Any:
        case = self.case
        options = {name: case[name] for name in NAMES}
        groups = [dict(g) for g in groups]
        if case["lr_tensor"]:
            for group in groups:
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        return ms.Adam(
            groups, in_backward=self.in_backward, decoupled_weight_decay=case["decoupled"],
            **options, **more,
        )  # fmt: skip

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
            if hasattr(old, "remove_hooks"):
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
        self.begin(number)
        optimizer = self.optimizer
        rates = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
        losses = self.losses(number)
        for i, (loss, _) in enumerate(losses):
            self.backward(loss, i == len(losses) - 1)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        self.end()
        grads = [g for _, g in losses]
        return grads, [rates.get(id(p), 0.0) for p in self.params]

    def begin(self, number: int) -> None:
        """What changes before a step."""
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

    def end(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.case["zero_to_none"])
        if self.scheduler is not None:
            self.scheduler.step()

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
