"""Predicts the memory of a training step: the step runs on fake tensors, which hold no memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from ..fakes.cuda import as_on_cuda, step_as_on_cuda
from ..fakes.mode import fakes, transformers_as_in_steps, uncompiled
from ..fakes.repeats import Repeats
from ..memory.hooks import Hooks, Names
from ..memory.measure import Build, checked
from ..memory.reported import Reported
from ..shared.modules import Modules
from ..shared.progress import Progress
from .batch import from_batch
from .distributed import built_alone, refuse_distributed
from .tracker import FakeTracker


class PredictedStep(Reported):
    """What :func:`predict` returns: the figures of a :class:`Track` of one training step.

    The times among them count events, as nothing was run.

    Attributes:
        bus_seconds: how long copies take of what ``offload`` moves in the step, out and back; they
            run beside the step's arithmetic.
    """

    timed = False

    def __init__(
        self,
        tracker: FakeTracker,
        device: torch.device,
        model: nn.Module,
        optimizer: Optimizer | None,
    ) -> None:
        modules, names = Modules(model), Names()
        super().__init__(tracker, device, modules, names)
        tracker.set_modules(modules.parents)
        self.bus_seconds = 0.0
        self._hooks = Hooks(tracker, model, modules, [optimizer] if optimizer else [], names)

    def _follow(self, step: Callable[[], object]) -> None:
        self._tracker.start()
        self._hooks.label()
        self._tracker.begin()
        before = self._tracker.copying
        with self._hooks.install():
            step()
        self._tracker.stop()
        self.bus_seconds = self._tracker.copying - before
        del self._hooks


def predict(
    build: Build | nn.Module,
    optimizer: Optimizer | None = None,
    batch: Any = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
    progress: bool | None = None,
) -> PredictedStep:
    """Predicts the memory of a training step that follows a first one, which makes the states.

    Nothing is allocated and nothing computed: ``build`` and its steps run on fake tensors, which
    have sizes but no memory. What recomputes, steps in backward or keeps its states in eight bits
    does so in the prediction, too::

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
        optimizer: with a model: its optimizer, None for one that has no state. A new one with the
            same class and options is used.
        batch: with a model: what it is called with, a tensor, a tuple of arguments or a dict of
            keyword arguments. Tensors may be on the meta device.
        loss: with a model: makes the loss of what the model returns, or, where it has a second
            argument, of that and the batch; None takes its ``loss``, or a result of one number.
        device: the device to predict for. ``"cuda"`` needs no card: the fake tensors are on the
            CPU, sizes are rounded up as CUDA's caching allocator does, all memory counts, also of
            batches, and torch's optimizers step as on CUDA. On the CPU, as for :func:`track`, of
            memory from before the step only the model's and the optimizer's counts.
        progress: whether to show on stderr what runs now, with a bar where tqdm is installed; None:
            where it is a terminal.

    The workspaces of kernels are added where they are known: of convolutions, attention and LSTMs
    on the CPU. cuBLAS's and cuDNN's, fragmentation, and what a CUDA context holds are not. Values
    that Python reads from tensors are all 1, but for those of small tensors that are known, such
    as ``torch.arange(4)``, and what was filled with a number. Tests and comparisons follow from
    these: nothing is NaN. L-BFGS makes all its iterations, with a full history. What is compiled
    runs as if it were not.
    :func:`remat` follows a plan, within a budget or without, as its later steps do. Plans are made
    of estimated times: those within a budget reach its bytes all the same; without one they need a
    few percent more or less than those of measured times. Without the native part it keeps
    everything, as it does there in all steps.

    Raises:
        TypeError, ValueError: an argument, or what ``build`` returned, is not as said above, or the
            model is wrapped for several processes.
        RuntimeError: an operator's result depends on values, or it has no fake kernel. The
            message names it and says what to do.
    """
    chosen = device_of("predict", device)
    if isinstance(build, nn.Module):
        refuse_distributed(build)
        build = from_batch(build, optimizer, batch, loss)
    elif optimizer is not None or batch is not None or loss is not None:
        raise TypeError("predict: optimizer, batch and loss go with a model, not with a function")
    elif not callable(build):
        raise TypeError(
            "predict: build must be a function that returns (model, optimizer or None, step), or "
            f"a torch.nn.Module, got {type(build).__name__}"
        )
    return predict_step(build, chosen, progress=progress)


def predict_step(
    build: Build,
    device: torch.device,
    *,
    repeats: Repeats | None = None,
    progress: bool | None = None,
) -> PredictedStep:
    """As :func:`predict`, of a function and a device; ``repeats`` as of :class:`Storages`."""
    tracker = FakeTracker(device, repeats)
    with ExitStack() as stack:
        shown = stack.enter_context(Progress("predict", 3, progress))
        shown.begin("what is built")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if device.type == "cuda":
            stack.enter_context(as_on_cuda())
        stack.enter_context(fakes())
        stack.enter_context(tracker.storages)
        stack.enter_context(tracker.listening())
        with built_alone():
            built = build()
        model, made, step = checked("predict: build", built)
        refuse_distributed(model)
        _refuse_real(model)
        # After build(), which imports transformers and the compiler where the model needs them.
        stack.enter_context(uncompiled())
        stack.enter_context(transformers_as_in_steps(tracker.storages.has_known_values))
        if device.type == "cuda":
            step_as_on_cuda(made)
        shown.end()
        shown.begin("first step")
        for _ in range(_first_steps(made)):
            step()
        if tracker.plans():
            # Where the first step makes states in its backward, it is not known to the byte which
            # of its moments they were there in. Later steps follow plans of one that had them.
            step()
        shown.end()
        shown.begin("the step")
        predicted = PredictedStep(tracker, device, model, made)
        predicted._follow(step)
    return predicted


def device_of(who: str, device: torch.device | str) -> torch.device:
    """Returns the device to predict for; raises an error of ``who`` where it is none."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None  # torch does not know its name
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"{who}: device must be the CPU or a CUDA device, got {device!r}")
    return chosen


def _refuse_real(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if not isinstance(p, FakeTensor) and not p.is_meta:
            raise ValueError(
                f"predict: the parameter {name} was made before. build must make the model itself; "
                "or give the model, in place of build, with optimizer and batch"
            )
        if p.is_meta and not isinstance(p, FakeTensor):
            raise ValueError(
                f"predict: the parameter {name} is on the meta device. Give the model, in place of "
                "build, with optimizer and batch"
            )


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
