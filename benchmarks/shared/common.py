"""What the benchmarks share: the machine, result files, fair timing, summaries."""

import argparse
import datetime
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What takes seconds: a benchmark's processes are forked from one that has imported it.
IMPORTS = ["memsave_ext", "torch._dynamo", "torch.distributed.fsdp"]
_STARTED = time.monotonic()


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the first line of a script's ``__doc__``, and the options that scripts share:
    where results go, and whether bars of progress are drawn."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--save", type=Path, default=ROOT / "benchmarks/out", metavar="DIR")
    parser.add_argument("--no-progress", dest="progress", action="store_false")
    return parser


def settings_of(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options of these names, as a record's ``settings`` have them."""
    return {name: getattr(options, name) for name in names}


def machine(device: str = "cpu") -> dict[str, Any]:
    """Machine and versions a result was measured with; ``device`` is the one the work ran on."""
    import torch

    import memsave_ext

    of = device if device.startswith("cuda") else None
    gpu = torch.cuda.get_device_name(of) if torch.cuda.is_available() else None
    return {
        "device": device.partition(":")[0],
        "cpu": _cpu_name(),
        # Machines of one name may differ in it, and vector code with them.
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "ram_gib": _ram_gib(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "memsave_ext": memsave_ext.__version__,
        "native": memsave_ext._native.available,
        **_commit(),
    }


def _cpu_name() -> str:
    try:
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _ram_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _commit() -> dict[str, Any]:
    """Commit of the checkout; ``dirty`` when a file that could change a result differs from it.

    Where there is only a copy of one, MEMSAVE_EXT_COMMIT may name it.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    if (
        git("ls-files", "--error-unmatch", "setup.py") is None
    ):  # not a checkout, or another project's
        return {"commit": os.environ.get("MEMSAVE_EXT_COMMIT"), "dirty": None}
    # Results, README and docs are written from runs: they must not mark the next run as dirty.
    written = ":!benchmarks/results", ":!README.md", ":!docs"
    changes = git("status", "--porcelain", "--", ".", *written)
    return {"commit": git("rev-parse", "--short=12", "HEAD"), "dirty": bool(changes)}


def device_name(of: dict[str, Any]) -> str:
    return of["gpu"] if of["device"] == "cuda" else f"{of['cpu']}, {of['cores']} cores"


def result_path(folder: Path, claim: str, of: dict[str, Any]) -> Path:
    """``claim-device.json``: a file per kind of machine, so that none overwrites another's."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(of).lower()).strip("-")
    return folder / f"{claim}-{slug}.json"


# What two runs must share, and their settings, for the later one to be the earlier one repeated.
_SAME = ("device", "cpu", "instructions", "cores", "gpu", "torch", "native", "commit")


def write_record(folder: Path, claim: str, record: dict[str, Any]) -> Path:
    """Add ``record`` to its file, a list of runs with the newest last; see :func:`as_lines`.

    ``record`` holds ``machine`` (of :func:`machine`), ``settings`` and what was measured.

    Each kind of machine has a file of its own, and there the runs of other commits, versions of
    torch and settings stay as history. Replaced are only an earlier run of the same commit with the
    same settings, which has been repeated, and runs of a changed tree, which nobody can repeat.
    """

    def key(run: dict[str, Any]) -> tuple[Any, ...]:
        return run["settings"], *(run["machine"].get(name) for name in _SAME)

    def replaced(run: dict[str, Any]) -> bool:
        unrepeatable = run["machine"].get("dirty") and run["settings"] == record["settings"]
        return bool(unrepeatable) or key(run) == key(record)

    about = {"claim": claim, "date": _today(), "command": _command(), "seconds": _seconds()}
    record = json.loads(json.dumps({**about, **record}))  # tuples as JSON will have them
    path = result_path(folder, claim, record["machine"])
    runs = json.loads(path.read_text()) if path.exists() else []
    runs = [run for run in runs if not replaced(run)] + [record]
    folder.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: an interrupted run must not cost the earlier results.
    aside = path.with_suffix(".tmp")
    aside.write_text(as_lines(runs))
    aside.replace(path)
    return path


class Rows(list[dict[str, Any]]):
    """A record's rows, each printed and written as it comes: a limit of time loses those that are
    left alone. Until :func:`write_record` writes the whole record, the file's says ``partial``.

    ``record`` has its ``machine`` and ``settings``; ``key`` is where it has the rows.
    """

    def __init__(
        self,
        folder: Path,
        claim: str,
        record: dict[str, Any],
        key: str = "rows",
        line: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        super().__init__()
        self._folder, self._claim, self._record, self._key = folder, claim, record, key
        self._line = line or _line_of

    def append(self, row: dict[str, Any]) -> None:
        super().append(row)
        print(self._line(row), flush=True)
        partial = {**self._record, self._key: list(self), "partial": True}
        write_record(self._folder, self._claim, partial)


def _line_of(row: dict[str, Any]) -> str:
    """Its values; those of several words, such as rows of its own, by name."""
    cells = []
    for name, value in row.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        cells.append(shown if isinstance(value, str) else f"{name} {shown}")
    return ", ".join(cells)


def as_lines(runs: Sequence[dict[str, Any]]) -> str:
    """A file of results as JSON: a line for each entry of a run, and one for each of its rows."""
    return "[\n" + ",\n".join(map(_run_as_lines, runs)) + "\n]\n"


def _run_as_lines(run: dict[str, Any]) -> str:
    entries = []
    for name, value in run.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        entries.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}"


def newest(path: Path) -> dict[str, Any]:
    """The run of a file that tables and pictures show."""
    run: dict[str, Any] = json.loads(path.read_text())[-1]
    return run


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _command() -> str:
    """What was run, but for where its results go and how it shows its progress."""
    script, *arguments = sys.argv
    words = [word for word in arguments if word != "--no-progress"]
    if "--save" in words:
        at = words.index("--save")
        del words[at : at + 2]
    return " ".join([f"benchmarks/{Path(script).name}", *words])


def _seconds() -> float:
    """Since this process imported it, which a benchmark does first."""
    return round(time.monotonic() - _STARTED, 1)


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and interquartile range, which a few disturbed steps do not move."""
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low


def balanced_order(names: Sequence[str], round_: int) -> list[str]:
    """Order of ``names`` in one round.

    A plain rotation leaves each case with one predecessor, whose caches and freed memory it
    inherits. Here (a Williams design) each case comes equally often at each place and after each
    other one, over 2 * n rounds.
    """
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]  # 0, 1, -1, 2, -2 ...
    order = [names[(place + round_ // 2) % n] for place in zigzag]
    return order[::-1] if round_ % 2 else order


def interleave(
    cases: dict[str, Callable[[], None]], rounds: int, warmup: int, progress: bool
) -> dict[str, list[float]]:
    """Seconds per call of each case: ``rounds`` rounds call each once, after ``warmup`` more.

    A machine's speed drifts, but within a round all cases meet the same conditions.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in bar(range(warmup + rounds), show=progress):
        for name in balanced_order(list(cases), round_):
            start = time.perf_counter()
            cases[name]()
            taken = time.perf_counter() - start
            if round_ >= warmup:
                seconds[name].append(taken)
    return seconds


def seconds_together(jobs: Sequence[Callable[[], object]]) -> float:
    """Seconds from when all of them begin, each in a thread of its own, until all are done. Raises
    what the first of them raises."""
    start = threading.Barrier(len(jobs) + 1)
    errors: list[BaseException] = []

    def work(job: Callable[[], object]) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    # torch makes a Python object while it has its generator locked. Where that collects garbage,
    # whose callbacks let another thread run that wants the generator, both wait for ever.
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        start.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - begin
    finally:
        gc.enable()
    if errors:
        raise errors[0]
    return taken


def bar(rounds: Iterable[int], show: bool = True) -> Any:
    """A progress bar on stderr, drawn seldom where that is a file: there every update stays."""
    from tqdm import tqdm

    interval = 0.1 if sys.stderr.isatty() else 15.0
    return tqdm(rounds, disable=not show, unit="round", mininterval=interval, dynamic_ncols=True)


def show_left_out(reasons: dict[str, str]) -> None:
    """Peers that cannot run here, and why; run_all.py repeats these lines at its end."""
    for name, reason in reasons.items():
        print(f"{name} left out: {reason}")


def figure(name: str, value: float, bar: float, at_least: bool = False) -> dict[str, Any]:
    """One of a record's ``bars``: what was measured, and the most or the least that it may be."""
    ok = value >= bar if at_least else value <= bar
    return {"name": name, "value": value, "bar": bar, "ok": ok, "at_least": at_least}


def goal_word(bar: dict[str, Any]) -> str:
    """Whether a bar is the most or the least. Older records do not say it."""
    at_least = bar.get("at_least", (bar["value"] <= bar["bar"]) != bar["ok"])
    return "at least" if at_least else "at most"


def show_bars(bars: Iterable[dict[str, Any]], digits: int = 2) -> None:
    """Each bar, its figure and whether it is held; run_all.py repeats what is missed."""
    for each in bars:
        verdict = "ok" if each["ok"] else "MISSED"
        value = f"{each['value']:.{digits}f}"
        print(f"{each['name']}: {value} ({goal_word(each)} {each['bar']:.2f}) {verdict}")


def copy_bandwidth(
    time_of: Callable[[Callable[[], Any]], float], device: str = "cuda", nbytes: int = 1 << 30
) -> float:
    """Bytes that a copy on a device reads and writes, per unit of what ``time_of`` returns."""
    import torch

    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_of(lambda: target.copy_(source))
