"""Random programs of regions, compared with plain torch without any: the same bits, or an error
where a program did what a recompute cannot follow, with nothing left behind."""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import memsave_ext as ms

from .programs import Op, Program, Writer, generate
from .worlds import Boom, namespace


def state() -> tuple[Any, ...]:
    """Of this thread and process: what nothing may leave changed."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_inference_mode_enabled(),
        ms.is_recomputing(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )


Step = tuple[str, list[Any]]


def keep(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def run(program: Program, code: Any, mode: str, changes: bool, alone: bool = True) -> list[Step]:
    """What it yielded, step by step; the last one can be ("error", [exception]). Random state is
    looked at where it runs ``alone``."""
    space = namespace(program, mode)
    exec(code, space)
    random_state = torch.get_rng_state if alone else lambda: torch.zeros(1)
    if alone:
        torch.manual_seed(program.seed)
    steps: list[Step] = []
    generator = space["program"]()
    answer = None
    try:
        while True:
            label, values = generator.send(answer)
            answer = changes
            steps.append((label, [*map(keep, values), random_state()]))
    except StopIteration:
        pass
    except Exception as error:
        steps.append(("error", [error.with_traceback(None), random_state()]))
    return steps


def same(a: Any, b: Any, exact: bool) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        # Every output of an explicit region is differentiable, by what is 0 there.
        return a is b is None or (not exact and all(t is None or not t.any() for t in (a, b)))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if exact or a.dtype not in (torch.float32, torch.float64):
        return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    tolerance = 1e-4 if a.dtype == torch.float32 else 1e-10
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def all_same(a: list[Any], b: list[Any], exact: bool) -> bool:
    return len(a) == len(b) and all(same(x, y, exact) for x, y in zip(a, b, strict=True))


# Limits of torch's reentrant checkpoint: no inputs=, and no region whose result needs no gradient.
# And of the explicit one in pure Python.
LIMITS = (
    "checkpoint is incompatible with .grad()", "this checkpoint() is not necessary",
    "one listed tensor was computed from another listed tensor",
)  # fmt: skip


def allowed(error: Exception) -> bool:
    """Whether a program with hazards may end so."""
    if isinstance(error, (torch.utils.checkpoint.CheckpointError, Boom)):  # ours is one, too
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in REFUSALS)


# Autograd's own: a saved tensor was changed, or what a leaf is that is changed in place; a backward
# inside of an explicit region, whose forward has no graph; a parameter that is frozen. And what the
# package says that it refuses.
REFUSALS = (
    "modified by an inplace operation", "in-place operation", "inplace operation",
    "does not require grad", "does not support double backward", "modified inplace",
    "receives a second gradient in one step",
    "has been replaced between the forward",
)  # fmt: skip


def compare(ours: list[Step], plain: list[Step], unchanged: list[Step], writer: Writer) -> str:
    """Nothing, or what is wrong. ``unchanged``: the plain run without the changes. An error that
    the program allows is "refused: ..."."""
    exact = not writer.inexact
    for i, (label, values) in enumerate(ours):
        theirs, without = (s[i] if i < len(s) else ("end", []) for s in (plain, unchanged))
        if label == "error":
            error, random_state = values
            begun = any(name == "forward" for name, _ in ours)
            if begun and not torch.equal(random_state, ours[i - 1][1][-1]):
                return "leak: random state after an error"
            if theirs[0] == "error":
                return "refused: plain torch refuses it, too"
            if writer.hazards and allowed(error):
                return f"refused: {' '.join(sorted(writer.hazards))}"
            if writer.explicit and "through the graph a second time" in str(error):
                return "refused: what is listed is part of the region's history"
            if any(limit in str(error) for limit in LIMITS):
                return "refused: beyond a documented limit"
            return f"error: {type(error).__name__}: {error}"
        expected = [s[1] for s in (theirs, without) if s[0] == label]
        if label != "backward":
            if theirs[0] != label:  # plain torch ended with an error
                continue
            expected = expected[:1]
        if label == "torch_statistics" and writer.torchs_own:  # whose recomputes count again
            continue
        if any(all_same(values, e, exact) for e in expected):
            continue
        inplace = any(hazard.startswith("inplace") for hazard in writer.hazards)
        if label == "values" and inplace:
            return "refused: a recompute changes in place again"
        if "boom" in writer.hazards:
            return "refused: it goes another way in a recompute"
        if writer.explicit and writer.hazards & {"eval", "train"}:
            return "refused: an explicit region does not look at the modes of modules"
        modes = writer.hazards & {"eval", "train"}
        if label == "backward" and writer.nested and modes:  # torch's do not, either
            return "refused: a region does not look at what nested ones save"
        if theirs[0] == "error":
            if inplace:
                return "refused: by plain torch, where a recompute has the values of before"
            if writer.explicit and "does not require grad" in str(theirs[1][0]):
                return "refused: by plain torch; explicit regions return what needs a gradient"
            return f"silent: plain torch raises {theirs[1][0]!r}, these gradients are not forward's"
        return f"silent: other {label}"
    return ""


def check(program: Program) -> str:
    """What is wrong with a program; "refused: ..." or nothing where nothing is."""
    writer = Writer(program)
    code = compile(writer.source(), f"<program {program.seed}>", "exec")
    before = state()
    default = torch.get_default_dtype()
    hooks = ms.use_engine_hooks(program.engine_hooks)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            results = []
            changing = any(event.name.startswith("change") for event in program.events)
            for mode, changes in (("plain", True), ("plain", False), ("ours", True)):
                if mode == "plain" and not changes and not changing:
                    results.append(results[0])
                    continue
                results.append(run(program, code, mode, changes))
                torch.set_default_dtype(default)
                if state() != before:
                    return f"leak: {mode} {before} {state()}"
            plain, unchanged, ours = results
            verdict = compare(ours, plain, unchanged, writer)
            if "torch_statistics" in verdict and any("BatchNorm" in str(w.message) for w in warned):
                return "refused: with a warning, torch's BatchNorm of a module that is not known"
            if verdict and not verdict.startswith("refused") and "cp." in "".join(writer.lines):
                theirs = compare(run(program, code, "torch", True), plain, unchanged, writer)
                torch.set_default_dtype(default)
                if theirs.split(":")[0] not in ("", "refused"):
                    return f"refused: torch's own regions: {theirs}"
            return verdict
    finally:
        ms.use_engine_hooks(hooks)
        torch.set_default_dtype(default)


def children(ops: list[Op]) -> Iterator[list[Op]]:
    """With one operation less, or one region, or one option."""
    for i, op in enumerate(ops):
        yield ops[:i] + ops[i + 1 :]
        if op.body:
            yield ops[:i] + op.body + ops[i + 1 :]
            for body in children(op.body):
                if body:
                    yield [*ops[:i], dataclasses.replace(op, body=body), *ops[i + 1 :]]
        for name in "ijk":
            if getattr(op, name):
                yield [*ops[:i], dataclasses.replace(op, **{name: 0}), *ops[i + 1 :]]


def smaller(program: Program) -> Iterator[Program]:
    for body in children(program.body):
        if body:
            yield dataclasses.replace(program, body=body)
    for events in children(program.events):
        if any(e.name.startswith("backward") for e in events):
            yield dataclasses.replace(program, events=events)
    for simpler in SIMPLER:
        other = dataclasses.replace(program, **simpler)
        if other != program:
            yield other


SIMPLER: list[dict[str, Any]] = [
    {"rounds": 1}, {"adam": ""}, {"engine_hooks": False}, {"checkpointed": False},
    {"dtype": "float32"},
]  # fmt: skip


def shrink(program: Program, verdict: str, seconds: float = 10) -> Program:
    """A program as small as can be found that fails in the same way."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for other in smaller(program):
            if check(other)[:20] == verdict[:20]:
                program, progress = other, True
                break
            if time.monotonic() > end:
                break
    return program


def check_threads(together: list[Program]) -> str:
    """Of programs that several threads run at once."""
    writers = [Writer(program) for program in together]
    codes = [compile(w.source(), f"<program {w.program.seed}>", "exec") for w in writers]
    several = [*zip(together, codes, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = [run(*one, "plain", True, alone=False) for one in several]
        unchanged = [run(*one, "plain", False, alone=False) for one in several]
        torchs = [run(*one, "torch", True, alone=False) for one in several]
        ours: dict[int, list[Step]] = {}

        def work(i: int) -> None:
            ours[i] = run(*several[i], "ours", True, alone=False)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(together))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, writer in enumerate(writers):
        verdict = compare(ours[i], plain[i], unchanged[i], writer)
        excused = compare(torchs[i], plain[i], unchanged[i], writer)
        if verdict and not verdict.startswith("refused") and not excused:
            return f"{verdict} (of program {together[i].seed}, in a thread)"
    return ""


def run_seed(seed: int, without: list[str], shrinks: bool) -> tuple[str, str]:
    """The verdict on the program of a seed, and what it is where it failed."""
    if seed % 20 == 19:
        together = [generate(seed * 4 + i, without, threads=True) for i in range(4)]
        verdict = check_threads(together)
        return verdict, "\n".join(Writer(p).source() for p in together) if verdict else ""
    program = generate(seed, without)
    verdict = check(program)
    if not verdict or verdict.startswith("refused"):
        return verdict, ""
    if shrinks:
        program = shrink(program, verdict)
    hooks = "ms.use_engine_hooks(True)\n" if program.engine_hooks else ""
    return verdict, f"# {program.dtype}\n{hooks}{Writer(program).source()}"
