"""The native part as setuptools builds it: the extension, and what is written of the build.

setup.py imports it, where torch is installed.
"""

import contextlib
import copy
import json
import os
import platform
import shlex
import sys
from pathlib import Path

import build_config
import build_progress
import build_units
import torch

ROOT = Path(__file__).resolve().parents[1]
build_config.check_torch(torch.__version__, ROOT)
CARDS = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
DECISION = build_config.decide(
    torch.__version__,
    torch.version.cuda,
    torch.version.hip,
    map(torch.cuda.get_device_capability, CARDS),
)
if DECISION.cuda:
    # Both are read by torch.utils.cpp_extension, the first when it is imported.
    os.environ["CUDA_HOME"] = str(DECISION.cuda_home)
    os.environ["TORCH_CUDA_ARCH_LIST"] = str(DECISION.archs)

from torch.utils import cpp_extension  # noqa: E402


class BuildExtension(cpp_extension.BuildExtension):
    """torch's build_ext, which also writes what was built beside the compiled file."""

    def finalize_options(self):
        if self.build_temp is None:
            # One place for every kind of build, so that an editable install and a later build_ext
            # share objects; per torch, because objects of another torch must not be linked.
            name = f"temp.{sys.implementation.cache_tag}-torch{torch.__version__}"
            self.build_temp = os.path.join("build", name)
        super().finalize_options()

    def run(self):
        print(DECISION.sentence, flush=True)
        super().run()

    def build_extension(self, ext):
        compiled = Path(self.get_ext_fullpath(ext.name))
        info = self._build_info(compiled.name)
        path = compiled.with_name("_build_info.json")
        if not path.exists() or path.read_text() != info:
            # Without ninja an older file would pass as up to date, whatever it was built for.
            self.force = True
        path.unlink(missing_ok=True)
        # A copy: what an sdist has is asked of the extension, too.
        compiled_at_once = copy.copy(ext)
        compiled_at_once.sources = self._units(ext.sources)
        commands = self.distribution.verbose > 1
        with contextlib.nullcontext() if commands else build_progress.short_output():
            super().build_extension(compiled_at_once)
        path.write_text(info)

    def _units(self, sources):
        """What is compiled, relative to where setup.py runs, as far as it can be."""
        alone, texts = build_units.units(sources, build_config.headers(ROOT))
        written = build_units.write_units(Path(self.build_temp).absolute() / "units", texts)
        here = Path.cwd()
        within = [p.relative_to(here) if p.is_relative_to(here) else p for p in written]
        return [*map(str, within), *alone]

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = Path(self.build_lib, *ext.name.split(".")).with_name("_build_info.json")
            self.copy_file(str(built), str(ROOT / "memsave_ext" / built.name))

    def _build_info(self, compiled_name):
        info = {
            "version": self.distribution.get_version(),
            "file": compiled_name,
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "cuda": DECISION.cuda,
            "archs": DECISION.archs,
            "compiler": build_config.compiler_version(
                shlex.split(cpp_extension.get_cxx_compiler())
            ),
            "python": platform.python_version(),
            "decision": DECISION.sentence,
        }
        return json.dumps(info, indent=2) + "\n"


_KIND = cpp_extension.CUDAExtension if DECISION.cuda else cpp_extension.CppExtension
EXTENSION = _KIND(
    "memsave_ext._C",
    sources=build_config.sources(ROOT, DECISION.cuda),
    depends=[
        "memsave_ext/adam/format_rows.h",
        *build_config.headers(ROOT),
        *build_config.sources(ROOT, DECISION.cuda),
    ],
    include_dirs=[str(ROOT / "csrc")],
    define_macros=[("MEMSAVE_EXT_WITH_CUDA", "1")] if DECISION.cuda else [],
    extra_compile_args=build_config.compile_flags(cpp_extension.include_paths(), DECISION.cuda),
)
COMMANDS = {"build_ext": BuildExtension}
