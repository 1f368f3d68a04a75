"""Programs in processes of their own, forked from one that has imported torch already."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_ORIGIN = """
import json, os, sys, traceback
import torch._dynamo  # which optimizers import

for line in sys.stdin:
    code, environment, outputs = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ.clear()
            os.environ.update(environment)
            for number, path in enumerate(outputs, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _origin():
    process = subprocess.Popen(
        [sys.executable, "-c", _ORIGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.kill)
    return process


def run_program(code, **environment):
    """Runs ``code`` as `python -c` does, with these variables of the environment besides."""
    origin = _origin()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        print(
            json.dumps([code, {**os.environ, **environment}, outputs]),
            file=origin.stdin,
            flush=True,
        )
        status = int(origin.stdout.readline())
        return subprocess.CompletedProcess(code, status, *(Path(o).read_text() for o in outputs))
