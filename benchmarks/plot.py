"""All pictures of benchmark results, drawn from their records.

    python benchmarks/plot.py            # redraw the pictures of benchmarks/results
    python benchmarks/plot.py --check    # exit 1 where one is not what its results say

A picture is ``claim-device.png`` beside ``claim-device.json``, of the newest run there. It carries
two digests: of that run together with drawings.py, and of its own pixels. So a check need not draw,
which another version of matplotlib would do a little differently, and yet finds results that were
measured again, a drawing that was changed and a picture that was painted over.
"""

import argparse
import hashlib
import io
import json
import sys
from pathlib import Path

from PIL import Image, PngImagePlugin

from shared import drawings
from shared.common import ROOT, newest
from shared.drawings import DRAWINGS, caption, plt
from tables import Record

KEY = "memsave_ext"  # of the digests in a picture


def drawn_from(record: Record) -> str:
    """Digest of what decides how a picture looks, but for the version of matplotlib."""
    run = json.dumps(record, sort_keys=True)
    drawing = Path(drawings.__file__).read_text(encoding="utf-8")
    return hashlib.sha256("\n".join((run, caption(record), drawing)).encode()).hexdigest()


def pixels(image: Image.Image) -> str:
    return hashlib.sha256(repr(image.size).encode() + image.convert("RGBA").tobytes()).hexdigest()


def draw(results: Path) -> Path:
    """The picture of the newest run in a file of results, beside it."""
    record, path = newest(results), results.with_suffix(".png")
    buffer = io.BytesIO()
    figure = DRAWINGS[record["claim"]](record)
    figure.savefig(buffer, dpi=150)
    plt.close(figure)
    with Image.open(buffer) as image:
        information = PngImagePlugin.PngInfo()
        information.add_text(KEY, f"{drawn_from(record)} {pixels(image)}")
        image.save(path, optimize=True, pnginfo=information)
    return path


def fault(results: Path) -> str | None:
    """What is wrong with the picture of a file of results."""
    path = results.with_suffix(".png")
    if not path.exists():
        return "is missing"
    with Image.open(path) as image:
        digests = image.info.get(KEY, "").split()
        if len(digests) != 2:
            return "was not drawn by plot.py"
        if digests[0] != drawn_from(newest(results)):
            return "was drawn from another run, or by another plot.py"
        if digests[1] != pixels(image):
            return "was changed after it was drawn"
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="draw nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    wrong = False
    for claim in DRAWINGS:
        for path in sorted(args.results.glob(f"{claim}-*.json")):
            found = fault(path)
            if found and args.check:
                wrong = True
                print(f"{path.stem}.png {found}: run python benchmarks/plot.py")
            elif found:
                print(draw(path))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
