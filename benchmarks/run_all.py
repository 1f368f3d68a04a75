"""Every benchmark but real_limit.py and predict_time.py, which take long, with a progress bar.

    python benchmarks/run_all.py                              # results to benchmarks/out
    python benchmarks/run_all.py --save benchmarks/results    # to be committed
    python benchmarks/run_all.py --only densenet adam         # some

Each runs in a process of its own, and what it prints goes to benchmarks/out/NAME.log. On two cores
all of them take one to two hours. One that fails does not stop the others.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shared.common import ROOT

# Seconds on two cores of an AMD EPYC, by which the bar advances.
SECONDS = {
    "checkpoint_overhead": 21,
    "checkpoint_threads": 27,
    "batch_norm": 93,
    "adam": 92,
    "adam_modes": 225,
    "distributed": 78,
    "densenet": 102,
    "data_parallel": 78,
    "largest_model": 154,
    "memory_overhead": 26,
    "remat": 278,
    "remat_budgets": 464,
    "remat_offload": 242,
    "linear_cross_entropy": 406,
    "linear_kl": 133,
    "checkpoint_chunks": 38,
    "adam_memory": 457,
    "adam_training": 403,
    "memory_account": 8,
    "remat_instructions": 669,
    "elsewhere": 30,
    "predict": 417,
}

# A script's own defaults end sooner: more rounds, larger shapes and more models than theirs.
OPTIONS = {
    "adam_modes": "--rounds 12",
    "distributed": "--rounds 16",
    "data_parallel": "--rounds 6",
    "largest_model": "--compiled --threads 1",
    "remat": "--rounds 8 --scale 2 --threads 1 --compiled",
    "remat_budgets": "--every 10 --threads 1",
    "remat_offload": "--rounds 9 --scale 8 --threads 1",
    "linear_cross_entropy": "--rounds 9 --shapes 4",
    "linear_kl": "--shapes 3",
    "checkpoint_chunks": "--rounds 9",
    "predict": "--every 1",
}


def run(name: str, save: Path, log: Path, tick: Callable[[], None]) -> int:
    """The exit status of a benchmark, with ``tick`` called all the while."""
    script = str(ROOT / "benchmarks" / f"{name}.py")
    command = [sys.executable, script, *OPTIONS.get(name, "").split(), "--save", str(save)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--no-progress"], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                tick()
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    return process.returncode


def _python_path() -> list[str]:
    return [path for path in [os.environ.get("PYTHONPATH", "")] if path]


def main(argv: Sequence[str] | None = None) -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SECONDS, metavar="NAME", default=list(SECONDS))
    parser.add_argument("--save", type=Path, default=ROOT / "benchmarks/out", metavar="DIR")
    parser.add_argument("--logs", type=Path, default=ROOT / "benchmarks/out", metavar="DIR")
    options = parser.parse_args(argv)
    options.logs.mkdir(parents=True, exist_ok=True)
    logs = {name: options.logs / f"{name}.log" for name in options.only}
    took, failed = {}, []
    form = "{desc:20} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    slow = {} if sys.stderr.isatty() else {"mininterval": 30.0}  # in a file every update stays
    total = sum(SECONDS[name] for name in options.only)
    with tqdm(total=total, bar_format=form, dynamic_ncols=True, **slow) as bar:
        done = 0.0
        for name in options.only:
            bar.set_description(name, refresh=False)
            start = time.monotonic()

            def tick(name: str = name, start: float = start, done: float = done) -> None:
                # What takes longer than it used to stops at its mark.
                bar.update(done + min(time.monotonic() - start, SECONDS[name]) - bar.n)

            status = run(name, options.save, logs[name], tick)
            took[name] = time.monotonic() - start
            done += SECONDS[name]
            bar.update(done - bar.n)
            if status:
                failed.append(name)
                bar.write(f"{name}: exit {status}\n{_last_lines(logs[name])}")
    for name, seconds in took.items():
        print(f"{name:20} {seconds:6.0f} s  {logs[name]}")
    print(f"{'all':20} {sum(took.values()):6.0f} s")
    for line in notes(logs):
        print(line)
    return int(bool(failed))


def _last_lines(log: Path, count: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def notes(logs: dict[str, Path]) -> Iterator[str]:
    """What the benchmarks have said about bars that were missed and peers that were left out."""
    for name, log in logs.items():
        for line in log.read_text(errors="replace").splitlines():
            if line.endswith("MISSED") or line.startswith("FAILED") or " left out: " in line:
                yield f"{name}: {' '.join(line.split())}"


if __name__ == "__main__":
    sys.exit(main())
