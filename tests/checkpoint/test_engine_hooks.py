"""use_engine_hooks: the same results, with everything torch does beside regions untouched.

Each test runs in a process of its own, because the engine is installed for the whole process.
"""

from pathlib import Path

import pytest
from processes import run_program
from sampling import some

import memsave_ext as ms
from memsave_ext import _native

HERE = Path(__file__).resolve().parent
HEAD = """
import torch, memsave_ext as ms
from memsave_ext import checkpoint
assert ms.use_engine_hooks(True) is False
assert ms.use_engine_hooks() is True
torch.manual_seed(0)
w = torch.randn(4, 4, requires_grad=True)
x = torch.randn(3, 4, requires_grad=True)
def f(a): return (a @ w).tanh().exp()
expected = torch.autograd.grad(f(x).sum(), (x, w))
def check(out):
    for a, b in zip(expected, torch.autograd.grad(out.sum(), (x, w))): assert torch.equal(a, b)
"""

needs_native = pytest.mark.skipif(not _native.available, reason="it is native only")


def run(code):
    done = run_program(HEAD + code + "\nprint('as expected')")
    assert done.stdout.strip().endswith("as expected"), done.stdout + done.stderr


@needs_native
def test_all_tests_of_checkpoint_pass_with_it():
    tests = [str(HERE / f"test_checkpoint{name}.py") for name in some(("", "_state", "_errors"), 1)]
    # Programs choose for themselves.
    chosen = ["-k", "not share_a_parameter", "--engine-hooks"]
    command = ["-q", "-p", "no:cacheprovider", *chosen, *tests]
    done = run_program(f"import pytest\nassert pytest.main({command}) == 0")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert " passed" in done.stdout


@needs_native
def test_other_hooks_and_torchs_checkpoint_inside_and_around():
    run("""
from torch.utils.checkpoint import checkpoint as theirs
check(checkpoint(lambda a: theirs(f, a, use_reentrant=False), x))
check(theirs(lambda a: checkpoint(f, a), x, use_reentrant=False))
with torch.autograd.graph.save_on_cpu():
    check(checkpoint(f, x))
def offloading(a):
    with torch.autograd.graph.save_on_cpu():
        return f(a)
check(checkpoint(offloading, x))
check(f(x))
""")


@needs_native
def test_profiler_anomaly_mode_and_errors():
    run("""
with torch.profiler.profile() as p:
    check(checkpoint(f, x))
assert any("Backward" in e.name for e in p.events())
with torch.autograd.detect_anomaly(check_nan=True):
    check(checkpoint(f, x))
def g(a):
    if ms.is_recomputing(): raise KeyError("from the function")
    return f(a)
out = checkpoint(g, x).sum()
try: out.backward()
except KeyError as error: assert error.args == ("from the function",)
else: raise AssertionError
""")


@needs_native
def test_fork():
    run("""
import os
check(checkpoint(f, x))
pid = os.fork()
if pid == 0:
    try:
        check(checkpoint(f, x))
        torch.autograd.backward(f(x).sum())
    except BaseException:
        os._exit(1)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
check(checkpoint(f, x))
""")


@needs_native
def test_compiled_autograd():
    run("""
from torch._dynamo import compiled_autograd
out = checkpoint(f, x).sum()
with compiled_autograd._enable(torch.compile(backend="eager")):
    out.backward()
for a, b in zip(expected, (x.grad, w.grad)): torch.testing.assert_close(a, b)
""")


@needs_native
def test_toggling_between_forward_and_backward():
    run("""
out = checkpoint(f, x)
ms.use_engine_hooks(False)
check(out)
out = checkpoint(f, x)
ms.use_engine_hooks(True)
check(out)
out = checkpoint(lambda a: f(a).sin(), x).sum()
assert out.grad_fn.next_functions[0][0]._saved_self.shape == (3, 4)
""")


def test_bad_argument():
    with pytest.raises(TypeError, match="enabled must be True or False, got "):
        ms.use_engine_hooks(1)


@pytest.mark.skipif(_native.available, reason="in pure Python only")
def test_in_pure_python_it_does_nothing():
    assert ms.use_engine_hooks(True) is False
    assert ms.use_engine_hooks(False) is False
