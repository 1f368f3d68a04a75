"""The package on a device whose streams are checked; then mistakes, which must be seen.

    python tests/emulation/streams.py [WORD...]     # cases and mistakes of such names alone
    python tests/emulation/streams.py --full        # and all tests of a GPU that can run on it

Cases that are not about the native part alone run in pure Python, too, with fewer seeds.

The device is of type cuda, and its memory the host's (tests/emulation/streams). The package is
built for CUDA in build/emulation-streams, with its kernels emulated.
"""

from __future__ import annotations

import os
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
        names = ("clocks", "device", "generator", "operators", "binding")
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
        (i, word)
        for i, mistake in enumerate(MISTAKES)
        for word in mistake.cases.split()
        if word in words or not words
    ]
    of_gpus = [] if words else [*EVERY_TIME, *(IN_FULL if full else [])]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = [pool.submit(run_gpu_tests, tests) for tests in of_gpus]
        chosen = " or ".join(words) or "test"
        runs += [pool.submit(run_tests, [path], chosen) for path in CASES]
        # There a captured region cannot ask torch for the random state, as on a card.
        chosen = f"({chosen}) and not replays"
        runs += [pool.submit(run_tests, [path], chosen, native=False) for path in PURE_PYTHON]
        missed = list(pool.map(is_missed, *zip(*seeing, strict=True))).count(True)
    for run in runs:
        print(run.result().stdout, end="")
    if any(run.result().returncode not in (0, NOTHING_CHOSEN) for run in runs):
        sys.exit("emulate: tests on the device failed")
    if missed:
        sys.exit(f"emulate: {missed} of {len(seeing)} mistakes were not seen")
    print(f"{len(seeing)} mistakes seen")


def run_gpu_tests(tests: GpuTests) -> subprocess.CompletedProcess[str]:
    return run_tests([ROOT / "tests" / tests.file], tests.chosen)


def run_tests(
    paths: list[Path],
    words: str,
    *options: str,
    mistake: int | None = None,
    native: bool = True,
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{DEVICE}:{ROOT / 'tests'}",
        "MEMSAVE_EXT_FAKE_CUDA": str(LIBRARY),
        "MEMSAVE_EXT_NATIVE": str(int(native)),
        "OMP_NUM_THREADS": "1",
    }
    if mistake is not None:
        environment[mistakes.VARIABLE] = str(mistake)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "checked_streams", "--rootdir", str(ROOT), *options, "-k", words]
    return subprocess.run(
        [*command, *map(str, paths)],
        cwd=FOLDER,  # where the package is
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def is_missed(number: int, words: str) -> bool:
    """Whether no seed of the cases fails by what is checked."""
    mistake = MISTAKES[number]
    done = run_tests(CASES, words, "-x", mistake=number, native=mistake.native)
    lines = [x for x in done.stdout.splitlines() if x.startswith("E ") or "Timeout" in x]
    seen = done.returncode == 1 and any(mistake.seen in line for line in lines)
    how = next((line[1:].strip() for line in lines if mistake.seen in line), done.stdout[-500:])
    print(f"{'seen' if seen else 'NOT SEEN'}: {mistake.what} ({mistake.file}): {how}", flush=True)
    return not seen


if __name__ == "__main__":
    main()
