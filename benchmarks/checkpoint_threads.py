"""Host cost of a checkpointed step when several Python threads make them, as replicas do.

Each thread trains its own tiny region (8 saved tensors), so that only the host works. Python lets
one thread run at a time, so what a region costs there adds up over the devices of one process:
the figure is the time per region and thread, flat where threads do not disturb each other.

    python benchmarks/checkpoint_threads.py --save benchmarks/results
"""

import functools
from collections.abc import Callable

import torch

from checkpoint_overhead import chain
from shared.common import (
    balanced_order,
    bar,
    machine,
    median_and_spread,
    parser_of,
    seconds_together,
    settings_of,
    show_left_out,
    write_record,
)
from shared.models import reasons
from shared.peers import CHECKPOINT, ENGINE_HOOKS, EXPLICIT, FAIRSCALE, REENTRANT, TORCH, steps

PEERS = ("plain", TORCH, REENTRANT, FAIRSCALE, CHECKPOINT, ENGINE_HOOKS, EXPLICIT)


def run(step: list[Callable[[], None]], calls: int) -> float:
    """Seconds per step and thread, with one thread per entry of ``step``."""

    def work(mine: Callable[[], None]) -> None:
        for _ in range(calls):
            mine()

    taken = seconds_together([functools.partial(work, mine) for mine in step])
    return taken / (calls * len(step))


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    replicas = [steps(*chain(8, "cpu")) for _ in range(max(options.threads))]
    peers = [name for name in PEERS if name in replicas[0]]
    seconds: dict[tuple[str, int], list[float]] = {}
    for round_ in bar(range(options.rounds + 1), show=options.progress):
        for name in balanced_order(peers, round_):
            for count in options.threads:
                taken = run([replica[name] for replica in replicas[:count]], options.calls)
                if round_:
                    seconds.setdefault((name, count), []).append(taken)
    rows = []
    print(f"{'us per region and thread':28}" + "".join(f"{n:>3} threads" for n in options.threads))
    for name in peers:
        medians = [median_and_spread(seconds[name, n])[0] * 1e6 for n in options.threads]
        print(f"{name:28}" + "".join(f"{value:11.1f}" for value in medians))
        rows += [
            {"peer": name, "threads": n, "us": value}
            for n, value in zip(options.threads, medians, strict=True)
        ]
    settings = settings_of(options, "rounds", "calls", "threads")
    show_left_out(reasons())
    record = {"machine": machine(), "settings": settings, "rows": rows, "left_out": reasons()}
    print(write_record(options.save, "checkpoint_threads", record))


if __name__ == "__main__":
    main()
