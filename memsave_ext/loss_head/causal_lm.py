"""The losses of Hugging Face's causal language models, without their logits."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .function import loss_of


def patch_causal_lm(
    model: nn.Module, *, chunk_size: int | None = None, debug: bool = False
) -> PatchedCausalLM:
    """Let a causal language model of Hugging Face compute its loss without logits.

    Where ``labels`` are given in training mode, the loss is that of :func:`linear_cross_entropy`
    and ``output.logits`` is None. In eval mode, and without labels, nothing changes::

        ms.patch_causal_lm(model)
        model(input_ids=ids, labels=ids).loss.backward()

    Args:
        model: one that computes ``logits = head(hidden_states)``, where
            ``model.get_output_embeddings()`` returns the head, and the loss of these by
            ``model.loss_function``, as the models of transformers do.
        chunk_size, debug: as in :func:`linear_cross_entropy`.

    Returns:
        An object whose ``remove()`` undoes it.

    Raises:
        TypeError: the model has no linear head, or its loss is not that of causal language models.
        RuntimeError: it is patched already. In a forward: the model does more to its logits than to
            cap them, as its ``final_logit_softcapping`` says.
    """
    return PatchedCausalLM(model, chunk_size, debug)


class _Call:
    """One forward of the model with labels."""

    hidden: Tensor | None = None  # what the head was given
    probe: Tensor | None = None  # the logits of one token, as the head makes them


class PatchedCausalLM:
    """What :func:`patch_causal_lm` has changed; :meth:`remove` restores it."""

    def __init__(self, model: Any, chunk_size: int | None, debug: bool) -> None:
        name = f"patch_causal_lm: {type(model).__name__}"
        get_head = getattr(model, "get_output_embeddings", None)
        head = get_head() if get_head is not None else None
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise TypeError(f"{name} has no linear layer as its output embeddings")
        if isinstance(getattr(vars(head).get("forward"), "__self__", None), PatchedCausalLM):
            raise RuntimeError(f"{name} is patched already")
        self._loss: Any = getattr(model, "loss_function", None)
        if getattr(self._loss, "__name__", "") != "ForCausalLMLoss":
            raise TypeError(f"{name} has another loss than causal language models have")
        self._model, self._head = model, head
        self._chunk_size, self._debug = chunk_size, debug
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._signature = inspect.signature(model.forward)
        self._own_loss = vars(model).get("_loss_function")
        self._checked = False
        self._calls: dict[int, _Call] = {}  # by thread
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        vars(head)["forward"] = self._run_head
        model.loss_function = self._run_loss

    def remove(self) -> None:
        """Let the model compute its logits and its loss as before."""
        for hook in self._hooks:
            hook.remove()
        vars(self._head).pop("forward", None)
        if self._own_loss is None:
            vars(self._model).pop("_loss_function", None)
        else:
            self._model.loss_function = self._own_loss

    def _before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        if model.training and given.get("labels") is not None:
            self._calls[threading.get_ident()] = _Call()

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        call = self._calls.pop(threading.get_ident(), None)
        if call is None or output is None:
            return output
        if isinstance(output, tuple):
            return tuple(None if value is call.probe else value for value in output)
        return type(output)(**{name: v for name, v in output.items() if name != "logits"})

    def _run_head(self, hidden: Tensor) -> Tensor:
        call = self._calls.get(threading.get_ident())
        if call is None:
            return nn.Linear.forward(self._head, hidden)
        call.hidden = hidden
        with torch.no_grad():
            last = hidden.reshape(-1, hidden.shape[-1])[-1:]
            call.probe = F.linear(last, self._head.weight, self._head.bias)[None]
        return call.probe

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
        self._check(call, logits, vocab_size)
        if shift_labels is None:  # tokens before n predict n
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = loss_of(
            call.hidden.reshape(-1, call.hidden.shape[-1]),
            self._head.weight,
            shift_labels.reshape(-1).to(call.hidden.device),
            linear_bias=self._head.bias,
            reduction="mean" if num_items_in_batch is None else "sum",
            ignore_index=ignore_index,
            softcap=self._softcap,
            chunk_size=self._chunk_size,
            debug=self._debug,
            result=torch.float32,  # the models' own loss is that of logits cast to float32
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def _check(self, call: _Call, logits: Tensor, vocab_size: int) -> None:
        """Raises RuntimeError where the model's logits are not those of the loss. Looks once, since
        a GPU has to be awaited for it."""
        if self._checked or call.probe is None or not _has_values(call.probe):
            return
        expected = call.probe.float()
        if self._softcap is not None:
            expected = self._softcap * torch.tanh(expected / self._softcap)
        fits = logits.shape == expected.shape and vocab_size == expected.shape[-1]
        if not fits or not torch.allclose(logits.float(), expected, rtol=0.02, atol=0.02):
            raise RuntimeError(
                f"patch_causal_lm: {type(self._model).__name__} does something to its logits that "
                "this loss does not know, for example scales them. Call remove()."
            )
        self._checked = True


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
