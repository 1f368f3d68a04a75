"""Build of the native part, memsave_ext._C. The metadata is in pyproject.toml.

MEMSAVE_EXT_CUDA=auto|0|1 chooses between C++ and C++ with CUDA; tools/build_config.py decides.
"""

import sys
from pathlib import Path

import setuptools

# What makes an sdist, in whose isolated environment there is no torch.
WITHOUT_TORCH = ("egg_info", "sdist")

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if command not in WITHOUT_TORCH:
        sys.exit(
            "memsave_ext needs torch to build: install torch first, "
            "then run `pip install --no-build-isolation .`"
        )

if int(setuptools.__version__.split(".")[0]) < 77:
    # Without build isolation nobody else checks it, and a new venv may come with an older one.
    sys.exit(
        f"memsave_ext needs setuptools 77 or newer to build, found {setuptools.__version__}: "
        "run `pip install -U setuptools`"
    )

if torch is None:
    setuptools.setup()
else:
    # A PEP 517 front end does not put the project on sys.path.
    sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
    import build_native

    setuptools.setup(ext_modules=[build_native.EXTENSION], cmdclass=build_native.COMMANDS)
