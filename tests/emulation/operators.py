"""The operators' own tests, with CUDA's kernels run on the CPU in place of the CPU's.

    python tests/emulation/operators.py [PYTEST ARGUMENT...]

A copy of the package is built in build/emulation-operators, `cpu_kernels` renamed where it is
called: tensors are the CPU's; what is checked, allocated and launched for them is as for CUDA's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import programs
from programs import ROOT, build_config
from torch.utils import cpp_extension

sys.path.insert(0, str(ROOT / "tools"))
import build_units

FOLDER = ROOT / "build" / "emulation-operators"
BATCH_NORM = ["", "_ops", "_errors", "_once", "_cuda", "_parts_cuda"]
ADAM = ["", "_op", "_formats", "_modes", "_rounding", "_states", "_clipping", "_loss_scaling"]
ADAM += ["_views", "_format_rows", "_in_backward", "_hooks", "_exact_cuda", "_cuda"]
ADAM += ["_modes_cuda", "_rows", "_rows_graphs", "_rows_whole"]
TESTS = ["emulation/sanitized_kernels.py"]
TESTS += [f"batch_norm/test_batch_norm{name}.py" for name in BATCH_NORM]
TESTS += [f"adam/test_adam{name}.py" for name in ADAM]
TESTS += [f"adam/test_{name}.py" for name in ("sgd", "lion", "sgd_lion_modes")]
TESTS += [
    f"loss_head/test_{name}.py" for name in ("loss", "loss_autograd", "low_rank", "operators")
]


def main() -> None:
    build(Library, FOLDER)
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER),
        "MEMSAVE_EXT_NATIVE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--full", "--rootdir", str(ROOT)]
    command += [*(sys.argv[1:] or [str(ROOT / "tests" / t) for t in TESTS])]
    sys.exit(subprocess.run(command, cwd=FOLDER, env=environment, check=False).returncode)


def build(library: type[Library], folder: Path) -> None:
    """Build a package in ``folder``, beside a copy of its Python."""
    programs.build(["plain"])
    ignored = shutil.ignore_patterns("_C.*.so", "_build_info.json", "__pycache__")
    package = folder / "memsave_ext"
    shutil.copytree(ROOT / "memsave_ext", package, ignore=ignored, dirs_exist_ok=True)
    # What setup.py wrote of the build in place: this one is of the same versions.
    shutil.copy(ROOT / "memsave_ext" / "_build_info.json", package)
    (folder / "build.ninja").write_text(library(folder, ROOT / "csrc", []).text())
    programs.run_ninja(folder)


class Library(programs.Plan):
    """The package with CUDA's kernels, and what its host part is compiled with."""

    with_cuda = False
    flags = ("-Dcpu_kernels=cuda_kernels",)

    def text(self) -> str:
        self._extension(self._host(), [])
        return "".join(self.lines)

    def _extension(self, objects: list[str], flags: list[str]) -> None:
        kernels = [os.path.relpath(path, self.folder) for path in programs.kernel_objects()]
        libraries = [f"-L'{path}' -Wl,-rpath,'{path}'" for path in cpp_extension.library_paths()]
        flags = ["-shared", *libraries, "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", *flags]
        target = "memsave_ext/_C" + sysconfig.get_config_var("EXT_SUFFIX")
        self._build("plain", "link", [*objects, *kernels], target, flags)

    def _host(self) -> list[str]:
        """All sources but kernels, as two files: most of the time of one is for torch's headers.

        The CPU's kernels are compiled to see that they are C++17, too, without their loops over
        vectors, and are not linked.
        """
        texts = {"regions.cpp": "", "optimizer.cpp": "", "cpu.cpp": ""}  # the longest first
        for source in build_config.sources(ROOT, self.with_cuda):
            path = Path(source).relative_to("csrc")
            if "cpu" in path.parts:
                texts["cpu.cpp"] += f'#include "{path}"\n'
            elif path.suffix != ".cu":
                with_kernels = (ROOT / "csrc" / path.parts[0] / "cuda").is_dir()
                texts["optimizer.cpp" if with_kernels else "regions.cpp"] += f'#include "{path}"\n'
        regions, optimizer, cpu = build_units.write_units(self.folder / "units", texts)
        self._host_object(cpu, [])
        return [self._host_object(path, list(self.flags)) for path in (regions, optimizer)]

    def _host_object(self, path: Path, flags: list[str]) -> str:
        target = f"objects/{path.stem}.o"
        self._compile("plain", path, target, [*self._host_flags(), *flags])
        return target

    def _host_flags(self) -> list[str]:
        # C++17, as with the oldest torch, whatever the one that is here compiles extensions as.
        flags = ["-std=c++17", "-pedantic-errors"]
        # Not optimised: to compile takes longer than to run.
        flags += ["-O0", "-fPIC", "-DNDEBUG", "-fvisibility=hidden", "-fopenmp"]
        flags += ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        flags += self._includes(self.csrc)
        torchs = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        return flags + [f"-isystem '{path}'" for path in torchs]


if __name__ == "__main__":
    main()
