"""Autograd of the batch_norm operators, as csrc/batch_norm/autograd.cpp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import batch_norm

ops = torch.ops.memsave_ext


def batch_norm_forward(*args: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _Forward.apply(*args)
    return result


def batch_norm_backward(*args: Any) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = _Backward.apply(*args)
    return result


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            output, statistics = ops.batch_norm_forward(*args)
        input, weight, bias, residual, _, _, _, training, _, eps, activation, slope, group = args
        if activation == "none":
            bias = residual = None
        ctx.save_for_backward(input, statistics, weight, bias, residual)
        ctx.training, ctx.eps, ctx.activation = training, eps, (activation, slope)
        ctx.group = group
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return output, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Any:
        if grad is None:
            return (None,) * 13
        mask = [ctx.needs_input_grad[i] for i in (0, 3, 1, 2)]
        if ctx.group is not None:
            results = _Reduced.apply(ctx, mask, grad, *ctx.saved_tensors)
        else:
            input, statistics, weight, bias, residual = ctx.saved_tensors
            results = ops.batch_norm_backward(
                grad, input, weight, bias, residual, statistics, ctx.training, ctx.eps,
                *ctx.activation, mask,
            )  # fmt: skip
        of_input, of_residual, of_weight, of_bias = (
            result if wanted else None for result, wanted in zip(results, mask, strict=True)
        )
        return of_input, of_weight, of_bias, of_residual, *(None,) * 9


class _Reduced(torch.autograd.Function):
    """The gradients where statistics are those of several processes: one collective."""

    @staticmethod
    def forward(
        ctx: Any,
        of: Any,
        mask: list[bool],
        grad: Tensor,
        input: Tensor,
        statistics: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, ...]:
        functional = torch.ops._c10d_functional
        sums = ops.batch_norm_backward_sums(
            grad, input, weight, bias, residual, statistics, *of.activation
        )
        count = sums.new_full((1,), input.numel() // input.shape[1])
        total = functional.all_reduce(torch.cat([sums.flatten(), count]), "sum", of.group)
        total = functional.wait_tensor(total)
        means = (total[:-1] / total[-1]).view(2, -1)
        gradients = ops.batch_norm_backward_input(
            grad, input, weight, bias, residual, statistics, means, *of.activation, mask[:2]
        )
        return *gradients, sums[1].clone(), sums[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("memsave_ext.SyncBatchNorm does not support double backward")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            results: tuple[Tensor, ...] = ops.batch_norm_backward(*args)
        ctx.save_for_backward(*args[:6])
        ctx.options, ctx.output_mask = args[6:10], args[10]
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        training, eps, activation, slope = ctx.options
        create_graph = torch.is_grad_enabled()
        sources: list[Any]
        with torch.enable_grad():
            # Aliases, so that a path from one of them to another outside of here is not counted.
            sources = [
                None if t is None else torch.ops.aten.alias(t) for t in ctx.saved_tensors[:5]
            ]
            statistics = ctx.saved_tensors[5]
            first = batch_norm.gradients(
                sources[0], sources[1], sources[2], sources[3], sources[4], statistics, training,
                eps, activation, slope,
            )  # fmt: skip
            pairs = [
                (output, grad)
                for output, grad, asked in zip(first, grads, ctx.output_mask, strict=True)
                if asked and grad is not None and output.requires_grad
            ]
        wanted = [i for i, t in enumerate(sources) if t is not None and t.requires_grad]
        results: list[Tensor | None] = [None] * 11
        if pairs and wanted:
            outputs, root_grads = zip(*pairs, strict=True)
            second = torch.autograd.grad(
                outputs,
                [sources[i] for i in wanted],
                root_grads,
                create_graph=create_graph,
                allow_unused=True,
            )
            for i, gradient in zip(wanted, second, strict=True):
                results[i] = gradient
        return tuple(results)
