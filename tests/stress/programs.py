"""Random nested programs of regions, as source that prints readably and runs anywhere.

A program is a list of :class:`Op`. Operands are indices taken modulo what is there, so that any
operation can be left out and the rest is still a program: that is what the shrinker does.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence

from .vocabulary import (
    BACKWARDS,
    CHANGES,
    HARMLESS,
    LEAVES,
    MODULES,
    OPTIONS,
    PURE,
    RANDOM,
    REGIONS,
    ROUGH,
    SHARED,
    STATE,
    TABLES,
    VIEWS,
)


@dataclasses.dataclass
class Op:
    name: str
    i: int = 0
    j: int = 0
    k: int = 0
    body: list[Op] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Program:
    seed: int
    dtype: str
    modules: list[str]
    body: list[Op]
    events: list[Op]
    adam: str = ""  # options; none where empty
    rounds: int = 1
    engine_hooks: bool = False
    checkpointed: bool = False  # module m1, by checkpoint_modules
    closures: bool = True  # explicit regions read computed tensors of the surroundings, too
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)  # more statements, by name


# What programs that run at once would disturb each other by.
NOT_IN_THREADS = [*RANDOM, "patched", "default_dtype", *HARMLESS, "engine_hooks", "dropout_module"]


def generate(
    seed: int,
    without: Sequence[str] = (),
    threads: bool = False,
    also: Mapping[str, str] | None = None,
) -> Program:
    """The program of a seed; what is left out becomes something simpler, and the rest stays.
    ``threads``: one that several threads can run at once. ``also``: statements of the caller's."""
    rng = random.Random(seed)
    out = {*without, *(NOT_IN_THREADS if threads else [])}
    names = [*PURE, *RANDOM, *(ROUGH if rng.random() < 0.3 else []), *(also or {})]

    def one(choices: Sequence[str], otherwise: str) -> str:
        chosen = rng.choice(choices)
        return otherwise if chosen in out else chosen

    def chance(probability: float, name: str) -> bool:
        return rng.random() < probability and name not in out

    def body(depth: int, most: int) -> list[Op]:
        ops = []
        for _ in range(rng.randint(1, most)):
            op = Op("", rng.randrange(24), rng.randrange(24), rng.randrange(1000))
            if depth < 3 and rng.random() < (0.45 if depth == 0 else 0.2):
                op.name = "region:" + one(REGIONS, "checkpoint")
                op.body = body(depth + 1, 4)
            else:
                op.name = one(names, "sin")
            ops.append(op)
        return ops

    adam = chance(0.15, "adam")
    return Program(
        seed=seed,
        dtype=rng.choice(["float32", "float64"]),
        modules=[MODULES[one([*MODULES], "linear")] for _ in range(2)],
        body=body(0, 6),
        events=drawn_events(rng, one, adam),
        adam=rng.choice(["small_bytes=0", "lr=0.1", "small_bytes=0, amsgrad=True"]) if adam else "",
        rounds=rng.choice([1, 2]) if adam else 1,
        engine_hooks=chance(0.3, "engine_hooks"),
        checkpointed=chance(0.3, "checkpointed"),
        closures=chance(0.3, "closures"),
        also=also or {},
    )


def drawn_events(
    rng: random.Random, one: Callable[[Sequence[str], str], str], adam: bool
) -> list[Op]:
    """Of after the forward."""
    names = []
    for _ in range(1 if adam else rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.3:
            names.append("change:" + one([*CHANGES], ""))
        if rng.random() < 0.2:
            names.append("harmless:" + one([*HARMLESS], ""))
        backward = rng.choice(["backward", one([*BACKWARDS], "backward")])
        names.append("backward:" + ("backward" if adam else backward))
    # Seldom a second backward through a graph that is gone.
    if rng.random() < 0.95:
        keep = [n.replace("backward:backward", "backward:retained") for n in names[:-1]]
        names = [*keep, names[-1]]
    events = [Op(name, rng.randrange(24), 0, rng.randrange(1000)) for name in names]
    return [event for event in events if not event.name.endswith(":")]


class Writer:
    """Writes a program's source. ``hazards``: why it may be refused; ``inexact``: why it need not
    have the same bits; ``torchs_own``: it has regions that are none of this package; ``nested``: it
    has regions in regions."""

    def __init__(self, program: Program) -> None:
        self.program, self.lines, self.count = program, [], 0
        self.hazards: set[str] = set()
        self.inexact = self.explicit = self.torchs_own = self.nested = False

    def add(self, text: str, indent: int) -> None:
        self.lines += ["    " * indent + line for line in text.split("\n")]

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def block(
        self, ops: list[Op], scope: list[str], indent: int, kind: str = "", own: Sequence[str] = ()
    ) -> list[str]:
        """What the operations make; ``kind``: of the regions they are in. ``own``: what they may
        change in place, which is nothing that surrounds a function, nor a view of it."""
        made: list[str] = []
        own = list(own)
        for op in ops:
            names = scope + made
            x, y = names[-1 - op.i % len(names)], names[-1 - op.j % len(names)]
            if op.name.startswith("region:"):
                v = self.region(op, names, indent, kind, own)
            else:
                v = self.new("v")
                if op.name.startswith("inplace"):
                    x = own[-1 - op.i % len(own)] if own else x
                    op = op if own else dataclasses.replace(op, name="part")
                if op.name == "differs" and self.explicit:  # which promises no check of it
                    op = dataclasses.replace(op, name="sin")
                self.statement(op, x, y, v, indent)
                own += [v] * (op.name not in VIEWS)
            made.append(v)
        return made

    def statement(self, op: Op, x: str, y: str, v: str, indent: int) -> None:
        if op.name in ROUGH:
            self.hazards.add(op.name)
        text = {**TABLES, **self.program.also}[op.name].format(
            x=x, y=y, v=v, k=op.k % len(self.program.modules)
        )
        self.add(text, indent)

    def region(self, op: Op, names: list[str], indent: int, outer: str, own: Sequence[str]) -> str:
        kind, v, f = op.name.removeprefix("region:"), self.new("v"), self.new("f")
        if kind == "reentrant" and "explicit" in outer:  # which torch refuses
            kind = "torch"
        if kind in ("torch", "reentrant") and "patched" in outer:  # but not in its recompute
            kind = "checkpoint"
        given = [names[-1 - op.i % len(names)], names[-1 - op.j % len(names)]][: 1 + op.k % 2]
        inner = [self.new("a") for _ in given]
        keyword = kind in ("checkpoint", "torch") and op.k % 5 == 3
        signature, call = ", ".join(inner), ", ".join(given)
        # Outer names are seen through the closure.
        # torch's reentrant checkpoint would run and free what computed them.
        leaves = kind == "reentrant" or (kind == "explicit" and not self.program.closures)
        scope = [*(["x1", "x0"] if leaves else names), *inner]
        start = len(self.lines)
        self.explicit |= kind == "explicit"
        self.nested |= bool(outer)
        if keyword:
            signature += ", *, m"
            call += f", m={{'t': {names[op.j % len(names)]}, 'l': [{names[0]}]}}"
        self.add(f"def {f}({signature}):", indent)
        if keyword:
            scope.append(m := self.new("a"))
            self.add(f"{m} = m['t'] + m['l'][0]", indent + 1)
        # A recompute of the outer function must not change what surrounds that.
        changes = not outer or keyword or given[-1] in own
        own = scope[-1:] if changes and "explicit" not in f"{outer} {kind}" else ()
        made = self.block(op.body, scope, indent + 1, f"{outer} {kind}", own)
        if kind == "reentrant":  # torch makes the output's history that of a tensor handed through
            for i in range(-min(len(made), 2), 0):
                value, made[i] = made[i], self.new("v")
                self.add(f"{made[i]} = {value} * 1", indent + 1)
        several = op.k % 7 == 3 and kind != "sequential"
        returned = f"{', '.join(made[-2:])}," if several else made[-1]
        self.add(f"return {returned}", indent + 1)
        target = (f"({v},)" if len(made) == 1 else f"{v}, _") if several else v
        result = f"{target} = "
        option = OPTIONS[op.k // 7 % len(OPTIONS)]
        words = set(re.findall(r"\w+", "\n".join(self.lines[start + 1 :])))
        read = [n for n in dict.fromkeys(names) if n in words]
        self.call(kind, f, given, call, result, option, read, indent)
        return v

    def call(
        self, kind: str, f: str, given: list[str], call: str, result: str, option: str,
        read: list[str], indent: int,
    ) -> None:  # fmt: skip
        option = f", {option}" if option else ""
        if kind == "checkpoint":
            self.add(f"{result}ms.checkpoint({f}, {call}{option})", indent)
        elif kind == "explicit":
            self.inexact = self.explicit = True
            listed = f"listed({', '.join([*read, SHARED])})"
            self.add(
                f"{result}ms.CheckpointFunction.apply({f}, {len(given)}, {call}, *{listed})", indent
            )
        elif kind in ("torch", "reentrant"):
            if kind == "reentrant":
                self.inexact = True
                call = f"0 * x0 + {call}"  # which must need a gradient
            reentrant = kind == "reentrant"
            self.add(f"{result}cp.checkpoint({f}, {call}, use_reentrant={reentrant})", indent)
            self.torchs_own = True
        elif kind == "sequential":
            single = f"ms.checkpoint_sequential([m0, {f}, m1], 2, {given[0]})"
            self.add(
                result + (single if len(given) == 1 else f"ms.checkpoint({f}, {call})"), indent
            )
        elif kind == "patched":
            self.add("with ms.patch_torch_checkpoint():", indent)
            self.add(f"{result}cp.checkpoint({f}, {call}, use_reentrant=False)", indent + 1)
        elif kind == "modules":
            self.add(f"{result}checkpointed(Calls({f}))({call})", indent)
        elif kind == "raises":
            self.add(f"def raising(*args):\n    {f}(*args)\n    raise Boom('forward')", indent)
            self.add(f"try:\n    ms.checkpoint(raising, {call})", indent)
            self.add(f"except Boom:\n    {result}{f}({call})", indent)

    def source(self) -> str:
        """A generator function: what it yields is compared, and what is sent to it says whether
        a change is made."""
        program = self.program
        self.add("def program():", 0)
        self.add(LEAVES, 1)
        for i, module in enumerate(program.modules):
            self.add(f"m{i} = fixed({module}.to(DTYPE))", 1)
        if program.checkpointed:
            self.add("ms.checkpoint_modules(m1, lambda m: m is m1)", 1)
        if program.adam:
            self.hazards.add("adam")
            params = "[w0, w1, w2, *m0.parameters(), *m1.parameters()]"
            self.add(f"opt = ms.Adam({params}, in_backward=True, {program.adam})", 1)
        if program.rounds > 1:
            self.add(f"for _ in range({program.rounds}):", 1)
        indent = 2 if program.rounds > 1 else 1
        scope = ["x1", "x0"]
        scope += self.block(program.body, scope, indent)
        self.add(f"loss = (x0 * RAMP).sum() + ({scope[-1]} * RAMP).sum()", indent)
        self.add(f"yield 'forward', [loss, {scope[-1]}]", indent)
        for event in program.events:
            self.event(event, scope, indent)
        self.add(STATE, 1)
        return "\n".join(self.lines) + "\n"

    def event(self, event: Op, scope: list[str], indent: int) -> None:
        kind, name = event.name.split(":")
        values = {"x": scope[-1 - event.i % len(scope)], "m": event.k % 2}
        if kind == "backward":
            if self.explicit and name == "double":
                self.hazards.add("double")
            self.add("out = []", indent)
            self.add(BACKWARDS[name].format(**values), indent)
            left = "d0['b'][0]" if self.program.adam else SHARED  # the others are freed
            self.add(f"yield 'backward', [*out, *grads(x0, {left})]", indent)
            if self.program.adam:
                self.add("opt.step()\nopt.zero_grad()", indent)
                self.add("yield 'step', [w0, w1, w2, *m0.parameters(), *m1.parameters()]", indent)
        elif kind == "change":
            self.hazards.add(name)
            self.add("if (yield 'change', []):", indent)
            self.add(CHANGES[name].format(k=event.k % 2, **values), indent + 1)
        else:
            self.add(HARMLESS[name].format(k=event.k % 2, **values), indent)
            self.add("yield 'harmless', []", indent)
