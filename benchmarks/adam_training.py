"""What a training to convergence loses by weights and states of few bits.

A small GPT learns a language that is made up, and a small vision transformer the handwritten
digits, with a learning rate that rises for a tenth of the steps and falls to 0. The figure is the
loss on what they have not seen, the mean over several seeds, each with its own first weights and
batches. Beside torch's AdamW: this package's formats, and others' where they run.

The language has 8 letters. After each pair of them 3 can follow, with chances of their own for each
pair; so the least loss that there can be is known, and is recorded.

    python benchmarks/adam_training.py --save benchmarks/results
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from shared import data
from shared.adam_methods import VisionTransformer
from shared.adam_mode_list import OURS, PEERS, Mode, Stepper, available, reasons
from shared.common import IMPORTS, bar, machine, parser_of, show_left_out, write_record

BASE = "torch, fused"
MODES = (
    BASE, "fp32, 8-bit states", "bf16 split8, 8-bit states", "fp32, 4-bit states",
    "bf16 stochastic, 4-bit states", "torchao, 8-bit", "torchao, 4-bit", "bitsandbytes, 8-bit",
)  # fmt: skip
LETTERS, FOLLOWING = 8, 3
CONTEXT, WIDTH, HEADS, DEPTH = 32, 64, 4, 2
Batches = Iterator[tuple[Tensor, Tensor]]


class Gpt(nn.Module):
    """Reads letters and says which is the next at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.place = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        ahead = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        self.register_buffer("ahead", ahead, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.place[: text.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=self.ahead[: text.shape[1], : text.shape[1]], is_causal=True)
        return self.head(self.norm(x)).transpose(1, 2)


class Language:
    rate, batch, make = 3e-3, 32, Gpt

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        letters = torch.rand(LETTERS, LETTERS, LETTERS, generator=generator).argsort(-1)
        self._next = letters[..., :FOLLOWING]
        self._chances = torch.rand(LETTERS, LETTERS, FOLLOWING, generator=generator).square()
        self._chances /= self._chances.sum(-1, keepdim=True)

    def _written(self, count: int, seed: int) -> Tensor:
        """Texts of CONTEXT + 1 letters."""
        generator = torch.Generator().manual_seed(seed)
        text = list(torch.randint(LETTERS, (2, count), generator=generator))
        while len(text) < CONTEXT + 1:
            chances, following = (of[text[-2], text[-1]] for of in (self._chances, self._next))
            chosen = chances.multinomial(1, generator=generator)
            text.append(following.gather(1, chosen)[:, 0])
        return torch.stack(text, 1)

    def learned(self, seed: int) -> Batches:
        for number in itertools.count():
            text = self._written(self.batch, 1_000_000 * (seed + 1) + number)
            yield text[:, :-1], text[:, 1:]

    def kept(self) -> Batches:
        for part in self._written(2048, 1).split(256):
            yield part[:, 1:-1], part[:, 2:]

    def least(self) -> float:
        """Of the loss on the texts that are kept."""
        text = self._written(2048, 1)
        of = text[:, :-2], text[:, 1:-1]
        known = self._next[of] == text[:, 2:, None]
        return -(self._chances[of] * known).sum(-1).log().mean().item()


class Digits:
    rate, batch = 2e-3, 32

    def __init__(self) -> None:
        self._learned, self._kept = data.load("digits")

    @staticmethod
    def make() -> nn.Module:
        return VisionTransformer(32, 16, 48, 4, 2)

    def learned(self, seed: int) -> Batches:
        epoch = 0
        while True:
            yield from self._learned.epoch(self.batch, torch.device("cpu"), 1000 * seed + epoch)
            epoch += 1

    def kept(self) -> Batches:
        return self._kept.in_order(256, torch.device("cpu"))


TASKS: dict[str, Callable[[], Any]] = {"GPT": Language, "ViT": Digits}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


def final_loss(task: Any, mode: Mode, seed: int, steps: int) -> float:
    """Of one training, on what was not learned."""
    torch.manual_seed(seed)
    model = task.make().to(mode.dtype)
    step = Stepper(mode, list(model.parameters()), mode.kinds[0], lr=task.rate)
    dtype = mode.dtype
    for number, (x, y) in zip(range(steps), task.learned(seed), strict=False):
        x = x if x.dtype == torch.int64 else x.to(dtype)
        rise = min(1.0, 10 * (number + 1) / steps)
        rate = task.rate * rise * (1 + math.cos(math.pi * number / steps)) / 2
        for group in step.optimizer.param_groups:
            lr = group["lr"]
            lr.fill_(rate) if isinstance(lr, Tensor) else group.update(lr=rate)
        step([lambda pair=(x, y): loss_of(model, *pair)])
    total = count = 0.0
    with torch.no_grad():
        for x, y in task.kept():
            x = x if x.dtype == torch.int64 else x.to(dtype)
            total += loss_of(model, x, y).item() * y.numel()
            count += y.numel()
    return total / count


def one_thread() -> None:
    torch.set_num_threads(1)


def train(case: tuple[str, str, int, int]) -> float:
    name, task, seed, steps = case
    mode = next(mode for mode in (*OURS, *PEERS) if mode.name == name)
    return final_loss(TASKS[task](), mode, seed, steps)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gpt-steps", type=int, default=600)
    parser.add_argument("--vit-steps", type=int, default=300)
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    options = parser.parse_args(arguments)
    steps = {"GPT": options.gpt_steps, "ViT": options.vit_steps}
    known = {mode.name: mode for mode in available("cpu") if mode.name in MODES}
    left_out = {name: reason for name, reason in reasons("cpu").items() if name in MODES}
    modes = [known[name] for name in MODES if name not in left_out]
    losses: dict[tuple[str, str], list[float]] = {}
    cases = [
        (m.name, t, seed, steps[t]) for m in modes for t in TASKS for seed in range(options.seeds)
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with ProcessPoolExecutor(options.processes, context, one_thread) as pool:
        for case, found in zip(
            bar(cases, show=options.progress), pool.map(train, cases), strict=False
        ):
            losses.setdefault(case[:2], []).append(found)
    rows = [row(mode, {name: losses[mode.name, name] for name in TASKS}, losses) for mode in modes]
    for each in rows:
        print(f"{each['method']:32}", *(f"{n} {v['mean']:.4f}" for n, v in each["tasks"].items()))
    show_left_out(left_out)
    settings = {"seeds": options.seeds, "steps": steps, "least": Language().least()}
    record = {"machine": machine(), "settings": settings, "rows": rows, "left_out": left_out}
    print(write_record(options.save, "adam_training", record))
    return 0


def row(
    mode: Mode, of: dict[str, list[float]], losses: dict[tuple[str, str], list[float]]
) -> dict[str, Any]:
    tasks = {}
    for name, found in of.items():
        base = losses[BASE, name]
        tasks[name] = {
            "mean": statistics.fmean(found),
            "spread": statistics.stdev(found) if len(found) > 1 else 0.0,
            "change": statistics.fmean(a - b for a, b in zip(found, base, strict=True)),
            "losses": found,
        }
    return {"method": mode.name, "stored": mode.stored, "tasks": tasks}


if __name__ == "__main__":
    sys.exit(main())
