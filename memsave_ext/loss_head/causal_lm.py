"""The losses of Hugging Face's causal language models, without their logits."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .function import loss_of
from .log_probs import scaled
from .reference import Found


def patch_causal_lm(
    model: nn.Module,
    *,
    z_loss: float = 0.0,
    outputs: Iterable[str] = (),
    chunk_size: int | None = None,
    debug: bool = False,
) -> PatchedCausalLM:
    """Let a causal language model of Hugging Face compute its loss without logits.

    Where ``labels`` are given in training mode, the loss is that of :func:`linear_cross_entropy`
    and ``output.logits`` is None. In eval mode, and without labels, nothing changes::

        ms.patch_causal_lm(model)
        model(input_ids=ids, labels=ids).loss.backward()

    Args:
        model: one that computes ``logits = head(hidden_states)``, where
            ``model.get_output_embeddings()`` returns the head, may scale them by a number and cap
            them by tanh, and computes their loss by ``model.loss_function``, as the models of
            transformers do, those for images and text, too. May be wrapped by peft or
            ``torch.compile``.
        z_loss: times the square of the log-sum-exp of a token's logits is added to its loss.
        outputs: names of what the model's output has besides, where the loss is without logits.
            ``"token_losses"``: in float32, 0 where a label is ignored, without the z-loss.
            ``"lse"``: the log-sum-exp of the logits, in float32. ``"predicted_tokens"``: int64.
            ``"token_accuracy"``: the share of the labels that are predicted; NaN of none. All but
            the last have the labels' shape, ``(batch, tokens)``, and stand where the token is that
            predicts, one before the label. The first two have gradients.
        chunk_size, debug: as in :func:`linear_cross_entropy`.

    Returns:
        An object whose ``remove()`` undoes it.

    Raises:
        TypeError: the model has no linear head, or computes another loss.
        ValueError: ``z_loss`` is negative or not finite, or ``outputs`` has another name.
        RuntimeError: it is patched already. In the first forward: the model does something else to
            its logits, or scales them by what is trained.
    """
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be a number of 0 or more, got {z_loss!r}")
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    for name in outputs:
        if name not in _OUTPUTS:
            raise ValueError(f"outputs must be names of {', '.join(_OUTPUTS)}, got {name!r}")
    return PatchedCausalLM(model, z_loss, outputs, chunk_size, debug)


_OUTPUTS = "token_losses", "lse", "predicted_tokens", "token_accuracy"


class _Call:
    """One forward of the model with labels, or of a replica of it, which has a head of its own."""

    hidden: Tensor | None = None  # what the head was given
    probe: Tensor | None = None  # what the head gave: not its logits
    loss = False  # whether it was computed

    def __init__(self, head: Any, with_labels: bool) -> None:
        self.head, self.with_labels = head, with_labels
        self.outputs: dict[str, Tensor] = {}

    def stands_in(self, value: Any) -> bool:
        """Whether the value is the probe, or what the model has made of it."""
        assert self.probe is not None
        is_tensor = isinstance(value, Tensor) and not value.requires_grad
        return is_tensor and value.shape == self.probe.shape


class _Form(NamedTuple):
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
    rows = torch.arange(len(_PROBE), device=like.device)[:, None]
    return values[(rows + torch.arange(classes, device=like.device)) % len(_PROBE)][None]


def _form_of(probe: Tensor, logits: Tensor) -> _Form | None:
    """Returns what made ``logits`` of ``probe``; None if it is something else."""
    rows = logits[0, :, 0].tolist()  # of class 0, which has _PROBE in order
    scale, softcap = rows[1], None
    expected = scale * probe
    if abs(rows[2] - 1e4 * scale) > 1e-3 * abs(rows[2]):
        softcap = rows[2]
        if not abs(rows[0]) < softcap < math.inf:
            return None
        scale = softcap * math.atanh(rows[0] / softcap) / _PROBE[0]
        scale = 1.0 if abs(scale - 1) < 1e-6 else scale
        expected = softcap * torch.tanh(scale * probe / softcap)
    if scale == 0 or not math.isfinite(scale):
        return None
    right = torch.allclose(logits.to(probe.dtype), expected, rtol=1e-5, atol=1e-6 * abs(scale))
    return _Form(scale, softcap) if right else None


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


def _calls_its_loss(model: Any) -> bool:
    """Whether the forward, or one that it may call, names ``loss_function``."""
    forwards = [vars(base).get("forward") for base in type(model).__mro__]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in forwards if f is not None]
    return any("loss_function" in code.co_names for code in codes if code is not None)


class PatchedCausalLM:
    """What :func:`patch_causal_lm` has changed; :meth:`remove` restores it."""

    def __init__(
        self,
        model: Any,
        z_loss: float,
        outputs: tuple[str, ...],
        chunk_size: int | None,
        debug: bool,
    ) -> None:
        given, model = model, _unwrapped(model)
        name = f"patch_causal_lm: {type(model).__name__}"
        head = _head_of(model)
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise TypeError(f"{name} has no linear layer as its output embeddings")
        if isinstance(getattr(vars(head).get("forward"), "__self__", None), PatchedCausalLM):
            raise RuntimeError(f"{name} is patched already")
        self._loss: Any = getattr(model, "loss_function", None)
        if getattr(self._loss, "__name__", "") != "ForCausalLMLoss":
            raise TypeError(f"{name} has another loss than causal language models have")
        if getattr(model.config, "is_encoder_decoder", False):
            raise TypeError(
                f"{name} is an encoder with a decoder, not a causal language model; call "
                "linear_cross_entropy with its decoder's hidden states"
            )
        if not _calls_its_loss(model):
            raise TypeError(
                f"{name} computes its loss in forward, not by its loss_function, which alone can "
                "be replaced; call linear_cross_entropy with its hidden states"
            )
        self._model, self._head = model, head
        self._z_loss, self._outputs = z_loss, outputs
        self._chunk_size, self._debug = chunk_size, debug
        self._signature = inspect.signature(model.forward)
        self._own_loss = vars(model).get("_loss_function")
        self._form: _Form | None = None  # known after the first call
        self._calls: dict[int, _Call] = {}  # by thread
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        vars(head)["forward"] = self._run_head
        model.loss_function = self._run_loss
        self._compiled = given is not model or model._compiled_call_impl is not None
        self._forget_compiled()

    def _forget_compiled(self) -> None:
        """A compiled forward does not look for hooks that came or went since."""
        if self._compiled:
            torch.compiler.reset()

    def remove(self) -> None:
        """Let the model compute its logits and its loss as before."""
        for hook in self._hooks:
            hook.remove()
        vars(self._head).pop("forward", None)
        if self._own_loss is None:
            vars(self._model).pop("_loss_function", None)
        else:
            self._model.loss_function = self._own_loss
        self._forget_compiled()

    # A compiled graph ends at each of these: who is in a forward is not known when it is traced.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        with_labels = model.training and given.get("labels") is not None
        replica: Any = None if model is self._model else model  # of DataParallel
        if with_labels or replica is not None:
            head = self._head if replica is None else _head_of(replica)
            self._calls[threading.get_ident()] = _Call(head, with_labels)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        call = self._calls.pop(threading.get_ident(), None)
        if call is None or output is None or not call.with_labels:
            return output
        if not call.loss:
            raise self._error("has not called its loss_function and its head in a forward")
        if isinstance(output, tuple):
            if self._outputs:
                raise self._error("returns a tuple, which has no place for outputs=")
            return tuple(None if call.stands_in(value) else value for value in output)
        made = type(output)(**{name: v for name, v in output.items() if name != "logits"})
        for name, value in call.outputs.items():
            made[name] = value
        return made

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _run_head(self, hidden: Tensor) -> Tensor:
        call = self._calls.get(threading.get_ident())
        if call is None or not call.with_labels:
            return nn.Linear.forward(self._head if call is None else call.head, hidden)
        if call.hidden is not None:
            raise self._error("calls its head more than once in a forward")
        call.hidden = hidden
        classes = self._head.weight.shape[0]
        if self._form is None:
            call.probe = _probe(hidden, classes)
        else:
            call.probe = hidden.new_zeros(1, 1, classes)
        return call.probe

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _run_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        call = self._calls.get(threading.get_ident())
        if call is None or call.hidden is None:
            options = {"ignore_index": ignore_index, "shift_labels": shift_labels, **kwargs}
            loss: Tensor = self._loss(logits, labels, vocab_size, num_items_in_batch, **options)
            return loss
        form = self._check(call, logits, vocab_size)
        hidden = call.hidden.reshape(-1, call.hidden.shape[-1])
        hidden, bias = scaled(hidden, call.head.bias, form.scale)
        if shift_labels is None:  # tokens before n predict n
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(hidden.device)
        found = loss_of(
            hidden,
            call.head.weight,
            target,
            linear_bias=bias,
            reduction="none",
            ignore_index=ignore_index,
            softcap=form.softcap,
            chunk_size=self._chunk_size,
            debug=self._debug,
            loss_dtype=torch.promote_types(hidden.dtype, torch.float32),
            return_lse=self._z_loss > 0 or "lse" in self._outputs,
            return_predicted=bool({"predicted_tokens", "token_accuracy"} & {*self._outputs}),
        )
        counted = target != ignore_index
        call.outputs = self._named(found, target, counted, shift_labels.shape)
        losses = found.loss
        if self._z_loss and found.lse is not None:
            losses = losses + self._z_loss * torch.where(counted, found.lse, 0.0).square()
        if num_items_in_batch is None:
            num_items_in_batch = counted.sum()
        elif isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(losses.device)
        # The models' own loss is that of logits cast to float32.
        return (losses.sum() / num_items_in_batch).float()

    def _named(
        self, found: Found, target: Tensor, counted: Tensor, shape: torch.Size
    ) -> dict[str, Tensor]:
        """Returns what the model's output has besides."""
        of_tokens = {"token_losses": found.loss, "lse": found.lse}
        of_tokens["predicted_tokens"] = found.predicted
        named = {name: v.view(shape) for name, v in of_tokens.items() if v is not None}
        if found.predicted is not None:
            right = ((found.predicted == target) & counted).sum()
            named["token_accuracy"] = right / counted.sum()
        return {name: named[name] for name in self._outputs}

    def _check(self, call: _Call, logits: Tensor, vocab_size: int) -> _Form:
        """Returns how the model's logits are made. Looks at numbers once, since a GPU has to be
        awaited for it. Raises RuntimeError where the loss would be that of other logits."""
        assert call.probe is not None
        call.loss = True
        if logits.shape != call.probe.shape or vocab_size != logits.shape[-1]:
            raise self._error("takes a part of its logits, or adds to them, before the loss")
        if logits.requires_grad:
            raise self._error("makes its logits with parameters that are not the head's")
        if self._form is not None or not _has_values(logits):
            return self._form or _Form(1.0, None)  # no numbers will come of it
        form = _form_of(call.probe, logits)
        if form is None:
            raise self._error("does more to its logits than to scale them and to cap them by tanh")
        self._form = form
        return form

    def _error(self, what: str) -> RuntimeError:
        name = type(self._model).__name__
        return RuntimeError(
            f"patch_causal_lm: {name} {what}: no such loss is known. Call remove()."
        )


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
