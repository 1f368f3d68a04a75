"""Where the memory of a training step goes: a vision transformer's, three ways, as track() sees it.

The account of PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward
pass", made with this package's own tool. On the CPU the model is ViT-S/16, a small sister of the
tutorial's ViT-L/16 (22 M parameters instead of 304 M); on a GPU it is that one.

    python benchmarks/memory_account.py --save benchmarks/results
"""

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import memsave_ext as ms
from memsave_ext.memory.report import as_json
from plot import draw
from shared.adam_methods import VisionTransformer
from shared.common import Rows, bar, machine, parser_of, settings_of, write_record

LR = 1e-4
POINTS = 200  # of each timeline
SMALL = {"width": 384, "heads": 6, "depth": 12}
LARGE = {"width": 1024, "heads": 16, "depth": 24}

LOOPS: dict[str, tuple[bool, Callable[[nn.Module], Optimizer]]] = {
    "ordinary loop": (False, lambda m: torch.optim.AdamW(m.parameters(), lr=LR, foreach=True)),
    "step in backward": (False, lambda m: ms.AdamW(m.parameters(), lr=LR, in_backward=True)),
    "step in backward, checkpoint": (
        True,
        lambda m: ms.AdamW(m.parameters(), lr=LR, in_backward=True),
    ),
}


def account(name: str, options: argparse.Namespace) -> dict[str, Any]:
    checkpoint, make_optimizer = LOOPS[name]
    torch.manual_seed(0)
    with torch.device(options.device):
        shape = {key: getattr(options, key) for key in SMALL}
        model = VisionTransformer(options.image, **shape)
        images = torch.randn(options.batch_size, 3, options.image, options.image)
        labels = torch.zeros(options.batch_size, dtype=torch.int64)
    if checkpoint:
        ms.checkpoint_modules(model, nn.TransformerEncoderLayer)
    optimizer = make_optimizer(model)
    with ms.memory.track(model, optimizer) as track:
        for _ in range(options.steps):
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"loop": name, **as_json(track, points=POINTS, top=5)}


def line_of(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{key} {value / 2**20:.1f}" for key, value in row["at_peak"].items())
    return f"{row['loop']:30}{row['peak'] / 2**20:9.1f} MiB in {row['peak_phase']}: {parts}"


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2, help="the first makes Adam's states")
    parser.add_argument("--image", type=int, default=224)
    for key, value in SMALL.items():
        parser.add_argument(f"--{key}", type=int, help=f"default {value}, on a GPU {LARGE[key]}")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    if not ms._native.available:
        parser.error("needs the native part: in pure Python Adam's own steps are not seen alike")
    for key, value in (LARGE if options.device == "cuda" else SMALL).items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    names = ("batch_size", "steps", "image", *SMALL)
    record = {
        "machine": machine(options.device),
        "settings": settings_of(options, *names),
    }
    rows = Rows(options.save, "memory_account", record, line=line_of)
    for name in bar(list(LOOPS), show=options.progress):
        rows.append(account(name, options))
        gc.collect()
    path = write_record(options.save, "memory_account", {**record, "rows": rows})
    print(f"{path}\n{draw(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
