"""What each thread is doing, according to the hooks."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from .events import BACKWARD, FORWARD, NOT_IN_BACKWARD, OPTIMIZER, OTHER, RECOMPUTE, Event


@dataclass
class CheckpointedRegion:
    """One checkpointed region, or what ``remat`` recomputes in one module, over all recomputes."""

    calls: int = 0
    saved_bytes: int = 0  # the most bytes that one recompute left for backward
    nanoseconds: int = 0


@dataclass
class _Recompute:
    phase: int
    span: int
    begin: int  # ns
    depth: int  # how many modules the thread was in when it began
    # The module of the autograd node that needs it: the last node of the region or, for an explicit
    # region, the region's own node. -1 if not known.
    node_module: int
    module: int = -1  # the innermost module that holds all it has entered; -1 before it enters one
    bytes: int = 0  # what it allocated and has not freed


class _Open(NamedTuple):
    module: int
    recompute: bool  # entering it began a recompute of another package's checkpoint


@dataclass
class _Thread:
    modules: list[_Open] = field(default_factory=list)
    recomputes: list[_Recompute] = field(default_factory=list)
    # A mark says in which module autograd nodes are made from there on: those from the number
    # `sequences[i]` up to the next mark's are in the module `marked[i]`.
    sequences: list[int] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)
    marks_before_step: int = 0  # how many of the marks are from before the present step
    optimizer: bool = False
    forward: int = 0  # number of its present forward, counted from 1 over all threads

    @property
    def inside(self) -> int:
        return self.modules[-1].module if self.modules else -1

    def mark(self, sequence: int) -> None:
        new = len(self.sequences) > self.marks_before_step
        if new and self.sequences[-1] == sequence:
            self.marked[-1] = self.inside  # no node was made since the last mark
        else:
            self.sequences.append(sequence)
            self.marked.append(self.inside)


class Threads:
    """Keeps track of what each thread is doing.

    ``parents[module]`` is the module that holds it, -1 for the outermost.
    """

    def __init__(self, parents: list[int]) -> None:
        # By phase and the module that names it; -1 if there is none.
        self.regions: defaultdict[tuple[int, int], CheckpointedRegion] = defaultdict(
            CheckpointedRegion
        )
        self._parents = parents
        self._threads: defaultdict[int, _Thread] = defaultdict(_Thread)
        self._forwards = 0  # how many have begun
        self._recompute = 0
        # Threads from the end of their forward until backward begins: they compute the loss.
        self._after_forward: set[int] = set()

    def where(self, thread: int, node_thread: int, node: int) -> tuple[int, int, int]:
        """Returns the phase in which something happens, the number of the forward or recompute (0
        in other phases) and the module."""
        here = self._threads[thread]
        if here.recomputes:
            recompute = here.recomputes[-1]
            inside = here.inside
            return recompute.phase, recompute.span, inside if inside >= 0 else recompute.module
        if node != NOT_IN_BACKWARD:
            if not here.modules:
                self._after_forward.clear()  # of whichever thread the loss is
            return BACKWARD, 0, self._module_of_node(node_thread, node)
        # This comes before the optimizer, whose step() may call a closure that runs a forward.
        if here.modules or thread in self._after_forward:
            return FORWARD, here.forward, here.inside
        return OPTIMIZER if here.optimizer else OTHER, 0, -1

    def enter_module(self, event: Event) -> None:
        _, number, _, _, node, module, sequence, _ = event
        thread = self._threads[number]
        outermost = not thread.modules
        # A forward inside a backward is the recompute of another package's checkpoint. This
        # package's recomputes report themselves.
        in_backward = node != NOT_IN_BACKWARD
        recompute = in_backward and outermost and not thread.recomputes
        if recompute:
            self.begin_recompute(RECOMPUTE, event)
        elif outermost and not in_backward:
            self._forwards += 1
            thread.forward = self._forwards
            self._after_forward.discard(number)
        if thread.recomputes:
            holder = thread.recomputes[-1].module
            thread.recomputes[-1].module = module if holder < 0 else self._common(holder, module)
        thread.modules.append(_Open(module, recompute))
        thread.mark(sequence)

    def exit_module(self, event: Event) -> None:
        _, number, _, _, node, module, sequence, _ = event
        thread = self._threads[number]
        depths = [i for i, entered in enumerate(thread.modules) if entered.module == module]
        if not depths:
            return
        # The modules above it were left by an exception that their hooks did not see.
        left = thread.modules[depths[-1] :]
        del thread.modules[depths[-1] :]
        thread.mark(sequence)
        if any(entered.recompute for entered in left):
            self.end_recompute(event)
        if not thread.modules and node == NOT_IN_BACKWARD:
            self._after_forward.add(number)

    def begin_recompute(self, phase: int, event: Event) -> None:
        _, number, node_thread, time, node, _, _, _ = event
        self._recompute += 1
        thread, node_module = self._threads[number], self._module_of_node(node_thread, node)
        thread.recomputes.append(
            _Recompute(phase, self._recompute, time, len(thread.modules), node_module)
        )

    def end_recompute(self, event: Event) -> None:
        _, number, _, time, _, _, _, _ = event
        thread = self._threads[number]
        if not thread.recomputes:
            return  # it began before tracking
        recompute = thread.recomputes.pop()
        # A recompute that stops early leaves its modules without calling their hooks.
        del thread.modules[recompute.depth :]
        region = self.regions[recompute.phase, self._name(recompute)]
        region.calls += 1
        region.saved_bytes = max(region.saved_bytes, recompute.bytes)
        region.nanoseconds += time - recompute.begin

    def count(self, span: int, bytes_: int) -> None:
        """Adds to the bytes of a recompute, if it still runs; negative ``bytes_`` were freed."""
        for thread in self._threads.values():
            for recompute in thread.recomputes:
                if recompute.span == span:
                    recompute.bytes += bytes_

    def begin_optimizer(self, event: Event) -> None:
        self._after_forward.clear()
        self._threads[event[1]].optimizer = True

    def end_optimizer(self, event: Event) -> None:
        self._threads[event[1]].optimizer = False

    def end_step(self) -> None:
        """Ends a training step and forgets the marks from before it.

        Autograd nodes that old are not looked up any more.
        """
        self._after_forward.clear()
        for thread in self._threads.values():
            del thread.sequences[: thread.marks_before_step]
            del thread.marked[: thread.marks_before_step]
            thread.marks_before_step = len(thread.sequences)

    def clear(self) -> None:
        """Forgets everything that is open, when tracking begins or ends."""
        self._threads.clear()
        self._after_forward.clear()

    def _module_of_node(self, node_thread: int, node: int) -> int:
        thread = self._threads.get(node_thread)
        if node < 0 or thread is None:
            return -1
        after = bisect_right(thread.sequences, node)
        return thread.marked[after - 1] if after else -1

    def _name(self, recompute: _Recompute) -> int:
        if recompute.module < 0:
            return recompute.node_module
        # A recompute that stops early may not enter the region's last module, but the node that
        # needed it is in that module. An explicit region's node is outside the region, in a module
        # that holds all of it.
        common = self._common(recompute.module, recompute.node_module)
        return recompute.module if common in (-1, recompute.node_module) else common

    def _common(self, a: int, b: int) -> int:
        """Returns the innermost module that holds both, -1 if there is none."""
        holders = self._holders(b)
        return next((module for module in self._holders(a) if module in holders), -1)

    def _holders(self, module: int) -> list[int]:
        """Returns the module and those that hold it, the outermost last."""
        holders = []
        while module >= 0:
            holders.append(module)
            module = self._parents[module]
        return holders
