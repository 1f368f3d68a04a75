"""What remat does without the native part is said in one file, and the others are about it."""

from pathlib import Path

from memsave_ext import _native

if not _native.available:
    here = Path(__file__).parent
    collect_ignore = [
        p.name for p in here.glob("test_*.py") if p.name != "test_keeps_everything.py"
    ]
