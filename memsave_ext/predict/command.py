"""The command line of fits: ``python -m memsave_ext.memory fits MODULE:FUNCTION --budget 24GB``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..memory.subjects import UsageError, load
from .fits import fits

_HELP = """
FUNCTION returns a tuple (model, optimizer or None, step), and step, which takes no arguments, makes
one training step. It takes no arguments, or a batch size, of which the largest that fits is found.
Nothing is allocated: it runs on fake tensors.
"""


def parser(program: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"{program} fits",
        description="Predict what makes a training step fit into a budget of memory.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("function", metavar="MODULE:FUNCTION", help="what builds the training step")
    made.add_argument("--budget", required=True, metavar="SIZE", help="such as 24GB or 22.5GiB")
    made.add_argument("--batch", type=int, default=1, metavar="N", help="the batch to show (1)")
    made.add_argument("--device", default="cuda", metavar="NAME", help="cuda (default) or cpu")
    made.add_argument(
        "--every", action="store_true", help="try also what costs more than the first that fits"
    )
    made.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return made


def run(options: argparse.Namespace) -> int:
    """Prints what fits; returns the exit status, 1 if nothing does.

    Raises:
        UsageError: an argument, or what the function returned, is wrong.
    """
    build: Any = load(options.function, "MODULE:FUNCTION")
    try:
        found = fits(
            build,
            options.budget,
            batch=options.batch,
            device=options.device,
            every=options.every,
        )
    except (TypeError, ValueError) as error:
        if not str(error).startswith(("fits:", "predict:")):
            raise
        raise UsageError(str(error)) from None
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        print(found.report())
    return 0 if found.cheapest else 1
