"""Peak memory of training a ViT-L/16 with AdamW, stepped after backward and in it.

A model of 304 M float32 parameters learns an image of 224 x 224; the peak counts every byte of
tensors: parameters, states, gradients, activations and temporaries. The methods come one at a time,
and each frees its model. Beside it stands the peak that memory.predict() tells, of methods with one
optimizer. On a GPU they come ``--repeats`` times, and the median time of the steps after the first
one is shown, too; on a CPU a few steps, minutes apart, would say little.

    python benchmarks/adam_memory.py --save benchmarks/results
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import memsave_ext as ms
from plot import draw
from shared.adam_methods import (
    AFTER,
    FLASHOPTIM,
    FOR_LOOP,
    FOREACH,
    FUSED,
    IN_BACKWARD,
    LR,
    METHODS,
    OPTIMI,
    TUTORIAL,
    Step,
    VisionTransformer,
    reason,
    release,
)
from shared.common import (
    bar,
    figure,
    machine,
    parser_of,
    settings_of,
    show_bars,
    show_left_out,
    write_record,
)
from shared.training import CudaMemory

CHECKPOINTED = f"{IN_BACKWARD} + checkpoint"
CLIPPED = "AdamW(grads_on=...), clipped"
PEERS = [OPTIMI, FLASHOPTIM]
NAMES = [FOREACH, FOR_LOOP, FUSED, TUTORIAL, "tutorial, fused", *PEERS, AFTER, IN_BACKWARD,
         CHECKPOINTED, CLIPPED]  # fmt: skip


def left_out(device: str) -> dict[str, str]:
    return {name: why for name in NAMES if name in METHODS and (why := reason(name, device))}


def batch(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    images = torch.randn(options.batch_size, 3, options.image, options.image, device=options.device)
    return images, torch.zeros(options.batch_size, dtype=torch.int64, device=options.device)


def clipped(params: list[Tensor]) -> Step:
    """Clips by the norm of all gradients, which lie elsewhere."""
    place = "cpu" if params[0].is_cuda else tempfile.gettempdir()
    optimizer = ms.AdamW(params, lr=LR, grads_on=place)

    def step(backward: Callable[[], None]) -> None:
        backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


def prepare(name: str, options: argparse.Namespace) -> tuple[nn.Module, Step]:
    with torch.device(options.device):
        model = VisionTransformer(options.image, width=options.width, depth=options.depth)
    if name == CHECKPOINTED:
        ms.checkpoint_modules(model, nn.TransformerEncoderLayer)
    if name == CLIPPED:
        return model, clipped(list(model.parameters()))
    return model, METHODS[IN_BACKWARD if name == CHECKPOINTED else name](list(model.parameters()))


def predict(name: str, options: argparse.Namespace) -> int | None:
    """The predicted peak; None where several optimizers step, or another library's."""
    if name in PEERS or name.startswith(TUTORIAL):
        return None

    def build() -> Any:
        model, step = prepare(name, options)
        images, labels = batch(options)

        def one() -> None:
            step(lambda: nn.functional.cross_entropy(model(images), labels).backward())

        return model, step.optimizer, one  # type: ignore[attr-defined]

    return ms.memory.predict(build, device=options.device).peak


def train(name: str, options: argparse.Namespace) -> tuple[int, list[float]]:
    """Peak bytes, and the seconds of each step but the first."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    images, labels = batch(options)
    seconds = []
    with CudaMemory(device) if images.is_cuda else ms.memory.track() as memory:
        model, step = prepare(name, options)
        for _ in range(1 + options.steps):
            start = time.perf_counter()
            step(lambda: nn.functional.cross_entropy(model(images), labels).backward())
            if images.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    release(model.parameters())
    return memory.peak, seconds[1:]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    on_cuda = options.device == "cuda"
    names = [name for name in NAMES if name not in left_out(options.device)]
    peaks: dict[str, list[int]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.freeze()  # what is there already need not be looked through after every training
    for name in bar(names * options.repeats, show=options.progress):
        peak, taken = train(name, options)
        peaks[name].append(peak)
        seconds[name] += taken
        gc.collect()
    return [
        {
            "method": name,
            "peak_bytes": max(peaks[name]),
            "predicted_bytes": predict(name, options),
            "step_ms": statistics.median(seconds[name]) * 1e3 if on_cuda else None,
        }
        for name in names
    ]


def bars(rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    if device != "cuda":
        return []
    of = {row["method"]: row["step_ms"] for row in rows}
    return [figure("step over torch fused", of[IN_BACKWARD] / of[FUSED], 1.0)]


def show(record: dict[str, Any]) -> None:
    base = record["rows"][0]
    for row in record["rows"]:
        cells = [f"{row['peak_bytes'] / 2**30:8.2f} GiB", _times(row, base, "peak_bytes")]
        if row["step_ms"]:
            cells += [f"{row['step_ms']:8.1f} ms", _times(row, base, "step_ms")]
        print(f"{row['method']:36}{' '.join(cells)}")
    show_left_out(record["left_out"])
    show_bars(record["bars"])


def _times(row: dict[str, Any], base: dict[str, Any], key: str) -> str:
    return f"({row[key] / base[key]:.2f}x)"


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch-size", type=int, help="default 1, on a GPU 8")
    parser.add_argument("--steps", type=int, help="default 1, on a GPU 10")
    parser.add_argument("--repeats", type=int, help="default 1, on a GPU 3")
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    on_cuda = options.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    if why := reason(IN_BACKWARD, options.device):
        parser.error(why)
    for name, value in {"batch_size": 8, "steps": 10, "repeats": 3}.items():
        if getattr(options, name) is None:
            setattr(options, name, value if on_cuda else 1)
    torch.set_num_threads(options.threads)
    rows = measure(options)
    names = ("batch_size", "steps", "repeats", "image", "width", "depth", "threads")
    record = {
        "machine": machine(options.device),
        "settings": settings_of(options, *names),
        "rows": rows,
        "left_out": left_out(options.device),
        "bars": bars(rows, options.device),
    }
    show(record)
    path = write_record(options.save, "adam_memory", record)
    print(f"{path}\n{draw(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
