"""What ms.in_backward() costs over an optimizer's own step of one parameter: a part of adam.py.

Tiny parameters, whose arithmetic takes no time; all over a backward with an empty hook. "own": an
optimizer for each parameter, whose step(), without step hooks and profiling around it, is called by
a hook of Python. "in backward": ms.in_backward() steps each parameter by itself, too. "in a
bucket": several with one step(), which is the default for small ones.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms
from shared.adam_methods import HandOut
from shared.common import balanced_order

MAKES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-4),
}
Case = Callable[[], float]  # runs once, and returns seconds


def tiny(count: int) -> list[Tensor]:
    return [nn.Parameter(torch.randn(8)) for _ in range(count)]


def backward(params: list[Tensor], close: Callable[[], Any]) -> Case:
    def case() -> float:
        loss = HandOut.apply([torch.ones_like(p) for p in params], *params)
        start = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - start
        close()
        return took

    return case


def empty_hook(count: int) -> Case:
    params = tiny(count)
    for p in params:
        p.register_post_accumulate_grad_hook(lambda param: None)

    def close() -> None:
        for p in params:
            p.grad = None

    return backward(params, close)


def in_a_hook(make: Any, count: int) -> Case:
    params = tiny(count)
    optimizers = {p: make([p]) for p in params}
    step = type(optimizers[params[0]]).step.__wrapped__

    def hook(param: Tensor) -> None:
        step(optimizers[param])
        param.grad = None

    for p in params:
        p.register_post_accumulate_grad_hook(hook)
    return backward(params, lambda: None)


def in_backward(make: Any, count: int, **options: Any) -> Case:
    params = tiny(count)
    optimizer = ms.in_backward(make(params), **options)
    return backward(params, optimizer.step)


def measure(count: int = 200, rounds: int = 10) -> list[dict[str, Any]]:
    """Returns a row for each optimizer: microseconds of a parameter, the least of all rounds."""
    base = "an empty hook"
    cases: dict[str, Case] = {base: empty_hook(count)}
    for name, make in MAKES.items():
        cases[f"{name} own"] = in_a_hook(make, count)
        cases[f"{name} in backward"] = in_backward(make, count, small_bytes=0)
        cases[f"{name} in a bucket"] = in_backward(make, count)
    took = dict.fromkeys(cases, float("inf"))
    for round_ in range(rounds):
        for name in balanced_order(list(cases), round_):
            took[name] = min(took[name], cases[name]())
    us = {name: seconds / count * 1e6 for name, seconds in took.items()}
    rows = []
    for name in MAKES:
        own, at_once = us[f"{name} own"] - us[base], us[f"{name} in backward"] - us[base]
        rows.append(
            {
                "optimizer": name,
                "own_us": own,
                "in_backward_us": at_once,
                "in_a_bucket_us": us[f"{name} in a bucket"] - us[base],
                "overhead_us": at_once - own,
            }
        )
    return rows
