"""Functions in a child process: what comes back, how it ends, and that nothing else is left."""

import contextlib
import fcntl
import gc
import io
import multiprocessing
import os
import pickle
import random
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import Shared
from sampling import share, some
from torch import nn

import memsave_ext as ms
from memsave_ext.dry_run import child
from memsave_ext.dry_run.child import Child, ChildError, in_child

NATIVE = ms._native.available


def children():
    """Those of this process, running or dead."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit():
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                found += [name] if int(fields[1]) == os.getpid() else []
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    def state():
        return sorted(os.listdir("/proc/self/fd")), ms.is_dry_run(), child.tensors, children()

    in_child(int, 10)  # imports what fakes need
    before = state()
    yield
    gc.collect()
    assert state() == before


def test_what_it_returns():
    value = {"a": [1, 2.5, "x"], "b": (None, torch.float32)}
    assert in_child(lambda: value, 10) == value
    assert in_child(lambda: "x" * (1 << 22), 10) == "x" * (1 << 22)  # more than a pipe holds
    assert in_child(ms.is_dry_run, 10) is True


def test_it_changes_nothing_here():
    here = [1]

    def change():
        here.append(2)
        os.environ["MEMSAVE_EXT_TEST"] = "1"
        random.seed(1)
        torch.manual_seed(1)
        return len(here)

    before = random.getstate(), torch.get_rng_state()
    assert in_child(change, 10) == 2
    assert here == [1] and "MEMSAVE_EXT_TEST" not in os.environ
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_random_numbers_are_those_that_come_next():
    expected = in_child(lambda: (random.random(), torch.rand(2).tolist()), 10)
    assert (random.random(), torch.rand(2).tolist()) == expected


class OfTheUser(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)
        self.code = code


def failing(error):
    def fail():
        raise error

    return fail


def test_errors_come_back_as_they_are():
    with pytest.raises(OfTheUser) as info:
        in_child(failing(OfTheUser(7, "no")), 10)
    assert info.value.code == 7 and info.value.args == (7, "no")
    assert "in fail" in str(info.value.__cause__)  # the traceback there

    class Local(ValueError):
        pass

    with pytest.raises(ValueError, match="Local: 5 apples"):
        in_child(failing(Local("5 apples")), 10)
    with pytest.raises(KeyError, match="x"):
        in_child(failing(KeyError("x")), 10)
    with pytest.raises(ChildError, match="calls sys.exit"):
        in_child(lambda: sys.exit(3), 10)
    with pytest.raises(ChildError, match="KeyboardInterrupt"):
        in_child(failing(KeyboardInterrupt()), 10)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        in_child(lambda: lambda: None, 10)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os._exit(5), "has ended with exit status 5"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "has ended with SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "has ended with SIGTERM"),
    ],
)
def test_children_that_die(end, told):
    with pytest.raises(ChildError, match=told):
        in_child(end, 10)


@pytest.mark.once
def test_one_that_stands_still_is_made_once_more():
    begun, lock = Shared(), threading.Lock()

    def wait():
        begun.append(1)
        if len(begun.values()) == 1:
            lock.acquire()
        return "done"

    lock.acquire()
    assert in_child(wait, 60) == "done"
    assert len(begun.values()) == 2
    begun.clear()
    with pytest.raises(
        ChildError, match=r"made no progress: it waits for another thread.*`if not .*"
    ):
        in_child(lambda: (begun.append(1), lock.acquire()), 60)
    assert len(begun.values()) == 2


@pytest.mark.once
@pytest.mark.parametrize(
    "wait",
    [
        lambda: time.sleep(1.6),
        lambda: subprocess.run(["sleep", "1.6"], check=True),
        lambda: threading.Event().wait(1.6) or True,
    ],
)
def test_one_that_waits_for_what_comes(wait):
    begun = Shared()
    assert in_child(lambda: (begun.append(1), wait()) and 7, 60) == 7
    assert len(begun.values()) == 1


def test_what_the_system_does_not_say_is_no_wait_for_locks():
    assert not child._waits_for_locks(1 << 30)  # there is no such process
    assert not child._waits_for_locks(os.getpid())  # it runs


@pytest.mark.once
def test_time_until_a_result_is_read_does_not_count():
    child = Child(lambda: b"x" * (1 << 20), 1.0)  # more than a pipe holds
    written = select.poll()
    written.register(child._read, select.POLLIN)
    assert written.poll(60_000)
    time.sleep(max(child._begun + 1.2 - time.monotonic(), 0))
    assert len(child.result()) == 1 << 20


@pytest.mark.once
def test_one_that_talks_for_ever_takes_too_long():
    def talk():
        while True:
            child.note(None)

    with pytest.raises(ChildError, match=r"longer than 0\.5 s"):
        in_child(talk, 0.5)


@pytest.mark.once
def test_one_that_takes_too_long():
    def loop():
        while True:
            pass

    begin = time.monotonic()
    with pytest.raises(
        ChildError, match=r"longer than 0\.5 s; .*`if not memsave_ext.is_dry_run\(\):`"
    ):
        in_child(loop, 0.5)
    assert time.monotonic() - begin < 5

    def longer():
        child.allow(60)
        while time.monotonic() < begin + 3.5:
            pass
        return 1

    begin = time.monotonic()
    assert in_child(longer, 3) == 1  # on a busy machine a child begins late


@pytest.mark.once
def test_more_time_is_never_less():
    # the parent reads what is allowed while the child adds to it
    def notes():
        for _ in range(10000):
            for _ in range(20):
                child.allow(0)
            child.note(None)
        return 1

    assert in_child(notes, 60) == 1


def test_what_it_notes():
    seen = []
    assert in_child(lambda: [child.note(i) for i in range(3)] and 1, 10, seen.append) == 1
    assert seen == [0, 1, 2]


def test_warnings_come_back():
    with pytest.warns(UserWarning, match="of the user"):
        in_child(lambda: warnings.warn("of the user", stacklevel=1), 10)


def test_it_is_silent_and_writes_no_files(tmp_path, capfd):
    path = tmp_path / "log"
    with open(path, "w") as log:
        log.write("here\n")  # is in a buffer, also of the child

        def write():
            print("out")
            print("err", file=sys.stderr)
            os.write(1, b"out")
            log.write("there\n")
            log.flush()

        with pytest.raises(OSError, match="File too large: what runs ahead .* writes no files"):
            in_child(write, 10)
    assert path.read_text() == "here\n"
    assert capfd.readouterr() == ("", "")
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    with child.writing_files():
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == soft

    def write_own():
        with child.writing_files():
            path.write_text("there")

    in_child(write_own, 10)
    assert path.read_text() == "there"


def _save(folder):
    torch.save([1], folder / "file")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: open(folder / "file", "w").close(),
        lambda folder: open(folder / "new", "a").close(),
        lambda folder: os.open(folder / "file", os.O_RDWR | os.O_TRUNC),
        _save,
        lambda folder: os.truncate(folder / "file", 0),
        lambda folder: os.remove(folder / "file"),
        lambda folder: shutil.rmtree(folder),
        lambda folder: os.rename(folder / "file", folder / "new"),
        lambda folder: os.ftruncate(os.open(folder / "file", os.O_RDWR), 0),
        lambda folder: os.makedirs(folder / "new"),
        lambda folder: os.symlink(folder / "file", folder / "new"),
        lambda folder: tempfile.mkdtemp(dir=folder),
        lambda folder: os.chmod(folder / "file", 0o600),
        lambda folder: os.fchmod(os.open(folder / "file", os.O_RDONLY), 0o600),
        lambda folder: os.chown(folder / "file", -1, -1),
        lambda folder: os.utime(folder / "file"),
        lambda folder: os.setxattr(folder / "file", "user.new", b"1"),
        lambda folder: os.removexattr(folder / "file", "user.new"),
        lambda folder: sqlite3.connect(folder / "new"),
    ],
)
def test_it_changes_no_files(tmp_path, change):
    (tmp_path / "file").write_text("here")
    with pytest.raises(OSError, match="Read-only file system: what runs ahead .* writes no files"):
        in_child(lambda: change(tmp_path), 10)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "here"


def test_a_link_to_nothing_stays(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(OSError, match="writes no files"):
        in_child(lambda: os.remove(tmp_path / "link"), 10)
    assert (tmp_path / "link").is_symlink()


def test_what_changes_no_file(tmp_path):
    def work():
        open(os.devnull, "w").close()
        os.makedirs(tmp_path, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.remove(tmp_path / "none")
        with pytest.raises(FileExistsError):
            os.mkdir(tmp_path)
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            os.truncate(file.fileno(), 0)
        torch.save([1], io.BytesIO())
        for database in (tmp_path / "data", ":memory:", "", f"file:{tmp_path / 'data'}?mode=ro"):
            sqlite3.connect(database, uri=str(database).startswith("file:")).execute("select 1")
        with child.writing_files():
            (tmp_path / "file").write_text("own")
        return True

    sqlite3.connect(tmp_path / "data").execute("create table numbers(number)")
    assert in_child(work, 10)
    assert (tmp_path / "file").read_text() == "own"


def test_places_in_open_files_stay(tmp_path):
    (tmp_path / "lines").write_text("one\ntwo\nthree\n")
    with (
        open(tmp_path / "lines", encoding="ascii") as lines,
        tempfile.TemporaryFile() as nameless,
        open(tmp_path / "lines", "ab", buffering=0) as end,
    ):
        nameless.write(b"abc")
        nameless.seek(1)
        fcntl.flock(end, fcntl.LOCK_EX)

        def work():
            fcntl.flock(end, fcntl.LOCK_UN)
            return next(lines), nameless.read(), end.tell()

        assert in_child(work, 10) == ("one\n", b"bc", 14)
        assert next(lines) == "one\n"
        assert nameless.read() == b"bc"
        with open(tmp_path / "lines", "ab") as another, pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("fails", [False, True])
def test_processes_that_it_starts_end_with_it(fails):
    read, write = os.pipe()

    def work():
        subprocess.Popen(["sleep", "60"], pass_fds=[write])
        if fails:
            os._exit(1)

    with pytest.raises(ChildError) if fails else contextlib.nullcontext():
        in_child(work, 10)
    os.close(write)
    with open(read, "rb") as pipe:
        assert select.select([pipe], [], [], 10)[0]  # nobody has its other end
        assert not pipe.read()


@pytest.mark.once
def test_workers_are_told_to_be_left_out():
    data = torch.utils.data.DataLoader(
        torch.zeros(4), num_workers=1, multiprocessing_context=multiprocessing.get_context("fork")
    )
    with pytest.raises(OSError, match=r"too large: .*a DataLoader need.*is_dry_run\(\)"):
        in_child(lambda: iter(data), 30)


@pytest.mark.once
def test_in_a_process_that_may_open_few_files_more():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    filled = [os.dup(0)]
    while filled[-1] < highest:  # the limit is one of numbers, of which those in between are free
        filled.append(os.dup(0))
    told = set()
    for free in range(1, 8):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1 + free, limits[1]))
            told.add(in_child(lambda: "well", 10))
        except OSError as error:
            told.add(error.strerror)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for number in filled:
        os.close(number)
    assert told == {"Too many open files", "well"}


@pytest.mark.once
def test_in_a_process_that_has_many_files_open():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("the system allows too few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert in_child(lambda: 7, 10) == 7


WITHOUT_STANDARD_FILES = """
import os, sys
from memsave_ext.dry_run.child import in_child
os.close(0), os.close(1)
print(in_child(lambda: 7, 30), file=sys.stderr)
"""


@pytest.mark.once
def test_in_a_process_without_standard_files():
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_STANDARD_FILES], capture_output=True, text=True
    )
    assert ran.stderr.split()[-1:] == ["7"], ran.stderr


@pytest.mark.once
@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_users_handlers_of_sigchld(handler):
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        assert in_child(lambda: 1, 10) == 1
        with pytest.raises(ChildError, match="has ended"):
            in_child(lambda: os._exit(3), 10)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_signals_are_the_parents():
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        default = in_child(lambda: signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, 10)
        assert default and in_child(lambda: os.kill(os.getpid(), signal.SIGINT) or 1, 10) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_ends_the_child():
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_child(lambda: (child.note(1), time.sleep(60)), 60, interrupt)


def test_several_at_a_time():
    children = [Child(lambda i=i: ("x" * (1 << 20), i), 10) for i in range(4)]
    assert [c.result()[1] for c in reversed(children)] == [3, 2, 1, 0]
    Child(lambda: time.sleep(60), 60).stop()


@pytest.mark.once
def test_children_of_two_threads_do_not_have_each_others_pipes(monkeypatch):
    def ends_to_write():
        flags = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                    flags.append(fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE)
        return flags.count(os.O_WRONLY)

    alone, fork, begins = in_child(ends_to_write, 10), child._fork, threading.Event()

    def slow():
        if threading.current_thread() is not threading.main_thread():
            begins.set()
            time.sleep(0.5)
        return fork()

    monkeypatch.setattr(child, "_fork", slow)
    thread = threading.Thread(target=in_child, args=(int, 10))
    thread.start()
    assert begins.wait(10) and in_child(ends_to_write, 10) == alone
    thread.join()


class Monitoring:
    """As sys.monitoring, of which a debugger has the tool 0 and a profiler the tool 2."""

    events = SimpleNamespace(NO_EVENTS=0, PY_START=1, LINE=32)

    def __init__(self):
        self.heard = {(tool, event): print for tool in (0, 2) for event in (1, 32)}
        self.set = {0: 33, 2: 1}

    def get_tool(self, tool):
        return "a name" if tool in self.set else None

    def set_events(self, tool, events):
        assert tool in self.set
        self.set[tool] = events

    def register_callback(self, tool, event, function):
        self.heard[tool, event] = function


def test_debuggers_hear_nothing_of_a_child(monkeypatch):
    monitoring = Monitoring()
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    heard, events = in_child(lambda: ([*monitoring.heard.values()], monitoring.set), 10)
    assert heard == [None] * 4 and events == {0: 0, 2: 0}
    assert monitoring.set == {0: 33, 2: 1} and print in monitoring.heard.values()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12")
def test_lines_of_a_child_are_not_monitored():
    monitoring, heard = sys.monitoring, Shared()
    monitoring.use_tool_id(3, "a test")

    def called():
        return 7

    try:
        monitoring.register_callback(3, monitoring.events.PY_START, lambda *_: heard.append(1))
        monitoring.set_local_events(3, called.__code__, monitoring.events.PY_START)
        assert called() == 7 and len(heard.values()) == 1
        assert in_child(called, 10) == 7 and len(heard.values()) == 1
    finally:
        monitoring.set_local_events(3, called.__code__, 0)
        monitoring.free_tool_id(3)


@pytest.mark.once
def test_beside_busy_threads():
    stop = threading.Event()

    def train():
        model = nn.Linear(64, 64)
        while not stop.is_set():
            model(torch.randn(64, 64)).sum().backward()

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        numbers = some(range(20), 5)
        assert [in_child(lambda i=i: i, 20) for i in numbers] == numbers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Removes:
    def __init__(self, path):
        self.path = path

    def __del__(self):
        self.path.unlink()


def test_what_only_another_thread_holds_is_not_destroyed(tmp_path):
    """Python clears the states of all threads but the one that forks."""
    paths = [tmp_path / name for name in ("here", "there")]
    held, got = threading.local(), []
    end, holds = threading.Event(), threading.Event()

    def hold(path):
        path.touch()
        held.value = Removes(path)

    def wait():
        hold(paths[1])
        holds.set()
        end.wait()

    hold(paths[0])
    waiting = threading.Thread(target=wait)
    waiting.start()
    holds.wait()
    forks = threading.Thread(target=lambda: got.append(in_child(lambda: 7, 10)))
    forks.start()
    forks.join()
    there = [path.exists() for path in paths]
    end.set()
    waiting.join()
    del held.value
    assert got == [7] and there == [True, True]
    assert not any(path.exists() for path in paths)


@pytest.mark.once
def test_a_child_in_a_child():
    def inside():
        return in_child(lambda: (ms.is_dry_run(), 7), 30)

    assert in_child(inside, 30) == (True, 7)

    def slow():  # the outer one waits, and does not stand still
        return in_child(lambda: sum(range(100_000_000)) > 0, 60)

    assert in_child(slow, 60)


def nested(depth):
    """A backward inside of another's, so many times."""

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, left):
            ctx.left = left
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.left:
                with torch.enable_grad():
                    x = grad.detach().clone().requires_grad_()
                    Inside.apply(x, ctx.left - 1).sum().backward()
                return x.grad, None
            return grad, None

    x = torch.ones(3, requires_grad=True)
    Inside.apply(x, depth).sum().backward()
    return x.grad.tolist()


BACKWARDS = {
    "one root": lambda x, w: (x @ w).square().sum().backward(),
    "two roots": lambda x, w: torch.autograd.backward([(x @ w).sum(), (x * 2).sum()]),
    "a gradient": lambda x, w: torch.autograd.backward([x @ w], [torch.ones(4, 4)]),
    "of inputs": lambda x, w: w.backward(*torch.autograd.grad((x @ w).exp().sum(), w)),
    "nothing needed": lambda x, w: torch.autograd.grad(
        (x @ w).sum(), torch.ones(1, requires_grad=True), allow_unused=True
    ),
    "twice": lambda x, w: torch.autograd.grad(
        (x @ w).pow(3).sum(), w, create_graph=True
    )[0].sum().backward(),
    "kept": lambda x, w: [(y := (x @ w).sum()).backward(retain_graph=True), y.backward()],
    "checkpoints": lambda x, w: torch.utils.checkpoint.checkpoint(
        lambda a: (a @ w).tanh(), x, use_reentrant=True
    ).sum().backward(),
    "other checkpoints": lambda x, w: torch.utils.checkpoint.checkpoint(
        lambda a: (a @ w).tanh(), x, use_reentrant=False
    ).sum().backward(),
    "ours": lambda x, w: ms.checkpoint(lambda a: (a @ w).tanh(), x).sum().backward(),
}  # fmt: skip


def gradients_of(name):
    torch.manual_seed(0)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    BACKWARDS[name](x, w)
    return [None if t.grad is None else t.grad.tolist() for t in (x, w)]


@pytest.mark.skipif(not NATIVE, reason="torch's engine refuses such a child")
@pytest.mark.parametrize("name", share(BACKWARDS, 2))
def test_backwards_where_torchs_engine_refuses(name):
    """It does after a first backward of CUDA, and of so many nested ones on the CPU."""
    expected = gradients_of(name)
    assert nested(70) == [1, 1, 1]
    if (pid := os.fork()) == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert in_child(lambda: gradients_of(name), 20) == expected
    assert in_child(lambda: nested(100), 20) == [1, 1, 1]


@pytest.mark.skipif(not NATIVE, reason="torch's engine refuses such a child")
def test_errors_in_backwards():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise OfTheUser(1, "in backward")

    def run():
        x = torch.ones(2, requires_grad=True)
        for _ in range(2):
            with pytest.raises(OfTheUser, match="in backward"):
                Fails.apply(x * 2).sum().backward()
        (x * 3).sum().backward()
        return x.grad.tolist()

    assert in_child(run, 20) == [3, 3]


PROGRAM = """
import resource, torch, memsave_ext as ms
from torch import nn
torch.set_num_threads(1)  # others could not be made
model, x = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]), torch.randn(64, 512)
ms.memory.predict(model, None, x, loss=lambda y: y.sum())
used = sum(int(line.split()[1]) << 10 for line in open("/proc/self/status") if "VmData" in line)
resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20),) * 2)
print(ms.memory.predict(model, None, x, loss=lambda y: y.sum()).peak > 0)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
import os; os.setuid(65534)
handle = ms.remat_module(model, budget=0.5)
model(x).sum().backward()
print(handle.report())
try:
    ms.memory.predict(model, None, x, loss=lambda y: y.sum())
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(not NATIVE, reason="budgets need the native part")
@pytest.mark.skipif(os.getuid() != 0, reason="another user cannot be taken away its processes")
def test_limits():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    out = " ".join(ran.stdout.split())
    assert out.startswith("True"), ran.stderr
    assert out.count("no child process can be made: Resource temporarily unavailable") == 2
