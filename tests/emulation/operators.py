"""The operators' own tests, with CUDA's kernels run on the CPU in place of the CPU's.

    python tests/emulation/operators.py [PYTEST ARGUMENT...]

A copy of the package is built in build/emulation-operators, `cpu_kernels` renamed where it is
called: tensors are the CPU's; what is checked, allocated and launched for them is as for CUDA's.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import programs
import translate
from programs import HERE, ROOT, build_config
from torch.utils import cpp_extension

sys.path.insert(0, str(ROOT / "tools"))
import build_units

FOLDER = ROOT / "build" / "emulation-operators"
BATCH_NORM = ["", "_ops", "_errors", "_once", "_cuda", "_parts_cuda"]
ADAM = ["", "_op", "_formats", "_modes", "_rounding", "_states", "_clipping", "_loss_scaling"]
ADAM += ["_folding", "_views", "_format_rows", "_in_backward", "_hooks", "_exact_cuda", "_cuda"]
ADAM += ["_modes_cuda", "_rows", "_rows_graphs", "_rows_whole"]
TESTS = ["emulation/sanitized_kernels.py"]
TESTS += [f"batch_norm/test_batch_norm{name}.py" for name in BATCH_NORM]
TESTS += [f"adam/test_adam{name}.py" for name in ADAM]
TESTS += [f"adam/test_{name}.py" for name in ("sgd", "lion", "sgd_lion_modes")]
TESTS += [f"loss_head/test_{name}.py" for name in ("loss", "loss_autograd", "operators")]


def main() -> None:
    build(Library)
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER),
        "MEMSAVE_EXT_NATIVE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(ROOT), *(sys.argv[1:] or [str(ROOT / "tests" / t) for t in TESTS])]
    sys.exit(subprocess.run(command, cwd=FOLDER, env=environment, check=False).returncode)


def build(library: type[Library]) -> None:
    copy_package(FOLDER / library.package)
    kernels = translate.translate_tree(ROOT / "csrc", FOLDER / "csrc")
    (FOLDER / "build.ninja").write_text(library(FOLDER, ROOT / "csrc", kernels).text())
    programs.run_ninja(FOLDER)


def copy_package(target: Path) -> None:
    ignored = shutil.ignore_patterns("_C.*.so", "_build_info.json", "__pycache__")
    shutil.copytree(ROOT / "memsave_ext", target, ignore=ignored, dirs_exist_ok=True)
    # What setup.py wrote of the build in place: this one is of the same versions.
    shutil.copy(ROOT / "memsave_ext" / "_build_info.json", target)


class Library(programs.Plan):
    """The package with CUDA's kernels, and what its host part is compiled with."""

    host = "host"  # the folder of its objects
    package = "memsave_ext"
    with_cuda = False
    defines = ("-Dcpu_kernels=cuda_kernels",)

    def text(self) -> str:
        self._extension([*self._host(), *self._kernels()], self.package)
        return "".join(self.lines)

    def _extension(self, objects: list[str], package: str, *more: str) -> None:
        libraries = cpp_extension.library_paths()
        flags = ["-shared", *(f"-L'{path}' -Wl,-rpath,'{path}'" for path in libraries)]
        flags += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", *more]
        target = f"{package}/_C" + sysconfig.get_config_var("EXT_SUFFIX")
        self._build("plain", "link", objects, target, flags)

    def _host(self) -> list[str]:
        """What is compiled of the build but its kernels, with the emulated ones in their place."""
        return [self._host_object(path, self.host) for path in self._host_sources()]

    def _host_sources(self) -> list[Path]:
        found = build_config.sources(ROOT, self.with_cuda)
        sources = [s for s in found if "/cpu/" not in s and not s.endswith(".cu")]
        alone, texts = build_units.units(sources, [])
        units = build_units.write_units(self.folder / "units", texts)
        return [*units, *(ROOT / source for source in alone)]

    def _host_object(self, path: Path, folder: str, *first: Path) -> str:
        target = f"{folder}/{path.parent.name}_{path.stem}.o"
        self._compile("plain", path, target, self._host_flags(*first))
        return target

    def _host_flags(self, *first: Path) -> list[str]:
        """``first``: folders of headers that come before all others."""
        torch_std = re.search(r"-std=c\+\+\d+", inspect.getsource(cpp_extension))
        assert torch_std, "torch.utils.cpp_extension names no -std"
        includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        flags = [torch_std.group(), "-O1", "-fPIC", "-DNDEBUG", "-fvisibility=hidden", "-fopenmp"]
        flags += ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        flags += [*self.defines, *self._includes(*first, self.csrc)]
        return flags + [f"-isystem '{path}'" for path in includes]

    def _kernels(self) -> list[str]:
        flags = [*programs.FLAGS, "-fPIC", "-fvisibility=hidden", "-w"]
        flags += self._includes(self.folder / "csrc", self.csrc, HERE, HERE / "cuda")
        executor = [HERE / f"{name}.cpp" for name in programs.EXECUTOR]
        objects = []
        for path in [*executor, *self.sources]:
            objects.append(f"kernels/{'_'.join(path.with_suffix('').parts[-3:])}.o")
            self._compile("plain", path, objects[-1], flags)
        return objects


if __name__ == "__main__":
    main()
