"""``patch_lm_head``: TRL's trainers with the loss head of memsave_ext."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..loss_head.function import check_chunk_size, loss_of
from ..loss_head.log_probs import mean_logits, scaled

_UTILS, _NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"


def patch_lm_head(*, chunk_size: int | None = None, debug: bool = False) -> PatchedLMHead:
    """Let TRL's trainers compute log-probabilities and metrics by :func:`linear_log_probs`::

        ms.integrations.trl.patch_lm_head()
        trainer = GRPOTrainer(model, ...)  # or SFTTrainer, DPOTrainer and others

    TRL's own head has no whole logits either. With this one, rows of the head's weight are stepped
    in backward where ``Adam(in_backward=True)`` owns it, and the weight has no whole gradient; on
    CPUs it takes less time and memory. Losses, entropies with their gradients, mean logits and
    token accuracies are TRL's but for their last bits. It is of the whole process, of trainers that
    are there already, too.

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
        self._theirs = getattr(self._utils, _NAME, None)
        if isinstance(self._theirs, LMHead):
            raise RuntimeError("patch_lm_head: TRL's head is patched already")
        if self._theirs is None:
            version = importlib.import_module("trl").__version__
            raise RuntimeError(
                f"patch_lm_head: TRL {version} has no {_UTILS}.{_NAME}, which 1.16 computes its "
                "log-probabilities with"
            )
        setattr(self._utils, _NAME, LMHead(chunk_size, debug))

    def remove(self) -> None:
        """Let TRL's trainers use TRL's head again."""
        setattr(self._utils, _NAME, self._theirs)


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

        def layer(factor: float) -> tuple[Tensor, Tensor | None, float | None]:
            """Returns an input, a bias and a cap that make logits times ``factor``."""
            cap = final_logit_softcapping
            rows, own_bias = scaled(hidden, bias, logit_scale * factor)
            return rows, own_bias, None if cap is None else cap * factor

        rows, own_bias, cap = layer(1 / temperature)
        found = loss_of(
            rows,
            weight,
            targets,
            linear_bias=own_bias,
            softcap=cap,
            return_lse=squares,
            return_predicted="is_top1" in outputs,
            return_entropy="entropy" in outputs,
            debug=self._debug,
            **options,
        )
        of_squares = means = is_top1 = None
        with torch.no_grad():
            if squares and found.lse is not None:
                rows, own_bias, twice = layer(2 / temperature)
                more: Any = {"linear_bias": own_bias, "softcap": twice, **options}
                lse = loss_of(rows, weight, targets, return_lse=True, **more).lse
                assert lse is not None
                of_squares = lse - 2 * found.lse
            if "mean_logits" in outputs:
                rows, own_bias, cap = layer(1 / temperature)
                means = mean_logits(rows, weight, own_bias, cap)
            if found.predicted is not None:
                is_top1 = found.predicted == targets
        return -found.loss, found.entropy, of_squares, means, is_top1
