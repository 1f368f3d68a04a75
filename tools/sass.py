"""What the machine code of a kernel says of its speed, from the listing of nvdisasm.

The part that is looked at is the innermost loop that moves most bytes, or the whole kernel where no
loop moves any; in it the path that moves most, and of those the one of fewest instructions: rare
cases are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
REGISTER = re.compile(r"\bR(\d+)\b")
ENDS = ("EXIT", "RET", "BRX", "JMP")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class Instruction(NamedTuple):
    predicated: bool
    name: str  # with what follows its first dot
    operands: str

    @property
    def memory(self) -> int:
        """Bytes of global memory; 0 of other instructions."""
        first, *more = self.name.split(".")
        if first not in ("LDG", "STG", "LD", "ST"):
            return 0
        return next((WIDTHS[part] for part in more if part in WIDTHS), 4)

    @property
    def is_load(self) -> bool:
        return self.name.startswith("LD") and self.memory > 0


class Speed(NamedTuple):
    """Of a kernel: its instructions. Of the path: its instructions, and bytes of a thread."""

    instructions: int
    path: int
    read: int
    written: int
    in_flight: int  # the most bytes that are read before the first of them is used


class _Block:
    def __init__(self) -> None:
        self.code: list[Instruction] = []
        self.next: list[int] = []

    @property
    def bytes(self) -> int:
        return sum(i.memory for i in self.code)


def kernels(listing: str) -> Iterator[tuple[str, Speed]]:
    """Each kernel's mangled name, and what is known of it."""
    for section in re.split(r"^\.text\.", listing, flags=re.MULTILINE)[1:]:
        name, _, text = section.partition(":\n")
        yield name, _speed(text.splitlines())


def _speed(lines: Iterable[str]) -> Speed:
    blocks, count = _blocks(lines)
    parts = _loops(blocks)
    moving = [p for p in parts if any(blocks[b].bytes for b in p[1])]
    # A loop around another one that moves memory is not the innermost.
    inner = [p for p in moving if not any(q[1] < p[1] for q in moving)]
    chosen = inner or [(0, frozenset(range(len(blocks))))]
    paths = (_best_path(blocks, head, body) for head, body in chosen)
    path = max(paths, key=lambda p: (_bytes(p), -len(p)))
    read = sum(i.memory for i in path if i.is_load)
    return Speed(count, len(path), read, _bytes(path) - read, _in_flight(path))


def _bytes(path: list[Instruction]) -> int:
    return sum(i.memory for i in path)


def _blocks(lines: Iterable[str]) -> tuple[list[_Block], int]:
    """The basic blocks, the first of which begins the kernel; and the number of instructions."""
    blocks, labels, targets = [_Block()], {}, []
    count, falls = 0, True
    for line in lines:
        if match := LABEL.match(line):
            if blocks[-1].code:
                if falls:
                    blocks[-1].next.append(len(blocks))
                blocks.append(_Block())
                falls = True
            labels[match[1]] = len(blocks) - 1
        elif match := LINE.match(line):
            instruction = Instruction(match[2] is not None, match[3], match[4])
            if instruction.name == "NOP":
                continue
            count += 1
            blocks[-1].code.append(instruction)
            first = instruction.name.partition(".")[0]
            jumps = first == "BRA"
            if not jumps and first not in ENDS:
                continue
            if jumps and (target := TARGET.search(instruction.operands)):
                targets.append((len(blocks) - 1, target[1]))
            # Branches of uniform registers have their predicate among the operands.
            sure = not instruction.predicated and not re.match(r"!?U?P\d", instruction.operands)
            if not sure or ".DIV" in instruction.name:
                blocks[-1].next.append(len(blocks))
            blocks.append(_Block())
            falls = True
    if not blocks[-1].code:
        labels = {name: at for name, at in labels.items() if at < len(blocks) - 1}
        blocks.pop()
    for at, label in targets:
        if label in labels:
            blocks[at].next.append(labels[label])
    for block in blocks:
        block.next = [at for at in block.next if at < len(blocks)]
    return blocks, count


def _order(
    blocks: list[_Block], head: int, body: frozenset[int]
) -> tuple[list[int], set[tuple[int, int]]]:
    """The blocks that `head` leads to in the order of their ends, and the edges that go back."""
    done: list[int] = []
    state: dict[int, bool] = {head: True}  # whether it is on the way from the head
    back = set()
    stack = [(head, iter(blocks[head].next))]
    while stack:
        at, rest = stack[-1]
        for to in rest:
            if to not in body:
                continue
            if to not in state:
                state[to] = True
                stack.append((to, iter(blocks[to].next)))
                break
            if state[to]:
                back.add((at, to))
        else:
            state[at] = False
            done.append(at)
            stack.pop()
    return done, back


def _loops(blocks: list[_Block]) -> list[tuple[int, frozenset[int]]]:
    """(head, blocks) of each loop."""
    before: dict[int, list[int]] = {}
    for at, block in enumerate(blocks):
        for to in block.next:
            before.setdefault(to, []).append(at)
    bodies: dict[int, set[int]] = {}
    for latch, head in _order(blocks, 0, frozenset(range(len(blocks))))[1]:
        body, stack = bodies.setdefault(head, {head}), [latch]
        while stack:
            at = stack.pop()
            if at not in body:
                body.add(at)
                stack += before.get(at, [])
    return [(head, frozenset(body)) for head, body in bodies.items()]


def _best_path(blocks: list[_Block], head: int, body: frozenset[int]) -> list[Instruction]:
    done, back = _order(blocks, head, body)
    best: dict[int, tuple[int, int, int | None]] = {}  # bytes, -instructions, the next block
    for at in done:
        rest = [
            (*best[to][:2], to) for to in blocks[at].next if to in best and (at, to) not in back
        ]
        more = max(rest, default=(0, 0, None))
        leaves = any(to not in body or (at, to) in back for to in blocks[at].next)
        if leaves and more[0] == 0:
            more = (0, 0, None)
        best[at] = (more[0] + blocks[at].bytes, more[1] - len(blocks[at].code), more[2])
    path, at_ = [], head
    while at_ is not None:
        path += blocks[at_].code
        at_ = best[at_][2]
    return path


def _in_flight(path: list[Instruction]) -> int:
    """Loads are in flight until an instruction takes a register that one of them fills: it waits,
    and those before it with it, as they come back in turn."""
    waiting: list[tuple[set[int], int]] = []
    most = 0
    for i in path:
        registers = [int(r) for r in REGISTER.findall(i.operands)]
        taken = set(registers[1:] if i.is_load else registers)
        used = [at for at, (filled, _) in enumerate(waiting) if filled & taken]
        if used:
            waiting = waiting[used[-1] + 1 :]
        if i.is_load and registers:
            size = -(-i.memory // 4)
            waiting.append((set(range(registers[0], registers[0] + size)), i.memory))
            most = max(most, sum(size for _, size in waiting))
    return most
