"""Profiles the memory of a training step: ``python -m memsave_ext.memory MODULE:FUNCTION``."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..predict import fits
from ..shared.progress import Progress
from .pictures.timeline import plot_track
from .report import as_json
from .subjects import UsageError, find_model, find_optimizer, load_function, load_instance
from .tracking import Track, track

_PROGRAM = "python -m memsave_ext.memory"
_HELP = """
FUNCTION takes no arguments. It either makes one training step itself: its first call is then a
warm-up, and the model and the optimizer are looked for among the names that it uses. Or it returns
a tuple (model, optimizer or None, step), where step, without arguments, makes one training step.

`fits MODULE:FUNCTION --budget 24GB` predicts what would fit instead; see `fits --help`.

Written to DIR: report.txt, timeline.json and, where matplotlib is installed, timeline.png.
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    What the user's code raises is passed on; with ``fits``, whose status 1 says that nothing fits,
    it is printed, and the status is 2.

    Args:
        arguments: the command line; None for that of the process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    asks_fits = arguments[:1] == ["fits"]
    options = (
        fits.make_parser(_PROGRAM).parse_args(arguments[1:])
        if asks_fits
        else _parser().parse_args(arguments)
    )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # absent if Python was told to leave it out
    sys.argv[1:] = []  # the user's module may read arguments of its own
    try:
        if asks_fits:
            return fits.run_command(options)
        _profile(options)
    except UsageError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    except Exception:
        if not asks_fits:
            raise
        traceback.print_exc()
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Profile the memory of a training step: its peak, and what it was made of.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="the function that makes a training step, such as train:step",
    )
    parser.add_argument(
        "--steps",
        type=_count(1),
        default=3,
        metavar="N",
        help="how many steps to track (default: 3)",
    )
    parser.add_argument(
        "--warmup",
        type=_count(0),
        default=1,
        metavar="N",
        help="how many steps to run before, which are not tracked (default: 1)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("memory-profile"),
        metavar="DIR",
        help="the folder to write to (default: memory-profile)",
    )
    parser.add_argument(
        "--model", metavar="MODULE:NAME", help="the model, if FUNCTION's is not found"
    )
    parser.add_argument(
        "--optimizer", metavar="MODULE:NAME", help="the optimizer, if FUNCTION's is not found"
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="record the line of code that made each tensor (slower)",
    )
    return parser


def _count(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    convert.__name__ = "int"  # argparse's messages show it
    return convert


def _profile(options: argparse.Namespace) -> None:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: the folder {options.out} cannot be made: {error}") from None
    folder = options.out.resolve()  # the user's module may go to another one
    function = load_function(options.function)
    model = load_instance(options.model, "--model", nn.Module) if options.model else None
    optimizer = (
        load_instance(options.optimizer, "--optimizer", Optimizer) if options.optimizer else None
    )
    made = function()
    if _is_variant(made):
        variant: Any = made
        model = variant[0] if model is None else model
        optimizer = variant[1] if optimizer is None else optimizer
        step, warmup = variant[2], options.warmup
        del variant
    else:
        step, warmup = function, max(options.warmup - 1, 0)  # the call above was one
        if model is None:
            model = find_model(function, options.function)
        if optimizer is None:
            optimizer = find_optimizer(function, options.function)
    del made
    if model is None:
        print(
            f"{_PROGRAM}: no model was found, so that parameters and gradients cannot be told from "
            "other memory; name it with --model MODULE:NAME",
            file=sys.stderr,
        )
    for _ in range(warmup):
        step()
    with (
        Progress("track", options.steps) as shown,
        track(model, optimizer, stacks=options.stacks) as tracked,
    ):
        for number in range(options.steps):
            shown.next(f"step {number + 1}")
            step()
    _write(tracked, folder, options.out)


def _is_variant(made: Any) -> bool:
    """Whether a function has returned a model, its optimizers and a step, and is none itself."""
    if not isinstance(made, (tuple, list)) or len(made) != 3 or not isinstance(made[0], nn.Module):
        return False
    _, optimizer, step = made
    several = optimizer if isinstance(optimizer, (tuple, list)) else [optimizer]
    if not all(one is None or isinstance(one, Optimizer) for one in several) or not callable(step):
        raise UsageError(
            "a function that returns three things, the first of which is a model, must return "
            "(model, optimizer, step): an optimizer, several or None, and what makes a step; got "
            f"{', '.join(type(one).__name__ for one in made)}"
        )
    return True


def _write(tracked: Track, folder: Path, named: Path) -> None:
    """``named``: the folder as it was given."""
    tracked.report(file=sys.stdout)
    with open(folder / "report.txt", "w", encoding="utf-8") as file:
        tracked.report(file=file)
    as_json(tracked, folder / "timeline.json")
    written = ["report.txt", "timeline.json"]
    try:
        plot_track(tracked, folder / "timeline.png")
        written.append("timeline.png")
    except ImportError as error:
        print(f"{_PROGRAM}: no picture was drawn: {error}", file=sys.stderr)
    print(f"{_PROGRAM}: wrote {', '.join(written)} to {named}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
