"""Predicts the memory of a training step: the step runs on fake tensors, which hold no memory, in a
child process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dry_run.child import Child, ChildError, LateError, all_modules, allow, note
from ..dry_run.world import follow_libraries, on_fakes
from ..fakes.mode import NotPredicted
from ..fakes.repeats import Learned, learn
from ..memory.hooks import Names
from ..memory.log import Record
from ..memory.measure import Build, checked
from ..memory.reported import Reported
from ..shared.checks import check_shapes, checked_device
from ..shared.device_memory import ask_for_child
from ..shared.modules import Layer, Modules
from ..shared.progress import Progress
from ..shared.table import format_bytes
from .batch import FromBatch, from_batch
from .distributed import built_alone, refuse_distributed
from .holdings import held_by
from .ranks import Ranks, Shard, is_wrapped, ranks_of, ranks_there
from .tracker import FakeTracker

SECONDS = 60.0  # that a prediction may take, and for each parameter
_SECONDS_PER_PARAMETER = 0.15
_EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


class StepRecord(NamedTuple):
    """What a child tells of a step."""

    record: Record
    live: int
    peak: int
    bus_seconds: float
    seconds: float
    others: int
    reserved: tuple[int, ...]  # by default, and with expandable segments; none of a CPU
    elsewhere: dict[str, int]  # bytes, as Hooks has them
    names: list[str]  # of tensors
    modules: list[str]
    layers: list[Layer]
    learned: Learned


def _segments_expand() -> bool:
    """Whether this process's environment asks for expandable segments."""
    name, _, setting = _EXPANDABLE.partition("=")
    given = os.environ.get(name) or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return setting.lower() in given.lower().replace(" ", "")


class _Recorded:
    """In place of a tracker: what one has recorded in a child."""

    def __init__(self, step: StepRecord) -> None:
        self.live, self.peak, self._record = step.live, step.peak, step.record

    def record(self) -> Record:
        return self._record


class PredictedStep(Reported):
    """What :func:`predict` returns: the figures of a :class:`Track` of one training step.

    The times among them count events, as nothing was run.

    Attributes:
        bus_seconds: how long copies take of what ``offload`` moves in the step, out and back; they
            run beside the step's arithmetic.
        seconds: about how long the step takes, by a rough estimate of each operator's time: to be
            compared with another step's, as a ratio. See :attr:`Fit.time`.
        others: bytes of the peak that are other models': of what the step reads that is neither
            the model's nor the optimizer's and lived before, as a teacher's parameters.
        reserved: the most bytes that CUDA's caching allocator reserves from the first step on, in
            segments that it has from the driver, as ``nvidia-smi`` shows them beside the context's;
            with expandable segments where ``PYTORCH_ALLOC_CONF`` asks for them here. Of steps of
            ``remat`` those that have a plan count. None of a CPU.
        reserved_expandable: the same with expandable segments.
    """

    timed = False

    def __init__(self, step: StepRecord, device: torch.device) -> None:
        modules, names = Modules(None), Names()
        modules.names, modules.layers = step.modules, step.layers
        names.texts = step.names
        super().__init__(_Recorded(step), device, modules, names)
        self.bus_seconds, self.seconds = step.bus_seconds, step.seconds
        self.others = step.others
        self._elsewhere = step.elsewhere
        self.reserved_expandable: int | None = None
        if step.reserved:
            default, self.reserved_expandable = step.reserved
            self.reserved = self.reserved_expandable if _segments_expand() else default

    def remedies(self) -> list[str]:
        """Returns those of a track, and how not to reserve what fragmentation costs where that is
        more than a twentieth."""
        found, reserved, less = super().remedies(), self.reserved, self.reserved_expandable
        if reserved and less and reserved > 1.05 * less:
            found.append(
                f"The allocator reserves {format_bytes(reserved)}, as freed memory lies in pieces; "
                f"with {_EXPANDABLE} in the environment it reserves {format_bytes(less)}."
            )
        return found


def predict(
    build: Build | nn.Module,
    optimizer: Optimizer | None = None,
    batch: Any = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    others: Iterable[nn.Module | Tensor] = (),
    device: torch.device | str = "cpu",
    devices: int | None = None,
    shard: Shard | None = None,
    progress: bool | None = None,
    timeout: float | None = None,
) -> PredictedStep:
    """Predicts the memory of a training step that follows a first one, which makes the states.

    Nothing is allocated and nothing computed: ``build`` and its steps run on fake tensors, which
    have sizes but no memory, in a child process made by ``fork``. Nothing of this process is
    touched: neither the model, its gradients and states, nor random numbers, caches or hooks.
    Effects outside of its memory happen, such as messages to other processes and writes to memory
    that is shared with them; :func:`is_dry_run` tells a model of them. What recomputes, steps in
    backward or keeps its states in eight bits does so in the prediction, too::

        def build():
            model = Transformer(config)
            optimizer = ms.AdamW(model.parameters(), in_backward=True)
            tokens = torch.zeros(8, 2048, dtype=torch.long)

            def step():
                model(tokens).loss.backward()
                optimizer.step()

            return model, optimizer, step

        print(ms.memory.predict(build, device="cuda").peak)

    Or give the model, which may be on the meta device, with its optimizer and a batch::

        ms.memory.predict(model, torch.optim.AdamW(model.parameters()), batch, loss=my_loss)

    Args:
        build: a function, as :func:`compare` takes it, which makes the model, the optimizer (or
            None) and a function that makes one step; or a model, of which a fake copy is used.
        optimizer: with a model: its optimizer, with the states that it has; None for one that has
            no state. One of this package's is made anew, with the same options and no states.
        batch: with a model: what it is called with, a tensor, a tuple of arguments or a dict of
            keyword arguments. Tensors may be on the meta device.
        loss: with a model: makes the loss of what the model returns, or, where it has a second
            argument, of that and the batch; None takes its ``loss``, or a result of one number.
        others: with a model: a list of modules and tensors that are in memory beside it, as an
            average of its weights. What the step itself reads of other models counts anyway.
        device: the device to predict for. ``"cuda"`` needs no card: the fake tensors are on the
            CPU, sizes are rounded up as CUDA's caching allocator does, all memory counts, also of
            batches, and torch's optimizers step as on CUDA. On the CPU of memory from before the
            step only the model's, the optimizer's and other models' counts.
        devices: how many devices there are, each with a process of the step, of which the first is
            predicted, without the others; None for a step of one process. With NCCL's own buffers
            and what CUDA's streams keep for longer a card needs more.
        shard: with ``devices``: ``"fsdp2"`` shards the blocks of the model and the rest by
            ``fully_shard``, ``"ddp"`` wraps it in DistributedDataParallel. None where ``build``
            does either itself.
        progress: whether to show on stderr what runs now, with a bar where tqdm is installed; None:
            where it is a terminal.
        timeout: the most seconds that it may take; None: 60, and 0.15 for each parameter.

    The workspaces of kernels are added where they are known: of convolutions, attention and LSTMs
    on the CPU. cuBLAS's and cuDNN's, and what a CUDA context holds, are not. Values
    that Python reads from tensors are all 1, but for those of small tensors that are known, such
    as ``torch.arange(4)``, and what was filled with a number. Tests and comparisons follow from
    these: nothing is NaN. L-BFGS makes all its iterations, with a full history. What is compiled
    runs as if it were not.
    :func:`remat` follows a plan, within a budget or without, as its later steps do. Plans are made
    of estimated times: those within a budget reach its bytes all the same; without one they need a
    few percent more or less than those of measured times. Without the native part it keeps
    everything, as it does there in all steps.

    Raises:
        TypeError, ValueError: an argument, or what ``build`` returned, is not as said above;
            ``devices`` or ``shard`` beside a model that is wrapped for several processes, or a
            ``build`` that wraps its model without them.
        RuntimeError: an operator's result depends on values, or it has no fake kernel; or no child
            process can be made, or it takes too long. The message names it and says what to do.
        Exception: what the step itself raises on fake tensors.
    """
    chosen = checked_device("predict", device)
    check_timeout("predict", timeout)
    ranks = ranks_of("predict", devices, shard)
    if isinstance(build, nn.Module):
        if is_wrapped(build):
            if ranks is not None:
                raise ValueError(
                    "predict: the model is wrapped for the processes that there are already; leave "
                    "out devices= and shard="
                )
            ranks = ranks_there("predict")
        else:
            refuse_distributed(build)
        check_shapes("predict", build)
        build = from_batch(build, optimizer, batch, loss, others=others)
    elif not callable(build):
        raise TypeError(
            "predict: build must be a function that returns (model, optimizer or None, step), or "
            f"a torch.nn.Module, got {type(build).__name__}"
        )
    elif any(value is not None for value in (optimizer, batch, loss)) or others != ():
        raise TypeError(
            "predict: optimizer, batch, loss and others can be passed only with a model: a "
            "function makes these itself"
        )
    with Progress("predict", 3, progress) as shown:
        uses = build if isinstance(build, FromBatch) else None
        if ranks is not None:
            build = ranks.after(ranks.before(build))
        child = start(build, chosen, uses=uses, ranks=ranks, timeout=timeout, tell=shown.next)
        return PredictedStep(result_of(child), chosen)


def start(
    build: Build,
    device: torch.device,
    *,
    uses: FromBatch | None = None,
    ranks: Ranks | None = None,
    evaluates: bool = False,
    timeout: float | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Child[StepRecord]:
    """Starts a child that predicts a step.

    Args:
        uses: what ``build`` goes back to, where that is a live model.
        ranks: the processes of which it is one; ``build`` is wrapped by what they do before and
            after techniques.
        evaluates: whether an evaluation is followed in place of a step, after the first ones.
        timeout: as of :func:`predict`.
        tell: called with the name of each part that begins.
    """
    tensors = [] if uses is None else uses.tensors()
    others = [] if uses is None else uses.others
    if device.type == "cuda":
        ask_for_child()

    def run() -> StepRecord:
        instead = uses.evaluate if uses is not None and evaluates else None
        return _record_step(build, tensors, others, device, timeout is None, instead, ranks)

    try:
        return Child(run, SECONDS if timeout is None else timeout, tell)
    except ChildError as error:
        raise _no_result(error) from None


def result_of(child: Child[StepRecord]) -> StepRecord:
    """Returns what the child tells; raises NoResult where it tells nothing."""
    try:
        step = child.result()
    except ChildError as error:
        raise _no_result(error) from None
    learn(step.learned)
    return step


class NoResult(NotPredicted):
    """The child process of a prediction has given no result."""


def _no_result(error: ChildError) -> NoResult:
    more = ", or allow more seconds by timeout=" if isinstance(error, LateError) else ""
    return NoResult(f"predict: the step cannot be predicted: {error}{more}")


def _record_step(
    build: Build,
    tensors: Iterable[Tensor],
    others: Iterable[Tensor],
    device: torch.device,
    may_take_longer: bool,
    instead: Callable[[], object] | None,
    ranks: Ranks | None,
) -> StepRecord:
    """In a child: builds, makes the first steps, and follows one, or what runs instead."""
    tracker = FakeTracker(device)
    if ranks is not None:
        tracker.storages.collective = ranks.join()
    with on_fakes(tracker.storages, device, tensors) as adopt:
        tracker.listen()
        note("what is built")
        with built_alone() if ranks is None else nullcontext():
            built = build()
        model, made, step = checked("predict: build", built)
        if ranks is None:
            refuse_distributed(model)
        _adopt_all(adopt, model, made)
        if may_take_longer:
            allow(_SECONDS_PER_PARAMETER * sum(1 for _ in model.parameters()))
        follow_libraries(tracker.storages)  # build() imports transformers where it needs them
        note("first step")
        tracker.reserve(held_by(model, made))
        for _ in range(_first_steps(made)):
            step()
        if ranks is not None:
            ranks.settle(step)
        if tracker.plans():
            # Where the first step makes states in its backward, it is not known to the byte which
            # of its moments they were there in. Later steps follow plans of one that had them.
            step()
            # Where remat runs ahead, no step was without a plan.
            tracker.reserve(held_by(model, made))
        note("the step")
        modules, names = Modules(model), Names()
        others = [*others, *_of_other_models(tracker.storages.reached.values())]
        if ranks is not None:
            others += ranks.buckets()
        times = tracker.follow(model, made, modules, names, instead or step, others)
    record = tracker.record()
    more = modules.names, modules.layers, tracker.storages.repeats.learned()
    of_step = tracker.live, tracker.peak, *times, tracker.others, tracker.reserved
    return StepRecord(record, *of_step, tracker.elsewhere, names.texts, *more)


def _adopt_all(adopt: Callable[[Any], None], model: nn.Module, optimizer: Optimizer | None) -> None:
    """Makes fakes of what is still real of a model and its optimizer.

    Raises:
        NotPredicted: a parameter is real that something follows by hooks, which a fake in its place
            would not have.
    """
    adopt(list(model.buffers()))
    if optimizer is not None:
        adopt(list(optimizer.state.values()))
    in_backward = getattr(optimizer, "in_backward", False)
    for name, param in model.named_parameters():
        if not (in_backward or param._backward_hooks or param._post_accumulate_grad_hooks):
            adopt(param)
        if type(param) is nn.Parameter:
            raise NotPredicted(
                f"predict: the parameter {name} has real memory: build() has made it in another "
                "thread, in which nothing is fake, or it is of a kind of which there are no fakes. "
                "Make the model in the thread that calls build(), and its hooks and its optimizer "
                "once its weights are there"
            )


def _of_other_models(reached: Iterable[Tensor]) -> list[Tensor]:
    """Returns those of tensors that are parameters or some module's buffers."""
    parameters: list[Tensor] = []
    left: dict[int, Tensor] = {}
    for tensor in reached:
        if isinstance(tensor, nn.Parameter):
            parameters.append(tensor)
        else:
            left[id(tensor)] = tensor
    if not left:
        return parameters
    buffers = (b for each in all_modules() for b in each.__dict__.get("_buffers", {}).values())
    return [*parameters, *(left.pop(id(buffer)) for buffer in buffers if id(buffer) in left)]


def check_timeout(who: str, timeout: object) -> None:
    """Raises TypeError or ValueError where it is neither None nor a positive number."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"{who}: timeout must be a number of seconds or None, got {type(timeout).__name__}"
        )
    if not timeout > 0:
        raise ValueError(f"{who}: timeout must be positive, got {timeout!r}")


def _first_steps(optimizer: Optimizer | None) -> int:
    """Returns how many steps make the states. L-BFGS is set to make all its iterations, whatever
    values it reads, and steps until its history is full."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 1
    count = 1
    for group in optimizer.param_groups:
        group["tolerance_grad"] = group["tolerance_change"] = -1.0
        count = max(count, -(-(group["history_size"] + 1) // group["max_iter"]))
    return count
