"""The globals of torch and of libraries that are replaced in a child process, each with the reason.

Nothing is put back: the child ends as it is.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.amp import autocast_mode
from torch.nn import functional
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .cuda import FUSED, on_cpu
from .mode import NotPredicted, predicts
from .values import MOST_KNOWN


class Patch(NamedTuple):
    owner: Any
    name: str
    make: Callable[[Any], Any]  # takes what stands there, returns what takes its place


def patch(patches: Iterable[Patch]) -> None:
    """Replaces globals of this process, for good."""
    for one in patches:
        setattr(one.owner, one.name, one.make(getattr(one.owner, one.name)))


def in_child(threads: int, cards: int | None, engine: Any) -> list[Patch]:
    """Those of all children.

    Args:
        threads: of the parent.
        cards: that the parent has; None where CUDA is not in use there.
        engine: in place of torch's engine for Python, which refuses a child of a process that has
            used its threads; None for torch's.
    """
    found = [
        # The pool of OpenMP's threads is not here. Workspaces are those of the parent's threads.
        Patch(torch, "get_num_threads", _value(lambda: threads)),
        Patch(torch._C, "PyTorchFileWriter", _told_of_file),
    ]
    if cards is not None:  # CUDA, which is in use in the parent, cannot be asked
        found.append(Patch(torch.cuda, "is_available", _value(lambda: cards > 0)))
        found.append(Patch(torch.cuda, "device_count", _value(lambda: cards)))
    if engine is not None:
        found.append(Patch(torch.autograd.Variable, "_execution_engine", _value(engine)))
    return found


def on_fakes(resized: Callable[[torch.UntypedStorage], None]) -> list[Patch]:
    """Those of a step on fake tensors.

    Args:
        resized: is called with a storage of which Python has set the size.
    """
    return [
        # Operators on small tensors of known values compute values.
        Patch(fake_tensor, "CONSTANT_NUMEL_LIMIT", _value(MOST_KNOWN)),
        # The traceback of a fake kernel.
        Patch(fake_tensor.log, "disabled", _value(True)),
        # A module swaps its parameters where it converts them, as in ``model.bfloat16()``. That
        # fails where a weak reference to one exists, and fake tensors' own bookkeeping makes such.
        Patch(torch.utils, "swap_tensors", _swap_tensors),
        # torch would copy memory that is not there.
        Patch(Tensor, "__deepcopy__", _deepcopy),
        # Of a fake one torch takes each element out by operators, which a step does not run.
        Patch(FakeTensor, "tolist", _tolist),
        # torch prints a number by its value where it is of no other class than Tensor.
        Patch(FakeTensor, "__format__", _format),
        # torch adds the bias in place; of fake tensors it makes a sum.
        Patch(functional, "linear", _linear),
        # safetensors lays tensors on a storage of a file's memory, of which fakes know no shape.
        Patch(torch, "asarray", _asarray),
        # Modes are those of one thread: nothing would count what another one makes.
        Patch(threading.Thread, "run", _run_of_thread),
        # FSDP2 makes and frees a gathered parameter's memory so, which no operator shows.
        Patch(torch.UntypedStorage, "resize_", _resize(resized)),
    ]


def of_parameters(adopt: Callable[[Tensor], None]) -> Patch:
    """That of parameters that are made of real memory, such as weights which a library has read
    from a file without an operator.

    Args:
        adopt: makes a fake of a real tensor.
    """

    def make(before: Any) -> Any:
        def new(kind: Any, data: Any = None, requires_grad: bool = True) -> Any:
            made = before(kind, data, requires_grad)
            if predicts():
                adopt(made)
            return made

        return new

    return Patch(nn.Parameter, "__new__", make)


def on_cuda(card: Any = None) -> list[Patch]:
    """Those of a step that is predicted for CUDA, besides: no card need be there.

    Args:
        card: what one has said of itself, with ``properties`` and ``memory``; None for an A100.
    """
    properties, memory = (_A100, (_A100.total_memory,) * 2) if card is None else card
    capability = properties.major, properties.minor
    kind: Any = autocast_mode.autocast
    optimizers = [one for name, one in sys.modules.items() if name.startswith("torch.optim.")]
    return [
        Patch(torch.cuda, "synchronize", _value(_nothing)),
        Patch(torch.cuda, "set_device", _value(_nothing)),
        Patch(torch.cuda, "current_device", _value(lambda: 0)),
        Patch(torch.cuda, "Stream", _value(_Stream)),
        Patch(torch.cuda, "Event", _value(_Stream)),
        Patch(torch.cuda, "current_stream", _value(_Stream)),
        Patch(torch.cuda, "default_stream", _value(_Stream)),
        Patch(torch.cuda, "stream", _value(lambda stream=None: nullcontext())),
        Patch(Tensor, "record_stream", _value(_nothing)),
        # What a step may ask of a card.
        Patch(torch.cuda, "get_device_properties", _value(lambda *_, **__: properties)),
        Patch(torch.cuda, "get_device_name", _value(lambda *_, **__: properties.name)),
        Patch(torch.cuda, "get_device_capability", _value(lambda *_, **__: capability)),
        Patch(
            torch.cuda,
            "is_bf16_supported",
            _value(lambda including_emulation=True: including_emulation or capability >= (8, 0)),
        ),
        Patch(torch.cuda, "mem_get_info", _value(lambda *_, **__: memory)),
        Patch(torch.cuda, "reset_peak_memory_stats", _value(_nothing)),
        Patch(torch.cuda, "empty_cache", _value(_nothing)),
        Patch(torch.cuda, "get_rng_state", _value(_random_state)),
        Patch(torch.cuda, "set_rng_state", _value(_nothing)),
        # It copies into memory of the host, of which nothing counts here.
        Patch(Tensor, "pin_memory", _value(lambda self, *_, **__: self)),
        # A card computes these by other kernels. torch's functions call each other by these names.
        *(Patch(functional, before.__name__, _value(fused)) for before, fused in FUSED.items()),
        # By these torch's optimizers decide how they step; their modules import them by name.
        *(
            Patch(one, name, _with_cpu)
            for one in optimizers
            for name in _DEVICES_OF_OPTIMIZERS
            if hasattr(one, name)
        ),
        # A default device is below the mode in which a step may name a card.
        Patch(DeviceContext, "__init__", _default_device_made),
        # A step may have asked a tensor for its device, which is the CPU here.
        Patch(kind, "__init__", _autocast_made),
        # One that was made before, as accelerate does, is entered as the CPU's.
        Patch(kind, "__enter__", _autocast_entered),
        Patch(kind, "__exit__", _autocast_left),
    ]


def of_libraries(is_known: Callable[[Tensor], bool]) -> list[Patch]:
    """Those of libraries that are imported by now.

    Models of transformers look at no value of a fake tensor, as if a graph were traced, and make
    every mask. They look for padding in tokens that came without a mask. Here they run the
    operators that real steps run.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    models: Any = sys.modules.get("transformers.modeling_utils")
    found = []
    if hasattr(utils, "is_fake_tensor"):  # else not imported, or of another version
        # They make the mask where its values are not known, as of a batch's padding.
        found.append(
            Patch(utils, "is_fake_tensor", lambda is_: lambda x: is_(x) and not is_known(x))
        )
    if hasattr(models, "is_tracing"):  # which only that search asks there
        found.append(Patch(models, "is_tracing", _value(lambda _=None: False)))
        # It warns of padding that fake tokens seem to have.
        found.append(Patch(models.logger, "warning_once", _value(_nothing)))
    return found


def _told_of_file(theirs: Any) -> Any:
    """torch.save() opens a file without Python, whose audits hear of it here."""

    def writer(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str):
            sys.audit("open", file, "w", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return theirs(file, *args, **kwargs)

    return writer


def _value(new: Any) -> Callable[[Any], Any]:
    """Whatever stands there."""
    return lambda _: new


_DEVICES_OF_OPTIMIZERS = (
    "_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices",
)  # fmt: skip


def _with_cpu(before: Any) -> Any:
    return lambda *args, **kwargs: [*before(*args, **kwargs), "cpu"]


def _swap_tensors(before: Any) -> Any:
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        if isinstance(t1, FakeTensor) and isinstance(t2, FakeTensor):
            t1.data = t2.data
        else:
            before(t1, t2)

    return swap_tensors


def _default_device_made(before: Any) -> Any:
    return lambda self, device: before(self, on_cpu(device))


def _deepcopy(before: Any) -> Any:
    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(self, FakeTensor) or not self.is_leaf or id(self) in memo:
            return before(self, memo)
        made: Tensor = self.detach().clone()
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = deepcopy(self.grad, memo)
        return made

    return deepcopy


def _resize(resized: Callable[[torch.UntypedStorage], None]) -> Callable[[Any], Any]:
    def make(before: Any) -> Any:
        def resize_(self: torch.UntypedStorage, size: int) -> Any:
            result = before(self, size)
            if self.device.type == "meta":  # as those of fakes are
                resized(self)
            return result

        return resize_

    return make


def _tolist(before: Any) -> Any:
    def tolist(self: FakeTensor) -> Any:
        if self.constant is None:
            return before(self)
        with unset_fake_temporarily():
            return self.constant.tolist()

    return tolist


def _format(before: Any) -> Any:
    def formatted(self: FakeTensor, format_spec: str) -> Any:
        if self.dim() == 0:
            return format(self.detach().item(), format_spec)
        return before(self, format_spec)

    return formatted


class _OtherThread(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # A question for a tensor's device may come from where C++ takes no error.
        if func.namespace != "prim" and any(issubclass(kind, FakeTensor) for kind in types):
            raise NotPredicted(
                f"predict: {func} runs in a thread that Python code of the step has started, which "
                "is not followed. Pass a step that computes in the thread that calls it"
            )
        return func(*args, **(kwargs or {}))


def _run_of_thread(before: Any) -> Any:
    def run(self: threading.Thread) -> None:
        with _OtherThread():
            before(self)

    return run


def _asarray(before: Any) -> Any:
    def asarray(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, torch.UntypedStorage):
            return before(obj, *args, **kwargs)
        with _disable_current_modes():
            return before(obj, *args, **kwargs)

    return asarray


def _linear(before: Any) -> Any:
    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        flat = input.dim() == 2 or input.is_contiguous()
        if bias is None or flat or not predicts():
            return before(input, weight, bias)
        product = before(input, weight)
        return product.add_(bias.to(product.dtype))

    return linear


_entered: list[tuple[Any, str]] = []  # the autocasts that are open, with the device of each


def _autocast_made(before: Any) -> Any:
    def made(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type not in ("cuda", "cpu"):
            before(self, device_type, dtype, *args, **kwargs)
            return
        before(self, "cpu", dtype or torch.get_autocast_dtype("cuda"), *args, **kwargs)

    return made


def _autocast_entered(before: Any) -> Any:
    def entered(self: Any) -> Any:
        _entered.append((self, self.device))
        if self.device == "cuda":
            self.device = "cpu"
        return before(self)

    return entered


def _autocast_left(before: Any) -> Any:
    def left(self: Any, *error: Any) -> Any:
        result = before(self, *error)
        if _entered and _entered[-1][0] is self:
            self.device = _entered.pop()[1]
        return result

    return left


_A100 = SimpleNamespace(
    name="NVIDIA A100-SXM4-80GB", major=8, minor=0, total_memory=85_094_825_984,
    multi_processor_count=108, warp_size=32, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, regs_per_multiprocessor=1 << 16, L2_cache_size=40 << 20,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=163 << 10,
    shared_memory_per_multiprocessor=164 << 10, is_integrated=0, is_multi_gpu_board=0,
)  # fmt: skip


def _random_state(*_: Any, **__: Any) -> Tensor:
    """A seed and an offset."""
    return torch.zeros(16, dtype=torch.uint8)


_TORCHS = torch.cuda.Stream, torch.cuda.Event


class _Kind(type):
    """torch asks whether objects are streams, also those that were made before."""

    def __instancecheck__(cls, value: object) -> bool:
        return super().__instancecheck__(value) or isinstance(value, _TORCHS)


class _Stream(metaclass=_Kind):
    """A stream or an event: nothing runs, and so nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = synchronize = wait_stream = wait_event = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass
