"""One ``remat`` block: records its thread's operators, and keeps or drops what autograd saves."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from .content import Memory, is_plain
from .policy import Verdict, judge, plan_for, seconds_per_byte
from .recompute import Again, is_paused, paused
from .recorder import Recorder
from .saved import Dropped, Kept, unpack

# [how many storage contents, their bytes, the seconds to recompute the dropped ones as measured in
# the forward]
_Sum = list[float]
_open = threading.local()


class Block:
    """The :class:`Recorder` of one block.

    ``everything``: True drops all that can be recomputed, cheap or not, for tests. None drops
    nothing, to measure what recording costs.
    """

    def __init__(self, everything: bool | None) -> None:
        self._everything = everything
        self._again = Again()
        self._recorder = Recorder(self._again.lock)
        self._saved: dict[tuple[int, str, Verdict], _Sum] = {}
        self._scope = ExitStack()
        self._thread = 0

    def open(self) -> None:
        seconds_per_byte()  # measures the host now, before the block's hooks and mode are active
        self._thread = threading.get_ident()
        self._scope.enter_context(saved_tensors_hooks(self._save, unpack))
        self._scope.enter_context(_Mode(self))
        _open.blocks = (*getattr(_open, "blocks", ()), self)

    def close(self) -> None:
        blocks = getattr(_open, "blocks", ())
        if blocks[-1:] != (self,):
            raise RuntimeError(
                "remat: a block is left in the thread that entered it, and after the blocks inside "
                "it"
            )
        _open.blocks = blocks[:-1]
        self._scope.close()
        self._recorder.clear()

    def enter_module(self, number: int) -> None:
        if threading.get_ident() == self._thread:
            self._recorder.modules.append(number)

    def leave_module(self) -> None:
        if threading.get_ident() == self._thread and len(self._recorder.modules) > 1:
            self._recorder.modules.pop()

    def figures(self) -> dict[str, Any]:
        with self._again.lock:
            return {
                "operators": self._recorder.recorded,
                "saved": [(*maker, *sums) for maker, sums in self._saved.items()],
                "again": [(*maker, *sums) for maker, sums in self._again.sums.items()],
            }

    # called while it is open

    def run(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator; records it unless it is higher-order, or in a backward or recompute.

        A fake tensor is asked for its device by an operator, too, which is no part of the step.
        """
        if isinstance(overload, OpOverload) and overload.namespace != "prim" and _records():
            return self._recorder.run(overload, args, kwargs)
        return overload(*args, **kwargs)

    def _save(self, tensor: Tensor) -> Kept | Dropped:
        if not _records() or not is_plain(tensor):
            with paused():
                return Kept(tensor)
        with self._again.lock, paused():
            memory = self._recorder.content_of(tensor).hold(tensor)
            if memory is None:
                return Kept(tensor)
            if not memory.decided:
                self._decide(memory)
            if memory.dropped and memory.is_computable():
                return Dropped(tensor, memory, self._again)
            return Kept(tensor, memory)

    def _decide(self, memory: Memory) -> None:
        content = memory.content
        plan = None
        if content.call is not None and not content.external:
            plan = plan_for(content)
        verdict = judge(content, plan, self._everything)
        memory.decided = True
        sums = self._saved.setdefault((content.module, content.operator, verdict), [0, 0, 0.0])
        sums[0] += 1
        sums[1] += content.bytes
        if verdict is Verdict.DROPPED and plan is not None:
            sums[2] += plan.seconds
            memory.drop(plan.needs, plan.calls)
        else:  # it is kept, so what is computed from it is recomputed from here
            content.call, content.depth = None, 0


def _records() -> bool:
    """Whether this thread's operators are recorded: not in a backward or a recompute."""
    return torch._C._current_graph_task_id() == -1 and not is_paused()


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, block: Block) -> None:
        super().__init__()
        self._block = block

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code stay compiled under this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._block.run(func, args, kwargs or {})
