"""What would lower a peak that no recompute lowers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .account import TensorAtPeak

_WIDENS = 4  # how many times as many outputs as inputs a head has
_CLASSES = 1024  # and how many outputs at least
_SHARE = 0.25  # of the peak; what is less is not worth a word


def remedies(
    tensors: Sequence[TensorAtPeak],
    phase: str,
    names: Sequence[str],
    modules: Sequence[nn.Module],
) -> Iterator[str]:
    """Yields a sentence for each head whose logits are a large part of the peak, and for a module
    that makes a large part of it at the moment it runs.

    Args:
        tensors: all that lived at the peak.
        phase: that of the peak.
        names, modules: of a model, itself first.
    """
    heads = list(_logits(tensors, names, modules))
    yield from heads or _wide(tensors, phase, names, modules)


def _logits(
    tensors: Sequence[TensorAtPeak], names: Sequence[str], modules: Sequence[nn.Module]
) -> Iterator[str]:
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


def _wide(
    tensors: Sequence[TensorAtPeak],
    phase: str,
    names: Sequence[str],
    modules: Sequence[nn.Module],
) -> Iterator[str]:
    """Of a module that is computed again, also gradients on the way; else, of a peak in a forward,
    what does not stay for backward."""
    again = [t for t in tensors if t.phase == "recompute" and t.category == "activations"]
    if again:
        made = again + [t for t in tensors if t.phase == "backward" and t.category == "other"]
    elif phase == "forward":
        made = [t for t in tensors if t.phase == "forward" and t.category == "other"]
    else:
        return
    made = [tensor for tensor in made if tensor.module]
    # One wide layer makes tensors of about one size.
    widest = max((tensor.bytes for tensor in made), default=0)
    wide = [tensor for tensor in made if 2 * tensor.bytes > widest]
    held, peak = sum(t.bytes for t in wide), sum(t.bytes for t in tensors)
    if not wide or held < _SHARE * peak:
        return
    name = _around({tensor.module for tensor in wide}, names)
    module = modules[names.index(name)]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return  # several layers, for which smaller regions are
    if any(isinstance(m, _NormBase) and m.training for m in module.modules()):
        return  # it needs its whole batch
    yield (
        f"What {name} makes {'when it is computed again' if again else 'on the way'} is "
        f"{held / peak:.0%} of the peak. If it acts on rows, as an MLP does on tokens, "
        "memsave_ext.checkpoint(function, x, chunks=n) makes one n-th of it at a time."
    )


def _around(inside: set[str], names: Sequence[str]) -> str:
    """The innermost module that all these are in."""
    holds = [n for n in names[1:] if all(f"{i}.".startswith(f"{n}.") for i in inside)]
    return max(holds, key=len, default=names[0])


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
