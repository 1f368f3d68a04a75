"""Traces for the planner: random graphs."""

from __future__ import annotations

import random

from oracles.remat import Call, Content, Trace


def random_trace(seed: int, operators: int, most_saved: int = 10**9) -> Trace:
    """A random program: operators with one or two results, some in place, saved for backward."""
    rng = random.Random(seed)
    contents: list[dict] = []
    calls: list[Call] = []
    for _ in range(rng.randint(1, 3)):  # inputs and parameters; some die with the forward
        lives_on = rng.random() < 0.7
        contents.append(content(rng, -1, -1 if lives_on else 0))
    long = rng.random() < 0.5  # chains rather than bushes
    for number in range(operators):
        recent = len(contents) - 3 if long else 0
        reads = {rng.randrange(max(0, recent), len(contents)) for _ in range(rng.randint(1, 2))}
        reads = sorted(reads, key=lambda _: rng.random())
        in_place = contents[reads[0]]["call"] >= 0 and rng.random() < 0.1
        makes = []
        for i in range(1 + (rng.random() < 0.2)):
            makes.append(len(contents))
            made = content(rng, number, number + rng.randint(0, 3))
            if in_place and i == 0:
                made["bytes"] = contents[reads[0]]["bytes"]
            if rng.random() < 0.05:
                made["call"] = -1
            contents.append(made)
        writes = reads[:1] if in_place else []
        if contents[makes[0]]["call"] < 0:
            writes = []
        seconds = rng.choice([1, 2, 3, 10]) * 1e-4 * rng.random()
        temporary = rng.choice([0, 0, 0, rng.randint(1, 40)])
        calls.append(Call(seconds, reads, makes, writes, temporary))
    forward = operators + 3
    saved = [c for c in contents if c["call"] >= 0 and rng.random() < 0.8][:most_saved]
    moments = [(rng.randint(0, 30), 0) for _ in range(forward)]
    for c in reversed(saved):
        c["saved"] = True
        if rng.random() < 0.9:  # others are never opened
            c["opened"] = len(moments)
            moments.append((rng.randint(0, 30), 0))
            if rng.random() < 0.1:
                c["closed"] = -1
                continue
        c["closed"] = len(moments) + (rng.randint(0, 2) if c["opened"] >= 0 else 0)
        moments += [(rng.randint(0, 30), 0)] * (c["closed"] + 1 - len(moments))
    moments += [(0, 0)]
    moments = [(now, now + rng.choice([0, 0, rng.randint(0, 60)])) for now, _ in moments]
    return Trace([Content(**c) for c in contents], calls, moments, forward)


def content(rng: random.Random, call: int, let_go: int) -> dict:
    size = rng.choice([1, 2, 4, 8, 16, rng.randint(1, 40)])
    if rng.random() < 0.03:
        let_go = -1
    fields = {"bytes": size, "call": call, "saved": False, "let_go": let_go}
    return fields | {"opened": -1, "closed": -1}
