"""The heads of language models: linear layers, and those that have adapters of peft's LoRA."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Layer(NamedTuple):
    """What makes logits of hidden states: ``linear(hidden, weight, bias)`` and what ``low_rank``
    of :func:`linear_cross_entropy` adds."""

    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[Tensor, Tensor] | None


def is_linear(head: Any) -> bool:
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def has_lora(head: Any) -> bool:
    """Whether it is a linear layer with adapters of peft's LoRA, whichever of them are used."""
    lora = getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)
    is_lora = lora is not None and getattr(type(head), "forward", None) is lora.forward
    return is_lora and is_linear(head.base_layer)


def why_not(head: Any) -> str:
    """Returns why :func:`layer_of` cannot tell what makes this head's logits; empty if it can."""
    if is_linear(head):
        return ""
    if has_lora(head):
        variants = getattr(head, "lora_variant", {})
        for name in _used(head):
            if name in variants or head.use_dora.get(name):
                kind = "DoRA" if head.use_dora.get(name) else type(variants[name]).__name__
                return (
                    f"has an adapter {name!r} on its output embeddings that is not plain LoRA, but "
                    f"{kind}: leave them out of target_modules, or merge it"
                )
        return ""
    adapted = ""
    if isinstance(getattr(head, "base_layer", None), nn.Module):
        adapted = " with adapters: leave it out of target_modules"
    return (
        "has no plain nn.Linear as its output embeddings, nor one with LoRA adapters, got "
        f"{type(head).__name__}{adapted}"
    )


def _used(head: Any) -> list[str]:
    """Returns the adapters that add to the logits; merged ones are in the weight."""
    if head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def layer_of(head: Any, hidden: Tensor) -> Layer:
    """Returns what makes the logits of ``hidden`` (..., in_features), as the head's forward does at
    this moment: of the adapters that are active, with a dropout of their own."""
    if is_linear(head):
        return Layer(head.weight, head.bias, None)
    if head.disable_adapters and head.merged:
        head.unmerge()
    weight, bias = head.base_layer.weight, head.base_layer.bias
    low, low_weight = [], []
    for name in _used(head):
        a, b, scale = head.lora_A[name], head.lora_B[name], head.scaling[name]
        low.append(a(head.lora_dropout[name](hidden.to(a.weight.dtype))) * scale)
        low_weight.append(b.weight)
        if b.bias is not None:
            of_adapter = (b.bias * scale).to(weight.dtype)
            bias = of_adapter if bias is None else bias + of_adapter
    if not low:
        return Layer(weight, bias, None)
    if len(low) == 1:
        return Layer(weight, bias, (low[0], low_weight[0]))
    return Layer(weight, bias, (torch.cat(low, -1), torch.cat(low_weight, 1)))
