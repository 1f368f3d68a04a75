"""Applies a technique to a real model and its optimizer, measures what they need, and undoes it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import _parts
from ..adam.modes import check_norm
from ..adam.step_in_backward import InBackward
from ..memory.hooks import with_step_hooks
from ..remat.offload import Offload
from ..shared.checks import check_shapes
from ..shared.dtensor import is_dtensor
from ..shared.modules import device_of, is_compiled
from ..shared.table import format_bytes, format_seconds
from ..shared.warn import warn
from .first_steps import FirstSteps
from .ranks import is_wrapped
from .techniques import Techniques, place_elsewhere, warn_of_means

_TOLERANCE = 0.02  # of the predicted peak
_WRAPPERS = (DistributedDataParallel, nn.DataParallel)
_TWICE = (
    "the model is wrapped twice: DistributedDataParallel is around {}, and gradients would be "
    "reduced twice. Wrap it once"
)
NOT_DEEPSPEED = (
    "DeepSpeed's engine divides gradients and states, and steps, itself, which is not predicted. "
    "Shard the model by FSDP2 instead, which divides them as well; or keep DeepSpeed, and call "
    "memsave_ext.checkpoint_modules() for the model's blocks"
)
_OTHERS = {
    "DeepSpeedEngine": NOT_DEEPSPEED,
    "FullyShardedDataParallel": (
        "the model is wrapped in FullyShardedDataParallel, FSDP1, which is not supported: shard it "
        "by torch.distributed.fsdp.fully_shard(), FSDP2"
    ),
}

_NAME = "_memsave_ext_applied"  # where a model has what is applied to it


class Applied:
    """What :meth:`Fits.apply` and :func:`fit` return: the technique that a training runs with.

    Attributes:
        model: the model to train, the same object.
        optimizer: the optimizer to step with, the same object; its class is another one where it
            steps in backward.
        technique: what was applied, such as ``"checkpoint by block, optimizer in backward"``.
        cost: what it costs.
        bits: whether results keep their bits, as :attr:`Fit.bits`.
        time: the predicted time of a step over that of the step as it is built, as
            :attr:`Fit.time`; None where one of them was not predicted.
        steps_in_backward: whether the optimizer steps in backward.
        budget: bytes.
        predicted: the predicted peak in bytes; None where this technique was not predicted.
        evaluation: the predicted peak in bytes of an evaluation of the batch, where the technique
            changes the forward of training; None otherwise, since an evaluation needs no more than
            a step then.
        resume: bytes that are needed while a checkpoint is loaded as a whole, by ``torch.load()``
            without ``mmap=True``; None where this technique was not predicted.
        of_ranks: predicted peak and budget in bytes by rank, where several processes train the
            model.
        measured: the peak in bytes of the second step, which is the first that has all states, or
            with remat without a budget of the third; None until then, without an optimizer or with
            one that wraps another, and in pure Python.
        seconds: the median time from one step's end to the next, of the five steps after that one;
            None until then, and without an optimizer whose steps are heard of.
    """

    def __init__(
        self,
        technique: Techniques,
        model: nn.Module,
        optimizer: Optimizer | None,
        budget: int,
        predicted: int | None,
        *,
        remat_budget: int | None = None,
        time: float | None = None,
        others: int = 0,
        spare: int = 0,
        method: str = "forward",
        place: Offload | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            remat_budget: as of :class:`Fit`.
            others: bytes of the budget, and of the predicted peak, that are other models'.
            spare: bytes that a measured peak may have beside the predicted one, of batches.
            method, place: as of :meth:`Techniques.apply`.
            **options: of an optimizer that steps in backward; and ``accumulate_when``.

        Where it raises, :func:`applied_to` has it, and ``undo()`` takes back what was done.
        """
        self.model, self.optimizer = model, optimizer
        self.technique, self.cost, self.bits = technique.row
        self.budget, self.time = budget, time
        self.steps_in_backward = technique.steps_in_backward
        self._has_hooks = technique.steps_in_backward or technique.gradients_elsewhere
        self._elsewhere: list[str] = []  # what lies there, and where
        self.predicted = predicted
        self.evaluation: int | None = None
        self.resume: int | None = None
        self.of_ranks: dict[int, tuple[int, int]] = {}
        self.warns = True  # of several processes one does
        self.measured: int | None = None
        self.seconds: float | None = None
        self.tells = False  # whether to print what was measured
        condition = options.pop("accumulate_when", None)
        in_backward: Any = optimizer if technique.steps_in_backward else None
        given = {n: v for n, v in options.items() if v is not None} if in_backward else {}
        self._after: list[Callable[[], None]] = []
        self._spare = spare
        # What remat drops follows from times, which were estimated: it may be more, or within a
        # budget less.
        self.may_be_less = technique.remat or technique.within_budget
        self._may_be_as_much_as = budget if technique.within_budget else 0
        self._others = others
        left = max((remat_budget or budget) - others, 1)
        self._undo = ExitStack()
        for part in _with_inside(model):
            part.__dict__[_NAME] = self
        technique.apply(model, optimizer, self._undo, left, method=method, place=place, **given)
        if technique.gradients_elsewhere and isinstance(optimizer, InBackward):
            assert optimizer._gradients is not None
            where = _named(optimizer._gradients.where)
            self._elsewhere.append(f"gradients lie in {where} until each is stepped")
        moved = ["weights"] * technique.weights_elsewhere + ["states"] * technique.states_elsewhere
        if moved:
            where = place_elsewhere(device_of(model).type == "cuda", place) or ""
            self._elsewhere.append(f"{' and '.join(moved)} lie in {_named(where)}")
        self._attach()
        if in_backward is not None and condition is not None:
            in_backward.accumulate_when(condition)
        # Of an optimizer that wraps another the hooks run before its step has ended.
        tells_steps = optimizer is not None and with_step_hooks(optimizer) is optimizer
        # On a CPU the second step's tracker hears neither of what FSDP2 gathers nor of the buckets
        # that DistributedDataParallel had before.
        is_heard = not is_wrapped(model) or device_of(model).type == "cuda"
        if tells_steps and predicted is not None:
            assert optimizer is not None
            # From its third step on remat without a budget follows a plan.
            number = 3 if technique.remat else 2
            compare = self._compare if _parts.native("memory") and is_heard else None
            steps = FirstSteps(model, optimizer, number, compare, self._timed)
            self._undo.callback(steps.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has the technique, and nothing that could undo it."""
        return type(None), ()

    @property
    def means(self) -> str:
        """The technique, under the name that this attribute had until 0.3."""
        warn_of_means("what fit() returns")
        return self.technique

    def undo(self) -> None:
        """Makes model and optimizer what they were; a second call does nothing.

        Parameters stay as they were trained, and so do states, in the optimizer's own format.
        """
        for part in _with_inside(self.model):
            if applied_to(part) is self:
                del part.__dict__[_NAME]
        self._undo.close()
        self._has_hooks = False  # it is the optimizer that it was
        for function in self._after:
            function()

    def _attach(self) -> None:
        """Has an optimizer in backward step what DistributedDataParallel has reduced."""
        if self.steps_in_backward and isinstance(self.model, DistributedDataParallel):
            in_backward: Any = self.optimizer
            in_backward.attach(self.model)

    def rest(self) -> None:
        """Ends a training: the optimizer steps as others do, by ``step()``, and a backward that
        comes later steps nothing."""
        if self._has_hooks:
            in_backward: Any = self.optimizer
            in_backward.remove_hooks()

    def go_on(self) -> None:
        """Begins another training: what steps in backward does so again."""
        if self._has_hooks:
            in_backward: Any = self.optimizer
            in_backward.renew_hooks()
            self._attach()

    def after_undo(self, function: Callable[[], None]) -> None:
        """Has a function run now and after :meth:`undo`, which follows what the optimizer is."""
        function()
        self._after.append(function)

    def __str__(self) -> str:
        peak = "not known" if self.predicted is None else format_bytes(self.predicted)
        lines = [
            "nothing is changed" if self.technique == "as built" else self.technique,
            f"predicted peak {peak}, budget {format_bytes(self.budget)}",
            f"costs {'nothing' if self.cost == 'none' else self.cost}",
        ]
        if len({*self.of_ranks.values()}) > 1:
            rank, (most, budget) = min(self.of_ranks.items(), key=lambda one: one[1][1] - one[1][0])
            lines.append(
                f"rank {rank} has the least left: predicted peak {format_bytes(most)}, budget "
                f"{format_bytes(budget)}"
            )
        if self.technique != "as built":
            time = f"about {self.time:.2f}x" if self.time is not None else "not known"
            lines.append(
                f"time of a step, over the one as built: {time}; "
                f"results keep their bits: {self.bits}"
            )
        lines += self._elsewhere
        if self.evaluation is not None and self.evaluation > self.budget:
            lines.append(
                f"an evaluation of a batch of this size needs {format_bytes(self.evaluation)}, "
                "more than the budget: evaluate smaller batches"
            )
        if self.resume is not None and self.resume > self.budget:
            lines.append(
                f"loading a checkpoint as a whole needs {format_bytes(self.resume)}, more than the "
                "budget: use torch.load(path, map_location='cpu', mmap=True)"
            )
        if self.seconds is not None:
            lines.append(self._told_of_measured(self.seconds))
        return "\n".join(f"fit: {line}" for line in lines)

    def _timed(self, seconds: float) -> None:
        self.seconds = seconds
        if self.tells:
            print(f"fit: {self._told_of_measured(seconds)}", file=sys.stdout)

    def _told_of_measured(self, seconds: float) -> str:
        peak = "" if self.measured is None else f", peak {format_bytes(self.measured)}"
        text = f"measured: {format_seconds(seconds)} a step{peak}"
        if self.time is not None and self.technique != "as built":
            text += (
                f"; as built a step would take about {format_seconds(seconds / self.time)}, by the "
                "predicted times"
            )
        return text

    def _compare(self, measured: int) -> None:
        if device_of(self.model).type == "cpu":
            measured += self._others  # on CUDA all that is allocated was measured
        self.measured = measured
        assert self.predicted is not None
        least, most = (self.predicted * (1 + sign * _TOLERANCE) for sign in (-1, 1))
        if self.may_be_less:
            least = 0
        if not self.warns or least <= measured <= max(most + self._spare, self._may_be_as_much_as):
            return
        warn(
            f"memsave_ext: a step had a peak of {format_bytes(measured)} with {self.technique}, "
            f"and {format_bytes(self.predicted)} was predicted "
            f"({measured / self.predicted - 1:+.1%}; the budget is {format_bytes(self.budget)}). "
            "The reason may be a batch of another size, a loop that calls the model more than once "
            "in a step, or tensors that it makes besides the model, its optimizer and its loss.",
        )


def apply(
    technique: Techniques,
    model: Any,
    optimizer: Any,
    *arguments: Any,
    may_be_wrapped: bool = False,
    **options: Any,
) -> Applied:
    """Checks a model and its optimizer, and applies the technique to them; see :class:`Applied`.

    Raises:
        TypeError, ValueError: what :func:`check` says; the technique does not apply.
    """
    inside = check("apply", model, optimizer, may_be_wrapped=may_be_wrapped)
    check_options("apply", options)
    scaler = None if inside is optimizer else getattr(optimizer, "scaler", None)
    if scaler is not None and options.get("grad_scaler") is None:
        options["grad_scaler"] = scaler
    with undone_by_errors(model):
        try:
            made = Applied(technique, model, inside, *arguments, **options)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"apply: {technique.name} does not apply: {error}") from error
        if scaler is not None:
            # With a scaler accelerate keeps the optimizer's step(), which is another one now.
            made.after_undo(functools.partial(optimizer.__setstate__, {}))
        return made


@contextmanager
def undone_by_errors(model: nn.Module) -> Iterator[None]:
    """Undoes what was applied to a model inside, where that raises or is interrupted: nobody has a
    handle to do so."""
    before = applied_to(model)
    try:
        yield
    except BaseException:
        applied = applied_to(model)
        if applied is not None and applied is not before:
            applied.undo()
        raise


def check(
    who: str, model: Any, optimizer: Any, *, may_be_wrapped: bool = False
) -> Optimizer | None:
    """Returns the optimizer, without what a trainer has wrapped around it.

    Raises:
        TypeError: model or optimizer is none.
        ValueError: a technique is applied to the model already; it is wrapped for several processes
            or replicas, sharded or compiled.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{who}: optimizer must be a torch.optim.Optimizer or None, got "
            f"{type(optimizer).__name__}"
        )
    if any(applied_to(part) is not None for part in model.modules()):
        raise ValueError(
            f"{who}: a technique is applied to this {type(model).__name__}, or within it, already: "
            "call undo() of what the earlier fit() or apply() returned"
        )
    outer = model if may_be_wrapped and isinstance(model, DistributedDataParallel) else None
    for module in model.modules():
        if module is outer:
            continue
        kind = type(module).__name__
        if outer is not None and isinstance(module, _WRAPPERS):
            raise ValueError(f"{who}: {_TWICE.format(kind)}")
        if kind in _OTHERS:
            raise ValueError(f"{who}: {_OTHERS[kind]}")
        if isinstance(module, _WRAPPERS):
            raise ValueError(
                f"{who}: the model is wrapped in {type(module).__name__}. Pass the model inside, "
                "before it is wrapped"
            )
        if is_compiled(module):
            raise ValueError(
                f"{who}: the model is compiled, and the compiler decides what is kept for "
                "backward. Pass the model before it is compiled, and compile its blocks one by one "
                "where the technique is one without remat, which keeps what compiled blocks save"
            )
    if optimizer is not None:
        arguments = inspect.signature(optimizer.step).parameters
        if "closure" in arguments and arguments["closure"].default is inspect.Parameter.empty:
            raise ValueError(
                f"{who}: step() of {type(optimizer).__name__} needs a closure, which evaluates the "
                "model any number of times; such a step cannot be predicted from a batch"
            )
    check_shapes(who, model)
    has_shards = any(is_dtensor(p) for p in model.parameters())
    if outer is not None and has_shards:
        raise ValueError(f"{who}: {_TWICE.format('what fully_shard() has sharded')}")
    if not may_be_wrapped and has_shards:
        raise ValueError(
            f"{who}: the model has DTensor parameters, as FSDP2 makes them, which are not "
            "supported here. memsave_ext.fit() takes it"
        )
    return unwrapped(optimizer)


def check_options(who: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for wrong options of an optimizer that steps in backward,
    which may not be needed: the cheapest technique that fits is not known before."""
    condition, norm, scaler = map(options.get, ("accumulate_when", "max_grad_norm", "grad_scaler"))
    if condition is not None and not callable(condition):
        raise TypeError(
            f"{who}: accumulate_when must be a function without arguments, or None, got "
            f"{type(condition).__name__}"
        )
    if norm is not None:
        check_norm(f"{who}: max_grad_norm", norm)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"{who}: grad_scaler must be a torch.amp.GradScaler or None, got "
            f"{type(scaler).__name__}"
        )


def unwrapped(optimizer: Optimizer | None) -> Optimizer | None:
    """Returns the optimizer inside of accelerate's and Lightning's."""
    inside = getattr(optimizer, "optimizer", None)
    library = type(optimizer).__module__.partition(".")[0]
    if isinstance(inside, Optimizer) and library in (
        "accelerate",
        "lightning",
        "pytorch_lightning",
    ):
        return inside
    return optimizer


def _named(where: str) -> str:
    return "the host's memory" if where == "cpu" else where


def _with_inside(model: Any) -> tuple[nn.Module, ...]:
    """Returns a model, and what is inside of it, which another wrapper may be made for."""
    return (model, model.module) if isinstance(model, DistributedDataParallel) else (model,)


def applied_to(model: object) -> Applied | None:
    """Returns what is applied to a model now; nothing is to what is none."""
    found: Applied | None = getattr(model, "__dict__", {}).get(_NAME)
    return found
