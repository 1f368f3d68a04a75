"""Timelines and tracks made up for the tests of tables and pictures."""

from types import SimpleNamespace

import torch

from memsave_ext.memory.account import Region, Step, TensorAtPeak, Timeline
from memsave_ext.memory.events import CATEGORIES, PHASES

MIB = 1 << 20


def timeline(rows, gaps=()):
    """Of rows ``(time, five sizes, phase, step)``."""
    time, live, phase, step = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Timeline(
        time=torch.tensor(time, dtype=torch.float64),
        live=torch.tensor(live, dtype=torch.int64).reshape(-1, len(CATEGORIES)),
        phase=torch.tensor([PHASES.index(name) for name in phase], dtype=torch.int64),
        step=torch.tensor(step, dtype=torch.int64),
        moved=torch.zeros(len(step), dtype=torch.int64),
        gaps=tuple(gaps),
    )


def training(steps=(0,), layers=4, tick=0.001):
    """Steps of a checkpointed model, ``layers`` MiB of parameters; left-out steps make gaps."""
    live, rows, gaps = [layers * MIB, 0, 2 * layers * MIB, 0, 0], [], []
    for number in range(max(steps) + 1):
        start = number * (8 * layers + 1)

        def event(phase, category, mebibytes, number=number, mine=[start]):  # noqa: B006
            mine[0] += 1
            live[CATEGORIES.index(category)] += mebibytes * MIB
            if number in steps:
                rows.append((mine[0] * tick, list(live), phase, number))

        if number in steps and rows and number - 1 not in steps:
            gaps.append(len(rows))
        for _ in range(layers):
            event("forward", "activations", 1)
        for _ in range(layers):
            event("recompute", "activations", 3)
            event("recompute", "other", 2)
            event("recompute", "other", -2)
            event("backward", "gradients", 1)
            event("backward", "activations", -4)
        for _ in range(layers):
            event("optimizer", "other", 1)
            event("optimizer", "other", -1)
        event("optimizer", "gradients", -layers)
    return timeline(rows, gaps)


def random_timeline(rows, seed=0):
    """Of three steps and any phases, all sizes odd enough to tell them apart."""
    generator = torch.Generator().manual_seed(seed)
    return Timeline(
        time=torch.rand(rows, dtype=torch.float64, generator=generator).sort().values,
        live=torch.randint(1, 1 << 30, (rows, len(CATEGORIES)), generator=generator),
        phase=torch.randint(0, len(PHASES), (rows,), generator=generator),
        step=torch.arange(rows) * 3 // max(rows, 1),
        moved=torch.randint(0, 1 << 30, (rows,), generator=generator),
        gaps=(),
    )


def track_of(line, tensors=(), regions=(), steps=()):
    """What has the attributes of a Track whose timeline is ``line``."""
    total = line.live.sum(1)
    peak = int((total == total.max()).nonzero()[0])
    largest = sorted(tensors, key=lambda tensor: -tensor.bytes)
    return SimpleNamespace(
        timed=True,
        reserved=None,
        timeline=line,
        device=torch.device("cpu"),
        live=int(total[-1]),
        peak=int(total[peak]),
        at_peak=dict(zip(CATEGORIES, line.live[peak].tolist(), strict=True)),
        peak_phase=PHASES[line.phase[peak]],
        peak_step=int(line.step[peak]),
        peak_time=float(line.time[peak]),
        most_moved=int(line.moved.max()),
        most_elsewhere={"activations": int(n)} if (n := line.moved.max()) else {},
        steps=list(steps),
        regions=list(regions),
        top=lambda n=10: largest[:n],
    )


def full_track(steps=3, regions=2):
    tensors = [
        TensorAtPeak(MIB, "parameters", "other", "0.weight", "", ""),
        TensorAtPeak(3 * MIB, "activations", "recompute", "", "blocks.1", "net.py:12 in forward"),
        TensorAtPeak(2 * MIB, "other", "recompute", "", "blocks.1", "net.py:14 in forward"),
        TensorAtPeak(2 * MIB, "activations", "forward", "", "blocks.0", "net.py:12 in forward"),
        TensorAtPeak(1024, "activations", "recompute", "", "blocks.1", "net.py:12 in forward"),
    ]
    return track_of(
        training(range(steps)),
        tensors,
        [Region(f"blocks.{i}", 3, (i + 1) * MIB, 0.01 * (i + 1)) for i in range(regions)],
        [Step(i, 0.1 + i / 100, 20 * MIB + i) for i in range(steps)],
    )
