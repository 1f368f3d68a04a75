"""Moving activations to files within a budget of memory, beside recomputing and others' moving.

Measured, on the CPU: GPT and ViT at a share of plain's activations, each method in turn on copies
of one model: memory as memory.track counts, time of a step, processor time of all threads, and the
time for which the step waited for copies.

Simulated, as no card was there: blocks of a GPT on fake tensors for CUDA, their operators timed by
a card's figures, planned and simulated by the planner that remat runs with. What it finds is the
time that recomputing and waiting would add to a step; no card has run it.

    python benchmarks/remat_offload.py --rounds 12 --threads 1 --save benchmarks/results
"""

import argparse
import copy
import functools
import itertools
import os
import pickle
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import memsave_ext as ms
from memsave_ext.dry_run.child import writing_files
from remat import BLOCKS, PLAIN, activations, checkpointed, forward
from shared.cards import BUS_REACHED, CARDS, FLOPS_REACHED, MEMORY_REACHED, Card, timed_as
from shared.common import (
    Rows,
    interleave,
    machine,
    median_and_spread,
    parser_of,
    settings_of,
    write_record,
)
from shared.remat_models import Case, Transformer, cases

MODELS = ("GPT", "ViT")
RECOMPUTED, BOTH = "remat", "remat, offload"
ON_CPU, TO_FILE, OURS = "save_on_cpu", "every tensor to a file", "ms.checkpoint(offload)"
_LEAST = 1024  # bytes that TO_FILE moves, as torchtune's OffloadActivations does
_native: Any = ms._native.module


# What is measured.


class ToFile(saved_tensors_hooks):
    """Writes every saved tensor to a file, and reads it back: hooks as others have them, which wait
    for each copy."""

    def __init__(self, folder: str) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed with the graph
        self.end, self.moved, self.waited = 0, 0, 0.0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.nbytes < _LEAST or isinstance(tensor, nn.Parameter):
            return tensor
        begin = time.perf_counter()
        values = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        place = self.end
        self.end += os.pwrite(self.file.fileno(), values, place)
        assert self.end == place + tensor.nbytes
        self.moved += tensor.nbytes
        self.waited += time.perf_counter() - begin
        return place, tensor.shape, tensor.dtype

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        begin = time.perf_counter()
        place, shape, dtype = packed
        tensor = torch.empty(shape, dtype=dtype)
        values = tensor.view(-1).view(torch.uint8).numpy()
        assert os.preadv(self.file.fileno(), [values], place) == tensor.nbytes
        self.waited += time.perf_counter() - begin
        return tensor


@dataclass
class Done:
    """What a step is asked once it is over."""

    loss: Tensor
    moved: Callable[[], tuple[int, float]] = lambda: (0, 0.0)  # bytes; seconds waited
    least: Callable[[], int] = lambda: 0


def plain(model: nn.Module, x: Tensor) -> Done:
    return Done(forward(model, x))


def within(share: float, folder: str | None, model: nn.Module, x: Tensor) -> Done:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what is less than the least
        with ms.remat(model, budget=share, offload=folder) as r:
            loss = forward(model, x)

    def moved() -> tuple[int, float]:
        figures = r.figures()
        return figures.moved_bytes, figures.waited_seconds

    return Done(loss, moved, lambda: r.least or 0)


def on_cpu(model: nn.Module, x: Tensor) -> Done:
    with save_on_cpu():
        return Done(forward(model, x))


def to_file(folder: str, model: nn.Module, x: Tensor) -> Done:
    hooks = ToFile(folder)
    with hooks:
        return Done(forward(model, x), lambda: (hooks.moved, hooks.waited))


def with_offload(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    for block in [module for module in model.modules() if isinstance(module, kind)]:
        block.forward = functools.partial(ms.checkpoint, block.forward, offload="cpu")  # type: ignore[method-assign]
    return model


def measure(name: str, case: Case, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = case.build(), torch.randn(case.inputs)
    assert case.block is not None
    methods: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Done]]] = {
        PLAIN: (model, plain),
        RECOMPUTED: (copy.deepcopy(model), functools.partial(within, options.share, None)),
        BOTH: (copy.deepcopy(model), functools.partial(within, options.share, folder)),
        TO_FILE: (copy.deepcopy(model), functools.partial(to_file, folder)),
        ON_CPU: (copy.deepcopy(model), on_cpu),
        OURS: (with_offload(copy.deepcopy(model), case.block), plain),
        BLOCKS: (checkpointed(copy.deepcopy(model), case.block, 1, False), plain),
    }
    found: dict[str, list[tuple[float, int, float, int]]] = {method: [] for method in methods}

    def step(method: str) -> None:
        of, run = methods[method]
        torch.manual_seed(1)
        begin = time.process_time()
        done = run(of, x)
        done.loss.backward()
        taken = time.process_time() - begin
        found[method].append((taken, *done.moved(), done.least()))
        for p in of.parameters():
            p.grad.zero_()

    steps = {method: functools.partial(step, method) for method in methods}
    peaks = {method: activations(run, torch.device("cpu")) for method, run in steps.items()}
    for each in found.values():
        each.clear()
    # Steps of one shape that recompute and that move would take turns in what is known of it, and
    # be planned anew each time.
    together = {method: run for method, run in steps.items() if method != RECOMPUTED}
    rows = rows_of(together, found, peaks, options)
    _native.remat_forget()
    alone = {method: steps[method] for method in (PLAIN, RECOMPUTED)}
    rows.insert(1, rows_of(alone, found, peaks, options)[1])
    return {"model": name, "inputs": list(case.inputs), "rows": rows}


def rows_of(
    steps: dict[str, Callable[[], None]],
    found: dict[str, list[tuple[float, int, float, int]]],
    peaks: dict[str, int],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Steps in turns; each adds what it found of itself to ``found``."""
    seconds = interleave(steps, options.rounds, options.warmup, options.progress)
    processor = {m: [row[0] for row in rows[-options.rounds :]] for m, rows in found.items()}
    rows: list[dict[str, Any]] = []
    for method, taken in seconds.items():
        latest = found[method][-options.rounds :]
        middle, spread = median_and_spread(taken)
        waited = statistics.median(row[2] for row in latest)

        def over(times: dict[str, list[float]], method: str = method) -> float:
            pairs = zip(times[method], times[PLAIN], strict=True)
            return statistics.median(a / b for a, b in pairs)

        rows.append(
            {
                "method": method,
                "bytes": peaks[method],
                "memory": peaks[method] / peaks[PLAIN],
                "step_ms": middle * 1e3,
                "spread_ms": spread * 1e3,
                "time": over(seconds),
                "processor_ms": statistics.median(processor[method]) * 1e3,
                "processor": over(processor),
                "waited_ms": waited * 1e3,
                "moved": latest[-1][1],
                "least": latest[-1][3],
            }
        )
    return rows


def lines_of(measured: dict[str, Any]) -> str:
    return "\n".join(
        [measured["model"]]
        + [
            f"  {row['method']:26}{row['bytes'] / 2**20:8.1f} MiB ({row['memory']:.2f})"
            f"{row['step_ms']:9.1f} ms ({row['time']:.2f}x), processor {row['processor']:.2f}x, "
            f"waited {row['waited_ms']:.1f} ms, moved {row['moved'] / 2**20:.1f} MiB"
            for row in measured["rows"]
        ]
    )


# What is simulated.

_BACKWARD = 2  # forwards that a backward takes, as the planner has it


def traced(card: Card, width: int, layers: int, tokens: int) -> tuple[Any, int, int]:
    """The trace of a step that keeps everything; bytes that live before it; bytes with the peak."""

    def build() -> Any:
        model = Transformer(width, layers, False, True, 0.0).bfloat16()
        handle = ms.remat_module(model, budget=1.0)
        x = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)

        def step() -> None:
            model(x).square().mean().backward()
            x.grad = None
            for p in model.parameters():
                p.grad.zero_()  # type: ignore[union-attr]
            # This runs in a child process, of which nothing is left but files.
            recorder = handle._forward.last._recorder
            found = recorder.trace()[:4], recorder.budget()["before"], recorder.budget()["budget"]
            with writing_files():
                path.write_bytes(pickle.dumps(found))

        return model, None, step

    with timed_as(card), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        ms.memory.predict(build, device="cuda", progress=False)
        made: tuple[Any, int, int] = pickle.loads(path.read_bytes())
        return made


def simulate(card: Card, width: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    trace, before, full = traced(card, width, options.layers, options.tokens)
    forward = sum(call[0] for call in trace[1])
    step = (1 + _BACKWARD) * forward
    bus = BUS_REACHED * card.bus
    moving = functools.partial(_native.remat_moving_plans, *trace, bus, bus, 2**62)
    found = {
        "recompute": [(plan[0], plan[1]) for plan in _native.remat_plans(*trace)],
        "move": [(plan[0], plan[1]) for plan, *_ in moving(recomputes=False)],
        "both": [(plan[0], plan[1]) for plan, *_ in moving()],
    }
    rows = []
    for share in options.shares:
        level = before + share * (full - before)
        row: dict[str, Any] = {"card": card.name, "width": width, "share": share}
        row |= {"step_ms": step * 1e3, "activations": full - before}
        for name, plans in found.items():
            within = [seconds for peak, seconds in plans if peak <= level]
            row[name] = min(within) / step if within else None
            least = min(peak for peak, _ in plans)
            row[f"{name}_least"] = (least - before) / (full - before)
        rows.append(row)
    return rows


def simulated_line(row: dict[str, Any]) -> str:
    def cell(name: str) -> str:
        return "-" if row[name] is None else f"{row[name]:.3f}"

    return (
        f"{row['card']:6}{row['width']:6} at {row['share']:.2f}: recompute {cell('recompute')}, "
        f"move {cell('move')}, both {cell('both')}; least {row['recompute_least']:.2f}, "
        f"{row['move_least']:.2f}, {row['both_least']:.2f}"
    )


def left_out() -> dict[str, str]:
    """torchtune's hooks run on CUDA's streams alone."""
    if torch.cuda.is_available():
        return {}
    return {"torchtune's OffloadActivations": "its constructor asks CUDA for a stream"}


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=3, help="until steps are planned")
    parser.add_argument("--scale", type=int, default=4, help="multiplies batches")
    parser.add_argument("--share", type=float, default=0.15, help="of plain's activations")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.15], help="simulated")
    parser.add_argument(
        "--widths", type=int, nargs="*", default=[768, 1024, 1536, 2048, 3072, 4096, 8192]
    )
    parser.add_argument("--layers", type=int, default=8, help="of what is simulated")
    parser.add_argument("--tokens", type=int, default=4096, help="of what is simulated")
    parser.add_argument("--only", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--folder", help="where files are; None: of the system")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.warmup, options.scale, options.only = 1, 0, 1, ["ViT"]
        options.widths, options.layers, options.tokens = [256], 2, 512
        options.shares = [0.6, 0.4]
    torch.set_num_threads(options.threads)
    if options.only:
        print(write_record(options.save, "remat_offload", measured(options)))
    if options.widths:
        print(write_record(options.save, "remat_offload_simulated", simulated(options)))
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    names = ("rounds", "warmup", "scale", "share", "only", "threads")
    record: dict[str, Any] = {
        "machine": machine(),
        "settings": settings_of(options, *names),
        "load": [round(load, 1) for load in os.getloadavg()],
        "left_out": left_out(),
    }
    models = Rows(options.save, "remat_offload", record, "models", lines_of)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in options.only:
            models.append(measure(name, cases(options.scale)[name], options, folder))
    return record | {"models": models}


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {
        "machine": machine(),
        "settings": settings_of(options, "shares", "layers", "tokens"),
        "cards": [asdict(card) for card in CARDS],
        "reached": [FLOPS_REACHED, MEMORY_REACHED, BUS_REACHED],
    }
    rows = Rows(options.save, "remat_offload_simulated", record, "rows", simulated_line)
    for card, width in itertools.product(CARDS, options.widths):
        for row in simulate(card, width, options):
            rows.append(row)
    return record | {"rows": rows}


if __name__ == "__main__":
    sys.exit(main())
