"""What surrounds a forward and must surround its recompute.

Settings, autocast, random state and device; and the forward records of the regions whose functions
this thread runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._streams import on_stream
from ..rules import AUTOCAST_DEVICES

_thread = threading.local()


# Called at the begin and end of every recompute while memory is tracked; None otherwise.
recompute_observer: Callable[[bool], None] | None = None


@dataclass(frozen=True)
class AutocastState:
    devices: tuple[tuple[bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def capture() -> AutocastState:
        devices = tuple(
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES
        )
        return AutocastState(devices, torch.is_autocast_cache_enabled())

    def restore(self, cache: bool) -> None:
        for device, (enabled, dtype) in zip(AUTOCAST_DEVICES, self.devices, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)


# What decides how an operator computes, as in csrc/checkpoint/surroundings.cpp: torch's functions
# that get and set it. Those of two flags return and take a tuple.
_C: Any = torch._C
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[..., Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (
            _C._get_deterministic_algorithms(),
            _C._get_deterministic_algorithms_warn_only(),
        ),
        lambda value: _C._set_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (
        _C._get_deterministic_fill_uninitialized_memory,
        _C._set_deterministic_fill_uninitialized_memory,
    ),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    (_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
    (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    (
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda value: _C._set_cublas_allow_fp16_reduced_precision_reduction(*value),
    ),
    (
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda value: _C._set_cublas_allow_bf16_reduced_precision_reduction(*value),
    ),
    (_C._get_linalg_preferred_backend, _C._set_linalg_preferred_backend),
)
_FLOAT32 = tuple(
    (backend, op)
    for backend, ops in {
        "generic": ("all",),
        "mkldnn": ("all", "conv", "rnn", "matmul"),
        "cuda": ("all", "conv", "rnn", "matmul"),
    }.items()
    for op in ops
)


@dataclass(frozen=True)
class Settings:
    """Settings of the process that decide how an operator computes."""

    values: tuple[Any, ...]
    float32: dict[tuple[str, str], str]

    @staticmethod
    def capture() -> Settings:
        return Settings(
            tuple(get() for get, _ in _SETTINGS),
            {key: _C._get_fp32_precision_getter(*key) for key in _FLOAT32},
        )

    def _restore(self, now: Settings) -> None:
        for (_, write), value, present in zip(_SETTINGS, self.values, now.values, strict=True):
            if value != present:
                write(value)
        if self.float32 != now.float32:
            self._restore_float32(now)

    def _restore_float32(self, now: Settings) -> None:
        """torch refuses where its older functions contradict the newer, so they come first."""
        cuda, mkldnn = self.float32["cuda", "matmul"], self.float32["mkldnn", "matmul"]
        if (cuda, mkldnn) != (now.float32["cuda", "matmul"], now.float32["mkldnn", "matmul"]):
            high = "medium" if mkldnn == "bf16" else "high"
            _C._set_float32_matmul_precision(high if cuda == "tf32" else "highest")
        convolution = self.float32["cuda", "conv"]
        if convolution != now.float32["cuda", "conv"]:
            _C._set_cudnn_allow_tf32(convolution not in ("ieee", "none"))
        for key, value in self.float32.items():
            if _C._get_fp32_precision_getter(*key) != value:
                _C._set_fp32_precision_setter(*key, value)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        outer = Settings.capture()
        self._restore(outer)
        try:
            yield
        finally:
            outer._restore(Settings.capture())


@contextlib.contextmanager
def uncached_autocast(state: AutocastState) -> Iterator[None]:
    """The state without its cache: casts made without a graph must not be found by others."""
    outer = AutocastState.capture()
    state.restore(cache=False)
    try:
        yield
    finally:
        outer.restore(outer.cache)


OwnGenerators = dict[torch.Generator, torch.Generator]  # each with a copy in an earlier state


def any_has_drawn(generators: OwnGenerators) -> bool:
    pairs = generators.items()
    return any(not torch.equal(one.get_state(), copy.get_state()) for one, copy in pairs)


class RngState:
    def __init__(self, cpu: torch.Generator, cuda: dict[int, Tensor]) -> None:
        self.cpu, self.cuda = cpu, cuda  # a generator is no tensor, which would count as memory
        self.own: OwnGenerators = {}  # of the user's

    @staticmethod
    def capture(
        devices: Iterable[int] | None = None, own: Iterable[torch.Generator] = ()
    ) -> RngState:
        """``devices``: CUDA's; None: all of them. ``own``: other generators."""
        if devices is None:
            in_use = torch.cuda.is_initialized()
            devices = range(torch.cuda.device_count()) if in_use else ()
        cpu = torch.default_generator.clone_state()
        state = RngState(cpu, {d: torch.cuda.get_rng_state(d) for d in devices})
        state.add(own)
        return state

    def add(self, own: Iterable[torch.Generator]) -> None:
        self.own |= {generator: generator.clone_state() for generator in own}

    def others(self, generators: Iterable[torch.Generator]) -> OwnGenerators:
        """Returns those that have not been added, in their present states."""
        return {one: one.clone_state() for one in generators if one not in self.own}

    def keep(self, devices: Iterable[int]) -> None:
        """Forgets the states of all CUDA devices but these and the current one: on others other
        threads may draw in a recompute, as replicas of nn.DataParallel do."""
        if self.cuda:
            kept = {*devices, torch.cuda.current_device()}
            self.cuda = {d: state for d, state in self.cuda.items() if d in kept}

    def restore(self) -> None:
        torch.set_rng_state(self.cpu.get_state())
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)
        for generator, copy in self.own.items():
            generator.set_state(copy.get_state())


def is_recomputing() -> bool:
    return getattr(_thread, "depth", 0) > 0


@dataclass
class Surroundings:
    """What a recompute must find as its forward did."""

    settings: Settings
    autocast: AutocastState
    rng: RngState | None  # None where random numbers are not replayed
    stream: torch.cuda.Stream | None

    @staticmethod
    def capture(rng: bool = True) -> Surroundings:
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        return Surroundings(
            Settings.capture(), AutocastState.capture(), RngState.capture() if rng else None, stream
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore them, with grad mode on, for a recompute inside the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(on_stream(self.stream))
            stack.enter_context(self.settings.restored())
            stack.enter_context(uncached_autocast(self.autocast))
            if self.rng is not None:
                stack.callback(RngState.capture(self.rng.cuda, self.rng.own).restore)
                self.rng.restore()
            stack.enter_context(torch.enable_grad())
            stack.enter_context(recomputing())
            yield


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    _thread.depth = getattr(_thread, "depth", 0) + 1
    _tell(True)
    try:
        yield
    finally:
        _thread.depth -= 1
        _tell(False)


def _tell(begins: bool) -> None:
    observer = recompute_observer
    if observer is not None:
        observer(begins)


ForwardRecord = dict[Any, Any]
Scope = tuple[ForwardRecord, "ForwardRecord | None", int]


@contextlib.contextmanager
def forward_record_scope(record: ForwardRecord, replaying: bool) -> Iterator[None]:
    scope: Scope = (record, {} if replaying else None, torch._C._current_graph_task_id())
    outer = forward_record_scopes()
    _thread.scopes = (*outer, scope)
    try:
        yield
    finally:
        _thread.scopes = outer


def forward_record_scopes() -> tuple[Scope, ...]:
    """(record, positions, graph task) of each, outermost first; positions is None in a forward."""
    return getattr(_thread, "scopes", ())


def pack_hooks() -> tuple[Callable[[torch.Tensor], Any], ...]:
    """Of torch.autograd.graph.saved_tensors_hooks, outermost first."""
    top: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
    hooks = []
    while (pair := top(True)) is not None:
        hooks.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return tuple(pack for pack, _ in reversed(hooks))
