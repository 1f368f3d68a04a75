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
import gc, json, os, sys, traceback
import torch._dynamo  # which optimizers import

gc.freeze()  # it stays, and takes long to be looked through

for line in sys.stdin:
    code, environment, outputs = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ.clear()
            os.environ.update(environment)
            # In a fork torch makes its engine anew when it is asked for first, which two threads
            # must not do at once.
            torch.autograd.Variable._execution_engine.is_checkpoint_valid()
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


class Origin:
    """A process that has imported torch, and from which programs are forked.

    ``environment``: variables that it starts with besides this process's.
    """

    def __init__(self, **environment):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ORIGIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        atexit.register(self._process.kill)

    def run(self, code, **environment):
        """Runs ``code`` as `python -c` does, with these variables of the environment besides."""
        with tempfile.TemporaryDirectory() as folder:
            outputs = [str(Path(folder, name)) for name in ("stdout", "stderr")]
            print(
                json.dumps([code, os.environ | environment, outputs]),
                file=self._process.stdin,
                flush=True,
            )
            status = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(
                code, status, *(Path(o).read_text() for o in outputs)
            )

    def call(self, function, *arguments):
        """Calls a function of a test file there, prints what it prints, and raises if it does."""
        done = self.run(
            f"import sys; sys.path[:0] = {sys.path!r}; import {function.__module__} as t; "
            f"t.{function.__name__}(*{arguments!r})"
        )
        print(done.stdout, done.stderr)
        done.check_returncode()


@functools.cache
def _origin():
    return Origin()


def run_program(code, **environment):
    """As :meth:`Origin.run`, from a process that tests share."""
    return _origin().run(code, **environment)


def call_in_a_process(function, *arguments):
    """As :meth:`Origin.call`, from a process that tests share."""
    _origin().call(function, *arguments)
