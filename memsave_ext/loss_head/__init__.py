"""Cross entropy of a linear layer's outputs, whose logits never exist as a whole."""

from .causal_lm import patch_causal_lm
from .function import linear_cross_entropy
from .kl import linear_kl
from .log_probs import linear_log_probs
from .modules import LinearCrossEntropyLoss
from .seq2seq_lm import patch_seq2seq_lm

__all__ = [
    "LinearCrossEntropyLoss",
    "linear_cross_entropy",
    "linear_kl",
    "linear_log_probs",
    "patch_causal_lm",
    "patch_seq2seq_lm",
]
