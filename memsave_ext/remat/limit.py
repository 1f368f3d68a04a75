"""What holds the least that a step within a budget needs, and what would lower it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TextIO

from ..shared.table import format_bytes, print_table
from ..shared.warn import warn
from .recorder import Recorder

_ON_CONTEXT = "what autograd.Functions keep on ctx"
_SMALL = 0.01  # of the least: what is less is not told of


class Lived(NamedTuple):
    """Bytes that live before a step. What else is counted before it are gradients."""

    parameters: int
    buffers: int
    states: int
    wide_states: int  # those of states in float32 or wider, which could have 8 bits an element


class Limit(NamedTuple):
    """The moment at which the least is needed. All but ``where`` are bytes."""

    where: str
    lived: Lived
    gradients: int  # those from before the step and those that backward has made until then
    kept: int
    recomputed: int
    temporary: int  # gradients of activations, and what operators have for themselves
    logits: int  # of kept and recomputed: what a loss head of linear_cross_entropy makes none of
    largest_logits: int
    largest: int  # kept or recomputed content that is no logits
    rows: list[tuple[str, int, str, int]]  # kind, module's number, operator, bytes
    on_context: int = 0  # what autograd.Functions keep without having saved it


def limit_of(recorder: Recorder, lived: Lived) -> Limit | None:
    """Returns where the step needs the least; None where that is not known."""
    limit = recorder.limit()
    if limit is None:
        return None
    operator = limit["operator"] or "an input"
    where = f"forward, after {operator}"
    if not limit["in_forward"]:
        where = f"backward, where it reads a result of {operator}"
    before = min(int(recorder.budget()["before"]), limit["others"])
    before_gradients = max(0, before - lived.parameters - lived.buffers - lived.states)
    kept, recomputed = (sum(row[2] for row in limit[kind]) for kind in ("kept", "recomputed"))
    made = min(limit["made"], limit["others"] - before)
    on_context = min(limit["on_context"], limit["others"] - before - made)
    rows = [
        (kind, module, op, size)
        for kind in ("kept", "recomputed")
        for module, op, size in sorted(limit[kind], key=lambda row: -row[2])
    ]
    return Limit(
        where,
        lived,
        before_gradients + made,
        kept,
        recomputed,
        limit["others"] - before - made - on_context + max(0, limit["held"] - kept - recomputed),
        limit["logits"],
        limit["largest_logits"],
        limit["largest"],
        rows,
        on_context,
    )


def describe_limit(limit: Limit) -> str:
    """Tells where the step needs the least, and what holds it there."""
    lived = limit.lived
    parts = (
        (lived.parameters + lived.buffers, "parameters and buffers"),
        (limit.gradients, "gradients"),
        (lived.states, "optimizer states"),
        (limit.kept + limit.recomputed, "activations"),
        (limit.on_context, _ON_CONTEXT),
        (limit.temporary, "temporary memory"),
    )
    least = _SMALL * sum(size for size, _ in parts)
    *held, last = [f"{format_bytes(size)} of {name}" for size, name in parts if size >= least]
    return f"{limit.where}: {', '.join(held)}{' and ' if held else ''}{last}"


def remedies_of(limit: Limit, on_cuda: bool) -> list[tuple[str, int]]:
    """Returns what would lower the least, and bytes less at its moment, the most first."""
    activations = limit.kept + limit.recomputed + limit.on_context + limit.temporary
    widest = limit.largest + min(limit.temporary, limit.largest)
    head = limit.logits and limit.logits + min(limit.temporary, limit.largest_logits)
    found = [
        ("micro-batches of half the size, with accumulation", activations // 2),
        ("an optimizer that steps in backward", limit.gradients),
        ("optimizer states of 8 bits", 3 * limit.lived.wide_states // 4),
        ("linear_cross_entropy, which makes no logits", head),
        ("checkpoint(chunks=4) around the widest layer", 3 * widest // 4),
        ("checkpoint(offload='cpu') around the blocks", limit.kept if on_cuda else 0),
    ]
    least = _SMALL * (activations + limit.gradients + sum(limit.lived[:3]))
    return sorted((row for row in found if row[1] > least), key=lambda row: -row[1])


def warn_of_least(recorder: Recorder, limit: Limit, on_cuda: bool) -> None:
    """Warns that even the lowest peak exceeds the budget."""
    figures = recorder.budget()
    least, budget = format_bytes(figures["least"]), format_bytes(figures["budget"])
    if least == budget:
        least, budget = f"{figures['least']:,} B", f"{figures['budget']:,} B"
    saved = remedies_of(limit, on_cuda)
    remedies = ", ".join(f"{name} (saves about {format_bytes(size)})" for name, size in saved)
    lower = f"To lower the peak: {remedies}. " if saved else ""
    warn(
        f"remat: the budget of {budget} is less than the minimum for these shapes, {least}, which "
        f"is needed in {describe_limit(limit)}. Running at the minimum. {lower}See report().",
    )


def write_limit(limit: Limit, names: Sequence[str], on_cuda: bool, top: int, text: TextIO) -> None:
    """Writes two tables: what holds the least, and what would lower it."""
    lived = limit.lived
    rows: list[tuple[Any, ...]] = [
        ("parameters", "", "", lived.parameters),
        ("buffers", "", "", lived.buffers),
        ("gradients", "", "", limit.gradients),
        ("optimizer states", "", "", lived.states),
    ]
    kinds = {"kept": "activations, kept", "recomputed": "activations, computed again"}
    rows += [
        (kinds[kind], names[module] if module >= 0 else "", operator, size)
        for kind, module, operator, size in limit.rows
    ]
    rows.append((_ON_CONTEXT, "", "", limit.on_context))
    rows.append(("temporary memory", "", "", limit.temporary))
    shown = sorted((row for row in rows if row[3] > 0), key=lambda row: -row[3])
    cells = [
        (kind, module or "-", operator or "-", format_bytes(size))
        for kind, module, operator, size in shown[:top]
    ]
    if shown[top:]:
        rest = format_bytes(sum(row[3] for row in shown[top:]))
        cells.append((f"{len(shown) - top} more", "-", "-", rest))
    columns = ["what", "module", "operator", "memory"]
    print_table("What the minimum holds", columns, cells, text)
    remedies = [(name, format_bytes(size)) for name, size in remedies_of(limit, on_cuda)]
    if remedies:
        print_table("What would lower it", ["technique", "saves about"], remedies, text)
