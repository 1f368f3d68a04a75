"""What recomputing must not change: losses, running statistics, and how often they are counted."""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from shared.data import Images
from shared.models import LABELS, OURS, without_checkpoint
from shared.training import Job, Trainer, one_ulp_away, train

Check = dict[str, Any]  # name, text, and ok: None for what is only reported
EPS = torch.finfo(torch.float32).eps
TWINS, FIRST_STEPS = 5, 4  # whose losses tell how far rounding alone takes a training


def check(trainers: dict[str, Trainer], images: Images, job: Job) -> list[Check]:
    """Compares memsave_ext with what keeps everything, and with torch's checkpoints.

    Bitwise, where that has the same BatchNorm: without it, and for that BatchNorm itself beside
    torch's, to rounding.
    """
    found: list[Check] = []
    naive = trainers.get("naive")
    ours = {name: trainer for name, trainer in trainers.items() if name in OURS}
    for name in ("memsave_ext_batch_norm", *ours):
        other = trainers.get(without_checkpoint(name), naive)
        if name in trainers and other:
            found += agreement(name, trainers[name], other, images, job)
    for name, trainer in trainers.items():
        if name.startswith("torch"):
            count = int(trainer.updates().max()) / job.steps
            text = f"counts its statistics {count:g} times a step"
            for other, better in ours.items():
                time = median_ratio(better.seconds[job.skip :], trainer.seconds[job.skip :])
                memory = better.memory.peak / trainer.memory.peak
                text += (
                    f"; {LABELS[other]} takes {time:.3f} of its time, {memory:.3f} of its memory"
                )
            found.append(_check(LABELS[name], None, text))
    return found


def agreement(method: str, ours: Trainer, other: Trainer, images: Images, job: Job) -> list[Check]:
    """That one method of ours trained as another did."""
    losses = [abs(a - b) for a, b in zip(ours.losses, other.losses, strict=True)]
    stats = statistics_diff(ours, other)
    same_norm = ours.norm is other.norm
    if not same_norm:
        found = within_noise(losses, stats, other, images, job)
    else:
        names = ("loss of every step", "running statistics")
        differences = (max(losses), stats)
        found = [
            _check(
                name, difference == 0, f"differ by {difference:.1e} from those without checkpoint"
            )
            for name, difference in zip(names, differences, strict=True)
        ]
    wrong = int((ours.updates() != other.updates()).sum())
    text = f"{wrong} of {len(ours.norms)} BatchNorms have counted another number of batches"
    found.append(_check("num_batches_tracked", wrong == 0, text))
    return [{**item, "name": f"{LABELS[method]}, {item['name']}"} for item in found]


def within_noise(
    losses: Sequence[float], stats: float, naive: Trainer, images: Images, job: Job
) -> list[Check]:
    """Holds differences to the noise float32 has in this very job.

    Training amplifies a rounding error by a factor that depends on network, rate and data, so no
    bound can be written down. It is measured: naive again, from weights one ulp away; and several
    times for the first steps, in which a single activation that changes its sign, or none that
    does, is all of the noise. The factor of 10 is for rounding that differs in every step, where
    a twin's differs before the first only.
    """
    twins = [one_ulp_away(job, seed) for seed in range(TWINS)]
    train({"one ulp away": twins[0]}, images, job, progress=False)
    first = dataclasses.replace(job, steps=min(job.steps, FIRST_STEPS))
    train({str(i): twin for i, twin in enumerate(twins[1:])}, images, first, progress=False)
    apart = [
        max(abs(loss - twin.losses[step]) for twin in twins if step < len(twin.losses))
        for step, loss in enumerate(naive.losses)
    ]
    noise = itertools.accumulate(apart, max)  # once reached, a level of noise is there to stay
    bounds = [10 * n + 8 * EPS * abs(loss) for n, loss in zip(noise, naive.losses, strict=True)]
    worst = max(range(job.steps), key=lambda step: losses[step] / bounds[step])
    losses_ok = all(diff <= bound for diff, bound in zip(losses, bounds, strict=True))
    largest = float(naive.running_statistics().abs().max())
    stats_bound = 10 * statistics_diff(twins[0], naive) + 8 * EPS * largest
    why = "10 times what moving each initial weight by one ulp does to naive"
    return [
        _check(
            "loss of every step",
            losses_ok,
            f"off by {losses[worst]:.1e} in step {worst}, bound {bounds[worst]:.1e}: {why}",
        ),
        _check(
            "running statistics",
            stats <= stats_bound,
            f"off by {stats:.1e} at the end, bound {stats_bound:.1e}: {why}",
        ),
    ]


def statistics_diff(a: Trainer, b: Trainer) -> float:
    """Largest difference between two networks' running means and variances."""
    return float((a.running_statistics() - b.running_statistics()).abs().max())


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of the steps' ratios: the two steps of a pair met the same conditions."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _check(name: str, ok: bool | None, text: str) -> Check:
    return {"name": name, "ok": ok, "text": text}
