"""Makes the training of a real model fit: predicts it, and applies the cheapest technique."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..adam.rules import rule_of
from ..remat.budget import bytes_of_device
from ..remat.offload import Offload, check_offload
from ..shared.budgets import Budget, read_budget
from ..shared.checks import check_bool, check_count
from ..shared.device_memory import device_memory
from ..shared.modules import device_of
from ..shared.tensors import bytes_held
from ..shared.warn import warn
from ..store.mapped import in_memory
from .agreement import Meeting, agreed, check_same, together
from .applied import Applied, apply, check, check_options, undone_by_errors
from .batch import Forward, Loss, checked_others, from_batch, tensors_of
from .fits import evaluation_peak, search
from .found import Fit, Fits
from .holdings import held_by
from .predict import check_timeout
from .ranks import ranks_there
from .techniques import ALL, Techniques, named, technique_of

# Without a budget remat has its plan from the third step on; with one it costs no more.
_WITHIN = [technique for technique in ALL if not technique.remat]


def fit(
    model: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    *,
    budget: str | int,
    loss: Loss | None = None,
    technique: str | None = None,
    in_backward: bool = True,
    micro_batches: int = 1,
    accumulate_when: Callable[[], object] | None = None,
    max_grad_norm: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    others: Iterable[nn.Module | Tensor] = (),
    offload: Offload | None = None,
    verbose: bool = True,
    timeout: float | None = None,
    means: str | None = None,
) -> Applied:
    """Makes training steps fit into a budget: predicts them, and applies the cheapest technique
    that fits to the model and its optimizer, in place::

        fitted = ms.fit(model, optimizer, batch, budget="24GB", loss=my_loss)
        for batch in batches:              # the loop stays as it is
            my_loss(model(**batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        fitted.undo()                      # model and optimizer are what they were

    It predicts on fake tensors in child processes, as :func:`memory.predict`: nothing is allocated,
    and neither model, gradients nor random numbers are touched before a technique is applied. What
    is applied is printed: the technique, the predicted peak, the cost and the time; whether an
    evaluation of the batch, or a resume, would need more than the budget; and after the first steps
    what was measured. A warning names a technique that costs less and was left out, as its
    prediction failed. Another one says where the peak of the second step is more than 2 % off the
    predicted one; with ``remat``, where it is higher.

    Args:
        model: the model, on the device that it is trained on. In DistributedDataParallel, or
            sharded by FSDP2: all processes call this, and take one technique, the cheapest that
            fits in each.
        optimizer: its optimizer, with states or without; None for a loop without states. An
            optimizer that accelerate or Lightning has wrapped is taken out of it.
        batch: what the model is called with: a dict of keyword arguments, a tuple of arguments, or
            a tensor. Not the loader that makes batches.
        budget: the most bytes that a step may need: an int, a text such as ``"24GB"`` (10^9 bytes
            each) or ``"22.5GiB"`` (2^30), ``"80%"`` of the device's memory or ``"auto"``, what the
            model and its optimizer hold and nine tenths of what is free.
        loss: makes the loss of what the model returns, or, where it has a second argument, of that
            and the batch; None takes its ``loss``, or a result of one number.
        technique: the name of the one to apply, as :func:`memory.fits` has them, in place of the
            cheapest that fits.
        in_backward: whether the optimizer may step in backward, which leaves no gradients to clip
            or to look at. Where it may not, gradients that do not fit lie elsewhere until they are
            stepped: on CUDA in the host's memory, on a CPU in the folder ``offload``, else in
            that for temporary files (``TMPDIR``), unless it is in memory.
        micro_batches: how many backwards a step has. With an optimizer in backward say which is the
            last, by ``accumulate_when`` or by ``with optimizer.accumulate():``.
        accumulate_when: what an optimizer in backward asks, as :meth:`Adam.accumulate_when`.
        max_grad_norm: what an optimizer in backward clips each parameter's gradient to.
        grad_scaler: the loop's, for an optimizer in backward.
        others: modules and tensors that are in memory beside the model and count, as an average of
            its weights. Other models' parameters and buffers that the step reads, such as a
            teacher's, count anyway, and on CUDA all that is allocated.
        offload: as of :func:`memory.fits`; on a CPU also where gradients, states and weights lie.
        verbose: whether to print these lines.
        timeout: the most seconds that each prediction may take, as of :func:`memory.predict`.
        means: the name that ``technique`` had until 0.3.

    Returns:
        A handle with what the loop must use, the figures, and ``undo()``.

    Raises:
        torch.OutOfMemoryError: nothing fits. It says what was tried, and the lowest peak.
        TypeError, ValueError: an argument is not as said above; the model is wrapped in
            DataParallel, compiled, or has a technique applied to it already; the named technique
            does not apply.
        RuntimeError: the step cannot be predicted; see :func:`memory.predict`.
    """
    options = {
        "accumulate_when": accumulate_when,
        "max_grad_norm": max_grad_norm,
        "grad_scaler": grad_scaler,
    }
    with undone_by_errors(model):
        with together("fit", model) as meeting:
            technique = technique_of("fit", technique, means)
            check_bool("fit: in_backward", in_backward)
            check_timeout("fit", timeout)
            made = fitted(
                model, optimizer, batch, budget, meeting, loss=loss, technique=technique,
                refused=_refusal(in_backward), micro_batches=micro_batches, verbose=verbose,
                others=others, place=offload, options=options, timeout=timeout,
            )  # fmt: skip
        if max_grad_norm is not None and not made.steps_in_backward and made.warns:
            warn(
                f"memsave_ext: fit: max_grad_norm={max_grad_norm!r} has no effect with "
                f"{made.technique}, since it is for an optimizer that steps in backward: clip "
                "gradients in the training loop",
            )
        return made


def fitted(
    model: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    budget: str | int | Budget,
    meeting: Meeting | None,
    *,
    loss: Loss | None = None,
    technique: str | None = None,
    refused: str = "",
    micro_batches: int = 1,
    verbose: bool = True,
    forward: Forward | None = None,
    keeps_gradients: bool = False,
    method: str = "forward",
    others: Iterable[nn.Module | Tensor] = (),
    place: Offload | None = None,
    options: dict[str, Any],
    timeout: float | None = None,
    is_largest: bool = False,
) -> Applied:
    """As :func:`fit`, for trainers, inside of :func:`together`.

    Args:
        meeting: where the processes meet that the model is wrapped for; None for one process.
        is_largest: whether ``batch`` is the largest of the training, most others being smaller.
        refused: why no optimizer may step in backward; empty where it may.
        forward, others, keeps_gradients: as of :func:`from_batch`.
        method, place: as of :meth:`Techniques.apply`.
        options: as of :class:`Applied`.
    """
    warns = meeting is None or meeting.is_first
    with undone_by_errors(model), nullcontext() if warns else _quiet():
        inside = check("fit", model, optimizer, may_be_wrapped=True)
        check_options("fit", options)
        others = checked_others("fit", others)
        check_count("fit: micro_batches", micro_batches, 1)
        if technique is not None:
            named("fit", technique)
        device = _checked_device(model)
        _warn_of_eval_mode(model)
        limit = _bytes_of(budget, device, model, inside, tensors_of(others))
        build = from_batch(
            model, inside, batch, loss, who="fit", others=others,
            micro_batches=min(micro_batches, 2), forward=forward, keeps_gradients=keeps_gradients,
            reduces_once=_reduces_once(optimizer),
        )  # fmt: skip
        beside = _bytes_beside(device, model, inside, batch)
        place = check_offload("fit", place, None, True, device)
        if meeting is not None:
            _check_same_request(meeting, model, technique, refused, micro_batches, options)
        with torch.inference_mode(False), torch.enable_grad():
            how: dict[str, Any] = {
                "device": device, "method": method, "place": place, "timeout": timeout,
                "ranks": None if meeting is None else ranks_there("fit"),
            }  # fmt: skip

            def tried(among: Sequence[Techniques]) -> Fits:
                return search(
                    build, limit, among=among, refused=refused, others=beside,
                    progress=None if verbose and warns else False, **how,
                )  # fmt: skip

            found = _found(tried, technique, meeting)
            techniques, row = found.chosen("fit", technique)
            assert row is not None and row.peak is not None
            _warn_of_left_out(found.rows[: found.rows.index(row)], row)
            evaluation = None
            if techniques.changes_forward:
                within = row.remat_budget or limit
                evaluation = evaluation_peak(build, within, techniques, others=found.others, **how)
        made = apply(
            techniques, model, optimizer, limit, row.peak, time=row.time,
            remat_budget=row.remat_budget, others=found.others,
            spare=_bytes_of_batches(device, batch, micro_batches), method=method, place=place,
            may_be_wrapped=True, **options,
        )  # fmt: skip
        made.evaluation = evaluation
        made.may_be_less |= is_largest
        made.resume = found.others + _resume_bytes(techniques, model, inside, row)
        made.warns = warns
        if meeting is not None:
            of_all = meeting.all_gather((row.peak, limit))
            made.of_ranks = dict(zip(meeting.ranks, of_all, strict=True))
        if verbose and warns:
            print(made, file=sys.stdout)
            made.tells = True
        return made


def _checked_device(model: nn.Module) -> torch.device:
    device = device_of(model)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"fit: model must be on the CPU or a CUDA device, got one on {device}")
    return device


def _warn_of_eval_mode(model: nn.Module) -> None:
    # Lightning puts what is inside of DistributedDataParallel alone into train mode again.
    if not (model.module if isinstance(model, DistributedDataParallel) else model).training:
        warn(
            f"memsave_ext: fit: this {type(model).__name__} is in eval mode, and the step is "
            "predicted in eval mode, too: call model.train() first",
        )


def _bytes_beside(
    device: torch.device, model: nn.Module, optimizer: Optimizer | None, batch: Any
) -> int:
    """Returns what is allocated on a CUDA device beside what the step itself holds."""
    if device.type != "cuda":
        return 0
    allocated = torch.cuda.memory_allocated(device)
    return max(allocated - bytes_held([*held_by(model, optimizer), *tree_leaves(batch)]), 0)


def _bytes_of_batches(device: torch.device, batch: Any, micro_batches: int) -> int:
    """Returns what a step's batches take on a CPU, whose predicted peaks leave them out."""
    if device.type != "cpu":
        return 0
    tensors = {id(t): t for t in tree_leaves(batch) if isinstance(t, Tensor)}
    return sum(t.nbytes for t in tensors.values()) * micro_batches


def _check_same_request(
    meeting: Meeting,
    model: nn.Module,
    technique: str | None,
    refused: str,
    micro_batches: int,
    options: dict[str, Any],
) -> None:
    """Raises ValueError where processes ask for different things."""
    check_same(
        meeting,
        {
            "technique": technique,
            "in_backward": not refused,
            "micro_batches": micro_batches,
            **{name: _shared_value(value) for name, value in options.items()},
            "the model's number of parameters": sum(p.numel() for p in model.parameters()),
        },
    )


def _found(
    tried: Callable[[Sequence[Techniques]], Fits], technique: str | None, meeting: Meeting | None
) -> Fits:
    """Returns what is found of one technique, or of all: where processes meet, of the cheapest that
    fits in each."""
    if technique is not None:
        return tried([named("fit", technique)])
    if meeting is None:
        return tried(_WITHIN)
    names = [one.name for t in _WITHIN for one in (t, t.for_loops_that_clip()) if one]
    return agreed(meeting, lambda: tried(_WITHIN), names, lambda name: tried([named("fit", name)]))


def _warn_of_left_out(cheaper: list[Fit], chosen: Fit) -> None:
    for row in cheaper:
        if row.is_unpredicted:
            warn(
                f"memsave_ext: fit: {row.name}, which costs less than {chosen.name}, was left "
                f"out, as its prediction failed: {row.reason}"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _shared_value(option: object) -> object:
    """Returns what processes tell each other of an option: its value, or that there is one."""
    return option if option is None or isinstance(option, (int, float)) else "one"


def _reduces_once(optimizer: Any) -> bool:
    """Whether accelerate, which has wrapped the optimizer, has the gradients of several backwards
    reduced in the last of them alone."""
    state = getattr(optimizer, "gradient_state", None)
    return state is not None and not state.plugin_kwargs.get("sync_each_batch", False)


def _resume_bytes(
    technique: Techniques, model: nn.Module, optimizer: Optimizer | None, row: Fit
) -> int:
    """Returns what model, checkpoint and states need while a checkpoint is loaded as a whole.

    A checkpoint has states of float32; where smaller ones are kept, it is there beside them.

    Args:
        technique: that is applied to model and optimizer.
        row: of this technique.
    """
    assert row.at_peak is not None
    tensors = [*model.parameters(), *model.buffers()]
    needed = bytes_held(tensors) + bytes_held(in_memory(tensors)) + row.at_peak["optimizer"]
    if optimizer is not None and technique.state_dtype is not None:
        needed += sum(
            p.numel() * torch.float32.itemsize * len(rule_of(group).moments)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        )
    return needed


def _refusal(in_backward: bool) -> str:
    return "" if in_backward else "in_backward=False"


def checked_request(
    budget: object,
    *,
    in_backward: bool,
    technique: str | None,
    means: str | None,
    others: Iterable[nn.Module | Tensor],
    offload: Offload | None,
    verbose: bool,
    timeout: float | None,
) -> tuple[Budget, dict[str, Any]]:
    """Returns the budget of a trainer's ``Fit`` and those options of :func:`fitted` that are known
    before the training.

    Raises:
        TypeError, ValueError: an argument is not as :func:`fit` says.
    """
    technique = technique_of("Fit", technique, means)
    check_bool("Fit: in_backward", in_backward)
    check_timeout("Fit", timeout)
    if technique is not None:
        named("Fit", technique)
    return read_budget("Fit", budget), {
        "technique": technique, "others": others, "verbose": verbose,
        "place": check_offload("Fit", offload, None, True, None), "timeout": timeout,
        "refused": _refusal(in_backward),
    }  # fmt: skip


def _bytes_of(
    budget: object,
    device: torch.device,
    model: nn.Module,
    optimizer: Optimizer | None,
    others: list[Tensor],
) -> int:
    read = read_budget("fit", budget)
    if not read.of_device:
        return read.bytes
    size = bytes_of_device("fit", read, device)
    if not read.of_free:
        return size
    if device.type == "cuda":
        memory = device_memory(device)
        return size + memory.limit - memory.free
    return size + bytes_held([*held_by(model, optimizer), *others])
