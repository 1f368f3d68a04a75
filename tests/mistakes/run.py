"""Whether the tests find mistakes: each is switched on by itself, and its tests must fail.

    python tests/mistakes/run.py [WORD...]           # of files, or kinds of them, with such words
    python tests/mistakes/run.py --with FILE WORD... # with another file of tests: says which fail

One copy of the package has all mistakes of mistakes.py, and is built once, in build/mistakes.
Without a mistake the same tests must pass there. Each mistake runs in a process that is forked from
one that has torch and the package already.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from mistakes import MISTAKES, Mistake  # noqa: E402
from switch import VARIABLE, with_mistakes  # noqa: E402

FOLDER = ROOT / "build" / "mistakes"
CHANGED = FOLDER / "changed"  # the sources of csrc that have mistakes
IN_CPP = "::mistakes::is_running({number})"
SECONDS = 300  # that a mistake's tests may take: a mistake may have a step wait for ever


def main() -> None:
    words = sys.argv[1:]
    others: list[str] = []
    while words and words[0] == "--with":
        others.append(words[1])
        words = words[2:]
    build()
    os.chdir(ROOT / "tests")
    os.environ.update(MEMSAVE_EXT_NATIVE="1", PYTHONPATH=str(FOLDER), OMP_NUM_THREADS="1")
    sys.path.insert(0, str(FOLDER))
    # What most tests import takes longer than they do.
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._subclasses  # noqa: F401

    import memsave_ext

    assert Path(memsave_ext.__file__).is_relative_to(FOLDER), memsave_ext.__file__
    chosen = {
        number: mistake
        for number, mistake in enumerate(MISTAKES)
        if not words or any(word in mistake.file for word in words)
    }
    sys.exit(0 if see(chosen, others) else 1)


def build() -> None:
    """Puts the mistakes into a copy of the package, and compiles what has changed."""
    texts = with_mistakes(MISTAKES, lambda name: (ROOT / name).read_text("utf-8"), IN_CPP)
    package = FOLDER / "memsave_ext"
    ignored = shutil.ignore_patterns("_C.*.so", "_build_info.json", "__pycache__")
    for path in package.rglob("*.py"):
        path.unlink()  # one that is not there any more
    shutil.copytree(ROOT / "memsave_ext", package, ignore=ignored, dirs_exist_ok=True)
    native = {}
    for name, text in texts.items():
        if name.startswith("csrc/"):
            native[CHANGED / Path(name).relative_to("csrc")] = text
        else:
            (FOLDER / name).write_text(text, "utf-8")
    for path in CHANGED.rglob("*"):  # of mistakes that are not here any more
        if path.is_file() and path not in native:
            path.unlink()
    for path, text in native.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:  # what is as it was keeps its time
            path.write_text(text, "utf-8")
    # A file that is found before that of csrc for the first time has everything compiled again.
    files = zlib.crc32("".join(sorted(map(str, native))).encode())
    words = f"-I{CHANGED}", "-include", str(HERE / "mistake.h"), f"-DMEMSAVE_EXT_MISTAKES={files}"
    flags = shlex.join(["-g0", *words])
    environment = {**os.environ, "MEMSAVE_EXT_CUDA": "0", "CFLAGS": flags, "CXXFLAGS": flags}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(FOLDER)]
    command += ["--build-temp", str(FOLDER / "objects")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def see(chosen: dict[int, Mistake], others: list[str]) -> bool:
    """Runs the tests of the mistakes with each. Returns whether all are seen, and none without."""
    tests = dict.fromkeys(test for mistake in chosen.values() for test in mistake.tests)
    right = True
    if not others:
        status, text = run(None, list(tests))
        right = status == 0
        print(f"{'passed' if right else 'FAILED'} without a mistake: {text[-2000:]}", flush=True)
    missed = 0
    for number, mistake in chosen.items():
        status, text = run(number, others or list(mistake.tests))
        failed = [line for line in text.splitlines() if line.startswith("FAILED ")]
        # One whose tests end the process is seen, too.
        seen = status not in (0, 2, 3, 4, 5)
        missed += not seen
        how = failed[0] if failed else text.strip()[-300:]
        verdict = "seen" if seen else "NOT SEEN"
        print(f"{number} {verdict}: {mistake.what} ({mistake.file}): {how}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mistakes seen")
    return right and not missed


def run(number: int | None, tests: list[str]) -> tuple[int, str]:
    """Runs tests in a forked process. Returns its exit status and what it has printed."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            _run(number, tests, output.fileno())
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def _run(number: int | None, tests: list[str], output: int) -> NoReturn:
    """In the forked process, which ends here whatever happens."""
    status = 3  # of an error in pytest itself
    try:
        import faulthandler

        import pytest

        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
        if number is not None:
            os.environ[VARIABLE] = str(number)
            options += ["-x", "--tb=line"]
        faulthandler.dump_traceback_later(SECONDS * (1 if number is not None else 20), exit=True)
        status = int(pytest.main([*options, *tests]))
        sys.stdout.flush()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
