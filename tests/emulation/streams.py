"""The package on a device whose streams are checked; then mistakes, which must be seen.

    python tests/emulation/streams.py [WORD...]     # cases and mistakes of such names alone

The device is of type cuda, and its memory the host's (tests/emulation/streams). The package is
built for CUDA in build/emulation-operators, with its kernels emulated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import operators
from programs import HERE, ROOT
from torch.utils import cpp_extension

DEVICE = HERE / "streams"
sys.path.insert(0, str(DEVICE))
from mistakes import MISTAKES, Mistake  # noqa: E402

FOLDER = operators.FOLDER
LIBRARY = FOLDER / "libfake_cuda.so"
CASES = sorted((DEVICE / "cases").glob("cases_*.py"))
NOTHING_CHOSEN = 5  # pytest's exit status
# Tests for a GPU that need no real one, but for those that time it or share pools of graphs.
OF_GPUS = [
    ROOT / "tests" / "checkpoint" / f"test_{name}_cuda.py" for name in ("checkpoint", "graph")
]
NEED_A_CARD = "overlaps_with_the_forward or without_random_numbers_graphs"


class Package(operators.Library):
    """The package for the device, and one with each mistake."""

    host = "with_cuda"
    package = "with_cuda/memsave_ext"
    with_cuda = True
    defines = (
        "-DMEMSAVE_EXT_WITH_CUDA",
        "-Dcpu_kernels=checked_kernels",
        "-Dcuda_kernels=checked_kernels",
    )

    def text(self) -> str:
        self._device()
        others = [*self._checked(), *self._kernels()]
        sources = {path: self._host_object(path, self.host) for path in self._host_sources()}
        self._link([*sources.values(), *others], self.package)
        for number, mistake in enumerate(MISTAKES):
            changed = write_mistake(mistake, FOLDER / package_with(number))
            objects = {
                path: self._host_object(
                    changed_source(path, changed), package_with(number), changed
                )
                for path in sources
                if path == ROOT / "csrc" / mistake.file
                or any(f'"{file}"' in path.read_text() for file in mistake.compiled)
            }
            self._link(
                [*(sources | objects).values(), *others], f"{package_with(number)}/memsave_ext"
            )
        return "".join(self.lines)

    def _link(self, objects: list[str], package: str) -> None:
        levels = "/".join(".." for _ in Path(package).parts)
        self._extension(objects, package, "-L.", f"-Wl,-rpath,'$$ORIGIN/{levels}'", "-lfake_cuda")

    def _host_flags(self, *first: Path) -> list[str]:
        return super()._host_flags(*first, DEVICE)

    def _device(self) -> None:
        objects = []
        for name in ("clocks", "device", "generator", "operators", "binding"):
            objects.append(f"device/{name}.o")
            flags = [*self._host_flags(), "-fvisibility=default"]
            self._compile("plain", DEVICE / f"{name}.cpp", objects[-1], flags)
        libraries = [f"-L'{path}' -Wl,-rpath,'{path}'" for path in cpp_extension.library_paths()]
        flags = ["-shared", *libraries, "-lc10", "-ltorch", "-ltorch_cpu"]
        self._build("plain", "link", objects, LIBRARY.name, flags)

    def _checked(self) -> list[str]:
        flags = [flag for flag in self._host_flags() if "_kernels=" not in flag]
        self._compile("plain", DEVICE / "kernels.cpp", f"{self.host}/checked.o", flags)
        return [f"{self.host}/checked.o"]


def changed_source(path: Path, changed: Path) -> Path:
    """A source that is compiled as it is, where the mistake is in it."""
    own = changed / os.path.relpath(path, ROOT / "csrc")
    return own if own.exists() else path


def package_with(number: int) -> str:
    return f"mistakes/{number}"


def write_mistake(mistake: Mistake, folder: Path) -> Path:
    """Write a copy of the package with the mistake; return the folder of C++ that is changed."""
    operators.copy_package(folder / "memsave_ext")
    of_cpp = mistake.file.endswith((".h", ".cpp"))
    source = (ROOT / "csrc" if of_cpp else ROOT) / mistake.file
    text = source.read_text()
    if mistake.right not in text:
        sys.exit(f"emulate: {mistake.file} has no such line any more: {mistake.what}")
    target = (folder / "csrc" if of_cpp else folder) / mistake.file
    target.parent.mkdir(parents=True, exist_ok=True)
    wrong = text.replace(mistake.right, mistake.wrong)
    for other in (folder / "csrc").rglob("*"):  # of what had this number before
        if other.is_file() and other != target:
            other.unlink()
    if not target.exists() or target.read_text() != wrong:
        target.write_text(wrong)
    return folder / "csrc"


def main() -> None:
    words = sys.argv[1:]
    operators.build(Package)
    of_mistakes = [(i, w) for i, m in enumerate(MISTAKES) for w in m.cases.split()]
    chosen = [(i, w) for i, w in of_mistakes if not words or w in words]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        right = FOLDER / "with_cuda"
        runs = [pool.submit(run_tests, right, [path], " or ".join(words)) for path in CASES]
        if not words:
            runs += [pool.submit(run_tests, right, [p], f"not ({NEED_A_CARD})") for p in OF_GPUS]
        missed = list(pool.map(is_missed, *zip(*chosen, strict=True))).count(True)
    for run in runs:
        print(run.result().stdout, end="")
    if any(run.result().returncode not in (0, NOTHING_CHOSEN) for run in runs):
        sys.exit("emulate: tests on the device failed")
    if missed:
        sys.exit(f"emulate: {missed} of {len(chosen)} mistakes were not seen")
    print(f"{len(chosen)} mistakes seen")


def run_tests(
    package: Path, paths: list[Path], words: str, *options: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{package}:{DEVICE}:{ROOT / 'tests'}",
        "MEMSAVE_EXT_FAKE_CUDA": str(LIBRARY),
        "MEMSAVE_EXT_NATIVE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "checked_streams", "--rootdir", str(ROOT), *options, "-k", words]
    return subprocess.run(
        [*command, *map(str, paths)],
        cwd=package,  # where python -m looks first
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def is_missed(number: int, words: str) -> bool:
    """Whether no seed of the cases fails by what is checked."""
    mistake = MISTAKES[number]
    done = run_tests(FOLDER / package_with(number), CASES, words, "-x")
    lines = [x for x in done.stdout.splitlines() if x.startswith("E ") or "Timeout" in x]
    seen = done.returncode == 1 and any(mistake.seen in line for line in lines)
    how = next((line[1:].strip() for line in lines if mistake.seen in line), done.stdout[-500:])
    print(f"{'seen' if seen else 'NOT SEEN'}: {mistake.what} ({mistake.file}): {how}", flush=True)
    return not seen


if __name__ == "__main__":
    main()
