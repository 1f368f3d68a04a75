"""The largest model that trains in a given memory: the deepest ViT, and the largest batch.

For each budget of bytes and each way to train, the most blocks with a fixed batch, and the largest
batch with a fixed number of blocks, by bisection. Each try makes two steps, the second one with the
optimizer's states there. On a CPU a try fits when the peak of all tensors does; on a GPU the
process may take no more than the budget, and a try fits when it does not run out of memory, with
what the allocator of torch itself takes or cannot use.

    python benchmarks/largest_model.py --save benchmarks/results
    python benchmarks/largest_model.py --device cuda --budget-gb 16 40 80
"""

import argparse
import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import adam_methods
import memsave_ext as ms
from adam_methods import FOREACH, FUSED, IN_BACKWARD, LR, METHODS, VisionTransformer, after
from common import ROOT, bar, machine, show_bars, write_record
from plot import draw
from search import largest
from tables import size
from tables.training import largest_model_caption, largest_model_table
from training import memory_of

BLOCK = nn.TransformerEncoderLayer
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """How to train: the optimizer, what checkpoints the blocks, and the parameters' type."""

    method: adam_methods.Method
    checkpoint: str = ""
    dtype: torch.dtype = torch.float32


def low(bf16: str, states: str) -> adam_methods.Method:
    return after(lambda p: ms.AdamW(p, lr=LR, in_backward=True, bf16=bf16, state_dtype=states))


NAIVE, THEIRS, OURS = "naive, foreach", "torch's checkpoint, tutorial", "memsave_ext"
WAYS = {
    NAIVE: Way(METHODS[FOREACH]),
    "naive, fused": Way(METHODS[FUSED]),
    # Fused, which has no temporaries.
    THEIRS: Way(METHODS["tutorial, fused"], "torch"),
    OURS: Way(METHODS[IN_BACKWARD], "memsave_ext"),
    **{
        f"{OURS}, bf16 {bf16}, {bits}-bit states": Way(
            low(bf16, f"{bits}bit"), "memsave_ext", torch.bfloat16
        )
        for bf16, bits in (("split", 8), ("split8", 8), ("stochastic", 8), ("stochastic", 4))
    },
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made of this type: converting them would need more memory than training."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(options: argparse.Namespace, depth: int) -> VisionTransformer:
    return VisionTransformer(options.image, options.patch, options.width, options.heads, depth)


def parameters(options: argparse.Namespace, depth: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(options, depth).parameters())


def steps(way: Way, depth: int, batch: int, options: argparse.Namespace) -> int:
    """The peak of two steps in bytes."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    with memory_of(device) as memory, contextlib.ExitStack() as at_end:
        images = torch.randn(batch, 3, options.image, options.image, device=device, dtype=way.dtype)
        labels = torch.zeros(batch, dtype=torch.int64, device=device)
        with device, default_dtype(way.dtype):
            model = build(options, depth)
        at_end.callback(adam_methods.release, list(model.parameters()))
        if way.checkpoint == "memsave_ext":
            ms.checkpoint_modules(model, BLOCK)
        elif way.checkpoint == "torch":
            for block in model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        step = way.method(list(model.parameters()))
        for _ in range(2):
            step(lambda: nn.functional.cross_entropy(model(images).float(), labels).backward())
    return int(memory.peak)


def peak_of(way: Way, depth: int, batch: int, options: argparse.Namespace) -> int | None:
    """None where a GPU's memory did not suffice."""
    try:
        peak: int | None = steps(way, depth, batch, options)
    except torch.OutOfMemoryError:
        peak = None
    # Only now has the exception let go of the model.
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return peak


def search(name: str, of: str, budget: int, options: argparse.Namespace) -> Row:
    """The largest ``of``, "depth" or "batch", of one way."""
    way = WAYS[name]

    def peak(n: int) -> int | None:
        depth, batch = (n, options.batch_size) if of == "depth" else (options.depth, n)
        return peak_of(way, depth, batch, options)

    found = largest(peak, budget, first=options.depth if of == "depth" else options.batch_size)
    if of == "depth":
        found["parameters"] = parameters(options, found["largest"]) if found["largest"] else 0
    return found


def measure(options: argparse.Namespace) -> list[Row]:
    rows: dict[Any, Row] = {}
    budgets = [round(gb * 1e9) for gb in options.budget_gb]
    jobs = list(itertools.product(budgets, WAYS, ("depth", "batch")))
    gc.collect()
    gc.freeze()  # what is there already need not be looked through after every try
    for budget, name, of in bar(jobs, show=options.progress):
        if options.device == "cuda":
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(budget / whole)
        row = rows.setdefault((budget, name), {"method": name, "budget_bytes": budget})
        row[of] = search(name, of, budget, options)
    gc.unfreeze()
    return list(rows.values())


def bars(rows: list[Row]) -> list[Row]:
    """Never less than with what torch itself offers."""
    found = []
    of = {(row["budget_bytes"], row["method"]): row for row in rows}
    for (budget, name), row in of.items():
        if name != OURS:
            continue
        for other, what in itertools.product((NAIVE, THEIRS), ("depth", "batch")):
            theirs, ours = of[budget, other][what]["largest"], row[what]["largest"]
            if theirs:
                label = f"{size(budget)}: {what} over {other}"
                ratio = ours / theirs
                found.append({"name": label, "value": ratio, "bar": 1.0, "ok": ratio >= 1.0})
    return found


DEFAULTS = {  # of the options: on a CPU, on a GPU
    "budget_gb": ([0.064], [16.0]),
    "image": (64, 224),
    "patch": (8, 16),
    "width": (128, 1024),
    "heads": (2, 16),
    "depth": (6, 24),
    "batch_size": (4, 8),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--budget-gb", type=float, nargs="+", help="GB; default 0.064, on a GPU 16")
    for name, (on_cpu, on_gpu) in itertools.islice(DEFAULTS.items(), 1, None):
        text = f"default {on_cpu}" + (f", on a GPU {on_gpu}" if on_gpu != on_cpu else "")
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=text)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", type=Path, default=ROOT / "benchmarks/out", metavar="DIR")
    parser.add_argument("--no-progress", dest="progress", action="store_false")
    options = parser.parse_args(arguments)
    on_cuda = options.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    for name, values in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, values[on_cuda])
        given = getattr(options, name)
        if not all(n > 0 for n in (given if isinstance(given, list) else [given])):
            parser.error(f"--{name.replace('_', '-')} must be more than 0")
    if on_cuda:
        whole = torch.cuda.get_device_properties(0).total_memory / 1e9
        if max(options.budget_gb) > whole:
            parser.error(f"--budget-gb: this GPU has {whole:.1f} GB")
    if why := adam_methods.reason(IN_BACKWARD, options.device):
        parser.error(why)
    torch.set_num_threads(options.threads)
    rows = measure(options)
    record = {
        "machine": machine(options.device),
        "settings": {name: getattr(options, name) for name in (*DEFAULTS, "threads")},
        "rows": rows,
        "bars": bars(rows),
    }
    print(f"\n{largest_model_table(record)}\n\n{largest_model_caption(record)}\n")
    show_bars(record["bars"], "at least")
    path = write_record(options.save, "largest_model", record)
    print(f"{path}\n{draw(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
