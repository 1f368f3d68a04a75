"""Builds a wheel for the torch that is installed, and trains with it in a new environment.

    python tools/make_wheel.py                         # into dist/
    python tools/make_wheel.py --torch torch==2.13.0   # what the new environment gets

A compiled file fits one minor version of torch, which pip cannot choose by: the version of the
wheel says it in its local part, 0.4.0+pt213cpu, and the wheel requires that torch. auditwheel gives
it the manylinux tag of the libraries of the machine on which it is built. torch's own libraries
stay out: the process has them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import build_config
import torch

ROOT = Path(__file__).resolve().parents[1]
OF_TORCH = ("libtorch*", "libc10*", "libcudart*")


def run(*command: object, **options: object) -> None:
    words = [*map(str, command)]
    if subprocess.run(words, check=False, **options).returncode:
        sys.exit(f"make_wheel.py: this failed: {' '.join(words)}")


def build(local: str, folder: Path, scratch: Path) -> Path:
    """Returns the wheel, which is made in `folder`."""
    run(
        sys.executable, "setup.py", "-q",
        "egg_info", "--tag-build", f"+{local}", "--egg-base", scratch,
        "build", "--build-lib", scratch / "lib",  # in build/lib is what was removed since, too
        "bdist_wheel", "--dist-dir", scratch, "--bdist-dir", scratch / "tree",
        cwd=ROOT,
    )  # fmt: skip
    (raw,) = scratch.glob("*.whl")
    raw = _for_this_torch(raw, scratch / "unpacked")
    excluded = [word for name in OF_TORCH for word in ("--exclude", name)]
    tagged = scratch / "tagged"
    run(sys.executable, "-m", "auditwheel", "repair", "-w", tagged, *excluded, raw)
    (wheel,) = tagged.glob("*.whl")
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(wheel, folder))


def _for_this_torch(wheel: Path, scratch: Path) -> Path:
    """Returns the wheel, packed again, which requires the torch that it was built for."""
    run(sys.executable, "-m", "wheel", "unpack", "-d", scratch, wheel)
    (metadata,) = scratch.glob("*/*.dist-info/METADATA")
    metadata.write_text(requiring(torch.__version__, metadata.read_text()))
    (tree,) = scratch.iterdir()
    run(sys.executable, "-m", "wheel", "pack", "-d", scratch, tree)
    (packed,) = scratch.glob("*.whl")
    return packed


def requiring(torch_version: str, metadata: str) -> str:
    """Returns a wheel's metadata with the minor version of torch as its requirement."""
    minor = ".".join(torch_version.split(".")[:2])
    required = f"Requires-Dist: torch=={minor}.*"
    changed, count = re.subn(r"^Requires-Dist: torch[<>=].*$", required, metadata, flags=re.M)
    if count != 1:
        sys.exit(f"make_wheel.py: the wheel requires torch {count} times, not once")
    return changed


def try_it(wheel: Path, requirement: str, scratch: Path) -> None:
    """Installs it beside torch alone, and runs what `check` runs, away from the checkout."""
    venv.create(scratch / "venv", with_pip=True)
    python = scratch / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", requirement, wheel)
    run(python, "-m", "pip", "check")
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run(python, "-m", "memsave_ext.check", cwd=scratch, env={**alone, "MEMSAVE_EXT_NATIVE": "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a wheel and try it.")
    parser.add_argument("--torch", default=f"torch=={torch.__version__}", help="for the trial")
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="where it is put")
    arguments = parser.parse_args()
    decision = build_config.decide(torch.__version__, torch.version.cuda, torch.version.hip)
    local = build_config.local_version(
        torch.__version__, torch.version.cuda if decision.cuda else None
    )
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build(local, arguments.folder, Path(scratch))
        try_it(wheel, arguments.torch, Path(scratch))
    print(f"{wheel.relative_to(Path.cwd()) if wheel.is_relative_to(Path.cwd()) else wheel}: right")


if __name__ == "__main__":
    main()
