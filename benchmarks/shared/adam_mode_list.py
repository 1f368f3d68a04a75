"""Adam's modes and their peers, as the benchmark of modes steps them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms

FP32, BF16 = torch.float32, torch.bfloat16
MICRO_BATCHES = 4
# Bytes of an element's share of two float32 scales, one for each block.
SCALES, SCALES_OF_4_BIT = 8 / 256, 8 / 128
Optimizer = Any  # torch's, or a peer's that is like one
Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class Mode:
    """What is made of some parameters, and what a step of it should cost.

    ``stored`` are the bytes of a parameter and its states, ``moved`` those that a step reads and
    writes, the gradient's included; both for one element.
    """

    name: str
    page: str  # of docs/adam
    stored: float | None
    moved: float | None
    dtype: torch.dtype = FP32
    options: dict[str, Any] = field(default_factory=dict)
    way: str = ""  # of the loop: "accumulate" or "norm_pass"
    clip: str = ""  # "each" or "all": the norm that is limited to options' or norm_pass's
    scaled: bool = False
    kinds: tuple[str, ...] = ("in backward", "after")
    against: str = "fp32"  # whose time is 1
    bar: float = 1.3
    make: Callable[[list[Tensor]], Optimizer] | None = None  # a peer's
    optimizer: Any = ms.AdamW

    @property
    def backwards(self) -> int:
        """How many a step has."""
        return {"accumulate": MICRO_BATCHES, "norm_pass": 2}.get(self.way, 1)

    @property
    def peer(self) -> bool:
        return self.make is not None


def low(name: str, page: str, dtype: torch.dtype, stored: float, **options: Any) -> Mode:
    """A gradient is read, of the parameter's type; all that is stored is read and written."""
    bar = 2.0 if options.get("state_dtype") in ("8bit", "4bit") else 1.3
    return Mode(name, page, stored, dtype.itemsize + 2 * stored, dtype, options, bar=bar)


def peer(name: str, dtype: torch.dtype, stored: float | None, make: Any) -> Mode:
    return Mode(name, "", stored, None, dtype, kinds=("after",), make=make)


def other(name: str, of: Any, against: str, moment: float, **options: Any) -> Mode:
    """Of SGD or Lion, whose moments are of so many bytes."""
    dtype = BF16 if "bf16" in options else FP32
    stored = dtype.itemsize + moment
    moved = dtype.itemsize + 2 * stored
    return Mode(name, "sgd_lion", stored, moved, dtype, options, against=against, optimizer=of)


def _torch_fused(params: list[Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, lr=LR, fused=True)


def _torch_sgd(**options: Any) -> Callable[[list[Tensor]], Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=LR, weight_decay=DECAY, **options)


def _optimi(params: list[Tensor]) -> Optimizer:
    from optimi import AdamW

    return AdamW(params, lr=LR, weight_decay=DECAY, eps=1e-8, betas=(0.9, 0.999))


def _flashoptim(params: list[Tensor]) -> Optimizer:
    from flashoptim import FlashAdamW

    return FlashAdamW(params, lr=LR)


def _torchao(kind: str) -> Callable[[list[Tensor]], Optimizer]:
    def make(params: list[Tensor]) -> Optimizer:
        import torchao.optim

        return getattr(torchao.optim, kind)(params, lr=LR)

    return make


def _bitsandbytes(params: list[Tensor]) -> Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=LR, weight_decay=DECAY)


LR, DECAY = 1e-4, 1e-2
STOCHASTIC, SPLIT, SPLIT8 = ({"bf16": kind} for kind in ("stochastic", "split", "split8"))
BF16_STATES, BLOCKS, BLOCKS4 = ({"state_dtype": of} for of in (BF16, "8bit", "4bit"))
CORE = Mode("fp32", "", 12, 28)
ACCUMULATE = "fp32, accumulate()"
# A norm needs another look at the gradient; accumulating moves 0, 12, 12 and 12 bytes, and 28 at
# the end.
OURS = [
    CORE,
    Mode("fp32, max_grad_norm", "clipping", 12, 32, options={"max_grad_norm": 1.0}, clip="each"),
    Mode(
        "fp32, clip_global_norm", "clipping", 12, 32, options={"clip_global_norm": 1.0},
        clip="all", kinds=("after",),
    ),
    Mode("fp32, norm_pass()", "clipping", 12, 32, way="norm_pass", clip="all",
         kinds=("in backward",)),
    Mode("fp32, grad_scaler", "loss_scaling", 12, 32, scaled=True),
    Mode(ACCUMULATE, "", 12, 64, way="accumulate", against=ACCUMULATE),
    low("bf16", "bfloat16", BF16, 10),
    low("bf16 stochastic", "bfloat16", BF16, 10, **STOCHASTIC),
    low("bf16 split", "bfloat16", BF16, 12, **SPLIT),
    low("bf16 split8", "bfloat16", BF16, 11, **SPLIT8),
    low("fp32, bf16 states", "states", FP32, 8, **BF16_STATES),
    low("bf16 stochastic, bf16 states", "states", BF16, 6, **STOCHASTIC, **BF16_STATES),
    low("bf16 split, bf16 states", "states", BF16, 8, **SPLIT, **BF16_STATES),
    low("fp32, 8-bit states", "states", FP32, 6 + SCALES, **BLOCKS),
    low("bf16 stochastic, 8-bit states", "states", BF16, 4 + SCALES, **STOCHASTIC, **BLOCKS),
    low("bf16 split, 8-bit states", "states", BF16, 6 + SCALES, **SPLIT, **BLOCKS),
    low("bf16 split8, 8-bit states", "states", BF16, 5 + SCALES, **SPLIT8, **BLOCKS),
    low("fp32, 4-bit states", "states", FP32, 5 + SCALES_OF_4_BIT, **BLOCKS4),
    low("bf16 stochastic, 4-bit states", "states", BF16, 3 + SCALES_OF_4_BIT, **STOCHASTIC,
        **BLOCKS4),
]  # fmt: skip
PEERS = [
    peer("torch, fused", FP32, 12, _torch_fused),
    peer("torch, fused, bf16", BF16, 6, _torch_fused),
    peer("optimi, bf16 kahan", BF16, 8, _optimi),
    peer("flashoptim, bf16", BF16, None, _flashoptim),
    peer("torchao, 8-bit", FP32, 6 + SCALES, _torchao("AdamW8bit")),
    peer("torchao, 4-bit", FP32, 5 + SCALES_OF_4_BIT, _torchao("AdamW4bit")),
    peer("torchao, fp8", FP32, 6 + SCALES, _torchao("AdamWFp8")),
    peer("bitsandbytes, 8-bit", FP32, 6 + SCALES, _bitsandbytes),
]
# What takes part only in times and bytes: distances and losses are of Adam.
MOMENTUM = {"momentum": 0.9}
SGD_LION = [
    other("SGD", ms.SGD, "SGD", 0),
    other("SGD, momentum", ms.SGD, "SGD, momentum", 4, **MOMENTUM),
    other("SGD, momentum, bf16 states", ms.SGD, "SGD, momentum", 2, **MOMENTUM, **BF16_STATES),
    other("SGD, momentum, 8-bit states", ms.SGD, "SGD, momentum", 1 + SCALES / 2, **MOMENTUM,
          **BLOCKS),
    other("SGD, momentum, bf16 stochastic, 8-bit states", ms.SGD, "SGD, momentum", 1 + SCALES / 2,
          **MOMENTUM, **STOCHASTIC, **BLOCKS),
    other("Lion", ms.Lion, "Lion", 4),
    other("Lion, bf16 states", ms.Lion, "Lion", 2, **BF16_STATES),
    other("Lion, 8-bit states", ms.Lion, "Lion", 1 + SCALES / 2, **BLOCKS),
    other("Lion, bf16 stochastic, 8-bit states", ms.Lion, "Lion", 1 + SCALES / 2, **STOCHASTIC,
          **BLOCKS),
    replace(peer("torch, SGD, fused", FP32, 4, _torch_sgd(fused=True)), against="SGD"),
    *(
        replace(
            peer(f"torch, SGD, momentum, {way}", FP32, 8, _torch_sgd(momentum=0.9, **{way: True})),
            against="SGD, momentum",
        )
        for way in ("fused", "foreach")
    ),
]  # fmt: skip


class Stepper:
    """A mode's optimizer, and the training loop that it needs."""

    def __init__(
        self,
        mode: Mode,
        params: Sequence[Tensor],
        kind: str,
        lr: float = LR,
        max_norm: float = 1.0,
    ) -> None:
        self.mode, self.params, self.max_norm = mode, list(params), max_norm
        device = self.params[0].device.type
        self.scaler = torch.amp.GradScaler(device, init_scale=1024.0) if mode.scaled else None
        if mode.make is not None:
            self.optimizer = mode.make(self.params)
            for group in self.optimizer.param_groups:
                # torchao's is a tensor, which compiled code reads.
                group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else group.update(lr=lr)
            return
        norms = {"max_grad_norm", "clip_global_norm"} & mode.options.keys()
        options = {**mode.options, **dict.fromkeys(norms, max_norm)}
        if self.scaler is not None:
            options["grad_scaler"] = self.scaler
        self.optimizer = mode.optimizer(
            self.params, lr=lr, weight_decay=DECAY, in_backward=kind == "in backward", **options
        )

    def __call__(self, losses: Sequence[Loss]) -> None:
        """One step: ``losses`` of its micro-batches, or of one batch and of the same again."""
        way = self.mode.way
        if way == "norm_pass":
            with self.optimizer.norm_pass(self.max_norm):
                self._backward(losses[0])
            self._backward(losses[-1])
        else:
            if way:
                with self.optimizer.accumulate():
                    for loss in losses[:-1]:
                        self._backward(loss)
            self._backward(losses[-1])
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def _backward(self, loss: Loss) -> None:
        value = loss()
        (value if self.scaler is None else self.scaler.scale(value)).backward()

    def parameters(self) -> list[Tensor]:
        """With what is kept beside their 16 bits."""
        if not self.mode.peer:
            return self.optimizer.fp32_parameters()
        states = [self.optimizer.state[p] for p in self.params]
        return [
            p.detach().float() + (0 if (rest := s.get("kahan_comp")) is None else rest.float())
            for p, s in zip(self.params, states, strict=True)
        ]


@functools.cache
def reasons(device: str) -> dict[str, str]:
    """Why some peers are left out: what they say to a step of a small parameter."""
    found = {}
    for mode in PEERS:
        param = nn.Parameter(torch.ones(8192, dtype=mode.dtype, device=device))
        try:
            step = Stepper(mode, [param], "after", lr=0.1)
            step([lambda p=param: p.sum()])
        except Exception as error:
            found[mode.name] = str(error).partition("\n")[0]
            continue
        if param[0].item() == 1:
            found[mode.name] = "it made no step"
    return found


def available(device: str) -> list[Mode]:
    return [*OURS, *(mode for mode in PEERS if mode.name not in reasons(device))]
