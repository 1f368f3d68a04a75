"""``patch_lm_head``: TRL's trainers with the loss head of memsave_ext."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import threading
import types
from typing import Any

import torch
from torch import Tensor

from ..loss_head import lm_heads
from ..loss_head.function import check_chunk_size, loss_of
from ..loss_head.log_probs import mean_logits, scaled_layer

__all__ = ["PatchedLMHead", "patch_lm_head"]

_UTILS, _NAME, _ADD = "trl.trainer.utils", "_ChunkedLogProbFunction", "add_fused_lm_head"
_TRAINERS = [f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "grpo", "rloo")]
_ADAPTED = "BaseTunerLayer"  # what these ask a head for, and refuse

_running = threading.local()  # its `head`: of the model that runs with TRL's head


def patch_lm_head(*, chunk_size: int | None = None, debug: bool = False) -> PatchedLMHead:
    """Let TRL's trainers compute log-probabilities and metrics by :func:`linear_log_probs`::

        ms.integrations.trl.patch_lm_head()
        trainer = GRPOTrainer(model, ...)  # or SFTTrainer, DPOTrainer and others

    TRL's own head has no whole logits either. With this one, rows of the head's weight are stepped
    in backward where ``Adam(in_backward=True)`` owns it, and the weight has no whole gradient; on
    CPUs it takes less time and memory. Losses, entropies with their gradients, mean logits and
    token accuracies are TRL's but for their last bits. It is of the whole process, of trainers that
    are there already, too. Trainers that are made after it train LoRA adapters on the head, which
    TRL alone refuses.

    Args:
        chunk_size, debug: as in :func:`linear_cross_entropy`.

    Returns:
        An object whose ``remove()`` undoes it.

    Raises:
        RuntimeError: it is patched already, or TRL has another head than version 1.16.
        ValueError: ``chunk_size`` is not as said there.
    """
    check_chunk_size(chunk_size)
    return PatchedLMHead(chunk_size, debug)


class PatchedLMHead:
    """What :func:`patch_lm_head` has changed; :meth:`remove` restores it."""

    def __init__(self, chunk_size: int | None, debug: bool) -> None:
        self._utils: Any = importlib.import_module(_UTILS)
        if isinstance(getattr(self._utils, _NAME, None), LMHead):
            raise RuntimeError("patch_lm_head: TRL's head is patched already")
        trainers: list[Any] = []
        if importlib.util.find_spec("peft") is not None:
            trainers = [importlib.import_module(name) for name in _TRAINERS]
        of_trainers = [(module, name) for module in trainers for name in (_ADD, _ADAPTED)]
        names = [(self._utils, _NAME), (self._utils, _ADD), *of_trainers]
        if missing := [f"{m.__name__}.{name}" for m, name in names if not hasattr(m, name)]:
            version = importlib.import_module("trl").__version__
            raise RuntimeError(
                f"patch_lm_head: TRL {version} has no {', '.join(missing)}, with which 1.16 "
                "computes its log-probabilities"
            )
        self._replaced = [(module, name, getattr(module, name)) for module, name in names]
        add = _with_adapters(getattr(self._utils, _ADD), self._utils)
        by = {_NAME: LMHead(chunk_size, debug), _ADD: add, _ADAPTED: _Refused}
        for module, name in names:
            setattr(module, name, by[name])

    def remove(self) -> None:
        """Let TRL's trainers use TRL's head again. Those that train adapters on the head cannot go
        on, with an error."""
        for module, name, theirs in self._replaced:
            setattr(module, name, theirs)
        self._replaced = []


class _AsksWhy(type):
    def __instancecheck__(cls, head: Any) -> bool:
        adapted = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
        return isinstance(head, adapted) and bool(lm_heads.why_not(head))


class _Refused(metaclass=_AsksWhy):
    """Stands for peft's class of adapted layers: those that this head does not compute with."""


def _with_adapters(theirs: Any, utils: Any) -> Any:
    """Returns TRL's function that gives a model its head, which here knows the model's own."""

    @functools.wraps(theirs)
    def add_fused_lm_head(model: Any, *args: Any, **options: Any) -> None:
        given = inspect.signature(theirs).bind(model, *args, **options).arguments
        head = model.get_output_embeddings()
        if given.get("cast_lm_head_to_fp32") and lm_heads.has_lora(head):
            vars(head).pop("forward", None)  # TRL's, which would ignore them
            raise ValueError(
                "patch_lm_head: cast_lm_head_to_fp32=True is not possible with adapters on the "
                "head: leave it out of target_modules"
            )
        theirs(model, *args, **options)
        with_head = model.forward.__func__

        @functools.wraps(with_head)
        def forward(of: Any, *args: Any, **options: Any) -> Any:
            head = of.get_output_embeddings() if options.get("fused_lm_head") else None
            if lm_heads.has_lora(head) and not isinstance(getattr(utils, _NAME), LMHead):
                raise RuntimeError(
                    "patch_lm_head: TRL's head would ignore the adapters on this model's; do not "
                    "call remove() before training ends"
                )
            before, _running.head = getattr(_running, "head", None), head
            try:
                return with_head(of, *args, **options)
            finally:
                _running.head = before

        model.forward = types.MethodType(forward, model)

    return add_fused_lm_head


class LMHead:
    """Stands for the autograd Function of TRL's head."""

    def __init__(self, chunk_size: int | None = None, debug: bool = False) -> None:
        self._chunk_size, self._debug = chunk_size, debug

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor | None, ...]:
        """Returns of each token: the log-probability of its target, the entropy, the logarithm of
        the sum of the squares of its probabilities, the mean logit, and whether the target is the
        class of the largest one. None for what ``outputs`` does not name, but the first. Only the
        first two have gradients.

        Args:
            hidden: ``(N, in_features)``.
            weight, bias: ``(C, in_features)`` and ``(C)``, of the C classes.
            targets: ``(N)``, int64.
            temperature, final_logit_softcapping, logit_scale: logits are multiplied by the last,
                capped, and divided by the first.
            chunk_size: of TRL's own chunks; not used.
        """
        squares = "log_sum_sq_probs" in outputs
        options: Any = {
            "reduction": "none",
            "loss_dtype": torch.promote_types(hidden.dtype, torch.float32),
            "chunk_size": self._chunk_size,
        }

        low_rank = None
        head = getattr(_running, "head", None)
        if lm_heads.has_lora(head):
            if why := lm_heads.why_not(head):
                raise RuntimeError(f"patch_lm_head: the model {why}")
            _, bias, low_rank = lm_heads.layer_of(head, hidden)

        def layer(factor: float) -> tuple[Tensor, dict[str, Any]]:
            """Returns an input and what else makes logits times ``factor``."""
            rows, own_bias, low = scaled_layer(hidden, bias, low_rank, logit_scale * factor)
            cap = final_logit_softcapping
            cap = None if cap is None else cap * factor
            return rows, {"linear_bias": own_bias, "low_rank": low, "softcap": cap}

        rows, more = layer(1 / temperature)
        found = loss_of(
            rows,
            weight,
            targets,
            **more,
            return_lse=squares,
            return_predicted="is_top1" in outputs,
            return_entropy="entropy" in outputs,
            debug=self._debug,
            **options,
        )
        of_squares = means = is_top1 = None
        with torch.no_grad():
            if squares and found.lse is not None:
                twice, of_twice = layer(2 / temperature)
                lse = loss_of(twice, weight, targets, return_lse=True, **of_twice, **options).lse
                assert lse is not None
                of_squares = lse - 2 * found.lse
            if "mean_logits" in outputs:
                means = mean_logits(rows, weight, **more)
            if found.predicted is not None:
                is_top1 = found.predicted == targets
        return -found.loss, found.entropy, of_squares, means, is_top1
