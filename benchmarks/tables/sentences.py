"""Figures in sentences of the pages: where they stand, and what they are in the results."""

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shared.common import newest
from tables import Record


def percent(ratios: Sequence[float]) -> list[str]:
    """The least and the greatest, as what they are above 1."""
    return [f"{100 * (ratio - 1):.0f}" for ratio in (min(ratios), max(ratios))]


def most_percent(ratios: Sequence[float]) -> list[str]:
    return percent(ratios)[1:]


def range_of(ratios: Sequence[float]) -> list[str]:
    return [f"{min(ratios):.1f}", f"{max(ratios):.1f}"]


def mean(ratios: Sequence[float]) -> list[str]:
    return [f"{statistics.mean(ratios):.1f}"]


def most(ratios: Sequence[float]) -> list[str]:
    return range_of(ratios)[1:]


class Sentence(NamedTuple):
    """Words of a page, with ``{}`` for each figure, and its figures in the newest run on a CPU."""

    page: str
    words: str
    claim: str
    ratios: Callable[[Record], Sequence[float]]
    show: Callable[[Sequence[float]], list[str]]


def renew(page: str, text: str, results: Path) -> str:
    """The text of a page with the figures of its sentences renewed.

    Raises ValueError where the words of one are not in it once.
    """
    for sentence in SENTENCES:
        if sentence.page != page:
            continue
        parts = [re.sub(r"(\\ )+", r"\\s+", re.escape(p)) for p in sentence.words.split("{}")]
        found = list(re.finditer(r"(\d+(?:\.\d+)?)".join(parts), text))
        if len(found) != 1:
            raise ValueError(f"{page} has {len(found)} times, and should once: {sentence.words}")
        runs = [newest(path) for path in results.glob(f"{sentence.claim}-*.json")]
        runs = [run for run in runs if run["machine"]["device"] == "cpu"]
        if not runs:
            continue
        run = max(runs, key=lambda run: str(run["date"]))
        for group, figure in reversed(list(enumerate(sentence.show(sentence.ratios(run)), 1))):
            text = text[: found[0].start(group)] + figure + text[found[0].end(group) :]
    return text


def remat(*methods: str, of: Sequence[str] = ()) -> Callable[[Record], list[float]]:
    """Times of these methods over the plain step's, of some models or of all."""
    return lambda record: [
        row["time"]
        for model in record["models"]
        for row in model["rows"]
        if row["method"] in methods and (not of or model["model"] in of)
    ]


def overhead(peer: str) -> Callable[[Record], list[float]]:
    """Times of the host for a region over those of torch's checkpoint."""
    return lambda record: [row["ratio"] for row in record["rows"] if row["peer"] == peer]


def small_states(record: Record) -> list[float]:
    """Times of AdamW with 8-bit states over those with float32."""
    methods = ("fp32", "bf16 stochastic", "bf16 split", "bf16 split8")
    wanted = [f"{method}, 8-bit states" for method in methods]
    times = [row[size] for row in record["rows"] if row["method"] in wanted for size in SIZES]
    return [time["ratio"] for ways in times for time in ways.values()]


def loss_head(record: Record) -> list[float]:
    rows = record["rows"]
    return [row["of_plain"] for row in rows if row["case"].startswith("linear_cross_entropy")]


def kl(*losses: str) -> Callable[[Record], list[float]]:
    """Times of these losses over torch's."""
    return lambda record: [
        row["of_torchs"]
        for row in record["rows"]
        if row["loss"] in losses and row["case"] == "memsave_ext"
    ]


def liger(record: Record) -> list[float]:
    """Times of Liger's loss of two heads over ours, where tokens are many and layers narrow."""
    seconds = {
        (row["loss"], row["case"]): row["seconds"]
        for row in record["rows"]
        if row["tokens"] >= 4096 and row["features"] <= 64 and row["loss"].startswith("KL")
    }
    return [
        taken / seconds[loss, "memsave_ext"]
        for (loss, case), taken in seconds.items()
        if case.startswith("Liger")
    ]


def wide_blocks(record: Record) -> list[float]:
    """Times of steps that recompute and move, from the widths on that offload.md names."""
    widths = {"H200": 3072, "A100": 2048, "4090": 768}
    rows = [row for row in record["rows"] if row["width"] >= widths[row["card"]]]
    return [1 + row["both"] for row in rows if row["share"] == 0.3]


def below_recomputing(record: Record) -> list[float]:
    """Times of steps that recompute and move, where recomputing alone does not go so far."""
    return [1 + row["both"] for row in record["rows"] if row["share"] == 0.15]


SIZES = ("one", "vit")
TRANSFORMERS = ("GPT", "BERT", "ViT")
README, BENCHMARKS, OFFLOAD = "README.md", "docs/benchmarks.md", "docs/offload.md"
SIMULATED = "remat_offload_simulated"
log_probs = kl("log-probabilities")
two_heads = kl("KL(teacher || student)", "KL(student || teacher)", "Jensen-Shannon")

SENTENCES = (
    Sentence(
        README,
        "| {} to {} % of a transformer's step, for half to a quarter of its activations |",
        "remat",
        remat("budget 0.5", "budget 0.4", "budget 0.25", of=TRANSFORMERS),
        percent,
    ),
    Sentence(
        README,
        "`with ms.remat():` | up to {} % of the step |",
        "remat",
        remat("remat"),
        most_percent,
    ),
    Sentence(
        README,
        "up to {} times the optimizer's time with AVX-512,",
        "adam_modes",
        small_states,
        most,
    ),
    Sentence(
        README,
        "[loss head](docs/linear_cross_entropy.md) | up to {} % more time for the loss |",
        "linear_cross_entropy",
        loss_head,
        most_percent,
    ),
    Sentence(
        README,
        "policies) | up to {} % more time for the loss |",
        "linear_kl",
        log_probs,
        most_percent,
    ),
    Sentence(README, "| {} to {} times the time of the loss |", "linear_kl", two_heads, range_of),
    Sentence(
        BENCHMARKS,
        "`linear_cross_entropy` takes up to {} % more time than torch's loss",
        "linear_cross_entropy",
        loss_head,
        most_percent,
    ),
    Sentence(
        BENCHMARKS,
        "`linear_kl` takes {} to {} times torch's time",
        "linear_kl",
        two_heads,
        range_of,
    ),
    Sentence(
        BENCHMARKS, "`linear_log_probs` up to {} % more,", "linear_kl", log_probs, most_percent
    ),
    Sentence(
        BENCHMARKS,
        "8-bit states cost time on a CPU: {} to {} times a float32 step's",
        "adam_modes",
        small_states,
        range_of,
    ),
    Sentence(
        "docs/checkpoint.md",
        "*Host time* for a region: {} to {} of torch's",
        "checkpoint_overhead",
        overhead("checkpoint"),
        range_of,
    ),
    Sentence(
        "docs/checkpoint.md",
        "with `use_engine_hooks(True)` {} to {} (",
        "checkpoint_overhead",
        overhead("checkpoint, engine hooks"),
        range_of,
    ),
    Sentence(
        "docs/remat.md",
        "adds at most {} % to the step's time",
        "remat",
        remat("remat", of=TRANSFORMERS),
        most_percent,
    ),
    Sentence(
        "docs/remat.md",
        "torch's checkpoint of each block keeps a third and adds {} to {} %;",
        "remat",
        remat("checkpoint", of=TRANSFORMERS),
        percent,
    ),
    Sentence(
        OFFLOAD,
        "one plan of both takes at most {} % of a step at 0.3 of the activations",
        SIMULATED,
        wide_blocks,
        most_percent,
    ),
    Sentence(
        OFFLOAD,
        "below the minimum of recomputing, it takes at most {} %",
        SIMULATED,
        below_recomputing,
        most_percent,
    ),
    Sentence(
        "docs/linear_cross_entropy.md",
        "Liger takes about {} of this loss's time with `beta` 0 or 1",
        "linear_kl",
        liger,
        mean,
    ),
)
