"""Runs random programs until time is over, and says which of them failed and how to run each again.

    python tests/stress/run.py                        # ten minutes, every part, native and pure
    python tests/stress/run.py --minutes 60 --part regions --native 1
    python tests/stress/run.py --part regions --native 1 --seed 123 --count 1 --shrink

Programs run in processes of their own, so that one that crashes or hangs is a failure of its seed
and not the end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
PARTS = (
    "regions",
    "adam",
    "rules",
    "backwards",
    "any_optimizer",
    "databases",
    "chunks",
    "optimizers",
    "zoo_budgets",
    "predictions",
    "libraries",
    "weights",
)
# They ask what the native part alone does: budgets, a track of what kernels make, operators that
# run again.
NATIVE_ALONE = ("zoo_budgets", "predictions", "libraries")
LONGEST = 60  # seconds; a program that takes more hangs


def work(options: argparse.Namespace) -> None:
    """In a process of its own: one line of JSON for each program."""
    import faulthandler

    import torch

    importlib.import_module("torch._dynamo")  # a first checkpoint would, within its own time
    torch.set_num_threads(1)
    part = importlib.import_module(f"stress.{options.part}")
    end = time.monotonic() + options.minutes * 60
    seed = options.seed
    while time.monotonic() < end and seed < options.seed + options.count:
        print(json.dumps({"begin": seed}), flush=True)
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        verdict, text = part.run_seed(seed, options.without, options.shrink)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"seed": seed, "verdict": verdict, "text": text}), flush=True)
        seed += 1


class Tally:
    """What has been run, of all parts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.programs = self.refused = 0
        self.failures: list[tuple[str, str]] = []  # command, verdict

    def add(self, command: str, verdict: str, text: str) -> None:
        with self.lock:
            self.programs += 1
            if verdict.startswith("refused"):
                self.refused += 1
            elif verdict:
                self.failures.append((command, verdict))
                print(f"FAILED {command}\n  {verdict}\n{text}", flush=True)


def supervise(part: str, native: str, options: argparse.Namespace, end: float, tally: Tally) -> int:
    """Runs one part until ``end``, in as many processes as die. Returns the seed after the last."""
    seed, last = options.seed, options.seed + options.count
    package = os.environ.get("PYTHONPATH", str(HERE.parents[2]))
    environment = {
        **os.environ,
        "MEMSAVE_EXT_NATIVE": native,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), package]),
    }
    while seed < last and (left := end - time.monotonic()) > 0:
        command = [sys.executable, str(HERE), "--worker", "--part", part]
        command += ["--seed", str(seed), "--count", str(last - seed), "--minutes", str(left / 60)]
        command += ["--without", ",".join(options.without)] + ["--shrink"] * options.shrink
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        errors: list[str] = []
        reader = threading.Thread(target=lambda p=process, e=errors: e.append(p.stderr.read()))
        reader.start()
        for line in process.stdout or ():
            if not line.startswith("{"):
                continue
            told: dict[str, Any] = json.loads(line)
            if "seed" in told:
                again = replay(part, native, told["seed"], options)
                tally.add(again, told["verdict"], told["text"])
                seed = told["seed"] + 1
            else:
                seed = told["begin"]
        code = process.wait()
        reader.join()
        if code:
            said = errors[0][:3000]
            tally.add(replay(part, native, seed, options), f"the process ended with {code}", said)
            seed += 1
    return seed


def replay(part: str, native: str, seed: int, options: argparse.Namespace) -> str:
    without = f" --without {','.join(options.without)}" if options.without else ""
    return (
        f"{Path(sys.executable).name} tests/stress/run.py --part {part} --native {native} "
        f"--seed {seed} --count 1 --shrink{without}"
    )


def main() -> None:
    help_format = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=help_format)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--native", choices=("0", "1"), help="only the native part, or pure Python")
    parser.add_argument("--seed", type=int, help="the first; a random one is printed")
    parser.add_argument("--count", type=int, default=10**9, help="of programs, for each part")
    parser.add_argument("--without", default="", help="operations and changes to leave out: a,b,c")
    parser.add_argument("--shrink", action="store_true", help="print a failing program's smallest")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.without = [name for name in options.without.split(",") if name]
    if options.worker:
        work(options)
        return
    if options.seed is None:
        options.seed = random.randrange(10**9)
    sys.exit(run(options))


def kinds_of(part: str | None, native: str | None) -> list[tuple[str, str]]:
    """Parts, each native ("1") and pure ("0"), as far as both were not said or have programs."""
    return [
        (each, kind)
        for kind in ([native] if native else ["1", "0"])
        for each in ([part] if part else PARTS)
        if kind == "1" or each not in NATIVE_ALONE or (part and native)
    ]


def run(options: argparse.Namespace) -> int:
    tally = Tally()
    kinds = kinds_of(options.part, options.native)
    begin = time.monotonic()
    end = begin + options.minutes * 60
    lasts: dict[tuple[str, str], int] = {}

    def take() -> None:
        """Kinds one after the other, each for its share of what two threads have."""
        while True:
            with tally.lock:
                if not waiting:
                    return
                rounds = -(-len(waiting) // jobs)
                kind = waiting.pop(0)
            until = time.monotonic() + (end - time.monotonic()) / rounds
            lasts[kind] = supervise(*kind, options, until, tally)

    waiting = list(kinds)
    jobs = min(len(kinds), os.cpu_count() or 1)
    print(f"seed {options.seed}: {', '.join(f'{part} native={native}' for part, native in kinds)}")
    threads = [threading.Thread(target=take) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    told = begin
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        if time.monotonic() - told >= 60:
            told = time.monotonic()
            print(f"{(told - begin) / 60:.0f} min: {summary(tally)}", flush=True)
    for command, verdict in tally.failures:
        print(f"{command}  # {verdict[:100]}")
    print(f"{summary(tally)}, seed range {options.seed} to {max(lasts.values()) - 1}")
    return 1 if tally.failures else 0


def summary(tally: Tally) -> str:
    return f"{tally.programs} programs, {len(tally.failures)} failures ({tally.refused} refused)"


if __name__ == "__main__":
    main()
