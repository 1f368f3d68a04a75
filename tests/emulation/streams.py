"""The package on a device whose streams are checked; then mistakes, which must be seen.

    python tests/emulation/streams.py [WORD...]     # cases and mistakes of such names alone
    python tests/emulation/streams.py --full        # with more seeds, and all tests of a GPU that
                                                    # can run on it

Cases that are not about the native part alone run in pure Python, too, with fewer seeds.

The device is of type cuda, and its memory the host's (tests/emulation/streams). The package is
built for CUDA in build/emulation-streams, with its kernels emulated.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import operators
from operators import build_units
from programs import HERE, ROOT
from torch.utils import cpp_extension

DEVICE = HERE / "streams"
sys.path.insert(0, str(DEVICE))
import mistakes  # noqa: E402
from gpu_tests import EVERY_TIME, IN_FULL, GpuTests  # noqa: E402
from mistakes import MISTAKES  # noqa: E402

FOLDER = ROOT / "build" / "emulation-streams"
CHANGED = FOLDER / "changed"  # the sources of csrc that have mistakes
LIBRARY = FOLDER / "libfake_cuda.so"
CASES = sorted((DEVICE / "cases").glob("cases_*.py"))
PURE_PYTHON = [path for path in CASES if path.stem[6:] in ("adam", "checkpoint", "distributed")]
NOTHING_CHOSEN = 5  # pytest's exit status
# Of a case, native and in pure Python. A mistake is tried with all until it is seen.
SEEDS = {True: 50, False: 10}
EVERY_TIMES_SEEDS = {True: 20, False: 5}


class Package(operators.Library):
    """The package for the device, with the mistakes, each of which a variable switches on."""

    with_cuda = True
    flags = (
        "-DMEMSAVE_EXT_WITH_CUDA",
        "-Dcpu_kernels=checked_kernels",
        "-Dcuda_kernels=checked_kernels",
        "-include mistake.h",
    )

    def text(self) -> str:
        mistakes.put_in(self.csrc, CHANGED, self.folder / "memsave_ext")
        names = ("clocks", "device", "generator", "operators", "attention", "binding")
        text = "".join(f'#include "{name}.cpp"\n' for name in names)
        (unit,) = build_units.write_units(self.folder / "units", {"fake_cuda.cpp": text})
        device = self._host_object(unit, ["-fvisibility=default"])
        libraries = [f"-L'{path}' -Wl,-rpath,'{path}'" for path in cpp_extension.library_paths()]
        flags = ["-shared", *libraries, "-lc10", "-ltorch", "-ltorch_cpu"]
        self._build("plain", "link", [device], LIBRARY.name, flags)
        objects = [*self._host(), self._host_object(DEVICE / "kernels.cpp", [])]
        self._extension(objects, ["-L.", "-Wl,-rpath,'$$ORIGIN/..'", "-lfake_cuda"])
        return "".join(self.lines)

    def _host_flags(self) -> list[str]:
        return [*self._includes(CHANGED, DEVICE), *super()._host_flags()]


def main() -> None:
    full = "--full" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--full"]
    operators.build(Package, FOLDER)
    seeing = [
        (mistake.native, f"{i}:{word}")
        for i, mistake in enumerate(MISTAKES)
        for word in mistake.cases.split()
        if word in words or not words
    ]
    of_gpus = [] if words else [*EVERY_TIME, *(IN_FULL if full else [])]
    cores = len(os.sched_getaffinity(0))
    seeds = SEEDS if full else EVERY_TIMES_SEEDS
    with ThreadPoolExecutor(cores) as pool:
        runs = [pool.submit(run_gpu_tests, tests) for tests in of_gpus]
        chosen = " or ".join(words) or "test"
        runs += [pool.submit(run_tests, [path], chosen, seeds=seeds) for path in CASES]
        # There a captured region cannot ask torch for the random state, as on a card.
        chosen = f"({chosen}) and not replays"
        runs += [pool.submit(run_tests, [path], chosen, False, seeds) for path in PURE_PYTHON]
        for native in (True, False):
            these = [number for is_native, number in seeing if is_native is native]
            parts = [part for i in range(cores) if (part := these[i::cores])]
            runs += [pool.submit(see_mistakes, part, native) for part in parts]
    for run in runs:
        print(run.result().stdout, end="")
    if any(run.result().returncode not in (0, NOTHING_CHOSEN) for run in runs):
        sys.exit("emulate: tests on the device failed, or mistakes were not seen")
    print(f"{len(seeing)} mistakes seen")


def run_gpu_tests(tests: GpuTests) -> subprocess.CompletedProcess[str]:
    return run_tests([ROOT / "tests" / tests.file], tests.chosen)


def run_tests(
    paths: list[Path], words: str, native: bool = True, seeds: dict[bool, int] = SEEDS
) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", "pytest", "-k", words, *map(str, paths)], native, seeds)


def see_mistakes(numbers: list[str], native: bool) -> subprocess.CompletedProcess[str]:
    return run_python([str(DEVICE / "see_mistakes.py"), *numbers], native)


def run_python(
    arguments: list[str], native: bool, seeds: dict[bool, int] = SEEDS
) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-p", "no:cacheprovider", "-p", "checked_streams", "--rootdir", str(ROOT)]
    environment = {
        **os.environ,
        "PYTEST_ADDOPTS": shlex.join(options),
        "PYTHONPATH": f"{DEVICE}:{ROOT / 'tests'}:{FOLDER}",  # FOLDER has the package
        "MEMSAVE_EXT_FAKE_CUDA": str(LIBRARY),
        "MEMSAVE_EXT_NATIVE": str(int(native)),
        "MEMSAVE_EXT_SEEDS": str(seeds[native]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=FOLDER,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    main()
