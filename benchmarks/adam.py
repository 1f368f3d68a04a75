"""What a step of Adam costs, in backward and after it: time per parameter, per step, and memory.

Three jobs, each of some 300 parameters shaped like a vision transformer's:

- ``tiny``: gradients handed out by one node, to parameters of 10 k elements in all: what the host
  does for each of them. Microseconds per parameter over a backward with an empty hook.
- ``large``: likewise with 19 M elements: the time of the optimizer alone.
- ``real``: 24 transformer blocks of width 256 trained on one sequence of 17: a whole step, and the
  peak of live bytes beyond parameters and states, which are there before.

All methods take turns in one process; medians. The tutorial is "How to save memory by fusing the
optimizer step into the backward pass": a dictionary of optimizers, one for each parameter.

    python benchmarks/adam.py --save benchmarks/results
"""

import argparse
import copy
import gc
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import memsave_ext as ms
from common import ROOT, interleave, machine, write_record

LR = 1e-4
Step = Callable[[Callable[[], None]], None]  # runs a backward and steps


def after(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[list[Tensor]], Step]:
    """The ordinary loop."""

    def prepare(params: list[Tensor]) -> Step:
        optimizer = make(params)

        def step(backward: Callable[[], None]) -> None:
            backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare


def tutorial(**options: Any) -> Callable[[list[Tensor]], Step]:
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
    _apply_optimizer_in_backward(torch.optim.AdamW, params, {"lr": LR})
    return lambda backward: backward()


def nobody(params: list[Tensor]) -> Step:
    for p in params:
        p.register_post_accumulate_grad_hook(lambda param: None)

    def step(backward: Callable[[], None]) -> None:
        backward()
        for p in params:
            p.grad = None

    return step


def optimi(params: list[Tensor]) -> Step:
    from optimi import AdamW, prepare_for_gradient_release

    model = nn.ParameterList(params)
    optimizer = AdamW(model.parameters(), lr=LR, gradient_release=True)
    prepare_for_gradient_release(model, optimizer)

    def step(backward: Callable[[], None]) -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


METHODS: dict[str, Callable[[list[Tensor]], Step]] = {
    "an empty hook": nobody,
    "torch, for-loop": after(lambda p: torch.optim.AdamW(p, lr=LR, foreach=False)),
    "torch, foreach": after(lambda p: torch.optim.AdamW(p, lr=LR, foreach=True)),
    "torch, fused": after(lambda p: torch.optim.AdamW(p, lr=LR, fused=True)),
    "tutorial": tutorial(foreach=False),
    "tutorial, fused": tutorial(fused=True),
    "torch.distributed in backward": torch_distributed,
    "optimi, gradient release": optimi,
    "AdamW": after(lambda p: ms.AdamW(p, lr=LR)),
    "AdamW(in_backward=True)": after(lambda p: ms.AdamW(p, lr=LR, in_backward=True)),
}
OPTIONAL = {"optimi, gradient release": "optimi"}


class HandOut(torch.autograd.Function):
    """A node whose backward gives every parameter a gradient that is there already."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *(g.clone() for g in ctx.grads)


def transformer(width: int) -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(24)
    ]
    return nn.Sequential(nn.Linear(48, width), *layers, nn.Linear(width, 10))


def shapes(elements: int) -> list[torch.Size]:
    """A transformer's, reduced to about so many elements in all."""
    model = transformer(256)
    total = sum(p.numel() for p in model.parameters())
    scale = (elements / total) ** 0.5
    return [torch.Size(max(1, round(n * scale)) for n in p.shape) for p in model.parameters()]


def handed_out(elements: int, steps: int) -> dict[str, Callable[[], None]]:
    """``steps`` at a time: none starts from the caches of another."""
    cases = {}
    for name in available():
        params: list[Tensor] = [nn.Parameter(torch.randn(s)) for s in shapes(elements)]
        grads = [torch.randn_like(p) for p in params]
        step = METHODS[name](params)

        def run(step: Step = step, params: Any = params, grads: Any = grads) -> None:
            for _ in range(steps):
                step(lambda: HandOut.apply(grads, *params).backward())

        cases[name] = run
    return cases


def real(threads: int) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    x = torch.randn(1, 17, 48)
    start = transformer(256)
    cases, peaks = {}, {}
    for name in available():
        model = copy.deepcopy(start)
        step = METHODS[name](list(model.parameters()))

        def run(step: Step = step, model: nn.Module = model) -> None:
            step(lambda: model(x).square().mean().backward())

        run()  # makes the states
        with ms.memory.track() as tracked:
            run()
        cases[name], peaks[name] = run, tracked.peak
    return cases, peaks


def available() -> Iterable[str]:
    for name in METHODS:
        module = OPTIONAL.get(name)
        if module is not None and not _importable(module):
            continue
        yield name


def _importable(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    count = len(shapes(1))
    jobs = {"tiny": handed_out(9_700, steps=20), "large": handed_out(options.elements, steps=1)}
    jobs["real"], peaks = real(options.threads)
    # What the jobs hold is not to be looked through again and again.
    gc.collect()
    gc.freeze()
    median: dict[str, dict[str, float]] = {}
    for job, cases in jobs.items():
        seconds = interleave(cases, options.rounds, 3, options.progress)
        median[job] = {name: statistics.median(values) for name, values in seconds.items()}
    median["tiny"] = {name: seconds / 20 for name, seconds in median["tiny"].items()}
    alone = "an empty hook"
    return [
        {
            "method": name,
            "us_per_parameter": (median["tiny"][name] - median["tiny"][alone]) / count * 1e6,
            "large_ms": (median["large"][name] - median["large"][alone]) * 1e3,
            "real_ms": median["real"][name] * 1e3,
            "peak_bytes": peaks[name],
        }
        for name in median["tiny"]
    ]


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    of = {row["method"]: row for row in rows}
    ours, fused = of["AdamW(in_backward=True)"], of["torch, fused"]
    figures = [
        ("µs per tiny parameter", ours["us_per_parameter"], 1.0),
        ("optimizer time over torch fused", ours["large_ms"] / fused["large_ms"], 0.85),
        ("real step over the tutorial's", ours["real_ms"] / of["tutorial"]["real_ms"], 0.6),
        ("real step over torch fused", ours["real_ms"] / fused["real_ms"], 0.9),
    ]
    return [
        {"name": name, "value": value, "bar": at_most, "ok": value <= at_most}
        for name, value, at_most in figures
    ]


def show(rows: list[dict[str, Any]], held: list[dict[str, Any]]) -> None:
    print(f"{'':32}{'µs/parameter':>14}{'large, ms':>12}{'real, ms':>12}{'peak MiB':>12}")
    for row in rows:
        print(
            f"{row['method']:32}{row['us_per_parameter']:14.2f}{row['large_ms']:12.1f}"
            f"{row['real_ms']:12.1f}{row['peak_bytes'] / 2**20:12.1f}"
        )
    for name in sorted(set(METHODS) - {row["method"] for row in rows}):
        print(f"{name:32} (not installed)")
    for figure in held:
        verdict = "ok" if figure["ok"] else "MISSED"
        print(
            f"{figure['name']:32} {figure['value']:6.2f}  (at most {figure['bar']:.2f}) {verdict}"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--elements", type=int, default=19_500_000, help="of the large job")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path, default=ROOT / "benchmarks/out", metavar="DIR")
    parser.add_argument("--no-progress", dest="progress", action="store_false")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = measure(options)
    held = bars(rows)
    show(rows, held)
    settings = {name: getattr(options, name) for name in ("rounds", "elements", "threads")}
    record = {"machine": machine(), "settings": settings, "rows": rows, "bars": held}
    print(write_record(options.save, "adam", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
