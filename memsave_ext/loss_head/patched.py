"""What the patches of Hugging Face's language models share: a head that gives numbers in place of
logits, what a model makes of them, and the loss of its hidden states."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..shared.dtensor import is_dtensor, local_tensor
from ..shared.modules import is_own_method
from ..shared.recording import unrecorded
from . import lm_heads
from .function import check_chunk_size, loss_of
from .log_probs import mean_logits, scaled_layer
from .reference import Found
from .vocabulary import is_sharded, replicated, replicated_like

OUTPUTS = (
    "token_losses",
    "log_probs",
    "entropy",
    "lse",
    "mean_logits",
    "predicted_tokens",
    "token_accuracy",
)


class Options(NamedTuple):
    """What is asked for; see :func:`patch_causal_lm`."""

    z_loss: float
    outputs: tuple[str, ...]
    chunk_size: int | None
    debug: bool


def checked_options(
    z_loss: float, outputs: Iterable[str], chunk_size: int | None, debug: bool
) -> Options:
    check_chunk_size(chunk_size)
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be a finite number of at least 0, got {z_loss!r}")
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    for name in outputs:
        if name not in OUTPUTS:
            raise ValueError(f"outputs must be names among {', '.join(OUTPUTS)}, got {name!r}")
    return Options(z_loss, outputs, chunk_size, debug)


class Call:
    """One forward of the model with labels, or of a replica of it, which has a head of its own."""

    hidden: Tensor | None = None  # what the head was given
    layer: lm_heads.Layer | None = None  # what the head was then
    probe: Tensor | None = None  # what the head gave: not its logits
    labels: Tensor | None = None  # that the forward was not given
    loss = False  # whether it was computed

    def __init__(self, head: Any, with_labels: bool) -> None:
        self.head, self.with_labels = head, with_labels
        self.of_probe = ExitStack()  # from the head to the loss
        self.outputs: dict[str, Tensor] = {}

    def stands_in(self, value: Any) -> bool:
        """Whether the value is the probe, or what the model has made of it."""
        assert self.probe is not None
        is_tensor = isinstance(value, Tensor) and not value.requires_grad
        return is_tensor and value.shape == self.probe.shape


class Form(NamedTuple):
    """How the model's logits come of the head's: ``softcap * tanh(scale * logits / softcap)``."""

    scale: float
    softcap: float | None


# Logits that show what a model makes of them, whatever its weights are: near 0 it is a scale, far
# from it a cap.
_PROBE = (2.0**-20, 1.0, 1e4, -1.0, 7.5, -1e4, 40.0, -0.25)


def _probe(like: Tensor, classes: int) -> Tensor:
    """Returns (1, 8, classes) in which every class has each number of _PROBE."""
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    values = torch.tensor(_PROBE, dtype=dtype, device=like.device)
    repeated = values.repeat(2 + classes // len(_PROBE))
    return repeated.unfold(0, classes, 1)[: len(_PROBE)].clone()[None]


def _form_of(probe: Tensor, logits: Tensor) -> Form | None:
    """Returns what made ``logits`` of ``probe``; None if it is something else."""
    rows = logits[0, :, 0].tolist()  # of class 0, which has _PROBE in order
    scale, softcap = rows[1], None
    if abs(rows[2] - 1e4 * scale) > 1e-3 * abs(rows[2]):
        softcap = rows[2]
        if not abs(rows[0]) < softcap < math.inf:
            return None
        scale = softcap * math.atanh(rows[0] / softcap) / _PROBE[0]
        scale = 1.0 if abs(scale - 1) < 1e-6 else scale
    if scale == 0 or not math.isfinite(scale):
        return None

    def is_right(given: Tensor, found: Tensor) -> bool:
        expected = scale * given
        if softcap is not None:
            expected = softcap * torch.tanh(expected / softcap)
        return torch.allclose(found.to(given.dtype), expected, rtol=1e-5, atol=1e-6 * abs(scale))

    # One after the other: all at once take as much memory as many tokens' logits.
    return Form(scale, softcap) if all(map(is_right, probe[0], logits[0])) else None


def _unwrapped(model: Any) -> Any:
    """Returns the model inside of peft's and torch.compile's, whose forward it is."""
    while True:
        if "_orig_mod" in getattr(model, "_modules", ()):
            model = model._orig_mod
        elif callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()
        else:
            return model


def _head_of(model: Any) -> Any:
    """Returns the head, of peft's copies of it the one that is trained; None if there is none."""
    get_head = getattr(model, "get_output_embeddings", None)
    head: Any = None if get_head is None else get_head()
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        active = [name for name in head.active_adapters if name in copies]
        head = copies[active[0]] if len(active) == 1 else None
    return head


def _copies_are_disabled(model: Any) -> bool:
    """Whether peft's ``disable_adapter()`` has the head in use that was there before its copies."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return isinstance(copies, nn.ModuleDict) and bool(head.disable_adapters)


def _is_freed(weight: Tensor) -> bool:
    try:
        local = local_tensor(weight)
        return local.numel() > 0 and local.untyped_storage().size() == 0
    except (RuntimeError, NotImplementedError):  # a subclass without a storage
        return False


def names_in_forward(model: Any) -> set[str]:
    """Returns the names that the forward uses, or one that it may call."""
    forwards = [vars(base).get("forward") for base in type(model).__mro__]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in forwards if f is not None]
    return {name for code in codes if code is not None for name in code.co_names}


class Patched:
    """What a patch has changed; :meth:`remove` restores it."""

    _who: str  # the function that patches

    def __init__(self, model: Any, options: Options) -> None:
        given, model = model, _unwrapped(model)
        self._name = f"{self._who}: {type(model).__name__}"
        head = _head_of(model)
        if why := lm_heads.why_not(head):
            raise TypeError(f"{self._name} {why}")
        for layer in (head, getattr(head, "base_layer", None)):
            own = vars(layer or head).get("forward")
            if isinstance(getattr(own, "__self__", None), Patched):
                raise RuntimeError(f"{self._name} is patched already")
            if own is not None and not is_own_method(own, layer or head):
                raise TypeError(
                    f"{self._name} has output embeddings with a forward of their own, which "
                    "something has set on them (as accelerate's hooks do) and which this would lose"
                )
        self._model, self._head, self._options = model, head, options
        self._refuse()
        self._signature = inspect.signature(model.forward)
        self._form: Form | None = None  # known after the first call
        self._calls: dict[int, Call] = {}  # by thread
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        vars(head)["forward"] = self._run_head
        self._compiled = given is not model or model._compiled_call_impl is not None
        self._forget_compiled()

    def _refuse(self) -> None:
        """Raises TypeError for a model that cannot be patched."""
        raise NotImplementedError

    def _finished(self, call: Call, output: Any) -> Any:
        """Returns the output of a forward with labels, without logits."""
        raise NotImplementedError

    def _forget_compiled(self) -> None:
        """A compiled forward does not look for hooks that came or went since."""
        if self._compiled:
            torch.compiler.reset()

    def remove(self) -> None:
        """Let the model compute its logits and its loss as before. A second call does nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._restore()
        vars(self._head).pop("forward", None)
        self._forget_compiled()

    def _restore(self) -> None:
        """Puts back what this kind of patch has replaced besides the head's forward."""

    # A compiled graph ends at each of these: who is in a forward is not known when it is traced.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self._end_call()  # what interrupts a forward may pass by _after()
        if kwargs.get("fused_lm_head"):  # TRL's, which does not call the head, and has no logits
            return None
        given = self._signature.bind_partial(*args, **kwargs).arguments
        with_labels = model.training and given.get("labels") is not None
        with_labels = with_labels and not _copies_are_disabled(model)
        replica: Any = None if model is self._model else model  # of DataParallel
        if with_labels or replica is not None:
            head = _head_of(model)
            if head is not self._head and replica is None:
                raise RuntimeError(
                    f"{self._name} has another head than when it was patched: call remove(), and "
                    "patch it again"
                )
            call = self._calls[threading.get_ident()] = Call(head, with_labels)
            return self._arguments(model, call, given) if with_labels else None
        return None

    def _end_call(self) -> Call | None:
        """Returns the call that this thread was in."""
        call = self._calls.pop(threading.get_ident(), None)
        if call is not None:
            call.of_probe.close()
        return call

    def _arguments(self, model: Any, call: Call, given: dict[str, Any]) -> Any:
        """Returns what the forward is given in place of its arguments, of which ``given`` are
        those of its parameters; None: it is given its own."""
        return None

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        call = self._end_call()
        if call is None:
            return output
        if output is None or not call.with_labels:
            return output
        if isinstance(output, tuple) and self._options.outputs:
            raise self._error("returns a tuple, to which outputs= cannot add anything")
        made = self._finished(call, output)
        for name, value in call.outputs.items():
            made[name] = value
        return made

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _run_head(self, hidden: Tensor, **options: Any) -> Tensor:
        call = self._calls.get(threading.get_ident())
        if call is None or not call.with_labels:
            head: Any = self._head if call is None else call.head
            logits: Tensor = type(head).forward(head, hidden, **options)
            return logits
        if call.hidden is not None:
            raise self._error("calls its head more than once in a forward")
        if why := lm_heads.why_not(call.head):  # of adapters that are active now
            raise RuntimeError(f"{self._name} {why}")
        if options:
            raise self._error(f"gives its head {', '.join(options)} besides hidden states")
        call.hidden, call.layer = hidden, lm_heads.layer_of(call.head, hidden)
        call.of_probe.enter_context(unrecorded())  # later steps have another one
        classes, local = self._head.weight.shape[0], local_tensor(hidden)
        if self._form is None and _has_values(local):
            call.probe = _probe(local, classes)
        else:
            call.probe = local.new_zeros(1, 1, classes)
        # A parallelized layer has a hook that expects a DTensor.
        return replicated_like(hidden, call.probe) if is_dtensor(hidden) else call.probe

    def _loss_of(
        self,
        call: Call,
        logits: Tensor,
        labels: Tensor,
        ignore_index: int,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor:
        """Returns the loss of the hidden states that the head was given. ``labels``: the class that
        each of them predicts. ``logits``: what the model has made of the head's numbers."""
        form, options = self._check(call, logits), self._options
        call.of_probe.close()
        assert call.hidden is not None and call.layer is not None
        weight, bias, low_rank = call.layer
        if _is_freed(weight):
            raise self._error(
                "has freed the weight of its head, which FSDP2 shards by itself, before its loss: "
                "shard the head with the model, or with reshard_after_forward=False"
            )
        hidden, bias, low_rank = scaled_layer(call.hidden, bias, low_rank, form.scale)
        target = labels.reshape(-1).to(hidden.device)
        found = loss_of(
            hidden,
            weight,
            target,
            linear_bias=bias,
            low_rank=low_rank,
            reduction="none",
            ignore_index=ignore_index,
            softcap=form.softcap,
            chunk_size=options.chunk_size,
            debug=options.debug,
            loss_dtype=torch.promote_types(hidden.dtype, torch.float32),
            return_lse=options.z_loss > 0 or "lse" in options.outputs,
            return_predicted=bool({"predicted_tokens", "token_accuracy"} & {*options.outputs}),
            return_entropy="entropy" in options.outputs,
        )
        counted = target != ignore_index
        mean = None
        if "mean_logits" in options.outputs:
            if is_sharded(weight):
                raise ValueError(
                    f"{self._name}: outputs has 'mean_logits', which cannot be computed where the "
                    "head's weight is sharded over its classes"
                )
            mean = mean_logits(
                hidden, weight, linear_bias=bias, low_rank=low_rank, softcap=form.softcap
            )
        call.outputs = self._named(found, mean, target, counted, labels.shape)
        losses = found.loss
        if options.z_loss and found.lse is not None:
            losses = losses + options.z_loss * torch.where(counted, found.lse, 0.0).square()
        if num_items_in_batch is None:
            num_items_in_batch = counted.sum()
        elif isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(losses.device)
        # The models' own loss is that of logits cast to float32.
        return (losses.sum() / num_items_in_batch).float()

    def _named(
        self,
        found: Found,
        mean: Tensor | None,
        target: Tensor,
        counted: Tensor,
        shape: torch.Size,
    ) -> dict[str, Tensor]:
        """Returns what the model's output has besides."""

        def of_counted(values: Tensor | None) -> Tensor | None:
            return None if values is None else torch.where(counted, values, 0.0)

        of_tokens = {"token_losses": found.loss, "log_probs": -found.loss, "lse": found.lse}
        of_tokens["entropy"], of_tokens["mean_logits"] = of_counted(found.entropy), of_counted(mean)
        of_tokens["predicted_tokens"] = found.predicted
        named = {name: v.view(shape) for name, v in of_tokens.items() if v is not None}
        if found.predicted is not None:
            right = ((found.predicted == target) & counted).sum()
            named["token_accuracy"] = right / counted.sum()
        return {name: named[name] for name in self._options.outputs}

    def _check(self, call: Call, logits: Tensor) -> Form:
        """Returns how the model's logits are made. Looks at numbers once, since a GPU has to be
        awaited for it. Raises RuntimeError where the loss would be that of other logits."""
        assert call.probe is not None
        call.loss = True
        if is_dtensor(logits):
            logits = local_tensor(replicated(logits))
        if logits.shape != call.probe.shape:
            raise self._error("takes a part of its logits, or adds to them, before the loss")
        if logits.requires_grad:
            raise self._error("makes its logits with parameters that are not the head's")
        if self._form is not None or not _has_values(logits):
            return self._form or Form(1.0, None)  # no numbers will come of it
        form = _form_of(call.probe, logits)
        if form is None:
            raise self._error("does more to its logits than scaling them and capping them by tanh")
        self._form = form
        return form

    def _error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self._name} {what}: the loss of this model cannot be computed without logits. Call "
            "remove() to use its own."
        )


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
