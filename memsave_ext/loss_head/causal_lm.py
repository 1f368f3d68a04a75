"""The losses of Hugging Face's causal language models, without their logits."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .patched import Call, Options, Patched, checked_options, names_in_forward


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
            ``torch.compile``; the head may have LoRA adapters of peft, active, disabled or merged.
        z_loss: times the square of the log-sum-exp of a token's logits is added to its loss.
        outputs: names of what the model's output has besides, where the loss is without logits.
            ``"token_losses"``: in float32, 0 where a label is ignored, without the z-loss.
            ``"log_probs"``: the same with their sign turned. ``"entropy"``: of the softmax of the
            logits, in nats and float32, 0 where a label is ignored. ``"lse"``: the log-sum-exp of
            the logits, in float32. ``"mean_logits"``: over the vocabulary, in float32, 0 where a
            label is ignored. ``"predicted_tokens"``: int64. ``"token_accuracy"``: the share of the
            labels that are predicted; NaN of none. All but the last have the labels' shape,
            ``(batch, tokens)``, and stand where the token is that predicts, one before the label.
            The first four have gradients.
        chunk_size, debug: as in :func:`linear_cross_entropy`.

    Returns:
        An object whose ``remove()`` undoes it.

    Raises:
        TypeError: the model has no linear head, other adapters on it, such as DoRA's, or computes
            another loss.
        ValueError: ``z_loss`` is negative or not finite, ``outputs`` has another name, or
            ``chunk_size`` is no multiple of 256.
        RuntimeError: it is patched already. In the first forward: the model does something else to
            its logits, or scales them by what is trained. In any: the head has been replaced, or
            an adapter that is no plain LoRA has become active.
    """
    return PatchedCausalLM(model, checked_options(z_loss, outputs, chunk_size, debug))


class PatchedCausalLM(Patched):
    """What :func:`patch_causal_lm` has changed; :meth:`remove` restores it."""

    _who = "patch_causal_lm"

    def __init__(self, model: Any, options: Options) -> None:
        super().__init__(model, options)
        self._own_loss = vars(self._model).get("_loss_function")
        self._model.loss_function = self._run_loss

    def _refuse(self) -> None:
        self._loss: Any = getattr(self._model, "loss_function", None)
        if getattr(self._loss, "__name__", "") != "ForCausalLMLoss":
            raise TypeError(
                f"{self._name} does not use ForCausalLMLoss, the only loss that patch_causal_lm "
                "can replace"
            )
        if getattr(self._model.config, "is_encoder_decoder", False):
            raise TypeError(
                f"{self._name} is an encoder with a decoder, not a causal language model; "
                "patch_seq2seq_lm patches those"
            )
        if "loss_function" not in names_in_forward(self._model):
            raise TypeError(
                f"{self._name} computes its loss in forward, and only a loss_function can be "
                "replaced; call linear_cross_entropy with its hidden states instead"
            )

    def _restore(self) -> None:
        if self._own_loss is None:
            vars(self._model).pop("_loss_function", None)
        else:
            self._model.loss_function = self._own_loss

    def _finished(self, call: Call, output: Any) -> Any:
        if not call.loss:
            raise self._error("has not called its loss_function and its head in a forward")
        if isinstance(output, tuple):
            return tuple(None if call.stands_in(value) else value for value in output)
        return type(output)(**{name: v for name, v in output.items() if name != "logits"})

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
        if vocab_size != logits.shape[-1]:
            raise self._error("takes a part of its logits, or adds to them, before the loss")
        if shift_labels is None:  # tokens before n predict n
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return self._loss_of(call, logits, shift_labels, ignore_index, num_items_in_batch)
