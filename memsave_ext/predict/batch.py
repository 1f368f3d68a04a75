"""Makes a training step of a model, its optimizer and a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from ..adam import in_backward
from ..adam.in_place import options_outside_groups, taken_by
from ..adam.own_optimizer import OwnStep
from ..adam.owners import release
from ..adam.step_in_backward import InBackward
from ..fakes.mode import loss_in
from ..fakes.values import values_elsewhere
from ..shared.dtensor import is_dtensor
from ..shared.modules import device_of, first_parameter
from ..shared.warn import warn

Loss = Callable[..., Tensor]  # of what the model returned, and of the batch where it takes two
Forward = Callable[[nn.Module, Any], Tensor]  # of the model and of the batch: the loss


class Call(NamedTuple):
    """What a model is called with: a batch of any form."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class FromBatch:
    """Builds a step of a model, its optimizer and a batch; in a child, where these are fakes.

    Args:
        model, optimizer, batch: as for :func:`predict`.
        run: makes the loss of the model and the batch.
        who: the function that errors are of.
        others, micro_batches, keeps_gradients, reduces_once: as of :func:`from_batch`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Any,
        run: Forward,
        who: str,
        others: Iterable[nn.Module | Tensor],
        micro_batches: int,
        keeps_gradients: bool,
        reduces_once: bool,
    ) -> None:
        self._model, self._optimizer, self._batch = model, optimizer, _plain(batch)
        self._run, self._who = run, who
        self._micro_batches, self._keeps_gradients = micro_batches, keeps_gradients
        self._reduces_once = reduces_once
        self.others = tensors_of(others)
        self._autocast = _Autocast()
        self._values = values_elsewhere(self._batch)

    def tensors(self) -> list[Tensor]:
        """Returns what the step has from the beginning, without states."""
        batch = [t for t in tree_leaves(self._batch) if isinstance(t, Tensor)]
        return [*self._model.parameters(), *self._model.buffers(), *batch]

    def __call__(self) -> tuple[nn.Module, Optimizer | None, Callable[[], object]]:
        model, optimizer = self._model, self._optimizer
        params = {id(p): p for p in model.parameters()}
        for group in () if optimizer is None else optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in params:
                    sharded = any(map(is_dtensor, params.values())) and not is_dtensor(p)
                    raise ValueError(
                        f"{self._who}: optimizer has a parameter of shape {list(p.shape)} that is "
                        "not in model"
                        + ": it was made before fully_shard(), whose shards it must step"
                        * sharded
                    )
        for p in params.values():
            p.grad = None
        if isinstance(optimizer, InBackward):
            optimizer = _remade(optimizer)
        for tensor, value in self._values:
            tensor.fill_(value)
        return model, optimizer, lambda: self._step(optimizer)

    def _step(self, optimizer: Optimizer | None) -> None:
        with self._autocast.left():
            for number in range(1, self._micro_batches + 1):
                is_last = number == self._micro_batches
                # A loop may ask for a prediction where it is about to reduce nothing.
                _reduce(self._model, is_last, self._reduces_once)
                with nullcontext() if is_last else _accumulating(optimizer):
                    loss = self._loss()
                    if self._keeps_gradients and number == 1:
                        self._model.zero_grad()
                    loss.backward()
                    del loss  # and what it was made of
            if optimizer is not None:
                optimizer.step()
            if not self._keeps_gradients:
                self._model.zero_grad()

    def evaluate(self) -> None:
        """Calls the model in eval mode, without gradients."""
        self._model.eval()
        with self._autocast.left(), torch.no_grad(), self._autocast.entered():
            self._run(self._model, self._batch)

    def _loss(self) -> Tensor:
        # The output is kept by nothing but its graph, as in a step that is written in one line.
        with self._autocast.entered():
            return _checked_loss(self._who, self._run(self._model, self._batch))


def from_batch(
    model: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    loss: Loss | None,
    *,
    who: str = "predict",
    others: Iterable[nn.Module | Tensor] = (),
    micro_batches: int = 1,
    forward: Forward | None = None,
    keeps_gradients: bool = False,
    reduces_once: bool = False,
) -> FromBatch:
    """Returns what builds a step of all arguments, in a child process.

    Args:
        model, optimizer, batch, loss: as for :func:`predict`.
        who: the function that errors are of.
        others: what else is in memory in a step and counts: modules or tensors.
        micro_batches: how many backwards a step has.
        forward: stands for calls of the model and of ``loss``; what it is given may be anything.
        keeps_gradients: whether those of a step are there until the next one's first backward, and
            not freed before its forward.
        reduces_once: whether FSDP2 reduces gradients in the last of these backwards alone, as
            DistributedDataParallel does.

    Raises:
        TypeError: ``optimizer`` is no optimizer; ``batch`` is missing, or none; ``loss`` is no
            function; ``others`` is no list of modules and tensors. In the step: the loss is no
            tensor of one number.
        ValueError: ``optimizer`` has parameters that ``model`` has not. In the step: the loss
            depends on nothing that is trained.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{who}: optimizer must be a torch.optim.Optimizer or None, got "
            f"{type(optimizer).__name__}"
        )
    if forward is None:  # else anything may be
        check_batch(who, batch)
        forward = _forward_of(who, loss)
    others = checked_others(who, others)
    return FromBatch(
        model, optimizer, batch, forward, who, others, micro_batches, keeps_gradients, reduces_once
    )


class LargerBatches:
    """Says once where a batch is larger than the one that a step was predicted with.

    Args:
        batch: that one, of any form.
    """

    def __init__(self, batch: Any) -> None:
        self._most = _elements(batch)  # of its largest tensor, beside which others may come
        self._said = False

    def look(self, batch: Any) -> None:
        if self._said or (elements := _elements(batch)) <= self._most:
            return
        self._said = True
        warn(
            f"memsave_ext: Fit: a batch has a tensor of {elements:,} elements, and the step was "
            f"predicted with {self._most:,} at most: it needs more memory. Pass the largest batch, "
            "Fit(largest=batch), and the step is predicted with that one",
        )


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """Returns the batch with its tensors where the model's first parameter is."""
    if first_parameter(model) is None:
        return batch
    device = device_of(model)
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, _plain(batch))


def _elements(batch: Any) -> int:
    tensors = (t for t in tree_leaves(_plain(batch)) if isinstance(t, Tensor))
    return max((t.numel() for t in tensors), default=0)


def checked_others(who: str, others: Any) -> list[nn.Module | Tensor]:
    of_what = f"{who}: others must be a list of modules and tensors, got {type(others).__name__}"
    if not isinstance(others, (list, tuple)):
        raise TypeError(of_what)
    for other in others:
        if not isinstance(other, (nn.Module, Tensor)):
            raise TypeError(f"{of_what} with {type(other).__name__}")
    return list(others)


def tensors_of(others: Iterable[nn.Module | Tensor]) -> list[Tensor]:
    """Returns the parameters and buffers of modules, and tensors as they are."""
    found: list[Tensor] = []
    for other in others:
        found += [other] if isinstance(other, Tensor) else [*other.parameters(), *other.buffers()]
    return found


class _Autocast:
    """The autocast that a prediction is made in: a loop has it around its forwards alone."""

    def __init__(self) -> None:
        self._open = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    @contextmanager
    def left(self) -> Iterator[None]:
        """As outside of it."""
        depth = torch.autocast_increment_nesting() - 1  # casts are kept until the outermost ends
        for _ in range(depth + 1):
            torch.autocast_decrement_nesting()
        for device, _ in self._open:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            for device, dtype in self._open:
                torch.set_autocast_enabled(device, True)
                torch.set_autocast_dtype(device, dtype)
            for _ in range(depth):
                torch.autocast_increment_nesting()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device, dtype in self._open:
                stack.enter_context(torch.autocast(device, dtype))
            yield


def _plain(batch: Any) -> Any:
    """Returns a dict of what a library's class of batches has, whose tensors nobody would find."""
    is_plain = isinstance(batch, dict) or not isinstance(batch, Mapping)
    return batch if is_plain else dict(batch)


def _accumulating(optimizer: Any) -> AbstractContextManager[None]:
    if isinstance(optimizer, InBackward) and optimizer.in_backward:
        return optimizer.accumulate()
    return nullcontext()


def _reduce(model: Any, is_last: bool, once: bool) -> None:
    """Has a wrapped model reduce the gradients of the next backward, or keep them in each process.

    Args:
        is_last: whether it is the last backward of its step.
        once: whether FSDP2's gradients are reduced there alone; they are whole until then.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = is_last
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last or not once)


def _remade(optimizer: Any) -> Optimizer:
    """Returns an optimizer of this package's anew: its hooks are on the parameters' former
    implementations. It has no states yet."""
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state.clear()
    if not isinstance(optimizer, OwnStep):
        # A scaler is not told of steps that are not made.
        outside = options_outside_groups(optimizer)
        outside.pop("grad_scaler", None)
        release(optimizer)
        return construct(type(optimizer), groups, optimizer.defaults, **outside)
    gradients = optimizer._gradients
    has_hooks = optimizer.in_backward or gradients is not None
    release(optimizer)
    made = construct(optimizer._own, groups, optimizer.defaults)
    if not has_hooks:
        return made
    taken: Optimizer = in_backward(
        made, small_bytes=optimizer._small_bytes, bucket_bytes=optimizer._bucket_bytes,
        grads_on=None if gradients is None else gradients.where,
    )  # fmt: skip
    return taken


def construct(
    kind: type[Optimizer], groups: list[dict[str, Any]], defaults: Mapping[str, Any], **more: Any
) -> Optimizer:
    """Returns an optimizer of a kind, made with those of ``defaults`` that it takes."""
    make: Any = kind
    made: Optimizer = make(groups, **taken_by(kind, defaults) | more)
    return made


def check_batch(who: str, batch: Any) -> None:
    """Raises TypeError where no model is called with this."""
    if batch is None:
        raise TypeError(f"{who}: a model needs batch=, which it is called with")
    of_batches = (Iterator, torch.utils.data.DataLoader, torch.utils.data.Dataset)
    if isinstance(batch, (*of_batches, str, bytes)) or type(batch).__module__ == "numpy":
        hint = ", such as next(iter(loader))" if isinstance(batch, of_batches) else ""
        raise TypeError(
            f"{who}: batch must be one batch{hint}, a tensor, a tuple of arguments or a dict of "
            f"keyword arguments that the model is called with, got {type(batch).__name__}"
        )


def _checked_loss(who: str, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        is_tensor = isinstance(loss, Tensor)
        made = f"one of shape {list(loss.shape)}" if is_tensor else type(loss).__name__
        raise TypeError(f"{who}: loss must return a tensor of one number, got {made}")
    if not loss.requires_grad:
        raise ValueError(
            f"{who}: the loss has no gradient: it depends on no parameter that requires one, or it "
            "is detached"
        )
    return loss


def _forward_of(who: str, loss: Loss | None) -> Forward:
    """Returns a function that calls a model with a batch and makes the loss of what it returns."""
    if loss is not None and not callable(loss):
        raise TypeError(f"{who}: loss must be a function or None, got {type(loss).__name__}")
    takes_batch = loss is not None and _takes_two(who, loss)

    def forward(model: nn.Module, inputs: Any) -> Tensor:
        call = _call_of(inputs)
        _check_call(who, model, call)
        try:
            output = model(*call.args, **call.kwargs)
        except (AttributeError, TypeError) as error:
            if not isinstance(inputs, list):
                raise
            raise TypeError(
                f"{who}: batch is a list, which {type(model).__name__} gets as its one argument: "
                f"{error}. Pass a tuple for several arguments; of a loader's [inputs, targets] "
                "pass the inputs alone"
            ) from error
        if loss is None:
            return _loss_of(who, output)
        if not takes_batch:
            return loss(output)
        if isinstance(inputs, Call):
            inputs = call.args or call.kwargs
        return loss(output, inputs)

    return forward


def _call_of(inputs: Any) -> Call:
    if isinstance(inputs, Call):
        return inputs
    if isinstance(inputs, Mapping):
        return Call((), dict(inputs))
    return Call(inputs if isinstance(inputs, tuple) else (inputs,), {})


def _check_call(who: str, model: nn.Module, call: Call) -> None:
    """Raises TypeError where a model does not take these arguments."""
    try:
        inspect.signature(model.forward).bind(*call.args, **call.kwargs)
    except ValueError:  # it does not tell
        return
    except TypeError as error:
        raise TypeError(
            f"{who}: batch must be what {type(model).__name__} is called with, a tensor, a tuple "
            f"of arguments or a dict of keyword arguments: {error}"
        ) from None


def _takes_two(who: str, loss: Loss) -> bool:
    """Whether a loss needs a second argument, which is then the batch."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except ValueError:  # it does not tell
        return False
    for arguments in ((None,), (None, None)):
        with suppress(TypeError):
            signature.bind(*arguments)
            return len(arguments) == 2
    raise TypeError(
        f"{who}: loss must be a function of what the model returned, or of that and the batch, got "
        f"a function with the parameters {signature}"
    )


def _loss_of(who: str, output: Any) -> Tensor:
    found = loss_in(output)
    if found is None:
        raise TypeError(
            f"{who}: the model returned no loss. Pass loss=, a function that computes the loss "
            "from what the model returned, or from that and the batch"
        )
    return found
