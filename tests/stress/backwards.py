"""Concurrent backwards from several threads, into one parameter and into several: plain ones,
accumulated, through regions. Made for sanitizers, too: races and freed memory are theirs
to see, sums are compared here."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from oracles.adam import Oracle, too_far
from torch import Tensor, nn

import memsave_ext as ms

Case = dict[str, Any]
HOW = ["plain", "checkpoint", "checkpoint", "explicit", "nested", "batch_norm"]


def generate(seed: int, without: list[str]) -> Case:
    rng = random.Random(seed)
    modes = [m for m in ("gradients", "accumulate", "step") if m not in without]
    mode = rng.choice(modes)
    how = [rng.choice([h for h in HOW if h not in without]) for _ in range(rng.choice([2, 3, 8]))]
    return {
        "seed": seed,
        "mode": mode,  # what backward does with gradients
        # Two steps of one parameter without accumulate() are refused: each thread has its own.
        "shared": mode != "step" and rng.random() < 0.6,
        "how": how,  # of each thread
        "size": rng.choice([1, 64, 5000, 20_000]),
        "repeats": rng.choice([1, 3]),
        "small_bytes": rng.choice([0, 1 << 16]),
        "dtype": rng.choice(["float32", "float64"]),
        "engine_hooks": rng.random() < 0.5,
    }


def loss(how: str, weight: Tensor, x: Tensor, norm: nn.Module) -> Tensor:
    """A loss whose gradient for the weight is x, exactly."""
    one = torch.ones_like(x)

    def inner(w: Tensor, ones: Tensor) -> Tensor:
        return (w * ones) * x

    if how == "checkpoint":
        product = ms.checkpoint(inner, weight, one)
    elif how == "nested":
        product = ms.checkpoint(lambda w, o: ms.checkpoint(inner, w, o) * 1, weight, one)
    elif how == "explicit":
        product = ms.CheckpointFunction.apply(inner, 2, weight, one)
    else:
        product = inner(weight, one)
    if how == "batch_norm":  # a region in a thread, whose statistics are its own
        norm(torch.stack([x.detach()[:1].expand(3), torch.zeros_like(x[:1]).expand(3)]).float())
        product = ms.checkpoint(lambda p: p * 1, product)
    return product.sum()


def at_once(works: list[Callable[[], None]]) -> list[BaseException]:
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    if any(thread.is_alive() for thread in threads):
        raise RuntimeError("threads hang")
    return errors


def check(case: Case) -> str:
    dtype = getattr(torch, case["dtype"])
    threads, size = len(case["how"]), case["size"]
    count = 1 if case["shared"] else threads
    weights = [nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in range(count)]
    oracles = [Oracle(w) for w in weights]
    generator = torch.Generator().manual_seed(case["seed"])

    def draw() -> Tensor:
        # Sums are exact in any order, and none is 0 or near it, where Adam magnifies rounding.
        return torch.randint(1, 9, (size,), generator=generator).to(dtype)

    inputs = [[draw() for _ in range(case["repeats"])] for _ in range(threads)]
    mode = case["mode"]
    options = {"in_backward": mode != "gradients", "small_bytes": case["small_bytes"]}
    optimizer = ms.Adam(weights, lr=0.01, **options)
    norms = [ms.BatchNorm1d(3) for _ in range(threads)]
    for _ in range(2):  # steps
        totals = [torch.zeros(size, dtype=torch.float64) for _ in weights]

        def work(i: int) -> None:
            for x in inputs[i] if mode != "step" else inputs[i][:1]:
                loss(case["how"][i], weights[i % count], x, norms[i]).backward()

        for i, own in enumerate(inputs):
            for x in own if mode != "step" else own[:1]:
                totals[i % count] += x
        with optimizer.accumulate() if mode == "accumulate" else contextlib.nullcontext():
            errors = at_once([lambda i=i: work(i) for i in range(threads)])
        if errors:
            return f"error: {type(errors[0]).__name__}: {errors[0]}"
        if mode in ("gradients", "accumulate"):
            for weight, total in zip(weights, totals, strict=True):
                if weight.grad is None or not torch.equal(weight.grad.double(), total):
                    return "wrong: the sum of gradients"
        optimizer.step()
        optimizer.zero_grad()
        for weight, oracle, total in zip(weights, oracles, totals, strict=True):
            oracle.update(
                total, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False,
                maximize=False, decoupled=False, parts=total,
            )  # fmt: skip
            if wrong := too_far(weight, oracle, "", dtype):
                return f"wrong: {wrong}"
    return ""


def run_seed(seed: int, without: list[str], shrinks: bool) -> tuple[str, str]:
    case = generate(seed, without)
    hooks = ms.use_engine_hooks(case["engine_hooks"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = check(case)
    finally:
        ms.use_engine_hooks(hooks)
    return verdict, f"# {case}"
