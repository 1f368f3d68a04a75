"""The losses of Hugging Face's encoders with decoders, without their logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .patched import Call, Patched, checked_options, names_in_forward


def patch_seq2seq_lm(
    model: nn.Module,
    *,
    z_loss: float = 0.0,
    outputs: Iterable[str] = (),
    chunk_size: int | None = None,
    debug: bool = False,
) -> PatchedSeq2SeqLM:
    """Let an encoder with a decoder of Hugging Face compute its loss without logits, as
    :func:`patch_causal_lm` does for causal language models.

    Where ``labels`` are given in training mode, the model runs without them, its decoder on those
    inputs that it makes of labels, and the loss is the mean cross entropy of the labels that are
    not -100, in float32. ``output.logits`` is None. In eval mode, and without labels, nothing
    changes.

    Args:
        model: one such as T5, mT5, Bart, mBart, Marian or Pegasus, which computes its loss in
            forward by ``CrossEntropyLoss``, and has ``prepare_decoder_input_ids_from_labels``. May
            be wrapped by peft or ``torch.compile``.
        z_loss, outputs, chunk_size, debug: as in :func:`patch_causal_lm`. Those of tokens stand
            where their label does.

    Returns:
        An object whose ``remove()`` undoes it.

    Raises:
        TypeError: the model is no encoder with a decoder, has no linear head, or computes another
            loss, such as one with a router's.
        ValueError: ``z_loss`` or ``outputs`` is not as said there.
        RuntimeError: it is patched already. In the first forward: the model does more to its logits
            than to scale them and to cap them by tanh.
    """
    return PatchedSeq2SeqLM(model, checked_options(z_loss, outputs, chunk_size, debug))


class PatchedSeq2SeqLM(Patched):
    """What :func:`patch_seq2seq_lm` has changed; :meth:`remove` restores it."""

    _who = "patch_seq2seq_lm"

    def _refuse(self) -> None:
        if not getattr(self._model.config, "is_encoder_decoder", False):
            raise TypeError(f"{self._name} is not an encoder with a decoder; use patch_causal_lm")
        names = names_in_forward(self._model)
        if "CrossEntropyLoss" not in names or not hasattr(
            self._model, "prepare_decoder_input_ids_from_labels"
        ):
            raise TypeError(
                f"{self._name} makes its loss or its decoder's inputs in another way than T5 and "
                "Bart do; call linear_cross_entropy with its decoder's hidden states instead"
            )
        if any("router" in name for name in names):
            raise TypeError(
                f"{self._name} adds losses of its router of experts; call linear_cross_entropy "
                "with its decoder's hidden states instead"
            )

    def _arguments(self, model: Any, call: Call, given: dict[str, Any]) -> Any:
        call.labels = given.pop("labels")
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        if given.get("decoder_input_ids") is None and given.get("decoder_inputs_embeds") is None:
            make = model.prepare_decoder_input_ids_from_labels
            given["decoder_input_ids"] = make(labels=call.labels)
        if "use_cache" in self._signature.parameters:  # as the models do with labels
            given["use_cache"] = False
        return (), given

    def _finished(self, call: Call, output: Any) -> Any:
        logits = output[0] if isinstance(output, tuple) else output.logits
        if call.hidden is None or call.labels is None:
            raise self._error("has not called its head in a forward")
        loss = self._loss_of(call, logits, call.labels, -100, None)
        if isinstance(output, tuple):
            return loss, None, *output[1:]
        kept = {name: v for name, v in output.items() if name not in ("loss", "logits")}
        return type(output)(loss=loss, **kept)
