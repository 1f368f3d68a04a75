"""What checkpointing a region costs on the host, beyond running it twice.

Overhead = forward and backward of the checkpointed region - the same without checkpoint - one more
forward. The synthetic regions multiply a tiny tensor K times by a weight, so that K tensors are
saved and nothing but the host is measured; two real ones, a transformer block and a DenseNet layer
on a small batch, have arithmetic in them. Peers and ours are interleaved in one process; minima,
because whatever disturbs a call only adds to it. Floor: below zero, as the forward of an explicit
region builds no graph, which the plain forward does, and as a recompute that stops early is less
than a forward.

    python benchmarks/checkpoint_overhead.py --save benchmarks/results
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plot import draw
from shared.common import Rows, interleave, machine, parser_of, show_left_out, write_record
from shared.models import STRATEGIES, DenseLayer, reasons
from shared.peers import REENTRANT, TORCH, steps

Region = tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]  # with inputs and parameters


def chain(saved_tensors: int, device: str) -> Region:
    x = torch.ones(8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)

    def region(value: Tensor) -> Tensor:
        for _ in range(saved_tensors):
            value = value * weight
        return value

    return region, [x], [weight]


def transformer_block(device: str) -> Region:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True, device=device)
    x = torch.randn(2, 16, 64, device=device, requires_grad=True)
    return block, [x], list(block.parameters())


def densenet_layer(device: str) -> Region:
    torch.manual_seed(0)
    layer = DenseLayer(24, 12, STRATEGIES["naive"], nn.BatchNorm2d).to(device)
    features = [torch.randn(2, 12, 8, 8, device=device, requires_grad=True) for _ in range(2)]
    return layer.bn_function, features, [*layer.norm1.parameters(), *layer.conv1.parameters()]


def measure(region: Region, options: argparse.Namespace) -> list[dict[str, Any]]:
    seconds = interleave(steps(*region), options.rounds, warmup=20, progress=options.progress)
    best = {name: min(values) * 1e6 for name, values in seconds.items()}
    base = best.pop("plain") + best.pop("forward")
    overhead = {name: value - base for name, value in best.items()}
    return [
        {
            "peer": name,
            "overhead_us": value,
            "ratio": value / overhead[TORCH],
            "ratio_reentrant": value / overhead[REENTRANT],
        }
        for name, value in overhead.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    width = max(len(row["peer"]) for row in rows)
    columns = list(dict.fromkeys(row["region"] for row in rows))
    print(f"{'':{width}}" + "".join(f"{name:>21}" for name in columns))
    for peer in dict.fromkeys(row["peer"] for row in rows):
        cells = [
            f"{r['overhead_us']:8.1f} us ({r['ratio']:5.2f}x)" for r in rows if r["peer"] == peer
        ]
        print(f"{peer:{width}}" + "".join(f"{cell:>21}" for cell in cells))
    print(f"In brackets: against {TORCH}.")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--saved-tensors", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    regions = {
        f"{n} saved tensor{'s' if n != 1 else ''}": chain(n, options.device)
        for n in options.saved_tensors
    }
    regions["transformer block"] = transformer_block(options.device)
    regions["DenseNet layer"] = densenet_layer(options.device)
    record: dict[str, Any] = {
        "machine": machine(options.device),
        "settings": {"rounds": options.rounds, "threads": 1, "regions": list(regions)},
    }
    rows = Rows(options.save, "checkpoint_overhead", record)
    for name, region in regions.items():
        for row in measure(region, options):
            rows.append({"region": name, **row})
    show(rows)
    record |= {"rows": rows, "left_out": reasons()}
    show_left_out(record["left_out"])
    path = write_record(options.save, "checkpoint_overhead", record)
    print(f"{path}\n{draw(path)}")


if __name__ == "__main__":
    main()
