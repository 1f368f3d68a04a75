"""``weights_on()``: weights lie in a file, or of a model on CUDA in the memory of the host."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from .. import _native
from ..fakes.mode import is_cuda, predicts
from ..shared.dtensor import is_dtensor
from ..shared.large_memory import LargeMemory
from ..shared.modules import no_hook
from ..shared.tensors import is_shared
from ..store.folder import absolute_folder
from ..store.kept import SMALLEST
from ..store.managed import ManagedMemory
from ..store.mapped import MappedFile, is_mapped, pretend, pretends
from .gradient import is_dense

__all__ = ["Weights", "weights_on"]

_ROOM = 1 << 26  # bytes that may stay mapped, or those of the largest weight
_PAUSE = 0.01  # seconds between two looks at how much is mapped
_PAGE = mmap.PAGESIZE
_STATM = Path("/proc/self/statm")


def weights_on(
    model: nn.Module | Callable[[], nn.Module], where: str | os.PathLike[str]
) -> Weights:
    """Has the weights of a model on the CPU in a file, and of one on CUDA in the host's memory.

    Parameters stay the objects that they are, and tensors as any other: their memory is that of a
    file, mapped, which the kernel reads and writes by pages; on CUDA it is managed memory, which
    kernels use wherever it is. So whatever uses them need not know, optimizers, clipping, averages
    and ``state_dict()`` included, and results are the same to the bit. What is used next comes
    ahead, in the order of the last step, and what was used goes soon: about as many bytes stay
    mapped as the largest weight has, or 64 MiB; on CUDA there are up to four times the weights of
    the largest module on the device, beside what torch's allocator has. Weights of less than 64 KiB
    stay in memory, and so do gradients and optimizer states: see ``in_backward=``, ``grads_on=``
    and ``states_on=`` of :class:`Adam`.

    Args:
        model: is changed in place; its optimizer can be made before or after. Or a function that
            builds it, for one that is too large to be built in memory: each parameter leaves as
            soon as a module has it.
        where: of a model on the CPU a folder, on a local disk; the file has no name, and is gone
            with the process. Of one on CUDA ``"cpu"``: no card has run this yet.

    Returns:
        A handle, with ``model`` and ``remove()``, which has them in memory again.

    Raises:
        TypeError: ``model`` is neither a module nor makes one; ``where`` is no path.
        ValueError: there is no such folder; a parameter is on another device, is a DTensor, has no
            shape yet or shares its memory with other tensors; the system is not Linux; the native
            part for CUDA is not there. Nothing is changed then.
        OSError: there is no room for them in the folder.
        RuntimeError: there is no room for them in the host's memory.
    """
    builds = callable(model) and not isinstance(model, nn.Module)
    if not builds and not isinstance(model, nn.Module):
        raise TypeError(
            "weights_on: model must be a torch.nn.Module or a function that makes one, got "
            f"{type(model).__name__}"
        )
    if not isinstance(where, (str, os.PathLike)):
        raise TypeError(f"weights_on: where must be a folder or 'cpu', got {where!r}")
    if where != "cpu":
        where = absolute_folder(where, "weights_on: where must be a folder that exists, or 'cpu'")
    weights = Weights(where)
    if builds:
        with weights._taking_what_is_built():
            made: Any = model()
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"weights_on: the function must make a torch.nn.Module, got {type(made).__name__}"
            )
        model = made
    weights._take(model)  # type: ignore[arg-type]
    return weights


class Weights:
    """What :func:`weights_on` returns.

    Attributes:
        model: the model, the same object, or the one that was built.
    """

    model: nn.Module

    def __init__(self, where: str) -> None:
        self._where = where
        native = _native.module if _native.module and _native.module.with_cuda else None
        self._memory = ManagedMemory(native) if where == "cpu" else _WatchedFile(where)
        self._uses = _Uses(self._memory)
        self._hooks: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that lie elsewhere."""
        return sum(param.nbytes for param in self._there())

    def remove(self) -> None:
        """Has all weights in memory again. May be called twice.

        Each gets memory of its own: what has had a weight's memory meanwhile, as a ``state_dict()``
        or a parameter that was tied to it by ``.data``, keeps that, with the values of this moment.

        Raises:
            RuntimeError: there is no memory for them. Those that had room are in memory.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for param in self._there():
            param.data = param.data.clone()
        self._uses.large_memory = self._uses.beside = None

    def let_go(self) -> None:
        """Gives the memory of what is in use back. What is used again comes again."""
        self._memory.let_go()

    @property
    def beside(self) -> int:
        """Bytes that stay on a device beside what torch's allocator has, which a prediction has
        counted."""
        return self._memory.room if self._where == "cpu" and not predicts() else 0

    def _take(self, model: nn.Module) -> None:
        """Has the weights of a model elsewhere."""
        self.model = model
        leaving = {name: p for name, p in model.named_parameters() if not is_mapped(p)}
        for name, param in leaving.items():
            if (why := self._why_not(param)) is not None:
                raise ValueError(f"weights_on: {name} {why}")
        large = [param for param in leaving.values() if _may_leave(param)]
        real = [param for param in large if not isinstance(param, FakeTensor)]
        self._memory.reserve(param.nbytes for param in real)
        for param in large:
            self._leave(param)
        for module in model.modules():
            own = list(_own(module))
            self._memory.note(param for param in own if is_mapped(param))
            if any(self._memory.has(param) or pretends(param) for param in own):
                self._hooks += self._uses.watch(module)
        if self._where == "cpu" and predicts():
            self._uses.beside = torch.empty(self._memory.room, dtype=torch.uint8, device="cpu")

    @contextmanager
    def _taking_what_is_built(self) -> Iterator[None]:
        """Inside, each parameter that this thread gives to a module leaves at once, where nothing
        else has its memory; :meth:`_take` asks again."""
        thread = threading.get_ident()

        def hook(_: nn.Module, name: str, param: Any) -> None:
            if threading.get_ident() != thread or not isinstance(param, Tensor):
                return
            if self._why_not(param) is None and _may_leave(param) and not is_mapped(param):
                self._leave(param)

        handle = register_module_parameter_registration_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def _there(self) -> list[nn.Parameter]:
        return [param for param in self.model.parameters() if self._memory.has(param)]

    def _why_not(self, param: Tensor) -> str | None:
        """Returns why a parameter cannot lie elsewhere; None where it can."""
        fits = is_cuda(param.device) if self._where == "cpu" else param.device.type == "cpu"
        if not fits:
            return (
                f"is on {param.device}: weights on the CPU can lie in a folder, and weights on "
                f"CUDA in the host's memory, 'cpu'; got where={self._where!r}"
            )
        if is_lazy(param):
            return "has no shape yet: call the model once before"
        if is_dtensor(param):
            return "is a DTensor: weights of one process only can lie elsewhere"
        if param.layout != torch.strided or not is_dense(param):
            return None if not _may_leave(param) else "is not dense: make it contiguous before"
        if _may_leave(param) and not isinstance(param, FakeTensor) and is_shared(param):
            return (
                "shares its memory with another tensor, as param.data or a state_dict() from "
                "before: drop that tensor before"
            )
        return None

    def _leave(self, param: Tensor) -> None:
        if isinstance(param, FakeTensor):  # a prediction's has no memory
            pretend(param)
            return
        there = self._memory.empty_like(param)
        there.copy_(param.data)
        param.data = there


class _Uses:
    """Which module is called after which, so that its weights are ready. The hooks of modules have
    this, and nothing that has the model: who drops that frees it.

    Attributes:
        large_memory: kept while modules use weights, also where nobody has the handle.
        beside: in a prediction, what stays on a device beside what torch's allocator has.
    """

    def __init__(self, memory: ManagedMemory | _WatchedFile) -> None:
        self._memory = memory
        self._modules: list[weakref.ref[nn.Module]] = []
        self._after: dict[tuple[int, int], int] = {}  # which was called after two others
        self._called = (-1, -1)  # the last two
        self.large_memory: LargeMemory | None = LargeMemory()
        self.beside: Tensor | None = None

    def watch(self, module: nn.Module) -> list[Any]:
        """Returns the hooks by which the module's calls are noticed."""
        call = _Call(self, len(self._modules))
        self._modules.append(weakref.ref(module))
        called = _Called(call)
        return [module.register_forward_pre_hook(call), module.register_forward_hook(called)]

    def note_call(self, number: int) -> None:
        """Has ready what is used now, and what was used after the last two modules when they were
        called before."""
        self._after[self._called] = number
        self._called = self._called[1], number
        following = self._after.get(self._called)
        self._memory.use(self._of(number), self._of(following))

    def _of(self, number: int | None) -> list[Tensor]:
        """Returns the weights of a module of this number that lie elsewhere."""
        module = None if number is None else self._modules[number]()
        return [] if module is None else list(filter(self._memory.has, _own(module)))


class _Call:
    """A hook on a module's forward; in a copy of the module, whose weights are in memory, none."""

    def __init__(self, uses: _Uses, number: int) -> None:
        self._uses, self._number = uses, number

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._uses.note_call(self._number)

    def __reduce__(self) -> Any:
        return no_hook, ()


class _Called:
    """A hook after a module's forward, by which its backward is noticed, too."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __call__(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for value in tree_leaves(output):
            # A parameter that is returned as it is would keep the hook.
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.register_hook(self._call)
                return

    def __reduce__(self) -> Any:
        return no_hook, ()


def _own(module: nn.Module) -> Iterable[Tensor]:
    return [param for param in module._parameters.values() if param is not None]


def _may_leave(param: Tensor) -> bool:
    """Whether it is large, and no class of its own may have more of it than its values."""
    return type(param) in (nn.Parameter, FakeTensor) and param.nbytes >= SMALLEST


class _WatchedFile(MappedFile):
    """A mapped file of which little stays mapped. What uses weights is not known: what the process
    has mapped of all files is one number of the kernel's, which costs next to nothing to read."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, f"weights_on={folder!r}", "weights")
        self._largest = 0
        self._is_watched = False

    @property
    def room(self) -> int:
        """Bytes that may stay mapped."""
        return max(_ROOM, self._largest)

    def reserve(self, sizes: Iterable[int]) -> None:
        self.file.reserve(sizes)

    def empty_like(self, tensor: Tensor) -> Tensor:
        made = super().empty_like(tensor)
        self._largest = max(self._largest, made.nbytes)
        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()
        return made

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Of what is used at once nothing need be known."""

    def use(self, _: Iterable[Tensor], later: Iterable[Tensor]) -> None:
        for tensor in later:
            if (region := self.region_of(tensor)) is not None:
                region.read_ahead()


def _watch(reference: weakref.ref[_WatchedFile]) -> None:
    """Lets go of what is mapped where it is more than may be, until the file is gone."""
    least = sys.maxsize
    while (file := reference()) is not None:
        with suppress(OSError):  # the process may have too many files open for a moment
            mapped = _mapped_bytes()
            if mapped - least > file.room:
                file.let_go()
                mapped = least = _mapped_bytes()
            least = min(least, mapped)
        del file
        time.sleep(_PAUSE)


def _mapped_bytes() -> int:
    return int(_STATM.read_text().split()[2]) * _PAGE
