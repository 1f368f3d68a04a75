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
    build()
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER),
        "MEMSAVE_EXT_NATIVE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(ROOT), *(sys.argv[1:] or [str(ROOT / "tests" / t) for t in TESTS])]
    sys.exit(subprocess.run(command, cwd=FOLDER, env=environment, check=False).returncode)


def build() -> None:
    package = FOLDER / "memsave_ext"
    ignored = shutil.ignore_patterns("_C.*.so", "_build_info.json", "__pycache__")
    shutil.copytree(ROOT / "memsave_ext", package, ignore=ignored, dirs_exist_ok=True)
    # What setup.py wrote of the build in place: this one is of the same versions.
    shutil.copy(ROOT / "memsave_ext" / "_build_info.json", package)
    kernels = translate.translate_tree(ROOT / "csrc", FOLDER / "csrc")
    (FOLDER / "build.ninja").write_text(Library(FOLDER, ROOT / "csrc", kernels).text())
    programs.run_ninja(FOLDER)


class Library(programs.Plan):
    def text(self) -> str:
        objects = [*self._host(), *self._kernels()]
        libraries = cpp_extension.library_paths()
        flags = ["-shared", *(f"-L'{path}' -Wl,-rpath,'{path}'" for path in libraries)]
        flags += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        target = "memsave_ext/_C" + sysconfig.get_config_var("EXT_SUFFIX")
        self._build("plain", "link", objects, target, flags)
        return "".join(self.lines)

    def _host(self) -> list[str]:
        """What is compiled of the CPU build but its kernels, with CUDA's in their place."""
        sources = [s for s in build_config.sources(ROOT, False) if "/cpu/" not in s]
        alone, texts = build_units.units(sources, [])
        units = build_units.write_units(self.folder / "units", texts)
        torch_std = re.search(r"-std=c\+\+\d+", inspect.getsource(cpp_extension))
        assert torch_std, "torch.utils.cpp_extension names no -std"
        includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        flags = [torch_std.group(), "-O1", "-fPIC", "-DNDEBUG", "-fvisibility=hidden", "-fopenmp"]
        flags += ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        flags += ["-Dcpu_kernels=cuda_kernels", *self._includes(self.csrc)]
        flags += [f"-isystem '{path}'" for path in includes]
        objects = []
        for path in [*units, *(ROOT / source for source in alone)]:
            objects.append(f"host/{path.stem}.o")
            self._compile("plain", path, objects[-1], flags)
        return objects

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
