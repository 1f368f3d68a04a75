"""Autograd of the batch_norm operators in Python; does what csrc/batch_norm/autograd.cpp does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._leaves import hold_accumulators
from . import fallback
from .arguments import Arguments, call, names, read

_FORWARD, _BACKWARD = "batch_norm_forward", "batch_norm_backward"
_SAVED = "grad", "input", "statistics", "weight", "bias", "residual"
_DIFFERENTIABLE = "input", "residual", "weight", "bias"  # in the order of their gradients


def forward(*args: Any) -> tuple[Tensor, Tensor]:
    nodes = hold_accumulators(args)
    result: tuple[Tensor, Tensor] = _Forward.apply(*args)
    del nodes
    return result


def backward(*args: Any) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = _Backward.apply(*args)
    return result


def _save(ctx: Any, of: Arguments) -> None:
    if of.activation == "none":
        of.bias = of.residual = None
    ctx.save_for_backward(*(getattr(of, name) for name in _SAVED))
    tensors = dict.fromkeys((*_SAVED, "running_mean", "running_var"))
    ctx.options = replace(of, **tensors)  # type: ignore[arg-type]
    ctx.set_materialize_grads(False)


def _unpack(ctx: Any) -> Arguments:
    options: Arguments = ctx.options
    return replace(options, **dict(zip(_SAVED, ctx.saved_tensors, strict=True)))


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            output, statistics = getattr(torch.ops.memsave_ext, _FORWARD)(*args)
        of = read(_FORWARD, args)
        _save(ctx, of if of.statistics is not None else replace(of, statistics=statistics))
        ctx.mark_non_differentiable(statistics)
        return output, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Any:
        if grad is None:
            return (None,) * len(names(_FORWARD))
        wanted = dict(zip(names(_FORWARD), ctx.needs_input_grad, strict=True))
        of = replace(_unpack(ctx), grad=grad, output_mask=[wanted[n] for n in _DIFFERENTIABLE])
        results = call(_BACKWARD, of) if of.group is None else _Reduced.apply(of, grad, of.input)
        gradients = dict(zip(_DIFFERENTIABLE, results, strict=True))
        return tuple(gradients.get(n) if wanted[n] else None for n in names(_FORWARD))


class _Reduced(torch.autograd.Function):
    """The gradients where statistics are those of several processes. Takes one collective."""

    @staticmethod
    def forward(ctx: Any, of: Arguments, *differentiable: Tensor) -> tuple[Tensor, ...]:
        functional = torch.ops._c10d_functional
        sums = call("batch_norm_backward_sums", of)
        total = torch.cat([sums.flatten(), sums.new_full((1,), of.count)])
        total = functional.wait_tensor(functional.all_reduce(total, "sum", of.group))
        of.means = (total[:-1] / total[-1]).view(2, -1)
        of.output_mask = of.output_mask[:2]
        gradients = call("batch_norm_backward_input", of)
        return *gradients, sums[1].clone(), sums[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("memsave_ext.SyncBatchNorm does not support double backward")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            results: tuple[Tensor, ...] = getattr(torch.ops.memsave_ext, _BACKWARD)(*args)
        _save(ctx, read(_BACKWARD, args))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        of = _unpack(ctx)
        create_graph = torch.is_grad_enabled()
        sources: dict[str, Tensor] = {}
        with torch.enable_grad():
            for name in ("grad", *_DIFFERENTIABLE):
                if (tensor := getattr(of, name)) is not None:
                    # Differentiates with respect to aliases: where one source depends on another,
                    # that path lies outside of this function and must not be counted.
                    sources[name] = torch.ops.aten.alias(tensor)
                    setattr(of, name, sources[name])
            pairs = [
                (output, grad)
                for output, grad, asked in zip(
                    fallback.gradients(of), grads, of.output_mask, strict=True
                )
                if asked and grad is not None and output.requires_grad
            ]
        sources = {name: tensor for name, tensor in sources.items() if tensor.requires_grad}
        results: dict[str, Tensor | None] = {}
        if pairs and sources:
            outputs, root_grads = zip(*pairs, strict=True)
            second = torch.autograd.grad(
                outputs,
                list(sources.values()),
                root_grads,
                create_graph=create_graph,
                allow_unused=True,
            )
            results = dict(zip(sources, second, strict=True))
        return tuple(map(results.get, names(_BACKWARD)))
