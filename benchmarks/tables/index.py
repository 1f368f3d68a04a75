"""Lists over all results: which command made each, and the bars that their figures missed."""

from pathlib import Path

from shared.common import goal_word, newest
from tables import Record, machine_name, markdown


def index(results: Path) -> str:
    """The newest run of every file, in the order of their names."""
    header = ("command", "on", "date", "commit", "took", "bars held")
    rows = [_row(newest(path)) for path in sorted(results.glob("*.json"))]
    return markdown(header, rows)


def _row(run: Record) -> tuple[str, ...]:
    of, bars = run["machine"], run.get("bars") or []
    return (
        f"`{run.get('command') or 'benchmarks/' + run['claim'] + '.py'}`",
        machine_name(of),
        run["date"],
        f"{of['commit']}{'*' if of['dirty'] else ''}",
        "-" if run.get("partial") else f"{run['seconds']:.0f} s" if "seconds" in run else "-",
        f"{sum(bar['ok'] for bar in bars)} of {len(bars)}" if bars else "-",
    )


def missed(results: Path) -> str:
    """Every bar that the newest runs did not reach."""
    header = ("benchmark", "what", "measured", "goal")
    runs = [newest(path) for path in sorted(results.glob("*.json"))]
    rows = [
        (f"`{run['claim']}.py`", bar["name"], f"{bar['value']:.3g}", _goal(bar))
        for run in runs
        for bar in run.get("bars") or []
        if not bar["ok"]
    ]
    return markdown(header, rows)


def _goal(bar: Record) -> str:
    return f"{goal_word(bar)} {bar['bar']:.3g}"
