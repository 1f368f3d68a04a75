"""Builds the package for several torch versions and runs the whole test suite with each, twice.

    python tools/check_torch_versions.py            # 2.11.0, 2.13.0 and 2.15.0
    python tools/check_torch_versions.py 2.15.0
    python tools/check_torch_versions.py 2.11.0 --native 1 -- tests/remat  # these tests only
    python tools/check_torch_versions.py 2.13.0 --smoke     # a minute or two after it is built

What is built is the sdist, as whoever gets it would: unpacked into a folder with a space in its
name, without build isolation and without an index. The folders are in build/torch-versions; their
virtual environments and objects are kept, so that a second run is quicker. With --smoke the sdist
is installed in a new environment that has torch and build tools alone, `python -m
memsave_ext.check` takes the place of the tests, and only logs are kept. Which build of torch it is,
CPU or CUDA, is up to pip's configuration (PIP_EXTRA_INDEX_URL); without a GPU both do. Ends with a
table and, where something failed, with an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from requirements import requirements

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.11.0", "2.13.0", "2.15.0")
TOOLS = ("setuptools>=77", "wheel", "ninja")
NEEDED = requirements(["test", "bench"])
OFFLINE = ("--no-build-isolation", "--no-index", "--no-deps")
ROW = "| {:12} | {:6} | {:24} | {:24} |"


class Failure(Exception):
    """A command that failed; its output is in a log."""


class Check:
    """One torch version: an environment, a build, two runs of the tests."""

    def __init__(self, torch: str, folder: Path, pytest: list[str]) -> None:
        self.torch, self.folder, self.pytest = torch, folder, pytest
        self.python = folder / "venv" / "bin" / "python"
        self.source = folder / "source of memsave_ext"
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *command: object, **env: str) -> None:
        """Run a command in the source folder; its output goes to NAME.log."""
        log = self.folder / f"{name}.log"
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"  # torch looks for ninja
        with log.open("w") as output:
            done = subprocess.run(
                [*map(str, command)],
                cwd=self.source if self.source.is_dir() else self.folder,
                env={
                    **os.environ,
                    "PATH": path,
                    "MEMSAVE_EXT_NATIVE": "auto",
                    "MEMSAVE_EXT_TURN": "all",
                    **env,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        if done.returncode:
            raise Failure(f"failed: {log.relative_to(ROOT)}")

    def prepare(self, sdist: Path) -> None:
        """The environment, and the sources where objects of an earlier run may be left."""
        if not self.python.exists():
            self.make_environment()
        unpacked = self.folder / sdist.name.removesuffix(".tar.gz")
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(self.folder, filter="data")
        if (self.source / "build").is_dir():
            (self.source / "build").rename(unpacked / "build")
        shutil.rmtree(self.source, ignore_errors=True)
        unpacked.rename(self.source)
        self.install(*NEEDED)

    def make_environment(self) -> None:
        self.run("venv", sys.executable, "-m", "venv", self.folder / "venv")

    def install(self, *needed: str) -> None:
        install = (self.python, "-m", "pip", "install", "--disable-pip-version-check")
        self.run("install", *install, "--no-compile", f"torch=={self.torch}", *TOOLS, *needed)

    def build(self) -> str:
        start = time.perf_counter()
        self.run("build", self.python, "-m", "pip", "install", "-v", *OFFLINE, "-e", ".")
        return f"{time.perf_counter() - start:.0f} s"

    def test(self, native: str) -> str:
        """What became of the tests, in words; a run without any is a failure."""
        name = "native" if native == "1" else "pure"
        results = self.folder / f"{name}.xml"
        results.unlink(missing_ok=True)
        options = ("-q", f"--junit-xml={results}", *self.pytest)
        try:
            self.run(name, self.python, "-m", "pytest", *options, MEMSAVE_EXT_NATIVE=native)
        except Failure:
            if not results.exists():
                raise
        suite = next(ET.parse(results).iter("testsuite")).attrib
        counts = {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")}
        failed = counts["failures"] + counts["errors"]
        passed = counts["tests"] - failed - counts["skipped"]
        if failed or not passed:
            raise Failure(f"{failed} failed: {(self.folder / name).relative_to(ROOT)}.log")
        return f"{passed} passed, {counts['skipped']} skipped"

    def row(self, sdist: Path, natives: list[str]) -> tuple[bool, list[str]]:
        """Whether all is well, and the cells of the table."""
        try:
            self.prepare(sdist)
            cells = [self.version(), self.build()]
        except Failure as failure:
            return False, [self.torch, str(failure), "-", "-"]
        well = True
        for native in ("1", "0"):
            try:
                cells.append(self.test(native) if native in natives else "not run")
            except Failure as failure:
                well = False
                cells.append(str(failure))
        return well, cells

    def version(self) -> str:
        self.run("version", self.python, "-c", "import torch; print(torch.__version__)")
        return (self.folder / "version.log").read_text().split()[-1]


class Smoke(Check):
    """The sdist in a new environment, installed from its file."""

    def __init__(self, torch: str, folder: Path, pytest: list[str]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        super().__init__(torch, folder, pytest)

    def prepare(self, sdist: Path) -> None:
        self.sdist = sdist
        self.make_environment()
        self.install()

    def build(self) -> str:
        start = time.perf_counter()
        self.run("build", self.python, "-m", "pip", "install", "-v", *OFFLINE, self.sdist)
        return f"{time.perf_counter() - start:.0f} s"

    def test(self, native: str) -> str:
        name = "native" if native == "1" else "pure"
        command = (self.python, "-m", "memsave_ext.check", "--quick")
        self.run(name, *command, MEMSAVE_EXT_NATIVE=native)
        return (self.folder / f"{name}.log").read_text().splitlines()[-1]

    def row(self, sdist: Path, natives: list[str]) -> tuple[bool, list[str]]:
        try:
            return super().row(sdist, natives)
        finally:
            shutil.rmtree(self.folder / "venv", ignore_errors=True)


def make_sdist(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--smoke", action="store_true", help="install the sdist and check that")
    parser.add_argument("--native", choices=("0", "1"), help="test only native, or pure Python")
    parser.epilog = "What follows -- is handed to pytest."
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    processes = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    pytest = [*processes, *sys.argv[end + 1 :]]
    natives = [options.native] if options.native else ["1", "0"]
    folder = ROOT / "build" / "torch-versions"
    sdist = make_sdist(folder / "sdist")
    rows, well = [], True
    for version in options.versions:
        print(f"== torch {version}", flush=True)
        kind, name = (Smoke, f"{version}-smoke") if options.smoke else (Check, version)
        fine, cells = kind(version, folder / name, pytest).row(sdist, natives)
        well &= fine
        rows.append(ROW.format(*cells))
        print(rows[-1], flush=True)
    rules = ["-" * len(cell) for cell in ROW.format("", "", "", "").split("|")[1:-1]]
    header = [ROW.format("torch", "build", "native", "pure Python"), f"|{'|'.join(rules)}|"]
    print("", *header, *rows, sep="\n")
    if not well:
        sys.exit("check_torch_versions: something failed; see the logs named above.")


if __name__ == "__main__":
    main()
