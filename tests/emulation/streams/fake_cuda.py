"""A CUDA device for torch's CPU build, whose memory is the host's and whose streams are checked.

Importing it makes ``torch.cuda`` available. It must come before anything asks torch for CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(os.environ["MEMSAVE_EXT_FAKE_CUDA"])  # libfake_cuda.so
# Before torch, which asks once whether there is CUDA.
_library = ctypes.CDLL(str(LIBRARY), ctypes.RTLD_GLOBAL)
_with_the_gil = ctypes.PyDLL(str(LIBRARY))

import torch  # noqa: E402

_library.emulated_take_failures.restype = ctypes.c_void_p
_library.emulated_end_capture.restype = ctypes.c_void_p
_library.emulated_is_capturing.restype = ctypes.c_bool
_library.emulated_has_waited.restype = ctypes.c_bool
_library.emulated_has_waited.argtypes = [ctypes.c_int64, ctypes.c_int64]
_library.emulated_bytes_allocated.restype = ctypes.c_int64
_library.emulated_questions.restype = ctypes.c_int64
_library.emulated_recorded_events.restype = ctypes.c_int64
_library.emulated_take_faults.restype = ctypes.c_int64
_library.emulated_take_most_managed.restype = ctypes.c_int64
_library.emulated_refuse_waits.argtypes = [ctypes.c_bool]
_library.emulated_record_history.argtypes = [ctypes.c_bool]
_library.emulated_allocate_for_a_moment.argtypes = [ctypes.c_size_t]
_library.emulated_check_lock_of_stats.argtypes = [ctypes.c_bool]
_library.emulated_limit_memory.argtypes = [ctypes.c_size_t]
_library.emulated_choose_attention.argtypes = [ctypes.c_int64]
_library.emulated_replay.argtypes = [ctypes.c_void_p]
_library.emulated_seed.argtypes = [ctypes.c_uint64]
_with_the_gil.emulated_let_it_end.restype = ctypes.c_bool
_with_the_gil.emulated_let_it_end.argtypes = [ctypes.c_double]
_free = ctypes.CDLL(None).free
_free.argtypes = [ctypes.c_void_p]

DEVICE = torch.device("cuda", 0)


def take_failures() -> list[str]:
    """What was wrong with the order of work since the last call."""
    text = _library.emulated_take_failures()
    try:
        return ctypes.string_at(text).decode().splitlines()
    finally:
        _free(text)


def has_waited(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> bool:
    """Whether all that is queued on ``other`` comes before what is queued on ``stream`` next."""
    waited: bool = _library.emulated_has_waited(stream.stream_id, other.stream_id)
    return waited


def questions() -> int:
    """How often the allocator was asked for its statistics."""
    count: int = _library.emulated_questions()
    return count


def recorded_events() -> int:
    """How often an event was recorded, by whomever."""
    count: int = _library.emulated_recorded_events()
    return count


def take_faults() -> int:
    """How often work used managed memory that was not on the device, since the last call."""
    count: int = _library.emulated_take_faults()
    return count


def take_most_managed() -> int:
    """The most bytes of managed memory that can have been on the device, since the last call."""
    size: int = _library.emulated_take_most_managed()
    return size


@contextlib.contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Inside, the device has so many bytes, and what does not fit raises OutOfMemoryError."""
    _library.emulated_limit_memory(size)
    try:
        yield
    finally:
        _library.emulated_limit_memory(0)


@contextlib.contextmanager
def recorded_history() -> Iterator[None]:
    """Inside, the allocator says that it records stacks of what it gives and gets back."""
    _library.emulated_record_history(True)
    try:
        yield
    finally:
        _library.emulated_record_history(False)


@contextlib.contextmanager
def attention_by(kernel: torch.nn.attention.SDPBackend) -> Iterator[None]:
    """Inside, torch chooses this kernel for attention on the device; else the one of composites."""
    _library.emulated_choose_attention(kernel.value)
    try:
        yield
    finally:
        _library.emulated_choose_attention(torch.nn.attention.SDPBackend.MATH.value)


def allocate_for_a_moment(size: int) -> None:
    """As an operator does that frees its workspace itself; the peak's statistics begin anew."""
    _library.emulated_allocate_for_a_moment(size)


@contextlib.contextmanager
def lock_of_stats_checked() -> Iterator[None]:
    """Inside, statistics asked for with a lock that reports of allocations take are a failure."""
    _library.emulated_check_lock_of_stats(True)
    try:
        yield
    finally:
        _library.emulated_check_lock_of_stats(False)


def stop_next_allocation() -> None:
    """Whoever allocates next waits for `let_it_end`; it must not have the GIL."""
    _library.emulated_stop_next_allocation()


def wait_until_it_has_stopped() -> None:
    _library.emulated_wait_until_it_has_stopped()


def let_it_end(seconds: float) -> bool:
    """Whether the allocation ends within so many seconds, in which this thread keeps the GIL."""
    return _with_the_gil.emulated_let_it_end(seconds)


class CUDAGraph:
    def capture_begin(self, **_options: object) -> None:
        _library.emulated_begin_capture()

    def capture_end(self) -> None:
        self._graph = _library.emulated_end_capture()

    def replay(self) -> None:
        _library.emulated_replay(self._graph)


@contextlib.contextmanager
def _graph(graph: CUDAGraph) -> Iterator[None]:
    stream = Stream()
    stream.wait_stream(_current_stream())
    with stream:
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def _generator_state() -> torch.Tensor:
    values = (ctypes.c_uint64 * 2)()
    _library.emulated_generator_state(values)
    return torch.tensor(list(values)).view(torch.uint8)


def _set_generator_state(state: torch.Tensor, device: object = None) -> None:
    _library.emulated_set_generator_state((ctypes.c_uint64 * 2)(*state.view(torch.int64).tolist()))


class Stream(torch.Stream):
    def __new__(cls, device: object = None, priority: int = 0) -> Stream:
        return super().__new__(cls, DEVICE)


class Event(torch.Event):
    def __new__(cls, *_arguments: object, **_options: object) -> Event:
        return super().__new__(cls, DEVICE)


def _current_stream(device: object = None) -> torch.Stream:
    return torch.accelerator.current_stream(DEVICE)


def _default_stream(device: object = None) -> torch.Stream:
    return torch.Stream(
        stream_id=0, device_index=0, device_type=int(torch._C._autograd.DeviceType.CUDA)
    )


_resize, _clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone


def _resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize(storage, size)
    torch.ops.emulated.resize_storage(_bytes(storage), size)
    return storage


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _clone(storage)
    return _bytes(storage).clone().untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage)


def _initialise() -> None:
    torch.cuda._initialized = True


def _install() -> None:
    replacements = {
        "_lazy_init": _initialise,
        "init": _initialise,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(DEVICE),
        "is_current_stream_capturing": lambda: _library.emulated_is_capturing(),
        "manual_seed": lambda seed: _library.emulated_seed(seed),
        "manual_seed_all": lambda seed: _library.emulated_seed(seed),
        "is_bf16_supported": lambda *_arguments: True,
        "get_rng_state": lambda device=None: _generator_state(),
        "set_rng_state": _set_generator_state,
        "memory_allocated": lambda device=None: _library.emulated_bytes_allocated(),
        "get_allocator_backend": lambda: "native",
        "get_device_name": lambda device=None: "emulated",
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (0, 0),  # too little for the largest tensors
        "set_sync_debug_mode": lambda mode: _library.emulated_refuse_waits(mode == "error"),
        "CUDAGraph": CUDAGraph,
        "graph": _graph,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.UntypedStorage.resize_ = _resize_storage
    torch.UntypedStorage.clone = _clone_storage


_install()
_initialise()
