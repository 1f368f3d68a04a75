"""Build of the native part, memsave_ext._C. The metadata is in pyproject.toml.

MEMSAVE_EXT_CUDA=auto|0|1 chooses between C++ and C++ with CUDA; tools/build_config.py decides.
MEMSAVE_EXT_NATIVE=0 leaves the native part out, which needs no torch and no compiler; so does any
system but Linux.
"""

import os
import sys
from pathlib import Path

import setuptools

NATIVE = sys.platform == "linux" and os.environ.get("MEMSAVE_EXT_NATIVE") != "0"
# What makes an sdist, in whose isolated environment there is no torch.
WITHOUT_TORCH = ("egg_info", "sdist")

torch = None
try:
    if NATIVE:
        import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if command not in WITHOUT_TORCH:
        sys.exit(
            "memsave_ext finds no torch to build with: install torch first, then run "
            "`pip install --no-build-isolation .`, as pip hides installed packages from a build "
            "otherwise; MEMSAVE_EXT_NATIVE=0 installs pure Python"
        )

if int(setuptools.__version__.split(".")[0]) < 77:
    # Without build isolation nobody else checks it, and a new venv may come with an older one.
    sys.exit(
        f"memsave_ext needs setuptools 77 or newer to build, found {setuptools.__version__}: "
        "run `pip install -U setuptools`"
    )

if torch is None:
    if not NATIVE:
        why = "MEMSAVE_EXT_NATIVE=0" if sys.platform == "linux" else "the native part needs Linux"
        print(f"memsave_ext: pure Python ({why}).", flush=True)
    setuptools.setup()
else:
    # A PEP 517 front end does not put the project on sys.path.
    sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
    import build_native

    setuptools.setup(ext_modules=[build_native.EXTENSION], cmdclass=build_native.COMMANDS)
