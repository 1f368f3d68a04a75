"""Training with weights and states in the host's memory on a card: a simulation.

The blocks of a Llama in bfloat16 run on fake tensors for CUDA, their operators timed by a card's
figures (cards.py), checkpointed, with the optimizer stepped in backward. What each block has moved
is what weights_on(model, "cpu"), states_on="cpu" and the inputs of checkpoints move: managed memory
goes back when it was only read, too. A block takes as long as what is longest: its arithmetic, the
bus in, or the bus out. No card has run it.

    python benchmarks/elsewhere.py --save benchmarks/results
"""

import functools
import itertools
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import memsave_ext as ms
from real_row import build
from shared.cards import BUS_REACHED, CARDS, FLOPS_REACHED, MEMORY_REACHED, Card, timed_as
from shared.common import Rows, machine, parser_of, write_record
from shared.real_models import SHAPES, Shape

BFLOAT16, GIB = 2, 2**30  # bytes
_LLAMA = SHAPES["Llama 7 B"]
MODELS = {
    "7 B": _LLAMA,
    "13 B": replace(_LLAMA, depth=40, width=5120, heads=40, key_value_heads=40, inner=13824),
    "70 B": replace(_LLAMA, depth=80, width=8192, heads=64, key_value_heads=8, inner=28672),
}
TINY = {"tiny": SHAPES["Llama tiny"]}
STATES = {"8-bit": 2, "float32": 8}  # bytes of a parameter's states
HIDDEN = 1.05  # of the arithmetic's time, where copies are called hidden


@dataclass
class Part:
    """A block, or all that is no block, in a step with one sequence."""

    parameters: int
    seconds: float  # its forward and backward
    saved: int  # bytes that its forward saves for backward


def parts_of(card: Card, shape: Shape, tokens: int) -> tuple[Part, Part]:
    """A block, and the rest, as models of one and of two blocks tell."""
    one, two = (_predicted(card, replace(shape, depth=depth), tokens) for depth in (1, 2))
    parameters, seconds, peak = (b - a for a, b in zip(one, two, strict=True))
    # Of weights and gradients, which are no activations.
    block = Part(parameters, seconds, peak - 2 * BFLOAT16 * parameters)
    return block, Part(one[0] - parameters, one[1] - seconds, 0)


def _predicted(card: Card, shape: Shape, tokens: int) -> tuple[int, float, int]:
    """Parameters, seconds of a step, and the most bytes."""

    def build_step() -> Any:
        model = build(shape, torch.bfloat16)
        ids = torch.zeros(1, tokens, dtype=torch.long)

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        return model, None, step

    with timed_as(card):
        told = ms.memory.predict(build_step, device="cuda", progress=False)
    return parameters_of(shape), told.seconds, told.peak


def parameters_of(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(shape, torch.bfloat16).parameters())


def seconds_of(
    card: Card, shape: Shape, block: Part, rest: Part, states: int, tokens: int, sequences: int
) -> tuple[float, float]:
    """Arithmetic alone, and a step of so many sequences."""
    bus = BUS_REACHED * card.bus
    # The head runs in pieces, of which nothing is saved; what is the embedding's moves with it.
    parts = [(rest, 0), *[(block, shape.width * tokens * sequences * BFLOAT16)] * shape.depth]
    arithmetic = waits = 0.0
    for part, inputs in parts:
        forward = sequences * part.seconds / 3  # a backward takes two
        backward = 2 * forward + forward  # after the recompute
        weights = part.parameters * BFLOAT16
        arithmetic += forward + backward
        # The same each way: weights come, and go again; in backward they were stepped.
        waits += max(0, (weights + inputs) / bus - forward)
        waits += max(0, (weights + inputs + part.parameters * states) / bus - backward)
    return arithmetic, arithmetic + waits + block.parameters * BFLOAT16 / bus  # the first one's


def simulate(card: Card, name: str, shape: Shape, tokens: int) -> list[dict[str, Any]]:
    block, rest = parts_of(card, shape, tokens)
    parameters = rest.parameters + shape.depth * block.parameters
    rows = []
    for states, nbytes in STATES.items():
        step = functools.partial(seconds_of, card, shape, block, rest, nbytes, tokens)
        hidden = next(n for n in itertools.count(1) if step(n)[1] <= HIDDEN * step(n)[0])
        row: dict[str, Any] = {"card": card.name, "model": name, "states": states}
        row |= {"host_bytes": parameters * (BFLOAT16 + nbytes), "sequences": hidden}
        row["arithmetic"], row["step"] = step(1)
        row["tokens_per_second"] = hidden * tokens / step(hidden)[1]
        row["flops"] = 6 * parameters * row["tokens_per_second"]
        row["saved_bytes"] = hidden * block.saved
        rows.append(row)
    return rows


def line_of(row: dict[str, Any]) -> str:
    return (
        f"{row['card']:5} {row['model']:5} {row['states']:8} one sequence: "
        f"{row['arithmetic']:6.2f} of {row['step']:6.2f} s; hidden from {row['sequences']:4} on, "
        f"{row['tokens_per_second']:8.0f} tokens/s, {row['flops'] / 1e12:4.0f} TFLOP/s, a block "
        f"saves {row['saved_bytes'] / GIB:.1f} GiB; host {row['host_bytes'] / GIB:.0f} GiB"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "machine": machine(),
        "settings": {"tokens": options.tokens},
        "cards": [asdict(card) for card in CARDS],
        "reached": [FLOPS_REACHED, MEMORY_REACHED, BUS_REACHED],
    }
    rows = Rows(options.save, "elsewhere", record, "rows", line_of)
    models = TINY if options.quick else MODELS
    for card, (name, shape) in itertools.product(CARDS, models.items()):
        for row in simulate(card, name, shape, options.tokens):
            rows.append(row)
    print(write_record(options.save, "elsewhere", record | {"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
