"""Models of real size under a limit of the operating system: which method trains them.

Each row is a process of its own, which limits its private memory (RLIMIT_DATA), makes a model with
random weights and trains it for three steps of one batch, by one thread. It says the three losses,
the seconds of the steps and the most resident bytes that the system saw (VmHWM), or how it died;
beside that what it needs on paper. Malloc gives large pieces back to the system in every row
(MALLOC_MMAP_THRESHOLD_), as what it keeps counts. All rows take more than an hour on a core; rows
that the newest run of the same settings has are kept, so that some can be run at a time:

    python benchmarks/real_limit.py --save benchmarks/results
    python benchmarks/real_limit.py --only "GPT-2 355 M" --limits 8 --methods plain --save ...
"""

import argparse
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plot import draw
from shared.common import (
    ROOT,
    Rows,
    bar,
    figure,
    machine,
    newest,
    parser_of,
    result_path,
    show_bars,
    write_record,
)
from shared.real_models import GIB, METHODS, MIB, MOVING, PLAIN, SHAPES, TINY, format_of, needs
from tables.real_limit import on_disk, real_limit_caption, real_limit_table, seconds, typical

Row = dict[str, Any]
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
LIMITS = [8.0, 4.0, 2.0]
SAME_LOSS = 1e-5  # relative: the sums of a loss in chunks come in another order


def disk_speed(folder: str) -> list[float]:
    """Bytes a second that the folder's disk reads and writes in pieces of 16 MiB, past the page
    cache."""
    pieces, piece = 64, mmap.mmap(-1, 16 * MIB)  # which is aligned
    piece.write(os.urandom(len(piece)))
    file = os.open(os.path.join(folder, "speed"), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    times = []
    try:
        for moves in (os.pwritev, os.preadv):
            start = time.perf_counter()
            for number in range(pieces):
                assert moves(file, [piece], number * len(piece)) == len(piece)
            times.append(time.perf_counter() - start)
    finally:
        os.close(file)
        os.unlink(os.path.join(folder, "speed"))
    written, read = times
    return [pieces * len(piece) / read, pieces * len(piece) / written]


def run(model: str, method: str, limit: int, options: argparse.Namespace) -> Row:
    """A row, of a process that ended, was killed or was given up."""
    shape = SHAPES[model]
    expected = needs(shape, method, format_of(shape, method, limit))
    command = [sys.executable, str(ROOT / "benchmarks/real_row.py"), model, method, str(limit)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": path,
    }  # fmt: skip
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        speed = disk_speed(folder) if method == MOVING else None
        command += ["--folder", folder]
        command += ["--steps", str(options.steps), "--threads", str(options.threads)]
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        died = None
        try:
            out, err = process.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            died = f"not finished in {options.timeout} s"
            process.kill()
            out, err = process.communicate()
        except BaseException:
            process.kill()
            raise
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if died is None and process.returncode < 0:
        died = f"killed by {signal.Signals(-process.returncode).name}"
    elif died is None and process.returncode:
        raise RuntimeError(f"{model}, {method}: {err}")
    facts = {name: value for line in said for name, value in line.items()}
    losses, seconds, cpu_seconds, disk_bytes = (
        [line[name] for line in said if name in line]
        for name in ("loss", "seconds", "cpu_seconds", "disk_bytes")
    )
    return {
        "model": model,
        "parameters": shape.parameters,
        "batch": shape.batch,
        "tokens": shape.tokens,
        "method": method,
        "format": facts.get("form"),
        "limit_bytes": limit,
        "limited_by": "RLIMIT_DATA",
        "needs_bytes": expected.total,
        "needs": expected._asdict(),
        "before_bytes": facts.get("before"),
        "peak_bytes": facts.get("peak"),
        "losses": losses,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "disk_bytes": disk_bytes,  # read and written in each step
        "disk_speed": speed,  # bytes a second, read and written
        "built": "built" in facts,
        "died": died or facts.get("died"),
        "took": round(time.monotonic() - start, 1),
    }


def on_paper(limits: list[float]) -> list[Row]:
    """What every row should come to by arithmetic, whether it runs or not."""
    found = []
    for limit, (model, shape) in itertools.product(limits, SHAPES.items()):
        if model in TINY:
            continue
        for method in METHODS:
            form = format_of(shape, method, round(limit * GIB))
            row = {"model": model, "parameters": shape.parameters, "method": method}
            row |= {"format": form.name, "limit_bytes": round(limit * GIB)}
            found.append({**row, "needs_bytes": needs(shape, method, form).total})
    return found


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "limit_bytes", "method"))


def place(row: Row) -> tuple[Any, ...]:
    """Of a row in the tables: in whichever order they have run."""
    of_model, of_method = list(SHAPES).index(row["model"]), METHODS.index(row["method"])
    return -row["limit_bytes"], of_model, of_method


def bars(rows: list[Row]) -> list[Row]:
    """How far losses of what is exact are off plain's, at most; how long a step waits."""
    of = {key(row): row for row in rows}
    found = []
    for (model, limit, method), row in of.items():
        plain = of.get((model, limit, PLAIN)) or {"losses": []}
        is_exact = row["format"] in ("float32", "bfloat16")
        if method != PLAIN and is_exact and row["losses"] and plain["losses"]:
            pairs = zip(plain["losses"], row["losses"], strict=False)
            value = max(abs(a - b) / abs(a) for a, b in pairs)
            name = f"{model}, {limit / GIB:g} GiB, {method}: losses off plain's, times {SAME_LOSS}"
            value /= SAME_LOSS
            # Moments and weights of bfloat16 round at other places.
            most = 1.0 if row["format"] == "float32" else 100.0
            found.append(figure(name, value, most))
        if not row["died"] and (least := on_disk(row)) is not None:
            name = f"{model}, {limit / GIB:g} GiB, {method}: wall time over the larger of"
            name += " processor's and disk's"
            value = typical(row["seconds"]) / max(seconds(row), least)
            found.append(figure(name, value, 1.2))
    return found


def kept(options: argparse.Namespace, record: Row) -> list[Row]:
    """Rows of the newest run with the same settings on the same machine and torch."""
    path = result_path(options.save, "real_limit", record["machine"])
    if options.fresh or not path.exists():
        return []
    run = newest(path)
    same = ("instructions", "torch", "native")
    if run["settings"] != json.loads(json.dumps(record["settings"])) or any(
        run["machine"][name] != record["machine"][name] for name in same
    ):
        return []
    return run["rows"]


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    models = [name for name in SHAPES if name not in TINY]
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=models, metavar="MODEL")
    parser.add_argument("--limits", nargs="+", type=float, default=LIMITS, metavar="GIB")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of a row")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of a disk, no tmpfs")
    parser.add_argument("--fresh", action="store_true", help="keep no rows of an earlier run")
    options = parser.parse_args(arguments)
    if min(options.limits) <= 0:
        parser.error("--limits must be more than 0")
    settings = {"threads": options.threads, "steps": options.steps, **ENVIRONMENT}
    # Rows may be of several calls: the record is that of all of them.
    command = f"benchmarks/{Path(__file__).name}"
    record: Row = {"command": command, "machine": machine(), "settings": settings}
    if set(options.only) - set(TINY):
        record["on_paper"] = on_paper(LIMITS)
    jobs = [
        (model, method, round(limit * GIB))
        for limit in options.limits
        for model in options.only
        for method in options.methods
    ]
    asked = {(model, limit, method) for model, method, limit in jobs}
    rows = Rows(options.save, "real_limit", record)
    for row in kept(options, record):
        if key(row) not in asked:
            list.append(rows, row)
    commit = record["machine"]["commit"]
    for job in bar(jobs, show=options.progress):
        rows.append({**run(*job, options), "commit": commit})
    took = round(sum(row["took"] for row in rows), 1)
    ordered = sorted(rows, key=place)
    record |= {"seconds": took, "rows": ordered, "bars": bars(ordered)}
    print(f"\n{real_limit_table(record)}\n\n{real_limit_caption(record)}\n")
    show_bars(record["bars"])
    path = write_record(options.save, "real_limit", record)
    print(f"{path}\n{draw(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
