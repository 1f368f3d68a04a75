"""Rewrites committed results as common.write_record writes them: a line for each row.

    python benchmarks/format_results.py            # rewrite the files that look otherwise
    python benchmarks/format_results.py --check    # exit 1 where one does

What the files hold stays; a file that was edited or merged by hand gets its lines back.
"""

import argparse
import json
import sys
from pathlib import Path

from common import ROOT, as_lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    differs = False
    for path in sorted(args.results.glob("*.json")):
        before = path.read_text()
        after = as_lines(json.loads(before))
        if before == after:
            continue
        print(path.name)
        if args.check:
            differs = True
        else:
            path.write_text(after)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
