"""What each thread is doing, as the hooks tell."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

# The order of PHASES in memsave_ext/memory/account.py.
OTHER, FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = range(5)


class Moment(NamedTuple):
    """When and where something happens."""

    time: int  # ns
    thread: int
    in_backward: bool = False
    # The autograd node that runs, named as autograd does; -1: none, or one of no forward.
    node_thread: int = 0
    node_sequence: int = -1


class Where(NamedTuple):
    phase: int
    span: int  # which forward or which recompute that is
    module: int


@dataclass
class Region:
    """One checkpointed region, over all its recomputes."""

    calls: int = 0
    saved_bytes: int = 0  # the most that one recompute left for backward
    nanoseconds: int = 0


@dataclass
class _Recompute:
    span: int
    begin: int
    depth: int  # of modules
    node_module: int  # of the node that needs it: the region's last, or the region's own
    module: int = -1  # that holds all it has entered, -1 before
    bytes: int = 0


class _Open(NamedTuple):
    module: int
    recompute: bool  # it is the recompute of a region that is not ours


@dataclass
class _Thread:
    modules: list[_Open] = field(default_factory=list)
    recomputes: list[_Recompute] = field(default_factory=list)
    # Of the first autograd node made from a mark on: its number, and in which module it is.
    sequences: list[int] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)
    marks_before_step: int = 0
    optimizer: bool = False

    @property
    def inside(self) -> int:
        return self.modules[-1].module if self.modules else -1

    def mark(self, sequence: int) -> None:
        new = len(self.sequences) > self.marks_before_step
        if new and self.sequences[-1] == sequence:
            self.marked[-1] = self.inside  # no node was made since
        else:
            self.sequences.append(sequence)
            self.marked.append(self.inside)


class Threads:
    """``parents[module]`` is the module that holds it, -1 for the outermost."""

    def __init__(self, parents: list[int]) -> None:
        self.regions: defaultdict[int, Region] = defaultdict(
            Region
        )  # by module; -1 where there is none
        self._parents = parents
        self._threads: defaultdict[int, _Thread] = defaultdict(_Thread)
        self._forward = 0  # the number of the present forward
        self._recompute = 0
        self._after_forward = False  # a loss is computed: until backward begins

    def where(self, moment: Moment) -> Where:
        thread = self._threads[moment.thread]
        if thread.recomputes:
            recompute = thread.recomputes[-1]
            inside = thread.inside if thread.inside >= 0 else recompute.module
            return Where(RECOMPUTE, recompute.span, inside)
        if moment.in_backward:
            if not thread.modules:
                self._after_forward = False
            return Where(BACKWARD, 0, self._module_of_node(moment))
        # Before the optimizer, whose step() may be given a closure.
        if thread.modules or self._after_forward:
            return Where(FORWARD, self._forward, thread.inside)
        return Where(OPTIMIZER if thread.optimizer else OTHER, 0, -1)

    def enter_module(self, module: int, sequence: int, moment: Moment) -> None:
        thread = self._threads[moment.thread]
        outermost = not thread.modules
        # A forward inside a backward: somebody's checkpoint. Ours says so itself.
        recompute = moment.in_backward and outermost and not thread.recomputes
        if recompute:
            self.begin_recompute(moment)
        elif outermost and not moment.in_backward:
            self._forward += 1
            self._after_forward = False
        if thread.recomputes:
            holder = thread.recomputes[-1].module
            thread.recomputes[-1].module = module if holder < 0 else self._common(holder, module)
        thread.modules.append(_Open(module, recompute))
        thread.mark(sequence)

    def exit_module(self, module: int, sequence: int, moment: Moment) -> None:
        thread = self._threads[moment.thread]
        depths = [i for i, entered in enumerate(thread.modules) if entered.module == module]
        if not depths:
            return
        # Those above it were left by an exception that their hooks did not see.
        left = thread.modules[depths[-1] :]
        del thread.modules[depths[-1] :]
        thread.mark(sequence)
        if any(entered.recompute for entered in left):
            self.end_recompute(moment)
        if not thread.modules and not moment.in_backward:
            self._after_forward = True

    def begin_recompute(self, moment: Moment) -> None:
        self._recompute += 1
        thread, node_module = self._threads[moment.thread], self._module_of_node(moment)
        thread.recomputes.append(
            _Recompute(self._recompute, moment.time, len(thread.modules), node_module)
        )

    def end_recompute(self, moment: Moment) -> None:
        thread = self._threads[moment.thread]
        if not thread.recomputes:
            return  # it began before tracking
        recompute = thread.recomputes.pop()
        # One that stops early leaves its modules without their hooks.
        del thread.modules[recompute.depth :]
        region = self.regions[self._name(recompute)]
        region.calls += 1
        region.saved_bytes = max(region.saved_bytes, recompute.bytes)
        region.nanoseconds += moment.time - recompute.begin

    def count(self, span: int, bytes_: int) -> None:
        """Of blocks allocated in a recompute, while it runs."""
        for thread in self._threads.values():
            for recompute in thread.recomputes:
                if recompute.span == span:
                    recompute.bytes += bytes_

    def begin_optimizer(self, moment: Moment) -> None:
        self._after_forward = False
        self._threads[moment.thread].optimizer = True

    def end_optimizer(self, moment: Moment) -> None:
        self._threads[moment.thread].optimizer = False

    def end_step(self) -> None:
        """Nodes of graphs from before the previous step are not looked up any more."""
        self._after_forward = False
        for thread in self._threads.values():
            del thread.sequences[: thread.marks_before_step]
            del thread.marked[: thread.marks_before_step]
            thread.marks_before_step = len(thread.sequences)

    def clear(self) -> None:
        """Nothing that is open stays so: tracking begins or ends."""
        self._threads.clear()
        self._after_forward = False

    def _module_of_node(self, moment: Moment) -> int:
        thread = self._threads.get(moment.node_thread)
        if moment.node_sequence < 0 or thread is None:
            return -1
        after = bisect_right(thread.sequences, moment.node_sequence)
        return thread.marked[after - 1] if after else -1

    def _name(self, recompute: _Recompute) -> int:
        if recompute.module < 0:
            return recompute.node_module
        # A recompute that stops early may not enter the region's last module, but its node is in
        # it. The node of an explicit region is outside, in a module that holds all of the region.
        common = self._common(recompute.module, recompute.node_module)
        return recompute.module if common in (-1, recompute.node_module) else common

    def _common(self, a: int, b: int) -> int:
        """The innermost module that holds both."""
        holders = self._holders(b)
        return next((module for module in self._holders(a) if module in holders), -1)

    def _holders(self, module: int) -> list[int]:
        """The module and those that hold it, the outermost last."""
        holders = []
        while module >= 0:
            holders.append(module)
            module = self._parents[module]
        return holders
