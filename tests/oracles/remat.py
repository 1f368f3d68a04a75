"""A step whose saved tensors are partly dropped, moment by moment: exact and slow.

Contents, calls and moments are tuples as `memsave_ext._C.remat_plans` takes them:
(bytes, call, saved, let_go, opened, closed), (seconds, reads, makes, writes, temporary) and
(now, peak).
"""

from __future__ import annotations

from typing import NamedTuple

KEEP, DROP, DROP_TWICE, MOVE, MOVE_TWICE = range(5)
SECONDS_PER_CALL = 4e-6
SECONDS_PER_MOVE = 2e-5 + SECONDS_PER_CALL  # of the host, besides the copies


class Content(NamedTuple):
    bytes: int
    call: int
    saved: bool
    let_go: int
    opened: int
    closed: int


class Call(NamedTuple):
    seconds: float
    reads: list[int]
    makes: list[int]
    writes: list[int]
    temporary: int = 0


class Trace(NamedTuple):
    contents: list[Content]
    calls: list[Call]
    moments: list[tuple[int, int]]
    forward: int


class Step:
    """`peak`, `seconds` and `runs` of a step with these decisions.

    `back`: (opened, content); when the first is opened, the second gets the memory into which it is
    copied back.
    """

    def __init__(
        self, trace: Trace, decisions: list[int], back: list[tuple[int, int]] | None = None
    ) -> None:
        self.trace, self.decisions = trace, decisions
        self.backs = [0] * len(trace.contents)
        self.coming: set[int] = set()
        self.runs = [0] * len(trace.calls)
        self.seconds = 0.0
        self.held: set[int] = set()  # contents that were recomputed and not closed
        self.needed: dict[int, int] = {}  # by content: the last moment of a dropped one made of it
        for i, content in enumerate(trace.contents):
            if content.saved and not self.is_based(i) and not self.is_moved(i):
                self.pin(i, content.closed if content.closed >= 0 else len(trace.moments))
        self.points: list[tuple[int, int]] = []  # (moment, bytes recomputed) in recomputations
        opened: list[list[int]] = [[] for _ in trace.moments]
        for i, content in enumerate(trace.contents):
            if content.saved and content.opened >= 0:
                opened[content.opened].append(i)
        between = [0] * len(trace.moments)  # bytes recomputed in the interval before a moment
        for moment in range(len(trace.moments)):
            between[moment] = self.size(self.held | self.coming)
            for i in opened[moment]:
                self.coming |= {other for first, other in back or [] if first == i}
                self.points.append((moment, self.size(self.held | self.coming)))
                if not self.is_there(i):
                    self.recompute(i, moment)
            self.held -= {i for i in self.held if trace.contents[i].closed == moment}
        kept = self.kept()
        at = [peak + between[t] + kept[t] for t, (_, peak) in enumerate(trace.moments)]
        at += [trace.moments[t][0] + extra + kept[t] for t, extra in self.points]
        self.peak = max(at)

    def pin(self, i: int, until: int) -> None:
        """Keeps what a dropped content is made of, directly and further back."""
        for read in self.trace.calls[self.trace.contents[i].call].reads:
            if self.needed.get(read, -1) < until:
                self.needed[read] = until
                if not self.is_based(read) and not self.is_moved(read):
                    self.pin(read, until)

    def size(self, contents) -> int:
        return sum(self.trace.contents[i].bytes for i in contents)

    def is_based(self, i: int) -> bool:
        """Whether its memory is there without a recompute."""
        content = self.trace.contents[i]
        if content.let_go < 0 or (content.call < 0 and not self.is_moved(i)):
            return True
        return content.saved and self.decisions[i] == KEEP

    def is_moved(self, i: int) -> bool:
        return self.decisions[i] >= MOVE

    def is_there(self, i: int) -> bool:
        return self.is_based(i) or i in self.held

    def kept(self) -> list[int]:
        """By moment: bytes that only the block keeps in the interval before it, or at it."""
        trace = self.trace
        kept = [0] * len(trace.moments)
        for i, content in enumerate(trace.contents):
            if not self.is_based(i) or content.let_go < 0:
                continue
            last = self.needed.get(i, -1)
            if content.saved:
                last = max(last, content.closed if content.closed >= 0 else len(trace.moments))
            for t in range(content.let_go + 1, min(last + 1, len(trace.moments))):
                kept[t] += content.bytes
        return kept

    def recompute(self, target: int, moment: int) -> None:
        trace, way = self.trace, {}  # what is on the way: its bytes, by content
        uses = self.count_uses(target)
        state = {"live": 0}

        def note(more: int = 0) -> None:
            state["live"] = self.size(self.held | self.coming) + sum(way.values())
            self.points.append((moment, state["live"] + more))

        def is_awaited(i: int) -> bool:
            content = trace.contents[i]
            if not content.saved or self.decisions[i] not in (DROP, MOVE):
                return False
            if content.closed >= 0:
                return content.closed >= moment
            return content.opened >= moment

        def bring_back(i: int) -> None:
            self.coming.discard(i)
            self.backs[i] += 1
            self.seconds += SECONDS_PER_MOVE
            way["back", i] = trace.contents[i].bytes
            note()
            size = way.pop(("back", i))
            if i == target or is_awaited(i):
                self.held.add(i)
            elif uses.get(i, 0) > 0:
                way[i] = size

        def run(number: int) -> None:
            call = trace.calls[number]
            done = []  # memory that was given to the call, by its made content
            for i in call.reads:
                if not self.is_there(i) and i not in way:
                    bring_back(i) if self.is_moved(i) else run(trace.contents[i].call)
                uses[i] = uses.get(i, 0) - 1
                if i in call.writes:
                    made = call.makes[call.writes.index(i)]
                    if i in way and i not in self.held and uses[i] == 0:
                        del way[i]
                    way["written", number, made] = trace.contents[made].bytes
                    done.append(made)
                    note()
            for made in call.makes:
                if made not in done:
                    way["new", number, made] = trace.contents[made].bytes
            note(call.temporary)
            self.runs[number] += 1
            self.seconds += call.seconds + SECONDS_PER_CALL
            for made in call.makes:
                size = way.pop(("written" if made in done else "new", number, made))
                if self.is_there(made) or self.is_moved(made):
                    continue
                if made == target or is_awaited(made):
                    self.held.add(made)
                elif uses.get(made, 0) > 0:
                    way[made] = size
            for i in call.reads:
                if i in way and uses[i] <= 0:
                    del way[i]

        bring_back(target) if self.is_moved(target) else run(trace.contents[target].call)
        assert not way

    def count_uses(self, target: int) -> dict[int, int]:
        """How many calls of this recomputation read each content."""
        uses: dict[int, int] = {}
        calls: set[int] = set()

        def visit(number: int) -> None:
            if number in calls:
                return
            calls.add(number)
            for i in self.trace.calls[number].reads:
                if not self.is_there(i):
                    uses[i] = uses.get(i, 0) + 1
                    if not self.is_moved(i):
                        visit(self.trace.contents[i].call)

        if not self.is_moved(target):
            visit(self.trace.contents[target].call)
        return uses


def droppable(trace: Trace) -> list[int]:
    return [i for i, c in enumerate(trace.contents) if c.saved and c.call >= 0 and c.let_go >= 0]
