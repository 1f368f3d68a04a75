"""An allocator of the CPU that refuses memory at random, of ``refusing.c``."""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Origin

SOURCE = Path(__file__).with_name("refusing.c")


@pytest.fixture(scope="session")
def in_a_process(tmp_path_factory):
    """Runs ``function(*arguments)`` of a test file where the allocator can refuse."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("refusing") / "refusing.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True)

    preload = f"{library}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
    # Memory that is freed goes back to the system, so that limits of it are met.
    return Origin(LD_PRELOAD=preload, MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="1").call


@functools.cache
def _library():
    library = ctypes.CDLL(None)
    library.refuse.argtypes = [ctypes.c_uint64, ctypes.c_double, ctypes.c_size_t]
    library.refusals.restype = ctypes.c_uint64
    return library


class Refusals:
    """``count``: how many allocations were refused in the block."""

    count = 0


@contextlib.contextmanager
def refusals(share, seed=0, least=256):
    """Inside, a share of the allocations of at least so many bytes is refused, on all threads."""
    refused = Refusals()
    if share == 0:
        yield refused
        return
    before = _library().refusals()
    _library().refuse(seed, share, least)
    try:
        yield refused
    finally:
        _library().refuse(0, 0.0, 0)
        refused.count = _library().refusals() - before
