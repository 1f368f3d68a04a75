"""The ways to step AdamW that the benchmarks compare, and the models that they step."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms

LR = 1e-4
Step = Callable[[Callable[[], None]], None]  # runs a backward, and steps in it or after it
Method = Callable[[list[Tensor]], Step]


class HandOut(torch.autograd.Function):
    """A node whose backward gives the parameters gradients that are there already: away."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        # Nobody else may hold one, or it is copied.
        grads = tuple(ctx.grads)
        ctx.grads.clear()
        return None, *grads


def after(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Method:
    """The ordinary loop."""

    def prepare(params: list[Tensor]) -> Step:
        optimizer = make(params)

        def step(backward: Callable[[], None]) -> None:
            backward()
            optimizer.step()
            optimizer.zero_grad()

        step.optimizer = optimizer  # type: ignore[attr-defined]
        return step

    return prepare


def tutorial(**options: Any) -> Method:
    """A dictionary of optimizers, one for each parameter.

    Of "How to save memory by fusing the optimizer step into the backward pass".
    """

    def prepare(params: list[Tensor]) -> Step:
        optimizers = {p: torch.optim.AdamW([p], lr=LR, **options) for p in params}

        def hook(param: Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for p in params:
            p.register_post_accumulate_grad_hook(hook)
        return lambda backward: backward()

    return prepare


def torch_distributed(params: list[Tensor]) -> Step:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.AdamW, params, {"lr": LR})
    return lambda backward: backward()


def empty_hook(params: list[Tensor]) -> Step:
    for p in params:
        p.register_post_accumulate_grad_hook(lambda param: None)

    def step(backward: Callable[[], None]) -> None:
        backward()
        for p in params:
            p.grad = None

    return step


def optimi(params: list[Tensor]) -> Step:
    from optimi import AdamW, prepare_for_gradient_release

    optimizer = AdamW(params, lr=LR, gradient_release=True)
    prepare_for_gradient_release(nn.ParameterList(params), optimizer)

    def step(backward: Callable[[], None]) -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def flashoptim(params: list[Tensor]) -> Step:
    from flashoptim import FlashAdamW, enable_gradient_release

    # State in float32, as everybody else's. Fused: with Triton.
    fused = params[0].is_cuda
    optimizer = FlashAdamW(params, lr=LR, quantize=False, master_weight_bits=None, fused=fused)
    enable_gradient_release(nn.ParameterList(params), optimizer)

    def step(backward: Callable[[], None], kept: Any = optimizer) -> None:
        backward()  # its hooks refer to the optimizer weakly

    return step


BASE, FOREACH, FUSED, TUTORIAL = "an empty hook", "torch, foreach", "torch, fused", "tutorial"
FOR_LOOP, OPTIMI, FLASHOPTIM = (
    "torch, for-loop",
    "optimi, gradient release",
    "flashoptim, gradient release",
)
AFTER, IN_BACKWARD = "AdamW", "AdamW(in_backward=True)"
METHODS: dict[str, Method] = {
    BASE: empty_hook,
    FOR_LOOP: after(lambda p: torch.optim.AdamW(p, lr=LR, foreach=False)),
    FOREACH: after(lambda p: torch.optim.AdamW(p, lr=LR, foreach=True)),
    FUSED: after(lambda p: torch.optim.AdamW(p, lr=LR, fused=True)),
    TUTORIAL: tutorial(foreach=False),
    "tutorial, fused": tutorial(fused=True),
    "torch.distributed in backward": torch_distributed,
    OPTIMI: optimi,
    FLASHOPTIM: flashoptim,
    AFTER: after(lambda p: ms.AdamW(p, lr=LR)),
    IN_BACKWARD: after(lambda p: ms.AdamW(p, lr=LR, in_backward=True)),
}


@functools.cache
def reason(name: str, device: str) -> str | None:
    """Why a method cannot run here: what it says to a step of one element."""
    param = nn.Parameter(torch.ones(1, device=device))
    try:
        METHODS[name]([param])(lambda: param.sum().backward())
    except Exception as error:
        return str(error).partition("\n")[0]
    return "it made no step" if name != BASE and param.item() == 1 else None


def reasons(device: str) -> dict[str, str]:
    """Of the methods that cannot run here."""
    return {name: why for name in METHODS if (why := reason(name, device))}


def available(device: str) -> list[str]:
    return [name for name in METHODS if name not in reasons(device)]


def release(params: Iterable[Tensor]) -> None:
    """Drop their hooks: those that refer to a parameter would keep it alive for ever."""
    for param in params:
        if hooks := param._post_accumulate_grad_hooks:
            hooks.clear()


class VisionTransformer(nn.Module):
    """ViT of Dosovitskiy et al. 2020, arXiv 2010.11929. By default ViT-L/16: 304 M parameters."""

    def __init__(
        self, image: int = 224, patch: int = 16, width: int = 1024, heads: int = 16, depth: int = 24
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 1 + (image // patch) ** 2, width) * 0.02)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))
