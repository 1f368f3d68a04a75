"""The package on a device whose streams are checked; then mistakes, which must be seen.

    python tests/emulation/streams.py               # without the mistakes; the files take turns
    python tests/emulation/streams.py [WORD...]     # cases and mistakes of such names alone
    python tests/emulation/streams.py --full        # with more seeds, and all tests of a GPU that
                                                    # can run on it

Cases that are not about the native part alone run in pure Python, too, with fewer seeds.

The device is of type cuda, and its memory the host's (tests/emulation/streams). The package is
built for CUDA in build/emulation-streams, with its kernels emulated.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import operators
from operators import build_units
from programs import HERE, ROOT
from torch.utils import cpp_extension

DEVICE = HERE / "streams"
sys.path[:0] = [str(DEVICE), str(ROOT / "tests")]
import mistakes  # noqa: E402
import turns  # noqa: E402
from gpu_tests import EVERY_TIME, IN_FULL  # noqa: E402
from mistakes import MISTAKES  # noqa: E402

FOLDER = ROOT / "build" / "emulation-streams"
CHANGED = FOLDER / "changed"  # the sources of csrc that have mistakes
LIBRARY = FOLDER / "libfake_cuda.so"
CASES = sorted((DEVICE / "cases").glob("cases_*.py"))
PURE_PYTHON = [path for path in CASES if path.stem[6:] in ("adam", "checkpoint", "distributed")]
# Of a case, native and in pure Python. A mistake is tried with all until it is seen.
SEEDS = {True: 50, False: 10}
EVERY_TIMES_SEEDS = {True: 8, False: 3}


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
        objects = self._host()  # what takes longest to compile comes first
        names = ("clocks", "managed", "device", "generator", "operators", "attention", "binding")
        text = "".join(f'#include "{name}.cpp"\n' for name in names)
        (unit,) = build_units.write_units(self.folder / "units", {"fake_cuda.cpp": text})
        device = self._host_object(unit, ["-fvisibility=default"])
        libraries = [f"-L'{path}' -Wl,-rpath,'{path}'" for path in cpp_extension.library_paths()]
        flags = ["-shared", *libraries, "-lc10", "-ltorch", "-ltorch_cpu"]
        self._build("plain", "link", [device], LIBRARY.name, flags)
        objects.append(self._host_object(DEVICE / "kernels.cpp", []))
        self._extension(objects, ["-L.", "-Wl,-rpath,'$$ORIGIN/..'", "-lfake_cuda"])
        return "".join(self.lines)

    def _host_flags(self) -> list[str]:
        flags = [*self._includes(CHANGED, DEVICE), *super()._host_flags()]
        return [*flags, "-DMEMSAVE_EXT_CHECK_LOCKS=::emulated::failed"]


def main() -> None:
    full = "--full" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--full"]
    turns.choose(everybody=full or bool(words))
    operators.build(Package, FOLDER)
    parts = {
        native: [part for i, part in enumerate(parts_of(native, words, full)) if turns.has(i)]
        for native in (True, False)
    }
    ways = [native for native in parts if parts[native]]
    with ThreadPoolExecutor(len(ways)) as pool:
        runs = list(pool.map(lambda native: run(parts[native], native, full), ways))
    for done in runs:
        print(done.stdout, end="")
        if done.returncode < 0:
            print(f"forked.py was ended by {signal.Signals(-done.returncode).name}")
    if any(done.returncode for done in runs):
        sys.exit("emulate: tests on the device failed, or mistakes were not seen")
    seen = [part for of in parts.values() for part in of if "mistake" in part]
    if seen:
        print(f"{len(seen)} mistakes seen")


def parts_of(native: bool, words: list[str], full: bool) -> Iterator[dict[str, object]]:
    """What forked.py runs: tests of a GPU, cases, mistakes."""
    chosen = " or ".join(words) or "test"
    if not native:
        # There a captured region cannot ask torch for the random state, as on a card.
        chosen = f"({chosen}) and not replays"
    seeds = (SEEDS if full else EVERY_TIMES_SEEDS)[native]
    for path in CASES if native else PURE_PYTHON:
        yield {"files": [str(path)], "chosen": chosen, "seeds": seeds}
    if native and not words:
        for tests in [*EVERY_TIME, *(IN_FULL if full else [])]:
            file = str(ROOT / "tests" / tests.file)
            yield {"files": [file], "chosen": tests.chosen, "seeds": seeds}
    for number, mistake in enumerate(MISTAKES):
        for word in mistake.cases.split() if mistake.native is native else ():
            if word in words or (full and not words):
                of = {"files": list(map(str, CASES)), "chosen": word, "seeds": SEEDS[native]}
                yield {**of, "mistake": number}


def run(
    parts: list[dict[str, object]], native: bool, full: bool
) -> subprocess.CompletedProcess[str]:
    options = [
        "-q",
        "--disable-warnings",
        "-p",
        "no:cacheprovider",
        "-p",
        "checked_streams",
        "--rootdir",
        str(ROOT),
    ]
    options += ["--full"] if full else []
    environment = {
        **os.environ,
        "PYTEST_ADDOPTS": shlex.join(options),
        "PYTHONPATH": f"{DEVICE}:{ROOT / 'tests'}:{FOLDER}",  # FOLDER has the package
        "MEMSAVE_EXT_FAKE_CUDA": str(LIBRARY),
        "MEMSAVE_EXT_NATIVE": str(int(native)),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, str(DEVICE / "forked.py")],
        input=json.dumps(parts),
        cwd=FOLDER,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    main()
