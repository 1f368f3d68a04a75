"""Rematerialization: memory and time of a training step, beside torch's checkpoint.

For each model: the plain step; remat that records and drops nothing; remat; remat within budgets of
shares of the activations, on CUDA also with offload; torch.compile's budgets of the same shares,
without its code generation; torch's checkpoint around every block, around every second one, and its
selective checkpointing that keeps products of matrices. Methods take turns, on copies of one model.
Activations are the peak of a step, without what lived before it, as memory.track counts.

    python benchmarks/remat.py --rounds 24 --scale 4 --compiled --save benchmarks/results
"""

import argparse
import copy
import functools
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import memsave_ext as ms
from memsave_ext import _native
from shared.common import (
    Rows,
    figure,
    interleave,
    machine,
    median_and_spread,
    parser_of,
    settings_of,
    show_bars,
    write_record,
)
from shared.remat_models import Case, Transformer, cases

Method = Callable[[nn.Module, Tensor], Tensor]  # a forward, and the loss
RECORDING_BAR = 1.03
PLANNING_BAR = 0.3  # seconds
SHARES = (0.5, 0.4, 0.25)
PLAIN, RECORDED, REMAT = "plain", "recorded", "remat"
BLOCKS, SECOND, SELECTED = "checkpoint", "checkpoint, every second", "checkpoint, selective"
_HEAVY = {
    getattr(torch.ops.aten, name).default
    for name in (
        *("mm", "addmm", "bmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    )
}


def forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def in_block(everything: bool | None, model: nn.Module, x: Tensor) -> Tensor:
    with ms.remat(_everything=everything):
        return forward(model, x)


def in_budget(share: float, offload: str | None, model: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what is less than the least
        with ms.remat(budget=share, offload=offload):
            return forward(model, x)


def in_compiled(share: float, model: nn.Module, x: Tensor) -> Tensor:
    # It is read when the model is compiled, at its first call.
    with torch._functorch.config.patch(activation_memory_budget=share):
        return forward(model, x)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _HEAVY else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(model: nn.Module, kind: type[nn.Module], every: int, selective: bool) -> nn.Module:
    """A line a block: what its user has to change."""
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    blocks = [module for module in model.modules() if isinstance(module, kind)]
    for block in blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, **options)  # type: ignore[method-assign]
    return model


def methods(case: Case, model: nn.Module, compiled: bool) -> dict[str, tuple[nn.Module, Method]]:
    """Models are copied before their forwards are changed: the copies' forwards are their own."""
    found: dict[str, tuple[nn.Module, Method]] = {
        PLAIN: (model, forward),
        RECORDED: (copy.deepcopy(model), functools.partial(in_block, None)),
        REMAT: (copy.deepcopy(model), functools.partial(in_block, False)),
    }
    for share in SHARES:
        found[f"budget {share}"] = (copy.deepcopy(model), functools.partial(in_budget, share, None))
        if next(model.parameters()).is_cuda:
            within = functools.partial(in_budget, share, "cpu")
            found[f"budget {share}, host memory"] = (copy.deepcopy(model), within)
    for share in SHARES if compiled else ():
        # A backend of its own, since copies of a model share what is compiled with the same one.
        backend = functools.partial(torch._dynamo.lookup_backend("aot_eager"))
        other = torch.compile(copy.deepcopy(model), backend=backend)
        found[f"compile, budget {share}"] = (other, functools.partial(in_compiled, share))
    if case.block is not None:
        for name, every, selective in ((BLOCKS, 1, False), (SECOND, 2, False), (SELECTED, 1, True)):
            other = checkpointed(copy.deepcopy(model), case.block, every, selective)
            found[name] = (other, forward)
    return found


def activations(step: Callable[[], None], device: torch.device) -> int:
    for _ in range(2):  # gradients are there from now on, and remat's plan in the third step
        step()
    with ms.memory.track(device=device) as track:
        before = track.live
        step()
    return int(track.peak) - before


def measure(name: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device(options.device)
    model, x = case.build().to(device), torch.randn(case.inputs, device=device)

    def step(of: nn.Module, method: Method) -> None:
        torch.manual_seed(1)
        method(of, x).backward()
        for p in of.parameters():
            p.grad.zero_()
        if x.is_cuda:
            torch.cuda.synchronize()

    found = methods(case, model, options.compiled)
    steps = {method: functools.partial(step, *how) for method, how in found.items()}
    peaks = {method: activations(run, device) for method, run in steps.items()}
    seconds = interleave(steps, options.rounds, options.warmup, options.progress)
    rows = []
    for method, taken in seconds.items():
        middle, spread = median_and_spread(taken)
        ratio = statistics.median(a / b for a, b in zip(taken, seconds[PLAIN], strict=True))
        rows.append(
            {
                "method": method,
                "bytes": peaks[method],
                "memory": peaks[method] / peaks[PLAIN],
                "step_ms": middle * 1e3,
                "spread_ms": spread * 1e3,
                "time": ratio,
            }
        )
    return {"model": name, "rows": rows}


def planning() -> dict[str, Any]:
    """How long plans take for a step of 5,000 operators: a deep, narrow GPT.

    They are made in the second step, whose forward takes longer by that than the third's.
    """
    torch.manual_seed(0)
    model, x = Transformer(32, 278, False, True, 0.1), torch.randn(4, 64, 32)
    forward(model, x).backward()
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        with ms.remat(budget=1.0) as r:
            loss = forward(model, x)
        seconds.append(time.perf_counter() - begin)
        loss.backward()
    return {
        "operators": r.figures().operators,
        "seconds": seconds[1] - statistics.median(seconds[2:]),
    }


class Small(nn.Module):
    """Operators that take no time: what is left is what the host does for each."""

    def __init__(self, linear: bool, length: int = 40) -> None:
        super().__init__()
        self.linear, self.length = linear, length
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            for _ in range(length if linear else 0)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        for _ in range(0 if self.linear else self.length):
            x = ((x * 1.01).sigmoid() + x).tanh() * 0.5
        return x


@contextmanager
def observed() -> Iterator[None]:
    """An observer that is told of every operator and does nothing: the least that a block takes."""
    handle = _native.module.remat_observe_nothing()
    try:
        yield
    finally:
        _native.module.remat_stop_observing(handle)


def host_times(rounds: int) -> list[dict[str, Any]]:
    """Processor time that a step takes over the plain one, by operator of the forward."""
    found = []
    for name, linear in (("elementwise", False), ("linear layers", True)):
        x = torch.randn(2, 8, requires_grad=True)
        model = Small(linear)
        with_budget = copy.deepcopy(model)
        ms.remat_module(with_budget, budget="8GB")
        ways: dict[str, tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]] = {
            PLAIN: (model, nullcontext),
            "an observer that does nothing": (model, observed),
            RECORDED: (model, functools.partial(ms.remat, _everything=None)),
            REMAT: (model, ms.remat),
            "a budget that is not needed": (with_budget, nullcontext),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(8 + rounds):
            # Each way after every other one: what ran before has left its memory in the caches.
            for way, (of, block) in random.sample([*ways.items()], len(ways)):
                begin = time.process_time()
                with block():
                    y = of(x)
                y.backward(torch.ones_like(y))
                if number >= 8:
                    taken[way].append(time.process_time() - begin)
        with ms.remat() as r:
            model(x)
        operators = r.figures().operators
        plain = statistics.median(taken.pop(PLAIN))
        over = {way: statistics.median(seconds) - plain for way, seconds in taken.items()}
        found.append(
            {
                "program": name,
                "operators": operators,
                "plain_us": plain / operators * 1e6,
                "us": {way: seconds / operators * 1e6 for way, seconds in over.items()},
            }
        )
    return found


def bars(name: str, case: Case, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    of = {row["method"]: row for row in rows}
    figures = (
        (f"{name}: time, recording alone", of[RECORDED]["time"], RECORDING_BAR),
        (f"{name}: activations", of[REMAT]["memory"], case.memory),
        (f"{name}: time", of[REMAT]["time"], case.time),
    )
    return [figure(*each) for each in figures if each[-1] is not None]


def lines_of(measured: dict[str, Any]) -> str:
    lines = [
        f"  {row['method']:26}{row['bytes'] / 2**20:8.1f} MiB ({row['memory']:.2f})"
        f"{row['step_ms']:9.1f} ms ({row['time']:.3f}x)"
        for row in measured["rows"]
    ]
    return "\n".join([measured["model"], *lines])


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--scale", type=int, default=1, help="multiplies batches")
    parser.add_argument("--only", nargs="+", choices=cases(1), metavar="MODEL", default=[*cases(1)])
    parser.add_argument(
        "--compiled", action="store_true", help="also torch.compile's budgets (backend aot_eager)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 100  # of one function: past that it runs as it is
    names = ("rounds", "warmup", "scale", "only", "threads", "compiled")
    record: dict[str, Any] = {
        "machine": machine(options.device),
        "settings": settings_of(options, *names),
    }
    models, held = Rows(options.save, "remat", record, "models", lines_of), []
    for name in options.only:
        case = cases(options.scale)[name]
        models.append(measure(name, case, options))
        held += bars(name, case, models[-1]["rows"])
    hosts = host_times(30 * options.rounds)
    for host in hosts:
        each = ", ".join(f"{way} {us:.2f}" for way, us in host["us"].items())
        print(f"us of the host for an operator, {host['program']}: {each}")
    planned = planning()
    print(f"plans for {planned['operators']} operators: {planned['seconds'] * 1e3:.0f} ms")
    held.append(figure("planning", planned["seconds"], PLANNING_BAR))
    record |= {"models": models, "host": hosts, "planning": planned, "bars": held}
    show_bars(held, digits=3)
    print(write_record(options.save, "remat", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
