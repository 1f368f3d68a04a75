"""The operators on a chunk of logits: schemas, and the fallback's kernels.

csrc/loss_head has kernels for the devices it was built for; on all others, and without
the native part, the ones here run. Terms:

- ``logits`` (N, B): those of N tokens and of the B classes from ``first`` on.
- The loss of a token is ``sum_c a[c] * (lse - logits[c])`` over all classes, where ``lse`` is the
  log of the sum of the exponentials of its logits, and ``a[c] = class_weight[c] *
  (keep * t[c] + spread)``. t is 1 for the token's ``target`` and 0 for other classes, or its row of
  ``probabilities``.
- ``softcap``: logits are ``softcap * tanh(logits / softcap)``; 0: they stay.
- The dtype of sums, coefficients, probabilities and class weights is float64 for float64 logits,
  else float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _parts

_CHUNK = (
    "Tensor? target, Tensor? probabilities, Tensor? class_weight, int first, float keep, "
    "float spread, float softcap"
)


class Chunk:
    """Capped logits in the wide type, and the distribution ``a`` of each token in two parts: that
    of its ``target`` alone, and that of all classes."""

    def __init__(
        self,
        logits: Tensor,
        target: Tensor | None,
        probabilities: Tensor | None,
        class_weight: Tensor | None,
        first: int,
        keep: float,
        spread: float,
        softcap: float,
    ) -> None:
        self.logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap:
            self.tanh = torch.tanh(self.logits / softcap)
            self.logits = softcap * self.tanh
        weight = self.logits.new_ones(()) if class_weight is None else class_weight
        self.is_target, self.of_target = None, keep * weight
        if target is not None:
            classes = torch.arange(first, first + logits.shape[1], device=logits.device)
            self.is_target = target[:, None] == classes
        self.of_all: Tensor | None = None
        if probabilities is not None:
            self.of_all = (keep * probabilities + spread) * weight
        elif spread:
            self.of_all = spread * weight

    def distributed(self, factor: Tensor) -> Tensor:
        """Returns ``a * factor``, 0 where a class has no part, whatever its weight and factor."""
        product = torch.zeros_like(self.logits)
        if self.of_all is not None:
            product = product + self.of_all * factor
        if self.is_target is not None:
            product = product + torch.where(self.is_target, self.of_target * factor, 0.0)
        return product


def _not_farther(distances: Tensor) -> Tensor:
    """Returns distances whose product with their exponentials is 0 at minus infinity, too: the
    exponential of -1000 is 0 in every type."""
    return torch.where(distances < -1000, -1000.0, distances)


@torch.no_grad()
def reduce_(
    sums: Tensor,
    logits: Tensor,
    target: Tensor | None,
    probabilities: Tensor | None,
    class_weight: Tensor | None,
    first: int,
    keep: float,
    spread: float,
    softcap: float,
) -> None:
    chunk = Chunk(logits, target, probabilities, class_weight, first, keep, spread, softcap)
    before, total, dot, *entropy = sums.unbind()
    maximum = torch.maximum(before, chunk.logits.amax(1))
    base = torch.where(maximum == -torch.inf, 0.0, maximum)
    moved, distances = before - base, chunk.logits - base[:, None]
    factor, powers = moved.exp(), distances.exp()
    for moment in entropy:
        moment.add_(total * _not_farther(moved)).mul_(factor)
        moment.add_((powers * _not_farther(distances)).sum(1))
    total.mul_(factor).add_(powers.sum(1))
    before.copy_(maximum)
    dot.add_(chunk.distributed(chunk.logits).sum(1))


@torch.no_grad()
def gradient_(
    logits: Tensor,
    coefficients: Tensor,
    target: Tensor | None,
    probabilities: Tensor | None,
    class_weight: Tensor | None,
    first: int,
    keep: float,
    spread: float,
    softcap: float,
) -> None:
    chunk = Chunk(logits, target, probabilities, class_weight, first, keep, spread, softcap)
    maximum, log_sum, of_softmax, of_target, *entropy = (row[:, None] for row in coefficients)
    distances = chunk.logits - maximum - log_sum
    factor, unused = of_softmax, (of_softmax == 0) & (of_target == 0)
    for of_entropy in entropy:
        factor = factor + of_entropy * _not_farther(distances)
        unused = unused & (of_entropy == 0)
    gradient = factor * distances.exp() - chunk.distributed(of_target)
    if softcap:
        gradient = gradient * (1 - chunk.tanh.square())
    logits.copy_(torch.where(unused, 0.0, gradient))


def _nothing(*_: object) -> None:
    """Fake tensors have no memory to change."""


_library = torch.library.Library("memsave_ext", "FRAGMENT")
# Adds a chunk to `sums` (3, N): the largest logit, the sum of the exponentials of the logits less
# the largest one, and the sum of a[c] * logits[c]. A fourth row is for the entropy: the sum of the
# exponentials, each times the logit less the largest one.
_library.define(f"linear_cross_entropy_reduce_(Tensor(a!) sums, Tensor logits, {_CHUNK}) -> ()")
# Replaces the logits by their gradients. `coefficients` (4, N): the largest logit, the log of the
# sum of the exponentials of the logits less the largest, and what the softmax and what `a` are
# multiplied by. A fifth row is for the entropy: what the softmax times its logarithm is multiplied
# by. Tokens whose rows from the third on are 0 have gradients of 0.
_library.define(
    f"linear_cross_entropy_gradient_(Tensor(a!) logits, Tensor coefficients, {_CHUNK}) -> ()"
)
for _name, _kernel in (("reduce_", reduce_), ("gradient_", gradient_)):
    # CompositeExplicitAutograd is chosen where csrc has no kernel for the device.
    _library.impl(f"linear_cross_entropy_{_name}", _kernel, "CompositeExplicitAutograd")
    _parts.add_kernel("loss_head", f"linear_cross_entropy_{_name}", _kernel)
    torch.library.register_fake(
        f"memsave_ext::linear_cross_entropy_{_name}", _nothing, lib=_library
    )


def run(name: str, *arguments: object) -> None:
    getattr(torch.ops.memsave_ext, f"linear_cross_entropy_{name}").default(*arguments)
