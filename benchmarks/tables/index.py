"""The list of all results: which command made each, when, of which commit, how long it took."""

from pathlib import Path

from common import newest
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
        f"{run['seconds']:.0f} s" if "seconds" in run else "-",
        f"{sum(bar['ok'] for bar in bars)} of {len(bars)}" if bars else "-",
    )
