"""A track as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from .._version import __version__
from ..shared.checks import check_count
from ..shared.table import format_bytes, format_seconds, print_table
from .account import Growth, Region, TensorAtPeak, Timeline
from .events import CATEGORIES, PHASES
from .figures import Figures
from .series import thin

FORMAT = "memsave_ext.memory.track"
VERSION = 1
# By phase: the title of its table, what a row is, and what its bytes are.
_RECOMPUTED = {
    "recompute": ("Checkpointed regions", "region", "memory saved"),
    "rematerialize": ("Rematerialized", "module", "most in a call"),
}
_STEPS = 12  # more steps than this are summed up as least, median and most


def print_report(
    track: Figures,
    *,
    top: int = 10,
    growth: Callable[[int], Sequence[Growth]] = lambda n: (),
    file: TextIO | None = None,
) -> None:
    """Prints what the peak was made of, its largest tensors, what was recomputed, and steps.

    Args:
        track: what was tracked.
        top: how many tensors, modules and regions to list at most.
        growth: returns so many groups, at most, of what steps have left behind.
        file: where to print; None for ``sys.stdout``.

    Raises:
        ValueError: ``top`` is not an int of at least 0.
    """
    check_count("report: top", top, 0)
    at_peak = track.at_peak
    peak = sum(at_peak.values())
    made_of = [(c, format_bytes(at_peak[c]), _share(at_peak[c], peak)) for c in CATEGORIES]
    print(f"{_headline(track, peak)}\n", file=file)
    print_table("What the peak was made of", ["category", "memory", "share"], made_of, file)
    if top:
        _print_tensors(track, peak, top, file)
    for phase in _RECOMPUTED:
        _print_regions(track, phase, top, file)
    _print_growth(growth(top), file)
    if track.steps and track.timed:
        _print_steps(track, file)


def _headline(track: Figures, peak: int) -> str:
    when = f"in {track.peak_phase}" if track.peak_phase != "other" else "outside the phases"
    step = f" of step {track.peak_step}" if len(track.steps) > 1 else ""
    now = f"{format_bytes(track.live)} live at the end"
    if track.reserved is not None:
        now += f"; the allocator reserves {format_bytes(track.reserved)}"
    if elsewhere := track.most_elsewhere:
        parts = [f"{format_bytes(size)} of {category}" for category, size in elsewhere.items()]
        now += f"; elsewhere at most {', '.join(parts)}"
    return f"Peak {format_bytes(peak)} on {track.device}, {when}{step}; {now}"


def _print_tensors(track: Figures, peak: int, top: int, file: TextIO | None) -> None:
    everything = track.top(1 << 62)
    rows = [
        (format_bytes(t.bytes), _share(t.bytes, peak), t.category, t.phase, *_origin(t))
        for t in everything[:top]
    ]
    names = ["tensor", "share", "category", "made in", "name", "module", "operator", "line"]
    _print_filled(f"Largest of {_count(everything, 'tensor')} at the peak", names, rows, file)
    made_by: dict[tuple[str, ...], list[int]] = {}
    for tensor in everything:
        if tensor.module or tensor.line:
            made_by.setdefault((tensor.module, tensor.line), []).append(tensor.bytes)
    largest = sorted(made_by.items(), key=lambda entry: -sum(entry[1]))
    sums = [
        (*maker, format_bytes(sum(sizes)), _share(sum(sizes), peak), len(sizes))
        for maker, sizes in largest[:top]
    ]
    if sums:
        columns = ["module", "line", "at the peak", "share", "tensors"]
        _print_filled("Where the tensors at the peak were made", columns, sums, file)


def _print_growth(growth: Sequence[Growth], file: TextIO | None) -> None:
    rows = [
        (
            format_bytes(g.bytes), g.tensors, g.steps, g.category,
            str(list(g.shape)) if g.held_by or g.shape else "",
            g.module, g.operator, g.line, g.held_by,
        )
        for g in growth
    ]  # fmt: skip
    names = ["memory", "tensors", "steps", "category", "shape", "module", "operator", "line"]
    names.append("one of them is")
    _print_filled("Made in several steps and never freed", names, rows, file)


def _origin(tensor: TensorAtPeak) -> tuple[str, str, str, str]:
    return tensor.name, tensor.module, tensor.operator, tensor.line


def _print_filled(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], file: TextIO | None
) -> None:
    """Prints a table without its empty columns, and nothing if it has no rows."""
    shown = [i for i in range(len(columns)) if any(row[i] != "" for row in rows)]
    if rows:
        cells = [[row[i] for i in shown] for row in rows]
        print_table(title, [columns[i] for i in shown], cells, file)


def _print_regions(track: Figures, phase: str, top: int, file: TextIO | None) -> None:
    # Regions count all steps, but steps that were left out of the timeline have no times. A share
    # of the time is then not known.
    trained = 0.0 if track.timeline.gaps else sum(step.seconds for step in track.steps)

    def row(name: str, regions: Sequence[Region]) -> tuple[object, ...]:
        calls = sum(region.calls for region in regions)
        saved = sum(region.saved_bytes for region in regions)
        seconds = sum(region.seconds for region in regions)
        per_call = format_seconds(seconds / calls) if calls else "-"
        time = format_seconds(seconds), per_call, _share(seconds, trained)
        return (name, calls, format_bytes(saved), *(time if track.timed else ()))

    regions = [region for region in track.regions if region.phase == phase]
    if not regions:
        return
    regions.sort(key=lambda region: -region.saved_bytes)
    rows = [row(region.name or "-", [region]) for region in regions[:top]]
    if others := regions[top:]:
        rows.append(row(_count(others, "other"), others))
    if len(regions) > 1:
        rows.append(row("all", regions))
    title, column, saved_bytes = _RECOMPUTED[phase]
    times = [phase, "per call", "of the time"] if track.timed else []
    print_table(title, [column, "calls", saved_bytes, *times], rows, file)


def _print_steps(track: Figures, file: TextIO | None) -> None:
    steps = track.steps
    if len(steps) <= _STEPS:
        rows = [(s.index, format_seconds(s.seconds), format_bytes(s.peak)) for s in steps]
        print_table("Training steps", ["step", "time", "peak"], rows, file)
        return
    seconds, peaks = [s.seconds for s in steps], [s.peak for s in steps]
    rows_of_all = [
        (name, format_seconds(choose(seconds)), format_bytes(int(choose(peaks))))
        for name, choose in (
            ("minimum", min),
            ("median", statistics.median),
            ("maximum", max),
        )
    ]
    print_table(f"{len(steps)} training steps", ["", "time", "peak"], rows_of_all, file)


def as_json(
    track: Figures,
    path: str | os.PathLike[str] | None = None,
    *,
    points: int = 1000,
    top: int = 20,
) -> dict[str, Any]:
    """Returns ``track`` as numbers, strings, lists and dicts, which :mod:`json` keeps unchanged.

    Keys (all times in seconds, all sizes in bytes):

    - ``format``: ``"memsave_ext.memory.track"``; ``version``: 1, which changes when a key changes
      its meaning; ``memsave_ext``, ``torch``: versions; ``device``.
    - ``live``, ``peak``; ``reserved``, where an allocator was simulated;
      ``at_peak``: bytes by category, which sum to ``peak``; ``peak_phase``,
      ``peak_step``, ``peak_time``: when the peak was.
    - ``most_elsewhere``: bytes by category; ``most_moved``: those of activations.
    - ``steps``: ``index``, ``seconds`` and ``peak`` of each.
    - ``regions``: ``name``, ``calls``, ``saved_bytes``, ``seconds`` and ``phase`` of each
      checkpointed region and of each module in which ``remat`` recomputed.
    - ``top``: ``bytes``, ``category``, ``phase``, ``name``, ``module``, ``line`` and ``operator``
      of each of the largest tensors at the peak; a string that is not known is empty.
    - ``timeline``: columns of equal length: ``time``, ``phase`` (an index into ``phases``, their
      names), ``step``, ``moved``, and in ``live`` a column for each category. Besides, ``gaps``:
      the rows before which steps were left out; ``rows``: how many rows there were before the
      timeline was thinned out for this document.

    Args:
        track: what was tracked.
        path: a file to write the document to as well; None for none.
        points: about how many rows of the timeline to keep; the peak is among them.
        top: how many tensors to list at most.
    """
    at_peak = track.at_peak
    document = {
        "format": FORMAT,
        "version": VERSION,
        "memsave_ext": __version__,
        "torch": str(torch.__version__),
        "device": str(track.device),
        "live": track.live,
        "peak": track.peak,
        **({} if track.reserved is None else {"reserved": track.reserved}),
        "at_peak": {category: at_peak[category] for category in CATEGORIES},
        "peak_phase": track.peak_phase,
        "peak_step": track.peak_step,
        "peak_time": track.peak_time,
        "most_moved": track.most_moved,
        "most_elsewhere": track.most_elsewhere,
        "steps": [asdict(step) for step in track.steps],
        "regions": [asdict(region) for region in track.regions],
        "top": [asdict(tensor) for tensor in track.top(top)],
        "timeline": timeline_as_json(track.timeline, points),
    }
    if path is not None:
        write_json(document, path)
    return document


def timeline_as_json(timeline: Timeline, points: int = 1000) -> dict[str, Any]:
    """Returns a timeline, thinned out to about ``points`` rows, as :func:`as_json` writes it."""
    small = thin(timeline, points)
    columns = small.live.T.tolist()
    return {
        "rows": len(timeline.time),
        "phases": list(PHASES),
        "time": [round(seconds, 7) for seconds in small.time.tolist()],
        "phase": small.phase.tolist(),
        "step": small.step.tolist(),
        "live": dict(zip(CATEGORIES, columns, strict=True)),
        "moved": small.moved.tolist(),
        "gaps": list(small.gaps),
    }


def write_json(document: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes ``document`` to ``path`` as one line."""
    Path(path).write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
