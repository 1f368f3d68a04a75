"""A child process made by ``fork``: what runs there leaves nothing behind but its result.

It is a copy of this process that the operating system makes, with closures, caches, hooks and
registries. So a step may run there that must not change anything here. Effects outside of memory
are the exception: sockets, pipes, shared memory, and files that are changed by another program, by
``truncate()`` of an open one, or by a library without Python.
"""

from __future__ import annotations

import errno
import functools
import gc
import os
import pickle
import random
import select
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from .. import _native
from ..fakes import patches
from ..fakes.mode import new_mode
from ..shared.warn import warn

Result = TypeVar("Result")

_TOOLS = 6  # the most that sys.monitoring takes
_STUCK = 5.0  # seconds after which one is stuck whose threads wait for locks: waits may have an end
_LOOK = 0.1  # seconds between two looks at it
_HEADER = struct.Struct("q")  # bytes of a message
_NO_FILES = (
    "what runs ahead on fake tensors writes no files, and has no new semaphores or shared memory, "
    "which workers of a DataLoader need: make the batch outside of the step, or leave out what "
    "writes where memsave_ext.is_dry_run() is true"
)
# Events of audits: which argument is a path, which one the folder that it begins at, if any, and
# whether it was there before.
_CHANGES_OF_FILES = {
    "os.mkdir": (0, 2, False), "os.link": (1, 3, False), "os.symlink": (1, 2, False),
    "os.remove": (0, 1, True), "os.rmdir": (0, 1, True), "os.rename": (0, 2, True),
    "os.truncate": (0, None, True), "os.chmod": (0, 2, True), "os.chown": (0, 3, True),
    "os.utime": (0, 3, True), "os.setxattr": (0, None, True), "os.removexattr": (0, None, True),
}  # fmt: skip
# Else a child of another thread would have this end of a pipe, too, which then never ends.
_one_fork: Any = threading.Lock()
os.register_at_fork(after_in_child=_one_fork._at_fork_reinit)  # a step may predict there
_pipe = -1  # in a child: where its messages go
tensors: list[Tensor] = []  # in a child: all of the process
_modules: list[nn.Module] = []  # likewise
_held: list[Any] = []  # in a child: what stays alive
_may_write = False  # in a child: to files


def is_dry_run() -> bool:
    """Whether this is a process in which a step runs ahead on fake tensors.

    A model that does something outside of memory, as sending a message, can leave it out there.
    """
    return _pipe >= 0


class ChildError(RuntimeError):
    """A child gave no result; the message is a clause that says why."""


class _RemoteTraceback(Exception):
    """The cause of an error that was raised in a child: where that was, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Child(Generic[Result]):
    """A function that runs in a child process, from now on.

    Args:
        function: takes no arguments and returns what can be pickled.
        seconds: how long it may take; :func:`allow` adds to them.
        tell: called with each value that the child gives to :func:`note`.

    Raises:
        ChildError: no process can be made.
    """

    def __init__(
        self,
        function: Callable[[], Result],
        seconds: float,
        tell: Callable[[Any], object] = lambda _: None,
    ) -> None:
        self._function, self._seconds, self._tell = function, seconds, tell
        self._pid = 0  # 0: there is none
        self._fork()

    def result(self) -> Result:
        """Waits for what the function returns, or raises what it has raised.

        A child that stands still, as one may that was made while another thread held a lock, is
        made once more.

        Raises:
            ChildError: the child has ended without a result, stands still, or takes too long.
        """
        try:
            try:
                return self._receive()
            except _StillError:
                self.stop()
                self._fork()
                return self._receive()
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the child, if it has not ended."""
        pid, self._pid = self._pid, 0
        if not pid:
            return
        os.close(self._read)
        _kill(pid)
        with suppress(ChildProcessError):  # where SIGCHLD is ignored
            os.waitpid(pid, 0)

    def _fork(self) -> None:
        global _pipe
        _import()
        state, threads = random.getstate(), torch.get_num_threads()
        cards = torch.cuda.device_count() if torch.cuda.is_initialized() else None
        with _one_fork:
            read, write = os.pipe()
            try:
                pid = _fork()
            except OSError as error:
                os.close(read)
                os.close(write)
                raise ChildError(f"no child process can be made: {error.strerror}") from error
            if pid == 0:
                try:
                    _pipe = write
                    with suppress(Exception):
                        _stop_following()
                    os.close(read)
                    _run(self._function, state, threads, cards)
                finally:
                    os._exit(0)
            os.close(write)
            _lead_group(pid)
        self._pid, self._read = pid, read
        self._begun = time.monotonic()

    def _receive(self) -> Result:
        begun = moved = time.monotonic()
        busy, allowed = -1.0, self._seconds
        was_still = False
        received = bytearray()
        look = select.poll()  # select() takes no descriptors from 1024 on
        look.register(self._read, select.POLLIN)
        while True:
            ready = look.poll(1000 * _LOOK)
            now = time.monotonic()
            if ready:
                part = os.read(self._read, 1 << 20)
                if not part:
                    raise ChildError(self._end())
                received += part
                moved = now
                while (message := _taken(received)) is not None:
                    kind, value = pickle.loads(message)
                    if kind in ("result", "error"):
                        return self._unpacked(kind, value)
                    if kind == "allow":
                        allowed += value
                    elif kind == "note":
                        self._tell(value)
            elif is_dry_run():  # this is a child, too, which moves
                _send(("waits", None))
            if (seconds := _seconds_of(self._pid)) != busy:
                moved, busy = now, seconds
            # Twice in a row: a thread that has just been woken waits for nothing that is named.
            is_still = now - moved > _STUCK and _waits_for_locks(self._pid)
            if is_still and was_still:
                raise _StillError(
                    "the child process that ran it on fake tensors made no progress: it waits for "
                    "another thread, and has none of its parent's; leave out what waits by "
                    "`if not memsave_ext.is_dry_run():`"
                )
            was_still = is_still
            # What there is to read may have waited for this process, which was not reading yet, and
            # the rest of a message has nothing left to compute.
            if not received and now - (begun if ready else self._begun) > allowed:
                raise LateError(
                    f"running it on fake tensors took longer than {allowed:.3g} s; leave out what "
                    "takes long beside computing by `if not memsave_ext.is_dry_run():`"
                )

    def _unpacked(self, kind: str, value: Any) -> Result:
        if kind == "result":
            result, told = value
            for text, category in told:
                warn(text, category)
            made: Result = result
            return made
        error, trace = value
        error.__cause__ = _RemoteTraceback(trace)
        raise error

    def _end(self) -> str:
        """Returns how the child has ended, which has closed its pipe."""
        pid, self._pid = self._pid, 0
        os.close(self._read)
        _kill(pid)
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:
            return "the child process that ran it has ended"
        code = os.waitstatus_to_exitcode(status)
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"the child process that ran it on fake tensors has ended with {how}"


class LateError(ChildError):
    """A child takes too long."""


class _StillError(ChildError):
    pass


def in_child(
    function: Callable[[], Result],
    seconds: float,
    tell: Callable[[Any], object] = lambda _: None,
) -> Result:
    """Returns what the function returns in a child process; see :class:`Child`."""
    return Child(function, seconds, tell).result()


def allow(seconds: float) -> None:
    """Lets the child in which it is called take more time."""
    if is_dry_run():
        _send(("allow", seconds))


def note(value: Any) -> None:
    """Tells the parent of the child in which it is called."""
    _send(("note", value))


@contextmanager
def writing_files() -> Iterator[None]:
    """Lets a child write to files inside the block, which it cannot otherwise."""
    if not is_dry_run():
        yield
        return
    import resource  # Windows has none, and no fork

    global _may_write
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    before, _may_write = _may_write, True
    try:
        yield
    finally:
        _may_write = before
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _refuse_changes_of_files(event: str, args: tuple[Any, ...]) -> None:
    """In a child: hears of what changes files without writing to them, before it happens."""
    if event not in _CHANGES_OF_FILES and event not in ("open", "sqlite3.connect"):
        return
    if _may_write or not is_dry_run():
        return
    if event == "open":
        path, _, flags = args
        is_emptied = flags & os.O_TRUNC and _size(path)
        is_changed = is_emptied or (flags & os.O_CREAT and _size(path) is None)
    elif event == "sqlite3.connect":
        (path,) = args
        is_file = not os.fsdecode(path).startswith(("file:", ":memory:")) and path
        is_changed = is_file and _size(path) is None
    else:
        place, of_folder, was_there = _CHANGES_OF_FILES[event]
        path, folder = args[place], -1 if of_folder is None else args[of_folder]
        is_changed = _is_there(path, folder) is was_there
    if is_changed:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


def _size(path: Any) -> int | None:
    """Returns the size of the file that is there, 0 of what is none; None where nothing is."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _is_there(path: Any, folder: int) -> bool:
    try:
        if isinstance(path, int):
            return os.fstat(path).st_nlink > 0  # else it has no name, and is nobody else's
        os.lstat(path, dir_fd=None if folder == -1 else folder)
    except OSError:
        return False
    return True


@functools.cache
def _import() -> None:
    """Imports what fake tensors need: in each child it would take seconds, and what a first step
    imports is compiled in each, as a child writes no files."""
    with suppress(OSError):
        tempfile.gettempdir()  # which writes a file, the first time
    new_mode()
    with _disable_current_modes(), torch.autograd.profiler.record_function("imports"):
        pass


def _fork() -> int:
    if sys.platform != "linux":  # elsewhere libraries do not bear it
        raise OSError(errno.ENOSYS, "fork is used on Linux alone")
    if _native.module:
        return int(_native.module.fork_child())
    # Python clears the states of other threads in a child: what only they hold is to stay.
    global _held
    _held = gc.get_objects() if len(sys._current_frames()) > 1 else []
    with warnings.catch_warnings():  # Python warns where there are other threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        _held = []
    return pid


def _lead_group(pid: int) -> None:
    """Makes a child lead a group of processes: of itself, and of those that it starts."""
    with suppress(OSError):  # it has ended
        os.setpgid(pid, pid)


def _kill(pid: int) -> None:
    """Ends a child, and what it has started that still runs."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _stop_following() -> None:
    """In a child: ends what debuggers, profilers and measures of coverage hear."""
    sys.settrace(None)
    sys.setprofile(None)
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if monitoring is None:
        return
    events = [event for event in vars(monitoring.events).values() if isinstance(event, int)]
    for tool in range(_TOOLS):
        if monitoring.get_tool(tool) is not None:
            monitoring.set_events(tool, 0)
            for event in filter(None, events):  # which single functions may have, too
                monitoring.register_callback(tool, event, None)


class _Engine:
    """In a child: in place of torch's engine for Python."""

    _torchs: Any = torch.autograd.Variable._execution_engine
    run_backward = staticmethod(_native.module.run_backward) if _native.module else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchs, name)


def all_modules() -> list[nn.Module]:
    """In a child: returns the modules of the process and those that were made since."""
    return [*_modules, *(each for each in gc.get_objects() if nn.Module in type(each).__mro__)]


def _find() -> None:
    """In a child: finds the tensors and modules that the garbage collector knows, once, as it takes
    a tenth of a second. What it knows later was made in the child."""
    gc.disable()
    found: list[Any]
    if _native.module:
        found = _native.module.instances(Tensor, nn.Module)
    else:
        gc.unfreeze()  # what is frozen is not found
        found = gc.get_objects()
    tensors[:] = [each for each in found if Tensor in type(each).__mro__]
    _modules[:] = [each for each in found if nn.Module in type(each).__mro__]
    gc.freeze()


def _prepare(state: Any, threads: int, cards: int | None) -> None:
    """Makes the child fit to run what the parent was about to run."""
    global _pipe
    import fcntl  # Windows has neither, and no fork
    import resource

    _lead_group(0)
    _open_files_anew()
    random.setstate(state)  # Python gives each child another
    for one in signal.valid_signals():
        if callable(signal.getsignal(one)):
            signal.signal(one, signal.SIG_DFL)
    # Of a terminal: the parent ends its child, which is in the background there.
    for one in (signal.SIGINT, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(one, signal.SIG_IGN)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # the system ends this one first where memory is short
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # nothing is written to a file twice
    sys.addaudithook(_refuse_changes_of_files)
    if _pipe < 3:  # the parent has closed one of these
        _pipe = fcntl.fcntl(_pipe, fcntl.F_DUPFD_CLOEXEC, 3)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    sys.stdin, sys.stdout, sys.stderr = (open(os.devnull, mode) for mode in ("r", "w", "w"))  # noqa: SIM115
    for each in _get_current_function_mode_stack():
        if isinstance(each, DeviceContext):  # all tensors there are the CPU's
            each.device = torch.device("cpu")
    torch.set_num_threads(1)
    patches.patch(patches.in_child(threads, cards, _Engine() if _native.module else None))
    torch.autograd.set_multithreading_enabled(False)
    torch.clear_autocast_cache()


def _open_files_anew() -> None:
    """Gives a child places of its own in files that are open: else its parent's go on as well."""
    import fcntl

    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with suppress(OSError):  # the descriptor of the list is closed by now, or it may not
            if not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            place, heirs = os.lseek(number, 0, os.SEEK_CUR), os.get_inheritable(number)
            kept = os.O_ACCMODE | os.O_APPEND | os.O_DIRECT
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & kept
            again = os.open(f"/proc/self/fd/{number}", flags)
            os.lseek(again, place, os.SEEK_SET)
            os.dup2(again, number, heirs)
            os.close(again)


def _run(function: Callable[[], Any], state: Any, threads: int, cards: int | None) -> None:
    try:
        _find()
        _prepare(state, threads, cards)
        # A step that runs ahead may itself predict.
        with warnings.catch_warnings(record=True) as caught, _disable_current_modes():
            result = function()
        told = [(str(w.message), w.category) for w in caught]
        message = pickle.dumps(("result", (result, told)))
    except BaseException as error:
        trace = traceback.format_exc()
        message = pickle.dumps(("error", (_as_raised(error), trace)))
    _send(message)


def _as_raised(error: BaseException) -> BaseException:
    """Returns an error that can be pickled; another one where it cannot."""
    kind = type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.EROFS):
        return OSError(error.errno, f"{error.strerror}: {_NO_FILES}", error.filename)
    if isinstance(error, Exception):
        with suppress(Exception):
            if type(pickle.loads(pickle.dumps(error))) is type(error):
                return error
        for base in type(error).__mro__:
            if base.__module__ == "builtins":
                with suppress(Exception):
                    made: BaseException = base(f"{kind}: {error}")
                    return made
    return ChildError("it calls sys.exit()" if kind == "SystemExit" else f"{kind}: {error}")


def _send(message: Any) -> None:
    if not isinstance(message, bytes):
        message = pickle.dumps(message)
    left = memoryview(_HEADER.pack(len(message)) + message)
    while left:
        left = left[os.write(_pipe, left) :]


def _taken(received: bytearray) -> bytes | None:
    """Takes the first message out of what was received; None if it is not complete."""
    if len(received) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack_from(received)
    end = _HEADER.size + size
    if len(received) < end:
        return None
    message = bytes(received[_HEADER.size : end])
    del received[:end]
    return message


def _waits_for_locks(pid: int) -> bool:
    """Whether all threads of a process wait for locks of threads: what else they wait for, such as
    a server, a time or another process, may come. False where the system does not say it."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/wchan", encoding="ascii") as file:
                where = file.read()
            if not where.startswith("futex"):
                return False
    except OSError:
        return False
    return True


def _seconds_of(pid: int) -> float:
    """Returns a number that changes as long as a process moves: the processor time that it has had,
    or, while it is not asleep, the present."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return float(fields[11]) + float(fields[12]) if fields[0] == "S" else time.monotonic()
