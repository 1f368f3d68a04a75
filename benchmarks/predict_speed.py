"""Seconds of CPU time, and the memory, of memory.predict() itself.

Each prediction runs in a process of its own; the time of importing torch and what fake tensors
need is not counted. What is predicted is a training step of 500 linear layers and activations
(1,000 operators in forward) and of a ViT-L/16 (304 M parameters, 4.9 GB at its peak). The bars are
3 seconds and 10, and 1 GiB.

    python benchmarks/predict_speed.py
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memsave_ext as ms
from memsave_ext.shared.table import format_bytes, print_table
from predict import stepped
from shared.adam_methods import VisionTransformer


def layers(count: int = 500) -> Any:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(count)])
    x = torch.randn(64, 256)
    return stepped(model, lambda: model(x).square().mean())


def vit() -> Any:
    model = VisionTransformer(224)
    x, labels = torch.randn(1, 3, 224, 224), torch.zeros(1, dtype=torch.long)
    return stepped(model, lambda: F.cross_entropy(model(x), labels))


BUILDS = {"1,000 operators": layers, "ViT-L/16": vit}


def predict(name: str) -> dict[str, Any]:
    ms.memory.predict(lambda: layers(1))
    begin = time.process_time()
    predicted = ms.memory.predict(BUILDS[name])
    seconds = time.process_time() - begin
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"model": name, "seconds": seconds, "held": held, "peak": predicted.peak}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--one", choices=BUILDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(predict(options.one)))
        return 0
    rows = []
    for name in BUILDS:
        command = [sys.executable, __file__, "--one", name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(printed.splitlines()[-1]))
    print_table(
        "",
        ["model", "seconds of CPU", "memory of the process", "predicted peak"],
        [
            (r["model"], f"{r['seconds']:.1f}", format_bytes(r["held"]), format_bytes(r["peak"]))
            for r in rows
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
