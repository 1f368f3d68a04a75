"""Decides which saved contents are dropped: those cheap to recompute from what is kept."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .content import Call, Content, Memory

# The most operators that may run to recompute one content.
_MOST_OPERATORS = 16
# The longest chain of dropped contents, each recomputed from the one before. Those on the way stay
# in memory until backward needs them, so long chains would save nothing at the peak.
_MOST_DROPPED = 4
# The host's overhead for each recomputed operator, beside the operator's own time.
_HOST_SECONDS = 4e-6
# The most that recomputing a byte may cost, in copies of a byte within the cache: elementwise
# functions take 1 to 30, normalizations 5 to 25, products of matrices 80 and more.
_COPIES = 40


class Verdict(IntEnum):
    """Whether a saved tensor's memory is dropped, or why it is kept."""

    DROPPED = 0
    INPUT = 1  # made outside of the block: a parameter, an input
    NOT_AGAIN = 2  # not repeatable: random numbers, a collective, a kernel that is not seen
    HEAVY = 3  # made by an operator that is bound by arithmetic
    NO_GAIN = 4  # recomputing it would keep about as much memory, or is not cheap for its size


@dataclass
class Plan:
    """What it takes to recompute a content."""

    seconds: float = 0.0
    more_bytes: int = 0  # bytes that would be kept only for this recompute
    needs: list[Memory] = field(default_factory=list)
    calls: dict[Content, Call] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return max((memory.depth for memory in self.needs), default=0)


def plan_for(content: Content) -> Plan | None:
    """Returns how ``content`` would be recomputed; None where it cannot be, or not cheaply."""
    plan, pending, planned = Plan(), [content], set[Call]()
    seen = {content}
    while pending:
        content = pending.pop()
        call = content.call
        if call is None or call.operator.is_heavy:
            return None
        plan.calls[content] = call
        if call in planned:  # a call that made several contents runs once
            continue
        planned.add(call)
        if len(planned) > _MOST_OPERATORS:
            return None
        plan.seconds += call.seconds + _HOST_SECONDS
        for reference in call.references:
            content = reference.content
            if content in seen:
                continue
            seen.add(content)
            memory = content.memory
            if memory is not None and not memory.is_lost():
                plan.needs.append(memory)
            elif content.call is not None and not content.call.operator.is_heavy:
                pending.append(content)  # an intermediate that nobody saved
            elif (memory := content.hold()) is not None:
                plan.needs.append(memory)
                plan.more_bytes += 0 if content.external else content.bytes
            else:
                return None
    return plan


@functools.cache
def seconds_per_byte() -> float:
    """Returns the most seconds that recomputing a byte may take."""
    size = 4 << 20
    best = 1.0
    with _disable_current_modes():  # under a mode such as FakeTensorMode there is no memory
        source, target = torch.ones(2, size, dtype=torch.uint8, device="cpu")
        for _ in range(5):
            begin = time.perf_counter()
            target.copy_(source)
            best = min(best, time.perf_counter() - begin)
    return _COPIES * best / size


def judge(content: Content, plan: Plan | None, everything: bool | None) -> Verdict:
    """Returns DROPPED, or why ``content`` is kept.

    ``everything``: True drops it wherever that is possible; None never drops it.
    """
    if content.external:
        return Verdict.INPUT
    if content.call is None:
        return Verdict.NOT_AGAIN
    if content.call.operator.is_heavy:
        return Verdict.HEAVY
    if plan is None:
        return Verdict.NOT_AGAIN
    if everything:
        return Verdict.DROPPED
    if everything is None:
        return Verdict.NO_GAIN
    saved = content.bytes - plan.more_bytes
    if plan.depth >= _MOST_DROPPED or 4 * saved < content.bytes:
        return Verdict.NO_GAIN
    cheap = plan.seconds <= seconds_per_byte() * saved
    return Verdict.DROPPED if cheap else Verdict.NO_GAIN
