"""``Fit``, a callback that makes the training of a transformers ``Trainer`` fit into a budget."""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.models import ForwardInPlace
from ..predict.agreement import together
from ..predict.applied import NOT_DEEPSPEED, Applied, applied_to, check
from ..predict.batch import Call, LargerBatches, check_batch, on_device_of
from ..predict.fit import checked_request, fitted
from ..predict.ranks import is_wrapped
from ..remat.offload import Offload

_transformers: Any = importlib.import_module("transformers")
_state: Any = importlib.import_module("accelerate.state")

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CLIPS = (
    "the Trainer clips by the norm of all gradients, and a step in backward keeps no gradients to "
    "clip. Set max_grad_norm=0 in TrainingArguments, which switches clipping off, or use "
    "Fit(clip_each=True), with which the optimizer clips each parameter's gradient by its norm"
)


class Fit(_transformers.TrainerCallback):  # type: ignore[misc]
    """Makes a Trainer's steps fit into a budget, by :func:`memsave_ext.fit`::

        trainer = Trainer(model, args, train_dataset=rows, callbacks=[Fit(budget="24GB")])
        trainer.train()

    It predicts with the first batch when the model is first called with it, and applies the
    cheapest technique that fits before anything is computed. Gradient accumulation and a GradScaler
    are the Trainer's; states that were loaded by ``resume_from_checkpoint`` are converted, and
    checkpoints have states as torch's optimizer has them. Once ``train()`` has ended, or raised, a
    backward steps nothing any more.

    Under ``accelerate launch`` or ``torchrun`` it is the same line, with DistributedDataParallel
    and with FSDP2: all processes take one technique, and the first alone prints and warns.

    Args:
        budget: as of :func:`memsave_ext.fit`.
        loss: as of :func:`memsave_ext.fit`; needed where the Trainer computes the loss itself, as
            with ``compute_loss_func`` or ``label_smoothing_factor``.
        technique, means: as of :func:`memsave_ext.fit`.
        in_backward: as of :func:`memsave_ext.fit`. Say False where a callback, or a method of the
            Trainer, looks at gradients or changes them.
        largest: the largest batch of the training, as the model is called with it, a dict of
            tensors for example; the step is predicted with it in place of the first batch. Without
            it, a UserWarning says where a batch is larger than the first.
        clip_each: whether an optimizer that steps in backward clips each parameter's gradient to
            the Trainer's ``max_grad_norm``, in place of the norm of all. Otherwise, where the
            Trainer clips, as it does by default, nothing is stepped in backward, and gradients that
            do not fit lie elsewhere until they are stepped: losses and norms are the Trainer's.
            While the optimizer clips, the arguments' ``max_grad_norm`` is 0, in checkpoints, too.
        others: as of :func:`memsave_ext.fit`: such as the reference model that a Trainer calls
            itself, of whose steps only the model's own are predicted.
        offload, verbose, timeout: as of :func:`memsave_ext.fit`.

    Attributes:
        fitted: what :func:`memsave_ext.fit` returned; None before the first step.

    Raises:
        TypeError, ValueError: ``budget``, ``technique``, ``offload`` or ``timeout`` is not as said
            there.
        ValueError: when the training begins: one process has several devices, the model is
            compiled, or in DeepSpeed or FSDP1. At the first step: as :func:`memsave_ext.fit`.
        torch.OutOfMemoryError: at the first step: nothing fits.
    """

    def __init__(
        self,
        budget: str | int,
        *,
        loss: Callable[..., Tensor] | None = None,
        technique: str | None = None,
        in_backward: bool = True,
        largest: Any = None,
        clip_each: bool = False,
        others: Iterable[nn.Module | Tensor] = (),
        offload: Offload | None = None,
        verbose: bool = True,
        timeout: float | None = None,
        means: str | None = None,
    ) -> None:
        self.fitted: Applied | None = None
        self._budget, self._options = checked_request(
            budget, in_backward=in_backward, technique=technique, means=means, others=others,
            offload=offload, verbose=verbose, timeout=timeout,
        )  # fmt: skip
        self._options["loss"] = loss
        if largest is not None:
            check_batch("Fit(largest=)", largest)
        self._largest = largest
        self._clip_each = clip_each
        self._training: _Training | None = None  # that goes on, or has raised
        self._batches: _Batches | None = None  # a hook on the model,
        self._watch: Any = None  # which this removes
        self._trained: nn.Module | None = None  # what the Trainer calls: a wrapper, or the model

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        _refuse(args)
        # Where an earlier training raised.
        self._stop_watching()
        _give_clipping_back(args)
        self._training = _Training.of(self)
        trained = model if self._training is None else self._training.model()
        self._trained = trained
        _FirstCall.remove(trained)
        before = applied_to(trained) or applied_to(model)
        if before is not None and before is self.fitted and before.optimizer is optimizer.optimizer:
            self.fitted.go_on()  # another train() of the same Trainer
            self._take_clipping(args)
            self._watch_batches(trained)
            return
        if before is not None:
            before.undo()
        self.fitted = self._batches = None  # an earlier trial's model and optimizer may go
        _refuse_forward(model)
        check("Fit", trained, optimizer, may_be_wrapped=True)
        if args.world_size > 1 and not is_wrapped(trained):
            raise ValueError(
                f"Fit: {args.world_size} processes train the model, which is neither in "
                "DistributedDataParallel nor sharded by FSDP2: Fit knows no other way to"
            )
        gradients = _state.GradientState()
        clips = bool(args.max_grad_norm and args.max_grad_norm > 0)

        def at_first_call(call: Call) -> None:
            if self._is_over():
                return
            with together("Fit", trained) as meeting:
                largest = self._largest
                if largest is not None:
                    largest = on_device_of(trained, largest)
                self.fitted = fitted(
                    trained,
                    optimizer,
                    call if largest is None else largest,
                    self._budget,
                    meeting,
                    is_largest=largest is not None,
                    micro_batches=args.gradient_accumulation_steps,
                    options={
                        "accumulate_when": lambda: not gradients.sync_gradients or self._is_over(),
                        "max_grad_norm": args.max_grad_norm if clips else None,
                    },
                    **self._options
                    | ({"refused": _CLIPS} if clips and not self._clip_each else {}),
                )
            self._take_clipping(args)
            if self.fitted.warns:
                self._batches = _Batches(call if largest is None else largest)
                self._watch_batches(trained)

        _FirstCall(trained, {"then": at_first_call}).install()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trained is not None:
            _FirstCall.remove(self._trained)
        self._training = self._trained = None
        if self.fitted is not None:
            self.fitted.rest()
        self._stop_watching()
        _give_clipping_back(args)

    def _watch_batches(self, model: nn.Module) -> None:
        if self._batches is not None:
            self._watch = model.register_forward_pre_hook(self._batches, with_kwargs=True)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.remove()

    def _take_clipping(self, args: Any) -> None:
        assert self.fitted is not None
        if self._clip_each and self.fitted.steps_in_backward and args.max_grad_norm:
            setattr(args, _NORM, args.max_grad_norm)
            args.max_grad_norm = 0.0

    def _is_over(self) -> bool:
        """Whether the training has raised, of which a Trainer tells its callbacks nothing."""
        return self._training is not None and self._training.is_over()


class _Batches(LargerBatches):
    """A hook on a model, which is pickled with it."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.look((args, kwargs))


_NORM = "_memsave_ext_max_grad_norm"  # where a Trainer's arguments have it while Fit clips


def _give_clipping_back(args: Any) -> None:
    norm = vars(args).pop(_NORM, None)
    if norm is not None and args.max_grad_norm == 0:  # else somebody has set another one since
        args.max_grad_norm = norm


class _Training:
    """A Trainer that is inside of ``train()``, which no reference to a frame keeps alive."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)

    @classmethod
    def of(cls, callback: Fit) -> _Training | None:
        """Returns that of the Trainer that calls the callback; None where it is not found."""
        for trainer in _trainers_on(sys._getframe()):
            if any(other is callback for other in trainer.callback_handler.callbacks):
                return cls(trainer)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the callback is in no training."""
        return type(None), ()

    def model(self) -> Any:
        """Returns what the Trainer calls: its model, or DistributedDataParallel around it."""
        trainer: Any = self._trainer()
        return trainer.model_wrapped

    def is_over(self) -> bool:
        trainer = self._trainer()
        # On CUDA backward runs in a thread of the engine, for which train() waits. A variable here
        # would hold this frame in itself, and with it all that backward's frames have, such as the
        # gradients that FSDP2 has reduced.
        return not any(
            other is trainer
            for stack in sys._current_frames().values()
            for other in _trainers_on(stack)
        )


def _trainers_on(frame: FrameType | None) -> Iterator[Any]:
    """Yields the Trainers inside of whose ``train()`` a stack is. Locals of other calls are not
    read: Python would keep them until these calls end."""
    train = inspect.unwrap(_transformers.Trainer.train).__code__
    while frame is not None:
        if frame.f_code is train:
            yield frame.f_locals[train.co_varnames[0]]
        frame = frame.f_back


def _refuse(args: Any) -> None:
    if args.n_gpu > 1:
        raise ValueError(
            f"Fit: one process has {args.n_gpu} devices, by DataParallel, whose steps Fit cannot "
            "predict. Start a process for each, by accelerate launch or torchrun, or let the "
            "Trainer see one device"
        )
    if args.torch_compile:
        raise ValueError(
            "Fit: with torch_compile=True the compiler decides what is kept for backward, which "
            "Fit cannot predict: leave it out"
        )
    if getattr(args, "deepspeed", None):
        raise ValueError(
            f"Fit: {NOT_DEEPSPEED}. FSDP2 is fsdp=True with fsdp_config={{'version': 2}} in "
            "TrainingArguments"
        )


def _refuse_forward(model: Any) -> None:
    if not isinstance(vars(model).get("forward"), (MethodType, NoneType)):
        raise ValueError(
            f"Fit: the forward of {type(model).__name__} has been replaced already, by "
            "remat_module() or a device_map for example: remove() the handle, or leave the "
            "device_map out"
        )


class _FirstCall(ForwardInPlace):
    """Stands in for a model's forward until it is called for training, and then goes away.

    ``options["then"]`` is told what the model is called with, and may change the model. It runs
    before other hooks: that of FSDP2 gathers parameters. A copy of the model, such as an average of
    its weights, is in no training, and tells nobody.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "options": {}}

    def install(self) -> None:
        super().install()
        self._hook = self.module.register_forward_pre_hook(
            self._called, prepend=True, with_kwargs=True
        )
        self._before: list[set[int]] = []  # which hooks there were, by kind

    @classmethod
    def remove(cls, module: nn.Module, method: str = "forward") -> None:
        found = vars(module).get(method)
        if isinstance(found, cls):
            found._hook.remove()
        super().remove(module, method)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        then = self.options.get("then")
        if then is not None and not (module.training and torch.is_grad_enabled()):
            return
        self.remove(module)
        self._before = [{*getattr(module, name)} for name in _HOOKS]
        if then is not None:
            then(Call(args, kwargs))

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if vars(module).get(self.method) is self:
            return self.function(module)(module, *args, **kwargs)
        # What is applied has hooks of its own, which this call would not run, and those that there
        # were surround this call already.
        with _without_hooks(module, self._before):
            return module(*args, **kwargs)


@contextmanager
def _without_hooks(module: nn.Module, numbers: list[set[int]]) -> Iterator[None]:
    """Takes away a module's hooks of these numbers, by kind, inside the block alone."""
    kinds = [getattr(module, name) for name in _HOOKS]
    all_hooks = [dict(hooks) for hooks in kinds]
    for hooks, taken in zip(kinds, numbers, strict=True):
        for number in taken & hooks.keys():
            del hooks[number]
    try:
        yield
    finally:
        for hooks, before in zip(kinds, all_hooks, strict=True):
            hooks.clear()
            hooks.update(before)
