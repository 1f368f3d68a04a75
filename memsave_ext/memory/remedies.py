"""What would lower a peak that no recompute lowers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from .account import TensorAtPeak

_WIDENS = 4  # how many times as many outputs as inputs a head has
_CLASSES = 1024  # and how many outputs at least
_SHARE = 0.25  # of the peak; what is less is not worth a word


def remedies(
    tensors: Sequence[TensorAtPeak], names: Sequence[str], modules: Sequence[nn.Module]
) -> Iterator[str]:
    """Yields a sentence for each head whose logits are a large part of the peak.

    Args:
        tensors: all that lived at the peak.
        names, modules: of a model, itself first.
    """
    peak = sum(tensor.bytes for tensor in tensors)
    for name, head in _heads(names, modules):
        # The loss is computed in the head or around it, of tensors that have a number for each
        # token and class: logits, what a softmax makes of them, gradients. They are of one size.
        around = {names[0], name, *(n for n in names if name.startswith(f"{n}."))}
        sizes = [t.bytes for t in tensors if t.module in around and _is_of_logits(t, head)]
        held = sum(size for size in sizes if size == max(sizes))
        if held and held >= _SHARE * peak:
            yield (
                f"The logits of {name}, and tensors of their size, are {held / peak:.0%} of the "
                "peak. If a cross entropy is all that reads them, "
                f"memsave_ext.linear_cross_entropy(x, {name}.weight, target) does without."
            )


def _heads(names: Sequence[str], modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Linear]]:
    """Yields linear layers of many outputs that no other layer takes."""
    taken = {getattr(module, "in_features", None) for module in modules}
    for name, module in zip(names, modules, strict=True):
        if not isinstance(module, nn.Linear) or module.out_features in taken:
            continue
        if module.out_features >= max(_WIDENS * module.in_features, _CLASSES):
            yield name, module


def _is_of_logits(tensor: TensorAtPeak, head: nn.Linear) -> bool:
    made = tensor.category in ("activations", "other")
    return made and tensor.bytes > 0 and tensor.bytes % (2 * head.out_features) == 0
