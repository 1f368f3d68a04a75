"""What would lower a peak that no recompute lowers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..shared.modules import Layer
from .account import TensorAtPeak

_WIDENS = 4  # how many times as many outputs as inputs a head has
_CLASSES = 1024  # and how many outputs at least
_SHARE = 0.25  # of the peak; what is less is not worth a word


def remedies(
    tensors: Sequence[TensorAtPeak],
    phase: str,
    names: Sequence[str],
    layers: Sequence[Layer],
) -> Iterator[str]:
    """Yields a sentence for each head whose logits are a large part of the peak, and for a module
    that makes a large part of it at the moment it runs.

    Args:
        tensors: all that lived at the peak.
        phase: that of the peak.
        names, layers: of a model's modules, itself first.
    """
    heads = list(_logits(tensors, names, layers))
    yield from heads or _wide(tensors, phase, names, layers)


def _logits(
    tensors: Sequence[TensorAtPeak], names: Sequence[str], layers: Sequence[Layer]
) -> Iterator[str]:
    peak = sum(tensor.bytes for tensor in tensors)
    for name, outputs in _heads(names, layers):
        # The loss is computed in the head or around it, of tensors that have a number for each
        # token and class: logits, what a softmax makes of them, gradients. They are of one size.
        around = {names[0], name, *(n for n in names if name.startswith(f"{n}."))}
        sizes = [t.bytes for t in tensors if t.module in around and _is_of_logits(t, outputs)]
        held = sum(size for size in sizes if size == max(sizes))
        if held and held >= _SHARE * peak:
            yield (
                f"The logits of {name}, and tensors of their size, are {held / peak:.0%} of the "
                "peak. If only a cross entropy reads them, memsave_ext.linear_cross_entropy(x, "
                f"{name}.weight, target) computes it without making them."
            )


def _wide(
    tensors: Sequence[TensorAtPeak],
    phase: str,
    names: Sequence[str],
    layers: Sequence[Layer],
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
    if layers[names.index(name)].is_list:
        return  # several layers, for which smaller regions are
    for inside, layer in zip(names, layers, strict=True):
        if layer.is_batch_norm and (name == names[0] or f"{inside}.".startswith(f"{name}.")):
            return
    yield (
        f"What {name} makes "
        f"{'when it is computed again' if again else 'and frees again in its forward'} is "
        f"{held / peak:.0%} of the peak. If it acts on each row by itself, as an MLP does on "
        "tokens, memsave_ext.checkpoint(function, x, chunks=n) makes only an n-th of it at a time."
    )


def _around(inside: set[str], names: Sequence[str]) -> str:
    """The innermost module that all these are in."""
    holds = [n for n in names[1:] if all(f"{i}.".startswith(f"{n}.") for i in inside)]
    return max(holds, key=len, default=names[0])


def _heads(names: Sequence[str], layers: Sequence[Layer]) -> Iterator[tuple[str, int]]:
    """Yields linear layers of many outputs that no other layer takes, with how many these are."""
    taken = {layer.inputs for layer in layers}
    for name, layer in zip(names, layers, strict=True):
        if layer.outputs is None or layer.inputs is None or layer.outputs in taken:
            continue
        if layer.outputs >= max(_WIDENS * layer.inputs, _CLASSES):
            yield name, layer.outputs


def _is_of_logits(tensor: TensorAtPeak, outputs: int) -> bool:
    made = tensor.category in ("activations", "other")
    return made and tensor.bytes > 0 and tensor.bytes % (2 * outputs) == 0
