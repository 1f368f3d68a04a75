"""Random combinations of Adam's options, against an Adam in float64; and in backward against after
it, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import traceback
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms

from .adam_oracle import Oracle, clip_factor, too_far, wide

Case = dict[str, Any]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16,
          torch.bfloat16, torch.complex64, torch.complex128]  # fmt: skip
SHAPES = [(), (1,), (3,), (4, 5), (2, 3, 4, 5), (17, 33), (70, 70), (0, 3), (257,)]
LAYOUTS = ["contiguous", "contiguous", "transposed", "sliced"]
KINDS = ["plain", "plain", "plain", "expanded", "conj", "neg", "strided"]  # of gradients
DEFAULTS: Case = {
    "bf16": None, "state_dtype": None, "amsgrad": False, "maximize": False, "weight_decay": 0.0,
    "decoupled": False, "eps": 1e-8, "betas": (0.9, 0.999), "lr_tensor": False, "scheduler": None,
    "max_grad_norm": None, "clip_global_norm": None, "norm_pass": False, "scaler": False,
    "micro": 1, "fold": False, "accumulate_when": False, "small_bytes": 1 << 16,
    "bucket_bytes": 1 << 20, "add_group": None, "interlude": None, "zero_to_none": True,
    "missing": False, "seed": 0, "kinds": False,
}  # fmt: skip


def generate(seed: int, without: list[str]) -> Case:
    rng = random.Random(seed)

    def some(value: Any, chance: float, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    case: Case = {
        "bf16": some(rng.choice(["stochastic", "kahan", "split"]), 0.3, None),
        "state_dtype": some(rng.choice(["8bit", torch.bfloat16]), 0.3, None),
        "amsgrad": some(True, 0.2, False),
        "maximize": some(True, 0.2, False),
        "weight_decay": some(rng.choice([0.01, 0.3]), 0.5, 0.0),
        "decoupled": some(True, 0.5, False),
        "eps": rng.choice([1e-8, 1e-8, 1e-4, 1e-12]),
        "betas": rng.choice([(0.9, 0.999), (0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.95, 0.95)]),
        "lr_tensor": some(True, 0.15, False),
        "scheduler": some(rng.choice(["step", "exponential", "by hand"]), 0.3, None),
        "max_grad_norm": some(rng.choice([0.5, 100.0]), 0.2, None),
        "clip_global_norm": some(rng.choice([0.5, 100.0]), 0.15, None),
        "norm_pass": some(True, 0.15, False),
        "scaler": some(True, 0.15, False),
        "micro": some(rng.choice([2, 3]), 0.4, 1),
        "fold": some(True, 0.5, False),
        "accumulate_when": some(True, 0.4, False),
        "small_bytes": rng.choice([0, 100, 1 << 16]),
        "bucket_bytes": rng.choice([0, 64, 1 << 20]),
        "add_group": some(rng.randrange(4), 0.2, None),
        "interlude": some(
            (rng.choice(["save", "deepcopy", "pickle", "remove_hooks", "fp32"]), rng.randrange(1, 4)),
            0.4, None,
        ),
        "zero_to_none": some(False, 0.2, True),
        "missing": some(True, 0.3, False),
        "seed": rng.choice([0, 5, 2**63]),
        "kinds": some(True, 0.3, False),
    }  # fmt: skip
    for name in without:
        if name in case:
            case[name] = DEFAULTS[name]
    case.update(number=seed, steps=rng.randint(1, 6), params=[])
    for _ in range(rng.randint(1, 5)):
        dtype = rng.choice(DTYPES)
        if case["bf16"]:
            dtype = torch.bfloat16
        elif case["state_dtype"]:
            dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        shape, layout = rng.choice(SHAPES), rng.choice(LAYOUTS)
        layout = "contiguous" if case["state_dtype"] == "8bit" else layout
        case["params"].append((dtype, shape, layout, rng.randrange(2)))
    return settled(case)


def settled(case: Case) -> Case:
    """Without what is documented not to be combined."""
    if case["state_dtype"] == "8bit":
        case["amsgrad"] = False
    if case["clip_global_norm"] is not None:
        case["norm_pass"] = False
    if case["norm_pass"]:
        case["micro"] = 1
    refuses = ("max_grad_norm", "clip_global_norm", "state_dtype")
    if case["scaler"] or case["micro"] == 1 or any(case[name] is not None for name in refuses):
        case["fold"] = False
    if case["scaler"] and case["interlude"]:
        case["interlude"] = None
    if case["bf16"] in ("kahan", "split") and case["interlude"] and case["interlude"][0] == "fp32":
        case["interlude"] = None  # which is without what these keep beside a parameter
    if case["scaler"]:  # which torch has for real numbers only
        swap = {torch.complex64: torch.float32, torch.complex128: torch.float64}
        case["params"] = [(swap.get(p[0], p[0]), *p[1:]) for p in case["params"]]
    if case["missing"]:  # or gradients of zeros stay after backward, and none in it
        case["zero_to_none"] = True
    return case


class Give(torch.autograd.Function):
    """A number whose gradient is what was given."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        grad = ctx.grad
        return (grad if scale.item() == 1 else grad * scale.to(grad.real.dtype)), None


def parameter(dtype: torch.dtype, shape: Any, layout: str, number: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(number)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        value = torch.complex(value, value.flip(0) if value.dim() else value + 1)
    value = value.to(dtype)
    if layout == "transposed" and value.dim() == 4:
        value = value.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed" and value.dim() == 2:
        value = value.t().contiguous().t()
    elif layout == "sliced" and value.dim():
        value = torch.stack([value, value], -1)[..., 0]
    return nn.Parameter(value)


def gradient(param: Tensor, kind: str, rng: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**40))
    base = param.detach()
    real = torch.randn(base.shape, generator=generator) * 10 ** rng.uniform(-2, 1)
    if base.is_complex():
        other = torch.randn(base.shape, generator=generator)
        value = torch.complex(real, other).to(base.dtype)
        return value.conj() if kind == "conj" else value
    value = real.to(base.dtype)
    if kind == "neg":
        pair = torch.complex(value.double(), value.double()).conj().imag
        return pair if base.dtype == torch.float64 else value
    if kind == "neg32" or kind == "conj":
        return value
    if kind == "expanded" and base.dim():
        return value[:1].expand(base.shape) if base.shape[0] else value
    if kind == "strided" and base.dim():
        return torch.stack([value, value], -1)[..., 1]
    return value


class Training:
    """The run of a case, in backward or after it."""

    def __init__(self, case: Case, in_backward: bool) -> None:
        self.case, self.in_backward = case, in_backward
        self.rng = random.Random(case["number"])
        self.params = [parameter(*p[:3], number=i) for i, p in enumerate(case["params"])]
        self.scaler = None
        if case["scaler"]:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
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
        names = ("amsgrad maximize weight_decay eps betas bf16 state_dtype seed max_grad_norm "
                 "clip_global_norm small_bytes bucket_bytes").split()  # fmt: skip
        options = {name: case[name] for name in names}
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
            self.optimizer = self.make({k: g[k] for k in ("params", "lr")} for g in old.param_groups)
            self.optimizer.load_state_dict(torch.load(file, weights_only=False))
        else:
            both = (self.params, self.later, old)
            copied = copy.deepcopy(both) if kind == "deepcopy" else pickle.loads(pickle.dumps(both))
            self.params, self.later, self.optimizer = copied
        if self.scheduler is not None:
            self.scheduler.optimizer = self.optimizer

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
                group["lr"] = torch.tensor(0.03 / (number + 1), dtype=torch.float64) if case["lr_tensor"] else 0.03 / (number + 1)
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
                optimizer.accumulate_when(lambda: True, fold=case["fold"])
            else:
                around = optimizer.accumulate(fold=case["fold"])
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
    for column in zip(*grads, strict=True):
        present = [g for g in column if g is not None]
        total = sum((g.resolve_conj().resolve_neg() for g in present[1:]), present[0]) if present else None
        sums.append(None if total is None else wide(total))
    infinite = [g is not None and not bool(g.isfinite().all()) for g in sums]
    everything = case["clip_global_norm"] is not None or case["norm_pass"] and training.in_backward
    if case["scaler"] and everything and any(infinite):
        return
    limit = case["clip_global_norm"] or (0.7 if everything else None)
    # Each parameter's own clipping comes first.
    for i, total in enumerate(sums):
        if total is not None:
            sums[i] = total * clip_factor([total], case["max_grad_norm"])
    factor = clip_factor([g for g in sums if g is not None], limit)
    for oracle, total, lr, bad in zip(oracles, sums, rates, infinite, strict=False):
        if total is not None and not (case["scaler"] and bad):
            oracle.update(
                total * factor, lr=lr, betas=case["betas"], eps=case["eps"],
                weight_decay=case["weight_decay"], amsgrad=case["amsgrad"],
                maximize=case["maximize"], decoupled=case["decoupled"],
            )  # fmt: skip


def storage(case: Case, dtype: torch.dtype) -> str:
    parts = [case["bf16"] or ""] if dtype == torch.bfloat16 else []
    parts += ["8bit"] if case["state_dtype"] == "8bit" else ["states"] if case["state_dtype"] else []
    return "+".join([*parts, "fold"] if case["fold"] else parts)


def check(case: Case) -> str:
    trainings = [Training(case, in_backward) for in_backward in (True, False)]
    oracles = [[Oracle(p) for p in training.params] for training in trainings]
    bitwise = not case["fold"] and not case["norm_pass"]
    for number in range(case["steps"]):
        for training, own in zip(trainings, oracles, strict=True):
            if case["interlude"] and case["interlude"][1] == number:
                training.interlude(case["interlude"][0])
            grads, rates = training.step(number)
            expected(case, training, own, grads, rates)
            where = f"step {number}, {'in' if training is trainings[0] else 'after'} backward"
            exact = training.optimizer.fp32_parameters() if case["bf16"] in ("kahan", "split") else None
            order = {id(p): i for i, p in enumerate(p for g in training.optimizer.param_groups for p in g["params"])}
            for param, oracle, about in zip(training.params, own, case["params"], strict=True):
                value = exact[order[id(param)]] if exact and id(param) in order else param
                if wrong := too_far(value, oracle, storage(case, about[0]), about[0]):
                    return f"wrong: {where}: {about}: {wrong}"
        if bitwise:
            for a, b, about in zip(trainings[0].params, trainings[1].params, case["params"], strict=True):
                if not torch.equal(wide(a), wide(b)) and not torch.allclose(wide(a), wide(b), 0, 0, True):
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
        return f"error: {type(error).__name__}: {error} ({', '.join(f'{f.name}:{f.lineno}' for f in frames)})"


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
